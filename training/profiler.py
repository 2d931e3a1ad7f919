"""A Chrome trace of a few steps, and CUDA's allocator history: where the time and the memory go."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from configs import schema


@contextmanager
def profiler(cfg: schema.Profiler, folder: Path, rank: int) -> Iterator[Any]:
    """Gives an object whose step() is called at the end of every step; with `enabled = false` that does nothing.

    Writes `<folder>/profile/rank-00000.json.gz` (chrome://tracing, ui.perfetto.dev) after the steps asked for, which
    are counted from the start of this process: a resumed run can be profiled like a fresh one. A run that ends within
    them writes those it has. With `memory_snapshot` also `rank-00000.memory.pickle` (pytorch.org/memory_viz), at the
    same moment or when memory runs out; on CPU there is nothing to record, and the log says so.
    """
    if not cfg.enabled:
        yield SimpleNamespace(step=lambda: None)
        return
    say, cuda = logging.getLogger("plumbline"), torch.cuda.is_available()
    where = folder / "profile" / f"rank-{rank:05d}"
    where.parent.mkdir(parents=True, exist_ok=True)
    remember = cfg.memory_snapshot and cuda
    if cfg.memory_snapshot and not cuda:
        say.warning("profiler.memory_snapshot = true: only CUDA's allocator keeps a history, so none is written here")

    def save_memory() -> None:
        torch.cuda.memory._dump_snapshot(f"{where}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)

    def save(trace: profile) -> None:
        trace.export_chrome_trace(f"{where}.json.gz")
        if remember:
            save_memory()
        say.info(f"profile of up to {cfg.steps} steps from step {cfg.start_step} of this process on: {where}.json.gz")

    warm_up = min(cfg.start_step - 1, 1)  # the tracer's own start-up must not be in the first step that is kept
    steps = schedule(skip_first=cfg.start_step - 1 - warm_up, wait=0, warmup=warm_up, active=cfg.steps, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    if remember:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        with profile(
            activities=activities, schedule=steps, on_trace_ready=save, record_shapes=True, acc_events=True
        ) as trace:
            yield trace
    except torch.OutOfMemoryError:
        if remember:
            save_memory()
        raise
