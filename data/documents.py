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
        file = int(self._files[number])
        start = self._name_starts[file]
        stop = self._name_starts[file + 1]
        file_name = self._names[start:stop].tobytes().decode("utf-8", errors="surrogateescape")
        return sources.name(file_name, int(self._numbers[number])) + self.tokens.tail

    @cached_property
    def _files(self) -> np.ndarray:
        return self._table("files")

    @cached_property
    def _numbers(self) -> np.ndarray:
        return self._table("numbers")

    def _table(self, name: str) -> np.ndarray:
        return map_file(self.tokens.path(f"{self.tokens.split}.{name}"), TABLES[name])

    @cached_property
    def _names(self) -> np.ndarray:
        """uint8, the names one after another."""
        return map_file(self.tokens.path("names"), np.dtype(np.uint8))

    @cached_property
    def _name_starts(self) -> np.ndarray:
        """int64 [files + 1]: where each name begins."""
        return map_file(self.tokens.path("names.starts"), np.dtype("<i8"))
