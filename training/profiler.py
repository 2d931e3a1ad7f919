"""Record a Chrome trace of a few steps, and CUDA's allocator history."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from configs import schema

STEPS = 3  # of a trace


@contextmanager
def profiler(
    cfg: schema.Profiler, folder: Path, rank: int, first: int = schema.PROFILE_FROM
) -> Iterator[Any]:
    """Yield an object on which the loop calls step() after every training step. It does nothing if
    `enabled` is false. first: the first step of the trace.

    After the requested steps it writes `<folder>/profile/rank-00000.json.gz`, for
    chrome://tracing and ui.perfetto.dev. Steps are counted from the start of this process, so a
    resumed run is profiled like a fresh one. If the run ends before the last of these steps, it
    writes those that it has. `memory_snapshot` adds `rank-00000.memory.pickle` for
    pytorch.org/memory_viz, written at the same time or when memory runs out. A CPU's memory has no
    such history, and the log says so.
    """
    if not cfg.enabled:
        yield SimpleNamespace(step=lambda: None)
        return
    logger, cuda = logging.getLogger("plumbline"), torch.cuda.is_available()
    path = folder / "profile" / f"rank-{rank:05d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    records_memory = cfg.memory_snapshot and cuda
    if cfg.memory_snapshot and not cuda:
        logger.warning(
            "profiler.memory_snapshot = true writes nothing here: only CUDA's allocator keeps a "
            "history"
        )

    def save_memory() -> None:
        torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)

    def save(trace: profile) -> None:
        trace.export_chrome_trace(f"{path}.json.gz")
        if records_memory:
            save_memory()
        logger.info(
            f"profile of up to {STEPS} steps from step {first} of this process on: {path}.json.gz"
        )

    # keeps the tracer's own start-up out of the first step that is kept
    warm_up = min(first - 1, 1)
    skipped = first - 1 - warm_up
    steps = schedule(skip_first=skipped, wait=0, warmup=warm_up, active=STEPS, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    if records_memory:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        with profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=save,
            record_shapes=True,
            acc_events=True,
        ) as trace:
            yield trace
    except torch.OutOfMemoryError:
        if records_memory:
            save_memory()
        raise
