"""The schedules of a pipeline as text, one character for each unit of time.

    python -m tools.plan.drawing [--ranks 4] [--micro-batches 8]

A row is a rank. A digit is the forward of that micro-batch, a capital letter its backward (A:
micro-batch 1), which takes two units. Where the backward is split, a small letter is its first half
and = the second half of any micro-batch. A dot: the rank waits. `docs/parallelism.md` has these
drawings, and a test compares them.
"""

import argparse
import string

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded

from configs.schema import SCHEDULES
from parallelisms.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    bubble,
    least_micro_batches,
    placement,
    table,
    timeline,
)

MARKS = {
    FORWARD: string.digits[1:],
    BACKWARD: string.ascii_uppercase,
    BACKWARD_INPUT: string.ascii_lowercase,
}


def drawing(schedule: str, ranks: int, micro_batches: int) -> str:
    """A title and a row for each rank. Micro-batches have one digit each, so there are at most 9."""
    if micro_batches < (least := least_micro_batches(schedule, ranks)):
        return f"{schedule}: needs at least {least} micro-batches"
    stages = placement(schedule, ranks)
    played = timeline(
        table(schedule, ranks, 0, micro_batches),
        stages,
        lambda a: 2.0 if a.kind == BACKWARD else 1.0,
    )
    width = int(max(actions[-1][2] for actions in played))
    rows = [f"{schedule}: bubble {bubble(played):.1%}"]
    for rank, actions in enumerate(played):
        row = ["."] * width
        for action, start, stop in actions:
            mark = "=" if action.kind == BACKWARD_WEIGHT else MARKS[action.kind][action.micro_batch]
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
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, at most 9 (8)")
    args = parser.parse_args(argv)
    if args.ranks < 1 or not 1 <= args.micro_batches <= 9:
        parser.error(
            "--ranks must be at least 1, and --micro-batches 1 to 9, because each is drawn as one "
            "digit"
        )
    print("\n\n".join(drawing(name, args.ranks, args.micro_batches) for name in SCHEDULES))


if __name__ == "__main__":
    main()
