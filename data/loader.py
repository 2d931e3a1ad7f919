"""Reads this rank's rows of a step, as tensors.

A reader follows a batch in four hops: tokens on the disk (data/tokens.py), which window of which
source is row r of step s (data/order.py, which defines the words), this rank's rows as tensors (here),
the device (training/feed.py). A batch is a function of (seed, step), so a resume needs no replay.

G: rows of the global batch; T: `training.seq_len`; A: microbatches of a rank; b: rows of a microbatch
(`training.local_batch_size`); t: positions whose tokens this rank reads, T without context parallelism.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import torch

from configs.schema import Data, InputError
from data.masking import document_begins, positions_in_documents
from data.order import Order
from data.tokens import Tokens
from data.workers import LoaderError, cannot_read, read_by_workers

AHEAD = 512  # rows that are located at once
# the label of a token that does not count: torch's own convention, and that of training/loss.py
IGNORE = -100

Batch = dict[str, torch.Tensor]


class Batches:
    """`batches[step]` is this rank's part of the global batch of any step, the millionth as fast as
    the first.

    Rank r of n has the contiguous rows [r*G/n, (r+1)*G/n). The rows of all ranks, one after another,
    are the batch of a single rank in the same order.
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
        """sources: one split of each source, in the order of `order.last`, the segment whose steps
        are read. token_ranges: the positions of a window whose tokens this rank has; none given:
        all. Reading a token that is not below `vocab_size` raises ValueError. Raises InputError if
        ranks and microbatches do not divide the global batch."""
        global_batch_size = order.last.global_batch_size
        if global_batch_size % (dp_size * local_batch_size):
            raise InputError(
                f"training.global_batch_size = {global_batch_size} is not a multiple of {dp_size} "
                f"data-parallel ranks x {local_batch_size} sequences (training.local_batch_size)"
            )
        self.sources = tuple(sources)
        self.order = order
        self.seq_len = order.last.seq_len
        self.local_batch_size = local_batch_size
        self.row_count = global_batch_size // dp_size  # A*b
        self.first_row = dp_rank * self.row_count
        self.mask_documents = mask_documents
        self.vocab_size = vocab_size
        self.token_ranges = token_ranges or [range(self.seq_len)]
        self.located: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getitem__(self, step: int) -> Batch:
        """Tensors of int64: tokens and labels [A, b, t]; source [A*b], the index of each row's
        source; window [A*b], the number of its window there. With mask_documents also positions
        [A, b, T]: of each token in its document, from 0, or from the beginning of the window if the
        document began before. A label that is the first token of a document is then IGNORE."""
        source, window = self.locate(step)
        start = window * self.seq_len  # [A*b]
        tokens = np.zeros((self.row_count, self.seq_len + 1), np.int64)
        for row in range(self.row_count):
            for part in self.token_ranges:
                first = int(start[row]) + part.start
                text = self.sources[source[row]].read(first, first + len(part) + 1)
                tokens[row, part.start : part.stop + 1] = text
        highest = tokens.max()
        if highest >= self.vocab_size:
            row = tokens.max(axis=1).argmax()
            raise ValueError(
                f"{self.sources[source[row]].folder} has token {highest}, the model's vocabulary "
                f"{self.vocab_size}: this tokenised corpus is damaged (data.verify = true finds "
                "where)"
            )
        begins = None
        if self.mask_documents:
            begins = document_begins(self.sources, source, start, self.seq_len + 1)
        more = {"window": window, "source": source}
        return as_batch(tokens, begins, more, self.local_batch_size, self.token_ranges)

    def locate(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each of this rank's rows, int64 [A*b] each. A call of numpy costs
        more than its work on a few numbers, so the rows of several steps are located at once."""
        if step not in self.located:
            steps = max(1, AHEAD // self.row_count)
            first = max(step - step % steps, self.order.segment(step).step)
            source, window, _ = self.order.rows(first, self.first_row, self.row_count, steps)
            source = source.reshape(-1, self.row_count)
            window = window.reshape(-1, self.row_count)
            self.located = dict(enumerate(zip(source, window, strict=True), first))
        return self.located[step]


def as_batch(
    tokens: np.ndarray,
    begins: np.ndarray | None,
    more: dict[str, np.ndarray],
    local_batch_size: int,
    token_ranges: Sequence[range],
) -> Batch:
    """The batch of these windows; see `Batches.__getitem__`. tokens: int64 [A*b, T + 1], read and
    kept at `token_ranges` alone. begins: with masked documents, whether a token is the first of its
    document, bool [A*b, T + 1]. more: further arrays [A*b], by name."""
    arrays = {"tokens": at(token_ranges, tokens), "labels": at(token_ranges, tokens, shift=1)}
    if begins is not None:
        arrays["labels"][at(token_ranges, begins, shift=1)] = IGNORE
        arrays["positions"] = positions_in_documents(begins[:, :-1])
    batch = {name: torch.from_numpy(array.copy()) for name, array in more.items()}
    for name, array in arrays.items():
        batch[name] = torch.from_numpy(array).view(-1, local_batch_size, array.shape[1])
    return batch


def at(token_ranges: Sequence[range], array: np.ndarray, shift: int = 0) -> np.ndarray:
    """The columns of these positions, moved by `shift`: [rows, T + 1] -> [rows, t]."""
    parts = [array[:, part.start + shift : part.stop + shift] for part in token_ranges]
    return np.concatenate(parts, axis=1)


def loader(
    batches: Batches, start_step: int, steps: int, cfg: Data, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """The batches of steps `start_step` .. `steps - 1`: read here, or ahead of time by `cfg.workers`
    processes, which pays if the file system is slow and cannot change a batch. There is no state to
    save. Raises LoaderError if a batch cannot be read, or if its worker died or sent nothing for
    `cfg.timeout_seconds`."""
    wanted = range(start_step, steps)
    if cfg.workers and wanted:
        source = read_by_workers(batches, wanted, cfg)
    else:
        source = read_here(batches, wanted)
    with closing(source):
        for batch in source:
            yield pinned(batch) if pin_memory else batch


def read_here(batches: Batches, steps: range) -> Generator[Batch, None, None]:
    for step in steps:
        try:
            batch = batches[step]
        except Exception as error:
            raise LoaderError(cannot_read(batches, step, error)) from error
        yield batch


def pinned(batch: Batch) -> Batch:
    """A copy in pinned memory, from which a copy to a GPU does not block the host."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
