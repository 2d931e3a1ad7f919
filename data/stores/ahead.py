"""Reads batches of a corpus in a store before they are needed.

One thread makes the batches in their order. Before each it asks for the blocks of the steps after
it, so requests wait for the store concurrently, and the trainer for none of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from configs.schema import Data
from data import packing
from data.stores.blocks import RECENT
from data.workers import AHEAD, LoaderError, cannot_read, describe, put, take

if TYPE_CHECKING:
    from data.loader import Batch, Batches

# Blocks that are asked for ahead of the step that is read. They must still be in memory when their
# step comes.
BLOCKS_AHEAD = RECENT // 2


def read_ahead(batches: Batches, steps: range, cfg: Data) -> Generator[Batch, None, None]:
    """Yield the batches of these steps, which a thread reads ahead. Raises LoaderError: see
    data/loader.py::loader."""
    ready: queue.Queue[Batch | LoaderError] = queue.Queue(AHEAD)
    stop = threading.Event()
    arguments = (batches, steps, ready, stop)
    thread = threading.Thread(target=_read, args=arguments, name="data ahead", daemon=True)
    thread.start()
    try:
        for step in steps:
            item = take(ready, cfg.timeout_seconds, lambda: False)
            if item is None:
                urls = [tokens.corpus.url for tokens in batches.sources if tokens.is_stored]
                item = LoaderError(
                    f"{describe(batches, step)} did not come from {', '.join(urls)} within "
                    f"{cfg.timeout_seconds} s (data.timeout_seconds): reading hangs"
                )
            if isinstance(item, LoaderError):
                raise item
            yield item
    finally:
        stop.set()


def ask(batches: Batches, step: int) -> int:
    """Begin to fetch what a step reads, where it is in a store. Returns in how many blocks."""
    source, window = batches.locate(step)
    start, stop = packing.extents(batches.sources, source, window, batches.seq_len)
    blocks = 0
    for row, _, first, last in batches.reads(start, stop):
        blocks += batches.sources[source[row]].ask(first, last)
    return blocks


def _read(batches: Batches, steps: range, ready: queue.Queue, stop: threading.Event) -> None:
    """Run in the thread: put batches, or the reason why there are no more, into `ready`."""
    asked = steps.start  # the first step that has not been asked for
    sizes: dict[int, int] = {}  # blocks of the steps that were asked for and are not read
    for step in steps:
        item: Batch | LoaderError
        try:
            while asked < steps.stop and (asked <= step or sum(sizes.values()) < BLOCKS_AHEAD):
                sizes[asked] = ask(batches, asked)
                asked += 1
            item = batches[step]
            sizes.pop(step)
        except Exception as error:
            item = LoaderError(cannot_read(batches, step, error))
        if not put(ready, item, stop) or isinstance(item, LoaderError):
            return
