"""Finds the beginnings of documents inside windows, for attention that stays inside a document
(`data.mask_documents`), and selects the part of windows that a rank reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.tokens import Tokens


def document_begins(
    sources: Sequence[Tokens],
    source: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    length: int,
) -> np.ndarray:
    """Mark the first token of each document in each window, bool [rows, length]. The window of each
    row has the tokens [start, stop) of its `source` (int64 [rows] each), at most `length`. If it
    has fewer, the padding after them is a document too."""
    begins = np.zeros((len(start), length), bool)
    for i in np.unique(source):
        rows = np.flatnonzero(source == i)
        starts = sources[i].document_starts
        low = np.searchsorted(starts, start[rows])
        high = np.searchsorted(starts, stop[rows])
        for row, first, last in zip(rows, low, high, strict=True):
            begins[row, starts[first:last] - start[row]] = True
    padded = np.flatnonzero(stop - start < length)
    begins[padded, (stop - start)[padded]] = True
    return begins


def positions_in_documents(begins: np.ndarray) -> np.ndarray:
    """Return the position of each token in its document, or from the beginning of its window if the
    document began before: int64 [rows, T]. begins: bool [rows, T]."""
    begins = begins.copy()
    begins[:, 0] = True
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=begins.size)
    place = np.arange(begins.size)
    return (place - np.repeat(first, lengths)).reshape(begins.shape)


def at(token_ranges: Sequence[range], array: np.ndarray, shift: int = 0) -> np.ndarray:
    """Select the columns of these positions, moved by `shift`: [rows, T + 1] -> [rows, t]."""
    parts = [array[:, part.start + shift : part.stop + shift] for part in token_ranges]
    return np.concatenate(parts, axis=1)
