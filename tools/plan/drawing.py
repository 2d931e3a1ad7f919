"""The schedules of a pipeline as text, one character for each unit of time.

    python -m tools.plan.drawing [--ranks 4] [--microbatches 8]

A row is a rank. A digit is the forward of that microbatch, a capital letter its backward (A:
microbatch 1), which takes two units. Where the backward is split, a small letter is its first half
and = the second half of any microbatch. A dot: the rank waits. `docs/parallelism.md` has these
drawings, and a test compares them.
"""

import argparse
import string

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded

from configs import program
from configs.schema import SCHEDULES
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan.drawing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, at most 9 (8)")
    args = parser.parse_args(argv)
    if args.ranks < 1 or not 1 <= args.microbatches <= 9:
        parser.error(
            "--ranks must be at least 1, and --microbatches 1 to 9, because each is drawn as one "
            "digit"
        )
    print("\n\n".join(drawing(name, args.ranks, args.microbatches) for name in SCHEDULES))


if __name__ == "__main__":
    program.run(main)
