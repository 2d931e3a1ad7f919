"""The text of a run: the sources that it trains on, and the sets that it validates on.

`Corpora` is prepared text, whose batch of a step follows from (order, step) alone. Streamed text
(data/stream.py::StreamedCorpora) has the same methods. data/open.py opens the one or the other, and
nobody else has to ask.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Protocol

from configs.schema import Config
from data import inputs, splice
from data.loader import Batch, Batches, loader
from data.order import Order
from data.tokenizer import Tokenizer
from data.tokens import Tokens

say = logging.getLogger("plumbline")


class Ranks(Protocol):
    """What the data must know about the other ranks. `parallelisms/mesh.py::Mesh` has all of it."""

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
        """Raises InputError if the tokenizer has ids that a model of `vocab_size` tokens does not
        know."""
        inputs.check_vocabulary(self.tokenizer, self.cfg, vocab_size)

    def order(self, progress: dict) -> Order:
        """The order of the batches, of a new run or as the `progress` of a checkpoint goes on with
        it ({} for a new run).

        Raises InputError if the data has changed since that checkpoint (unless data.allow_splice
        permits it), or if a source would be read more often than its max_epochs.
        """
        if progress:
            allow_splice = self.cfg.data.allow_splice
            order, changes = splice.resume(progress, self.description, allow_splice)
        else:
            order = splice.begin(self.description)
            changes = []
        max_epochs = {entry.name: entry.max_epochs for entry in self.cfg.data.mixture}
        splice.check_epochs(order, self.cfg.training.steps, max_epochs)
        if changes:
            say.warning(
                f"the data changes at step {progress['step']} (data.allow_splice): "
                f"{'; '.join(changes)}"
            )
        return order

    def record(self, order: Order) -> dict:
        """JSON for data.json, from which data/audit.py computes which text a run has seen."""
        folders = {source.fingerprint: source.folder for source in self.sources.values()}
        run = {"steps": self.cfg.training.steps, "folders": folders}
        return self.state(order) | run

    def state(self, order: Order) -> dict:
        """JSON for a checkpoint. It is the same at every step of a run, because a step's batch
        follows from the order."""
        return splice.state(order, self.description)

    def batches(
        self, order: Order, steps: range, ranks: Ranks, vocab_size: int, pin_memory: bool = False
    ) -> PreparedBatches:
        """An iterator over this rank's batches of these steps. All ranks take the next batch at the
        same time."""
        read = loader(
            self.training_batches(order, ranks, vocab_size),
            steps.start,
            steps.stop,
            self.cfg.data,
            pin_memory,
        )
        return PreparedBatches(read, self.state(order))

    def training_batches(self, order: Order, ranks: Ranks, vocab_size: int) -> Batches:
        """This rank's training batches: item i is the batch of step i."""
        tokens = [corpus.train for corpus in self.sources.values()]
        return rank_batches(self.cfg, tokens, order, ranks, vocab_size)

    def held_out(self, ranks: Ranks, vocab_size: int) -> dict[str, Batches]:
        """This rank's batches of each set; {} without validation. Their order is that of seed 0
        whatever run.seed is, so every run and every mesh is measured on the same sequences."""
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

    def whereabouts(self, step: int, windows: list[list[int]]) -> str:
        """Where a person finds the text of a step. windows: the `window` of each rank's batch."""
        return f"`python -m data.audit {self.cfg.run.folder} --steps={step}` shows its documents"


class PreparedBatches:
    """The iterator of data/loader.py, with what a stream has too: `state`, `end`, `close` and
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
        """JSON for a checkpoint."""
        return self.saved

    def end(self) -> None:
        """Nothing to do: there is a batch for every step."""

    def close(self) -> None:
        """End the worker processes."""
        self.read.close()


def rank_batches(
    cfg: Config, sources: list[Tokens], order: Order, ranks: Ranks, vocab_size: int
) -> Batches:
    """This rank's batches of one split of each source."""
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
