"""Find the corpus `packages`: the Python sources of the packages that requirements.txt pins, as they
are installed here. So every machine that can train has it, and it takes no account and no download.

| rule       |                                                                                           |
|------------|-------------------------------------------------------------------------------------------|
| packages   | those of a line `NAME==VERSION`; the version is the installed one, which may be another    |
| documents  | the .py files of a package's RECORD (packaging.python.org, "Recording installed projects") |
| left out   | tests (TEST_FOLDERS, TEST_FILES), BUILD_RECORDS, TABLES, empty files                      |
| duplicates | of files with the same bytes, the one whose name sorts first stays                        |

Another version is another corpus: the `digest` of its bytes belongs to a result that is compared
between machines (lab/ledger/row.py records it).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

from configs.schema import InputError

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
TEST_FOLDERS = {"test", "tests", "testing", "_testing", "__pycache__"}
TEST_FILES = re.compile(r"test_.*\.py|.*_test\.py|conftest\.py")
# They differ between builds of one version.
BUILD_RECORDS = {"torch/version.py", "numpy/__config__.py"}
# Tables that a program has made, as data/sources.py::STDLIB_TABLES; the first is 0.5 MB of numbers.
TABLES = {
    "torch/sparse/_triton_ops_meta.py",
    "tensorboard/_vendor/bleach/_vendor/html5lib/constants.py",
}


def names() -> list[str]:
    """Return the pinned packages, each once, sorted. InputError: without requirements.txt."""
    try:
        lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f'data.source = "packages": {REQUIREMENTS} cannot be read: {error.strerror}; run from a '
            "checkout of the repository"
        ) from error
    pins = [re.match(r"([A-Za-z0-9_.-]+)==", line) for line in lines]
    return sorted({pin[1].lower() for pin in pins if pin})


def find() -> list[tuple[str, str]]:
    """Return (name, path) of each document, sorted. InputError: a package is not installed."""
    found = {name: path for package in names() for name, path in _sources(package)}
    return without_copies(sorted(found.items()))


def digest(files: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of names and bytes: of each file NAME, a zero byte, the length in 8 bytes,
    the content."""
    total = hashlib.sha256()
    for name, path in files:
        content = Path(path).read_bytes()
        total.update(name.encode() + b"\0" + len(content).to_bytes(8, "big"))
        total.update(content)
    return total.hexdigest()


def is_left_out(name: str) -> bool:
    """Return whether a file is a test, a build record or a table. name: from the folder of packages, with
    slashes."""
    path = PurePosixPath(name)
    in_tests = bool(TEST_FOLDERS & set(path.parts[:-1]))
    named = name in BUILD_RECORDS | TABLES
    return in_tests or named or TEST_FILES.fullmatch(path.name) is not None


def _installed(package: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f'data.source = "packages": {package} of requirements.txt is not installed; install it '
            "with pip install -r requirements.txt"
        ) from error


def _sources(package: str) -> list[tuple[str, str]]:
    distribution = _installed(package)
    if distribution.files is None:
        raise InputError(
            f'data.source = "packages": {package} has no list of its files (RECORD); install it '
            "with pip"
        )
    found = []
    for file in distribution.files:
        name = file.as_posix()
        if file.suffix == ".py" and ".." not in file.parts and not is_left_out(name):
            found.append((name, str(distribution.locate_file(file))))
    return [(name, path) for name, path in found if os.path.isfile(path)]


def without_copies(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drop empty files, and later copies of the same bytes. Only files of one size are read."""
    of_size: dict[int, list[str]] = defaultdict(list)
    for _, path in files:
        of_size[os.path.getsize(path)].append(path)
    kept = []
    seen: set[tuple[int, bytes]] = set()
    for name, path in files:
        size = os.path.getsize(path)
        content = b"" if len(of_size[size]) == 1 else Path(path).read_bytes()
        key = (size, hashlib.sha256(content).digest())
        if size and key not in seen:
            kept.append((name, path))
        seen.add(key)
    return kept
