"""Decompresses files as they are read.

Of a damaged or truncated file everything before the damage is given, to the last byte, and then
BadFile is raised. gzip is read with zlib, since pyarrow stops at the zeros with which tapes and
block devices pad a file. zstd is read with pyarrow, which loses what it decompressed in the call
that finds the damage: the file is then read once more, and just before that call byte by byte.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from data.pieces import BUFFER, BadFile

PACKED = 1 << 16  # compressed bytes that are read at a time
GZIP = 31  # zlib's name for a gzip member with its header and checksum
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE_MAGIC = b"\x2a\x4d\x18"  # of a zstd frame without content, after its first byte
DAMAGED = "is damaged from here on; get it again, or leave the rest out with data.skip_failed"
TRUNCATED = (
    "is truncated: the compressed file ends here; get it again, or leave the rest out with "
    "data.skip_failed"
)
LATER = 1 << 62  # no place of a file
TOO_WIDE = "too much memory"  # zstd's words for a window beyond its default of 128 MB


class Gzip(io.RawIOBase):
    """The content of a gzip file: of all its members, one after another."""

    def __init__(self, packed_file: IO[bytes]) -> None:
        self.packed_file = packed_file
        self.member: Any = None  # zlib's object, None between members
        self.members = 0  # that have begun
        self.packed = b""  # what is read and not decompressed yet
        self.problem = ""

    def readable(self) -> bool:
        return True

    def packed_bytes(self) -> int:
        """Count the compressed bytes that have been read."""
        return self.packed_file.tell()

    def readinto(self, block: memoryview) -> int:
        """Fill a part of the block; 0 at the end. Raises BadFile after the last readable byte."""
        if self.problem:
            raise BadFile(self.problem)
        view = memoryview(block).cast("B")
        content = b""
        while not content and (self.member or self._begin_member()):
            content = self._some(len(view))
        view[: len(content)] = content
        return len(content)

    def _some(self, size: int) -> bytes:
        """Decompress up to `size` bytes of the member."""
        packed = self.packed or self.packed_file.read(PACKED)
        before = self.member.copy()
        try:
            content = self.member.decompress(packed, size)
        except zlib.error as error:
            self.problem = f"{DAMAGED} ({error})"
            content = _before_damage(before, packed, size)
            if not content:
                raise BadFile(self.problem) from error
            return content
        if not content and not packed:
            self.problem = TRUNCATED
            raise BadFile(self.problem)
        self.packed = self.member.unconsumed_tail
        if self.member.eof:
            self.packed = self.member.unused_data
            self.member = None
        return content

    def _begin_member(self) -> bool:
        """Go to the next member, if there is one. Zeros after a member are padding."""
        packed = self._without_padding(self.packed)
        while len(packed) < len(GZIP_MAGIC):
            more = self.packed_file.read(PACKED)
            if not more:
                break
            packed = self._without_padding(packed + more)
        if not packed and self.members:
            return False
        if not packed.startswith(GZIP_MAGIC):
            self.problem = "has other bytes after the end of what is compressed: cut them off"
            raise BadFile(self.problem)
        self.packed = packed
        self.members += 1
        self.member = zlib.decompressobj(GZIP)
        return True

    def _without_padding(self, packed: bytes) -> bytes:
        return packed.lstrip(b"\0") if self.members else packed


def _before_damage(member: Any, packed: bytes, size: int) -> bytes:
    """Decompress up to the damage, which comes within `size` bytes. zlib gives nothing of a call that
    fails, so it gets one byte at a time, and then may give one byte at a time."""
    content = bytearray()
    rest = b""
    with suppress(zlib.error):
        for place in range(len(packed)):
            before = member.copy()
            rest = packed[place : place + 1]
            content += member.decompress(rest)
    with suppress(zlib.error):
        while more := before.decompress(rest, 1):
            content += more
            rest = before.unconsumed_tail
    return bytes(content[:size])


class Zstd(io.RawIOBase):
    """The content of a zstd file: of all its frames, one after another."""

    def __init__(self, open_packed: Callable[[], IO[bytes]], name: str) -> None:
        """open_packed: opens the compressed file; name: for the advice."""
        self.open_packed = open_packed
        self.name = name
        self.given = 0  # bytes
        self.read_before = 0  # compressed bytes
        self.problem = ""
        self._open(LATER)

    def _open(self, sparing_from: int) -> None:
        import pyarrow

        self.packed_file = _Sparing(self.open_packed(), sparing_from)
        raw = pyarrow.PythonFile(self.packed_file, mode="r")
        self.stream = pyarrow.CompressedInputStream(raw, "zstd")

    def readable(self) -> bool:
        return True

    def packed_bytes(self) -> int:
        """Count the compressed bytes that have been read."""
        return self.packed_file.tell()

    def close(self) -> None:
        if not self.closed:
            self.packed_file.close()
        super().close()

    def readinto(self, block: memoryview) -> int:
        """Fill a part of the block; 0 at the end. Raises BadFile after the last readable byte."""
        view = memoryview(block).cast("B")
        if self.problem:
            return self._before_damage(view)
        read_before = self.packed_bytes()
        try:
            content = self.stream.read(len(view))
        except OSError as error:
            if error.errno:  # the disk's, not zstd's
                raise
            self.problem = self._problem(str(error))
            self._open_again()
            return self._before_damage(view)
        self.read_before = read_before
        view[: len(content)] = content
        self.given += len(content)
        return len(content)

    def _problem(self, reason: str) -> str:
        if TOO_WIDE in reason:
            return (
                "was compressed with a window of more than 128 MB: decompress it, by "
                f"`zstd -d --long=31 {self.name}`"
            )
        if "runcated" in reason:
            return TRUNCATED
        return f"{DAMAGED} ({reason.splitlines()[0]})"

    def _open_again(self) -> None:
        """Go back to the place before the read that failed. What pyarrow holds of the file there was
        read by the call before it, or by this one."""
        self.packed_file.close()
        self._open(max(0, self.read_before - PACKED))
        left = self.given
        while left:
            left -= len(self.stream.read(min(left, BUFFER)))

    def _before_damage(self, view: memoryview) -> int:
        """Read byte by byte up to the damage. Raises BadFile if no byte is left before it."""
        done = 0
        try:
            while done < len(view):
                view[done : done + 1] = self.stream.read(1)
                done += 1
        except OSError as error:
            if not done:
                raise BadFile(self.problem) from error
        return done


class _Sparing:
    """A compressed file for pyarrow, which gets single bytes from a place on: it then has decompressed
    all that comes before the byte that is damaged."""

    def __init__(self, file: IO[bytes], sparing_from: int) -> None:
        self.file = file
        self.sparing_from = sparing_from

    def read(self, size: int) -> bytes:
        whole = self.sparing_from - self.file.tell()
        return self.file.read(min(size, max(whole, 1)))

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()

    @property
    def closed(self) -> bool:
        return self.file.closed


def unpack(suffix: str, size: int, open_file: Callable[[], IO[bytes]], path: str) -> Gzip | Zstd:
    """Open a compressed file, by its suffix. Raises BadFile if it is not what that says."""
    if not size:
        raise BadFile(f"is empty, which no {suffix} file is: make it again")
    packed_file = open_file()
    magic = packed_file.read(4)
    known = magic.startswith(GZIP_MAGIC) if suffix == ".gz" else _is_zstd(magic)
    if not known:
        packed_file.close()
        raise BadFile(
            f"does not begin as a {suffix} file does: if it is not compressed, rename it without "
            f"{suffix}"
        )
    if suffix == ".gz":
        packed_file.seek(0)
        return Gzip(packed_file)
    packed_file.close()
    return Zstd(open_file, path)


def _is_zstd(magic: bytes) -> bool:
    return magic == ZSTD_MAGIC or magic[1:] == SKIPPABLE_MAGIC
