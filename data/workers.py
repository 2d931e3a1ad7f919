"""Runs worker processes that read batches ahead of time (`data.workers`), and reports those that
fail.

data/loader.py calls `read_by_workers`. Worker i of n serves `batches[step]` for every n-th step, so
it has no state, and the number of workers cannot change a batch.

Workers are forked while the trainer waits for its first batch. A fork takes some milliseconds and
shares what the trainer has mapped; a fresh interpreter would have to import torch first. A forked
process must neither use CUDA nor wait for a lock that a thread of the trainer held. A worker copies
numbers with numpy, on one thread, and touches nothing else. Only where text is in a store are they
fresh interpreters, because the threads that speak to it do not survive a fork.
"""

from __future__ import annotations

import atexit
import multiprocessing
import queue
import signal
import threading
import warnings
from collections.abc import Generator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.program import STOP_SIGNALS
from configs.schema import Data

if TYPE_CHECKING:
    from data.loader import Batch, Batches

AHEAD = 2  # batches that a worker keeps ready


class LoaderError(Exception):
    """A batch did not come. The message names the step, its sources and the worker."""


def read_by_workers(batches: Batches, steps: range, cfg: Data) -> Generator[Batch, None, None]:
    """Yield the batches of these steps. Raises LoaderError: see data/loader.py::loader."""
    count = min(cfg.workers, len(steps))
    workers: list[BatchWorker] = []

    def stop() -> None:
        """Kill the workers at once, which is safe because they only read."""
        for worker in workers:
            worker.process.kill()
            worker.process.join()

    # multiprocessing would wait for processes that ignore SIGTERM
    atexit.register(stop)
    try:
        for first in range(count):
            workers.append(BatchWorker(batches, steps[first::count], workers))
        for worker in workers:
            worker.begin()
        for number, step in enumerate(steps):
            yield workers[number % count].take(step, cfg.timeout_seconds)
    finally:
        stop()
        atexit.unregister(stop)


class BatchWorker:
    """A worker process, and the thread that receives its batches: a process that is stopped while it
    sends would block the trainer without a limit."""

    def __init__(self, batches: Batches, steps: range, others: list[BatchWorker]) -> None:
        """steps: of the batches that it serves. others: those that were started before."""
        self.batches = batches
        self.steps = iter(steps)  # those that it was not asked for
        self.ready: queue.SimpleQueue[dict[str, np.ndarray] | str | None] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn" if batches.is_stored else "fork")
        self.connection, own = context.Pipe()
        of_trainer = [worker.connection for worker in (*others, self)]
        self.process = context.Process(target=serve, args=(batches, own, of_trainer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork where threads run
            self.process.start()
        own.close()

    def begin(self) -> None:
        """Ask for the first batches, after all workers were forked."""
        self._ask(AHEAD)
        threading.Thread(target=self._receive, name="data worker", daemon=True).start()

    def take(self, step: int, seconds: int) -> Batch:
        """Return the next batch, which is that of `step`. Raises LoaderError."""
        try:
            item = self.ready.get(timeout=seconds)
        except queue.Empty:
            how = "is stopped" if is_stopped(self.process.pid) else "hangs"
            raise self._failure(
                f"sent nothing for {seconds} s (data.timeout_seconds)", step, f": it {how}"
            ) from None
        if item is None:
            self.process.join()
            code = self.process.exitcode
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise self._failure(f"died ({end})", step)
        if isinstance(item, str):
            raise LoaderError(f"data worker {self.process.pid}: {item}")
        self._ask(1)
        return {name: torch.from_numpy(array) for name, array in item.items()}

    def _failure(self, what: str, step: int, why: str = "") -> LoaderError:
        busy = describe(self.batches, step)
        return LoaderError(f"data worker {self.process.pid} {what}, while it read {busy}{why}")

    def _ask(self, count: int) -> None:
        with suppress(OSError):  # it has died: the thread says so
            for step in islice(self.steps, count):
                self.connection.send(step)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.ready.put(self.connection.recv())
        self.ready.put(None)


def serve(batches: Batches, own: Connection, of_trainer: list[Connection]) -> None:
    """Run a worker until the trainer has ended: for each step that it receives, send the batch, or
    why it cannot be read. It ignores the signals that ask a run to stop: the trainer acts on them,
    and it needs batches until it has saved. of_trainer: ends of pipes that a fork has copied."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    for connection in of_trainer:
        connection.close()
    with suppress(EOFError, OSError):
        while True:
            own.send(_read(batches, own.recv()))


def _read(batches: Batches, step: int) -> dict[str, np.ndarray] | str:
    try:
        return {name: tensor.numpy() for name, tensor in batches[step].items()}
    except Exception as error:
        return cannot_read(batches, step, error)


def cannot_read(batches: Batches, step: int, error: Exception) -> str:
    """Return the sentence for a batch that did not come. A file that someone removed is named
    alone: the step may be a validation's."""
    if isinstance(error, FileNotFoundError):
        return (
            f"{error.filename} was removed during the run, which ends here: bring it back, or start "
            "the same command again, which prepares a cache anew"
        )
    return f"{describe(batches, step)} cannot be read: {type(error).__name__}: {error}"


def describe(batches: Batches, step: int) -> str:
    """Describe the step (counted from 1, as in the log) and its sources, for an error message."""
    source, _ = batches.locate(step)
    sources = batches.order.segment(step).sources
    names = [sources[i].name for i in np.unique(source)]
    if not any(names):
        return f"step {step + 1}"
    return f"step {step + 1} (of sources {', '.join(names)})"


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (the state in /proc/PID/stat)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
