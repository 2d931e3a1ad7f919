"""The schedules of a pipeline as text, one character for each unit of time.

    python -m tools.plan.drawing [--ranks 4] [--microbatches 8]

A row is a rank. A digit is the forward of that microbatch, a capital letter its backward (A:
microbatch 1), which takes two units. Where the backward is split, a small letter is its first half
and = the second half of any microbatch. A dot: the rank waits. `docs/parallelism.md` has these
drawings, and a test compares them.
"""

import argparse

from configs import program
from configs.schema import SCHEDULES


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
    from tools.plan.drawn import drawing  # here, because it imports torch

    print("\n\n".join(drawing(name, args.ranks, args.microbatches) for name in SCHEDULES))


if __name__ == "__main__":
    program.run(main)
