"""Reads documents from JSON: a record is an object, and its text the string under
`data.text_field`.

`lines` reads one record per line. `values` reads an array of records, or records one after another
however they are laid out; it finds where each ends without parsing it, so no more than one is in
memory. `holds_lines` says which of both a .json file is.

A record is too long when it has more bytes than `bound(data.max_document_bytes)`. It is then
skipped without being held in memory, so a decompression bomb costs time only.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Generator
from typing import IO, Any

from configs.words import a_kind
from data import kinds
from data.pieces import BUFFER, IN_LINE, TOO_LONG, UNREADABLE, BadFile, Document, Piece

HEAD = 1 << 16  # bytes of a file that say how its records are laid out
BLOCK = 1 << 18  # bytes that `values` looks at a time
ESCAPED = 6  # bytes of a record for one byte of text, at most: \u0061
OTHERS = 16 << 20  # bytes that a record may have besides its text
NOTHING = "has nothing under"
BOM = b"\xef\xbb\xbf"
SPACE = re.compile(rb"[ \t\r\n]*")
STRUCTURE = re.compile(rb'["{}\[\]]')
QUOTED = re.compile(rb'["\\\n]')
SCALAR_END = re.compile(rb"[ \t\r\n,\]}]")

Records = Generator[Document, None, int]  # returns the number of lines or records


def bound(longest: int) -> int:
    """Give the bytes that a record with a text of at most `longest` bytes may have; 0: any."""
    return ESCAPED * longest + OTHERS if longest else 0


# --------------------------------------------------------------------------------------------------
# one record


def text_of(raw: bytes, field: str) -> tuple[str, str]:
    """Take the text from a record. Returns (text, problem), one of which is empty. field: "" for the
    record as it is (data/answers.py reads it); with dots, also a path into nested objects."""
    wanted = f'a JSON object with a string under "{field}" (data.text_field)'
    content, problem = kinds.decoded(raw)
    if problem:
        return "", problem
    if not field:
        return content, ""
    try:
        record = _parsed(content)
    except (ValueError, RecursionError) as error:
        return "", f"is not {wanted}{_layout_advice(content)} ({error!r:.200})"
    if not isinstance(record, dict):
        return "", f"is not {wanted}{_layout_advice(content)}, but {a_kind(record)}"
    try:
        text = _found(record, field)
    except KeyError:
        keys = ", ".join(f'"{key}"' for key in list(record)[:20])
        return "", f'{NOTHING} "{field}" (data.text_field), but {keys or "no keys"}'
    if not isinstance(text, str):
        what = "null" if text is None else a_kind(text)
        return "", f"is not {wanted}, but has {what} there; data.skip_failed leaves some out"
    if _is_twice(content, field):
        return "", f'has "{field}" (data.text_field) twice: keep one'
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # escapes of half a character (lone surrogates)
        return "", f"is not {wanted} that is UTF-8 ({error!r:.200})"
    return text, ""


def _parsed(content: str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError. Python refuses integers of more than 4,300
    digits, which a record may have besides its text."""
    try:
        return json.loads(content)
    except ValueError as error:
        if "digits" not in str(error):
            raise
    return json.loads(content, parse_int=float)


def _found(record: dict, field: str) -> Any:
    """Find what is under a key, or under a path of keys. Raises KeyError."""
    if field in record:
        return record[field]
    value: Any = record
    for key in field.split("."):
        if not isinstance(value, dict):
            raise KeyError(field)
        value = value[key]
    return value


class Twice(ValueError):
    """A JSON object with two members of one name, of which a parser keeps the last."""


def once(members: list[tuple[str, Any]]) -> dict:
    """Return the object of these members, for `json.loads(..., object_pairs_hook=once)`. Raises Twice."""
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise Twice(f'has "{twice}" twice in one object: keep one')
    return made


def _is_twice(content: str, field: str) -> bool:
    """Tell whether an object of the record has a name on the way to the text twice. What else a
    record has twice is not read."""
    names = {field, *field.split(".")}
    if all(content.count(json.dumps(name)) < 2 for name in names):
        return False

    def of_the_way(members: list[tuple[str, Any]]) -> dict:
        once([member for member in members if member[0] in names])
        return dict(members)

    try:
        json.loads(content, object_pairs_hook=of_the_way, parse_int=float)
    except Twice:
        return True
    return False


def _layout_advice(content: str) -> str:
    if content.startswith("[") or content.strip() == "{":
        return ": a file of JSON that is not one object per line is read under the name .json"
    return ""


# --------------------------------------------------------------------------------------------------
# one record per line


def lines(
    file: IO[bytes], piece: Piece, field: str, longest: int, packed: Callable[[], int] | None
) -> Records:
    """Read the lines that begin in the piece. The last one may end in the next piece. packed: how
    far a compressed file is read, which is a single piece; None for a file that is divided."""
    position = piece.start
    most = bound(longest)
    if position:  # the line that holds the byte before it belongs to the previous piece
        file.seek(position - 1)
        position += _line(file, most)[1] - 1
    number = 0
    while packed or position < piece.stop:
        try:
            line, size = _line(file, most)
        except (BadFile, OSError) as error:  # a damaged or truncated archive
            yield Document(number + 1, "", _problem_of(error), piece.size)
            break
        if not size:
            break
        position += size
        number += 1
        done = packed() if packed else position - piece.start
        if size > len(line):
            yield Document(number, "", TOO_LONG, done)
            continue
        if number == 1 and not piece.start:
            line = line.removeprefix(BOM)
        if line.strip():
            yield Document(number, *text_of(line, field), done)
    return number


def _line(file: IO[bytes], most: int) -> tuple[bytes, int]:
    """Read a line, and count its bytes. Of one with more than `most` bytes none are returned."""
    if not most:
        line = file.readline()
        return line, len(line)
    line = file.readline(most)
    size = len(line)
    if size < most or line.endswith(b"\n"):
        return line, size
    while line and not line.endswith(b"\n"):
        line = file.readline(BUFFER)
        size += len(line)
    return b"", size


def _problem_of(error: BadFile | OSError) -> str:
    if isinstance(error, BadFile):
        return str(error)
    return f"{UNREADABLE}{error.strerror or error}"


# --------------------------------------------------------------------------------------------------
# an array of records, or records one after another


def json_file(
    file: IO[bytes], piece: Piece, field: str, longest: int, packed: Callable[[], int] | None
) -> Records:
    """Read a .json file, in whichever way its records are laid out. Arguments as for `lines`."""
    head, file = _look_at(file)
    if holds_lines(head):
        return (yield from lines(file, piece, field, longest, packed or file.tell))
    return (yield from values(file, piece, field, longest, packed or file.tell))


def holds_lines(head: bytes) -> bool:
    """Tell from its first bytes whether a file has one object per line."""
    rows = [row for row in head.split(b"\n") if row.strip()]
    if not rows:
        return True
    if not rows[0].lstrip().startswith(b"{"):
        return False
    is_cut = len(head) >= HEAD
    if is_cut and len(rows) == 1:
        return True
    whole = rows[:-1] if is_cut else rows
    if _is_object(whole[0]):
        return True
    # the first line is broken; the next ones tell
    return len(whole) > 1 and all(map(_is_object, whole[1:3]))


def begins_with_lines(head: bytes) -> bool:
    """Tell from its first bytes whether a file begins with two lines that are an object each."""
    rows = [row for row in head.split(b"\n")[:3] if row.strip()]
    return len(rows) > 1 and all(map(_is_object, rows[:2]))


def _is_object(row: bytes) -> bool:
    try:
        return isinstance(_parsed(row.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def _look_at(file: IO[bytes]) -> tuple[bytes, IO[bytes]]:
    """Read the first HEAD bytes. Returns them, and the file as if unread, both without a BOM."""
    head = b""
    try:
        while len(head) < HEAD and (more := file.read1(HEAD - len(head))):
            head += more
    except BadFile:  # which is raised again when what is before it has been read
        pass
    head = head.removeprefix(BOM)
    return head, io.BufferedReader(_Again(head, file), BUFFER)


class _Again(io.RawIOBase):
    """A file whose first bytes were read already."""

    def __init__(self, head: bytes, file: IO[bytes]) -> None:
        self.head = head
        self.file = file
        self.position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def readinto(self, block: memoryview) -> int:
        view = memoryview(block).cast("B")
        content = self.head[: len(view)]
        self.head = self.head[len(view) :]
        if not content:
            content = self.file.read1(len(view))
        view[: len(content)] = content
        self.position += len(content)
        return len(content)


def values(
    file: IO[bytes], piece: Piece, field: str, longest: int, packed: Callable[[], int]
) -> Records:
    """Read records, each of which is an element of an array, or an object that stands alone. After
    a place where no record can begin or end, nothing more is read."""
    text = _Text(file, bound(longest))
    number = 0
    line = 0  # where the record that is being read begins
    try:
        while text.find_record():
            line = text.line
            raw, size = text.take()
            number += 1
            yield _record(number, line, raw, size, field, packed())
            line = 0
    except (BadFile, OSError) as error:
        where = f"{IN_LINE}{line or text.line}) "
        problem = _problem_of(error)
        if problem.startswith(UNREADABLE):
            where = ""
        yield Document(number + 1, "", f"{where}{problem}", piece.size)
    return number


def _record(number: int, line: int, raw: bytes, size: int, field: str, done: int) -> Document:
    """Give a record as a document. size: its bytes, more than `raw` if it is too long."""
    if size > len(raw):
        return Document(number, "", TOO_LONG, done)
    text, problem = text_of(raw, field)
    return Document(number, text, problem and f"{IN_LINE}{line}) {problem}", done)


class _Text:
    """A file of JSON, of which one block is in memory, and a place in it."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        """most: bytes of a record; 0: any."""
        self.file = file
        self.most = most
        self.block = b""
        self.at = 0
        self.counted = 0  # bytes of the block whose line breaks are in `line`
        self.line = 1
        self.in_array = False
        self.after_record = False

    def _refill(self) -> bool:
        self._count_lines()
        self.block = self.file.read1(BLOCK)
        self.at = self.counted = 0
        return bool(self.block)

    def _count_lines(self) -> None:
        self.line += self.block.count(b"\n", self.counted, self.at)
        self.counted = self.at

    def next_mark(self) -> bytes:
        """Go to the next byte that is no white space, and return it; b"" at the end."""
        while True:
            self.at = SPACE.match(self.block, self.at).end()
            if self.at < len(self.block):
                self._count_lines()
                return self.block[self.at : self.at + 1]
            if not self._refill():
                return b""

    def find_record(self) -> bool:
        """Go to where the next record begins; False at the end. Raises BadFile."""
        while mark := self.next_mark():
            if self.in_array and self.after_record:
                self._end_element(mark)
            elif self.in_array and mark == b"]":
                self.at += 1
                self.in_array = False
            elif self.in_array:
                return True
            elif mark == b"[":
                self.at += 1
                self.in_array = True
                self.after_record = False
            elif mark == b"{":
                return True
            else:
                raise BadFile(self._unexpected(mark))
        if self.in_array:
            raise BadFile("ends before its array does: the file is truncated")
        return False

    def _end_element(self, mark: bytes) -> None:
        """Pass over what follows an element: a comma, or the end of the array."""
        if mark not in b",]":
            raise BadFile(f"is not JSON: no comma follows the record before it, but {mark!r}")
        self.at += 1
        self.after_record = False
        if mark == b"]":
            self.in_array = False
        elif self.next_mark() == b"]":
            raise BadFile("is not JSON: a comma stands before the end of its array")

    def _unexpected(self, mark: bytes) -> str:
        other = kinds.advice(self.block[self.at :])
        if other:
            return f"is not UTF-8 text{other}"
        return (
            f"is not a JSON object or array, but begins with {mark!r}; if the file is text, set "
            'data.json_files = "text"'
        )

    def take(self) -> tuple[bytes, int]:
        """Read the value that begins here, and count its bytes. Of one with more than `most` none
        are returned. Raises BadFile if it does not end."""
        if self.block[self.at : self.at + 1] not in b'{["':
            return self._take_scalar()
        parts = []
        size = 0
        nesting = _Nesting()
        while not nesting.is_closed:
            if self.at >= len(self.block) and not self._refill():
                raise BadFile("ends before its last record does: the file is truncated")
            begin = self.at
            self.at = nesting.scan(self.block, begin)
            size += self.at - begin
            parts.append(self.block[begin : self.at])
            if self.most and size > self.most:
                parts.clear()
        self.after_record = True
        return b"".join(parts), size

    def _take_scalar(self) -> tuple[bytes, int]:
        """Read a number, a name, or any other scalar that is no record."""
        begin = self.at
        found = SCALAR_END.search(self.block, begin)
        self.at = found.start() if found else len(self.block)
        self.at = max(self.at, begin + 1)
        self.after_record = True
        return self.block[begin : self.at], self.at - begin


class _Nesting:
    """Nesting depth of the scanner's place in the brackets and strings of a value."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_quoted = False
        self.is_escaped = False  # the next byte is
        self.is_closed = False

    def scan(self, block: bytes, at: int) -> int:
        """Go on from a place in a block. Returns the end of the value, or of the block."""
        if self.is_escaped:
            at += 1
            self.is_escaped = False
        while not self.is_closed:
            found = (QUOTED if self.is_quoted else STRUCTURE).search(block, at)
            if not found:
                return len(block)
            at = found.end()
            mark = found.group()
            if mark == b"\n":
                raise BadFile("is not JSON: a line ends inside a string")
            if mark == b"\\" and at == len(block):
                self.is_escaped = True
                return at
            if mark == b"\\":
                at += 1
            elif mark == b'"':
                self.is_quoted = not self.is_quoted
            else:
                self.depth += 1 if mark in b"{[" else -1
            self.is_closed = not self.depth and not self.is_quoted
        return at
