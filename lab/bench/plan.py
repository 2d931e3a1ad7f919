"""Measure the error of `tools.plan`: against TorchTitan's published runs, and against steps
measured on this machine.

    python -m lab.bench plan published [--split] [--calibrate] [--svg OUT.svg]
    python -m lab.bench plan vs_published
    python -m lab.bench plan torchtitan [--device configs-of-yours.toml]
    python -m lab.bench plan here [--rounds 15]

`published`: all runs of `published.toml` with their plans, by `lab/bench/published.py`.

`vs_published`: this trainer's plan against the fastest published runs
(`lab/bench/vs_published.py`).

`torchtitan`: with memory, rows of TorchTitan's tables for Llama 3.1 on H100s that our parallelisms cover
(bfloat16, FSDP and tensor parallel; not float8, pipeline parallel nor asynchronous tensor
parallel), and their rows with context parallelism, which they published with float8 only. Their
loss keeps whole logits and their selective checkpointing recomputes every second matmul. The trace
uses equivalents of these instead of ours. One calibration for all: the matmul efficiency
that makes the first row's speed right.

`here`: one measured step of one configuration calibrates the matmul rate, the others are predicted;
all on one process.
"""

import argparse
import multiprocessing
import statistics
import sys

import torch

import train
from configs.load import load_config
from configs.schema import InputError
from lab.bench import harness, published, vs_published
from tools.plan import trace
from tools.plan.device import Device, load_device, measure_cpu
from tools.plan.estimate import estimate
from tools.plan.plan import Plan, PlanInputs, make_plan

# github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1, 3) and
# benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md. Eight H100 with 96 GB HBM2e, 2.4 TB/s and
# 500 W to a host, NVLink, 400 Gb/s per GPU between hosts. Sequences of 8,192 tokens. Columns: name,
# GPUs, options, tokens/s per GPU, GiB reserved.
EIGHT = ["configs/llama_8b.toml", "--training.local_batch_size=2"]
SELECTIVE, FULL = (f"--activation_checkpoint.mode={mode}" for mode in ("selective", "full"))
TP8 = "--parallelism.tensor_parallel=8"
EAGER = "--compile.enabled=false"
PUBLISHED = (
    ("8B, FSDP 8", 8, [*EIGHT, SELECTIVE, EAGER, "--training.global_batch_size=16"], 5762, 82.4),
    ("8B, FSDP 8, compiled", 8, [*EIGHT, SELECTIVE, "--training.global_batch_size=16"], 6667, 77.0),
    (
        "8B, FSDP 128",
        128,
        [*EIGHT, SELECTIVE, EAGER, "--training.global_batch_size=256"],
        5605,
        67.0,
    ),
    (
        "8B, FSDP 128, compiled",
        128,
        [*EIGHT, SELECTIVE, "--training.global_batch_size=256"],
        6514,
        62.0,
    ),
    (
        "8B, FSDP 8 x TP 8, compiled",
        64,
        [
            "configs/llama_8b.toml",
            SELECTIVE,
            TP8,
            "--training.local_batch_size=12",
            "--training.global_batch_size=96",
        ],
        4378,
        None,
    ),
    (
        "70B, FSDP 32 x TP 8, compiled",
        256,
        [
            "configs/llama_70b.toml",
            FULL,
            TP8,
            "--training.local_batch_size=16",
            "--training.global_batch_size=512",
        ],
        597.3,
        None,
    ),
)
# Table 2 of the first of these: 8B on 8 GPUs, local batch 1, full checkpointing, compiled, float8.
# Columns: ranks that share a sequence, its tokens, tokens/s per GPU, GiB reserved.
CONTEXT = (
    (1, 32768, 3890, 83.9),
    (2, 65536, 2540, 84.2),
    (4, 131072, 1071, 84.0),
    (8, 262144, 548, 84.5),
)


def like_theirs(options: list[str], gpus: int, device: Device) -> Plan:
    # of "auto" the planner assumes cuDNN's rate, which other stacks' published runs do not show
    theirs = ["--training.param_dtype=bfloat16", "--training.attention=flash"]
    cfg = load_config([*options, *theirs], gpus, 8)

    def make() -> Plan:
        return make_plan(cfg, PlanInputs(gpus, 8, device))

    return published.like_titan(make)


def torchtitan(device: Device) -> None:
    device = device.model_copy(update=published.TITANS_H100)
    first = PUBLISHED[0]
    step = like_theirs(first[2], first[1], device).step
    low = 0.2
    high = 0.95
    tokens = load_config(first[2]).training.seq_len * 2  # of a rank
    for _ in range(20):  # bisection: the matmul efficiency that makes the first row right
        device = device.model_copy(update={"matmul_efficiency": (low + high) / 2})
        speed = tokens / estimate(step, device, 8, compiled=False).seconds
        low, high = (
            (low, device.matmul_efficiency)
            if speed > first[3]
            else (device.matmul_efficiency, high)
        )
    rows = []
    for name, gpus, options, speed, reserved in PUBLISHED:
        p = like_theirs(options, gpus, device)
        ours = p.tokens_per_second / gpus
        live = p.live / 2**30
        memory = (
            [f"{reserved:.1f}", f"{live:.1f}", f"{reserved / live - 1:+.0%}"]
            if reserved
            else ["", f"{live:.1f}", ""]
        )
        error = f"{ours / speed - 1:+.0%}" if name != first[0] else "(calibrates)"
        rows.append([name, f"{speed:,.0f}", f"{ours:,.0f}", error, *memory])
    columns = [
        "Llama 3.1, GPUs",
        "published tokens/s per GPU",
        "planned",
        "error",
        "published GiB reserved",
        "planned GiB live",
        "reserved above live",
    ]
    notes = (
        "H100, 500 W, HBM2e. Calibrated on the first row: matmuls at "
        f"{device.matmul_efficiency:.1%} of the SXM peak."
    )
    harness.report("Planned against TorchTitan's published runs", columns, rows, notes)
    context(device)


def context(device: Device) -> None:
    """Return their rows with context parallelism, by both of our methods."""
    rows = []
    for cp, seq_len, speed, reserved in CONTEXT:
        options = [
            *EIGHT,
            FULL,
            "--training.local_batch_size=1",
            f"--training.global_batch_size={8 // cp}",
            f"--training.seq_len={seq_len}",
            f"--model.max_seq_len={seq_len}",
            f"--parallelism.context_parallel={cp}",
        ]
        for method in ("gather", "ulysses") if cp > 1 else ("gather",):
            p = like_theirs(
                [*options, f"--parallelism.context_parallel_method={method}"], 8, device
            )
            ours = p.tokens_per_second / 8
            collectives = [line for (dim, _), line in p.time.lines.items() if dim == "cp"]
            rows.append(
                [
                    f"FSDP {8 // cp} x CP {cp}",
                    f"{seq_len:,}",
                    method if cp > 1 else "",
                    f"{speed:,}",
                    f"{ours:,.0f}",
                    f"{ours / speed - 1:+.0%}",
                    f"{sum(line.exposed for line in collectives) / p.time.seconds:.1%}",
                    f"{reserved:.1f}",
                    f"{p.live / 2**30:.1f}",
                ]
            )
    columns = [
        "8B, 8 GPUs",
        "tokens",
        "method",
        "published tokens/s per GPU (float8)",
        "planned (bfloat16)",
        "error",
        "step that waits for cp",
        "published GiB reserved",
        "planned GiB live",
    ]
    harness.report(
        "Planned against TorchTitan's published runs with context parallelism",
        columns,
        rows,
        "The same calibration.",
    )


HERE = (  # the first calibrates: name, options
    ("debug, batch 8 x 256", []),
    (
        "batch 2 x 1024",
        [
            "--training.local_batch_size=2",
            "--training.global_batch_size=2",
            "--training.seq_len=1024",
        ],
    ),
    ("3 layers", ["--model.n_layers=3"]),
    ("12 layers", ["--model.n_layers=12"]),
    ("width 384", ["--model.dim=384", "--model.head_dim=48", "--model.hidden_dim=1024"]),
    ("vocabulary 512", ["--model.vocab_size=512", "--data.tokenizer=bytes"]),
    ("full checkpointing", [FULL]),
    ("selective checkpointing", [SELECTIVE]),
    ("accumulation 4", ["--training.local_batch_size=2"]),
)


def planned_here(options: list[str], device: Device) -> float:
    """Return the planned seconds of a step on this machine."""
    torch.set_num_threads(1)  # of this process, which only traces
    return make_plan(
        load_config(options, 1, 1), PlanInputs(1, 1, device, on_gpu=False)
    ).time.seconds


def quietest(measured: list[Device]) -> Device:
    """Return the best of each rate, which is that of the undisturbed machine; the median of numbers
    that are the difference of two measurements."""
    peak = max(d.peak_tflops * d.matmul_efficiency for d in measured)
    attention = max(d.peak_tflops * d.attention_efficiency for d in measured)
    numbers = {"peak_tflops": peak, "attention_efficiency": attention / peak}
    for name in "memory_gb_per_s", "host_gb_per_s":
        numbers[name] = max(getattr(d, name) for d in measured)
    for name in "attention_backward", "attention_row_ns", "overhead_us", "policy_us":
        numbers[name] = statistics.median(getattr(d, name) for d in measured)
    return measured[0].model_copy(update=numbers)


def here(rounds: int) -> None:
    # before any thread starts, and apart: its mesh is a fake
    with multiprocessing.get_context("fork").Pool(1) as apart:
        device = quietest([measure_cpu() for _ in range(4)])
        predicted = {name: apart.apply(planned_here, (options, device)) for name, options in HERE}
    steps = {}
    for name, options in HERE:
        job = train.build(load_config(options, 1, 1))
        batch = trace.batch_of(job, job.cfg.training.microbatches(1))
        steps[name] = lambda job=job, batch=batch: train.train_step(job, batch)
    times = harness.alternate(steps, rounds)
    first = HERE[0][0]
    # the others by their ratio to it, round by round: the machine is noisy
    calibration = statistics.median(times[first])
    factor = calibration / predicted[first]
    seconds = {name: calibration * harness.ratio(times, name, first) for name, _ in HERE}
    rows = [
        [
            name,
            f"{seconds[name] * 1e3:.0f} ms",
            f"{predicted[name] * factor * 1e3:.0f} ms",
            f"{predicted[name] * factor / seconds[name] - 1:+.0%}"
            if name != first
            else "(calibrates)",
        ]
        for name, _ in HERE
    ]
    worst = max(
        (abs(predicted[name] * factor / seconds[name] - 1) for name, _ in HERE), default=0.0
    )
    notes = (
        f"Products {device.peak / 1e9:.0f} GFLOP/s, copies {device.host_gb_per_s:.0f} GB/s, an "
        "operator "
        f"{device.overhead_us:.1f} us, measured in the same run; one factor for all, "
        f"{factor:.2f}, makes the first row "
        f"right. Medians of {rounds} alternating rounds, each step against the first one's of its "
        "round; the largest "
        f"error is {worst:.0%}."
    )
    columns = ["debug model but", "measured", "planned", "error"]
    harness.report("Planned against measured steps of this machine", columns, rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("published", "vs_published", "torchtitan", "here"))
    parser.add_argument("--device", default="h100")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", default="", help="published, vs_published: runs with this in name or class"
    )
    parser.add_argument("--split", action="store_true", help="published: the held-out third apart")
    parser.add_argument(
        "--calibrate", action="store_true", help="published: fit the efficiencies again"
    )
    parser.add_argument(
        "--keep", default="", metavar="FOLDER", help="published: keeps traces, or reads those kept"
    )
    parser.add_argument(
        "--stack", default="", help="published: plan all as this row of tools/plan/stacks.toml"
    )
    parser.add_argument(
        "--meshes", action="store_true", help="published: what the search chooses, on one host"
    )
    parser.add_argument("--svg", metavar="OUT.svg", help="published: planned over published, drawn")
    args = parser.parse_args()
    if args.what == "published":
        try:
            published.report(args)
        except InputError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
    elif args.what == "vs_published":
        vs_published.report(args.only)
    elif args.what == "torchtitan":
        torchtitan(load_device(args.device))
    else:
        here(args.rounds)
