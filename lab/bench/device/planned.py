"""Plan configurations and run them on this device, to compare time and memory.

    python -m lab.bench device.planned (planner | lengths) [--seconds 80] [--json out.json]

- planner: the device's rates first, then different configurations planned with them.
- lengths: two of 8B's layers on one sequence of 32k tokens and more, with cuDNN's attention,
  FlashAttention, documents of 8k, and four of OLMo 3's layers, of which three have windows of 4k.

Each configuration runs in a separate process: two steps to warm up, three that count (one and one
for very long sequences). As many as fit into memory together are built and compiled at the same
time, and then timed one after the other. The JSON file is written after each, and configurations
that do not fit into --seconds are listed as not run. On a CPU the sizes are small.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from typing import TextIO

import torch
from torch import Tensor

import train
from configs.load import load_config
from configs.schema import Config
from lab.bench import harness, sections
from lab.bench.device import measure
from lab.bench.isolated import LATE, Contender
from tools.plan.device import Device, measure_cpu
from tools.plan.plan import PlanInputs, make_plan

GPU = torch.cuda.is_available()
ONE = "--training.local_batch_size=1 --training.global_batch_size=1"
COMPILED = "--compile.enabled=true"
AC = "--activation_checkpoint.mode"
VOCABULARY = "--model.vocab_size"
OF_8B = f"--model.flavor=8B {VOCABULARY}=32768 --training.param_dtype=bfloat16"
OF_1B = f"--model.flavor=1B --training.param_dtype=bfloat16 {COMPILED}"
MIXTURE = f"--model.family=qwen3 --model.flavor=30B-A3B {VOCABULARY}=32768 --training.param_dtype=bfloat16"
LAYERS = "--model.n_layers"
LENGTH = "--training.seq_len"
BATCH = "--training.local_batch_size={0} --training.global_batch_size={0}"
PLANNER = (  # those of a line fit 80 GB together
    {
        "8B, 2 layers, 8k": f"{OF_8B} {COMPILED} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none",
        "8B, 2 layers, 2k, batch 4, full": (
            f"{OF_8B} {COMPILED} {LAYERS}=2 {LENGTH}=2048 {BATCH.format(4)} {AC}=full"
        ),
        "1B, 4 layers, 2k": f"{OF_1B} {LAYERS}=4 {LENGTH}=2048 {ONE} {AC}=none",
        "1B, 2 layers, 8k, full": f"{OF_1B} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=full",
        "30B-A3B, 1 layer, 8k": f"{MIXTURE} {LAYERS}=1 {LENGTH}=8192 {ONE} {AC}=none",
    },
    {
        "8B, 4 layers, 8k, selective": (
            f"{OF_8B} {COMPILED} {LAYERS}=4 {LENGTH}=8192 {ONE} {AC}=selective"
        ),
        "8B, 2 layers, 8k, not compiled": f"{OF_8B} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none",
        "1B, 4 layers, 8k, batch 2, selective": (
            f"{OF_1B} {LAYERS}=4 {LENGTH}=8192 {BATCH.format(2)} {AC}=selective"
        ),
    },
    {
        "8B, 2 layers, 8k, whole vocabulary": (
            f"{OF_8B} {COMPILED} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none {VOCABULARY}=128256"
        ),
        "30B-A3B, 2 layers, 2k, batch 4, full": (
            f"{MIXTURE} {LAYERS}=2 {LENGTH}=2048 {BATCH.format(4)} {AC}=full"
        ),
    },
    {
        "8B, 8 layers, 8k, selective": (
            f"{OF_8B} {COMPILED} {LAYERS}=8 {LENGTH}=8192 {ONE} {AC}=selective"
        ),
        "1B, 2k, batch 2": f"{OF_1B} {LENGTH}=2048 {BATCH.format(2)} {AC}=none",
    },
)
LONG = f"{VOCABULARY}=32768 --training.param_dtype=bfloat16 {ONE} {COMPILED} {AC}=full"
KINDS_OF_ATTENTION = {
    "cuDNN": f"--model.flavor=8B --training.attention=cudnn {LAYERS}=2",
    "flash": f"--model.flavor=8B --training.attention=flash {LAYERS}=2",
    "documents": f"--model.flavor=8B --data.mask_documents=true {LAYERS}=2",
    "windows": f"--model.family=olmo2 --model.flavor=3-7B-8k {LAYERS}=4",
}
LENGTHS = (  # the most valuable first
    (32768, "cuDNN"),
    (131072, "cuDNN"),
    (131072, "documents"),
    (196608, "cuDNN"),
    (131072, "windows"),
    (131072, "flash"),
    (196608, "documents"),
    (262144, "cuDNN"),
    (32768, "flash"),
    (65536, "cuDNN"),
    (32768, "documents"),
    (32768, "windows"),
)
SLOW = 65536  # tokens, from which on one step warms up and one counts
ON_CPU = "--training.param_dtype=float32 --training.seq_len=256 --model.n_layers=2"
SMALL = (
    {"batch 1": f"{ON_CPU} {ONE}", "wrong": f"{ON_CPU} {ONE} --training.attention=flash"},
    {"batch 2, full": f"{ON_CPU} {BATCH.format(2)} {AC}=full"},
    {"documents": f"{ON_CPU} {ONE} --data.mask_documents=true"},
)
PLANS_AT_ONCE = 6 if GPU else 1
OUT_OF_MEMORY = 3  # exit code of a process that runs one
DOCUMENT = 8192  # tokens of each
COLUMNS = (
    "configuration",
    "step",
    "planned step",
    "error",
    "MFU",
    "TFLOP/s",
    "live GiB",
    "planned GiB",
    "error",
    "held GiB",
)


def lengths() -> list[dict[str, str]]:
    """Return the long configurations. Each has the GPU for itself."""
    configurations = []
    for tokens, kind in LENGTHS:
        size = f"--model.max_seq_len={max(tokens, 131072)} {LENGTH}={tokens}"
        configurations.append({f"{tokens:,}, {kind}": f"{KINDS_OF_ATTENTION[kind]} {LONG} {size}"})
    return configurations


def ran(options: list[str]) -> dict:
    """Return the result of `timed`. Ends the process with OUT_OF_MEMORY where memory is short."""
    answers = sys.stdout
    try:
        with redirect_stdout(sys.stderr):  # a run may print
            return timed(options, answers)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(error, file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)


def out_of_memory(error: Exception) -> bool:
    """Return True also for the CPU's allocator, whose error is an ordinary RuntimeError, and for
    cuBLAS's."""
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in words)


def timed(options: list[str], answers: TextIO) -> dict:
    """Time a configuration, in a separate process, which waits for a line before it builds, says
    that it is ready, and waits for a line before it times its steps."""
    cfg = load_config(options, 1, 1)
    sys.stdin.readline()
    job = train.build(cfg)
    batch = batch_of(cfg, job.args.vocab_size)
    step = lambda: train.train_step(job, batch)  # noqa: E731
    rounds, warm_up = (1, 1) if cfg.training.seq_len >= SLOW else (3, 2)
    harness.alternate({"": step}, 0, warm_up)
    print("{}", file=answers, flush=True)  # it is ready
    sys.stdin.readline()
    seconds = harness.alternate({"": step}, rounds, 0)[""]
    median = statistics.median(seconds)
    flops, mfu = sections.rate(job, median)
    return {
        "seconds": median,
        "all": seconds,
        "live": torch.cuda.max_memory_allocated() / 2**30 if GPU else None,
        "held": torch.cuda.max_memory_reserved() / 2**30 if GPU else None,
        "flops": flops,
        "mfu": mfu,
    }


def batch_of(cfg: Config, vocabulary: int) -> dict[str, Tensor]:
    """Return one global batch of random tokens, in microbatches; with documents of DOCUMENT tokens
    where they count."""
    t = cfg.training
    shape = (t.global_batch_size // t.local_batch_size, t.local_batch_size, t.seq_len)
    generator = torch.Generator().manual_seed(0)
    names = "tokens", "labels"
    batch = {name: torch.randint(0, vocabulary, shape, generator=generator) for name in names}
    if cfg.data.mask_documents:
        batch["positions"] = (torch.arange(t.seq_len) % DOCUMENT).expand(shape).contiguous()
    return batch


def planned(options: list[str], device: Device) -> dict:
    """Plan, in a separate process, since it replaces the process group by a fake one."""
    made = make_plan(load_config(options, 1, 1), PlanInputs(1, 1, device, on_gpu=GPU))
    gib = {"live": made.live / 2**30, "needed": made.needed / 2**30}
    return {"seconds": made.time.seconds, **gib}


def started(options: str) -> Contender:
    """Start a process that will run one configuration."""
    return Contender(["-m", "lab.bench", "device.planned", "ran", *options.split()])


def answer(runner: Contender, deadline: float) -> dict:
    """Return its result, or the reason why there is none, when its process has ended."""
    seen = runner.answer(deadline)
    code = runner.process.wait()
    if not runner.why:
        return seen
    if runner.why.startswith(LATE):
        return {"why": "not run: the seconds were used up"}
    if code in (OUT_OF_MEMORY, -signal.SIGKILL):  # that of Linux, if the host's memory is full
        return {"why": "out of memory"}
    return {"why": runner.why[-300:]}


def plan_apart(options: str, device: Device) -> dict:
    """Return the answer of `planned`, from a separate process."""
    try:
        numbers = device.model_dump_json()
        return harness.child("device.planned", "planned", f"--device={numbers}", *options.split())
    except RuntimeError as error:
        return {"why": str(error).strip().splitlines()[-1][:300]}


def row(name: str, seen: dict, plan: dict) -> list[str]:
    """Return the row of one configuration. One that did not run has its reason instead of its step,
    and still its plan."""
    has_run = "why" not in seen
    is_planned = "why" not in plan
    has_both = has_run and is_planned
    return [
        name,
        f"{seen['seconds'] * 1e3:,.1f} ms" if has_run else seen["why"],
        f"{plan['seconds'] * 1e3:,.1f} ms" if is_planned else plan["why"],
        error(plan["seconds"], seen["seconds"]) if has_both else "",
        f"{seen['mfu']:.1%}" if has_run and seen["mfu"] else "",
        f"{seen['flops'] / 1e12:,.1f}" if has_run else "",
        f"{seen['live']:.2f}" if has_run and GPU else "",
        f"{plan['live']:.2f}" if is_planned else "",
        error(plan["live"], seen["live"]) if has_both and GPU else "",
        f"{seen['held']:.2f}" if has_run and GPU else "",
    ]


def error(planned: float, measured: float) -> str:
    return f"{planned / measured - 1:+.2%}"


def errors(answers: dict[str, tuple[dict, dict]]) -> str:
    """Return median and worst error of time and of memory of all that ran and are planned."""
    both = [pair for pair in answers.values() if not ("why" in pair[0] or "why" in pair[1])]
    said = []
    for what in "seconds", "live":
        far = [abs(plan[what] / seen[what] - 1) for seen, plan in both if seen[what]]
        if far:
            said.append(f"{what}: median {statistics.median(far):.2%}, worst {max(far):.2%}")
    return f"{len(both)} planned and run; error of {'; of '.join(said) or 'nothing'}."


def measured(
    lines: Sequence[dict[str, str]], seconds: float, subject: str, path: str | None
) -> None:
    """Run and plan all, and write the report after each."""
    deadline = time.monotonic() + seconds
    waiting = [{name: started(options) for name, options in line.items()} for line in lines]
    device = measure.measure_gpu() if GPU else measure_cpu()  # while they start
    print(f"rates: {device}", flush=True)
    if GPU:
        torch.cuda.empty_cache()
    answers: dict[str, tuple[dict, dict]] = {}
    with ThreadPoolExecutor(PLANS_AT_ONCE) as pool:
        plans = {
            name: pool.submit(plan_apart, options, device)
            for line in lines
            for name, options in line.items()
        }
        for runners in waiting:
            for name, seen in in_turn(runners, deadline):
                answers[name] = seen, plans[name].result()
                print(" | ".join(row(name, *answers[name])), flush=True)
                report(subject, answers, device, path)


def in_turn(runners: dict[str, Contender], deadline: float) -> Iterator[tuple[str, dict]]:
    """Name and answer of each of these runners, which are built together and timed in turn."""
    for runner in runners.values():
        runner.ask("build")
    for runner in runners.values():
        runner.answer(deadline)
    for name, runner in runners.items():
        runner.ask("time the steps")
        yield name, answer(runner, deadline)


def report(
    subject: str, answers: dict[str, tuple[dict, dict]], device: Device, path: str | None
) -> None:
    rows = [row(name, *pair) for name, pair in answers.items()]
    numbers = {"answers": answers, "device": device.model_dump(exclude_defaults=True)}
    notes = (
        "Two steps to warm up, the median of three; one and one from 65,536 tokens on. "
        f"{errors(answers)}"
    )
    harness.report(f"Planned and run: {subject}", list(COLUMNS), rows, notes, path, numbers)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("subject", choices=("planner", "lengths", "ran", "planned"))
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    if args.subject == "ran":
        print(json.dumps(ran(options)))
    elif args.subject == "planned":
        print(json.dumps(planned(options, Device(**json.loads(args.device)))))
    else:
        lines = {"planner": PLANNER, "lengths": lengths()}[args.subject]
        measured(lines if GPU else SMALL, args.seconds, args.subject, args.json)
    return 0
