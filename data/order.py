"""Computes the order of a run's data: which window of which source is row r of step s.

It is a function of (seed, step) without state, so every rank finds its rows of any step at once,
and a resume replays nothing. Definitions, here and in data/loader.py:

    source        one tokenised text: `data.source`, or an entry of `data.mixture`
    window j      tokens [j*T, j*T + T + 1) of a source: T inputs and T labels. Every token is a label
                  once per epoch
    epoch         one pass over all windows of a source, each epoch in a different order
    sample p      the p-th window that the run trains on, counted over all ranks
    row r         of step s: a sequence of its global batch of G rows, which is sample s*G + r
    segment       a stretch of steps in which shares, sources, seed, T and G stay the same
    token range   the positions of a window whose tokens a rank reads (fewer than T only under context
                  parallelism)
    document      a piece of the original text. Windows do not respect its borders

From a sample to its window in two steps:

1. Which source? Every block of BLOCK samples has exactly `share` samples of each source. A
   permutation keyed by (seed, block) distributes the slots of a block to the sources. So the sample
   is number k of its source, and k is known.
2. Which window? k = epoch * windows + index, and window = permutation(index), keyed by (seed,
   source, epoch) (data/shuffle.py).

A new `Segment` begins where a schedule changes the weights, or where a resume continues with other
data. It knows how many samples of each source were consumed before it, so that each source
continues from there. The segments are all that a checkpoint saves (data/splice.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.shuffle import permute

# samples in which the shares of a mixture are exact: a power of 4, so that the permutation of slots
# walks no cycle
BLOCK = 4096

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Source:
    """A source within a segment."""

    name: str  # "" if data.source is the only source
    fingerprint: str  # of its tokens
    windows: int  # samples of an epoch
    key: int  # of its permutations
    share: int  # its samples in every BLOCK
    consumed: int  # its samples in all segments before this one


@dataclass(frozen=True)
class Segment:
    """A stretch of a run, beginning at `step`, in which nothing about the order changes. Its samples
    are counted from its own beginning."""

    step: int
    sample: int  # samples of the run before it
    seed: int
    seq_len: int
    global_batch_size: int
    sources: tuple[Source, ...]

    def locate(self, sample: np.ndarray) -> Pair:
        """Return the source of each sample of this segment (int64 [n], ascending), and the number
        of samples of that source before it in the run; int64 [n] each."""
        if len(self.sources) == 1:
            return np.zeros_like(sample), sample + self.sources[0].consumed
        block, slot = np.divmod(sample, BLOCK)
        source = np.empty_like(sample)
        before = np.empty_like(sample)  # samples of the same source, in the same block
        for number in np.unique(block).tolist():
            inside = block == number
            owner, count = self.slots(number)
            source[inside] = owner[slot[inside]]
            before[inside] = count[slot[inside]]
        consumed = np.array([one.consumed for one in self.sources])
        share = np.array([one.share for one in self.sources])
        return source, consumed[source] + block * share[source] + before

    def slots(self, block: int) -> Pair:
        """Return the source of each slot of a block, and the number of slots of that source before
        it; int64 [BLOCK] each."""
        shares = tuple(source.share for source in self.sources)
        return _slots(shares, derived_key(self.seed, ""), self.sample + block * BLOCK)

    def consumed(self, samples: int) -> list[int]:
        """Count the samples of each source that the run has consumed after `samples` samples of
        this segment."""
        blocks, left = divmod(samples, BLOCK)
        partial = np.zeros(len(self.sources), np.int64)  # of the block that is not complete
        if left:
            which, _ = self.locate(np.arange(blocks * BLOCK, samples))
            partial = np.bincount(which, minlength=len(self.sources))
        counts = []
        for source, extra in zip(self.sources, partial.tolist(), strict=True):
            counts.append(source.consumed + blocks * source.share + extra)
        return counts


@lru_cache(maxsize=16)
def _slots(shares: tuple[int, ...], key: int, start: int) -> Pair:
    """Return `Segment.slots` of the block whose first sample is number `start` of the run. It is
    cached, as steps share blocks."""
    place = permute(np.arange(BLOCK), start, BLOCK, key)
    source = np.searchsorted(np.cumsum(shares), place, side="right").astype(np.int16)
    by_source = np.argsort(source, kind="stable")
    before = np.empty(BLOCK, np.int64)
    before[by_source] = np.concatenate([np.arange(share) for share in shares])
    return source.astype(np.int64), before


def derived_key(seed: int, name: str) -> int:
    """Derive a key of 63 bits. Each source of a mixture has its own, and so have the slots (name
    ""), so that all are shuffled independently."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Order:
    """The segments of a run, past and planned. Every method answers for any step."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.last = self.segments[-1]

    def segment(self, step: int) -> Segment:
        """Return the segment of step `step` (the first is 0)."""
        return next(segment for segment in reversed(self.segments) if segment.step <= step)

    def rows(
        self, step: int, first: int, count: int, steps: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return source, window and epoch (int64 [steps * count] each) of rows [first, first +
        count) of the global batches of `steps` steps from `step` on, fewer if the segment ends
        before."""
        segment = self.segment(step)
        stop = min(step + steps, self.end(segment))
        first_sample = np.arange(step - segment.step, stop - segment.step)
        first_sample *= segment.global_batch_size
        row = np.arange(first, first + count)
        sample = np.add.outer(first_sample, row).ravel()
        source, of_source = segment.locate(sample)
        windows = np.array([source.windows for source in segment.sources])[source]
        keys = np.array([source.key for source in segment.sources])[source]
        epoch, index = np.divmod(of_source, windows)
        return source, permute(index, epoch, windows, keys), epoch

    def end(self, segment: Segment) -> int:
        """Return the first step after a segment."""
        later = [other.step for other in self.segments if other.step > segment.step]
        return min(later, default=2**62)

    def samples(self, step: int) -> int:
        """Count the samples of the run before `step`."""
        segment = self.segment(step)
        return segment.sample + (step - segment.step) * segment.global_batch_size

    def tokens(self, step: int) -> int:
        """Count the labels of the run before `step`, including those that do not count."""
        total = 0
        for segment in self.segments:
            steps = min(step, self.end(segment)) - segment.step
            if steps > 0:
                total += steps * segment.global_batch_size * segment.seq_len
        return total

    def consumed(self, step: int) -> list[int]:
        """Count the samples of each source (of the segment of `step`) that the run has consumed
        before `step`."""
        segment = self.segment(step)
        return segment.consumed((step - segment.step) * segment.global_batch_size)
