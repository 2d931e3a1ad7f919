"""Reads Hugging Face datasets: one that `datasets` saved to this disk, a folder that it can load,
or one of the Hub, which is streamed shard by shard.

`hf:PATH[@SPLIT]`, `hf:NAME[/CONFIG][@SPLIT]`; without a split, `train`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from configs.schema import InputError
from data.columns import ROWS, Batches, path_to, take
from data.pieces import File, Piece

HUGGING_FACE = "hf:"
SPLIT = "train"


def find(source: str) -> File:
    """Open a dataset as a `File`. On this disk it has the size and time of its files; on the Hub the
    hash of its builder takes the place of the time. Raises InputError."""
    path, split = _name_of(source)
    name = f"{os.path.basename(path)}@{split}"
    if is_saved(path):
        _check_saved_split(source, path, split)
        _check_rows(source, path, split)
        stats = [os.stat(file) for file in _arrow_files(path)]
        size, time = sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)
        return File(name, f"{HUGGING_FACE}{os.path.abspath(path)}@{split}", size, time)
    datasets = _datasets()
    builder = _opened(source, lambda: datasets.load_dataset_builder(*_hub_name(path)))
    splits = [*map(str, builder.info.splits or ()), *map(str, builder.config.data_files or ())]
    if splits and split not in splits:
        raise _no_split(source, path, split, splits)
    size = builder.info.download_size or builder.info.dataset_size or 0
    return File(name, f"{HUGGING_FACE}{path}@{split}", size, int(builder.hash[:15], 16))


def _name_of(source: str) -> tuple[str, str]:
    """Take (path or name, split) from a source."""
    path, _, split = source.removeprefix(HUGGING_FACE).rpartition("@")
    return (os.path.expanduser(path), split) if path else (os.path.expanduser(split), SPLIT)


def _hub_name(path: str) -> list[str]:
    """Give [name], or [name, configuration] if there are three parts: org/name/configuration."""
    return [path] if os.path.exists(path) or path.count("/") < 2 else path.rsplit("/", 1)


# --------------------------------------------------------------------------------------------------
# what is there, and what is not


def is_saved(path: str) -> bool:
    """Return whether a folder is a dataset that save_to_disk wrote, of one split or of several."""
    one, several = ("state.json", "dataset_info.json"), ("dataset_dict.json",)
    return any(
        all(os.path.isfile(os.path.join(path, name)) for name in names) for names in (one, several)
    )


def _arrow_files(path: str) -> list[str]:
    """Find the files with the rows of a saved dataset."""
    return [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in sorted(names)
        if name.endswith(".arrow")
    ]


def _check_saved_split(source: str, path: str, split: str) -> None:
    """Raise InputError unless what is saved there has the split."""
    try:
        with open(os.path.join(path, "dataset_dict.json"), encoding="utf-8") as file:
            splits = json.load(file)["splits"]
    except FileNotFoundError:
        if split != SPLIT and split != _split_of(path):
            raise InputError(
                f"data.source: {source} names a split, and {path} is one dataset without splits: "
                f'leave "@{split}" out'
            ) from None
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"data.source: {path}/dataset_dict.json cannot be read ({error!r:.200}): save the "
            "dataset again"
        ) from error
    if split not in splits:
        raise _no_split(source, path, split, splits)


def _check_rows(source: str, path: str, split: str) -> None:
    """Raise InputError if nothing is saved there, which `datasets` cannot open."""
    folder = os.path.join(path, split)
    if not _arrow_files(folder if os.path.isdir(folder) else path):
        raise InputError(f"data.source: {source} has no rows (no .arrow file in {path})")


def _split_of(path: str) -> str | None:
    """Read of which split a saved dataset says that it is."""
    try:
        with open(os.path.join(path, "state.json"), encoding="utf-8") as file:
            return json.load(file).get("_split")
    except (OSError, ValueError):
        return None


def _no_split(source: str, path: str, split: str, splits: list[str]) -> InputError:
    there = ", ".join(dict.fromkeys(splits)) or "none"
    example = splits[0] if splits else "SPLIT"
    return InputError(
        f'data.source: {source} has no split "{split}", but {there}: name one, as '
        f"{HUGGING_FACE}{path}@{example}"
    )


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "data.source: a Hugging Face dataset needs `pip install datasets`"
        ) from error
    return datasets


def _opened(source: str, call: Callable[[], Any]) -> Any:
    """Call `datasets`, and say in one sentence what it cannot open."""
    try:
        return call()
    except Exception as error:  # the many libraries below raise all kinds
        raise InputError(f"data.source: {source} {_reason(source, str(error), error)}") from error


def _reason(source: str, text: str, error: Exception) -> str:
    """Say why `datasets` raised an error, and what to do."""
    path, _ = _name_of(source)
    listed = re.search(r"\[(.*?)\]", text)
    names = listed[1].replace("'", "") if listed else ""
    if "gated" in text:
        return (
            f"is gated: accept its conditions at https://huggingface.co/datasets/{path}, then "
            "`hf auth login`, or set HF_TOKEN"
        )
    if text.startswith("Config name is missing"):
        first = names.split(",")[0]
        return f"has several configurations, {names}: name one, as {HUGGING_FACE}{path}/{first}"
    if text.startswith("BuilderConfig"):
        wanted = path.rsplit("/", 1)[-1]
        absent = "is no folder, and its parent " if path.startswith("/") else ""
        return f'{absent}has no configuration "{wanted}", but {names}: name one of them'
    first_line = text.splitlines()[0] if text else type(error).__name__
    absent = "" if os.path.exists(path) else f" (and {os.path.abspath(path)} is no folder)"
    return f"cannot be opened by datasets: {first_line}{absent}"


# --------------------------------------------------------------------------------------------------
# rows


def _open(file: File) -> tuple[Any, bool]:
    """Open a dataset. Returns it, and whether it is a stream."""
    datasets = _datasets()
    path, split = _name_of(file.path)
    if not is_saved(path):
        name = _hub_name(path)
        stream = _opened(
            file.path, lambda: datasets.load_dataset(*name, split=split, streaming=True)
        )
        return stream, True
    saved = _opened(file.path, lambda: datasets.load_from_disk(path))
    if isinstance(saved, datasets.DatasetDict):
        return _opened(file.path, lambda: saved[split]), False
    return saved, False


def parts(file: File) -> int:
    """Count the shards of a streamed dataset, or the rows of a saved one. Raises InputError."""
    dataset, is_streamed = _open(file)
    return dataset.num_shards if is_streamed else len(dataset)


def batches(piece: Piece, field: str) -> Batches:
    """Give (row of the first, share of the piece, column) of each batch. The rows of a streamed
    shard count from shard << 32, since the row counts of the shards before it are unknown. Raises
    BadFile if there is no such column."""
    dataset, is_streamed = _open(piece.file)
    if not is_streamed:
        table = dataset.with_format("arrow")
        for row in range(piece.start, piece.stop, ROWS):
            stop = min(row + ROWS, piece.stop)
            rows = table[row:stop]
            share = (stop - piece.start) / (piece.stop - piece.start)
            yield row, share, take(rows, path_to(rows.schema, field))
        return
    for shard in range(piece.start, piece.stop):
        row = shard << 32
        stream = dataset.shard(num_shards=dataset.num_shards, index=shard)
        for batch in stream.with_format("arrow").iter(batch_size=ROWS):
            yield row, 0.0, take(batch, path_to(batch.schema, field))
            row += len(batch)
