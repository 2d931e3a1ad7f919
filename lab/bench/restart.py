"""Measure the seconds from the death of a rank to the next step of all, with processes that stand by
(tools/launch/standby.py) and without, in turn: kill -9 of the second of two ranks of a tiny run.

    python -m lab.bench restart [--rounds 5]

Without: the rank is killed before those processes are started. With: when they wait.
"""

import argparse
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            for waits in found:
                seconds = restart(Path(place) / f"{number}-{waits}", waits)
                found[waits].append(seconds)
                print(f"{'with' if waits else 'without'} standby: {seconds:.2f} s", flush=True)
    anew, warm = median(found[False]), median(found[True])
    print(f"medians: {anew:.2f} s without, {warm:.2f} s with; ratio {anew / warm:.2f}")
    return 0


def restart(folder: Path, waits: bool) -> float:
    """Return the seconds from the kill to the first step after it."""
    command = ["./run_train.sh", "configs/llama_debug.toml", f"--run.folder={folder}", *OPTIONS]
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
        until(lambda: starts(folder) == 2, run)
        first = steps(folder)
        until(lambda: steps(folder) > first, run)
        return time.monotonic() - began
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
