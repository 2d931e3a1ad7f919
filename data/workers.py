"""Runs worker processes that read batches ahead of time (`data.workers`), and reports those that
fail.

data/loader.py calls `read_by_workers`. The workers serve `batches[step]`, so they have no state, and
their number cannot change a batch.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from configs.program import STOP_SIGNALS
from configs.schema import Data

if TYPE_CHECKING:
    from data.loader import Batch, Batches

LOOK_SECONDS = 0.1  # between two looks at the worker processes while the trainer waits for a batch
END_SECONDS = 10.0  # that a worker which is killed may take to end once its connections are closed
RAISED = "in DataLoader worker process"  # torch's words for an error that a worker has raised
AHEAD = 2  # batches that a worker keeps ready: torch's own prefetch_factor


class LoaderError(Exception):
    """A batch did not come. The message names the step, its sources and the worker."""


def put(ready: queue.Queue, item: object, stopped: threading.Event) -> bool:
    """Put an item into a queue as soon as it has room. Returns False if the run stopped before."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.5)
            return True
        except queue.Full:
            continue
    return False


def take(ready: queue.Queue, seconds: float, is_over: Callable[[], object]) -> Any:
    """Return the next item of a queue; None where none comes within these seconds, or before
    `is_over` is true, which is asked at each look."""
    limit = time.monotonic() + seconds
    while True:
        try:
            return ready.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            if is_over() or time.monotonic() > limit:
                return None


def read_by_workers(batches: Batches, steps: range, cfg: Data) -> Generator[Batch, None, None]:
    """Yield the batches of these steps, which workers read. Raises LoaderError: see
    data/loader.py::loader."""
    workers = Workers(batches, steps, cfg)
    try:
        for step in steps:
            yield workers.take(step)
    finally:
        workers.stop()


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


class Workers:
    """torchdata's StatefulDataLoader, in a thread that may block so that the trainer does not.

    In the main thread the loader has two faults. When a worker dies, its handler of SIGCHLD raises
    in the middle of the trainer's work. And to receive a batch it asks the worker for a
    file descriptor, so a stopped worker blocks it without a limit and without being named. Here the
    trainer waits for a queue, with a limit, and looks at the processes. The thread also spends the
    milliseconds that it takes to receive a batch.

    Workers are forked while the trainer waits for its first batch. A fork takes some milliseconds
    and shares what the trainer has mapped; a fresh interpreter would have to import torch first. A
    forked process must neither use CUDA nor wait for a lock that a thread of the trainer held. A
    worker copies numbers with numpy, on one thread, and touches nothing else. Should it hang all
    the same, it is named like any other worker that hangs. Only where text is in a store are they
    fresh interpreters, because the threads that speak to it do not survive a fork."""

    def __init__(self, batches: Batches, steps: range, cfg: Data) -> None:
        self.batches = batches
        self.steps = steps
        self.cfg = cfg
        self.count = min(cfg.workers, len(steps))
        table = torch.zeros(self.count, 2, dtype=torch.int64).share_memory_()
        self.served = ServedBatches(batches, table)
        self.processes: list[multiprocessing.Process] = []
        # str: the sentence of a worker that cannot read
        self.ready: queue.Queue[Batch | str | BaseException] = queue.Queue(1)
        self.stopped = threading.Event()
        thread = threading.Thread(target=self._receive, name="data workers", daemon=True)
        thread.start()

    def take(self, step: int) -> Batch:
        """Return the next batch, which must be that of `step`. Raises LoaderError."""
        item = take(self.ready, self.cfg.timeout_seconds, lambda: self._died(step))
        if item is None:
            raise LoaderError(self._died(step) or self._silent(step))
        if isinstance(item, str):
            raise LoaderError(item)
        if isinstance(item, BaseException):  # most likely how torchdata reports a worker that died
            if RAISED not in str(item):
                self._wait_for_an_end()
            failure = (
                f"the data workers failed while {describe(self.batches, step)} was waited for: "
                f"{type(item).__name__}: {item}"
            )
            raise LoaderError(self._died(step) or failure) from item
        return item

    def stop(self) -> None:
        """Kill the workers at once, which is safe because they only read. The thread ends with
        them."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        atexit.unregister(self.stop)
        for process in self.processes:
            process.kill()
            process.join()

    # ------------------------------------------------------------------------------------------
    # in the thread

    def _receive(self) -> None:
        """Move batches from the workers into `ready`."""
        try:
            before = set(multiprocessing.active_children())
            received = self._start()
            self.processes = list(set(multiprocessing.active_children()) - before)
            # multiprocessing would wait for processes that ignore SIGTERM
            atexit.register(self.stop)
            for item in received:
                if not put(self.ready, item, self.stopped):
                    return
        except BaseException as error:
            put(self.ready, error, self.stopped)

    def _start(self) -> Iterator[Batch | str]:
        """Fork the workers."""
        # the warnings are about a call of torchdata's own, few cores, and the fork
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return iter(
                StatefulDataLoader(
                    self.served,
                    batch_size=None,
                    sampler=self.steps,
                    num_workers=self.count,
                    prefetch_factor=AHEAD,
                    multiprocessing_context="spawn" if self.batches.is_stored else "fork",
                    worker_init_fn=self.served.start,
                    snapshot_every_n_steps=0,
                    # otherwise it draws its workers' seeds from the trainer's generator
                    generator=torch.Generator(),
                )
            )

    # ------------------------------------------------------------------------------------------
    # which worker failed, and how

    def _wait_for_an_end(self) -> None:
        """Wait until a worker has ended, if one ends: its connections break before that."""
        sentinels = [process.sentinel for process in self.processes]
        if not sentinels:  # none was started
            return
        ended = multiprocessing.connection.wait(sentinels, END_SECONDS)
        for process in self.processes:
            if process.sentinel in ended:
                process.join()

    def _died(self, step: int) -> str:
        """Return the sentence for a worker that has died; "" if none has."""
        for process in self.processes:
            code = process.exitcode
            if code is not None:
                end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                busy = self._busy_with(process.pid, step)
                return f"data worker {process.pid} died ({end}), while {busy}"
        return ""

    def _silent(self, step: int) -> str:
        """Return the sentence for the case that no worker has died and none sends anything: either
        one is stopped, or the one whose turn it is hangs."""
        pids = self.served.table[:, 0].tolist()
        stopped = [pid for pid in pids if pid and is_stopped(pid)]
        pid = stopped[0] if stopped else pids[(step - self.steps.start) % len(pids)]
        return (
            f"data worker {pid} sent nothing for {self.cfg.timeout_seconds} s "
            f"(data.timeout_seconds), while {self._busy_with(pid, step)}: it "
            f"{'is stopped' if stopped else 'hangs'}"
        )

    def _busy_with(self, pid: int, step: int) -> str:
        step_of_worker = dict(self.served.table.tolist())
        reading = step_of_worker.get(pid, ServedBatches.IDLE)
        if reading == ServedBatches.IDLE:
            return f"{describe(self.batches, step)} was waited for"
        return f"it read {describe(self.batches, reading)}"


class ServedBatches:
    """Batches as a worker serves them. If a step cannot be read, it serves the error message
    instead."""

    IDLE = -1

    def __init__(self, batches: Batches, table: torch.Tensor) -> None:
        """table: int64 [workers, 2], shared with the trainer: each worker's process id, and the
        step it is reading."""
        self.batches = batches
        self.table = table

    def start(self, worker: int) -> None:
        """Run a new worker. It ignores the signals that ask a run to stop: the trainer acts on
        them, and it needs batches until it has saved."""
        self.state = self.table[worker]
        self.state[:] = torch.tensor([os.getpid(), self.IDLE])
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __getitem__(self, step: int) -> Batch | str:
        self.state[1] = step
        try:
            return self.batches[step]
        except Exception as error:
            return f"data worker {os.getpid()}: {cannot_read(self.batches, step, error)}"
        finally:
            self.state[1] = self.IDLE


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger (proc(5), the state in
    /proc/PID/stat)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
