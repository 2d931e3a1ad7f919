"""Where text comes from: `documents(source)` yields (name, text), in an order that depends on names alone.

| source                  | documents                                                                          |
|-------------------------|------------------------------------------------------------------------------------|
| `stdlib`                | every .py file of this Python's standard library but its tests (about 11 MB)       |
| a file                  | one document, whatever its suffix; .jsonl: one per line, the string under "text"   |
| a folder                | every file under it with a suffix of SUFFIXES, hidden files and folders left out   |
| a glob (`**` recursive) | every file that matches, whatever its suffix                                       |

Text is UTF-8, taken byte for byte (no newline translation, a BOM stays). A file that is not UTF-8 stops everything with
its name: to guess would train on garbage, to skip would change the corpus in silence. The standard library alone has
such a file skipped, since nobody chose it (CPython 3.10 to 3.13 have none outside their tests).
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from configs.schema import InputError

SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini",
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts",
    ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".hs", ".ml", ".swift", ".sh", ".sql", ".css",
)
# Not learnt from: tests (odd on purpose, and larger than the rest together) and whatever was installed later.
STDLIB_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}


class File(NamedTuple):
    name: str  # relative to the source, with forward slashes: the same on every machine
    path: str
    size: int  # bytes
    mtime_ns: int


def documents(source: str, files: list[File] | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) of every document. `files`: what `find(source)` returned, to look once. InputError: see above."""
    for file in find(source) if files is None else files:
        try:
            if file.path.endswith(".jsonl"):
                yield from _json_lines(file)
            else:
                with open(file.path, "rb") as handle:
                    text = handle.read().decode("utf-8")
                yield file.name, text
        except OSError as error:
            raise InputError(f"data.source: {file.path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            if source != "stdlib":
                raise InputError(f"data.source: {file.path} is not UTF-8 text (byte {error.start}): convert it, or "
                                 "leave it out with a glob") from error


def find(source: str) -> list[File]:
    """The files of a source, sorted by name. InputError when there are none or the source cannot be read."""
    path = os.path.expanduser(source)
    if source == "stdlib":
        root = sysconfig.get_path("stdlib")
        paths = [p for p in _walk(root, STDLIB_LEFT_OUT) if p.endswith(".py") and not _is_build_record(p)]
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
        what = f"no file with a text suffix ({' '.join(SUFFIXES[:4])} ...)" if os.path.isdir(path) else "no file"
        raise InputError(f'data.source = "{source}": {what} found there; name a file, a folder or a glob')
    return files


def _file(path: str, root: str) -> File:
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(f"data.source: {path} cannot be read: {error.strerror}; name a file, a folder, a glob or "
                         '"stdlib"') from error
    if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever, and be empty the second time
        raise InputError(f"data.source: {path} is not a regular file: write its content to one first")
    name = os.path.relpath(path, root).replace(os.sep, "/")
    return File(name, os.path.abspath(path), status.st_size, status.st_mtime_ns)


def _walk(root: str, left_out: set[str]) -> Iterator[str]:
    """Every file under `root`, without hidden files and folders; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"data.source: {error.filename} cannot be read: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in left_out and not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _is_build_record(path: str) -> bool:
    """_sysconfigdata_*.py and config-3.x-*/ tell how this very Python was compiled; without them the corpus is the same
    on every machine with the same Python version."""
    return "_sysconfigdata" in path or f"{os.sep}config-" in path


def _json_lines(file: File) -> Iterator[tuple[str, str]]:
    """One document per line that is not blank, named file:line."""
    with open(file.path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode("utf-8")  # refuses what is not a string, and escapes of half a character (lone surrogates)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise InputError(f'data.source: {file.path}, line {number} is not a JSON object with a string under '
                                 f'"text" ({error!r})') from error
            yield f"{file.name}:{number}", text
