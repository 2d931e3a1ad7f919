"""Indexes the documents of a prepared split: their names and the ranges of their tokens.

Training needs only where documents begin (data/tokens.py::Tokens.document_starts); the rest is for
data/audit.py and its users.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from data import sources
from data.prepared import TABLES
from data.tokens import Tokens, map_file


class DocumentIndex:
    """The documents of a split, by their number in it."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens.document_starts)

    def extent(self, number: int) -> tuple[int, int]:
        """Return [start, stop) of a document's tokens in the split."""
        starts = self.tokens.document_starts
        stop = int(starts[number + 1]) if number + 1 < len(starts) else len(self.tokens)
        return int(starts[number]), stop

    def between(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers (int64) of the documents that have a token in [start, stop)."""
        stop = min(stop, len(self.tokens))
        if start >= stop:
            return np.arange(0)
        starts = self.tokens.document_starts
        first = np.searchsorted(starts, start, side="right") - 1
        return np.arange(first, np.searchsorted(starts, stop, side="left"))

    def name(self, number: int) -> str:
        """Return the name of a document: its file, and its line or row if the file has several
        documents."""
        files, numbers, names, begins = self._tables
        file = int(files[number])
        name = names[begins[file] : begins[file + 1]].tobytes()
        file_name = name.decode("utf-8", errors="surrogateescape")
        return sources.name(file_name, int(numbers[number])) + self.tokens.tail

    @cached_property
    def _tables(self) -> list[np.ndarray]:
        """Map the files and numbers of the documents, the files' names, and where each begins."""
        wanted = {
            f"{self.tokens.split}.files": TABLES["files"],
            f"{self.tokens.split}.numbers": TABLES["numbers"],
            "names": np.dtype(np.uint8),
            "names.starts": np.dtype("<i8"),
        }
        return [map_file(self.tokens.path(name), dtype) for name, dtype in wanted.items()]
