"""The schedules of a pipeline as text, one character for each unit of time.

    python -m tools.plan.drawing [--ranks 4] [--micro-batches 8]

A row is a rank. A digit is the forward of that micro-batch, a capital letter its backward (A: micro-batch 1), which takes two
units. Where the backward is split, a small letter is its first half and = the second half of any micro-batch. A dot: the rank
waits. `docs/parallelism.md` has these drawings, and a test compares them.
"""

import argparse
import string

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded
from configs.schema import SCHEDULES
from parallelisms.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, bubble, placement, table, timeline

MARKS = {FORWARD: string.digits[1:] + string.ascii_letters, BACKWARD: string.ascii_uppercase, BACKWARD_INPUT: string.ascii_lowercase}


def drawing(schedule: str, ranks: int, micro_batches: int) -> str:
    """A title and a row for each rank."""
    stages = placement(schedule, ranks)
    played = timeline(table(schedule, ranks, 0, micro_batches), stages, lambda a: 2.0 if a.kind == BACKWARD else 1.0)
    width = int(max(actions[-1][2] for actions in played))
    rows = [f"{schedule}: bubble {bubble(played):.1%}"]
    for rank, actions in enumerate(played):
        row = ["."] * width
        for action, start, stop in actions:
            mark = "=" if action.kind == BACKWARD_WEIGHT else MARKS[action.kind][action.micro_batch]
            row[int(start) : int(stop)] = mark * int(stop - start)
        rows.append(f"  {rank} {''.join(row)}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    args = parser.parse_args()
    print("\n\n".join(drawing(name, args.ranks, args.micro_batches) for name in SCHEDULES))


if __name__ == "__main__":
    main()
