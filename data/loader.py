"""Serves the text of a run: this rank's rows of each step, as tensors.

`Corpora` holds the text of a run: the sources that it trains on, and the sets that it validates on.
Streamed text (data/stream.py::StreamedCorpora) has the same methods. data/open.py opens one or the
other; the rest of the code does not distinguish them.

A reader follows a batch in four hops: tokens on the disk (data/tokens.py), which window of which
source is row r of step s (data/order.py, which defines the words), this rank's rows as tensors (here),
the device (training/microbatches.py). A batch is a function of (seed, step), so a resume needs no replay.

G: rows of the global batch; T: `training.seq_len`; A: microbatches of a rank; b: rows of a microbatch
(`training.local_batch_size`); t: positions whose tokens this rank reads, T without context parallelism.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Protocol

import numpy as np
import torch

from configs.check import tokens_ahead
from configs.schema import Config, Data
from data import further, inputs, loss_weights, packing, splice, too_long, uneven
from data.masking import at, document_begins, positions_in_documents
from data.order import Order
from data.stores import ahead
from data.tokenizer import Tokenizer
from data.tokens import Tokens
from data.workers import LoaderError, cannot_read, read_by_workers

AHEAD = 512  # rows that are located at once
# the label of a token that does not count: torch's own convention, and that of training/loss.py
IGNORE = -100
logger = logging.getLogger("plumbline")

Batch = dict[str, torch.Tensor]


class Ranks(Protocol):
    """Interface through which the data sees the other ranks; `parallelisms/mesh.py::Mesh` has all
    of it."""

    @property
    def dp_rank(self) -> int: ...  # which share of each global batch is this rank's

    @property
    def dp_size(self) -> int: ...

    # the positions of a sequence whose tokens are this rank's
    def token_ranges(self, seq_len: int) -> list[range]: ...

    def gather(self, value: object) -> list: ...


class Corpora:
    """The sources to train on and the sets to validate on, opened.

    sources: by their names in [[data.mixture]]; the source of a run without a mixture is called "".
    sets: what is held out of each source, by its name, and [[validation.sets]].
    description: JSON, everything but the step that decides the order of the training data. Two runs
    with equal descriptions train on the same batches.
    """

    def __init__(
        self, cfg: Config, sources: dict, sets: dict[str, Tokens], description: dict
    ) -> None:
        self.cfg = cfg
        self.sources = sources
        self.sets = sets
        self.description = description

    @property
    def tokenizer(self) -> Tokenizer:
        """The one tokenizer of all sources and sets."""
        return next(iter(self.sources.values())).tokenizer

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError if the tokenizer has ids that a model of so many rows lacks."""
        inputs.check_vocabulary(self.tokenizer, self.cfg.data, vocab_size)

    def order(self, progress: dict) -> Order:
        """Return the order of the batches, of a new run or continued from the `progress` of a
        checkpoint ({} for a new run).

        Raises InputError if the data has changed since that checkpoint (unless data.allow_splice
        permits it), or if a source would be read more often than its max_epochs.
        """
        if progress:
            allow_splice = self.cfg.data.allow_splice
            order, changes = splice.resume(progress, self.description, allow_splice)
        else:
            order = splice.begin(self.description)
            changes = []
        splice.check_run(order, self.cfg)
        if changes:
            logger.warning(
                f"the data changes at step {progress['step']} (data.allow_splice): "
                f"{'; '.join(changes)}"
            )
        return order

    def record(self, order: Order) -> dict:
        """Return JSON for data.json, from which data/audit.py computes what a run has seen."""
        folders = {source.fingerprint: source.folder for source in self.sources.values()}
        run = {"steps": self.cfg.training.steps, "folders": folders}
        more = too_long.record(self.sources, self.cfg) | loss_weights.record(self.cfg)
        return self.state(order) | run | more

    def state(self, order: Order) -> dict:
        """Return JSON for a checkpoint. It is the same at every step of a run, because a step's
        batch follows from the order."""
        return splice.state(order, self.description)

    def batches(
        self, order: Order, steps: range, ranks: Ranks, vocab_size: int, pin_memory: bool = False
    ) -> PreparedBatches:
        """Iterate over this rank's batches of these steps, in lockstep with all ranks."""
        batches = self.training_batches(order, ranks, vocab_size)
        read = loader(batches, steps.start, steps.stop, self.cfg.data, pin_memory)
        return PreparedBatches(read, self.state(order))

    def training_batches(self, order: Order, ranks: Ranks, vocab_size: int) -> Batches:
        """Return this rank's training batches: item i is the batch of step i."""
        tokens = [corpus.train for corpus in self.sources.values()]
        order = splice.until(order, self.cfg)
        batches = rank_batches(self.cfg, tokens, order, ranks, vocab_size)
        batches.depth = tokens_ahead(self.cfg.model)
        batches.loss_weights = loss_weights.of_sources(self.cfg)
        return batches

    def held_out(self, ranks: Ranks, vocab_size: int) -> dict[str, Batches]:
        """Return this rank's batches of each set; {} without validation. Their order is always that
        of seed 0, so every run and every mesh is measured on the same sequences."""
        held_out: dict[str, Batches] = {}
        if not self.cfg.validation.interval:
            return held_out
        training = self.cfg.training
        for name, tokens in self.sets.items():
            source = (name, name, tokens, [[0, 1.0]])
            description = splice.describe([source], 0, training.seq_len, training.global_batch_size)
            order = splice.begin(description)
            held_out[name] = rank_batches(self.cfg, [tokens], order, ranks, vocab_size)
        return held_out

    def audit_hint(self, step: int, windows: list[list[int]]) -> str:
        """Name the command that shows the text of a step. windows: of each rank's batch."""
        return f"`python -m data.audit {self.cfg.run.folder} --steps={step}` shows its documents"


def rank_batches(
    cfg: Config, sources: list[Tokens], order: Order, ranks: Ranks, vocab_size: int
) -> Batches:
    """Return this rank's batches of one split of each source."""
    assert cfg.training.local_batch_size is not None  # configs/check.py::derive
    return Batches(
        sources,
        order,
        cfg.training.local_batch_size,
        ranks.dp_rank,
        ranks.dp_size,
        cfg.data.mask_documents,
        vocab_size,
        ranks.token_ranges(cfg.training.seq_len),
    )


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
        all. Reading a token that is not below `vocab_size` raises ValueError."""
        self.sources = tuple(sources)
        self.order = order
        self.seq_len = order.last.seq_len
        self.share = uneven.share(order, dp_rank, dp_size, local_batch_size)
        self.row_count = self.share.count  # A*b, without those of padding
        self.mask_documents = mask_documents
        self.vocab_size = vocab_size
        self.token_ranges = token_ranges or [range(self.seq_len)]
        self.depth = 0  # further tokens that are predicted (data/further.py)
        self.loss_weights: torch.Tensor | None = None
        self.located: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getitem__(self, step: int) -> Batch:
        """Return tensors of int64: tokens and labels [A, b, t]; source [A*b], the index of each
        row's source; window [A*b], the number of its window there. With mask_documents also
        positions [A, b, T]: of each token in its document, from 0, or from the beginning of the
        window if the document began before. A label that is the first token of a document is then
        IGNORE. Where only answers are labels (data/packing.py), any other label is IGNORE too, and
        a window may end in padding: then also length [A*b], how many of each row's tokens are
        none. With `depth` also what data/further.py adds, and with weights what data/loss_weights.py
        adds."""
        if self.is_stored:
            ahead.ask(self, step)  # for all rows at the same time
        source, window = self.locate(step)
        start, stop = packing.extents(self.sources, source, window, self.seq_len)  # [A*b] each
        tokens = np.zeros((self.row_count, self.seq_len + 1), np.int64)
        for row, column, first, last in self.reads(start, stop):
            text = self.sources[source[row]].read(first, last)
            tokens[row, column : column + len(text)] = text
        highest = tokens.max()
        if highest >= self.vocab_size:
            folder = self.sources[source[tokens.max(axis=1).argmax()]].folder
            raise ValueError(inputs.beyond(folder, highest, self.vocab_size))
        begins = None
        if self.mask_documents:
            begins = document_begins(self.sources, source, start, stop, self.seq_len + 1)
        more = {"window": window, "source": source}
        is_packed = any(isinstance(tokens, packing.PackedTokens) for tokens in self.sources)
        if is_packed:
            more["length"] = stop - start
        batch = as_batch(tokens, begins, more, self.share.local, self.token_ranges)
        if self.depth:
            further.add(batch, tokens, begins, self.token_ranges, self.depth, IGNORE)
        if is_packed:
            where = (IGNORE, self.token_ranges, self.sources, source, start, stop)
            packing.mask_non_answers(batch["labels"].numpy(), *where)
            further.mask_non_answers(batch, *where)
        loss_weights.add(batch, self.loss_weights)
        return uneven.pad(batch, self.share, self.seq_len, IGNORE)

    def reads(self, start: np.ndarray, stop: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Yield (row, column, [first, last) in its source) of the tokens that this rank reads."""
        for row in range(self.row_count):
            for part in self.token_ranges:
                first = int(start[row]) + part.start
                last = min(first + len(part) + 1 + self.depth, int(stop[row]))
                yield row, part.start, first, last

    @property
    def is_stored(self) -> bool:
        """Return whether any of the text is in a store."""
        return any(tokens.is_stored for tokens in self.sources)

    def locate(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the window of each of this rank's rows, int64 [A*b] each. A call of
        numpy costs more than its work on a few numbers, so the rows of several steps are located at
        once."""
        if step not in self.located:
            steps = max(1, AHEAD // self.row_count)
            first = max(step - step % steps, self.order.segment(step).step)
            source, window, _ = self.order.rows(first, self.share.first, self.row_count, steps)
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
    """Build the batch of these windows; see `Batches.__getitem__`. tokens: int64 [A*b, T + 1], read
    and kept at `token_ranges` alone. begins: with masked documents, whether a token is the first of
    its document, bool [A*b, T + 1]. more: further arrays [A*b], by name."""
    arrays = {"tokens": at(token_ranges, tokens), "labels": at(token_ranges, tokens, shift=1)}
    if begins is not None:
        arrays["labels"][at(token_ranges, begins, shift=1)] = IGNORE
        arrays["positions"] = positions_in_documents(begins[:, :-1])
    batch = {name: torch.from_numpy(array.copy()) for name, array in more.items()}
    for name, array in arrays.items():
        batch[name] = torch.from_numpy(array).view(-1, local_batch_size, array.shape[1])
    return batch


def loader(
    batches: Batches, start_step: int, steps: int, cfg: Data, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Yield the batches of steps `start_step` .. `steps - 1`: read here, or ahead of time by
    `cfg.workers` processes, which pays if the file system is slow and cannot change a batch. There
    is no state to save. Raises LoaderError if a batch cannot
    be read, or if its worker died or sent nothing for `cfg.timeout_seconds`."""
    wanted = range(start_step, steps)
    read = read_by_workers if cfg.workers and wanted else read_here
    with closing(read(batches, wanted, cfg)) as source:
        for batch in source:
            yield pinned(batch) if pin_memory else batch


def read_here(batches: Batches, steps: range, cfg: Data) -> Generator[Batch, None, None]:
    step = steps.start
    try:
        for step in ahead.asked(batches, steps) if batches.is_stored else steps:
            yield batches[step]
    except Exception as error:
        raise LoaderError(cannot_read(batches, step, error)) from error


def pinned(batch: Batch) -> Batch:
    """Copy to pinned memory, from which a copy to a GPU does not block the host."""
    return {name: tensor.pin_memory() for name, tensor in batch.items()}


class PreparedBatches:
    """The iterator of `loader`, with what a stream has too: `state`, `end`, `close` and
    `problem`."""

    # why there are no more batches: here a failure is raised at once instead
    problem: Exception | None = None

    def __init__(self, batches: Generator[Batch], state: dict) -> None:
        self.read = batches
        self.saved = state

    def __iter__(self) -> PreparedBatches:
        return self

    def __next__(self) -> Batch:
        return next(self.read)

    def state(self) -> dict:
        """Return JSON for a checkpoint."""
        return self.saved

    def end(self) -> None:
        """Do nothing: there is a batch for every step."""

    def check(self, step: int) -> None:
        """Do nothing, as in `end`."""

    def close(self) -> None:
        """End the worker processes."""
        self.read.close()
