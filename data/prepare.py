"""Text to tokens, once: a folder of flat token arrays that every rank maps into memory.

`prepare(cfg)` opens the folder of this corpus and tokenizer in the cache, and makes it first if there is none;
`python -m data.prepare --out FOLDER` makes one where you want it, to be given as data.source. What is in it, all numbers
little-endian and without a header (one `train` and one `validation` of the first four):

    train-00000.bin ...  shards: the documents' tokens one after another, uint16 or uint32
    train.starts         int64 [documents]: where each begins, counted over all shards
    train.files          int32 [documents]: the file each is from
    train.numbers        int64 [documents]: which line or row of that file, -1: all of it
    names, names.starts  the files' names in UTF-8, one after another, and int64 [files + 1]: where each begins
    tokenizer.json       the tokenizer (data/tokenizer.py), so that the folder explains itself
    manifest.json        the report, counts, size and SHA-256 of each file, fingerprints of tokenizer and corpus

**Work in parts.** The source is divided into parts of about PART_BYTES, by names and sizes alone; each becomes a shard of
each split, made by whichever process is free (several threads in it when there are fewer parts than cores). So neither
the number of processes nor a kill can change a token or the order. A part's files are flushed to the disk and then its
record is put in place: what is finished when a process is killed is not done again. Memory: some documents per core.

**Held out** is a document whose hash, as a number in [0, 1), is below validation_fraction. The hash is of the text alone,
so the choice is stable when others come and go, and copies of one text land in the same split. No text is read twice
for this, with one exception: when a split would be empty, the text of the lowest (or highest) hash changes sides and the
parts that have it are made again; and when there is only one text, it is cut in two.

A folder appears under its name whole or not at all: it is written next to it, flushed to the disk, then renamed, by one
process at a time (a lock that the kernel frees when its holders are dead).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configs.schema import Data, InputError
from data import hf_tokenizer, sources, tokenizer

FORMAT = 2  # of the folder: raise it when anything about its files, the split or the tokenizers' definition changes
BPE_CHARACTERS = 64_000_000  # of text that a BPE is trained on, in the first documents: more hardly changes the merges
PART_BYTES = 64_000_000  # of the source: a core tokenises this in some seconds, which is what a kill costs
MOST_PARTS = 4096  # of a larger corpus each part is larger
BATCH_BYTES = 256_000  # of text that is handed to a thread at a time: what handing over costs does not count then
SPLITS = ("train", "validation")
TABLES = {"starts": np.dtype("<i8"), "files": np.dtype("<i4"), "numbers": np.dtype("<i8")}
COUNTS = ("documents", "kept", "empty", "too_long", "failed")  # of a report: the first is the sum of the others

Log = Callable[[str], object]


class Tokens:
    """One split of a corpus, mapped read-only: ranks and workers of a host share one copy in the page cache."""

    def __init__(self, folder: str, split: str, dtype: np.dtype, tail: str = "") -> None:
        """`tail` is what the names of documents end in, where all of them are tails."""
        self.folder, self.split, self.dtype, self.tail = folder, split, np.dtype(dtype), tail
        names = os.listdir(folder)
        self.shards = sorted(name for name in names if name.startswith(split) and name.endswith(".bin"))
        sizes = [os.path.getsize(os.path.join(folder, name)) // self.dtype.itemsize for name in self.shards]
        self.ends = np.cumsum(sizes, dtype=np.int64)  # [shards]
        self.maps: list[np.ndarray | None] = [None] * len(self.shards)  # each mapped when it is first read

    def __reduce__(self) -> tuple:
        """What is sent to a loader worker that is spawned instead of forked: where to map, not a copy of the corpus."""
        return Tokens, (self.folder, self.split, self.dtype, self.tail)

    def __len__(self) -> int:
        """Tokens of the split."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the split, [stop - start] of its dtype; a view where one shard has them all."""
        stop = min(stop, len(self))
        if start >= stop:
            return np.zeros(0, self.dtype)
        shard = int(self.ends.searchsorted(start, "right"))
        parts = []
        while start < stop:
            end = int(self.ends[shard])
            tokens = self._map(shard)
            begin = start - end + len(tokens)
            parts.append(tokens[begin : begin + min(stop, end) - start])
            start, shard = min(stop, end), shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(self, shard: int) -> np.ndarray:
        tokens = self.maps[shard]
        if tokens is None:
            tokens = self.maps[shard] = _mapped(os.path.join(self.folder, self.shards[shard]), self.dtype)
        return tokens

    @cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [documents], ascending, from 0; mapped."""
        return self._table("starts")

    @cached_property
    def _files(self) -> np.ndarray:
        return self._table("files")

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self._table("numbers")

    def _table(self, name: str) -> np.ndarray:
        return _mapped(os.path.join(self.folder, f"{self.split}.{name}"), TABLES[name])

    @cached_property
    def _names(self) -> tuple[np.ndarray, np.ndarray]:
        return _mapped(os.path.join(self.folder, "names"), np.dtype(np.uint8)), _mapped(
            os.path.join(self.folder, "names.starts"), np.dtype("<i8")
        )

    def name(self, document: int) -> str:
        """What a document is called: its file, and the line or row where a file has several."""
        names, starts = self._names
        file = int(self._files[document])
        text = names[starts[file] : starts[file + 1]].tobytes().decode("utf-8", errors="surrogateescape")
        return sources.name(text, int(self._numbers[document])) + self.tail

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Indices (int64) of the documents that have a token in [start, stop)."""
        stop = min(stop, len(self))
        if start >= stop:
            return np.arange(0)
        first = np.searchsorted(self.document_starts, start, side="right") - 1
        return np.arange(first, np.searchsorted(self.document_starts, stop, side="left"))


def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """The whole file, raw: nothing in it is interpreted, so nothing in it can be executed. A plain array over the map:
    slices of a memmap object are slow."""
    if os.path.getsize(path) < dtype.itemsize:  # empty, which cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus. Equal `fingerprint`s: equal tokens in both splits, whatever the machine or the file times."""

    folder: str
    tokenizer: tokenizer.Tokenizer
    train: Tokens
    validation: Tokens
    fingerprint: str


def prepare(cfg: Data, log: Log = print, out: str = "", workers: int = 0) -> Prepared:
    """The corpus and tokenizer of `cfg`, out of the cache (or of the folder `out`), or tokenised into it first. Any
    number of processes may call this at once. A source that is a prepared folder is opened as it is. `log` receives
    lines for a person. `workers`: how many processes to use at most; 0: the cores. InputError: a source, tokenizer or
    cache that cannot be used."""
    if is_prepared(cfg.source):
        if out:
            raise InputError(f"data.source: {cfg.source} is prepared already")
        return _as_it_is(cfg)
    files = sources.find(cfg.source)
    key = _key(cfg, files)
    folder = os.path.abspath(os.path.expanduser(out or _cached(cfg, key)))
    parent = os.path.dirname(folder)
    if not _is_there(folder):
        try:
            os.makedirs(parent, exist_ok=True)
            with _lock(f"{folder}.lock", log) as lock:
                if not _is_there(folder):  # nobody made it while we waited
                    _make(folder, key, cfg, files, log, workers or len(os.sched_getaffinity(0)), lock)
        except OSError as error:
            what, option = ("--out", "--out") if out else ("data.cache", "--data.cache")
            raise InputError(f"{what}: {parent} cannot be written: {error.strerror}; give another folder with "
                             f"{option}=FOLDER") from error
    if out and (not is_prepared(folder) or _manifest(folder)["key"] != key):
        raise InputError(f"--out: {folder} has something else, or was made with other options or from files that have "
                         "changed since: give another folder, or remove it")
    return open_prepared(folder)


def kept_in(cfg: Data) -> str:
    """The folder that `prepare(cfg)` opens, and makes first if there is none. Makes nothing. InputError as `prepare`."""
    if is_prepared(cfg.source):
        return os.path.abspath(os.path.expanduser(cfg.source))
    return os.path.abspath(os.path.expanduser(_cached(cfg, _key(cfg, sources.find(cfg.source)))))


def _cached(cfg: Data, key: str) -> str:
    return os.path.join(cfg.cache or "~/.cache/plumbline", key)


def is_prepared(source: str) -> bool:
    """Whether a source is a folder that this file made, as whole as it may be."""
    path = os.path.expanduser(source)
    return sum(os.path.isfile(os.path.join(path, name)) for name in ("manifest.json", "tokenizer.json", "names.starts")) > 1


def _is_there(folder: str) -> bool:
    """An empty folder is not: somebody made it to be filled."""
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _as_it_is(cfg: Data) -> Prepared:
    prepared = open_prepared(os.path.abspath(os.path.expanduser(cfg.source)))
    if cfg.tokenizer != "bpe":  # the default: whatever the folder has
        asked = open_tokenizer(cfg.tokenizer)
        if asked.fingerprint != prepared.tokenizer.fingerprint:
            raise InputError(f"data.tokenizer: {cfg.tokenizer} ({asked.fingerprint}) is not the tokenizer that made the "
                             f"tokens in {prepared.folder} ({prepared.tokenizer.fingerprint}): leave the option out, or "
                             "prepare the corpus with this one")
    return prepared


def open_tokenizer(asked: str) -> tokenizer.Tokenizer:
    """Of `data.tokenizer`, where that is not "bpe"."""
    if asked == "bytes":
        return tokenizer.byte_tokenizer()
    path = os.path.expanduser(asked)
    return hf_tokenizer.read_file(Path(path)) if path.endswith(".json") else tokenizer.from_rank_file(path)


def open_prepared(folder: str) -> Prepared:
    """A folder that `prepare` made, its files' sizes and its tokenizer checked (for the content: `verify`)."""
    manifest = _manifest(folder)
    for name, file in manifest["files"].items():
        path = os.path.join(folder, name)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        if size != file["bytes"]:
            raise InputError(f"{path} has {size} bytes instead of {file['bytes']}: this tokenised corpus is damaged; "
                             f"remove {folder} and run again to make it anew")
    saved = tokenizer.load_saved(os.path.join(folder, "tokenizer.json"))
    if saved.fingerprint != manifest["tokenizer_fingerprint"]:
        raise InputError(f"{folder}: its tokenizer ({saved.fingerprint}) is not the one that made its tokens "
                         f"({manifest['tokenizer_fingerprint']}); remove the folder and run again to make it anew")
    try:
        train = Tokens(folder, "train", saved.dtype)
        validation = Tokens(folder, "validation", saved.dtype, " (tail)" if manifest["cut"] else "")
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}; give another cache with "
                         "--data.cache=FOLDER") from error
    for tokens in train, validation:
        if len(tokens) != manifest["splits"][tokens.split]["tokens"]:
            raise InputError(f"{folder} has {len(tokens)} {tokens.split} tokens instead of "
                             f"{manifest['splits'][tokens.split]['tokens']}: a shard is there that does not belong there")
    return Prepared(folder, saved, train, validation, manifest["fingerprint"])


def verify(folder: str) -> Prepared:
    """`open_prepared`, after reading every byte: InputError names the first file that is not what was written, or that
    has a token beyond the vocabulary."""
    manifest = _manifest(folder)
    for name, file in manifest["files"].items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or _sha256(path) != file["sha256"]:
            raise InputError(f"{path} is not what was written: this tokenised corpus is damaged; remove {folder} and "
                             "run again to make it anew")
    prepared = open_prepared(folder)
    for tokens in prepared.train, prepared.validation:
        for index, shard in enumerate(tokens.shards):
            if (highest := int(tokens._map(index).max(initial=0))) >= prepared.tokenizer.n_vocab:
                raise InputError(f"{os.path.join(folder, shard)} has token {highest}, but its tokenizer only "
                                 f"{prepared.tokenizer.n_vocab}: this tokenised corpus is damaged; remove {folder}")
    return prepared


def _manifest(folder: str) -> dict:
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path, encoding="ascii") as file:
            manifest = json.load(file)
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is missing or damaged ({error!r}): remove {folder} and run again") from error
    if found != FORMAT:
        raise InputError(f"{folder} is of format {found}, this code reads {FORMAT}: remove it and run again")
    return manifest


def _key(cfg: Data, files: list[sources.File]) -> str:
    """Name of the folder: readable, then a hash of everything that decides what is in it. Files count by path, size and
    time, as for `make`: their content would take as long to read as the tokens to open."""
    kind = cfg.tokenizer
    if kind == "bpe":
        kind = f"bpe{cfg.bpe_vocab_size}"
    elif kind != "bytes":
        path = Path(os.path.expanduser(kind))
        content = tokenizer.read_rank_file(str(path))
        if path.suffix == ".json":  # the files next to it say how a text begins and ends
            beside = (path.parent / name for name in ("tokenizer_config.json", "config.json"))
            content += b"".join(file.read_bytes() for file in beside if file.is_file())
        kind = hashlib.sha256(content).hexdigest()
    options = [cfg.validation_fraction, cfg.text_field, cfg.add_bos, cfg.add_eos, cfg.max_document_bytes]
    decides = json.dumps([FORMAT, cfg.source == "stdlib", files, kind, BPE_CHARACTERS, options])
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{os.path.basename(cfg.source.rstrip('/'))}-{kind[:8]}").strip("-")
    return f"{readable[:60]}-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"


@contextmanager
def _lock(path: str, log: Log) -> Iterator[int]:
    """One process at a time (and those that inherit the descriptor), on a network file system one host at a time if it
    knows flock. The file stays: to remove it would let a third process lock a new one while the second holds the old."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process that is preparing this corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


# ------------------------------------------------------------------------------------------------ making a folder


def _make(folder: str, key: str, cfg: Data, files: list[sources.File], log: Log, workers: int, lock: int) -> None:
    """Called with the lock, so the temporary folder is ours, and what is in it a killed process left: its finished
    parts are kept. (Where the lock does not reach another host, both write the same bytes under the same names.)"""
    temporary = f"{folder}.tmp"
    try:
        if not _is_finished(temporary, key):
            job = _Job.open(temporary, key, cfg, files, log)
            job.finish(job.run(workers, lock, log), key, log)
        if sources.find(cfg.source) != files:
            shutil.rmtree(temporary)
            raise InputError(f"data.source: {cfg.source} changed while it was read: run again when it is at rest")
        shutil.rmtree(os.path.join(temporary, "parts"), ignore_errors=True)
        os.rename(temporary, folder)
        _sync(os.path.dirname(folder))
    except OSError:
        if not _is_there(folder):  # otherwise another host was faster, and made the same
            raise
    finally:
        if not any(Path(temporary, "parts").glob("*.json")):  # nothing that would be worth keeping
            shutil.rmtree(temporary, ignore_errors=True)


def _is_finished(temporary: str, key: str) -> bool:
    """Killed between the manifest, which is written last, and the rename."""
    with suppress(InputError):
        return _manifest(temporary)["key"] == key
    return False


class _Job:
    """What the processes that make a folder share, read from `parts/plan`: which pieces each part has."""

    def __init__(self, folder: str, cfg: Data, files: list[sources.File], parts: list, tok: tokenizer.Tokenizer) -> None:
        self.folder, self.cfg, self.files, self.parts, self.tokenizer = folder, cfg, files, parts, tok

    @staticmethod
    def open(folder: str, key: str, cfg: Data, files: list[sources.File], log: Log) -> _Job:
        """The job that a killed process left in this folder, or a new one."""
        with suppress(OSError, ValueError, KeyError):
            with open(os.path.join(folder, "parts", "plan"), encoding="ascii") as file:
                if json.load(file)["key"] == key:
                    job = _Job.load(folder)
                    job.cfg = cfg  # skip_failed may be another
                    job.save(key)
                    for path in [*Path(folder).glob("*.tmp*"), *Path(folder, "parts").glob("*.tmp*")]:
                        path.unlink()  # half a part
                    return job
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, "parts"))
        total = sum(file.size for file in files)
        parts = _parts(files, max(PART_BYTES, total // MOST_PARTS))
        log(f"{cfg.source}: {len(files):,} files, {total / 1e6:,.1f} MB, {len(parts):,} parts")
        if cfg.tokenizer == "bpe":
            began = time.monotonic()
            made = tokenizer.train_bpe(_first_texts(cfg, files), cfg.bpe_vocab_size)
            log(f"trained a BPE of {made.n_vocab:,} tokens in {time.monotonic() - began:.1f} s")
        else:
            made = open_tokenizer(cfg.tokenizer)
        if cfg.add_bos and made.bos_id is None:
            raise InputError(f"data.add_bos: the tokenizer {cfg.tokenizer} has no token that begins a text")
        made.save(os.path.join(folder, "tokenizer.json"))
        _sync(os.path.join(folder, "tokenizer.json"))
        job = _Job(folder, cfg, files, parts, made)
        job.save(key)
        return job

    def save(self, key: str) -> None:
        plan = {"key": key, "cfg": self.cfg.model_dump(mode="json"), "files": self.files, "parts": self.parts}
        _write_whole(os.path.join(self.folder, "parts", "plan"), json.dumps(plan).encode("ascii"))

    @staticmethod
    def load(folder: str) -> _Job:
        with open(os.path.join(folder, "parts", "plan"), encoding="ascii") as file:
            plan = json.load(file)
        files = [sources.File(*row) for row in plan["files"]]
        made = tokenizer.load_saved(os.path.join(folder, "tokenizer.json"))
        return _Job(folder, Data.model_validate_json(json.dumps(plan["cfg"])), files, plan["parts"], made)

    def record(self, part: int) -> dict | None:
        """What is known about a part that is finished."""
        try:
            with open(os.path.join(self.folder, "parts", f"{part:05}.json"), encoding="ascii") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def run(self, workers: int, lock: int, log: Log) -> list[dict]:
        """The records of all parts, which are made unless they are there already; no split empty if that can be."""
        records = self._run({}, (), workers, lock, log)
        change = _change_of_sides(records, self.cfg.validation_fraction)
        if change:
            score = change.get("low", change.get("high"))
            touched = [i for i, record in enumerate(records) if score in (record["lowest"], record["highest"])]
            records = self._run(change, touched, workers, lock, log)
        return records

    def _run(self, change: dict, again: Iterable[int], workers: int, lock: int, log: Log) -> list[dict]:
        """All records, after making the parts that have none, and those of `again` unless they are changed already."""
        records = {i: self.record(i) for i in range(len(self.parts))}
        todo = [i for i, record in records.items() if record is None or (i in again and record["change"] != change)]
        sizes = [sum(size for *_, size in part) for part in self.parts]
        progress = _Progress(sum(sizes), sum(sizes[i] for i in records if i not in todo), log)
        failures: list[list] = []

        def add(part: int, record: dict) -> None:
            records[part] = record
            failures.extend(record["failures"])
            if len(failures) > self.allowed:
                raise self._too_many(failures[0])

        for part in sorted(records.keys() - set(todo)):
            add(part, records[part])

        with progress:
            if min(workers, len(todo)) > 1:
                _in_processes(self.folder, todo, change, workers, lock, progress.add, add)
            else:
                for part in todo:
                    add(part, self.make(part, change, workers, progress.add))
        return [records[i] for i in range(len(self.parts))]

    @property
    def allowed(self) -> float:
        return float("inf") if self.cfg.source == "stdlib" else self.cfg.skip_failed

    def _too_many(self, last: list) -> InputError:
        piece, number, problem = last
        piece = sources.Piece(self.files[piece[0]], *piece[1:])
        error = sources.failure(piece, sources.Document(number, "", problem, 0))
        if not self.allowed:
            return error
        return InputError(f"more than {self.allowed} documents cannot be read (data.skip_failed); one of them: {error}")

    def make(self, part: int, change: dict, threads: int, progress: Callable[[int], object]) -> dict:
        """One part: its files and then its record. `change`: see `_change_of_sides`."""
        counts = dict.fromkeys(("kept", "empty", "too_long", "failed"), 0)
        failures, lines, lowest, highest = [], [], 2.0, -1.0
        writers = {split: _Split(self.folder, split, part) for split in SPLITS}

        def documents() -> Iterator[tuple[int, sources.Document]]:
            """Those that have a text, with their file."""
            for file, *rest in self.parts[part]:
                piece = sources.Piece(self.files[file], *rest)
                reader = sources.read(piece, self.cfg.text_field, self.cfg.max_document_bytes)
                done = 0
                while True:
                    try:
                        document = next(reader)
                    except StopIteration as end:
                        lines.append(end.value or 0)
                        break
                    if document.done > done:
                        progress(document.done - done)
                        done = document.done
                    if document.problem == sources.TOO_LONG:
                        counts["too_long"] += 1
                    elif document.problem:
                        fail((file, *rest), document.number, document.problem)
                    elif not document.text:
                        counts["empty"] += 1
                    else:
                        yield file, document
                progress(max(piece.size - done, 0))

        def fail(piece: tuple, number: int, problem: str) -> None:
            counts["failed"] += 1
            failures.append([piece, number, problem])
            if counts["failed"] > self.allowed:
                raise self._too_many(failures[-1])

        try:
            for file, document, size, score, rows in _encoded(self, documents(), change, threads):
                if isinstance(rows, str):
                    if rows == sources.TOO_LONG:
                        counts["too_long"] += 1
                    else:
                        fail(next(piece for piece in self.parts[part] if piece[0] == file), document.number, rows)
                    continue
                counts["kept"] += 1
                lowest, highest = min(lowest, score), max(highest, score)
                for split, ids in rows:
                    writers[split].add(file, document.number, size, ids)
        finally:
            splits = {split: writer.close() for split, writer in writers.items()}
        counts["documents"] = sum(counts.values())
        record = {**counts, "failures": failures, "lines": lines, "lowest": lowest, "highest": highest,
                  "change": change, "splits": splits}  # fmt: skip
        for writer in writers.values():
            writer.publish()
        path = os.path.join(self.folder, "parts", f"{part:05}.json")
        _write_whole(path, json.dumps(record).encode("ascii"))
        return record

    def finish(self, records: list[dict], key: str, log: Log) -> None:
        """The tables of the whole, and the manifest last."""
        report = {what: sum(record[what] for record in records) for what in COUNTS}
        if not report["kept"]:
            shutil.rmtree(self.folder)
            others = ", ".join(f"{report[what]} {what.replace('_', ' ')}" for what in COUNTS[2:] if report[what])
            raise InputError(f"data.source: {self.cfg.source} has no text: {len(self.files)} files, "
                             f"{report['documents']} documents ({others or 'none'})")
        before: dict[int, int] = {}  # of the lines of each file that is read in several pieces
        base = []  # [parts]: which file the first piece goes on with, and how many lines of it came before
        for pieces, record in zip(self.parts, records, strict=True):
            base.append((pieces[0][0], before.get(pieces[0][0], 0)) if pieces[0][1] else (-1, 0))
            for (file, *_), lines in zip(pieces, record["lines"], strict=True):
                before[file] = before.get(file, 0) + lines
        written = {}
        for split in SPLITS:
            self._merge(split, records, base)
            for part, record in enumerate(records):
                if record["splits"][split]["tokens"]:
                    row = record["splits"][split]
                    written[f"{split}-{part:05}.bin"] = {"bytes": row["token_bytes"], "sha256": row["sha256"]}
        names = [file.name.encode("utf-8", errors="surrogateescape") for file in self.files]
        _write_whole(os.path.join(self.folder, "names"), b"".join(names))
        ends = np.cumsum([0, *map(len, names)]).astype("<i8")
        _write_whole(os.path.join(self.folder, "names.starts"), ends.tobytes())
        tables = [f"{split}.{table}" for split in SPLITS for table in TABLES]
        for name in (*tables, "names", "names.starts", "tokenizer.json"):
            path = os.path.join(self.folder, name)
            written[name] = {"bytes": os.path.getsize(path), "sha256": _sha256(path)}
        for name in os.listdir(self.folder):  # what a killed process left
            if name not in written and name != "parts":
                os.remove(os.path.join(self.folder, name))

        splits = {
            split: {what: sum(record["splits"][split][what] for record in records)
                    for what in ("documents", "tokens", "bytes")}
            for split in SPLITS
        }  # fmt: skip
        failures = []
        for record, (file, lines) in zip(records, base, strict=True):
            for piece, number, problem in record["failures"]:
                number += lines if piece[0] == file and number != sources.WHOLE else 0
                failures.append(f"{sources.name(self.files[piece[0]].name, number)} {problem}")
        made = self.tokenizer
        content = [made.fingerprint, *(written[f"{split}.starts"]["sha256"] for split in SPLITS)]
        content += [f"{name[:5]}{file['sha256']}" for name, file in written.items() if name.endswith(".bin")]
        manifest = {
            "format": FORMAT,
            "key": key,
            "source": self.cfg.source,
            "tokenizer": self.cfg.tokenizer,
            "tokenizer_fingerprint": made.fingerprint,
            "fingerprint": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32],
            "dtype": made.dtype.name,
            "n_vocab": made.n_vocab,
            "eot_id": made.eot_id,
            "add_bos": self.cfg.add_bos,
            "add_eos": self.cfg.add_eos,
            "validation_fraction": self.cfg.validation_fraction,
            "cut": any(record["change"].get("cut") for record in records),
            "report": {**report, "tokens": sum(row["tokens"] for row in splits.values()), "failures": failures},
            "splits": splits,
            "files": written,
        }
        log(f"{report['documents']:,} documents: {report['kept']:,} kept, {report['empty']:,} empty, "
            f"{report['too_long']:,} too long, {report['failed']:,} failed; {manifest['report']['tokens']:,} tokens "
            f"({sum(row['bytes'] for row in splits.values()) / manifest['report']['tokens']:.2f} bytes each)")
        _write_whole(os.path.join(self.folder, "manifest.json"), json.dumps(manifest, indent=1).encode("ascii"))

    def _merge(self, split: str, records: list[dict], base: list[tuple[int, int]]) -> None:
        """The parts' tables as one: starts count from the split's first token, lines from the file's first."""
        for table, dtype in TABLES.items():
            path = os.path.join(self.folder, f"{split}.{table}")
            tokens = 0
            with open(f"{path}.tmp", "wb") as out:
                for part, record in enumerate(records):
                    column = np.fromfile(os.path.join(self.folder, "parts", f"{split}-{part:05}.{table}"), dtype)
                    if table == "starts":
                        column += tokens
                        tokens += record["splits"][split]["tokens"]
                    elif table == "numbers" and base[part][1]:
                        files = np.fromfile(
                            os.path.join(self.folder, "parts", f"{split}-{part:05}.files"), TABLES["files"]
                        )
                        column[(files == base[part][0]) & (column != sources.WHOLE)] += base[part][1]
                    column.tofile(out)
            _sync(f"{path}.tmp")
            os.rename(f"{path}.tmp", path)


def _parts(files: list[sources.File], size: int) -> list[list[tuple]]:
    """Pieces (index of the file, start, stop, bytes), in order, gathered to about `size` bytes each."""
    parts: list[list[tuple]] = [[]]
    filled = 0
    for index, file in enumerate(files):
        for piece in sources.pieces(file, size):
            if filled and filled + piece.size > size:
                parts.append([])
                filled = 0
            parts[-1].append((index, *piece[1:]))
            filled += piece.size
    return [part for part in parts if part]


def _first_texts(cfg: Data, files: list[sources.File]) -> Iterator[str]:
    """Texts until there are enough characters; the last may pass the limit. What cannot be read is judged later."""
    taken = 0
    for file in files:
        for piece in sources.pieces(file):
            for document in sources.read(piece, cfg.text_field, cfg.max_document_bytes):
                if taken >= BPE_CHARACTERS:
                    return
                taken += len(document.text)
                yield document.text


def _change_of_sides(records: list[dict], fraction: float) -> dict:
    """What to do differently so that neither split is empty: "low" (or "high"), a score: the text that has it is held
    out (trained on) although its hash says otherwise; "cut": each text is cut, since all are the same one."""
    lowest, highest = min(r["lowest"] for r in records), max(r["highest"] for r in records)
    if not fraction or lowest > highest:  # nothing to hold out, or no text at all
        return {}
    if lowest == highest:
        return {"cut": True, "low": lowest}
    return {"low": lowest} if lowest >= fraction else {"high": highest} if highest < fraction else {}


def _encoded(job: _Job, documents: Iterator[tuple[int, sources.Document]], change: dict, threads: int) -> Iterator[tuple]:
    """(file, document, bytes, score, [(split, ids), ...] or what is wrong) of each, in order, by `threads` threads
    (encoding releases the GIL), with few documents in memory at a time."""
    job.tokenizer.encode("")  # builds what the threads share, once

    def batches() -> Iterator[list]:
        batch, size = [], 0
        for item in documents:
            batch.append(item)
            size += len(item[1].text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        yield batch

    def encoded(batch: list) -> list[tuple]:
        return [(file, document, *encode(job.cfg, job.tokenizer, document.text, change)) for file, document in batch]

    if threads <= 1:
        for batch in batches():
            yield from encoded(batch)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque()
        try:
            for batch in batches():
                waiting.append(pool.submit(encoded, batch))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def encode(cfg: Data, tok: tokenizer.Tokenizer, text: str, change: dict) -> tuple[int, float, list | str]:
    """Bytes of a document, its score, and [(split, ids), ...], or a problem as in sources.Document."""
    data = text.encode()
    if cfg.max_document_bytes and len(data) > cfg.max_document_bytes:
        return len(data), 0.0, sources.TOO_LONG
    score = int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48
    split = SPLITS[(score < cfg.validation_fraction or score == change.get("low")) and score != change.get("high")]
    texts = [(split, text)] if not change.get("cut") else list(zip(SPLITS, _cut(text, cfg.validation_fraction)))
    begin = np.array([tok.bos_id] if cfg.add_bos else [], tok.dtype)
    end = np.array([tok.eot_id] if cfg.add_eos else [], tok.dtype)
    try:
        rows = [(split, np.concatenate([begin, tok.encode(text), end])) for split, text in texts]
    except BaseException as error:  # a panic of tiktoken is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return len(data), score, f"cannot be tokenised: {error}"
    return len(data), score, rows


def _cut(text: str, fraction: float) -> tuple[str, str]:
    """The only text of a corpus as two: the lines up to 1 - fraction of it, and the tail that is held out."""
    if len(text) < 2:
        raise InputError("data.source: its only text has 1 character: too little to train on")
    wanted = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    end = text.rfind("\n", 0, wanted) + 1 or wanted  # at a line's end, if there is one
    return text[:end], text[end:]


class _Split:
    """The files of one split of one part while they grow, and then in place."""

    def __init__(self, folder: str, split: str, part: int) -> None:
        self.shard = os.path.join(folder, f"{split}-{part:05}.bin")
        tables = {table: os.path.join(folder, "parts", f"{split}-{part:05}.{table}") for table in TABLES}
        self.paths = {"tokens": self.shard, **tables}
        self.suffix = f".tmp{os.getpid()}"  # on a network file system another host may be at the same part
        self.out = {name: open(f"{path}{self.suffix}", "wb", 1 << 20) for name, path in self.paths.items()}
        self.columns = {table: array(dtype.char) for table, dtype in TABLES.items()}  # in machine order: little-endian
        self.sha256 = hashlib.sha256()
        self.documents = self.tokens = self.bytes = self.token_bytes = 0

    def add(self, file: int, number: int, size: int, ids: np.ndarray) -> None:
        data = ids.tobytes()
        self.out["tokens"].write(data)
        self.sha256.update(data)
        for table, value in zip(TABLES, (self.tokens, file, number), strict=True):
            self.columns[table].append(value)
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += size
        self.token_bytes += len(data)
        if len(self.columns["starts"]) >= 65536:
            self._flush()

    def _flush(self) -> None:
        for table, column in self.columns.items():
            self.out[table].write(column.tobytes())
            del column[:]

    def close(self) -> dict:
        try:
            self._flush()
        finally:
            for file in self.out.values():
                file.close()
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes,
                "token_bytes": self.token_bytes, "sha256": self.sha256.hexdigest()}  # fmt: skip

    def publish(self) -> None:
        for path in self.paths.values():
            _sync(f"{path}{self.suffix}")
            os.rename(f"{path}{self.suffix}", path)
        if not self.tokens:
            os.remove(self.shard)


# ------------------------------------------------------------------------------------------- processes and progress


def _in_processes(
    folder: str, todo: list[int], change: dict, workers: int, lock: int, progress: Callable[[int], object],
    add: Callable[[int, dict], None],
) -> None:  # fmt: skip
    """Parts by `workers` processes, each given the next part when it is free. They inherit the lock, so that nobody
    else begins while one that has lost its parent still writes. Threads alone would wait for each other: reading JSON
    and Parquet holds the GIL."""
    waiting = deque(todo)
    processes = min(workers, len(todo))
    command = [sys.executable, "-m", "data.prepare", "--work", folder, str(max(1, workers // processes))]
    running: list[subprocess.Popen] = []
    guard = threading.Lock()

    def next_part() -> int | None:
        with suppress(IndexError):
            return waiting.popleft()

    def serve(process: subprocess.Popen) -> None:
        while (part := next_part()) is not None:
            line = ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([part, change]) + "\n")
                process.stdin.flush()
                while (line := process.stdout.readline()) and "bytes" in (message := json.loads(line)):
                    with guard:
                        progress(message["bytes"])
            if not line:
                raise RuntimeError(f"the process that tokenised part {part} of {folder} died (exit code {process.wait()})")
            if "input_error" in message:
                raise InputError(message["input_error"])
            if "os_error" in message:
                raise OSError(*message["os_error"])
            with guard:
                add(part, message)

    try:
        for _ in range(processes):
            running.append(subprocess.Popen(
                command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                encoding="ascii", pass_fds=(lock,),
            ))  # fmt: skip
        with ThreadPoolExecutor(processes) as pool:
            try:
                served = [pool.submit(serve, process) for process in running]
                wait(served, return_when=FIRST_EXCEPTION)
            finally:
                waiting.clear()
                if not all(future.done() and not future.exception() for future in served):
                    for process in running:
                        process.kill()
        errors = [error for future in served if (error := future.exception())]
        for kind in (InputError, OSError, BaseException):  # the others died of the first
            for error in errors:
                if isinstance(error, kind):
                    raise error
    finally:
        for process in running:
            process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()


def _work(folder: str, threads: int) -> int:
    """A process of `_in_processes`: parts come in by line, progress and records go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; without one the pipe ends us
    job = _Job.load(folder)
    reported, done = time.monotonic(), 0

    def progress(size: int) -> None:
        nonlocal reported, done
        done += size
        if time.monotonic() - reported > 0.25:
            print(json.dumps({"bytes": done}), flush=True)
            reported, done = time.monotonic(), 0

    for line in sys.stdin:
        part, change = json.loads(line)
        try:
            record = job.make(part, change, threads, progress)
        except InputError as error:
            record = {"input_error": str(error)}
        except BrokenPipeError:
            return 1
        except OSError as error:
            record = {"os_error": [error.errno, error.strerror]}
        print(json.dumps({"bytes": done}), json.dumps(record), sep="\n", flush=True)
        done = 0
    return 0


class _Progress:
    """How much of the source is read: a bar for a person at a terminal, otherwise a line every five seconds."""

    def __init__(self, total: int, done: int, log: Log) -> None:
        self.total, self.before, self.done, self.log = total, done, done, log
        self.began = self.reported = time.monotonic()

    def __enter__(self) -> _Progress:
        self.bar = tqdm(total=self.total or None, initial=self.before, unit="B", unit_scale=True, desc="tokenising",
                        disable=not sys.stderr.isatty(), leave=False)  # fmt: skip
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.bar.close()
        seconds = time.monotonic() - self.began
        size = self.done - self.before
        if size and not error:
            rate = size / 1e6 / seconds
            self.log(f"tokenised {size / 1e6:,.1f} MB of the source in {seconds:.1f} s, {rate:.1f} MB/s")

    def add(self, size: int) -> None:
        self.done += size
        self.bar.update(size)
        now = time.monotonic()
        if self.bar.disable and now - self.reported > 5:
            rate = (self.done - self.before) / (now - self.began)
            left = f", {(self.total - self.done) / rate:,.0f} s left" if self.total and rate else ""
            share = f"{self.done / self.total:.0%}" if self.total else f"{self.done / 1e6:,.0f} MB"
            self.log(f"tokenised {share}, {rate / 1e6:.1f} MB/s{left}")
            self.reported = now


# ------------------------------------------------------------------------------------------------------------ files


def _write_whole(path: str, content: bytes) -> None:
    """The file with this content, flushed to the disk, or as it was."""
    temporary = f"{path}.tmp{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    _sync(os.path.dirname(path))


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: str) -> None:
    """Of a file its content, of a folder the names in it reach the disk before the next line runs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


OPTIONS = ("source", "tokenizer", "bpe_vocab_size", "text_field", "validation_fraction", "max_document_bytes",
           "skip_failed", "cache")  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--work"]:  # a process that another one of us started
        return _work(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description="Tokenise a corpus.")
    for name in OPTIONS:
        field = Data.model_fields[name]
        parser.add_argument(f"--{name.replace('_', '-')}", default=field.default, type=type(field.default),
                            help=f"{field.description.replace('%', '%%')} [{field.default}]")  # fmt: skip
    for name in ("add_bos", "add_eos"):
        field = Data.model_fields[name]
        parser.add_argument(f"--{name.replace('_', '-')}", default=field.default, help=field.description,
                            action=argparse.BooleanOptionalAction)  # fmt: skip
    parser.add_argument("--out", default="", help="the folder to make, for data.source; without it: one in the cache")
    parser.add_argument("--workers", type=int, default=0, help="processes to use at most; 0: one per core [0]")
    parser.add_argument("--verify", action="store_true", help="read every byte of it again and compare the hashes")
    arguments = vars(parser.parse_args())
    check, out, workers = (arguments.pop(name) for name in ("verify", "out", "workers"))
    try:
        cfg = Data(**arguments)
    except ValueError as error:  # pydantic's: an option out of its bounds
        parser.error(str(error))
    try:
        prepared = prepare(cfg, out=out, workers=workers)
        if check:
            verify(prepared.folder)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    _print_report(prepared, check)
    return 0


def _print_report(prepared: Prepared, checked: bool) -> None:
    manifest = _manifest(prepared.folder)
    report = manifest["report"]
    print("\n" + "".join(f"{what.replace('_', ' '):>14}" for what in (*COUNTS, "tokens")))
    print("".join(f"{report[what]:>14,}" for what in (*COUNTS, "tokens")))
    print(f"\n{'split':<12}{'documents':>12}{'tokens':>16}{'MB of text':>14}{'bytes/token':>14}")
    for split, row in manifest["splits"].items():
        ratio = row["bytes"] / max(row["tokens"], 1)
        print(f"{split:<12}{row['documents']:>12,}{row['tokens']:>16,}{row['bytes'] / 1e6:>14,.2f}{ratio:>14.3f}")
    print(f"\nvocabulary   {prepared.tokenizer.n_vocab:,} (fingerprint {prepared.tokenizer.fingerprint})")
    print(f"corpus       {prepared.fingerprint}{', every hash verified' if checked else ''}")
    print(f"folder       {prepared.folder}")
    for line in report["failures"]:
        print(f"failed       {line}")


if __name__ == "__main__":
    sys.exit(main())
