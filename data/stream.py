"""Tokenises text while the run trains on it: no preparation, nothing on the disk, any size.

With a prepared corpus, the batch of a step is computed from its number (data/order.py). Here it
depends on how far each stream has read. That state belongs to neither a rank nor a worker. It
belongs to one of `data.streams` logical streams, whose number is part of the run like its seed:

1. The source is cut into units: files, ranges of bytes of JSON lines, row groups, or shards
   (data/sources.py::pieces). If these are fewer than the streams, a unit is every n-th document of
   one of them. The units of all epochs are numbered one after another, each epoch in its own order
   (a permutation keyed by seed and epoch). Unit q belongs to stream q % streams.
2. A stream is the tokens of its units' documents, one after another. It is cut into windows like a
   prepared corpus.
3. Rows and streams are both cut into gcd(global_batch_size, streams) equal groups, and the rows of
   a group take windows from the group's streams in turn. A data-parallel rank has one or more whole
   groups.

So batch(step) is the same, order included, on every number of ranks that divides both, and the
whole state of a stream is the `Place` of its next token. A resume opens the unit again and skips
the documents before that place; their checksum must be the one that was saved. No token is dropped
between documents, units or epochs.

One thread reads and tokenises, some batches ahead. It reaches some two million tokens
per second and rank, and tiktoken releases the GIL meanwhile. Worker processes are not used, because
threads of the libraries for Hugging Face and Parquet would not survive a fork.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import numpy as np

from configs.check import tokens_ahead
from configs.schema import Data, InputError
from configs.words import number_of
from data import fim, further, sources, splice
from data.loader import IGNORE, Batch, Corpora, Ranks, as_batch, pinned
from data.open_tokenizer import open_named
from data.prepare import is_tokenised
from data.prepare.encoding import check_tokens, encode
from data.shuffle import permute
from data.tokenizer import Tokenizer
from data.workers import AHEAD, LoaderError
from reliability.objects import Unreachable

# bytes of a unit, about: it is cheap to open, and takes seconds to read again
LEAST = 1 << 18
MOST = 64_000_000
UNITS = 8  # for each stream, if there is enough text: the more units, the more even the streams
# after so many epochs' worth of units without a token, a stream concludes that there is no text
BARREN = 16
# Attempts to open again what cannot be read, as many as a store gets (reliability/objects.py::TRIES).
RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts; each is twice the last
logger = logging.getLogger("plumbline")


class Changed(InputError):
    """The text is not what was read before."""


@dataclass(frozen=True)
class Unit:
    piece: sources.Piece
    first: int  # of every `every` documents of the piece
    every: int


@dataclass(frozen=True)
class StreamSource:
    """A source that is tokenised while the run trains: its files, how they are cut, and how they
    become tokens. Equal `fingerprint`s mean the same names, sizes and options. Whether the text is
    the same too is only seen when it is read again."""

    cfg: Data
    tokenizer: Tokenizer
    units: tuple[Unit, ...]
    fingerprint: str
    folder: str  # the source
    train: tuple = ()  # the tokens, in a prepared corpus; unknown here
    validation: tuple = ()


def open_source(cfg: Data, log: Callable[[str], object] = print) -> StreamSource:
    """Open `cfg.source`: only names and sizes are read. Raises InputError if it cannot be streamed."""
    if is_tokenised(cfg.source):
        raise InputError(
            f"data.source: {cfg.source} is prepared already, so there is nothing to stream: "
            "data.stream = false"
        )
    tok = open_named(cfg)
    files = sources.find(cfg.source)
    check_tokens(cfg, tok)
    total = sum(file.size for file in files)
    size = min(max(total // (cfg.streams * UNITS), LEAST), MOST)
    pieces = [piece for of_file in sources.cut(files, size) for piece in of_file]
    if not pieces:
        raise InputError(f"data.source: {cfg.source} has no text")
    every = -(-cfg.streams // len(pieces))
    line = (
        f"{cfg.source}: {number_of(len(files), 'file')}, streamed in {number_of(len(pieces), 'piece')} by "
        f"{number_of(cfg.streams, 'stream')}"
    )
    if every > 1:
        line += f"; each piece is read {every} times per epoch, as there are fewer than streams"
    log(line)
    sources.warn_of_lines(files, log)
    sources.warn_of_others(cfg.source, log)
    units = tuple(Unit(piece, first, every) for piece in pieces for first in range(every))
    return StreamSource(cfg, tok, units, _fingerprint(cfg, tok, pieces, every), cfg.source)


def _fingerprint(cfg: Data, tok: Tokenizer, pieces: list[sources.Piece], every: int) -> str:
    """Hash the names and sizes of the files, how they are cut, and how they are read."""
    cut = []
    for piece in pieces:
        file = piece.file
        changed = file.mtime_ns if file.path.startswith(sources.HUGGING_FACE) else 0
        cut.append([file.name, file.size, changed, piece.start, piece.stop])
    options = [
        cfg.text_field,
        cfg.add_bos,
        cfg.add_eos,
        cfg.max_document_bytes,
        cfg.validation_fraction,
        *sources.json_reading(cfg, [piece.file for piece in pieces]),
        *fim.options(cfg, tok),
    ]
    digest = hashlib.sha256(json.dumps([cut, every, options]).encode())
    return digest.hexdigest()[:32]


# --------------------------------------------------------------------------------------------------
# the order


def describe(source: StreamSource, seed: int, seq_len: int, global_batch_size: int) -> dict:
    """Describe as JSON all that decides the order."""
    return {
        "fingerprint": source.fingerprint,
        "tokenizer": source.tokenizer.fingerprint,
        "streams": source.cfg.streams,
        "seed": seed,
        "seq_len": seq_len,
        "global_batch_size": global_batch_size,
    }


@dataclass(frozen=True)
class Place:
    """A place in a stream, before a token. All numbers count from 0."""

    unit: int = 0  # of this stream
    document: int = 0  # of the unit's piece, including documents that are left out
    checksum: int = 0  # crc32 of the unit's texts before this place
    failed: int = 0  # earlier documents of this stream that could not be read and were left out
    token: int = 0  # of the document


class StreamOrder:
    """Assignment of rows to streams, and the progress of each stream."""

    def __init__(self, description: dict, places: list[Place]) -> None:
        """places: of all streams."""
        self.description = description
        self.places = places
        self.seed = description["seed"]
        self.seq_len = description["seq_len"]
        self.global_batch_size = description["global_batch_size"]
        self.groups = math.gcd(self.global_batch_size, len(places))

    def row(self, step: int, row: int) -> tuple[int, int]:
        """Return the stream of a row of `step`, and the number of the row's window there."""
        per_step = self.global_batch_size // self.groups
        per_group = len(self.places) // self.groups
        group, index = divmod(row, per_step)
        window, stream = divmod(step * per_step + index, per_group)
        return group * per_group + stream, window

    def samples(self, step: int) -> int:
        """Count the samples of the run before `step`."""
        return step * self.global_batch_size

    def tokens(self, step: int) -> int:
        """Count the labels of the run before `step`, including those that do not count."""
        return self.samples(step) * self.seq_len


def begin(description: dict) -> StreamOrder:
    """Return the order of a run that starts with this description."""
    return StreamOrder(description, [Place()] * description["streams"])


def resume(progress: dict, description: dict) -> StreamOrder:
    """Continue the order of a run from a checkpoint's progress. Raises InputError for any change,
    since a stream cannot go on with different data."""
    step = progress["step"]
    saved = progress.get("data")
    if not step and saved is None:
        return begin(description)
    instead = (
        "restore it, or start from the weights in another run.folder, with checkpoint.load_path"
    )
    if not saved or "streams" not in saved:
        raise InputError(
            f"the checkpoint of step {step} is of a run that did not stream (data.stream = true "
            f"does): {instead}"
        )
    option_of = {
        "fingerprint": "the files of data.source, or how they are read,",
        "tokenizer": "data.tokenizer",
        "streams": "data.streams",
        **splice.OPTIONS,
    }
    before = saved["description"]
    if before["streams"] != description["streams"]:
        del option_of["fingerprint"]  # how the files are cut follows from it
    lines = [
        f"{option} was {before[key]} and is {description[key]}"
        for key, option in option_of.items()
        if before[key] != description[key]
    ]
    if lines:
        raise InputError(
            f"the data would change at step {step}, which a stream cannot: {'; '.join(lines)}: "
            f"{instead}"
        )
    return StreamOrder(description, [Place(**place) for place in saved["streams"]])


def state(order: StreamOrder, description: dict) -> dict:
    """Return JSON for a checkpoint, from which `resume` goes on."""
    return {"description": description, "streams": [asdict(place) for place in order.places]}


# --------------------------------------------------------------------------------------------------
# one stream


class Stream:
    """One logical stream, beginning at a place."""

    def __init__(
        self, source: StreamSource, order: StreamOrder, number: int, stop: threading.Event
    ) -> None:
        self.source = source
        self.cfg = source.cfg
        self.number = number
        self.stop = stop
        self.streams = len(order.places)
        self.seed = order.seed
        self.seq_len = order.seq_len
        self.place = order.places[number]  # of the next window's first token
        # documents with tokens that are in no window yet
        self.waiting: deque[tuple[Place, np.ndarray]] = deque()
        self.held = -self.place.token  # how many such tokens they have
        self.documents = self._documents(replace(self.place, token=0))

    def window(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the next window, int64 [T + 1], and whether a token is the first of a document, bool
        [T + 1]. `place` moves on by T tokens. Raises Changed or LoaderError."""
        T = self.seq_len
        while self.held < T + 1:
            place, ids = next(self.documents)
            self.waiting.append((place, ids))
            self.held += len(ids)
        tokens = np.empty(T + 1, np.int64)
        begins = np.zeros(T + 1, bool)
        start = -self.place.token  # of the document, counted from the window's first token
        for _, ids in self.waiting:  # only the last of them may reach beyond the window
            if start >= 0:
                begins[start] = True
            inside = ids[max(-start, 0) : T + 1 - start]
            tokens[max(start, 0) : start + len(ids)] = inside
            start += len(ids)
        self.held -= T
        token = self.place.token + T
        while token >= len(self.waiting[0][1]):
            token -= len(self.waiting.popleft()[1])
        self.place = replace(self.waiting[0][0], token=token)
        return tokens, begins

    def _documents(self, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Yield (place, tokens) of each document to train on, from `place` on."""
        units = self.source.units
        cfg = self.cfg
        allowed = math.inf if cfg.source in sources.INSTALLED else cfg.skip_failed
        barren = 0  # units in a row without a token to train on
        while True:
            barren += 1
            epoch, index = divmod(self.number + place.unit * self.streams, len(units))
            (chosen,) = permute(np.array([index]), epoch, len(units), self.seed)
            unit = units[int(chosen)]
            for number, document, checksum in self._read(unit, place):
                place = replace(place, document=number)
                problem, rows = self._encode(document)
                for split, ids, *_ in rows:  # a single row
                    if split == "train" and len(ids):
                        barren = 0
                        yield place, ids
                failed = bool(problem) and problem != sources.TOO_LONG
                place = replace(
                    place, document=number + 1, checksum=checksum, failed=place.failed + failed
                )
                if failed:
                    error = sources.failure(unit.piece, document._replace(problem=problem))
                    if place.failed > allowed:
                        raise LoaderError(
                            f"data stream {self.number}: {error}; repair it, or let each stream "
                            f"leave out some (data.skip_failed = {cfg.skip_failed})"
                        )
                    logger.warning(f"data stream {self.number}: left out: {error}")
            place = Place(unit=place.unit + 1, failed=place.failed)
            # each epoch distributes the units again, so a stream finds text if there is any
            if barren > BARREN * len(units):
                raise InputError(
                    f"data.source: {cfg.source} has no text to train on (data stream {self.number})"
                )

    def _encode(self, document: sources.Document) -> tuple[str, list]:
        """Encode a document: its problem, or "", and its (split, tokens)."""
        if document.problem or not document.text:
            return document.problem, []
        _, _, rows = encode(self.cfg, self.source.tokenizer, document.text, {})
        if isinstance(rows, str):  # what is wrong with it
            return rows, []
        return "", rows

    def _read(self, unit: Unit, place: Place) -> Iterator[tuple[int, sources.Document, int]]:
        """Yield (number in its piece, document, checksum after it) of a unit's documents, from
        `place` on. If the piece cannot be read, it is opened again up to RETRIES times, and
        reading goes on after the last document that came."""
        cfg = self.cfg
        done = place.document
        checksum = place.checksum
        attempt = 0
        while True:
            try:
                passed = 0  # the checksum of the documents so far
                number = -1  # of the last one
                longest = cfg.max_document_bytes
                documents = sources.read(unit.piece, cfg.text_field, longest, cfg.json_files)
                for number, document in enumerate(documents):
                    if document.problem.startswith(sources.UNREADABLE):
                        raise OSError(document.problem.removeprefix(sources.UNREADABLE))
                    if number == done and passed != checksum:
                        break
                    if number % unit.every != unit.first:
                        continue
                    if number < done:
                        passed = zlib.crc32(document.text.encode(), passed)
                        continue
                    checksum = zlib.crc32(document.text.encode(), checksum)
                    passed = checksum
                    yield number, document, checksum
                    done = number + 1
                    attempt = 0
                if passed != checksum or number + 1 < done:
                    raise Changed(
                        f"data.source: the text of {unit.piece.file.path} is not what data stream "
                        f"{self.number} read of it before: restore it, or start from the weights "
                        "in another run.folder, with checkpoint.load_path"
                    )
                return
            except Changed:
                raise
            except Unreachable as error:  # it has been tried often enough
                raise LoaderError(f"data stream {self.number}: {error}") from error
            except Exception as error:  # the many libraries below raise all kinds
                attempt += 1
                where = f"{unit.piece.file.path}, after document {done},"
                if self._stopped_in_pause(attempt, where, error):
                    raise

    def _stopped_in_pause(self, attempt: int, where: str, error: Exception) -> bool:
        """Warn of a read that failed, and wait before the next attempt. Returns whether the run
        stopped meanwhile. Raises LoaderError after the last attempt."""
        failure = (
            f"data stream {self.number}: {where} cannot be read: {type(error).__name__}: {error}"
        )
        if attempt > RETRIES:
            raise LoaderError(f"{failure} (attempt {attempt} of {attempt})") from error
        pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE)
        logger.warning(f"{failure} (attempt {attempt} of {RETRIES + 1}; the next in {pause:g} s)")
        return self.stop.wait(pause)


# --------------------------------------------------------------------------------------------------
# the batches


class StreamedBatches:
    """An iterator of this rank's batches, in lockstep with all other ranks.

    Where this rank's streams end, `problem` says why: Changed or a LoaderError. From
    then on its batches are empty: no label counts. The rank tells the others so with the loss of
    that step (`train.Flags`), which then changes no weight, and all ranks call `end`."""

    def __init__(
        self,
        source: StreamSource,
        order: StreamOrder,
        steps: range,
        local_batch_size: int,
        ranks: Ranks,
        vocab_size: int = 2**32,
        pin_memory: bool = False,
    ) -> None:
        """Raises InputError if the ranks do not divide streams and rows."""
        dp_size = ranks.dp_size
        if order.groups % dp_size:
            raise InputError(
                f"{dp_size} data-parallel ranks must divide data.streams = {len(order.places)} and "
                f"training.global_batch_size = {order.global_batch_size}"
            )
        self.source = source
        self.order = order
        self.cfg = source.cfg
        self.steps = steps
        self.local_batch_size = local_batch_size
        self.gather = ranks.gather
        self.vocab_size = vocab_size
        self.pin_memory = pin_memory
        rows = order.global_batch_size // dp_size
        streams = len(order.places) // dp_size
        self.rows = range(ranks.dp_rank * rows, (ranks.dp_rank + 1) * rows)
        self.mine = range(ranks.dp_rank * streams, (ranks.dp_rank + 1) * streams)
        self.token_ranges = ranks.token_ranges(order.seq_len)
        self.depth = 0  # further tokens that are predicted (data/further.py)
        self.problem: Exception | None = None
        # after the batch that was given last
        self.places = order.places[self.mine.start : self.mine.stop]
        self.places_before = self.places  # before that batch
        self.ready: queue.Queue[tuple[Batch, list[Place]] | Exception] = queue.Queue(AHEAD)
        self.stop = threading.Event()
        threading.Thread(target=self._work, name="data stream", daemon=True).start()

    def __iter__(self) -> StreamedBatches:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, as in data/loader.py::Batches; `window` is stream + streams *
        (number of the window there)."""
        item = self.problem or self._take()
        self.places_before = self.places
        if isinstance(item, Exception):
            self.problem = item
            return self._empty()
        batch, self.places = item
        return pinned(batch) if self.pin_memory else batch

    def _empty(self) -> Batch:
        """Build a batch that takes part in a step and counts for nothing."""
        tokens = np.zeros((len(self.rows), self.order.seq_len + 1), np.int64)
        number = np.zeros(len(self.rows), np.int64)
        batch = self._as_batch(tokens, np.zeros(tokens.shape, bool), number)
        for labels in batch.keys() & {"labels", "labels_ahead"}:
            batch[labels].fill_(IGNORE)
        return batch

    def end(self) -> None:
        """Go back to before the last batch, because some rank had none. From now on `problem` is
        the same on all ranks, which all call this."""
        self.places = self.places_before
        self.problem = next(problem for problem in self.gather(self.problem) if problem)
        self.close()

    def check(self, step: int) -> None:
        """Raise `problem`, if the stream could not be read after `step`."""
        if self.problem:
            logger.warning(
                f"the stream cannot be read for step {step + 1}; everything up to step {step} is "
                "saved"
            )
            raise self.problem

    def state(self) -> dict:
        """Return JSON for a checkpoint: the places of all streams. All ranks call it."""
        places = list(self.order.places)
        # ranks of a tp or cp group send the same
        for first, part in self.gather((self.mine.start, self.places)):
            places[first : first + len(part)] = part
        description = self.order.description
        return state(StreamOrder(description, places), description)

    def close(self) -> None:
        """Tell the thread to end when it has read its current batch. A read that hangs does not
        keep the run from ending."""
        self.stop.set()
        while not self.ready.empty():
            self.ready.get_nowait()

    def _take(self) -> tuple[Batch, list[Place]] | Exception:
        seconds = self.cfg.timeout_seconds
        try:
            return self.ready.get(timeout=seconds)
        except queue.Empty:
            return LoaderError(
                f"data streams {self.mine.start} to {self.mine.stop - 1} gave nothing for "
                f"{seconds} s (data.timeout_seconds): reading hangs"
            )

    def _put(self, item: tuple[Batch, list[Place]] | Exception) -> None:
        """Put an item into `ready` as soon as it has room, unless the run stops before."""
        while not self.stop.is_set():
            with suppress(queue.Full):
                return self.ready.put(item, timeout=0.5)

    def _work(self) -> None:
        """Run in the thread: put batches, or the reason why there are no more, into `ready`."""
        try:
            streams = {
                number: Stream(self.source, self.order, number, self.stop) for number in self.mine
            }
            for step in self.steps:
                batch = self._batch(step, streams)
                self._put((batch, [stream.place for stream in streams.values()]))
                if self.stop.is_set():
                    return
        except (InputError, LoaderError) as error:
            self._put(error.with_traceback(None))
        except BaseException as error:
            if not self.stop.is_set():
                logger.exception("the data thread failed")
            self._put(LoaderError(f"the data thread failed: {type(error).__name__}: {error}"))

    def _batch(self, step: int, streams: dict[int, Stream]) -> Batch:
        tokens = np.empty((len(self.rows), self.order.seq_len + 1), np.int64)
        begins = np.empty(tokens.shape, bool)
        number = np.empty(len(self.rows), np.int64)
        for i, row in enumerate(self.rows):
            stream, window = self.order.row(step, row)
            tokens[i], begins[i] = streams[stream].window()
            number[i] = stream + window * len(self.order.places)
        highest = tokens.max()
        if highest >= self.vocab_size:
            raise LoaderError(
                f"token {highest} is not in the model's vocabulary of {self.vocab_size}"
            )
        return self._as_batch(tokens, begins, number)

    def _as_batch(self, tokens: np.ndarray, begins: np.ndarray, number: np.ndarray) -> Batch:
        masked = begins if self.cfg.mask_documents else None
        more = {"window": number, "source": np.zeros_like(number)}
        batch = as_batch(tokens, masked, more, self.local_batch_size, self.token_ranges)
        if self.depth:
            further.add(batch, tokens, masked, self.token_ranges, self.depth, IGNORE)
        return batch


# --------------------------------------------------------------------------------------------------
# a run's text


class StreamedCorpora(Corpora):
    """One source that is tokenised while the run trains on it (data.stream)."""

    def order(self, progress: dict) -> StreamOrder:
        if not progress:
            return begin(self.description)
        return resume(progress, self.description)

    def state(self, order: StreamOrder) -> dict:
        return state(order, self.description)

    def batches(
        self,
        order: StreamOrder,
        steps: range,
        ranks: Ranks,
        vocab_size: int,
        pin_memory: bool = False,
    ) -> StreamedBatches:
        source = self.sources[""]
        local = self.cfg.training.local_batch_size
        batches = StreamedBatches(source, order, steps, local, ranks, vocab_size, pin_memory)
        batches.depth = tokens_ahead(self.cfg.model)
        return batches

    def audit_hint(self, step: int, windows: list[list[int]]) -> str:
        numbers = set()
        for of_rank in windows:
            numbers.update(of_rank)
        return f"its samples: {sorted(numbers)}"
