"""A plan in Chrome's trace format, as torch.profiler writes it: Perfetto and chrome://tracing show who
works when, and the memory of the fullest rank.

Rows are the streams of rank 0 (computation, and each kind of collective on each mesh dimension) or the
ranks of a pipeline. Without a pipeline the first, a middle and the last microbatch are shown.
"""

import json
from collections.abc import Iterator

from tools.plan.plan import Plan

Event = dict[str, object]
MICROSECONDS = 1e6


def text(plan: Plan) -> str:
    """Return the plan as JSON."""
    rows: dict[str, int] = {}  # name -> number, in the order of their first bars
    events = []
    for row, name, begin, end in bars(plan):
        number = rows.setdefault(row, len(rows))
        times = {"ts": begin * MICROSECONDS, "dur": (end - begin) * MICROSECONDS}
        events.append({"ph": "X", "pid": 0, "tid": number, "name": name} | times)
    for row, number in rows.items():
        named = {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": row}}
        events.append(named)
    return json.dumps({"traceEvents": [*events, *memory(plan)]})


def bars(plan: Plan) -> Iterator[tuple[str, str, float, float]]:
    """Yield (row, what is done, begin, end) in seconds."""
    if not plan.pipeline:
        for stream, begin, end, place in plan.time.bars:
            yield stream, place, begin, end
        return
    for rank, actions in zip(plan.pipeline.ranks, plan.pipeline.played):
        for action, begin, end in actions:
            name = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
            yield f"rank {rank.number}", name, begin, end


def memory(plan: Plan) -> Iterator[Event]:
    """Yield the live bytes by kind at the fullest moment of each part of the step, when it begins."""
    live = plan.step.before()
    kinds = dict.fromkeys(plan.step.highest_by_kind(), 0)
    for begin, peak, change in parts(plan):
        fullest = kinds | live
        for kind, size in peak.items():
            fullest[kind] += size
        for kind, size in change.items():
            live[kind] = live.get(kind, 0) + size
        ts = begin * MICROSECONDS
        yield {"ph": "C", "pid": 0, "name": "live bytes", "ts": ts, "args": fullest}


def parts(plan: Plan) -> Iterator[tuple[float, dict[str, int], dict[str, int]]]:
    """Yield of each part its begin in seconds, and the bytes by kind that live more or less than
    before: at its fullest moment, and after it."""
    if plan.pipeline:
        for action, begin, _ in plan.pipeline.played[plan.step.number]:
            part = plan.step.costs[action]
            yield begin, part.peak, part.change
        return
    for stretch, begin in zip(plan.step.stretches, plan.time.starts):
        alone = plan.step.of([stretch])
        _, _, peak = alone.peak({})
        yield begin, peak, alone.change()
