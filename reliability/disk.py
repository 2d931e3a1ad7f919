"""Write files so that a crash or a power failure leaves them whole: new or as they were before.
Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from configs.schema import InputError

# how a file begins that a clone without Git LFS has in place of a large one
LFS_POINTER = b"version https://git-lfs"
DRAFT = ".tmp-"  # how a folder's name begins until it is whole


class NoRoom(InputError):
    """A start that would fill the disk. It leaves no record, which would take room."""


def sync(path: str | os.PathLike) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, content: bytes) -> None:
    """Replace the file at `path` by one with this content. A crash leaves the old file or the new
    one, never a part."""
    temporary = f"{path}.tmp{uuid.uuid4().hex[:8]}"  # another host may write the same file
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:  # a full disk would fill up with attempts
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(path))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Create a temporary folder in the parent of `out`. At the end it is synced and becomes `out`;
    after an exception nothing of it is left."""
    temporary = out.parent / f"{DRAFT}{uuid.uuid4().hex[:8]}-{out.name}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync(temporary)
        temporary.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
