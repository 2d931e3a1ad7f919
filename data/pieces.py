"""Types that the readers of all kinds of files share: a file of a source, a piece of it, and a
document in a piece (data/sources.py chooses the reader)."""

from __future__ import annotations

from typing import NamedTuple

BUFFER = 1 << 20  # bytes read at a time
WHOLE = -1  # the number of a document that is its whole file
TOO_LONG = "too long"  # the one problem that an option asks for, so that it is no failure
UNREADABLE = "cannot be read: "  # a problem that begins so may be gone at the next attempt
IN_LINE = "(line "  # a problem that begins so is of a record, which is counted, not of a line


class BadFile(Exception):
    """A file that is damaged or of another kind than its name, from some offset on. The message is
    reported as the problem of a document. A retry would fail the same way."""


class File(NamedTuple):
    name: str  # relative to the source, with forward slashes: the same on every machine
    path: str  # absolute, or a URL; for a Hugging Face dataset what `data.source` says
    size: int  # bytes; 0 if unknown (a stream)
    mtime_ns: int


class Piece(NamedTuple):
    file: File
    # in bytes (JSON lines), row groups (Parquet), rows (a saved dataset) or shards (a stream);
    # otherwise 0
    start: int
    stop: int
    size: int  # bytes of the file, about: to share the work evenly, and to show progress


class Document(NamedTuple):
    # its line in the piece, or its record in a .json file, counted from 1; or its row in the file,
    # counted from 0; or WHOLE
    number: int
    text: str
    problem: str  # "", TOO_LONG, or why it cannot be read
    done: int  # bytes of the piece, about, that have been read after this document
