"""The schedules of a pipeline as text, one character for each unit of time.

    python -m tools.plan.drawing [--ranks 4] [--microbatches 8]

A row is a rank. A digit is the forward of that microbatch, a capital letter its backward (A:
microbatch 1), which takes two units. Where the backward is split, a small letter is its first half
and = the second half of any microbatch. A dot: the rank waits. `docs/parallelism.md` has these
drawings, and a test compares them.
"""

import argparse
import string

from configs import program
from configs.schema import SCHEDULES

MARKS = {  # kind of action -> a mark for each microbatch
    "forward": string.digits[1:],
    "backward": string.ascii_uppercase,
    "backward_input": string.ascii_lowercase,
    "backward_weight": "=" * 9,
}


def drawing(schedule: str, ranks: int, microbatches: int) -> str:
    """Draw a title and a row for each rank. Microbatches have one digit each, so there are at most
    9."""
    from parallelisms import schedules  # here, because it imports torch

    least = schedules.least_microbatches(schedule, ranks)
    if microbatches < least:
        return f"{schedule}: needs at least {least} microbatches"
    played = schedules.timeline(
        schedules.table(schedule, ranks, 0, microbatches),
        schedules.placement(schedule, ranks),
        lambda action: 2.0 if action.kind == schedules.BACKWARD else 1.0,
    )
    width = int(max(actions[-1][2] for actions in played))
    rows = [f"{schedule}: bubble {schedules.bubble(played):.1%}"]
    for rank, actions in enumerate(played):
        row = ["."] * width
        for action, start, stop in actions:
            mark = MARKS[action.kind][action.microbatch]
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
            "--ranks must be at least 1, and --microbatches 1 to 9: each is drawn as one digit"
        )
    print("\n\n".join(drawing(name, args.ranks, args.microbatches) for name in SCHEDULES))


if __name__ == "__main__":
    program.run(main)
