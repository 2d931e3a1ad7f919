"""`python -m lab.tour [FOLDER]` draws the pictures of docs/tour.md from two tiny real runs: four
ranks with a dense model, two ranks with a mixture of experts. It takes half a minute."""

import argparse
import sys
from pathlib import Path

from configs import program
from lab.tour import experts, mesh, step
from lab.tour.run import DENSE, EXPERTS, Seen, run

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"


def pictures(dense: list[Seen], routed: list[Seen]) -> dict[str, str]:
    """Name of the file -> its content."""
    return {
        "mesh.svg": mesh.draw(dense),
        "step.svg": step.draw(dense),
        "experts.svg": experts.draw(routed),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.tour", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="of the pictures")
    folder = parser.parse_args(argv).folder
    drawn = pictures(run(4, DENSE), run(2, EXPERTS))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
