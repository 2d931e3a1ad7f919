"""Opens raw text in a store as a file for sequential or random reads (Parquet)."""

from __future__ import annotations

import io
from concurrent.futures import Future

from data.stores.fetchers import fetchers
from data.stores.places import key_of

# Bytes of the first range and of the largest. Each range that continues the one before is twice as
# large: a small piece wastes little, and a large one waits for few requests.
FIRST = 1 << 17
LARGEST = 1 << 20
BUFFER = 1 << 16  # bytes that Python reads of them at a time


class ObjectFile(io.RawIOBase):
    """An object, opened for reading. The next range is fetched while one is read.

    Text has no hashes. TLS notices what a network damages; without it, each range is read until two
    reads agree (reliability/objects.py::Key.read_agreed)."""

    def __init__(self, url: str, size: int) -> None:
        self.key = key_of(url)
        self.size = size
        self.position = 0
        self.start = 0  # of `content`
        self.content: bytes | memoryview = b""
        self.step = FIRST
        self.next: tuple[int, Future] | None = None  # where the range that is coming begins

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = begin + offset
        return self.position

    def readinto(self, block: memoryview) -> int:
        """Fill the block, unless the object ends before. Raises Unreachable."""
        view = memoryview(block).cast("B")
        stop = min(self.position + len(view), self.size)
        done = 0
        while self.position < stop:
            if not self.start <= self.position < self.start + len(self.content):
                self._fetch(stop)
            begin = self.position - self.start
            part = memoryview(self.content)[begin : stop - self.start]
            view[done : done + len(part)] = part
            done += len(part)
            self.position += len(part)
        return done

    def _fetch(self, stop: int) -> None:
        """Get the range that begins at `position`, and begin to get the one after it."""
        begin = self.position
        follows = self.content and begin == self.start + len(self.content)
        self.step = min(2 * self.step, LARGEST) if follows else FIRST
        coming, self.next = self.next, None
        if coming and coming[0] == begin:
            self.content = coming[1].result()
        else:
            end = min(max(stop, begin + self.step), self.size)
            self.content = self.key.read_agreed(begin, end)
        self.start = begin
        after = begin + len(self.content)
        if follows and after < self.size:
            end = min(after + min(2 * self.step, LARGEST), self.size)
            self.next = (after, fetchers().submit(self.key.read_agreed, after, end))


def open_object(url: str, size: int) -> io.BufferedReader:
    return io.BufferedReader(ObjectFile(url, size), BUFFER)
