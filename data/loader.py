"""Makes batches of tokens. A batch is a function of (seed, step), so any rank of any mesh computes
its own rows, and a resume needs no replay.

`data/order.py` decides which windows a step consists of. This file reads them for one rank, in this
process or ahead of time in worker processes. The number of workers cannot change a batch.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from configs.schema import Data, InputError
from data.order import Order
from data.tokens import Tokens

AHEAD = 512  # rows whose source and window are computed at once
# the label of a token that does not count: torch's own convention, and that of training/loss.py
IGNORE = -100
LOOK_SECONDS = 0.1  # between two looks at the worker processes while the trainer waits for a batch

Batch = dict[str, torch.Tensor]


class LoaderError(Exception):
    """A batch did not come. The message names the step, its sources and the worker."""


class Batches:
    """`batches[step]` gives this rank's rows of the global batch of any step, the millionth as fast
    as the first.

    Of G rows, rank r of n holds the contiguous rows [r*G/n, (r+1)*G/n), as microbatches of
    `local_batch_size`. The rows of all ranks, one after another, are the batch of a single rank in
    the same order.
    """

    def __init__(
        self,
        sources: Sequence[Tokens],
        order: Order,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        mask_documents: bool = False,
        vocab_size: int = 2**32,
        token_ranges: Sequence[range] = (),
    ) -> None:
        """`sources`: one split of each source, in the order of `order.last`, the stage whose steps
        are read. `token_ranges`: the positions of a window whose tokens this rank has; none given: all.
        Reading a token that is not below `vocab_size` raises ValueError. Raises InputError if ranks
        and microbatches do not divide the global batch."""
        stage = order.last
        if stage.global_batch_size % (dp_size * local_batch_size):
            raise InputError(
                f"training.global_batch_size = {stage.global_batch_size} is not a multiple of "
                f"{dp_size} "
                f"data-parallel ranks x {local_batch_size} sequences (training.local_batch_size)"
            )
        self.sources = tuple(sources)
        self.order = order
        self.seq_len = stage.seq_len
        self.rows = stage.global_batch_size // dp_size
        self.first_row = dp_rank * self.rows
        self.mask_documents = mask_documents
        self.vocab_size = vocab_size
        self.token_ranges = token_ranges or [range(self.seq_len)]
        self.known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.shapes = shapes_of(
            self.rows, local_batch_size, self.token_ranges, self.seq_len, mask_documents
        )

    def __getitem__(self, step: int) -> Batch:
        """A dict of int64 tensors: tokens and labels [A, b, t], for A accumulation steps and the t
        `token_ranges` of a window; sample [A*b], the number of each window in its source; source
        [A*b], the index of the source. With mask_documents also positions [A, b, T]: the
        position of each token of the whole window in its document, counted from the beginning of
        the window if the document began before. A label that is the first token of the next
        document is then IGNORE."""
        source, sample = self._rows(step)
        start, window = sample * self.seq_len, np.zeros((self.rows, self.seq_len + 1), np.int64)
        for row, s, first in zip(window, source.tolist(), start.tolist(), strict=True):
            for part in self.token_ranges:
                row[part.start : part.stop + 1] = self.sources[s].read(
                    first + part.start, first + part.stop + 1
                )
        if (highest := window.max()) >= self.vocab_size:
            corpus = self.sources[source[window.max(axis=1).argmax()]]
            raise ValueError(
                f"{corpus.folder} has token {highest}, the model's vocabulary {self.vocab_size}: "
                "this "
                "tokenised corpus is damaged (data.verify = true finds where)"
            )
        begins = self._document_begins(source, start) if self.mask_documents else None
        return as_batch(
            window, begins, {"sample": sample, "source": source}, self.shapes, self.token_ranges
        )

    def _rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each of this rank's rows. A call of numpy costs more than its work
        on a few numbers, so several steps are computed at once, and kept until a step outside of
        them is asked for."""
        if step not in self.known:
            ahead = max(1, AHEAD // self.rows)
            first = max(step - step % ahead, self.order.stage(step).step)
            source, window, _ = self.order.rows(first, self.first_row, self.rows, ahead)
            parts = zip(source.reshape(-1, self.rows), window.reshape(-1, self.rows), strict=True)
            self.known = dict(enumerate(parts, first))
        return self.known[step]

    def _document_begins(self, source: np.ndarray, start: np.ndarray) -> np.ndarray:
        """bool [A*b, T + 1]: whether a token of the windows that begin at `start` is the first of a
        document."""
        begins = np.zeros((self.rows, self.seq_len + 1), bool)
        for i in np.unique(source):
            rows = np.flatnonzero(source == i)
            starts = self.sources[i].document_starts
            low, high = (
                np.searchsorted(starts, start[rows] + offset) for offset in (0, self.seq_len + 1)
            )
            for row, a, b in zip(rows, low, high, strict=True):
                begins[row, starts[a:b] - start[row]] = True
        return begins

    def describe(self, step: int) -> str:
        """The step (counted from 1, as in the log) and its sources, for an error message."""
        stage = self.order.stage(step)
        names = [stage.sources[i].name for i in np.unique(self._rows(step)[0])]
        return f"step {step + 1}" + (f" (of sources {', '.join(names)})" if any(names) else "")


def shapes_of(
    rows: int,
    local_batch_size: int,
    token_ranges: Sequence[range],
    seq_len: int,
    mask_documents: bool,
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a batch of `rows` rows; see `Batches.__getitem__`."""
    microbatches = (rows // local_batch_size, local_batch_size)  # [A, b]
    own = (*microbatches, sum(map(len, token_ranges)))
    shapes = {"tokens": own, "labels": own, "sample": (rows,), "source": (rows,)}
    return shapes | ({"positions": (*microbatches, seq_len)} if mask_documents else {})


def as_batch(
    window: np.ndarray,
    begins: np.ndarray | None,
    more: dict[str, np.ndarray],
    shapes: dict,
    token_ranges: Sequence[range],
) -> Batch:
    """The batch of these windows, int64 [A*b, T + 1], of which only tokens and labels at `token_ranges`
    are read and kept. begins: with masked documents, whether a token is the first of its document,
    bool [A*b, T + 1] (overwritten); more: further arrays by name."""

    def at_places(array: np.ndarray, shift: int) -> np.ndarray:
        return np.concatenate(
            [array[:, part.start + shift : part.stop + shift] for part in token_ranges], axis=1
        )

    batch = {"tokens": at_places(window, 0), "labels": at_places(window, 1)}
    batch |= {name: array.copy() for name, array in more.items()}
    if begins is not None:
        batch["labels"][at_places(begins, 1)] = IGNORE
        begins[:, 0] = True
        first, place = np.flatnonzero(begins[:, :-1]), np.arange(begins[:, :-1].size)
        batch["positions"] = place - np.repeat(first, np.diff(first, append=len(place)))
    return {name: torch.from_numpy(array).view(shapes[name]) for name, array in batch.items()}


def loader(
    batches: Batches, start_step: int, steps: int, cfg: Data, pin_memory: bool = False
) -> Iterator[Batch]:
    """The batches of steps `start_step` .. `steps - 1`, the same for any number of workers.

    With `cfg.workers` = 0 they are read in this process. Workers read ahead, which pays if the file
    system is slow. The loader has no state to save, since a resume begins at its step. Raises
    LoaderError if a batch cannot be read, or if its worker died or sent nothing for
    `cfg.timeout_seconds`."""
    order = range(start_step, steps)
    source = (
        _read_by_workers(batches, order, cfg)
        if cfg.workers and order
        else _read_here(batches, order)
    )
    with closing(source):
        for batch in source:
            yield (
                {name: tensor.pin_memory() for name, tensor in batch.items()}
                if pin_memory
                else batch
            )


def _read_here(batches: Batches, order: range) -> Iterator[Batch]:
    for step in order:
        try:
            batch = batches[step]
        except Exception as error:
            raise LoaderError(_cannot_read(batches, step, error)) from error
        yield batch


def _read_by_workers(batches: Batches, order: range, cfg: Data) -> Iterator[Batch]:
    workers = _Workers(batches, order, cfg)
    try:
        for step in order:
            yield workers.take(step)
    finally:
        workers.stop()


def _cannot_read(batches: Batches, step: int, error: Exception) -> str:
    return f"{batches.describe(step)} cannot be read: {type(error).__name__}: {error}"


class _Workers:
    """torchdata's StatefulDataLoader, in a thread that may block so that the trainer does not.

    In the main thread the loader has two faults. When a worker dies, its handler of SIGCHLD raises
    in the middle of whatever the trainer is doing. And to receive a batch it asks the worker for a
    file descriptor, so a stopped worker blocks it without a limit and without being named. Here the
    trainer waits for a queue, with a limit, and looks at the processes. The thread also spends the
    milliseconds that it takes to receive a batch.

    Workers are forked while the trainer waits for its first batch. A fork takes some milliseconds
    and shares what the trainer has mapped; a fresh interpreter would have to import torch first. A
    forked process must neither use CUDA nor wait for a lock that a thread of the trainer held. A
    worker copies numbers with numpy, on one thread, and touches nothing else. Should it hang all
    the same, it is named like any other worker that hangs."""

    def __init__(self, batches: Batches, order: range, cfg: Data) -> None:
        self.batches, self.order, self.cfg = batches, order, cfg
        count = min(cfg.workers, len(order))
        self.served = _Served(batches, torch.zeros(count, 2, dtype=torch.int64).share_memory_())
        self.processes: list[multiprocessing.Process] = []
        # str: the sentence of a worker that cannot read
        self.ready: queue.Queue[Batch | str | Exception] = queue.Queue(1)
        self.stopped = threading.Event()
        threading.Thread(
            target=self._receive, args=(count,), name="data workers", daemon=True
        ).start()

    def _receive(self, count: int) -> None:
        """Runs in the thread: moves batches from the workers into `ready`."""
        try:
            before = set(multiprocessing.active_children())
            # they are about a call of torchdata's, few cores, the fork
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                received = iter(
                    StatefulDataLoader(
                        self.served,
                        batch_size=None,
                        sampler=self.order,
                        num_workers=count,
                        prefetch_factor=self.cfg.prefetch,
                        multiprocessing_context="fork",
                        worker_init_fn=self.served.start,
                        snapshot_every_n_steps=0,
                        # otherwise it draws its workers' seeds from the trainer's generator
                        generator=torch.Generator(),
                    )
                )
            self.processes = list(set(multiprocessing.active_children()) - before)
            # multiprocessing would wait for processes that ignore SIGTERM
            atexit.register(self.stop)
            for item in received:
                self._put(item)
                if self.stopped.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | str | BaseException) -> None:
        while not self.stopped.is_set():
            try:
                return self.ready.put(item, timeout=0.5)
            except queue.Full:
                continue

    def take(self, step: int) -> Batch:
        """The next batch, which must be that of `step`."""
        limit = time.monotonic() + self.cfg.timeout_seconds
        while True:
            try:
                item = self.ready.get(timeout=LOOK_SECONDS)
                break
            except queue.Empty:
                if died := self._died(step):
                    raise LoaderError(died) from None
                if time.monotonic() > limit:
                    raise LoaderError(self._silent(step)) from None
        if isinstance(item, str):
            raise LoaderError(item)
        if isinstance(item, BaseException):  # most likely how the loader reports a worker that died
            time.sleep(LOOK_SECONDS)
            failure = (
                f"the data workers failed while {self.batches.describe(step)} was waited for: "
                f"{type(item).__name__}: {item}"
            )
            raise LoaderError(self._died(step) or failure) from item
        return item

    def _died(self, step: int) -> str:
        """The sentence for a worker that has died; "" if none has."""
        for process in self.processes:
            if (code := process.exitcode) is not None:
                end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return (
                    f"data worker {process.pid} died ({end}), while "
                    f"{self._busy_with(process.pid, step)}"
                )
        return ""

    def _silent(self, step: int) -> str:
        """The sentence for the case that no worker has died and none sends anything: either one is
        stopped, or the one whose turn it is hangs."""
        pids = self.served.table[:, 0].tolist()
        stopped = [pid for pid in pids if pid and _is_stopped(pid)]
        pid = stopped[0] if stopped else pids[(step - self.order.start) % len(pids)]
        return (
            f"data worker {pid} sent nothing for {self.cfg.timeout_seconds} s "
            "(data.timeout_seconds), while "
            f"{self._busy_with(pid, step)}: it {'is stopped' if stopped else 'hangs'}"
        )

    def _busy_with(self, pid: int, step: int) -> str:
        reading = dict(self.served.table.tolist()).get(pid, _Served.IDLE)
        if reading == _Served.IDLE:
            return f"{self.batches.describe(step)} was waited for"
        return f"it read {self.batches.describe(reading)}"

    def stop(self) -> None:
        """End the workers at once, whatever they are doing, because they only read. The thread ends
        with them."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        atexit.unregister(self.stop)
        for process in self.processes:
            process.kill()
            process.join()


class _Served:
    """The batches as a worker serves them. If a step cannot be read, it serves the sentence that
    says so."""

    IDLE = -1

    def __init__(self, batches: Batches, table: torch.Tensor) -> None:
        """table: int64 [workers, 2], shared with the trainer: each worker's process id, and the
        step it is reading."""
        self.batches, self.table = batches, table

    def start(self, worker: int) -> None:
        """Runs in a new worker. The worker ignores the signals that ask a run to stop: the trainer
        acts on them, and it needs batches until it has saved."""
        self.state = self.table[worker]
        self.state[:] = torch.tensor([os.getpid(), self.IDLE])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def __getitem__(self, step: int) -> Batch | str:
        self.state[1] = step
        try:
            return self.batches[step]
        except Exception as error:
            return f"data worker {os.getpid()}: {_cannot_read(self.batches, step, error)}"
        finally:
            self.state[1] = self.IDLE


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger (proc(5), the state in
    /proc/PID/stat)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
