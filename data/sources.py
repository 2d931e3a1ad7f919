"""Reads text: `documents(source)` yields (name, text) in an order that depends on names only.

docs/data.md has the table of sources. A document is called by its file, relative to the source, and,
if that has several, by its line (JSON lines), record (other .json files) or row.

Lines and records count from 1, rows from 0. Text is UTF-8, taken byte for byte (no newline
translation, a BOM stays). If something cannot be read (bytes that are not UTF-8, a line that is not
JSON, a truncated .gz), the run stops with an error that names it, unless `data.skip_failed` allows
as many failures: guessing would train on garbage, and skipping would change the corpus in silence.
Only for `stdlib` and `packages` is such a file skipped, since no user chose it (CPython 3.10 to 3.13
have none outside their tests).

A file is read in `Piece`s, so that several processes can share a large one. A piece is a range of
bytes (JSON lines), of row groups (Parquet) or of rows (a saved dataset). A compressed file is one
piece, and so is a .json file.

Readers: records.py (JSON), columns.py (Parquet), hub.py (Hugging Face), unpack.py (.gz, .zst).
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from configs.schema import INSTALLED, Data, InputError
from data import columns, hub, kinds, packages, records
from data.hub import HUGGING_FACE
from data.pieces import (
    BUFFER,
    IN_LINE,
    TOO_LONG,
    UNREADABLE,
    WHOLE,
    BadFile,
    Document,
    File,
    Piece,
)
from data.stores import places
from data.stores.fetchers import THREADS
from data.stores.text import open_object
from data.unpack import unpack

TEXT = (
    ".txt .md .rst .tex .html .xml .csv .tsv .json .yaml .yml .toml .ini .py .pyi .ipynb "
    ".c .h .cc .cpp .hpp .cu .cuh .java .kt .scala .js .ts .go .rs .rb .php .pl .lua .jl "
    ".r .hs .ml .swift .sh .sql .css"
).split()
JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"
RECORDS, AS_TEXT = "records", "text"  # data.json_files
COMPRESSED = (".gz", ".zst")
SUFFIXES = (
    *TEXT,
    *JSON_LINES,
    ".parquet",
    *(kind + packed for kind in (*TEXT, *JSON_LINES) for packed in COMPRESSED),
)
NO_TEXT = f"no {{}} with a text suffix ({' '.join(SUFFIXES[:4])} ...)"
# Left out: tests (odd on purpose, and larger than all the rest), packages installed later, and
# tables that a program has made. A model that is trained for two minutes learns tables first, since
# they repeat themselves, and writes them.
STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "__pycache__",
    "encodings",  # code points of 100 character sets
    "pydoc_data",  # the language reference as strings
}
# of characters; the last one has code around them
STDLIB_TABLES = ("html/entities.py", "re/_casefix.py", "stringprep.py")
MOST_LOOKED_AT = 20  # text files of a source, in search of JSON lines


def documents(
    source: str, field: str = "text", json_files: str = RECORDS
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document. Raises InputError as described above."""
    for file in find(source):
        for piece in pieces(file):
            for document in read(piece, field, 0, json_files):
                if not document.problem:
                    yield name(file.name, document.number), document.text
                elif source not in INSTALLED:
                    raise failure(piece, document)


def name(file: str, number: int) -> str:
    return file if number == WHOLE else f"{file}:{number}"


def failure(piece: Piece, document: Document) -> InputError:
    """Build the error for a document that cannot be read. Counts the lines before the piece."""
    return InputError(
        f"data.source: {piece.file.path}{_place(piece, document)} {document.problem}"
        f"{_json_advice(piece.file, document.problem)}"
    )


def _json_advice(file: File, problem: str) -> str:
    """Say what to do with a .json file that has no records, such as the settings of a program."""
    packed = [JSON + suffix for suffix in COMPRESSED]
    if records.NOTHING not in problem or not _is(file, (JSON, *packed)):
        return ""
    return '; if such files are text, set data.json_files = "text", or leave them out with a glob'


def _place(piece: Piece, document: Document) -> str:
    if document.number == WHOLE:
        return ""
    unit = "line"
    if piece.file.path.startswith(HUGGING_FACE) or _is(piece.file, (".parquet",)):
        unit = "row"
    elif document.problem.startswith(IN_LINE):
        unit = "record"
    return f", {unit} {lines_before(piece) + document.number}"


def lines_before(piece: Piece) -> int:
    """Count the lines of the file before the piece, by reading them."""
    if not piece.start or not _is(piece.file, JSON_LINES):
        return 0
    with open_file(piece.file) as file:
        left = piece.start
        lines = 0
        ends = False
        while block := file.read(min(left, BUFFER)):
            left -= len(block)
            lines += block.count(b"\n")
            ends = block.endswith(b"\n")
    return lines + (not ends)


# --------------------------------------------------------------------------------------------------
# which files


def find(source: str) -> list[File]:
    """Find the files of a source, sorted by name. Raises InputError if there are none."""
    if source.startswith(HUGGING_FACE):
        return [hub.find(source)]
    if places.is_url(source):
        return _stored_files(source)
    if source == "packages":
        return [_file(path, path.removesuffix(name) or "/") for name, path in packages.find()]
    path = os.path.expanduser(source)
    if source == "stdlib":
        root = sysconfig.get_path("stdlib")
        tables = tuple(os.path.join(root, *table.split("/")) for table in STDLIB_TABLES)
        code = [p for p in _walk(root, STDLIB_LEFT_OUT) if p.endswith(".py") and p not in tables]
        paths = [path for path in code if not _is_build_record(path)]
    elif os.path.isdir(path):
        if hub.is_saved(path):  # its .json files describe it, and none is text
            raise InputError(
                f'data.source = "{source}": a dataset that save_to_disk of `datasets` wrote: name '
                f"it {HUGGING_FACE}{source}"
            )
        root = path
        paths = [p for p in _walk(root, set()) if p.lower().endswith(SUFFIXES)]
    elif glob.has_magic(path) and not os.path.exists(path):
        root = os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0]) or "."
        matches = glob.iglob(path, recursive=True)
        paths = [p for p in matches if not os.path.isdir(p) and not _is_in_circle(p)]
    else:
        root, paths = os.path.dirname(path) or ".", [path]
    files = sorted(_file(path, root) for path in paths)
    if not files:
        nothing = NO_TEXT.format("file") if os.path.isdir(path) else "no file"
        raise InputError(
            f'data.source = "{source}": {nothing} found there; name a file, a folder or a glob'
        )
    return files


def _stored_files(source: str) -> list[File]:
    found = places.find(source, SUFFIXES)
    if not found:
        raise InputError(
            f'data.source = "{source}": {NO_TEXT.format("object")} found there; name an object, a '
            "prefix or a glob"
        )
    return sorted(File(name, url, stat.size, stat.mtime_ns) for name, url, stat in found)


def open_file(file: File) -> IO[bytes]:
    """Open a file, or an object of a store, for reading."""
    if places.is_url(file.path):
        return open_object(file.path, file.size)
    return open(file.path, "rb", BUFFER)


def _arrow_file(file: File) -> Any:
    """Open a file for pyarrow, whose import takes a tenth of a second."""
    import pyarrow

    if places.is_url(file.path):
        return pyarrow.PythonFile(open_object(file.path, file.size), mode="r")
    return pyarrow.OSFile(file.path)


def _file(path: str, root: str) -> File:
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(
            f"data.source: {path} cannot be read: {error.strerror}; name a file, a folder, a glob "
            'or "stdlib"'
        ) from error
    # a pipe would block forever, and be empty the second time
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"data.source: {path} is not a regular file: write its content to one first"
        )
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return File(relative, os.path.abspath(path), status.st_size, status.st_mtime_ns)


def _walk(root: str, excluded: set[str]) -> Iterator[str]:
    """Yield every file under `root` that is not hidden, without following links to folders."""
    for folder, _, names in _folders(root, excluded):
        yield from (os.path.join(folder, name) for name in names)


def _folders(root: str, excluded: set[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield every folder that `_walk` enters, the folders in it, links included, and the files."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"data.source: {error.filename} cannot be read: {error.strerror}"
        ) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [
            name for name in subfolders if name not in excluded and not name.startswith(".")
        ]
        yield folder, subfolders, [name for name in names if not name.startswith(".")]


def _is_in_circle(path: str) -> bool:
    """Tell whether a path leads through a link to a folder above it: `**` would not end."""
    folder = os.path.dirname(path)
    if os.path.realpath(folder) == os.path.abspath(folder):
        return False
    while folder and folder != os.path.dirname(folder):
        above = os.path.dirname(folder)
        if os.path.islink(folder):
            target, real = os.path.realpath(folder), os.path.realpath(above)
            if os.path.commonpath([target, real]) == target:
                return True
        folder = above
    return False


def _is_build_record(path: str) -> bool:
    """Return whether a file records how this Python was compiled (_sysconfigdata_*.py,
    config-3.x-*/). Without these files the corpus is the same on every machine with the same Python
    version."""
    return "_sysconfigdata" in path or f"{os.sep}config-" in path


# --------------------------------------------------------------------------------------------------
# what is in a file


def warn_of_others(source: str, log: Callable[[str], object]) -> None:
    """Say which files of a folder are left out, by their suffixes, since they may be of the corpus."""
    folder = os.path.expanduser(source)
    if source in INSTALLED or places.is_url(source) or not os.path.isdir(folder):
        return
    links = []
    others: Counter[str] = Counter()
    for inside, subfolders, names in _folders(folder, set()):
        paths = [os.path.join(inside, name) for name in subfolders]
        links += [os.path.relpath(path, folder) for path in paths if os.path.islink(path)]
        lower = [name.lower() for name in names]
        others.update(os.path.splitext(n)[1] for n in lower if not n.endswith(SUFFIXES))
    links.sort()
    if links:
        log(
            f"left out, since links to folders are not followed: {', '.join(links[:5])}"
            + (f" ({len(links)} in all)" if len(links) > 5 else "")
            + f"; the glob {source.rstrip('/')}/** follows them"
        )
    if others:
        kinds = ", ".join(f"{kind or 'no suffix'} ({n:,})" for kind, n in others.most_common(5))
        log(f"left out, since they are no text by their names: {kinds}; a glob names such files")


def warn_of_lines(files: list[File], log: Callable[[str], object]) -> None:
    """Say which text files look like JSON lines, and are one document each by their names."""
    kinds = (*JSON_LINES, JSON, ".parquet", *COMPRESSED)
    plain = [f for f in files if not _is(f, kinds) and not f.path.startswith(HUGGING_FACE)]
    lines = [file for file in plain[:MOST_LOOKED_AT] if _has_json_lines(file)]
    if lines:
        log(
            f"warning: {lines[0].path} has one JSON object per line, and under this name it is one "
            "document, braces and all: rename it to .jsonl to make each line a document"
            + (f" ({len(lines)} files are so)" if len(lines) > 1 else "")
        )


def _has_json_lines(file: File) -> bool:
    """Tell whether a file begins with a JSON object a line; one that fails is reported later."""
    try:
        with open_file(file) as content:
            return records.begins_with_lines(content.read(records.HEAD))
    except (OSError, InputError):  # of a disk, of a store
        return False


def has_records(file: File, json_files: str = RECORDS) -> bool:
    """Return whether a file is JSON records by its name. json_files: as data.json_files."""
    kinds = JSON_LINES if json_files == AS_TEXT else (*JSON_LINES, JSON)
    return _is(file, (*kinds, *(kind + packed for kind in kinds for packed in COMPRESSED)))


def json_reading(cfg: Data, files: list[File]) -> list[str]:
    """Return the part of a fingerprint that tells how .json files are read, where that is not as
    once: as text if uncompressed, else as JSON lines. So folders prepared then keep their name."""
    changed = (JSON,) if cfg.json_files == RECORDS else tuple(JSON + end for end in COMPRESSED)
    return [f"json {cfg.json_files}"] if any(_is(file, changed) for file in files) else []


def _is(file: File, suffixes: tuple[str, ...]) -> bool:
    return file.path.lower().endswith(suffixes)


def pieces(file: File, size: int = 1 << 62) -> list[Piece]:
    """Cut the file into pieces of about `size` bytes, if its kind allows it, in order. It never
    raises for a damaged file: reading the piece will say what is wrong."""
    if file.path.startswith(HUGGING_FACE):
        stop = hub.parts(file)
        step = max(1, stop * size // file.size) if file.size else 1
    elif _is(file, JSON_LINES):
        stop, step = file.size, size
    elif _is(file, (".parquet",)):
        stop = _row_groups(file)
        step = max(1, stop * size // max(file.size, 1))
    else:
        return [Piece(file, 0, 0, file.size)]
    ranges = [(start, min(start + step, stop)) for start in range(0, stop, step)]
    # A shard of unknown size is said to be as large as a piece should be, so that each shard
    # becomes a piece.
    return [
        Piece(file, start, end, file.size * (end - start) // stop if file.size else size)
        for start, end in ranges
    ]


def cut(files: list[File], size: int) -> list[list[Piece]]:
    """Cut each file into pieces. The footers of Parquet files in a store are read concurrently."""
    if not any(places.is_url(file.path) for file in files):
        return [pieces(file, size) for file in files]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(pieces, files, [size] * len(files)))


def read(
    piece: Piece, field: str = "text", longest: int = 0, json_files: str = RECORDS
) -> Generator[Document, None, int]:
    """Yield the documents of a piece; a document with a problem has no text. A problem of the file
    itself comes last, as WHOLE. field: "" for whole records, as they are (data/answers.py reads
    them). longest: a text of more bytes is TOO_LONG and not held; 0: no limit. json_files: as
    data.json_files. Returns the number of lines or records read."""
    path = piece.file.path.lower()
    inner, packed = os.path.splitext(path)
    try:
        if path.startswith(HUGGING_FACE):
            yield from columns.documents(piece, field, longest, hub.batches(piece, field))
        elif path.endswith(".parquet"):
            with _arrow_file(piece.file) as content:
                batches = columns.parquet_batches(content, piece, field)
                yield from columns.documents(piece, field, longest, batches)
        elif packed in COMPRESSED:
            file = piece.file
            with unpack(packed, file.size, lambda: open_file(file), file.path) as raw:
                content = io.BufferedReader(raw, BUFFER)
                reader = _reader(inner, json_files)
                return (yield from reader(content, piece, field, longest, raw.packed_bytes))
        else:
            with open_file(piece.file) as content:
                reader = _reader(path, json_files)
                return (yield from reader(content, piece, field, longest, None))
    except BadFile as error:
        yield Document(WHOLE, "", str(error), piece.size)
    except OSError as error:  # those of pyarrow have no strerror
        yield Document(WHOLE, "", f"{UNREADABLE}{error.strerror or error}", piece.size)
    return 0


def _reader(path: str, json_files: str) -> Callable[..., Generator[Document, None, int]]:
    """Return the reader of a file, by its name without the suffix of its compression."""
    if path.endswith(JSON_LINES):
        return records.lines
    if path.endswith(JSON) and json_files == RECORDS:
        return records.json_file
    return _text


def _text(
    file: IO[bytes], piece: Piece, field: str, longest: int, packed: Callable[[], int] | None
) -> Generator[Document, None, int]:
    """Read a file that is one document."""
    content = file.read(longest + 1) if longest else file.read()
    if longest and len(content) > longest:
        yield Document(WHOLE, "", TOO_LONG, piece.size)
        return 0
    text, problem = kinds.decoded(content)
    advice = "; if it is no text, leave it out with a glob"
    yield Document(WHOLE, text, problem and f"{problem}{advice}", piece.size)
    return 0


def _row_groups(file: File) -> int:
    try:
        with _arrow_file(file) as content:
            return columns.row_groups(content)
    except OSError:
        return 1  # reading it will say why
