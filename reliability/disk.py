"""Files that survive a crash or a power failure: written whole, or as they were before. This file imports no torch."""

from __future__ import annotations

import os


def sync(path: str | os.PathLike) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, content: bytes) -> None:
    """Replace the file at `path` by one with this content. After a crash it is the old file or the new one, never a part."""
    temporary = f"{path}.tmp{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync(os.path.dirname(path))
