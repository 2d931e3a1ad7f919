"""Maps the tokens of one split of a prepared folder into the memory of every rank.

A split is an array of token ids: its documents' tokens one after another. On the disk it is cut
into shards, flat files of little-endian uint16 or uint32 without a header. data/prepared.py opens
and checks the folder, and describes its other files.
"""

from __future__ import annotations

import os
from functools import cached_property

import numpy as np


class Tokens:
    """One split of a corpus, mapped read-only, so that the ranks and workers of a host share one
    copy in the page cache. `len` is its number of tokens."""

    is_stored = False  # in an object store (data/stores/corpus.py::StoredTokens)

    def __init__(self, folder: str, split: str, dtype: np.dtype, tail: str = "") -> None:
        """split: "train" or "validation". tail: what data/documents.py appends to the names of the
        documents."""
        self.folder = folder
        self.split = split
        self.dtype = np.dtype(dtype)
        self.tail = tail
        self.shards = []
        sizes = []
        for name, size in self.sizes().items():
            if name.startswith(split):
                self.shards.append(name)
                sizes.append(size // self.dtype.itemsize)
        self.ends = np.cumsum(sizes, dtype=np.int64)  # [shards]: tokens up to the end of each
        # a shard is mapped when it is first read
        self.maps: list[np.ndarray | None] = [None] * len(self.shards)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the shards of all splits in bytes, in their order."""
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".bin"))
        return {name: os.path.getsize(self.path(name)) for name in names}

    def ask(self, start: int, stop: int) -> int:
        """Begin to fetch tokens [start, stop), which are read soon: of what is here, nothing."""
        return 0

    def __reduce__(self) -> tuple:
        """Pickle without the tokens: a process that receives this object maps the files again."""
        return type(self), (self.folder, self.split, self.dtype, self.tail)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) of the split, as an array of its dtype; a view if they are all
        in one shard."""
        stop = min(stop, len(self))
        if start >= stop:
            return np.zeros(0, self.dtype)
        shard = int(self.ends.searchsorted(start, "right"))
        parts = []
        while start < stop:
            tokens = self.map(shard)
            end = int(self.ends[shard])
            begin = end - len(tokens)
            parts.append(tokens[start - begin : min(stop, end) - begin])
            start = end
            shard += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def map(self, shard: int) -> np.ndarray:
        """Map all tokens of one shard."""
        tokens = self.maps[shard]
        if tokens is None:
            tokens = map_file(self.path(self.shards[shard]), self.dtype)
            self.maps[shard] = tokens
        return tokens

    @cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [documents], ascending, from 0: where each document begins in the split; mapped."""
        return map_file(self.path(f"{self.split}.starts"), np.dtype("<i8"))

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def map_file(path: str, dtype: np.dtype) -> np.ndarray:
    """Map a whole file as a plain array: slices of a memmap object are slow."""
    if os.path.getsize(path) < dtype.itemsize:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
