"""`python -m lab.tour [FOLDER]` draws the pictures of docs/tour.md from two tiny real runs: four
ranks with a dense model, two ranks with a mixture of experts. It takes half a minute."""

import argparse
import sys
from pathlib import Path

from configs import program

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.tour", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="of the pictures")
    folder = parser.parse_args(argv).folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{folder} cannot be made: {error.strerror}")
    from lab.tour.pictures import pictures  # here, because it imports torch
    from lab.tour.run import DENSE, EXPERTS, run

    drawn = pictures(run(4, DENSE), run(2, EXPERTS))
    for name, content in drawn.items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
