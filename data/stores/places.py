"""Lists the objects that a source given as a URL names, as a folder has files."""

from __future__ import annotations

import argparse
import fnmatch
import glob
import os
import re
from pathlib import Path

from configs.schema import InputError
from reliability.objects import Key, Stat, location, missing_package

SCHEMES = ("s3://", "gs://", "az://")


def is_url(source: str) -> bool:
    """Return whether a source is a URL of an object store."""
    return source.startswith(SCHEMES)


def key_of(url: str, soon: bool = True) -> Key:
    """Parse the URL of an object. soon: whether a caller waits for its content. Raises InputError
    where the package that speaks to stores is missing."""
    if problem := missing_package(url):
        raise InputError(problem)
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.partition("/")
    return Key(scheme, bucket, name.strip("/"), soon)


def read(place: Path | Key) -> bytes:
    """Read a whole file or object. Raises OSError, or InputError for a store."""
    if isinstance(place, Key):
        size = place.size()
        return bytes(place.read_agreed(0, size)) if size else b""
    return place.read_bytes()


def folders_in(place: Path | Key) -> list[str]:
    """List the folders here by name. Raises InputError for a store that cannot be read."""
    if isinstance(place, Key):
        return place.folders()
    return [path.name for path in place.glob("*") if path.is_dir()]


def out_place(text: str) -> str:
    """Parse an option `--out` of argparse: a folder, or a URL of a store."""
    try:
        return str(location(text)) if "://" in text else text
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def out_folder(text: str) -> Path:
    """Parse an option `--out` of argparse that must be a folder of this machine."""
    if is_url(out_place(text)):
        raise argparse.ArgumentTypeError(f"{text} is in a store: name a folder of this machine")
    return Path(out_place(text))


def not_writable(folder: object, error: OSError, option: str = "data.cache") -> InputError:
    """Return the error of a folder that an option names."""
    return InputError(
        f"{option}: {folder} cannot be written: {error.strerror}; give another folder with "
        f"--{option.removeprefix('--')}=FOLDER"
    )


def find(source: str, suffixes: tuple[str, ...]) -> list[tuple[str, str, Stat]]:
    """List (name, URL, size and time) of the objects of a source: of one, of all below a prefix
    with one of these suffixes, or of those that match a glob. Names are those that the same files
    would have on a disk (data/sources.py)."""
    key = key_of(source)
    found: list[tuple[str, str, Stat]] = []
    if glob.has_magic(key.path):
        # the folders before the first that has a wildcard
        root = os.path.dirname(re.split(r"[*?\[]", key.path, maxsplit=1)[0])
        for rest, stat in Key(key.scheme, key.bucket, root).stats_below().items():
            path = f"{root}/{rest}" if root else rest
            if _matches(path.split("/"), key.path.split("/")):
                found.append((rest, f"{key.scheme}://{key.bucket}/{path}", stat))
        return found
    if key.path:
        try:
            return [(key.name, str(key), key.stat())]
        except FileNotFoundError:
            pass  # a prefix
    for rest, stat in key.stats_below().items():
        is_hidden = any(part.startswith(".") for part in rest.split("/"))
        if rest.lower().endswith(suffixes) and not is_hidden:
            found.append((rest, str(key / rest), stat))
    return found


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Match a path with a glob: `*`, `?` and `[...]` within a name, `**` any folders; a leading dot
    is matched by a dot alone."""
    if not names or not patterns:
        return not names and not patterns
    (name, *others), (pattern, *rest) = names, patterns
    seen = not name.startswith(".") or pattern.startswith(".")
    if pattern == "**":
        return _matches(names, rest or ["*"]) or (seen and _matches(others, patterns))
    return seen and fnmatch.fnmatchcase(name, pattern) and _matches(others, rest)
