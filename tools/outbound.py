"""Check where the output of a tool goes, and put it into a store:
`python -m tools.convert to-hf RUN s3://bucket/hf`.

The output is made on this machine, in a temporary folder (TMPDIR), and then uploaded. The file
without which no program accepts the rest as a model comes last, so a folder that has it is whole.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from configs.schema import InputError
from reliability.objects import CHUNK, Key

RUNS = Path("runs")  # the folder of all runs
# Of our checkpoints, of DCP's folders, of transformers' and of peft's.
LAST = ("manifest.json", ".metadata", "config.json", "adapter_config.json")


def check_file(name: str, path: Path) -> None:
    """Raise InputError for a file that cannot be written, before minutes of work are lost to it.
    `runs`, which a page may be the first to need, is made. name: the argument, for the message."""
    if path.parent == RUNS:
        with suppress(OSError):  # what cannot be made is said below
            RUNS.mkdir(exist_ok=True)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(
            f"{name} {path}: this is a folder, or its folder does not exist: name a file that can be "
            "written"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{name} {path}: this file may not be written: name another one")


def write(name: str, path: Path, text: str) -> None:
    """Write a file that an argument names. Raises InputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{name}={path} cannot be written: {error.strerror}") from None


def check_new(out: Path) -> None:
    """Raise InputError where something is already, but for an empty folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"{out} exists already: give a new name, or remove it")


def made(out: Path | Key, make: Callable[[Path], str]) -> str:
    """Have `make` write a file or a folder, here or in a store. Returns what it says. Raises
    InputError, also where something is there already."""
    if isinstance(out, Path):
        return make(out)
    if not out.path:
        raise InputError(f"{out} is a whole bucket: name a prefix in it")
    if out.exists() or out.below():
        raise InputError(f"{out} exists already: give another name, or remove it")
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        here = Path(folder, out.name)
        said = make(here)
        for path in in_order(here):
            key = out / path.relative_to(here).as_posix() if path != here else out
            key.upload(lambda path=path: _pieces(path), path.stat().st_size)
    return said.replace(str(here), str(out))


def in_order(place: Path) -> list[Path]:
    """Return the files of a folder, those of LAST at the end; or the file itself."""
    if place.is_file():
        return [place]
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return sorted(files, key=lambda path: path.name in LAST)


def _pieces(path: Path) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            yield memoryview(piece)
