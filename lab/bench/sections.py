"""Time a training step by its sections, compared with this machine's matmul rate: for
`lab.bench device.measure step`.

It runs `train.build`, `train.train_step` and the data path of a run on random tokens. Steps
alternate with one large matmul of the same type, so `of products`, the step's share of the matmul
rate, compares what was measured at the same time; `MFU` is against the data sheet (none for a CPU).
The sections are timed in further steps, with a host-device sync at each boundary. `idle` is the
share of a step in which a GPU runs no kernel, because it waits for the host; `live` is the peak of
its tensors, without the allocator's reserve.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch.profiler import record_function

import train
from configs.load import load_config
from lab.bench import harness
from lab.bench.idle import idle_share, kernel_times
from parallelisms import dp
from parallelisms.mesh import world
from tools.parity import in_memory
from training.metrics import memory_gib, peak_flops

BENCH = (  # for two cores: large enough that matmuls dominate
    "--model.dim=512 --model.n_layers=8 --model.n_heads=8 --model.n_kv_heads=4 "
    "--model.head_dim=64 --model.hidden_dim=1536 "
    "--model.vocab_size=8192 --training.seq_len=512 --training.local_batch_size=8 "
    "--training.global_batch_size=8"
)
LAYERS_1B = (
    "--model.flavor=1B --model.n_layers=2 --model.vocab_size=8192 --training.seq_len=512 "
    "--training.local_batch_size=2 "
    "--training.global_batch_size=2"
)
LAYERS_8B = (
    "--model.flavor=8B --model.n_layers=6 --training.seq_len=8192 --training.local_batch_size=1 "
    "--training.global_batch_size=1 "
    "--training.param_dtype=bfloat16 --activation_checkpoint.mode=selective --compile.enabled=true"
)
SECTIONS = ("data", "forward", "backward", "clip", "optimizer")
COLUMNS = (
    "configuration",
    "median step",
    "tokens/s",
    "GFLOP/s",
    "of products",
    "MFU",
    "peak GiB",
    "live GiB",
    "idle",
    *SECTIONS,
)


@contextmanager
def sections(device: torch.device) -> Iterator[tuple[dict[str, float], Callable[[str], None]]]:
    """Return the seconds of each of SECTIONS, and a function that begins one and ends the one
    before ("" belongs to none).

    The phases of a step begin and end with the `record_function` labels of `train.train_step`.
    """
    seconds = dict.fromkeys((*SECTIONS, ""), 0.0)
    current = {"section": "", "since": time.perf_counter()}

    def begin(section: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[current["section"]] += now - current["since"]
        current.update(section=section, since=now)

    enter = record_function.__enter__
    leave = record_function.__exit__

    def entered(label: record_function) -> record_function:
        if label.name in SECTIONS:
            begin(label.name)
        return enter(label)

    def left(label: record_function, *error: object) -> None:
        leave(label, *error)
        if label.name in SECTIONS:
            begin("")

    with (
        mock.patch.object(record_function, "__enter__", entered),
        mock.patch.object(record_function, "__exit__", left),
    ):
        yield seconds, begin


def one(options: list[str], rounds: int) -> dict:
    """Medians of this process's configuration; every rank of its mesh calls it."""
    cfg = load_config(options, world().size, world().local_size)
    job = train.build(cfg)
    device = job.mesh.device
    t = cfg.training
    ids = np.random.default_rng(0).integers(
        0, job.args.vocab_size, 4 * t.global_batch_size * t.seq_len + 1
    )
    dtype = dp.param_dtype(t, device)
    data = in_memory.batches(cfg, job.mesh, ids.astype(np.uint32))
    steps = iter(range(10**9))
    multiply, matmul_flops = harness.matmul(dtype, device)
    step = lambda: train.train_step(job, data[next(steps)])  # noqa: E731
    timed = harness.alternate({"step": step, "matmul": multiply}, rounds)
    # of the allocator, whose peak this call resets
    memory = memory_gib(device)
    live = None
    idle = None
    del multiply
    with sections(device) as (seconds, begin):
        for _ in range(rounds):
            begin("data")
            batch = data[next(steps)]
            begin("")
            train.train_step(job, batch)
    if device.type == "cuda":
        live = torch.cuda.max_memory_allocated(device) / 2**30
        idle = idle_share(*kernel_times(step))
    tokens = t.global_batch_size * t.seq_len
    seconds_per_step = statistics.median(timed["step"])
    flops, mfu = rate(job, seconds_per_step)
    return {
        "seconds": seconds_per_step,
        "fastest": min(timed["step"]),
        "tokens_per_second": tokens / seconds_per_step,
        "gflops": flops / 1e9,
        "product_gflops": matmul_flops / statistics.median(timed["matmul"]) / 1e9,
        "mfu": mfu,
        "memory_gib": memory,
        "live_gib": live,
        "idle": idle,
        "sections": {name: seconds[name] / rounds for name in SECTIONS},
    }


def rate(job: train.Job, seconds: float) -> tuple[float, float | None]:
    """Return FLOP/s of a GPU in steps of so many seconds, and their share of the data sheet's; None
    if it has none."""
    t = job.cfg.training
    family, args = train.architecture(job.cfg)
    tokens = t.global_batch_size * t.seq_len
    flops = family.flops_per_token(args, t.seq_len) * tokens / seconds / job.mesh.size
    device = job.mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, dtype=dp.param_dtype(t, device))
    return flops, flops / peak if peak else None


def row(name: str, seen: dict) -> list[str]:
    whole = sum(seen["sections"].values())
    return [
        name,
        f"{seen['seconds'] * 1e3:,.0f} ms",
        f"{seen['tokens_per_second']:,.0f}",
        f"{seen['gflops']:,.0f}",
        f"{seen['gflops'] / seen['product_gflops']:.0%} of {seen['product_gflops']:,.0f}",
        f"{seen['mfu']:.1%}" if seen["mfu"] else "-",
        f"{seen['memory_gib']:.2f}",
        f"{seen['live_gib']:.2f}" if seen["live_gib"] else "-",
        "-" if seen["idle"] is None else f"{seen['idle']:.1%}",
        *(f"{seen['sections'][section] / whole:.1%}" for section in SECTIONS),
    ]
