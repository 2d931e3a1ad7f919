"""Runs programs in separate processes, as a user does. It imports no torch."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
# test processes that share this machine, with this one
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
SETTINGS = ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with the tests' Python first on PATH, and of the launch
    variables only `settings`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in SETTINGS and not name.startswith(("SLURM_", "PYTEST_"))
    }
    return kept | {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"} | settings


def started(*command: object, cwd: Path = ROOT, **settings: str) -> subprocess.Popen[str]:
    """Start a command, and return it. settings: of its environment."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**settings),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def finished(
    *command: object, cwd: Path = ROOT, seconds: float = 100, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and keep what it prints. seconds: of an idle machine."""
    with started(*command, cwd=cwd, **settings) as process:
        try:
            out, err = process.communicate(timeout=seconds * WORKERS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
