"""Opens a prepared corpus in an object store, as data/stores/upload.py has put it there.

It is the folder of data/prepared.py, with `hashes` (data/stores/blocks.py) in addition to the
tables. Its manifest is hashed itself (`sum`), and it is uploaded last, so a corpus that has one is
complete. Everything but the shards is fetched whole when it is first asked for, compared with its
SHA-256, and kept in a folder of `data.cache`, once for all ranks of a host. That folder also has
the local copies of blocks.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import xxhash

from configs.schema import CACHE, Data, InputError
from data.packing import PackedTokens
from data.stores.blocks import Blocks
from data.stores.places import key_of, not_writable
from data.tokens import Tokens, map_file
from reliability.disk import sync
from reliability.objects import Key

MANIFEST = "manifest.json"
HASHES = "hashes"
PIECE = 1 << 24  # bytes of a table that are fetched at a time
NAME = re.compile(r"\w[\w.-]*")  # of a file: none leads out of the folder
AGAIN = "upload it again: python -m data.prepare --source FOLDER --out {}"


class StoredCorpus:
    """A corpus in a store, and the folder of this host that holds what was fetched of it."""

    def __init__(self, url: str, manifest: dict, cfg: Data) -> None:
        self.url = url
        self.manifest = manifest
        self.cfg = cfg
        self.key = key_of(url)
        self.files = manifest["files"]
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.key.name or self.key.bucket)[:40]
        decides = f"{url} {manifest['sum']}".encode()
        name = f"{readable}-{hashlib.sha256(decides).hexdigest()[:16]}"
        self.folder = os.path.abspath(os.path.expanduser(os.path.join(cfg.cache or CACHE, name)))
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise not_writable(self.folder, error) from error

    def __reduce__(self) -> tuple:
        """Pickle the URL alone: the process that receives it opens its own files and
        connections."""
        return StoredCorpus, (self.url, self.manifest, self.cfg)

    def check(self) -> None:
        """Compare the sizes of all objects with the manifest. Raises InputError."""
        there = self.key.below()
        for name, file in self.files.items():
            size = there.get(name)
            if size != file["bytes"]:  # a listing may lag behind
                size = self.size(name)
            if size != file["bytes"]:
                raise InputError(
                    f"{self.key / name} has {size} bytes instead of {file['bytes']}: this "
                    f"tokenised corpus is damaged; {AGAIN.format(self.url)}"
                )
        self.path(HASHES)

    def size(self, name: str) -> int:
        try:
            return (self.key / name).size()
        except FileNotFoundError:
            return 0

    def path(self, name: str) -> str:
        """Return the path of a file of the corpus on this host, fetching it if need be."""
        path = os.path.join(self.folder, name)
        if name in self.files and not self._is_here(path):
            with self._lock():
                if not self._is_here(path):  # no other rank has fetched it meanwhile
                    try:
                        self._fetch(name, path)
                    except OSError as error:
                        raise InputError(
                            f"{self.key / name} cannot be kept in {path}: {error.strerror}; give "
                            "another folder with --data.cache=FOLDER"
                        ) from error
        return path

    def _is_here(self, path: str) -> bool:
        name = os.path.basename(path)
        return os.path.isfile(path) and os.path.getsize(path) == self.files[name]["bytes"]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(os.path.join(self.folder, ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _fetch(self, name: str, path: str) -> None:
        key = self.key / name
        for _ in range(key.tries):
            digest = hashlib.sha256()
            with open(f"{path}.tmp", "wb") as out:
                for start in range(0, self.files[name]["bytes"], PIECE):
                    stop = min(start + PIECE, self.files[name]["bytes"])
                    piece = key.read_range(start, stop)
                    digest.update(piece)
                    out.write(piece)
            if digest.hexdigest() == self.files[name]["sha256"]:
                sync(f"{path}.tmp")
                os.rename(f"{path}.tmp", path)
                return
        os.remove(f"{path}.tmp")
        raise InputError(
            f"{key} is not what was written: this tokenised corpus is damaged; "
            f"{AGAIN.format(self.url)}"
        )

    @cached_property
    def blocks(self) -> Blocks:
        hashes = map_file(self.path(HASHES), np.dtype("<u8"))
        local = os.path.join(self.folder, "blocks")
        return Blocks(self.key, shards(self.files), hashes, local, self.cfg)

    def tokens(self, kind: type[Tokens], split: str, dtype: np.dtype, tail: str) -> Tokens:
        """Open a split. kind: Tokens, or PackedTokens for conversations."""
        stored = StoredPackedTokens if kind is PackedTokens else StoredTokens
        return stored(self, split, dtype, tail)


class StoredTokens(Tokens):
    """One split of a corpus in a store. A read waits for the store, unless it was asked for."""

    is_stored = True

    def __init__(self, corpus: StoredCorpus, split: str, dtype: np.dtype, tail: str = "") -> None:
        self.corpus = corpus
        super().__init__(corpus.folder, split, dtype, tail)

    def __reduce__(self) -> tuple:
        return type(self), (self.corpus, self.split, self.dtype, self.tail)

    def sizes(self) -> dict[str, int]:
        return shards(self.corpus.files)

    def ask(self, start: int, stop: int) -> int:
        return sum(self.corpus.blocks.ask(*extent) for extent in self._extents(start, stop))

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = [self.corpus.blocks.read(*extent) for extent in self._extents(start, stop)]
        return np.frombuffer(b"".join(parts), self.dtype)

    def map(self, shard: int) -> np.ndarray:
        return np.frombuffer(self.corpus.blocks.whole(self.shards[shard]), self.dtype)

    def _extents(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Return the bytes (shard, [first, last)) of tokens [start, stop)."""
        width = self.dtype.itemsize
        stop = min(stop, len(self))
        shard = int(self.ends.searchsorted(start, "right"))
        while start < stop:
            begin = int(self.ends[shard - 1]) if shard else 0
            last = min(stop, int(self.ends[shard]))
            yield self.shards[shard], (start - begin) * width, (last - begin) * width
            start = last
            shard += 1

    def path(self, name: str) -> str:
        return self.corpus.path(name)


class StoredPackedTokens(StoredTokens, PackedTokens):
    """The same of conversations."""


def shards(files: dict[str, dict]) -> dict[str, int]:
    """Return the shards of both splits, with their sizes, in the order of their blocks' numbers."""
    return {name: files[name]["bytes"] for name in sorted(files) if name.endswith(".bin")}


def manifest_text(manifest: dict) -> bytes:
    """Return the manifest as a store holds it."""
    return json.dumps({**manifest, "sum": _sum(manifest)}, indent=1).encode("ascii")


def _sum(manifest: dict) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())


def read_manifest(url: str) -> dict:
    """Read the manifest. Raises InputError if it is damaged, or not of a store."""
    key: Key = key_of(url) / MANIFEST
    problem = "is damaged"
    for _ in range(key.tries):
        try:
            manifest = json.loads(key.read_bytes())
        except FileNotFoundError:
            raise InputError(
                f"{key} is missing: the upload of this corpus did not end; {AGAIN.format(url)}"
            ) from None
        except ValueError:
            continue
        if isinstance(manifest, dict) and manifest.get("sum") == _sum(manifest):
            if not all(NAME.fullmatch(name) for name in manifest["files"]):
                raise InputError(f"{key} names files that no corpus has: do not use it")
            return manifest
        if isinstance(manifest, dict) and "sum" not in manifest:
            problem = (
                "was not written by `python -m data.prepare --out`, and has no hashes of blocks"
            )
    raise InputError(f"{key} {problem}; {AGAIN.format(url)}")


def is_prepared_there(url: str) -> bool:
    """Return whether a store has a prepared folder there, as configs/schema.py::is_prepared does
    for a disk. A folder whose upload was killed counts as one: its manifest is missing, and it is
    no text."""
    key = key_of(url)
    if glob.has_magic(key.path):
        return False
    names = (MANIFEST, "tokenizer.json", "names.starts")
    return sum((key / name).exists() for name in names) > 1
