"""Packs whole documents into windows, for conversations, instead of cutting a stream of tokens.

A window of text begins in the middle of a document as often as not. An answer without its question
would teach nothing, so here a window holds whole documents, one after another, as many as fit into
T + 1 tokens (T inputs, T labels). The rest of it is padding, in which no label counts. Documents
stay in their order, so the windows are ranges of the split, and they follow from the documents'
lengths and T alone. A document of more than T + 1 tokens is in no window. It is never cut:
data/too_long.py counts and names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from data.tokens import Tokens, map_file


class PackedTokens(Tokens):
    """One split of a corpus whose windows hold whole documents, and whose labels are answers."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.packed: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by T

    @cached_property
    def answers(self) -> np.ndarray:
        """int64 [2 * answers], ascending: where each answer begins and ends in the split; mapped."""
        return map_file(self.path(f"{self.split}.answers"), np.dtype("<i8"))

    def windows(self, seq_len: int) -> np.ndarray:
        """Return int64 [windows, 2]: the first token of each window, and the one after its last."""
        return self._pack(seq_len)[0]

    def too_long(self, seq_len: int) -> np.ndarray:
        """Return int64: the numbers of the documents that are longer than a window."""
        return self._pack(seq_len)[1]

    def _pack(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self.packed:
            self.packed[seq_len] = pack(self.document_starts, len(self), seq_len + 1)
        return self.packed[seq_len]

    def are_answers(self, start: int, stop: int) -> np.ndarray:
        """Return which tokens of [start, stop) belong to an answer, bool [stop - start]."""
        # the number of borders at or before a token of an answer is odd
        before = self.answers.searchsorted(start, "right")
        inside = self.answers[before : self.answers.searchsorted(stop, "left")]
        crossed = np.bincount(inside - start, minlength=stop - start).cumsum()
        return (before + crossed) % 2 == 1


def pack(starts: np.ndarray, total: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents that begin at `starts` (int64, ascending) of `total` tokens into windows:
    int64 [windows, 2], [first, stop) of each; and int64, the documents that are longer than
    `room`."""
    stops = np.append(starts[1:], total)
    windows = []
    dropped = []
    first = 0
    while first < len(starts):
        begin = int(starts[first])
        after = int(stops.searchsorted(begin + room, "right"))
        if after == first:
            dropped.append(first)
            first += 1
        else:
            windows.append((begin, int(stops[after - 1])))
            first = after
    return np.array(windows, np.int64).reshape(-1, 2), np.array(dropped, np.int64)


def count(tokens: Tokens, seq_len: int) -> int:
    """Count the windows of a split."""
    if isinstance(tokens, PackedTokens):
        return len(tokens.windows(seq_len))
    return max(0, (len(tokens) - 1) // seq_len)


def extents(
    sources: Sequence[Tokens], source: np.ndarray, window: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return [start, stop) of the tokens of windows in their source: int64 [rows] each, as are
    `source` and `window`. At most T + 1 tokens, and exactly so many in text."""
    start = window * seq_len
    stop = start + seq_len + 1
    for i, tokens in enumerate(sources):
        if isinstance(tokens, PackedTokens):
            rows = source == i
            start[rows], stop[rows] = tokens.windows(seq_len)[window[rows]].T
    return start, stop


def holding(tokens: Tokens, start: int, stop: int, seq_len: int) -> np.ndarray:
    """Return the windows (int64) that have a token of [start, stop), as input or label; where the
    split ends, more than there are."""
    if not isinstance(tokens, PackedTokens):
        return np.arange(max(start - 1, 0) // seq_len, (stop - 1) // seq_len + 1)
    windows = tokens.windows(seq_len)
    return np.flatnonzero((windows[:, 0] < stop) & (windows[:, 1] > start))


def mask_non_answers(
    labels: np.ndarray,
    ignore: int,
    token_ranges: Sequence[range],
    sources: Sequence[Tokens],
    source: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
) -> None:
    """Write `ignore` over every label of a window of conversations that is of no answer, padding
    included. labels: int64, [rows, t] in any shape, those of the inputs at `token_ranges` of each
    window; start and stop: as `extents` returns them."""
    rows = labels.reshape(len(start), -1)  # a view
    places = np.concatenate([np.arange(part.start, part.stop) for part in token_ranges])
    for row, i in enumerate(source):
        tokens = sources[i]
        if isinstance(tokens, PackedTokens):
            are_answers = tokens.are_answers(int(start[row]), int(stop[row]))
            counts = np.zeros(places.max() + 2, bool)
            counts[: len(are_answers)] = are_answers[: len(counts)]
            rows[row, ~counts[places + 1]] = ignore
