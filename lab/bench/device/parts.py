"""Measure everything on the accelerator at hand, the most valuable first.

    python -m lab.bench device [--minutes 9] [--json runs/device.json] [--only NAME ...] [--again]

Each part runs in a separate process with a time limit. Its result goes into the JSON file at once,
so nothing is lost when the command is cut off, and a second call continues with missing and failed
parts. --minutes is a budget: a part that does not fit into what is left of it is listed as not run.
--only names the parts to run, and --again repeats those that are done.

Also written, with the same name: the tables as Markdown, ready for docs/performance.md; a device
for `python -m tools.plan --device runs/device.toml`; and a folder with the log of every part. On a
CPU the sizes are small. Exit code 0: nothing has failed; 1: a part has failed, the table says why;
2: wrong arguments, nothing was started; 130: stopped by Ctrl-C.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from configs.schema import InputError
from lab.bench.device.record import DONE, FAILED, NOT_RUN, Record, read_report
from lab.bench.harness import child, end_with_parent

WRONG_INPUT = 2  # also the exit code of a part that says why it cannot run here
PATIENCE = 4  # a part is ended after this many times the seconds that it usually takes


@dataclass(frozen=True)
class Section:
    """by_device: by kind of device (cuda, cpu) the seconds that it usually takes, and the arguments
    of `python -m`. A kind that is missing cannot run it. The seconds of a GPU are those of an H200
    with 16 processors, or where it has not run a part, estimates."""

    name: str
    by_device: dict[str, tuple[float, str]]


CHECKS = "lab.bench device.checks"
MEASURE = "lab.bench device.measure"
PLANNED = "lab.bench device.planned"
FLOAT8 = "lab.bench float8"
NUMBERS = f"{CHECKS} float32 fsdp fsdp_and_tp bfloat16 float8 control sampling recorded"
DOCUMENTS = f"{CHECKS} documents documents_compiled"
MIXTURES = f"{CHECKS} experts experts_bfloat16 offload error"
MESHES = (
    f"{CHECKS} fsdp_of_two tensor_parallel pipeline context context_gather expert_parallel four"
)
CHANGES = "lab.bench kernels --changes"
PARTS = [  # the most valuable first
    Section("numbers", {"cuda": (20, NUMBERS), "cpu": (15, NUMBERS)}),
    Section(
        "checkpoint", {"cuda": (15, f"{CHECKS} checkpoint"), "cpu": (10, f"{CHECKS} checkpoint")}
    ),
    Section("experts", {"cuda": (45, MIXTURES), "cpu": (60, MIXTURES)}),
    Section("meshes", {"cuda": (90, MESHES), "cpu": (90, MESHES)}),
    Section("documents", {"cuda": (30, DOCUMENTS), "cpu": (40, DOCUMENTS)}),
    Section("compile", {"cuda": (35, f"{CHECKS} compiled"), "cpu": (60, f"{CHECKS} compiled")}),
    Section("rates", {"cuda": (30, f"{MEASURE} rates"), "cpu": (15, f"{MEASURE} rates")}),
    Section(
        "8B layers",
        {"cuda": (75, f"{MEASURE} step 8B_layers"), "cpu": (60, f"{MEASURE} step 8B_layers")},
    ),
    Section(
        "vs TorchTitan",
        {
            "cuda": (75, f"{MEASURE} compare torchtitan"),
            "cpu": (60, f"{MEASURE} compare torchtitan"),
        },
    ),
    Section(
        "vs TorchTitan, selective",
        {
            "cuda": (60, f"{MEASURE} compare torchtitan_selective"),
            "cpu": (60, f"{MEASURE} compare torchtitan_selective"),
        },
    ),
    Section("1B vs TorchTitan", {"cuda": (60, f"{MEASURE} compare torchtitan_1B")}),
    Section("vocabulary vs TorchTitan", {"cuda": (60, f"{MEASURE} compare torchtitan_vocabulary")}),
    Section(
        "vs the bare loop",
        {"cuda": (60, f"{MEASURE} compare bare"), "cpu": (40, f"{MEASURE} compare bare")},
    ),
    Section(
        "vs Hugging Face",
        {"cuda": (60, f"{MEASURE} compare hf"), "cpu": (50, f"{MEASURE} compare hf")},
    ),
    Section(
        "attention",
        {
            "cuda": (
                40,
                "lab.bench attention --rounds=10 --shapes 1,32,8,8192,128 1,32,8,8192,64",
            ),
            "cpu": (40, "lab.bench attention --rounds=3 --shapes 8,4,2,256,64 2,8,8,384,128"),
        },
    ),
    Section(
        "kernels of a step",
        {
            "cuda": (60, "lab.bench kernels"),
            "cpu": (40, "lab.bench kernels --training.local_batch_size=2"),
        },
    ),
    Section(
        "changes of a step",
        {
            "cuda": (70, f"{CHANGES} clip_apart cublaslt loss_in_one_piece"),
            "cpu": (60, f"{CHANGES} loss_in_one_piece"),
        },
    ),
    Section(
        "changes of microbatches",
        {
            "cuda": (60, f"{CHANGES} narrow_adds --training.global_batch_size=3"),
            "cpu": (60, f"{CHANGES} narrow_adds --training.local_batch_size=4"),
        },
    ),
    Section("tuned products", {"cuda": (90, f"{CHANGES} tuned_products")}),
    Section("saves", {"cuda": (90, f"{MEASURE} saves"), "cpu": (60, f"{MEASURE} saves")}),
    Section("float8 steps", {"cuda": (55, f"{FLOAT8} steps"), "cpu": (60, f"{FLOAT8} steps")}),
    Section("float8 loss", {"cuda": (50, f"{FLOAT8} loss"), "cpu": (60, f"{FLOAT8} loss")}),
    Section(
        "float8 products", {"cuda": (40, f"{FLOAT8} products"), "cpu": (90, f"{FLOAT8} products")}
    ),
    Section(
        "float8 rowwise", {"cuda": (40, f"{FLOAT8} rowwise"), "cpu": (60, f"{FLOAT8} rowwise")}
    ),
    Section("float8 experts", {"cuda": (12, f"{FLOAT8} experts")}),
    Section(
        "products",
        {
            "cuda": (30, "lab.bench products --rounds=10"),
            "cpu": (30, "lab.bench products --rounds=5 --shapes 2048,256,704 1024,256,4096"),
        },
    ),
    Section(
        "added products",
        {
            "cuda": (
                15,
                "lab.bench products --added --rounds=15 --shapes 2048,4096,14336 4096,4096,14336 "
                "8192,4096,14336 8192,4096,4096 4096,8192,28672",
            ),
            "cpu": (15, "lab.bench products --added --rounds=5 --shapes 2048,256,704"),
        },
    ),
    Section(
        "loss",
        {
            "cuda": (40, "lab.bench loss --rounds=10"),
            "cpu": (20, "lab.bench loss --rounds=2 --shapes 256,64,1024"),
        },
    ),
    Section("small models", {"cuda": (100, "lab.bench graphs --rounds=12")}),
    Section("mixtures", {"cuda": (120, "lab.bench mixtures --rounds=10")}),
    Section("1B", {"cuda": (80, f"{MEASURE} step 1B"), "cpu": (60, f"{MEASURE} step 1B")}),
    Section("3B", {"cuda": (100, f"{MEASURE} step 3B")}),
    Section(
        "planned and run",
        {
            "cuda": (95, f"{PLANNED} planner --seconds=90"),
            "cpu": (90, f"{PLANNED} planner --seconds=85"),
        },
    ),
    Section("long sequences", {"cuda": (105, f"{PLANNED} lengths --seconds=100")}),
]


def run(part: Section, kind: str, left: float, logs: Path) -> dict:
    """Run a part in a separate process for at most `left` seconds. Returns its entry in the record."""
    usual, arguments = part.by_device[kind]
    if left < usual:
        return {
            "state": NOT_RUN,
            "why": f"it takes about {usual:.0f} s, and {max(0, left):.0f} s were left",
        }
    limit = min(PATIENCE * usual, left)
    began = time.monotonic()
    name = part.name.replace(" ", "-")
    log = logs / f"{name}.log"
    report = logs / f"{name}.json"
    report.unlink(missing_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *arguments.split(), f"--json={report}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # its child processes end with it, also after Ctrl-C
            end_group(process)
    entry = {
        "seconds": round(time.monotonic() - began, 1),
        "log": str(log),
        "report": read_report(report),
    }
    if code == 0 and entry["report"]:
        return entry | {"state": DONE}
    if code is None and limit == left:
        return entry | {"state": NOT_RUN, "why": f"the budget ended after {limit:.0f} s of it"}
    if code is None:
        return entry | {"state": FAILED, "why": f"no result after {limit:.0f} s"}
    why = last_line(log) if code else ""
    state = NOT_RUN if code == WRONG_INPUT else FAILED
    return entry | {"state": state, "why": why or f"it ended with code {code} and no result"}


def end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return lines[-1][:500] if lines else ""


def measure(
    record: Record, parts: list[Section], kind: str, minutes: float, again: bool, logs: Path
) -> None:
    """Run these parts, in their order, and write the record after each of them."""
    deadline = time.monotonic() + 60 * minutes
    for part in parts:
        if record.state(part.name) == DONE and not again:
            print(f"{part.name}: done before", flush=True)
            continue
        if kind not in part.by_device:
            entry = {"state": NOT_RUN, "why": "only a GPU can run it"}
        else:
            print(f"{part.name}: ...", flush=True)
            entry = run(part, kind, deadline - time.monotonic(), logs)
        entry["ended"] = datetime.now(timezone.utc).isoformat(" ", "seconds")
        record.put(part.name, entry)
        print(
            f"{part.name}: {entry['state']}{': ' + entry['why'] if 'why' in entry else ''}",
            flush=True,
        )


def arguments(argv: list[str], names: list[str]) -> argparse.Namespace:
    """names: of all parts. Raises InputError."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=9, help="budget of this call (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("runs/device.json"), help="the results (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help=f"of {', '.join(names)}"
    )
    parser.add_argument("--again", action="store_true", help="also the parts that are done")
    flags = parser.parse_args(argv)
    if not (math.isfinite(flags.minutes) and flags.minutes > 0):
        raise InputError(f"--minutes {flags.minutes:g}: a budget is a number of minutes above 0")
    if flags.json.suffix != ".json":
        raise InputError(
            f"--json {flags.json}: give a file that ends in .json; the other files get its name"
        )
    if unknown := set(flags.only) - set(names):
        raise InputError(
            f"--only {', '.join(sorted(unknown))}: no such part; there are {', '.join(names)}"
        )
    return flags


def main(argv: list[str] | None = None, parts: list[Section] = PARTS) -> int:
    """Run the command line in this file's first lines. Returns the exit code."""
    names = [part.name for part in parts]
    try:
        flags = arguments(sys.argv[1:] if argv is None else argv, names)
        # in a separate process, since this one must hold nothing of the GPU
        machine = child("device.measure", "about")
        kind = machine.pop("kind")
        record = Record(flags.json, machine, names)
        logs = flags.json.with_suffix(".logs")
        logs.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    chosen = [part for part in parts if not flags.only or part.name in flags.only]
    stopped = False
    try:
        measure(record, chosen, kind, flags.minutes, flags.again, logs)
    except KeyboardInterrupt:
        stopped = True
    record.write()
    print(f"\n{record.summary()}\n\nwritten: {', '.join(map(str, record.files()))}")
    missing = [
        part.name for part in chosen if kind in part.by_device and record.state(part.name) != DONE
    ]
    if missing:
        print(
            f"{'stopped; ' * stopped}the same command goes on with what is missing: "
            f"{', '.join(missing)}"
        )
    return 130 if stopped else int(any(record.state(part.name) == FAILED for part in chosen))
