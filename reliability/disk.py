"""Write files so that a crash or a power failure leaves them whole: new or as they were before.
Imports no torch."""

from __future__ import annotations

import os


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
    temporary = f"{path}.tmp{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    sync(os.path.dirname(path))
