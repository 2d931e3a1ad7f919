"""Real ranks for tests: forked processes with a gloo group, in a second rather than the five that
torchrun needs.

They are forked by a server that has imported torch and never computes (tests/fork_server.py), so a rank
has neither threads nor patches of the process that asks for it. Every call has a time limit: a hang
is a failure that names the ranks that did not come back, and no process outlives its test.
"""

import faulthandler
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models import MODELS
from tests import fork_server
from tests.programs import WORKERS

list(MODELS.values())  # imports every family, so that no rank has to


def wait_until(
    true: Callable[[], object],
    seconds: float = 60,
    complaint: Callable[[], str] = lambda: "it does not come",
    every: float = 0.02,
    over: Callable[[], object] = lambda: False,
) -> None:
    """Wait for a condition, for so many seconds on an idle machine. every: seconds between looks;
    over: the condition cannot come any more, as when a process has ended."""
    deadline = time.monotonic() + seconds * WORKERS
    while not true():
        assert not over() and time.monotonic() < deadline, complaint()
        time.sleep(every)


def step_timeout(seconds: int) -> str:
    """Return the option for a run whose steps take no longer than that on an idle machine: with
    other test processes a healthy step takes longer, and must not be taken for one that hangs."""
    return f"--run.step_timeout_seconds={seconds * WORKERS}"


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 90) -> list[Any]:
    """Run fn(*args) on `world_size` ranks, as torchrun would on one host; returns the (pickled)
    results by rank.

    `timeout` is in seconds of an idle machine: with other workers the ranks have that many times
    longer.

    Where gloo could not connect the ranks, which happens on a busy machine once in thousands of
    groups, they are started once more.

    Raises AssertionError with the traceback of every rank that failed, or with the names of those
    that hang.
    """
    try:
        return _run_once(world_size, fn, args, timeout)
    except Unconnected as error:
        print(f"started once more, because gloo could not connect the ranks:\n{error}")
        return _run_once(world_size, fn, args, timeout)


def run_each(world_size: int, *functions: Callable[[], Any]) -> dict[Callable, list[Any]]:
    """Run functions one after another on the same ranks, which costs less than ranks for each: what
    they return, by function and rank."""
    by_rank = run_ranks(world_size, _in_turn, functions)
    return {function: list(seen) for function, *seen in zip(functions, *by_rank, strict=True)}


def _in_turn(functions: tuple[Callable[[], Any], ...]) -> list[Any]:
    return [function() for function in functions]


class Unconnected(AssertionError):
    """A rank failed before it called the function, in gloo's handshake."""


def _run_once(world_size: int, fn: Callable, args: tuple, timeout: float) -> list[Any]:
    ranks: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ranks.append(
                    fork_server.start(child, Path(folder), rank, world_size, fn, args, True)
                )
            failed = _wait(ranks, timeout * WORKERS)
            for rank, process in enumerate(ranks):
                if process.exitcode == 1 and not (Path(folder) / f"{rank}").exists():
                    failed.append(
                        f"rank {rank} could not begin: its traceback is in what it printed"
                    )
        finally:
            for process in ranks:
                fork_server.end(process)
        results = [_result(Path(folder), rank) for rank in range(world_size)]
    errors = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
    if any(BEGINS in error and "connectFullMesh failed" in error for error in errors):
        raise Unconnected("\n".join(errors + failed))
    assert not errors and not failed, "\n".join(errors + failed)
    return [value for _, value in results]


def child(
    folder: Path, rank: int, world_size: int, fn: Callable, args: tuple, waits: bool = False
) -> None:
    """Become a rank, in a process that tests/fork_server.py has started. waits: it ends when all ranks
    have."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    faulthandler.enable()
    ok, value = True, None
    try:
        torch.set_num_threads(1)
        _begin(folder, rank, world_size)
        value = fn(*args)
    except BaseException:
        ok, value = False, traceback.format_exc()
    (folder / f"{rank}.tmp").write_bytes(pickle.dumps((ok, value)))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}")
    deadline = time.monotonic() + (10 if waits and ok and dist.is_initialized() else 0)
    while time.monotonic() < deadline and sum(map(str.isdigit, os.listdir(folder))) < world_size:
        # a rank that leaves at once breaks the connections that a slower one is still opening
        time.sleep(0.01)
    os._exit(0 if ok else 1)


def _begin(folder: Path, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )


BEGINS = f"in {_begin.__name__}\n"  # found in a traceback


def _wait(ranks: list[ForkServerProcess], timeout: float) -> list[str]:
    """Until all have ended, or a little after the first failure: who died of a signal, and who
    still runs."""
    deadline = time.monotonic() + timeout
    running = dict(enumerate(ranks))
    problems = []
    while running and time.monotonic() < deadline:
        # asleep until one ends
        wait([process.sentinel for process in running.values()], deadline - time.monotonic())
        for rank, process in list(running.items()):
            if process.exitcode is None:
                continue
            del running[rank]
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + 5)
            if process.exitcode < 0:
                problems.append(f"rank {rank} died of signal {-process.exitcode}")
    return [*problems, *(f"rank {rank} did not end in time" for rank in running)]


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else (True, None)
