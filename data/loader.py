"""Tokens to batches: batch = f(seed, step), so any rank of any mesh computes its own rows and a resume needs no replay.

Which windows a step is made of is `data/order.py`'s; here they are read, for one rank, in this process or ahead of time
by worker processes. Neither the number of workers nor anything else about them can change a batch.
"""

from __future__ import annotations

import mmap
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np
import torch

from configs.schema import Data, InputError
from data.order import Order
from data.tokens import Tokens

AHEAD = 512  # rows of which it is computed at a time which they are
IGNORE = -100  # a label that does not count: training/loss.py's, torch's own convention

Batch = dict[str, torch.Tensor]


class LoaderError(Exception):
    """A batch that did not come: the message is a sentence that names the step, its sources and the worker."""


class Batches:
    """`batches[step]`: this rank's rows of the global batch of any step, the first as fast as the millionth.

    Rank r of n holds the contiguous rows [r*G/n, (r+1)*G/n), as micro-batches of `local_batch_size`: the ranks' rows,
    one after another, are the one-rank batch, order included.
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
    ) -> None:
        """`sources`: one split of each source, as they stand in `order.last`, whose steps this is for. A token that is
        not below `vocab_size` is a ValueError when it is read. InputError: ranks and micro-batches do not divide the
        global batch."""
        now = order.last
        if now.global_batch_size % (dp_size * local_batch_size):
            raise InputError(f"training.global_batch_size = {now.global_batch_size} is not a multiple of {dp_size} "
                             f"data-parallel ranks x {local_batch_size} sequences (training.local_batch_size)")
        self.sources = tuple(sources)
        self.order = order
        self.seq_len = now.seq_len
        self.rows = now.global_batch_size // dp_size
        self.first_row = dp_rank * self.rows
        self.mask_documents = mask_documents
        self.vocab_size = vocab_size
        self.known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.shapes = shapes_of(self.rows, local_batch_size, self.seq_len, mask_documents)

    def __getitem__(self, step: int) -> Batch:
        """All int64. tokens, labels [A, b, T], A the accumulation steps; sample [A*b], the windows' numbers in their
        source; source [A*b], its index. With mask_documents also positions [A, b, T], of each token in its document as
        far as it is in this window (so 0 at the window's first token too), and a label that is the first token of
        another document than its input's is IGNORE."""
        source, sample = self._rows(step)
        start, window = sample * self.seq_len, np.empty((self.rows, self.seq_len + 1), np.int64)
        for row, s, first in zip(window, source.tolist(), start.tolist(), strict=True):
            row[:] = self.sources[s].read(first, first + self.seq_len + 1)
        if (highest := window.max()) >= self.vocab_size:
            wrong = self.sources[source[window.max(axis=1).argmax()]]
            raise ValueError(f"{wrong.folder} has token {highest}, the model's vocabulary {self.vocab_size}: this tokenised "
                             "corpus is damaged (data.verify = true finds where)")
        begins = self._document_begins(source, start) if self.mask_documents else None
        return as_batch(window, begins, {"sample": sample, "source": source}, self.shapes)

    def _rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each of this rank's rows. As a call of numpy costs more than what it computes on a few
        numbers, some steps are computed at a time and kept until another is asked for."""
        if step not in self.known:
            ahead = max(1, AHEAD // self.rows)
            first = max(step - step % ahead, self.order.stage(step).step)
            source, window, _ = self.order.rows(first, self.first_row, self.rows, ahead)
            parts = zip(source.reshape(-1, self.rows), window.reshape(-1, self.rows), strict=True)
            self.known = dict(enumerate(parts, first))
        return self.known[step]

    def _document_begins(self, source: np.ndarray, start: np.ndarray) -> np.ndarray:
        """bool [A*b, T + 1]: which tokens of the windows that begin at `start` are the first of a document."""
        begins = np.zeros((self.rows, self.seq_len + 1), bool)
        for i in np.unique(source):
            rows = np.flatnonzero(source == i)
            starts = self.sources[i].document_starts
            low, high = (np.searchsorted(starts, start[rows] + more) for more in (0, self.seq_len + 1))
            for row, a, b in zip(rows, low, high, strict=True):
                begins[row, starts[a:b] - start[row]] = True
        return begins

    def describe(self, step: int) -> str:
        """The step (counted as in the log, from 1) and its sources, for an error message."""
        stage = self.order.stage(step)
        names = [stage.sources[i].name for i in np.unique(self._rows(step)[0])]
        return f"step {step + 1}" + (f" (of sources {', '.join(names)})" if any(names) else "")


def shapes_of(rows: int, local_batch_size: int, seq_len: int, mask_documents: bool) -> dict[str, tuple[int, ...]]:
    """What a rank's batch of so many rows consists of; see `Batches.__getitem__`."""
    row = (rows // local_batch_size, local_batch_size, seq_len)  # [A, b, T]
    shapes = {"tokens": row, "labels": row, "sample": (rows,), "source": (rows,)}
    return shapes | ({"positions": row} if mask_documents else {})


def as_batch(window: np.ndarray, begins: np.ndarray | None, more: dict[str, np.ndarray], shapes: dict) -> Batch:
    """From windows, int64 [A*b, T + 1], and with masked documents which of their tokens are the first of a document, bool
    [A*b, T + 1] (is changed)."""
    batch = {"tokens": window[:, :-1].copy(), "labels": window[:, 1:].copy()}
    batch |= {name: array.copy() for name, array in more.items()}
    if begins is not None:
        batch["labels"][begins[:, 1:]] = IGNORE
        begins[:, 0] = True
        first, place = np.flatnonzero(begins[:, :-1]), np.arange(batch["tokens"].size)
        batch["positions"] = place - np.repeat(first, np.diff(first, append=len(place)))
    return {name: torch.from_numpy(array).view(shapes[name]) for name, array in batch.items()}


def loader(
    batches: Batches, start_step: int, steps: int, cfg: Data, pin_memory: bool = False
) -> Iterator[Batch]:
    """The batches of steps `start_step` .. `steps - 1`, the same for any number of workers.

    workers = 0 reads in this process. Workers pay where the file system is slow: they read ahead. No loader state is
    saved or needed: a resume starts at its step. LoaderError: a batch cannot be read, or its worker died or took more
    than `cfg.timeout_seconds`."""
    order = range(start_step, steps)
    if cfg.workers == 0:
        for step in order:
            try:
                batch = batches[step]
            except Exception as error:
                raise LoaderError(_cannot_read(batches, step, error)) from error
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if pin_memory else batch
        return
    workers = [_Worker(batches, order[i :: cfg.workers], cfg.prefetch) for i in range(min(cfg.workers, len(order)))]
    try:
        for i, step in enumerate(order):
            yield workers[i % len(workers)].take(step, cfg.timeout_seconds, pin_memory)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A forked process that reads every n-th batch into memory that it shares with the trainer, `prefetch` ahead.

    Not torch's DataLoader, whose worker may be stopped without a word, dies in the middle of whatever the trainer is
    doing, and takes 2 ms to hand over 64 x 256 tokens. Here batches go through a ring of slots in anonymous shared
    memory, and through the pipe only "this slot is full" and "this slot is free", each an empty message: no wait is
    without a limit, and whoever is left alone finds the end of the pipe."""

    def __init__(self, batches: Batches, steps: range, prefetch: int) -> None:
        sizes = {name: int(np.prod(shape)) for name, shape in batches.shapes.items()}
        ring = np.frombuffer(mmap.mmap(-1, 8 * prefetch * sum(sizes.values())), np.int64).reshape(prefetch, -1)
        ends = np.cumsum(list(sizes.values()))[:-1]
        self.slots = [
            {name: part.reshape(batches.shapes[name]) for name, part in zip(sizes, np.split(slot, ends), strict=True)}
            for slot in ring
        ]
        self.batches, self.taken = batches, 0
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _serve(batches, steps, self.slots, theirs)
        theirs.close()

    def take(self, step: int, timeout: float, pin_memory: bool) -> Batch:
        """The next batch of this worker, which must be that of `step`, copied out of its slot."""
        if not self.pipe.poll(timeout):
            raise LoaderError(f"data worker {self.pid} sent nothing for {timeout} s (data.timeout_seconds), while "
                              f"{self.batches.describe(step)} was waited for: it is stopped, or reading hangs")
        try:
            error = self.pipe.recv_bytes().decode()
        except (EOFError, OSError):
            pid, status = os.waitpid(self.pid, 0)
            self.pid = 0
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
            raise LoaderError(f"data worker {pid} died ({how}), while {self.batches.describe(step)} was waited "
                              "for") from None
        if error:
            raise LoaderError(f"data worker {self.pid}: {error}")
        slot = {name: torch.from_numpy(array) for name, array in self.slots[self.taken % len(self.slots)].items()}
        batch = {name: tensor.pin_memory() if pin_memory else tensor.clone() for name, tensor in slot.items()}
        self.taken += 1
        with suppress(OSError):  # it died since: the next call says so
            self.pipe.send_bytes(b"")
        return batch

    def stop(self) -> None:
        """At once, whatever it is doing: it only reads."""
        self.pipe.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _serve(batches: Batches, steps: range, slots: list[dict[str, np.ndarray]], pipe: Connection) -> NoReturn:
    """What a worker does, until the trainer is gone. The signals that ask a run to stop are the trainer's to act on:
    it needs batches until it has."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        for i, step in enumerate(steps):
            if i >= len(slots):
                pipe.recv_bytes()  # a slot is free
            try:
                batch = batches[step]
            except Exception as error:
                pipe.send_bytes(_cannot_read(batches, step, error).encode()[:4000])
                break
            for name, array in slots[i % len(slots)].items():
                array[...] = batch[name].numpy()
            pipe.send_bytes(b"")
        while True:
            pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _cannot_read(batches: Batches, step: int, error: Exception) -> str:
    return f"{batches.describe(step)} cannot be read: {type(error).__name__}: {error}"
