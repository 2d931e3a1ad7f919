"""Draw the schedules of a pipeline as text, as tools/plan/drawing.py describes it."""

import string

from parallelisms.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    bubble,
    least_microbatches,
    placement,
    table,
    timeline,
)

MARKS = {
    FORWARD: string.digits[1:],
    BACKWARD: string.ascii_uppercase,
    BACKWARD_INPUT: string.ascii_lowercase,
}


def units(action: Action) -> float:
    """Return the time of an action in the drawing."""
    return 2.0 if action.kind == BACKWARD else 1.0


def drawing(schedule: str, ranks: int, microbatches: int) -> str:
    """Draw a title and a row for each rank. Microbatches have one digit each, so there are at most
    9."""
    if microbatches < (least := least_microbatches(schedule, ranks)):
        return f"{schedule}: needs at least {least} microbatches"
    stages = placement(schedule, ranks)
    played = timeline(table(schedule, ranks, 0, microbatches), stages, units)
    width = int(max(actions[-1][2] for actions in played))
    rows = [f"{schedule}: bubble {bubble(played):.1%}"]
    for rank, actions in enumerate(played):
        row = ["."] * width
        for action, start, stop in actions:
            mark = "=" if action.kind == BACKWARD_WEIGHT else MARKS[action.kind][action.microbatch]
            row[int(start) : int(stop)] = mark * int(stop - start)
        rows.append(f"  {rank} {''.join(row)}")
    return "\n".join(rows)
