"""Text to tokens, once: a folder of flat token arrays that every rank maps into memory.

`prepare(cfg)` opens the folder of this corpus and tokenizer in the cache, and makes it first if there is none. What is
in it (one `train` and one `validation` of the first three):

    train.bin           the documents' tokens one after another, each document ended by the end-of-text token
    train.starts.npy    int64 [documents]: where each begins
    train.names.json    what each is called
    tokenizer.json      the tokenizer (data/tokenizer.py), so that the folder explains itself
    manifest.json       counts, size and SHA-256 of each file, fingerprints of tokenizer and corpus

A folder appears under its name whole or not at all: it is written next to it, flushed to the disk, then renamed, by one
process at a time (a lock that the kernel frees when its holder dies). `python -m data.prepare --help` for the shell.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from configs.schema import Data, InputError
from data import sources, tokenizer

FORMAT = 1  # of the folder: raise it when anything about its files, the split or the tokenizers' definition changes
BPE_CHARACTERS = 64_000_000  # of text that a BPE is trained on, in the first documents: more hardly changes the merges
SPLITS = ("train", "validation")

Documents = Iterable[tuple[str, str]]  # (name, text)


class Tokens:
    """One split of a corpus, mapped read-only: ranks and workers of a host share one copy in the page cache."""

    def __init__(self, folder: str, split: str, dtype: np.dtype) -> None:
        self.folder, self.split = folder, split
        self.path = os.path.join(folder, split)
        empty = os.path.getsize(f"{self.path}.bin") == 0  # which cannot be mapped
        self.tokens = np.zeros(0, dtype) if empty else np.memmap(f"{self.path}.bin", dtype, mode="r")  # [tokens]

    def __reduce__(self) -> tuple:
        """What is sent to a loader worker that is spawned instead of forked: where to map, not a copy of the corpus."""
        return Tokens, (self.folder, self.split, self.tokens.dtype)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [documents], ascending, from 0."""
        return np.load(f"{self.path}.starts.npy")

    @cached_property
    def names(self) -> list[str]:
        with open(f"{self.path}.names.json", encoding="ascii") as file:
            return json.load(file)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Indices (int64, into `names`) of the documents that have a token in [start, stop)."""
        stop = min(stop, len(self.tokens))
        if start >= stop:
            return np.arange(0)
        first = np.searchsorted(self.document_starts, start, side="right") - 1
        return np.arange(first, np.searchsorted(self.document_starts, stop, side="left"))


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus. Equal `fingerprint`s: equal tokens in both splits, whatever the machine or the file times."""

    folder: str
    tokenizer: tokenizer.Tokenizer
    train: Tokens
    validation: Tokens
    fingerprint: str


def prepare(cfg: Data, log: Callable[[str], object] = print) -> Prepared:
    """The corpus and tokenizer of `cfg`, out of the cache, or tokenised into it first. Any number of processes may call
    this at once. `log` receives lines for a person. InputError: a source, tokenizer or cache that cannot be used."""
    cache = os.path.abspath(os.path.expanduser(cfg.cache or "~/.cache/plumbline"))
    files = sources.find(cfg.source)
    folder = os.path.join(cache, _key(cfg, files))
    if not os.path.isdir(folder):
        try:
            os.makedirs(cache, exist_ok=True)
            with _lock(f"{folder}.lock", log):
                if not os.path.isdir(folder):  # nobody made it while we waited
                    _make(folder, cfg, files, log)
        except OSError as error:
            raise InputError(f"data.cache: {cache} cannot be written: {error.strerror}; give another folder with "
                             "--data.cache=FOLDER") from error
    return open_prepared(folder)


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
        train, validation = (Tokens(folder, split, saved.dtype) for split in SPLITS)
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}; give another cache with "
                         "--data.cache=FOLDER") from error
    return Prepared(folder, saved, train, validation, manifest["fingerprint"])


def verify(folder: str) -> Prepared:
    """`open_prepared`, after reading every byte: InputError names the first file that is not what was written."""
    for name, file in _manifest(folder)["files"].items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or _sha256(path) != file["sha256"]:
            raise InputError(f"{path} is not what was written: this tokenised corpus is damaged; remove {folder} and "
                             "run again to make it anew")
    return open_prepared(folder)


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
        kind = hashlib.sha256(tokenizer.read_rank_file(os.path.expanduser(kind))).hexdigest()
    decides = json.dumps([FORMAT, cfg.source == "stdlib", files, kind, BPE_CHARACTERS, cfg.validation_fraction])
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{os.path.basename(cfg.source.rstrip('/'))}-{kind[:8]}").strip("-")
    return f"{readable[:60]}-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"


@contextmanager
def _lock(path: str, log: Callable[[str], object]) -> Iterator[None]:
    """One process at a time, on a network file system one host at a time if it knows flock. The file stays: to remove
    it would let a third process lock a new one while the second holds the old."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process that is preparing this corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: str, cfg: Data, files: list[sources.File], log: Callable[[str], object]) -> None:
    """Called with the lock, so on this host the temporary folder is ours, and what is in it a killed process left."""
    temporary = f"{folder}.tmp-{socket.gethostname()}"
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    try:
        _write(temporary, cfg, files, log)
        if sources.find(cfg.source) != files:
            raise InputError(f"data.source: {cfg.source} changed while it was read: run again when it is at rest")
        os.rename(temporary, folder)
        _sync(os.path.dirname(folder))
    except OSError:
        if not os.path.isdir(folder):  # otherwise another host was faster, and made the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: str, cfg: Data, files: list[sources.File], log: Callable[[str], object]) -> None:
    """All files of the corpus, flushed to the disk, the manifest last. Reads the source twice (a BPE to train: three
    times), one document at a time, so that memory does not grow with the corpus."""

    def documents() -> Iterator[tuple[str, str]]:
        return (document for document in sources.documents(cfg.source, files) if document[1])

    survey = _survey(documents(), cfg.validation_fraction)
    if not survey.documents:
        raise InputError(f"data.source: {cfg.source} has no text: {len(files)} files, all empty")
    log(f"{cfg.source}: {survey.documents:,} documents, {survey.bytes / 1e6:,.1f} MB")

    if cfg.tokenizer == "bpe":
        began = time.monotonic()
        made = tokenizer.train_bpe(_first_texts(documents(), BPE_CHARACTERS), cfg.bpe_vocab_size)
        log(f"trained a BPE of {made.n_vocab:,} tokens in {time.monotonic() - began:.1f} s")
    elif cfg.tokenizer == "bytes":
        made = tokenizer.byte_tokenizer()
    else:
        made = tokenizer.from_rank_file(os.path.expanduser(cfg.tokenizer))
    made.save(os.path.join(folder, "tokenizer.json"))

    cut = survey.documents == 1 and cfg.validation_fraction > 0
    stream = _cut(documents(), cfg.validation_fraction) if cut else documents()
    held_out = {1} if cut else survey.held_out
    began = reported = time.monotonic()
    with closing(_Split(folder, "train", made)) as train, closing(_Split(folder, "validation", made)) as validation:
        for index, (name, size, ids) in enumerate(_encode(made, stream)):
            (validation if index in held_out else train).add(name, size, ids)
            now = time.monotonic()
            if now - reported > 5:
                done = train.bytes + validation.bytes
                log(f"tokenised {done / survey.bytes:.0%}, {done / 1e6 / (now - began):.1f} MB/s")
                reported = now
    seconds = time.monotonic() - began
    tokens = train.tokens + validation.tokens
    log(f"tokenised {tokens:,} tokens ({survey.bytes / tokens:.2f} bytes each) in {seconds:.1f} s, "
        f"{survey.bytes / 1e6 / seconds:.1f} MB/s")

    written = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        _sync(path)
        written[name] = {"bytes": os.path.getsize(path), "sha256": _sha256(path)}
    content = "".join([made.fingerprint, *(written[f"{split}.bin"]["sha256"] for split in SPLITS)])
    manifest = {
        "format": FORMAT,
        "source": cfg.source,
        "tokenizer": cfg.tokenizer,
        "tokenizer_fingerprint": made.fingerprint,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:32],
        "dtype": made.dtype.name,
        "n_vocab": made.n_vocab,
        "eot_id": made.eot_id,
        "splits": {
            split.name: {"documents": len(split.starts), "tokens": split.tokens, "bytes": split.bytes}
            for split in (train, validation)
        },
        "files": written,
    }
    path = os.path.join(folder, "manifest.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump(manifest, file, indent=1)
    _sync(path)
    _sync(folder)


@dataclass
class _Survey:
    documents: int
    bytes: int  # of UTF-8
    held_out: set[int]  # indices of the validation documents


def _survey(documents: Documents, fraction: float) -> _Survey:
    """Counts, and who is held out: a document whose hash, as a number in [0, 1), is below `fraction`. The hash is of
    the text alone, so the choice is stable when others come and go, and copies of one text land in the same split. In
    a small corpus the lowest hash goes to validation and the highest to training anyway, so that neither is empty."""
    survey = _Survey(0, 0, set())
    lowest, highest = (2.0, -1), (-1.0, -1)
    for index, (_, text) in enumerate(documents):
        data = text.encode()
        score = int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48
        lowest, highest = min(lowest, (score, index)), max(highest, (score, index))
        if score < fraction:
            survey.held_out.add(index)
        survey.documents += 1
        survey.bytes += len(data)
    if fraction > 0 and survey.documents > 1:
        survey.held_out.add(lowest[1])
        survey.held_out.discard(highest[1])
    return survey


def _cut(documents: Documents, fraction: float) -> Iterator[tuple[str, str]]:
    """The only document of a corpus as two: the lines up to 1 - fraction of it, and the tail that is held out."""
    ((name, text),) = documents
    if len(text) < 2:
        raise InputError(f"data.source: {name} has 1 character: too little to train on")
    wanted = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    end = text.rfind("\n", 0, wanted) + 1 or wanted  # at a line's end, if there is one
    yield name, text[:end]
    yield f"{name} (tail)", text[end:]


def _first_texts(documents: Documents, characters: int) -> Iterator[str]:
    """Texts until there are enough characters; the last may pass the limit."""
    taken = 0
    for _, text in documents:
        if taken >= characters:
            return
        taken += len(text)
        yield text


def _encode(tok: tokenizer.Tokenizer, documents: Documents) -> Iterator[tuple[str, int, np.ndarray]]:
    """(name, bytes, ids) in order, on all cores (encoding releases the GIL), with few documents in memory at a time."""
    threads = len(os.sched_getaffinity(0))
    tok.encode("")  # builds what the threads share, once

    def encode(name: str, text: str) -> tuple[str, int, np.ndarray]:
        return name, len(text.encode()), tok.encode(text)

    with ThreadPoolExecutor(threads) as pool:
        waiting = deque()
        for name, text in documents:
            waiting.append(pool.submit(encode, name, text))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


class _Split:
    """The three files of a split while they grow."""

    def __init__(self, folder: str, name: str, tok: tokenizer.Tokenizer) -> None:
        self.name = name
        self.path = os.path.join(folder, name)
        self.end_of_text = np.array([tok.eot_id], tok.dtype).tobytes()
        self.starts = array("q")
        self.tokens = 0
        self.bytes = 0  # of text
        self.token_file = open(f"{self.path}.bin", "wb")
        self.name_file = open(f"{self.path}.names.json", "w", encoding="ascii")

    def add(self, name: str, size: int, ids: np.ndarray) -> None:
        self.name_file.write(("," if self.starts else "[") + "\n" + json.dumps(name))
        self.token_file.write(ids.tobytes() + self.end_of_text)
        self.starts.append(self.tokens)
        self.tokens += len(ids) + 1
        self.bytes += size

    def close(self) -> None:
        self.name_file.write("\n]" if self.starts else "[]")
        self.name_file.close()
        self.token_file.close()
        np.save(f"{self.path}.starts.npy", np.array(self.starts, np.int64))


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


def main() -> int:
    defaults = Data()
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description="Tokenise a corpus into the cache.")
    parser.add_argument("--source", default=defaults.source, help="stdlib, or a text or .jsonl file, a folder, a glob")
    parser.add_argument("--tokenizer", default=defaults.tokenizer, help="bpe, bytes, or the path of a rank file")
    parser.add_argument("--bpe-vocab-size", type=int, default=defaults.bpe_vocab_size)
    parser.add_argument("--validation-fraction", type=float, default=defaults.validation_fraction)
    parser.add_argument("--cache", default=defaults.cache, help="folder of tokenised corpora [~/.cache/plumbline]")
    parser.add_argument("--verify", action="store_true", help="read every byte of it again and compare the hashes")
    arguments = vars(parser.parse_args())
    check = arguments.pop("verify")
    try:
        cfg = Data(**arguments)
    except ValueError as error:  # pydantic's: an option out of its bounds
        parser.error(str(error))
    try:
        prepared = prepare(cfg)
        if check:
            verify(prepared.folder)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{'split':<12}{'documents':>12}{'tokens':>16}{'MB of text':>14}{'bytes/token':>14}")
    for split, row in _manifest(prepared.folder)["splits"].items():
        ratio = row["bytes"] / max(row["tokens"], 1)
        print(f"{split:<12}{row['documents']:>12,}{row['tokens']:>16,}{row['bytes'] / 1e6:>14,.2f}{ratio:>14.3f}")
    print(f"\nvocabulary   {prepared.tokenizer.n_vocab:,} (fingerprint {prepared.tokenizer.fingerprint})")
    print(f"corpus       {prepared.fingerprint}{', every hash verified' if check else ''}")
    print(f"folder       {prepared.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
