"""A script around train.py that puts faults into a run: into a rank, or into its launcher."""

# FAULT is "RANK WHAT STEP STARTS", or several of these with ";" between them: in the
# first so many starts of the run that rank does that when that step begins. WHAT: a signal to
# itself, a loop without end, an exception, a signal to the launcher, wait:FILE, until that file (a
# pattern of glob) is there, or hold:FILE, which makes that file and waits until it is gone (relative
# paths: in the run's folder).
WRAPPER = """
import glob, os, signal, sys, time, train
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
        while bool(glob.glob(str(Path(folder, file)))) == (kind == "hold"):
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
