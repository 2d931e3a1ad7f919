"""Opens and checks a prepared folder: a tokenised corpus that `data/prepare/` has made.

All numbers in it are little-endian, and no file has a header. Each of the first five exists once
for `train` and once for `validation`:

    train-00000.bin ...  shards: the documents' tokens one after another, uint16 or uint32
    train.starts         int64 [documents]: where each document begins, counted over all shards
    train.files          int32 [documents]: the index of the file that it came from
    train.numbers        int64 [documents]: its line or row in that file; -1 if it is the whole file
    train.answers        int64 [2 * answers]: where each answer begins and ends, counted over all shards; not of text
    train.sizes          uint32 [tokens]: the bytes of text that each stands for (data/text_bytes.py); only where its
                         id does not tell, and of a split that is not held out only if nothing is
    names, names.starts  the files' names in UTF-8, one after another, and int64 [files + 1]: where each name begins
    tokenizer.json       the tokenizer (data/tokenizer.py), so that the folder explains itself
    format.json          what made tokens of conversations (data/formats.py::describe); not of text
    manifest.json        the report, counts, size and SHA-256 of each file, fingerprints of tokenizer and corpus

In an object store there is one file more (data/stores/corpus.py). Nothing in these files is ever
executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass

import numpy as np

from configs.schema import Data, InputError
from data import formats, tokenizer
from data.open_tokenizer import load_saved
from data.packing import PackedTokens
from data.stores import corpus, places
from data.tokens import Tokens

# raise it when the files, the split into train and validation, or the tokenizers' definition change
FORMAT = 2
# with answers: older code would read such a folder as text, and train on the questions too
FORMAT_OF_ANSWERS = 3
SPLITS = ("train", "validation")
TABLES = {"starts": np.dtype("<i8"), "files": np.dtype("<i4"), "numbers": np.dtype("<i8")}
OF_ANSWERS = {"answers": np.dtype("<i8")}
OF_BYTES = {"sizes": np.dtype("<u4")}


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus. Equal fingerprints mean equal tokens in both splits, on any machine and
    with any file times."""

    folder: str  # or a URL; `train.folder` is on this machine
    tokenizer: tokenizer.Tokenizer
    train: Tokens
    validation: Tokens
    fingerprint: str
    format: str = "text"  # as data.format


def tables(described: dict, tok: tokenizer.Tokenizer) -> dict[str, np.dtype]:
    """Return the tables of a split, in a format that data/formats.py::describe has described."""
    answers = OF_ANSWERS if described else {}
    return TABLES | answers | ({} if tok.exact_lengths else OF_BYTES)


class CorpusFolder:
    """A prepared folder on this machine; data/stores/corpus.py::StoredCorpus: in a store."""

    def __init__(self, folder: str, manifest: dict) -> None:
        self.folder = folder
        self.files = manifest["files"]

    def check(self) -> None:
        for name, file in self.files.items():
            path = self.path(name)
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            if size != file["bytes"]:
                raise InputError(
                    f"{path} has {size} bytes instead of {file['bytes']}: this tokenised corpus is "
                    f"damaged; remove {self.folder} and run again to prepare it"
                )

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def tokens(self, kind: type[Tokens], split: str, dtype: np.dtype, tail: str) -> Tokens:
        return kind(self.folder, split, dtype, tail)


def open_prepared(folder: str, cfg: Data | None = None) -> Prepared:
    """Open a prepared folder, or a URL, after checking its tokenizer and the sizes of its files.
    `verify` checks their content. cfg: says where this machine keeps what it fetches of a URL.
    InputError: a file or the tokenizer is not the one that was written."""
    manifest = read_manifest(folder)
    place = _place(folder, manifest, cfg)
    place.check()
    saved = load_saved(place.path("tokenizer.json"))
    if saved.fingerprint != manifest["tokenizer_fingerprint"]:
        raise InputError(
            f"{folder}: its tokenizer ({saved.fingerprint}) is not the one that made its tokens "
            f"({manifest['tokenizer_fingerprint']}); remove the folder and run again to prepare "
            "it"
        )
    try:
        kind = PackedTokens if manifest["format"] == FORMAT_OF_ANSWERS else Tokens
        if kind is PackedTokens:
            place.path(formats.FILE)  # data/too_long.py reads it from there
        tail = " (tail)" if manifest["cut"] else ""
        train = place.tokens(kind, "train", saved.dtype, "")
        validation = place.tokens(kind, "validation", saved.dtype, tail)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read: {error.strerror}; give another cache with "
            "--data.cache=FOLDER"
        ) from error
    for tokens in train, validation:
        written = manifest["splits"][tokens.split]["tokens"]
        if len(tokens) != written:
            raise InputError(
                f"{folder} has {len(tokens)} {tokens.split} tokens instead of {written}: a shard "
                "in it does not belong there"
            )
    written_as = manifest.get("data_format", "text")
    return Prepared(folder, saved, train, validation, manifest["fingerprint"], written_as)


def _place(folder: str, manifest: dict, cfg: Data | None) -> CorpusFolder | corpus.StoredCorpus:
    if places.is_url(folder):
        return corpus.StoredCorpus(folder, manifest, cfg or Data())
    return CorpusFolder(folder, manifest)


def verify(folder: str, cfg: Data | None = None) -> Prepared:
    """Open a prepared folder after reading every byte. InputError names the first file that differs
    from what was written or that has a token beyond the vocabulary."""
    manifest = read_manifest(folder)
    place = _place(folder, manifest, cfg)
    for name, file in manifest["files"].items():
        if places.is_url(folder) and name.endswith(".bin"):
            continue  # its blocks are compared with their hashes whenever they are read
        path = place.path(name)
        if not os.path.isfile(path) or file_sha256(path) != file["sha256"]:
            raise InputError(
                f"{path} is not what was written: this tokenised corpus is damaged; remove "
                f"{place.folder} and run again to prepare it"
            )
    prepared = open_prepared(folder, cfg)
    n_vocab = prepared.tokenizer.n_vocab
    for tokens in prepared.train, prepared.validation:
        for index, shard in enumerate(tokens.shards):
            highest = int(tokens.map(index).max(initial=0))
            if highest >= n_vocab:
                raise InputError(
                    f"{tokens.path(shard)} has token {highest}, but its tokenizer has only "
                    f"{n_vocab}: this tokenised corpus is damaged; remove {folder}"
                )
    return prepared


def read_manifest(folder: str) -> dict:
    """Read the manifest. InputError: it is missing, damaged, or of a format unknown here."""
    path = os.path.join(folder, "manifest.json")
    try:
        if places.is_url(folder):
            manifest = corpus.read_manifest(folder)
        else:
            with open(path, encoding="ascii") as file:
                manifest = json.load(file)
        written = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is missing or damaged ({error!r}): remove {folder} and run again"
        ) from error
    if written not in (FORMAT, FORMAT_OF_ANSWERS):
        raise InputError(
            f"{folder} is of format {written}, this code reads {FORMAT} and {FORMAT_OF_ANSWERS}: "
            "remove it and run again"
        )
    return manifest


def file_sha256(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
