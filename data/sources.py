"""Where text comes from: `documents(source)` yields (name, text) in an order that depends on names
only.

| source                        | documents                                                                      | name      |
|-------------------------------|--------------------------------------------------------------------------------|-----------|
| `stdlib`                      | every .py file of this Python's standard library but its tests and its tables  | file      |
|                               | of characters (about 9 MB)                                                     |           |
| a file                        | one document, whatever its suffix (also `.json`), unless it is one of those    | file      |
|                               | below                                                                          |           |
| `.jsonl`, `.ndjson`           | one per line that is not blank: the string under `data.text_field`             | file:line |
| `.parquet`                    | one per row: the string in the column `data.text_field`                        | file:row  |
| any of these + `.gz`, `.zst`  | the same, decompressed as it is read (`.json.gz` is JSON lines, as C4 and Dolma | the same  |
|                               | name theirs; a compressed Parquet file is not read)                            |           |
| a folder                      | every file under it with a suffix of SUFFIXES, hidden files and folders left out |         |
| a glob (`**` recursive)       | every file that matches, of mixed kinds                                        |           |
| `hf:PATH[@SPLIT]`             | one per row of what `datasets` saved there (save_to_disk), or of a folder that | path:row  |
|                               | `datasets` can load                                                            |           |
| `hf:NAME[/CONFIG][@SPLIT]`    | one per row of a dataset of the Hugging Face Hub, streamed shard by shard      | path:row  |
| `s3://`, `gs://`, `az://`     | an object, all below a prefix, or a glob of them: as files of the same names   | the same  |

Lines count from 1, rows from 0. Text is UTF-8, taken byte for byte (no newline translation, a BOM
stays). If something cannot be read (bytes that are not UTF-8, a line that is not JSON, a truncated
.gz), everything stops with its name, unless `data.skip_failed` allows as many failures: guessing
would train on garbage, and skipping would change the corpus in silence. Only for the standard
library is such a file skipped, since nobody chose it (CPython 3.10 to 3.13 have none outside their
tests).

A file is read in `Piece`s, so that several processes can share a large one. A piece is a range of
bytes (JSON lines), of row groups (Parquet) or of rows (a saved dataset). A compressed file is one
piece.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

from configs.schema import InputError
from data.stores import places
from data.stores.fetchers import THREADS
from data.stores.text import open_object

TEXT = (
    ".txt",
    ".md",
    ".rst",
    ".tex",
    ".html",
    ".xml",
    ".csv",
    ".tsv",
    ".json",
    ".yaml",
    ".yml",
    ".toml",
    ".ini",
    ".py",
    ".pyi",
    ".ipynb",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".cuh",
    ".java",
    ".kt",
    ".scala",
    ".js",
    ".ts",
    ".go",
    ".rs",
    ".rb",
    ".php",
    ".pl",
    ".lua",
    ".jl",
    ".r",
    ".hs",
    ".ml",
    ".swift",
    ".sh",
    ".sql",
    ".css",
)
JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # suffix -> pyarrow's name of the codec
SUFFIXES = (
    *TEXT,
    *JSON_LINES,
    ".parquet",
    *(kind + packed for kind in (*TEXT, *JSON_LINES) for packed in COMPRESSED),
)
# Left out: tests (odd on purpose, and larger than all the rest), whatever was installed later, and
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
HUGGING_FACE = "hf:"
BUFFER = 1 << 20  # bytes read at a time
ROWS = 256  # rows of a column that are read at a time
MOST_LOOKED_AT = 100  # .json files of a source, in search of JSON lines
WHOLE = -1  # the number of a document that is its whole file
TOO_LONG = "too long"  # the one problem that an option asks for, so that it is no failure
UNREADABLE = "cannot be read: "  # a problem that begins so may be gone at the next attempt


class File(NamedTuple):
    name: str  # relative to the source, with forward slashes: the same on every machine
    path: str  # absolute, or a URL; for a Hugging Face dataset what `data.source` says
    size: int  # bytes; 0 if nobody can tell (a stream)
    mtime_ns: int


class Piece(NamedTuple):
    file: File
    # in bytes (JSON lines), row groups (Parquet), rows (a saved dataset) or shards (a stream);
    # otherwise 0
    start: int
    stop: int
    size: int  # bytes of the file, about: to share the work evenly, and to show progress


class Document(NamedTuple):
    # its line in the piece, counted from 1; or its row in the file, counted from 0; or WHOLE
    number: int
    text: str
    problem: str  # "", TOO_LONG, or why it cannot be read
    done: int  # bytes of the piece, about, that have been read after this document


def documents(
    source: str, files: list[File] | None = None, field: str = "text"
) -> Iterator[tuple[str, str]]:
    """(name, text) of every document. `files`: what `find(source)` returned, if it was called
    already. Raises InputError as described above."""
    for file in find(source) if files is None else files:
        for piece in pieces(file):
            for document in read(piece, field):
                if not document.problem:
                    yield name(file.name, document.number), document.text
                elif source != "stdlib":
                    raise failure(piece, document)


def name(file: str, number: int) -> str:
    return file if number == WHOLE else f"{file}:{number}"


def failure(piece: Piece, document: Document) -> InputError:
    """The error for a document that cannot be read. It counts the lines before the piece, to name
    the right line."""
    return InputError(
        f"data.source: {piece.file.path}{_place(piece, document.number)} {document.problem}"
    )


def _place(piece: Piece, number: int) -> str:
    if number == WHOLE:
        return ""
    path = piece.file.path
    return (
        f", {'row' if path.startswith(HUGGING_FACE) or path.endswith('.parquet') else 'line'} "
        f"{lines_before(piece) + number}"
    )


def lines_before(piece: Piece) -> int:
    """How many lines of the file begin before the piece, whose documents are numbered from there.
    Reads up to the piece."""
    if not piece.start or not _is(piece.file, JSON_LINES):
        return 0
    with open_file(piece.file) as file:
        bytes_left, lines, last_byte = piece.start, 0, b""
        while block := file.read(min(bytes_left, BUFFER)):
            lines, bytes_left, last_byte = (
                lines + block.count(b"\n"),
                bytes_left - len(block),
                block[-1:],
            )
    return lines + (last_byte != b"\n")


# --------------------------------------------------------------------------------------------------
# which files


def find(source: str) -> list[File]:
    """The files of a source, sorted by name. Raises InputError if there are none, or if it cannot
    be read."""
    if source.startswith(HUGGING_FACE):
        return [_hugging_face_file(source)]
    if places.is_url(source):
        return _stored_files(source)
    path = os.path.expanduser(source)
    if source == "stdlib":
        root = sysconfig.get_path("stdlib")
        tables = tuple(os.path.join(root, *table.split("/")) for table in STDLIB_TABLES)
        paths = [
            p
            for p in _walk(root, STDLIB_LEFT_OUT)
            if p.endswith(".py") and p not in tables and not _is_build_record(p)
        ]
    elif os.path.isdir(path):
        root = path
        paths = [p for p in _walk(root, set()) if p.lower().endswith(SUFFIXES)]
    elif glob.has_magic(path) and not os.path.exists(path):
        root = os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0]) or "."
        paths = [p for p in glob.iglob(path, recursive=True) if not os.path.isdir(p)]
    else:
        root, paths = os.path.dirname(path) or ".", [path]
    files = sorted(_file(path, root) for path in paths)
    if not files:
        nothing = (
            f"no file with a text suffix ({' '.join(SUFFIXES[:4])} ...)"
            if os.path.isdir(path)
            else "no file"
        )
        raise InputError(
            f'data.source = "{source}": {nothing} found there; name a file, a folder or a glob'
        )
    return files


def _stored_files(source: str) -> list[File]:
    found = places.find(source, SUFFIXES)
    if not found:
        raise InputError(
            f'data.source = "{source}": no object with a text suffix ({" ".join(SUFFIXES[:4])} ...) '
            "found there; name an object, a prefix or a glob"
        )
    return sorted(File(name, url, stat.size, stat.mtime_ns) for name, url, stat in found)


def open_file(file: File) -> IO[bytes]:
    """A file, or an object of a store, for reading."""
    if places.is_url(file.path):
        return open_object(file.path, file.size)
    return open(file.path, "rb", BUFFER)


def _arrow_file(file: File) -> Any:
    """The same for pyarrow, whose import takes a tenth of a second."""
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
            "or "
            '"stdlib"'
        ) from error
    # a pipe would block for ever, and be empty the second time
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"data.source: {path} is not a regular file: write its content to one first"
        )
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return File(relative, os.path.abspath(path), status.st_size, status.st_mtime_ns)


def _walk(root: str, left_out: set[str]) -> Iterator[str]:
    """Every file under `root` but hidden files and what is in hidden folders. Links to folders are
    not followed."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"data.source: {error.filename} cannot be read: {error.strerror}"
        ) from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [
            name for name in subfolders if name not in left_out and not name.startswith(".")
        ]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _is_build_record(path: str) -> bool:
    """Whether a file tells how this very Python was compiled (_sysconfigdata_*.py, config-3.x-*/).
    Without these files the corpus is the same on every machine with the same Python version."""
    return "_sysconfigdata" in path or f"{os.sep}config-" in path


# --------------------------------------------------------------------------------------------------
# what is in a file


def warn_of_lines(files: list[File], log: Callable[[str], object]) -> None:
    """Say which .json files look like JSON lines, which are a document each only under a name of
    JSON_LINES."""
    plain = [file for file in files if _is(file, (".json",))]
    lines = [file for file in plain[:MOST_LOOKED_AT] if _has_json_lines(file)]
    if lines:
        log(
            f"warning: {lines[0].path} has one JSON object per line, and a .json file is one "
            "document, braces and all: rename it to .jsonl to make each line a document"
            + (f" ({len(lines)} files are so)" if len(lines) > 1 else "")
        )


def _has_json_lines(file: File) -> bool:
    """Whether the first line is a JSON object, and the next one begins another. What cannot be read
    is reported later."""
    try:
        with open_file(file) as content:
            first = content.readline(BUFFER)
            second = content.readline(BUFFER)
        return isinstance(json.loads(first), dict) and second.lstrip().startswith(b"{")
    except (OSError, ValueError, RecursionError):
        return False


def has_lines(file: File) -> bool:
    """Whether a file is JSON lines by its name, compressed or not."""
    lines = [kind + packed for kind in (*JSON_LINES, ".json") for packed in COMPRESSED]
    return _is(file, (*JSON_LINES, *lines))


def _is(file: File, suffixes: tuple[str, ...]) -> bool:
    return file.path.lower().endswith(suffixes)


def pieces(file: File, size: int = 1 << 62) -> list[Piece]:
    """The file in pieces of about `size` bytes, if its kind allows it, in order. It never raises
    for a damaged file: reading the piece will say what is wrong."""
    if file.path.startswith(HUGGING_FACE):
        stop = _hugging_face_parts(file)
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
    """The pieces of each file. A Parquet file says itself how many row groups it has, so those of a
    store are asked at the same time."""
    if not any(places.is_url(file.path) for file in files):
        return [pieces(file, size) for file in files]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(pieces, files, [size] * len(files)))


def read(piece: Piece, field: str = "text", longest: int = 0) -> Generator[Document, None, int]:
    """The documents of a piece; a document with a problem has no text. A problem of the file itself
    comes last, as WHOLE. field: "" for whole lines, as they are (data/answers.py reads them).
    longest: a text file of more bytes is TOO_LONG and not read further; 0: no limit. Returns the
    number of lines read."""
    path = piece.file.path.lower()
    inner, packed = os.path.splitext(path)
    try:
        if path.startswith(HUGGING_FACE):
            yield from _rows(piece, field, _hugging_face_batches(piece, field))
        elif path.endswith(".parquet"):
            yield from _rows(piece, field, _parquet_batches(piece, field))
        elif path.endswith(JSON_LINES):
            with open_file(piece.file) as file:
                return (yield from _json_lines(file, file, piece, field))
        elif packed in COMPRESSED:
            import pyarrow  # it reports every damage, also a truncated .zst

            with _arrow_file(piece.file) as raw:
                file = io.BufferedReader(
                    pyarrow.CompressedInputStream(raw, COMPRESSED[packed]), BUFFER
                )
                if inner.endswith((*JSON_LINES, ".json")):
                    return (yield from _json_lines(file, raw, piece, field))
                yield _text(file, piece, longest)
        else:
            with open_file(piece.file) as file:
                yield _text(file, piece, longest)
    except OSError as error:  # those of pyarrow have no strerror
        yield Document(WHOLE, "", f"{UNREADABLE}{error.strerror or error}", piece.size)
    return 0


def _text(file: IO[bytes], piece: Piece, longest: int) -> Document:
    content = file.read(longest + 1) if longest else file.read()
    if longest and len(content) > longest:
        return Document(WHOLE, "", TOO_LONG, piece.size)
    try:
        return Document(WHOLE, content.decode("utf-8"), "", piece.size)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start}): convert it, or leave it out with a glob"
        return Document(WHOLE, "", problem, piece.size)


def _json_lines(
    file: IO[bytes], raw: Any, piece: Piece, field: str
) -> Generator[Document, None, int]:
    """The lines that begin in the piece. The last one may end in the next piece. `raw` tells how
    far the file is read."""
    position = piece.start
    if position:  # the line that holds the byte before it belongs to the previous piece
        file.seek(position - 1)
        position += len(file.readline()) - 1
    divided = raw is file
    number = 0
    while not divided or position < piece.stop:
        try:
            line = file.readline()
        except OSError as error:  # a damaged or truncated archive
            yield Document(number + 1, "", f"{UNREADABLE}{error.strerror or error}", piece.size)
            break
        if not line:
            break
        position += len(line)
        number += 1
        if not line.strip():
            continue
        done = position - piece.start if divided else raw.tell()
        try:
            text = line.decode("utf-8-sig" if number == 1 and not piece.start else "utf-8")
            if field:
                row = json.loads(text)
                text = row[field]
            # refuses what is not a string, and escapes of half a character (lone surrogates)
            text.encode("utf-8")
        except KeyError:
            keys = ", ".join(f'"{key}"' for key in list(row)[:20])
            problem = f'has nothing under "{field}" (data.text_field), but {keys or "no keys"}'
            yield Document(number, "", problem, done)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            wanted = f'a JSON object with a string under "{field}" (data.text_field)'
            if not field:
                wanted = "UTF-8 text"
            problem = f"is not {wanted} ({error!r:.200})"
            yield Document(number, "", problem, done)
        else:
            yield Document(number, text, "", done)
    return number


def _rows(
    piece: Piece, field: str, batches: Iterator[tuple[int, float, Any]]
) -> Iterator[Document]:
    """The documents of batches: (row of the first, share of the piece that has been read with it,
    column of strings)."""
    for first, share, column in batches:
        done = round(share * piece.size)
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            texts = [_decoded(value) for value in column]
        for row, text in enumerate(texts, start=first):
            try:
                text.encode("utf-8")
            except (AttributeError, ValueError) as error:
                problem = (
                    "is not UTF-8 text" if isinstance(text, bytes) else f"has no string ({error})"
                )
                yield Document(row, "", f'{problem} in the column "{field}"', done)
            else:
                yield Document(row, text, "", done)


def _decoded(value: Any) -> str | bytes:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


# --------------------------------------------------------------------------------------------------
# Parquet


def _row_groups(file: File) -> int:
    from pyarrow import ArrowException, parquet

    try:
        with _arrow_file(file) as content:
            return parquet.read_metadata(content).num_row_groups
    except (OSError, ArrowException):
        return 1  # reading it will say why


def _parquet_batches(piece: Piece, field: str) -> Iterator[tuple[int, float, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        with (
            _arrow_file(piece.file) as content,
            parquet.ParquetFile(content, pre_buffer=False) as file,
        ):
            if field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names[:20])
                raise OSError(f'it has no column "{field}" (data.text_field), but {names}')
            groups = [file.metadata.row_group(group).num_rows for group in range(piece.stop)]
            row = sum(groups[: piece.start])
            for group in range(piece.start, piece.stop):
                end = row + groups[group]
                for batch in file.iter_batches(
                    ROWS, row_groups=[group], columns=[field], use_threads=False
                ):
                    unread = (end - row - len(batch)) / max(groups[group], 1)
                    yield (
                        row,
                        (group + 1 - piece.start - unread) / (piece.stop - piece.start),
                        batch.column(0),
                    )
                    row += len(batch)
    except ArrowException as error:
        raise OSError(str(error).splitlines()[0]) from error


# --------------------------------------------------------------------------------------------------
# Hugging Face


def _hugging_face_file(source: str) -> File:
    """A dataset as a `File`. On this disk it has the size and time of its files; on the Hub the
    hash of its builder takes the place of the time."""
    path, split = _hugging_face_name(source)
    if _is_saved(path):
        files = sorted(f for f in _walk(path, set()) if f.endswith(".arrow"))
        stats = [os.stat(f) for f in files]
        size, time = sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)
        return File(
            f"{os.path.basename(path)}@{split}",
            f"{HUGGING_FACE}{os.path.abspath(path)}@{split}",
            size,
            time,
        )
    try:
        builder = _datasets().load_dataset_builder(*_hub_name(path))
    except Exception as error:  # the many libraries below raise all kinds
        raise InputError(
            f'data.source = "{source}" cannot be opened by datasets: {str(error).splitlines()[0]}'
        ) from error
    size = builder.info.download_size or builder.info.dataset_size or 0
    return File(
        f"{os.path.basename(path)}@{split}",
        f"{HUGGING_FACE}{path}@{split}",
        size,
        int(builder.hash[:15], 16),
    )


def _hugging_face_name(source: str) -> tuple[str, str]:
    path, _, split = source.removeprefix(HUGGING_FACE).rpartition("@")
    return (os.path.expanduser(path), split) if path else (os.path.expanduser(split), "train")


def _hub_name(path: str) -> list[str]:
    """[name], or [name, configuration] if there are three parts: org/name/configuration."""
    return [path] if os.path.exists(path) or path.count("/") < 2 else path.rsplit("/", 1)


def _is_saved(path: str) -> bool:
    return any(
        os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")
    )


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "data.source: a Hugging Face dataset needs `pip install datasets`"
        ) from error
    return datasets


def _hugging_face(file: File) -> tuple[Any, bool]:
    """(the dataset, whether it is a stream)."""
    datasets = _datasets()
    path, split = _hugging_face_name(file.path)
    try:
        if not _is_saved(path):
            return datasets.load_dataset(*_hub_name(path), split=split, streaming=True), True
        saved = datasets.load_from_disk(path)
        return (saved[split] if isinstance(saved, datasets.DatasetDict) else saved), False
    except Exception as error:
        raise InputError(
            f"data.source: {file.path} cannot be opened by datasets: {str(error).splitlines()[0]}"
        ) from error


def _hugging_face_parts(file: File) -> int:
    dataset, streamed = _hugging_face(file)
    return dataset.num_shards if streamed else len(dataset)


def _hugging_face_batches(piece: Piece, field: str) -> Iterator[tuple[int, float, Any]]:
    """(row of the first, share of the piece, column) of each batch. The rows of a streamed shard
    count from shard << 32, since nobody knows how many rows the shards before it have."""
    dataset, streamed = _hugging_face(piece.file)
    columns = dataset.column_names
    if columns is not None and field not in columns:
        raise OSError(
            f'it has no column "{field}" (data.text_field), but {", ".join(columns[:20])}'
        )
    if not streamed:
        table = dataset.with_format("arrow")
        for row in range(piece.start, piece.stop, ROWS):
            stop = min(row + ROWS, piece.stop)
            yield (
                row,
                (stop - piece.start) / (piece.stop - piece.start),
                table[row:stop].column(field),
            )
        return
    for shard in range(piece.start, piece.stop):
        row = shard << 32
        stream = dataset.shard(num_shards=dataset.num_shards, index=shard)
        for batch in stream.with_format("arrow").iter(batch_size=ROWS):
            yield row, 0.0, batch.column(field)
            row += len(batch)
