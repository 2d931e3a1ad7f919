"""The text of a run: what it trains on and what it validates on, behind one interface for prepared
and for streamed text.

`open_corpora(cfg)` decides between the two, and nobody else has to ask. `Corpora` has everything
that differs between them: what describes the order of the data, how a run goes on from a
checkpoint, and the batches themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from types import ModuleType
from typing import ClassVar, Protocol

from configs.schema import Config, InputError
from data import inputs
from data import order as orders
from data import stream as streams
from data.loader import Batch, Batches, loader
from data.order import Order
from data.prepare import prepare
from data.tokenizer import Tokenizer
from data.tokens import Prepared, Tokens, verify

say = logging.getLogger("plumbline")


class Ranks(Protocol):
    """What the data must know about the other ranks. `parallelisms/mesh.py::Mesh` has all of it."""

    dp_rank: int  # which share of each global batch is this rank's
    dp_size: int

    # the positions of a sequence whose tokens are this rank's
    def token_ranges(self, seq_len: int) -> list[range]: ...

    def gather(self, value: object) -> list: ...


class Corpora:
    """The sources to train on and the sets to validate on, opened.

    sources: by the name of their row in [[data.mixture]]; the source of a run without a mixture is
    called "". sets: what is held out of each source, by its name, and [[validation.sets]].
    description: JSON, everything but the step that decides the order of the training data. Two runs
    with equal descriptions train on the same batches.
    """

    plan: ClassVar[ModuleType]  # has begin, resume and state: data/order.py or data/stream.py

    def __init__(self, cfg: Config, sources: dict, sets: dict[str, Tokens]) -> None:
        self.cfg, self.sources, self.sets = cfg, sources, sets
        self.description = self.describe()

    @property
    def tokenizer(self) -> Tokenizer:
        """The one tokenizer of all sources and sets."""
        return next(iter(self.sources.values())).tokenizer

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InputError if the tokenizer has ids that a model of `vocab_size` tokens does not
        know."""
        inputs.check_vocabulary(self.tokenizer, self.cfg, vocab_size)

    def order(self, progress: dict) -> Order | streams.Order:
        """The order of the batches, of a new run or as the `progress` of a checkpoint goes on with
        it ({} for a new run).

        Raises InputError if the data has changed since that checkpoint (unless data.allow_splice
        permits it), or if a source would be read more often than its max_epochs.
        """
        order, changes = self.plan.begin(self.description), []
        if progress:
            order, changes = self.plan.resume(
                progress, self.description, self.cfg.data.allow_splice
            )
        if self.cfg.data.mixture:
            order.check_epochs(
                self.cfg.training.steps, {row.name: row.max_epochs for row in self.cfg.data.mixture}
            )
        if changes:
            say.warning(
                f"the data changes at step {progress['step']} (data.allow_splice): "
                f"{'; '.join(changes)}"
            )
        return order

    def record(self, order: Order | streams.Order) -> dict:
        """JSON for data.json, from which data/audit.py computes which text a run has seen."""
        folders = {source.fingerprint: source.folder for source in self.sources.values()}
        return self.plan.state(order, self.description) | {
            "steps": self.cfg.training.steps,
            "folders": folders,
        }

    def held_out(self, ranks: Ranks, vocab_size: int) -> dict[str, Batches]:
        """This rank's batches of each set; {} without validation. Their order is that of seed 0
        whatever run.seed is, so every run and every mesh is measured on the same sequences."""
        t, held_out = self.cfg.training, {}
        for name, tokens in self.sets.items() if self.cfg.validation.interval else ():
            description = orders.describe(
                [(name, name, tokens, [[0, 1.0]])], 0, t.seq_len, t.global_batch_size
            )
            held_out[name] = _rows(self.cfg, [tokens], orders.begin(description), ranks, vocab_size)
        return held_out

    def describe(self) -> dict:
        raise NotImplementedError

    def batches(
        self,
        order: Order | streams.Order,
        steps: range,
        ranks: Ranks,
        vocab_size: int,
        pin_memory: bool = False,
    ) -> PreparedBatches | streams.Batches:
        """An iterator over this rank's batches of these steps. All ranks take the next batch at the
        same time."""
        raise NotImplementedError

    def whereabouts(self, step: int, samples: list[list[int]]) -> str:
        """Where a person finds the text of a step. samples: the `sample` of each rank's batch."""
        raise NotImplementedError


class PreparedCorpora(Corpora):
    """Text that was tokenised beforehand: batch i is a function of (order, i) alone."""

    plan = orders

    def describe(self) -> dict:
        cfg = self.cfg
        weights = {
            row.name: [[0, row.weight], *map(list, row.schedule)] for row in cfg.data.mixture
        } or {"": [[0, 1.0]]}
        rows = [
            (name, corpus.fingerprint, corpus.train, weights[name])
            for name, corpus in self.sources.items()
        ]
        return orders.describe(
            rows, cfg.run.seed, cfg.training.seq_len, cfg.training.global_batch_size, cfg.data.skip
        )

    def rows(self, order: Order, ranks: Ranks, vocab_size: int) -> Batches:
        """This rank's training batches: item i is the batch of step i."""
        return _rows(
            self.cfg, [corpus.train for corpus in self.sources.values()], order, ranks, vocab_size
        )

    def batches(self, order, steps, ranks, vocab_size, pin_memory=False) -> PreparedBatches:
        rows = self.rows(order, ranks, vocab_size)
        taken = loader(rows, steps.start, steps.stop, self.cfg.data, pin_memory)
        return PreparedBatches(taken, orders.state(order, self.description))

    def whereabouts(self, step: int, samples: list[list[int]]) -> str:
        return f"`python -m data.audit {self.cfg.run.folder} --steps={step}` shows its documents"


class PreparedBatches:
    """The iterator of data/loader.py, with what a stream has too: `state`, `end`, `close` and
    `problem`."""

    # why there are no more batches: here a failure is raised at once instead
    problem: Exception | None = None

    def __init__(self, batches: Generator[Batch], position: dict) -> None:
        self.taken, self.position = batches, position

    def __iter__(self) -> PreparedBatches:
        return self

    def __next__(self) -> Batch:
        return next(self.taken)

    def state(self) -> dict:
        """JSON for a checkpoint. It is the same at every step, because a step's batch follows from
        the order."""
        return self.position

    def end(self) -> None:
        """Nothing to do: there is a batch for every step."""

    def close(self) -> None:
        """End the worker processes."""
        self.taken.close()


class StreamedCorpora(Corpora):
    """One source that is tokenised while the run trains on it (data.stream)."""

    plan = streams

    def describe(self) -> dict:
        t = self.cfg.training
        return streams.describe(self.sources[""], self.cfg.run.seed, t.seq_len, t.global_batch_size)

    def batches(self, order, steps, ranks, vocab_size, pin_memory=False) -> streams.Batches:
        return streams.Batches(
            self.sources[""],
            order,
            steps,
            self.cfg.training.local_batch_size,
            ranks.dp_rank,
            ranks.dp_size,
            ranks.gather,
            vocab_size,
            pin_memory,
            ranks.token_ranges(self.cfg.training.seq_len),
        )

    def whereabouts(self, step: int, samples: list[list[int]]) -> str:
        return f"its samples: {sorted({number for rows in samples for number in rows})}"


def _rows(
    cfg: Config, sources: list[Tokens], order: Order, ranks: Ranks, vocab_size: int
) -> Batches:
    local, mask = cfg.training.local_batch_size, cfg.data.mask_documents
    token_ranges = ranks.token_ranges(cfg.training.seq_len)
    return Batches(
        sources, order, local, ranks.dp_rank, ranks.dp_size, mask, vocab_size, token_ranges
    )


def open_corpora(cfg: Config, log: Callable[[str], object], verifies: bool = True) -> Corpora:
    """Open every source and every set of a run. A source is tokenised first if that has not been
    done; a stream (data.stream) is only opened.

    log receives lines for a person. verifies: with data.verify, whether this rank hashes the files;
    one on each host does. Raises InputError: text that cannot be used, sources of different
    tokenizers, validation without a set.
    """
    rows, further = inputs.sources_of(cfg)
    inputs.check_bpe(cfg)

    def prepared(source: str, fraction: float) -> Prepared:
        return prepare(
            cfg.data.model_copy(update={"source": source, "validation_fraction": fraction}), log=log
        )

    if cfg.data.stream:
        sources = {"": streams.open_source(cfg.data, log)}
    else:
        sources = {
            name: prepared(source, cfg.data.validation_fraction) for name, source in rows.items()
        }
    whole = {name: prepared(source, 0.0) for name, source in further.items()}
    first = next(iter(sources.values()))
    for corpus in (*sources.values(), *whole.values()):
        if cfg.data.verify and verifies and isinstance(corpus, Prepared):
            verify(corpus.folder)
        if corpus.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise InputError(
                f"{corpus.folder} and {first.folder} were prepared with different tokenizers: use "
                "the same for both"
            )
    sets = {name: corpus.validation for name, corpus in sources.items() if len(corpus.validation)}
    sets |= {
        name: corpus.validation if len(corpus.validation) else corpus.train
        for name, corpus in whole.items()
    }
    if cfg.validation.interval and not sets:
        raise InputError(
            f"validation.interval = {cfg.validation.interval}, but {first.folder} was prepared "
            "without "
            "held-out documents: set it to 0, or name [[validation.sets]]"
        )
    return (StreamedCorpora if cfg.data.stream else PreparedCorpora)(cfg, sources, sets)
