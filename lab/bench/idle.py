"""Measure how long a GPU runs no kernel during a step, because it waits for the host: read from
PyTorch's profiler."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events in a trace of Kineto
Times = list[tuple[float, float]]  # begin and end, in microseconds, in any order


def kernel_times(
    run: Callable[[], object],
    activity: ProfilerActivity = ProfilerActivity.CUDA,
    categories: Iterable[str] = ON_A_GPU,
) -> tuple[Times, float]:
    """Return the times of kernels during the second of two calls of `run`, and the microseconds
    from the first one's begin to the last one's end. The host's own events are not recorded,
    because recording them would make the host slower."""
    events = traced(run, [activity])
    kernels = [event for event in events if event.get("cat") in set(categories)]
    times = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in kernels]
    begin = min((begin for begin, _ in times), default=0)
    end = max((end for _, end in times), default=0)
    return times, end - begin


def traced(run: Callable[[], object], activities: list[ProfilerActivity]) -> list:
    """Return the events of the second of two calls of `run`. Where the
    profiler has no permission there are none, and stderr says why: other measurements must not be
    lost."""
    run()
    synchronise()
    try:
        with profile(activities=activities, acc_events=True) as recorded:
            run()
            synchronise()
    except RuntimeError as error:
        print(f"no times of kernels: {error}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def idle_share(times: Times, whole: float) -> float | None:
    """Return the share of `whole` microseconds in which none of the kernels ran; None if nothing
    was recorded. Kernels of several streams overlap, so their times are not just added."""
    if not whole:
        return None
    busy = 0.0
    reached = float("-inf")
    for begin, end in sorted(times):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / whole
