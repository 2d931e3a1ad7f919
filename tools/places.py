"""Resolve the argument of a tool: a folder, or the URL of checkpoints in an object store, from
which only the needed byte ranges are fetched.

    python -m tools.generate s3://bucket/debug --tokenizer runs/llama_debug/tokenizer.json
    python -m tools.convert to-hf s3://bucket/debug/step-00000240 runs/hf

A checkpoint describes the model, but its tokenizer and chat template are files of the run. They are
looked for next to the checkpoints: `checkpoint.store` holds checkpoints alone, a copy of a run's
folder has them.
"""

import argparse
import contextlib
import functools
import tempfile
from pathlib import Path
from typing import TypeGuard

from checkpoint import verify
from configs.schema import InputError
from data.open_tokenizer import open_tokenizer
from data.tokenizer import Tokenizer
from reliability.objects import Key, location
from tools.mirror import Mirror

TOKENIZER = "a tokenizer, as data.tokenizer names it, when none is in the run's folder"
# what reading a checkpoint takes of its run's folder: its tokenizer, its chat template, its options
OF_RUN = ("tokenizer.json", "data.json", "config.toml")


def folder_here(text: str | Path, what: str) -> Path:
    """Return a path on this machine. what: the argument. Raises InputError for a URL."""
    found = location(text)
    if isinstance(found, Key):
        raise InputError(
            f"{what} is a path on this machine, and {found} is a URL: copy what it names"
        )
    return found


def run_folder(text: str) -> Path:
    """Return the folder of a run, for a URL a copy. For argparse: raises ArgumentTypeError."""
    try:
        return files_of(place(text))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def place(text: str) -> Path | Key:
    """Return a folder or URL with checkpoints. For argparse: raises ArgumentTypeError."""
    try:
        return location(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Let a tool take a checkpoint with a model, and its tokenizer."""
    parser.add_argument(
        "checkpoint",
        help="a run's folder or one of its checkpoints, or the URL of one; or a Hugging Face folder",
    )
    parser.add_argument("--tokenizer", default="", help=TOKENIZER)


def files_of(run: Path | Key) -> Path:
    """Return a folder with the files of a run except its checkpoints. Raises InputError."""
    return copy_of(run) if isinstance(run, Key) else run


def copy_of(run: Key) -> Path:
    """Download the files of a run below this URL, except checkpoints and exported models, into a
    folder that is deleted when the process ends. Raises InputError."""
    return Path(_copied(str(run)).name, run.name or run.bucket)


@functools.cache
def _copied(url: str) -> tempfile.TemporaryDirectory:
    run = location(url)
    assert isinstance(run, Key)
    folder = tempfile.TemporaryDirectory()
    if not Mirror(Path(folder.name, run.name or run.bucket), run).fetch():
        raise InputError(f"{run} has no files of a run")
    return folder


def is_hugging_face(place: Path | Key) -> TypeGuard[Path]:
    """Return True for a local folder in Hugging Face's layout; stores are not searched."""
    return isinstance(place, Path) and (place / "config.json").is_file()


def check_checkpoint(place: Path | Key) -> None:
    """Raise InputError where a local folder has no model, before torch is imported to read it."""
    if isinstance(place, Path) and not is_hugging_face(place):
        verify.newest(place)


NO_DRAFTS = (
    "--speculative drafts by layers that predict further tokens, and this model has none: train one "
    "with model.mtp_depth, or leave the option out"
)


def check_drafts(place: Path | Key) -> None:
    """Raise InputError where a local checkpoint says that its model drafts no tokens."""
    if isinstance(place, Path) and not is_hugging_face(place):
        path = verify.newest(place)
        with verify.refuse_damage(path):
            numbers = verify.read_manifest(path)["facts"].get("must_match", {})
        if not numbers.get("model", {}).get("mtp_depth"):
            raise InputError(NO_DRAFTS)


def check_exists(path: Path, what: str) -> None:
    """Raise InputError where nothing is. what: the argument, for the message."""
    if not path.exists():
        raise InputError(f"{what} {str(path)!r}: there is no such file or folder")


def check_run(place: Path | Key) -> None:
    """Raise InputError for what is neither a run nor a checkpoint."""
    if not any((place / name).exists() for name in ("manifest.json", "config.toml")):
        raise InputError(f"{place} is neither the folder of a run nor a checkpoint: name one")


def run_of(checkpoint: Path | Key) -> Path:
    """Return the folder with the files of a checkpoint's run, as far as they exist. Those of a
    store are fetched. Raises InputError if the store cannot be read."""
    if isinstance(checkpoint, Path):
        return checkpoint.resolve().parent.parent
    prefix = checkpoint.parent
    if prefix.name == "checkpoints":
        prefix = prefix.parent
    return Path(_fetched(str(prefix)).name)


@functools.cache
def _fetched(url: str) -> tempfile.TemporaryDirectory:
    """Fetch the files of a run below this URL into a folder that is deleted when the process ends."""
    folder = tempfile.TemporaryDirectory()
    prefix = location(url)
    assert isinstance(prefix, Key)
    for name in OF_RUN:
        with contextlib.suppress(FileNotFoundError):
            Path(folder.name, name).write_bytes((prefix / name).read_bytes())
    return folder


def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer that --tokenizer names as data.tokenizer does. Raises InputError."""
    if name == "bpe":
        raise InputError(
            "--tokenizer: bpe is trained by a run: name the tokenizer.json in its folder"
        )
    return open_tokenizer(name, _temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    """Goes with this process."""
    return tempfile.TemporaryDirectory()


def tokenizer_of(checkpoint: Path | Key) -> str:
    """Return the path of the tokenizer of a checkpoint's run. Raises InputError if there is none."""
    path = run_of(checkpoint) / "tokenizer.json"
    if not path.is_file():
        place = checkpoint.parent if isinstance(checkpoint, Key) else path.parent
        raise InputError(
            f"{place} has no tokenizer.json next to its checkpoints: name one with --tokenizer, or "
            "copy the run's there"
        )
    return str(path)
