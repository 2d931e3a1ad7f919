"""Measure how long a run waits for data in an object store, where each request takes 50 ms longer.

    python -m lab.bench.stored [--steps 60] [--delay 0.05] [--copies 4] [--json out.json] [--table.key=value ...]

The corpus is Python's standard library, several times over, in tokens of bytes. It is prepared once,
and read by the debug model from the disk and from the store, in turn. The store is the server of the
tests, tests/s3.py, on this machine; it delays every request. Nothing is kept between steps but what
is in memory: data.cache_gb is as good as 0, as in the first epoch of a large corpus.

"wait" is the metric data_wait: the share of a step in which the trainer waits for its batch. The
first step is not counted: there, both start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import configs.cpu  # noqa: F401  before torch

from configs import program
from configs.schema import Data
from data import sources
from data.prepare import prepare
from lab.bench import harness
from tests.s3 import Server, server

URL = "s3://bucket/corpus"


def corpus(folder: Path, copies: int) -> str:
    """Return a prepared folder with so many copies of the standard library."""
    text = folder / "text"
    text.mkdir()
    with open(text / "all.jsonl", "w", encoding="utf-8") as file:
        for copy in range(copies):
            for name, content in sources.documents("stdlib"):
                file.write(json.dumps({"text": f"# {copy}: {name}\n{content}"}) + "\n")
    cfg = Data(source=str(text), tokenizer="bytes", validation_fraction=0.0)
    return prepare(cfg, out=str(folder / "prepared")).folder


def trained(source: str, folder: Path, steps: int, options: Iterable[str]) -> list[dict]:
    """Return the metrics of each step of a run, in a separate process."""
    command = [sys.executable, "train.py", "configs/llama_debug.toml", f"--data.source={source}"]
    command += [
        f"--run.folder={folder}",
        f"--data.cache={folder / 'cache'}",
        "--data.cache_gb=1e-6",
    ]
    command += [f"--training.steps={steps}", "--metrics.interval=1", "--validation.interval=0"]
    command += ["--checkpoint.interval=0", "--debug.sample_tokens=0", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "data_wait" in line]


def row(name: str, lines: list[dict], requests: str) -> tuple[list[str], dict]:
    first, *rest = lines
    waits = [line["data_wait"] for line in rest]
    seconds = statistics.median(line["step_seconds"] for line in rest)
    numbers = {
        "step_seconds": seconds,
        "wait_mean": statistics.fmean(waits),
        "wait_most": max(waits),
        "first_wait_seconds": first["data_wait"] * first["step_seconds"],
    }
    cells = [
        name,
        f"{seconds * 1e3:.0f} ms",
        f"{numbers['wait_mean']:.3%}",
        f"{numbers['wait_most']:.3%}",
        f"{numbers['first_wait_seconds']:.2f} s",
        requests,
    ]
    return cells, numbers


def counted(store: Server) -> str:
    keys = [key for _, key, _ in store.status()["log"]]
    blocks = sum(key.endswith(".bin") for key in keys)
    return f"{len(keys)}, {blocks} of blocks"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--json")
    args, options = parser.parse_known_args()
    rows = []
    numbers = {}
    with tempfile.TemporaryDirectory() as place, server() as store:
        os.environ.update(store.environment)
        disk = corpus(Path(place), args.copies)
        prepare(Data(source=disk), out=URL)
        store.rules({"kind": "stall", "seconds": args.delay})
        for number, (name, source) in enumerate((("disk", disk), ("store", URL)) * 2):
            store.ask("clear", b"")
            lines = trained(source, Path(place, f"run-{number}"), args.steps, options)
            title = f"{name}, run {number // 2 + 1}"
            cells, numbers[title] = row(title, lines, counted(store))
            rows.append(cells)
        size = sum(path.stat().st_size for path in Path(disk).glob("*.bin"))
    notes = (
        f"{args.steps} steps of llama_debug; shards of {size / 1e6:.0f} MB; each request takes "
        f"{args.delay * 1e3:.0f} ms longer."
    )
    columns = ["corpus", "step", "wait, mean", "wait, most", "first batch", "requests"]
    harness.report("Text in an object store", columns, rows, notes, args.json, numbers)


if __name__ == "__main__":
    program.run(main)
