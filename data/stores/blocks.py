"""Reads the shards of a corpus in a store in blocks.

A block is BLOCK bytes of a shard, fewer at its end. Blocks are numbered through all shards. The table
`hashes` of the corpus has the hash of each, and no byte is used before its block has that hash.

The local copy is one sparse file with a slot for each block, or as many as `data.cache_gb` allows:
block n is kept in slot n % slots. A slot holds the block that was written last. It has no label and
no lock, because its content is hashed at each read: if it is another block, half written or
damaged, the block is fetched. So any number of ranks and workers of a host share the file. Windows
come in random order, each once an epoch, so no eviction policy would keep more useful blocks than
this one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, wait

import numpy as np
import xxhash

from configs.schema import Data, InputError
from data.stores.fetchers import fetchers
from reliability.objects import Key

BLOCK = 1 << 16  # bytes: two or four windows of 8,192 tokens
SCANNED = 64  # blocks of one request, where a whole shard is read
RECENT = 1024  # blocks that stay in memory: 64 MiB of each source and process
logger = logging.getLogger("plumbline")


class Blocks:
    """Reader of the shards of one corpus in a store, for one process."""

    def __init__(
        self, key: Key, sizes: dict[str, int], hashes: np.ndarray, path: str, cfg: Data
    ) -> None:
        """key: the corpus; sizes: of its shards, in bytes, in the order in which the blocks are
        numbered; hashes: uint64 [blocks]; path: of the local copy, which takes at most
        data.cache_gb."""
        self.key = key
        self.seconds = cfg.timeout_seconds
        self.sizes = sizes
        self.hashes = hashes
        counts = [-(-size // BLOCK) for size in sizes.values()]
        ends = np.cumsum([0, *counts]).tolist()
        self.first = dict(zip(sizes, ends))  # number of a shard's first block
        if len(hashes) != ends[-1]:
            raise InputError(f"{key}/hashes has {len(hashes)} hashes of {ends[-1]} blocks")
        self.names = list(sizes)
        self.begins = np.array(ends[:-1])  # [shards]
        self.path = path
        self.slots = max(1, min(int(cfg.cache_gb * 1e9) // BLOCK, len(hashes)))
        self.lock = threading.Lock()
        self.recent: OrderedDict[int, Future] = OrderedDict()
        self.file: int | None = None  # descriptor of the local copy
        self.keeps = True  # whether it can be written

    def ask(self, shard: str, start: int, stop: int) -> int:
        """Begin to fetch bytes [start, stop) of a shard. Returns how many blocks that is."""
        numbers = self._numbers(shard, start, stop)
        for number in numbers:
            self._future(number)
        return len(numbers)

    def read(self, shard: str, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of a shard. Raises InputError if they are damaged."""
        numbers = self._numbers(shard, start, stop)
        futures = [self._future(number) for number in numbers]
        if wait(futures, self.seconds).not_done:
            raise InputError(
                f"{self.key / shard}: bytes {start} to {stop} did not come within {self.seconds} s "
                "(data.timeout_seconds): reading hangs"
            )
        parts = [future.result() for future in futures]
        begin = start - start % BLOCK
        return b"".join(parts)[start - begin : stop - begin]

    def whole(self, shard: str) -> bytes:
        """Fetch a whole shard from the store in few requests, without the local copy."""
        size = self.sizes[shard]
        length = SCANNED * BLOCK
        ranges = [(start, min(start + length, size)) for start in range(0, size, length)]
        futures = [fetchers().submit(self._scan, shard, *extent) for extent in ranges]
        parts = []
        for extent, future in zip(ranges, futures):
            # block by block it is seen which is damaged, or that none is
            parts.append(future.result() or self.read(shard, *extent))
        return b"".join(parts)

    def _numbers(self, shard: str, start: int, stop: int) -> range:
        first = self.first[shard]
        return range(first + start // BLOCK, first + -(-stop // BLOCK))

    def _future(self, number: int) -> Future:
        """Return the future of a block. A request that failed is repeated."""
        with self.lock:
            future = self.recent.get(number)
            if future is None or (future.done() and future.exception()):
                future = self.recent[number] = fetchers().submit(self._load, number)
            self.recent.move_to_end(number)
            if len(self.recent) > RECENT:
                self.recent.popitem(last=False)
        return future

    # In a thread of the pool

    def _scan(self, shard: str, start: int, stop: int) -> bytes:
        """Read adjacent blocks; nothing, if one is not what was written."""
        content = bytes((self.key / shard).read_range(start, stop))
        numbers = self._numbers(shard, start, stop)
        if not np.array_equal(hashes_of(content), self.hashes[numbers.start : numbers.stop]):
            return b""
        for i, number in enumerate(numbers):
            self._keep(number, content[i * BLOCK : (i + 1) * BLOCK])
        return content

    def _load(self, number: int) -> bytes:
        shard = int(self.begins.searchsorted(number, "right")) - 1
        name = self.names[shard]
        start = (number - int(self.begins[shard])) * BLOCK
        stop = min(start + BLOCK, self.sizes[name])
        kept = self._kept(number, stop - start)
        if self.is_whole(number, kept):
            return kept
        content = self._fetch(number, name, start, stop)
        self._keep(number, content)
        return content

    def is_whole(self, number: int, content: bytes) -> bool:
        return xxhash.xxh3_64_intdigest(content) == int(self.hashes[number])

    def _fetch(self, number: int, name: str, start: int, stop: int) -> bytes:
        key = self.key / name
        for _ in range(key.tries):
            try:
                content = bytes(key.read_range(start, stop))
            except FileNotFoundError:
                raise InputError(f"{key} is gone: upload the corpus again") from None
            if self.is_whole(number, content):
                return content
        raise InputError(
            f"{key}: bytes {start} to {stop} came {key.tries} times, and never as they were "
            "written: the corpus is damaged there; upload it again"
        )

    def _kept(self, number: int, size: int) -> bytes:
        """Read the content of the block's slot."""
        try:
            return os.pread(self._descriptor(), size, number % self.slots * BLOCK)
        except OSError:
            return b""

    def _keep(self, number: int, content: bytes) -> None:
        """Write the block to its slot. A disk that is full does not end a run."""
        if not self.keeps:
            return
        try:
            os.pwrite(self._descriptor(), content, number % self.slots * BLOCK)
        except OSError as error:
            self.keeps = False
            logger.warning(
                f"{self.path} cannot be written ({error.strerror}): no more local copies of "
                f"{self.key} are made (data.cache, data.cache_gb)"
            )

    def _descriptor(self) -> int:
        with self.lock:
            if self.file is None:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                if os.fstat(file).st_size > self.slots * BLOCK:
                    os.truncate(file, self.slots * BLOCK)  # an earlier run was allowed more
                self.file = file
            return self.file


def hashes_of(content: bytes | memoryview) -> np.ndarray:
    """Hash blocks, uint64 [blocks]: of a whole shard, or adjacent ones."""
    view = memoryview(content)
    starts = range(0, len(view), BLOCK)
    hashes = [xxhash.xxh3_64_intdigest(view[start : start + BLOCK]) for start in starts]
    return np.array(hashes, "<u8")
