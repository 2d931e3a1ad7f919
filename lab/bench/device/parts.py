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
    """Part with its cost. by_device: by kind of device (cuda, cpu) the seconds that it usually
    takes, and the arguments of `python -m`. A kind that is missing cannot run it. The seconds of a
    GPU are those of an H200 with 16 processors, or where it has not run a part, estimates."""

    name: str
    by_device: dict[str, tuple[float, str]]


def section(name: str, command: str, cuda: float, cpu: float = 0.0) -> Section:
    """Return a part with the same command on a GPU and on a CPU. cpu: 0 if a CPU cannot run it."""
    seconds = {"cuda": cuda, "cpu": cpu}
    return Section(name, {kind: (usual, command) for kind, usual in seconds.items() if usual})


CHECKS = "lab.bench device.checks"
MEASURE = "lab.bench device.measure"
PLANNED = "lab.bench device.planned"
ATTENTION = "lab.bench attention"
NUMBERS = f"{CHECKS} float32 fsdp fsdp_and_tp bfloat16 float8 control sampling recorded"
MIXTURES = f"{CHECKS} experts experts_bfloat16 offload error"
MESHES = (
    f"{CHECKS} fsdp_of_two tensor_parallel pipeline context context_gather expert_parallel four"
)
PARTS = [  # the most valuable first
    section("numbers", NUMBERS, 20, 15),
    section("checkpoint", f"{CHECKS} checkpoint", 15, 10),
    section("experts", MIXTURES, 45, 60),
    section("meshes", MESHES, 90, 90),
    section("documents", f"{CHECKS} documents documents_compiled", 30, 40),
    section("delta rule", f"{CHECKS} delta_rule", 60, 30),
    section("delta nets", "lab.bench delta_net", 60, 30),
    section("compile", f"{CHECKS} compiled", 35, 60),
    section("rates", f"{MEASURE} rates", 30, 15),
    section("8B layers", f"{MEASURE} step 8B_layers", 75, 60),
    Section(
        "attention",
        {
            "cuda": (40, f"{ATTENTION} --rounds=10 --shapes 1,32,8,8192,128 1,32,8,8192,64"),
            "cpu": (40, f"{ATTENTION} --rounds=3 --shapes 8,4,2,256,64 2,8,8,384,128"),
        },
    ),
    section("1B", f"{MEASURE} step 1B", 80, 60),
    section("3B", f"{MEASURE} step 3B", 100),
    section("planned and run", f"{PLANNED} planner --seconds=85", 95, 90),
    section("long sequences", f"{PLANNED} lengths --seconds=100", 105),
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
