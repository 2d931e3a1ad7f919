"""Configurations planned and run on this device, side by side: time and memory.

    python -m tools.bench.device.planned (planner | lengths) [--seconds 130] [--json out.json]

- planner: the device's rates first, then a dozen different configurations planned with them.
- lengths: two of 8B's layers on one sequence of 32k tokens and more, with cuDNN's attention,
  FlashAttention, documents of 8k, and four of OLMo 3's layers, of which three have windows of 4k.

Each configuration runs in a process of its own: two steps to warm up, three that count (one and one
for very long sequences). While one holds the GPU, the next ones start. The JSON file is written after each, and what does not fit into
--seconds is listed as not run. On a CPU the sizes are small.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import train
from configs.load import load_config
from parallelisms.dp import param_dtype
from tools.bench import harness
from tools.bench.device import measure
from tools.plan.device import Device, measure_cpu
from tools.plan.plan import PlanInputs, make_plan
from training.metrics import peak_flops

GPU = torch.cuda.is_available()
AT_ONCE = 4 if GPU else 1
ONE = "--training.local_batch_size=1 --training.global_batch_size=1"
COMPILED = "--compile.enabled=true"
AC = "--activation_checkpoint.mode"
VOCABULARY = "--model.vocab_size"
OF_8B = f"--model.flavor=8B {VOCABULARY}=32768 --training.param_dtype=bfloat16"
OF_1B = f"--model.flavor=1B --training.param_dtype=bfloat16 {COMPILED}"
MIXTURE = "--model.family=qwen3 --model.flavor=30B-A3B --training.param_dtype=bfloat16"
LAYERS = "--model.n_layers"
LENGTH = "--training.seq_len"
BATCH = "--training.local_batch_size={0} --training.global_batch_size={0}"
PLANNER = {
    "8B, 2 layers, 8k": f"{OF_8B} {COMPILED} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none",
    "8B, 8 layers, 8k, selective": (
        f"{OF_8B} {COMPILED} {LAYERS}=8 {LENGTH}=8192 {ONE} {AC}=selective"
    ),
    "8B, 4 layers, 8k, full": f"{OF_8B} {COMPILED} {LAYERS}=4 {LENGTH}=8192 {ONE} {AC}=full",
    "8B, 4 layers, 2k, batch 4": (
        f"{OF_8B} {COMPILED} {LAYERS}=4 {LENGTH}=2048 {BATCH.format(4)} {AC}=none"
    ),
    "8B, 4 layers, 8k, not compiled": f"{OF_8B} {LAYERS}=4 {LENGTH}=8192 {ONE} {AC}=none",
    "8B, 2 layers, 8k, whole vocabulary": (
        f"{OF_8B} {COMPILED} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none {VOCABULARY}=128256"
    ),
    "1B, 2k, batch 2, selective": f"{OF_1B} {LENGTH}=2048 {BATCH.format(2)} {AC}=selective",
    "1B, 8k, full": f"{OF_1B} {LENGTH}=8192 {ONE} {AC}=full",
    "1B, 4 layers, 8k, batch 2": f"{OF_1B} {LAYERS}=4 {LENGTH}=8192 {BATCH.format(2)} {AC}=none",
    "1B, 4 layers, 2k, batch 1": f"{OF_1B} {LAYERS}=4 {LENGTH}=2048 {ONE} {AC}=none",
    "30B-A3B, 2 layers, 8k": (
        f"{MIXTURE} {LAYERS}=2 {LENGTH}=8192 {ONE} {AC}=none {VOCABULARY}=32768"
    ),
    "30B-A3B, 2 layers, 2k, full": (
        f"{MIXTURE} {LAYERS}=2 {LENGTH}=2048 {BATCH.format(2)} {AC}=full {VOCABULARY}=32768"
    ),
}
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
    (262144, "cuDNN"),
    (262144, "documents"),
    (131072, "windows"),
    (131072, "flash"),
    (262144, "windows"),
    (32768, "flash"),
    (65536, "cuDNN"),
    (32768, "documents"),
    (32768, "windows"),
)
SLOW = 65536  # tokens, from which on one step warms up and one counts
ON_CPU = "--training.param_dtype=float32 --training.seq_len=256 --model.n_layers=2"
SMALL = {
    "batch 1": f"{ON_CPU} {ONE}",
    "batch 2, full": f"{ON_CPU} {BATCH.format(2)} {AC}=full",
    "documents": f"{ON_CPU} {ONE} --data.mask_documents=true",
    "wrong": f"{ON_CPU} {ONE} --training.attention=flash",
}
DOCUMENT = 8192  # tokens of each
COLUMNS = (
    "configuration",
    "step",
    "planned",
    "of it",
    "MFU",
    "TFLOP/s",
    "live GiB",
    "planned GiB",
    "of it",
    "held GiB",
)


def lengths() -> dict[str, str]:
    configurations = {}
    for tokens, kind in LENGTHS:
        size = f"--model.max_seq_len={max(tokens, 131072)} {LENGTH}={tokens}"
        configurations[f"{tokens:,}, {kind}"] = f"{KINDS_OF_ATTENTION[kind]} {LONG} {size}"
    return configurations


SUBJECTS: dict[str, Callable[[], dict[str, str]]] = {"planner": lambda: PLANNER, "lengths": lengths}


def ran(options: list[str], lock: Path) -> dict:
    """Runs in a process of its own. lock: a file that the process that uses the GPU holds."""
    cfg = load_config(options, 1, 1)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.perf_counter()
        job = train.build(cfg)
        t = cfg.training
        shape = (t.global_batch_size // t.local_batch_size, t.local_batch_size, t.seq_len)
        generator = torch.Generator().manual_seed(0)
        batch = {
            name: torch.randint(0, job.args.vocab_size, shape, generator=generator)
            for name in ("tokens", "labels")
        }
        if cfg.data.mask_documents:
            batch["positions"] = (torch.arange(t.seq_len) % DOCUMENT).expand(shape).contiguous()
        step = lambda: train.train_step(job, batch)  # noqa: E731
        rounds, warm_up = (1, 1) if t.seq_len >= SLOW else (3, 2)
        seconds = harness.alternate({"": step}, rounds, warm_up)[""]
        device = job.mesh.device
        live = torch.cuda.max_memory_allocated(device) / 2**30 if GPU else None
        held_gib = torch.cuda.max_memory_reserved(device) / 2**30 if GPU else None
        whole = time.perf_counter() - began
    family, args = train.architecture(cfg)
    flops = family.flops_per_token(args, t.seq_len) * t.global_batch_size * t.seq_len
    rate = flops / statistics.median(seconds)
    name = torch.cuda.get_device_name(device) if GPU else "cpu"
    peak = peak_flops(name, cfg.metrics.peak_tflops, param_dtype(t, device))
    return {
        "seconds": statistics.median(seconds),
        "all": seconds,
        "live": live,
        "held": held_gib,
        "flops": rate,
        "mfu": rate / peak if peak else None,
        "whole": whole,
    }


def planned(options: list[str], device: Device) -> dict:
    """Runs in a process of its own, since it replaces the process group by a fake one."""
    made = make_plan(load_config(options, 1, 1), PlanInputs(1, 1, device, on_gpu=GPU))
    return {"seconds": made.time.seconds, "live": made.live / 2**30}


def answer(subject: str, options: list[str], limit: float, place: str) -> dict:
    """Of `ran` or `planned` in a process; {"why": ...} if it has none."""
    module = [sys.executable, "-m", "tools.bench.device.planned"]
    how = {"capture_output": True, "text": True, "preexec_fn": harness.end_with_parent}
    try:
        done = subprocess.run(
            [*module, subject, "--place", place, *options], timeout=max(1, limit), **how
        )
    except subprocess.TimeoutExpired:
        return {"why": "not run: the seconds were used up"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        memory = [line for line in lines if "out of memory" in line.lower()]
        return {"why": "out of memory" if memory else " ".join(lines[-2:])[-300:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, seen: dict, plan: dict) -> list[str]:
    if "why" in seen:
        return [name, seen["why"], *[""] * (len(COLUMNS) - 2)]
    cells = [name, f"{seen['seconds'] * 1e3:,.1f} ms"]
    if "why" in plan:
        cells += [plan["why"], ""]
    else:
        cells += [
            f"{plan['seconds'] * 1e3:,.1f} ms",
            f"{plan['seconds'] / seen['seconds'] - 1:+.1%}",
        ]
    cells += [f"{seen['mfu']:.1%}" if seen["mfu"] else "-", f"{seen['flops'] / 1e12:,.1f}"]
    if not seen["live"] or "why" in plan:
        return [*cells, "-", "-", "-", "-"]
    error = plan["live"] / seen["live"] - 1
    return [
        *cells,
        f"{seen['live']:.2f}",
        f"{plan['live']:.2f}",
        f"{error:+.2%}",
        f"{seen['held']:.2f}",
    ]


def errors(answers: dict[str, tuple[dict, dict]]) -> str:
    """Median and worst error of time and of memory of all that ran and are planned."""
    both = [pair for pair in answers.values() if not ("why" in pair[0] or "why" in pair[1])]
    said = []
    for what in "seconds", "live":
        far = [abs(plan[what] / seen[what] - 1) for seen, plan in both if seen[what]]
        if far:
            said.append(f"{what}: median {statistics.median(far):.2%}, worst {max(far):.2%}")
    return f"{len(both)} planned and run; error of {'; of '.join(said) or 'nothing'}."


def measured(configurations: dict[str, str], device: Device, seconds: float, report: Callable):
    """Run and plan all, and call `report` after each with what is there."""
    deadline = time.monotonic() + seconds
    answers: dict[str, tuple[dict, dict]] = {}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(AT_ONCE) as pool:
        Path(place, "device.json").write_text(device.model_dump_json())

        def both(name: str) -> tuple[dict, dict]:
            options = configurations[name].split()
            seen = answer("ran", options, deadline - time.monotonic(), place)
            return seen, {} if "why" in seen else answer("planned", options, 60, place)

        waiting = {name: pool.submit(both, name) for name in configurations}
        for name, answered in waiting.items():
            answers[name] = answered.result()
            print(" | ".join(row(name, *answers[name])), flush=True)
            report(answers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=("planner", "lengths", "ran", "planned"))
    parser.add_argument("--seconds", type=float, default=130)
    parser.add_argument("--json")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    if args.subject == "ran":
        print(json.dumps(ran(options, args.place / "gpu")))
        return 0
    if args.subject == "planned":
        device = Device(**json.loads((args.place / "device.json").read_text()))
        print(json.dumps(planned(options, device)))
        return 0
    began = time.monotonic()
    device = measure.measure_gpu() if GPU else measure_cpu()
    print(f"rates: {device} ({time.monotonic() - began:.0f} s)", flush=True)
    if GPU:
        torch.cuda.empty_cache()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

    def report(answers: dict[str, tuple[dict, dict]]) -> None:
        rows = [row(name, *pair) for name, pair in answers.items()]
        numbers = {"answers": answers, "device": device.model_dump(exclude_defaults=True)}
        text = f"Two steps to warm up, median of three; one and one from 65,536 tokens on. {errors(answers)}"
        with open(os.devnull, "w") as nowhere:
            shown, sys.stdout = sys.stdout, nowhere
            try:
                harness.report(
                    f"Planned and run: {args.subject}",
                    list(COLUMNS),
                    rows,
                    text,
                    args.json,
                    numbers,
                )
            finally:
                sys.stdout = shown
        print(text, flush=True)

    configurations = SUBJECTS[args.subject]() if GPU else SMALL
    measured(configurations, device, args.seconds - (time.monotonic() - began), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
