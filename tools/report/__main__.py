"""A run to look at: one HTML page with its curves, starts, failures, samples and configuration.

    python -m tools.report runs/before runs/after --out runs/report.html
    python -m tools.report runs/before --picture loss.svg

Several runs are drawn over each other. The page needs no server and no network, and reads well on
a phone. Exit code 0: it is written; 2: a folder is no run's or is damaged, said in one sentence.
"""

import argparse
import signal
from pathlib import Path

from configs import program
from tools import outbound
from tools.places import run_folder
from tools.report import picture
from tools.report.page import build
from tools.report.run import read_runs

PAGE = outbound.RUNS / "report.html"


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description="Writes one HTML page about one or more runs."
    )
    parser.add_argument("run", type=run_folder, nargs="+", help="the folder or the URL of a run")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page [%(default)s]")
    parser.add_argument("--picture", type=Path, help="write the losses as this SVG file, too")
    options = parser.parse_args(argv)
    outbound.check_file("--out", options.out)
    runs = read_runs(options.run)
    if options.picture:
        picture.write(options.picture, picture.draw(runs))
    page = build(runs)
    outbound.write("--out", options.out, page)
    if options.picture:
        print(options.picture)
    print(f"{options.out}: {len(page.encode()) / 1000:,.0f} kB")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
