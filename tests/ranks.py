"""Real ranks for tests: forked processes with a gloo group, in a second rather than the five that torchrun needs.

The parent has imported torch already, so a fork is cheap; a child computes on one thread, so the parent's thread pool, which
a fork does not carry along, is never needed. Every call has a time limit: a hang
is a failure that names the ranks that did not come back, and no process outlives its test.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first call of FSDP or checkpointing: without this line by every rank, in 0.8 s
import torch.distributed as dist

from models import MODELS

list(MODELS.values())  # imports every family, for the same reason

NEIGHBOURS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # test processes that share this machine, with this one


def step_timeout(seconds: int) -> str:
    """The option for a run whose steps take no longer than that on a machine of its own: beside other test processes a
    healthy step takes longer, and must not be taken for one that hangs."""
    return f"--run.step_timeout_seconds={seconds * NEIGHBOURS}"


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 90) -> list[Any]:
    """Run fn(*args) on `world_size` ranks, as torchrun would on one host; returns what each rank returned (pickled).

    `timeout` is in seconds of a machine for itself: beside other workers the ranks have that many times longer.

    Raises AssertionError with the traceback of every rank that failed, or with the names of those that hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(Path(folder), rank, world_size, fn, args, waits=True)
            children[pid] = rank
        failed = _wait(children, timeout * NEIGHBOURS)
        results = [_result(Path(folder), rank) for rank in range(world_size)]
    errors = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
    assert not errors and not failed, "\n".join(errors + failed)
    return [value for _, value in results]


def _child(folder: Path, rank: int, world_size: int, fn: Callable, args: tuple, waits: bool = False) -> None:
    """Become a rank. waits: it ends when all ranks have."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    signal.alarm(0)  # the parent's cap is not ours
    faulthandler.enable()
    ok, value = True, None
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        value = fn(*args)
    except BaseException:
        ok, value = False, traceback.format_exc()
    (folder / f"{rank}.tmp").write_bytes(pickle.dumps((ok, value)))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}")
    deadline = time.monotonic() + (10 if waits and ok and dist.is_initialized() else 0)
    while time.monotonic() < deadline and len(list(folder.glob("[0-9]"))) < world_size:
        time.sleep(0.002)  # a rank that leaves at once breaks the connections that a slower one is still opening
    os._exit(0 if ok else 1)


def _wait(children: dict[int, int], timeout: float) -> list[str]:
    """Until all have ended, or a little after the first failure; then kill the rest."""
    deadline, running, problems = time.monotonic() + timeout, dict(children), []
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
        elif pid in running:
            rank = running.pop(pid)
            if status != 0:
                deadline = min(deadline, time.monotonic() + 5)
                if os.WIFSIGNALED(status):
                    problems.append(f"rank {rank} died of signal {os.WTERMSIG(status)}")
    for pid, rank in running.items():
        problems.append(f"rank {rank} did not end in time")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return problems


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else (True, None)
