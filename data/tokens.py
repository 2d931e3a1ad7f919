"""Opens a tokenised corpus: a folder of flat token arrays that every rank maps into memory.

`data/prepare/` makes such a folder. All numbers in it are little-endian, and no file has a header.
Each of the first four exists once for `train` and once for `validation`:

    train-00000.bin ...  shards: the documents' tokens one after another, uint16 or uint32
    train.starts         int64 [documents]: where each document begins, counted over all shards
    train.files          int32 [documents]: the index of the file that it came from
    train.numbers        int64 [documents]: its line or row in that file; -1 if it is the whole file
    names, names.starts  the files' names in UTF-8, one after another, and int64 [files + 1]: where each name begins
    tokenizer.json       the tokenizer (data/tokenizer.py), so that the folder explains itself
    manifest.json        the report, counts, size and SHA-256 of each file, fingerprints of tokenizer and corpus

Nothing in these files is ever executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from configs.schema import InputError
from data import sources, tokenizer

# raise it when the files, the split into train and validation, or the tokenizers' definition change
FORMAT = 2
SPLITS = ("train", "validation")
TABLES = {"starts": np.dtype("<i8"), "files": np.dtype("<i4"), "numbers": np.dtype("<i8")}


class Tokens:
    """One split of a corpus, mapped read-only, so that the ranks and workers of a host share one
    copy in the page cache."""

    def __init__(self, folder: str, split: str, dtype: np.dtype, tail: str = "") -> None:
        """`tail` is appended to the name of every document, to say that it is the tail of a text."""
        self.folder, self.split, self.dtype, self.tail = folder, split, np.dtype(dtype), tail
        names = os.listdir(folder)
        self.shards = sorted(
            name for name in names if name.startswith(split) and name.endswith(".bin")
        )
        sizes = [
            os.path.getsize(os.path.join(folder, name)) // self.dtype.itemsize
            for name in self.shards
        ]
        self.ends = np.cumsum(sizes, dtype=np.int64)  # [shards]
        # a shard is mapped when it is first read
        self.maps: list[np.ndarray | None] = [None] * len(self.shards)

    def __reduce__(self) -> tuple:
        """A process that receives this object maps the files again. The tokens themselves are never
        sent."""
        return Tokens, (self.folder, self.split, self.dtype, self.tail)

    def __len__(self) -> int:
        """Tokens of the split."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the split, as an array of its dtype; a view if they lie in one
        shard."""
        stop = min(stop, len(self))
        if start >= stop:
            return np.zeros(0, self.dtype)
        shard = int(self.ends.searchsorted(start, "right"))
        parts = []
        while start < stop:
            end = int(self.ends[shard])
            tokens = self.map(shard)
            begin = start - end + len(tokens)
            parts.append(tokens[begin : begin + min(stop, end) - start])
            start, shard = min(stop, end), shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def map(self, shard: int) -> np.ndarray:
        """All tokens of one shard."""
        tokens = self.maps[shard]
        if tokens is None:
            tokens = self.maps[shard] = _mapped(
                os.path.join(self.folder, self.shards[shard]), self.dtype
            )
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
        """uint8, the names one after another, and int64 [files + 1]: where each begins."""
        text = _mapped(os.path.join(self.folder, "names"), np.dtype(np.uint8))
        return text, _mapped(os.path.join(self.folder, "names.starts"), np.dtype("<i8"))

    def name(self, document: int) -> str:
        """The name of a document: its file, and its line or row if the file has several documents."""
        names, starts = self._names
        file = int(self._files[document])
        text = (
            names[starts[file] : starts[file + 1]]
            .tobytes()
            .decode("utf-8", errors="surrogateescape")
        )
        return sources.name(text, int(self._numbers[document])) + self.tail

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Indices (int64) of the documents that have a token in [start, stop)."""
        stop = min(stop, len(self))
        if start >= stop:
            return np.arange(0)
        first = np.searchsorted(self.document_starts, start, side="right") - 1
        return np.arange(first, np.searchsorted(self.document_starts, stop, side="left"))


def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """The whole file as it lies on the disk, mapped. The result is a plain array, as slices of a
    memmap object are slow."""
    if os.path.getsize(path) < dtype.itemsize:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus. Equal fingerprints mean equal tokens in both splits, whatever the machine
    or the file times."""

    folder: str
    tokenizer: tokenizer.Tokenizer
    train: Tokens
    validation: Tokens
    fingerprint: str


def open_prepared(folder: str) -> Prepared:
    """Open a prepared folder after checking its tokenizer and the sizes of its files. `verify`
    checks their content. InputError: a file or the tokenizer is not the one that was written."""
    manifest = read_manifest(folder)
    for name, file in manifest["files"].items():
        path = os.path.join(folder, name)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        if size != file["bytes"]:
            raise InputError(
                f"{path} has {size} bytes instead of {file['bytes']}: this tokenised corpus is "
                "damaged; "
                f"remove {folder} and run again to make it anew"
            )
    saved = tokenizer.load_saved(os.path.join(folder, "tokenizer.json"))
    if saved.fingerprint != manifest["tokenizer_fingerprint"]:
        raise InputError(
            f"{folder}: its tokenizer ({saved.fingerprint}) is not the one that made its tokens "
            f"({manifest['tokenizer_fingerprint']}); remove the folder and run again to make it "
            "anew"
        )
    try:
        train = Tokens(folder, "train", saved.dtype)
        validation = Tokens(folder, "validation", saved.dtype, " (tail)" if manifest["cut"] else "")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read: {error.strerror}; give another cache with "
            "--data.cache=FOLDER"
        ) from error
    for tokens in train, validation:
        if len(tokens) != manifest["splits"][tokens.split]["tokens"]:
            raise InputError(
                f"{folder} has {len(tokens)} {tokens.split} tokens instead of "
                f"{manifest['splits'][tokens.split]['tokens']}: a shard in it does not belong there"
            )
    return Prepared(folder, saved, train, validation, manifest["fingerprint"])


def verify(folder: str) -> Prepared:
    """`open_prepared` after reading every byte. InputError names the first file that differs from
    what was written or that has a token beyond the vocabulary."""
    manifest = read_manifest(folder)
    for name, file in manifest["files"].items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or file_sha256(path) != file["sha256"]:
            raise InputError(
                f"{path} is not what was written: this tokenised corpus is damaged; remove "
                f"{folder} and "
                "run again to make it anew"
            )
    prepared = open_prepared(folder)
    for tokens in prepared.train, prepared.validation:
        for index, shard in enumerate(tokens.shards):
            if (highest := int(tokens.map(index).max(initial=0))) >= prepared.tokenizer.n_vocab:
                raise InputError(
                    f"{os.path.join(folder, shard)} has token {highest}, but its tokenizer has "
                    "only "
                    f"{prepared.tokenizer.n_vocab}: this tokenised corpus is damaged; remove "
                    f"{folder}"
                )
    return prepared


def read_manifest(folder: str) -> dict:
    """InputError: it is missing, damaged, or of a format that this code does not read."""
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path, encoding="ascii") as file:
            manifest = json.load(file)
        written = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is missing or damaged ({error!r}): remove {folder} and run again"
        ) from error
    if written != FORMAT:
        raise InputError(
            f"{folder} is of format {written}, this code reads {FORMAT}: remove it and run again"
        )
    return manifest


def file_sha256(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
