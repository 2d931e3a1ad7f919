"""Measure the seconds from the death of a rank to the next step of all, with processes that stand by
(tools/launch/standby.py) and without, and where the others go on (run.fault_tolerant), in turn: kill
-9 of the second of two ranks of a tiny run.

    python -m lab.bench restart [--rounds 5]

Without: the rank is killed before those processes are started. With: when they wait. Where the
others go on, a process that waits takes its place.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from tools.launch.rank import STANDBY

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--model.dim=32 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 "
    "--model.hidden_dim=64 --training.seq_len=32 --training.steps=1000000 "
    "--training.global_batch_size=8 --checkpoint.interval=20 --metrics.interval=1 "
    "--metrics.tensorboard=false --validation.interval=0 --debug.sample_tokens=0"
).split()
FIRST = 30  # steps before the kill: one save is made
IDLE = 0.5  # seconds in which a process that waits has used no processor


KINDS = {  # kind: (whether processes stand by, more options)
    "without standby": (False, []),
    "with standby": (True, []),
    "fault tolerant": (
        True,
        ["--run.fault_tolerant=true", "--parallelism.data_parallel_replicate=2"],
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            for kind, (waits, more) in KINDS.items():
                seconds = restart(Path(place) / f"{number}-{kind}", waits, more)
                found[kind].append(seconds)
                print(f"{kind}: {', '.join(f'{second:.2f}' for second in seconds)} s", flush=True)
    for kind, rows in found.items():
        medians = [median(column) for column in zip(*rows, strict=True)]
        print(f"{kind}: median {', '.join(f'{second:.2f}' for second in medians)} s")
    return 0


def restart(folder: Path, waits: bool, more: list[str]) -> list[float]:
    """Return the seconds from the kill to the first step after it; where the others go on, also to
    the first step of both."""
    command = ["./run_train.sh", "configs/llama_debug.toml", f"--run.folder={folder}"]
    command += [*OPTIONS, *more]
    here = os.environ | {"NGPU": "2", "RESTARTS": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=ROOT, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: steps(folder) >= FIRST, run)
        if waits:
            until(lambda: len(standing(run.pid)) == 2, run)
            until(lambda: are_idle(standing(run.pid)), run)
        ranks = [pid for pid in children(run.pid) if pid not in standing(run.pid)]
        began = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        seconds = []
        for start in (2, 3) if more else (2,):
            until(lambda start=start: starts(folder) == start, run)
            first = steps(folder)
            until(lambda first=first: steps(folder) > first, run)
            seconds.append(time.monotonic() - began)
        return seconds
    finally:
        run.terminate()
        run.wait()


def until(true, run: subprocess.Popen) -> None:
    while not true():
        assert run.poll() is None, "the run has ended"
        time.sleep(0.01)


def steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"loss"') if path.exists() else 0


def starts(folder: Path) -> int:
    """Return how many starts have resumed, or begun."""
    found = 0
    for path in folder.glob("starts/*/start.json"):
        try:
            found += "mesh" in json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # it is being written
            return 0
    return found


def children(launcher: int) -> list[int]:
    """Return the processes that a launcher has started, oldest first."""
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(word) for word in path.read_text(encoding="ascii").split()]


def standing(launcher: int) -> list[int]:
    """Return those that stand by."""
    found = []
    for pid in children(launcher):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if STANDBY.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def are_idle(pids: list[int]) -> bool:
    """Return whether these processes use no processor: they have imported torch, and wait."""
    before = [ticks(pid) for pid in pids]
    time.sleep(IDLE)
    return before == [ticks(pid) for pid in pids]


def ticks(pid: int) -> list[str]:
    """Return the processor time of a process (proc(5): utime and stime)."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return text.rpartition(")")[2].split()[11:13]
