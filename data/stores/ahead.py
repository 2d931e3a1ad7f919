"""Asks for the blocks of a corpus in a store before they are needed, so that requests wait for the
store concurrently, and the trainer for none of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from data import packing
from data.stores.blocks import RECENT

if TYPE_CHECKING:
    from data.loader import Batches

# Blocks that are asked for ahead of the step that is read. They must still be in memory when their
# step comes.
BLOCKS_AHEAD = RECENT // 2


def asked(batches: Batches, steps: range) -> Iterator[int]:
    """Yield these steps. Before each, begin to fetch what it and the steps after it read."""
    following = iter(steps)
    sizes: deque[int] = deque()  # blocks of the steps that were asked for and are not read
    for step in steps:
        while not sizes or sum(sizes) < BLOCKS_AHEAD:
            later = next(following, None)
            if later is None:
                break
            sizes.append(ask(batches, later))
        yield step
        sizes.popleft()


def ask(batches: Batches, step: int) -> int:
    """Begin to fetch what a step reads, where it is in a store. Returns in how many blocks."""
    source, window = batches.locate(step)
    start, stop = packing.extents(batches.sources, source, window, batches.seq_len)
    blocks = 0
    for row, _, first, last in batches.reads(start, stop):
        blocks += batches.sources[source[row]].ask(first, last)
    return blocks
