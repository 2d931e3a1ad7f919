"""Recognises, by its first bytes, the kind of a file that was given as text and is not UTF-8, and
advises the user.

A corpus often has files of another kind under the name of a text file: `.jsonl` that is gzip, a zip
archive, text that Windows has written as UTF-16. "Not UTF-8 (byte 1)" then hides the mistake.
"""

from __future__ import annotations

from typing import NamedTuple

from reliability.disk import LFS_POINTER

MOST_ZEROS = 3  # of so many bytes one is zero: text of two bytes a character, most of them ASCII
HEAD = 200  # bytes that are looked at


class FileKind(NamedTuple):
    """First bytes of a kind of file, its name, and advice to the user."""

    begins: bytes
    is_called: str
    to_do: str


# UTF-32 stands before UTF-16, with whose mark it begins.
KINDS = (
    FileKind(LFS_POINTER, "a pointer of Git LFS", "fetch the file with `git lfs pull`"),
    FileKind(b"\x1f\x8b", "gzip", "let its name end in .gz"),
    FileKind(b"\x28\xb5\x2f\xfd", "zstd", "let its name end in .zst"),
    FileKind(b"BZh", "bzip2, which is not read", "decompress it, or compress it with gzip or zstd"),
    FileKind(
        b"\xfd7zXZ\0", "xz, which is not read", "decompress it, or compress it with gzip or zstd"
    ),
    FileKind(b"PK\x03\x04", "a zip archive, which is not read", "unzip it"),
    FileKind(b"PAR1", "Parquet", "let its name end in .parquet, and do not compress it once more"),
    FileKind(b"%PDF", "a PDF, which is not read", "take the text out of it first"),
    FileKind(
        b"SQLite format 3\0", "an SQLite database, which is not read", "write its text to a file"
    ),
    FileKind(b"\xff\xfe\0\0", "UTF-32", "convert it with `iconv -f UTF-32 -t UTF-8`"),
    FileKind(b"\0\0\xfe\xff", "UTF-32", "convert it with `iconv -f UTF-32 -t UTF-8`"),
    FileKind(b"\xff\xfe", "UTF-16", "convert it with `iconv -f UTF-16 -t UTF-8`"),
    FileKind(b"\xfe\xff", "UTF-16", "convert it with `iconv -f UTF-16 -t UTF-8`"),
)


def decoded(content: bytes) -> tuple[str, str]:
    """Return (the text that these bytes are in UTF-8, "") or ("", why they are none)."""
    if has_zeros(content) or content.startswith(LFS_POINTER):
        return "", f"is not UTF-8 text{advice(content)}"
    try:
        return content.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        other = advice(content) or f" (byte {error.start}): convert it with `iconv`"
        return "", f"is not UTF-8 text{other}"


def advice(content: bytes) -> str:
    """Name the kind of bytes that are no UTF-8, and say what to do; "" if nothing tells."""
    for kind in KINDS:
        if content.startswith(kind.begins):
            return f", but {kind.is_called}: {kind.to_do}"
    if not content[:HEAD].strip(b"\0\r\n"):
        return ", but zeros, as a crash leaves them: cut them off"
    if has_zeros(content):
        order = "LE" if content[1:2] == b"\0" else "BE"
        return f", but UTF-16{order}: convert it with `iconv -f UTF-16{order} -t UTF-8`"
    return ""


def has_zeros(content: bytes) -> bool:
    """Tell whether bytes are text in UTF-16 without a mark. Zeros are valid UTF-8, so decoding would
    not fail, and a model would learn them."""
    head = content[:HEAD]
    return head.count(0) * MOST_ZEROS > len(head) > 1
