"""Measure the cost of a fault: seconds until it is noticed and the ranks start again, seconds until
they train again, steps redone.

    python -m lab.bench faults [--ranks 2] [--timeout 10] [--only "killed,frozen"] [--json out.json]

For each fault a separate tiny run under `tools.launch`, which restarts it by itself (or, where the
launcher is what dies or is stopped, the same command again, at once). The fault comes in step 18 of
24, with a save every 5 steps. The numbers are those that `python -m tools.goodput` prints for any
run. On this model they are the floor: a process's start, torch's import, and the time-out where one
must pass (`--timeout`: run.step_timeout_seconds).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.schema import InputError
from lab.bench import harness
from reliability.goodput import Account, account, read
from tools import goodput as simulation

ROOT = Path(__file__).resolve().parent.parent.parent
STEP = 18
STEPS = 24
MTBF, INTERRUPTIONS = 3 * 3600.0, 1000  # seconds; Llama 3's on 16,384 GPUs
TINY = (
    "--model.dim=32 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=36 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16 "
    f"--training.global_batch_size=8 --training.local_batch_size=2 --training.steps={STEPS} "
    "--checkpoint.interval=5 "
    "--metrics.interval=1 --metrics.tensorboard=false --validation.interval=0 "
    "--debug.sample_tokens=0 --metrics.progress=off"
).split()

# Around train.py. FAULT is "RANK WHAT STEP STARTS", or several of these with ";" between them: in the
# first so many starts of the run that rank does that when that step begins. WHAT: a signal to
# itself, a loop without end, an exception, a signal to the launcher, wait:FILE, until that file is
# there, or hold:FILE, which makes that file and waits until it is gone (relative paths: in the
# run's folder).
WRAPPER = """
import os, signal, sys, time, train
from pathlib import Path
faults = [fault.split() for fault in os.environ["FAULT"].split(";")]
real_step, real_rate, at = train.train_step, train.learning_rate, []
def learning_rate(step, *rest):
    at.append(step)
    return real_rate(step, *rest)
def fail(what, folder):
    while what == "hang":
        time.sleep(0.02)
    if what == "raise":
        raise ValueError("a fault of the benchmark")
    kind, _, file = what.partition(":")
    if kind == "hold":
        Path(folder, file).touch()
    if kind in ("hold", "wait"):
        while Path(folder, file).exists() == (kind == "hold"):
            time.sleep(0.02)
        return
    victim = os.getppid() if what.startswith("launcher:") else os.getpid()
    os.kill(victim, getattr(signal, what.removeprefix("launcher:")))
def train_step(job, batch, *options):
    folder = job.cfg.run.folder
    started = len(list(Path(folder, "starts").iterdir()))
    for rank, what, step, starts in faults:
        now = started <= int(starts) and at[-1] == int(step) - 1
        if now and job.mesh.rank == int(rank):
            fail(what, folder)
    return real_step(job, batch, *options)
train.train_step, train.learning_rate = train_step, learning_rate
sys.exit(train.main())
"""
FAULTS = {  # what is written in the table: what the wrapper does
    "a rank is killed": "SIGKILL",
    "a rank raises an exception": "raise",
    "a rank hangs": "hang",
    "a rank is frozen (SIGSTOP)": "SIGSTOP",
    "the launcher is killed, and started again": "launcher:SIGKILL",
    "the launcher gets SIGTERM, and is started again": "launcher:SIGTERM",
}


def run(place: Path, name: str, what: str, ranks: int, timeout: int) -> Account:
    """Run to the end. Raises RuntimeError if the run does not get there."""
    folder = place / name
    said = ""
    command = [
        sys.executable,
        "-m",
        "tools.launch",
        f"--nproc-per-node={ranks}",
        "--max-restarts=2",
        str(place / "wrapper.py"),
        f"--run.folder={folder}",
        f"--data.source={place / 'text'}",
        f"--data.cache={place / 'cache'}",
        f"--run.step_timeout_seconds={timeout}",
        *TINY,
    ]
    environment = os.environ | {
        "FAULT": f"1 {what} {STEP} 1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        said += done.stderr
        if done.returncode == 0:
            return account(read(folder))
        if done.returncode != 75 and done.returncode != -signal.SIGKILL:
            break
    raise RuntimeError(f"{name}: exit code {done.returncode}\n{said}")


def goodput(detect: float, restart: float, stall: float) -> float:
    """Return the goodput of a run that is interrupted so often with these times."""
    interval = simulation.best_interval(MTBF, stall)
    seconds = simulation.simulate(MTBF, stall, detect, restart, interval, 0.0, INTERRUPTIONS, 0)
    return seconds["productive"] / sum(seconds.values())


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=10)
    parser.add_argument("--only", default="", help="faults whose names have one of these words")
    args = parser.parse_args()
    chosen = {
        name: what
        for name, what in FAULTS.items()
        if any(word in name for word in args.only.split(","))
    }
    if not chosen:
        raise InputError(f"--only {args.only}: in no name of {', '.join(FAULTS)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="plumbline-faults-") as made:
        place = Path(made)
        (place / "wrapper.py").write_text(WRAPPER)
        (place / "text").mkdir()
        for i in range(40):
            (place / "text" / f"{i}.txt").write_text(
                f"document {i}: " + " ".join(str(n * (i + 7) % 97) for n in range(60))
            )
        for number, (name, what) in enumerate(chosen.items()):
            began = time.monotonic()
            result = run(place, str(number), what, args.ranks, args.timeout)
            (row,) = result.interruptions
            times = (row["detecting"], row["starting"], result.per_event()["stall"])
            figures = [f"{value:.2f}" for value in (*times, time.monotonic() - began)]
            rows.append(
                [name, *figures[:2], str(row["redone"]), *figures[2:], f"{goodput(*times):.2%}"]
            )
            print(rows[-1], flush=True)
    columns = [
        "fault",
        "s to detect",
        "s to train again",
        "steps redone",
        "s of stall per save",
        "s in all",
        "goodput",
    ]
    notes = (
        f"{args.ranks} ranks, time-out {args.timeout} s. Detecting begins with the last step and "
        "ends with the birth of the "
        f"new processes. Goodput: simulated, {INTERRUPTIONS:,} such faults, one in "
        f"{MTBF / 3600:g} h, saves at the best "
        "interval."
    )
    harness.report("Faults", columns, rows, notes, args.json)
