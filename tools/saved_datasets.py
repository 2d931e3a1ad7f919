"""Find and read data that the package `datasets` saved to disk.

A saved split is a folder with state.json. The splits of one dataset are in one folder, which may be
in a folder of its configurations, in a folder of the hub's names: PATH/CONFIG/SPLIT. A path may
also name any of these folders itself.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.schema import InputError
from tools.benchmarks import BENCHMARKS, Benchmark

STATE = "state.json"
NO_CONFIG = ("none", "default", "plain_text")  # names of the one configuration of a dataset


def library() -> ModuleType:
    """Return the package datasets. Raises InputError where it is not installed."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            "benchmarks are read by the package datasets: pip install datasets"
        ) from None
    return datasets


def splits(folder: Path) -> dict[str, Path]:
    """Return the splits in a folder, or the one that it is, by its saved name or the folder's."""
    if (folder / STATE).is_file():
        return {_told(folder / STATE, "_split") or folder.name: folder}
    if not folder.is_dir():
        return {}
    return {each.name: each for each in sorted(folder.iterdir()) if (each / STATE).is_file()}


def has(benchmark: Benchmark, folder: Path) -> bool:
    return any(_places(benchmark, folder))


def place_of(benchmark: Benchmark, folder: Path) -> Path:
    """Return the folder of a benchmark's splits. Raises InputError where there is none."""
    place = next(_places(benchmark, folder), None)
    if place is not None:
        return place
    if not folder.is_dir():
        raise InputError(f"--from {folder}: there is no such folder")
    names = [f"{name}/{benchmark.config or 'none'}" for name in _names(benchmark)]
    raise InputError(
        f"--from {folder} has nothing that datasets' save_to_disk wrote: looked for {STATE} in "
        f"SPLIT below it and below {', '.join(names)}"
    )


def _places(benchmark: Benchmark, folder: Path) -> Iterator[Path]:
    """Folders with splits of a benchmark, the most certain first."""
    for base in [*(folder / name for name in _names(benchmark)), folder]:
        for place in [*(base / config for config in _configs(benchmark)), base]:
            found = splits(place)
            if found and _is_config(benchmark, next(iter(found.values()))):
                yield place


def _names(benchmark: Benchmark) -> list[str]:
    """Return the names that a folder may have: the path on the hub, or its last part."""
    paths = [benchmark.path, *benchmark.other_paths]
    return list(dict.fromkeys([*paths, *(path.rpartition("/")[2] for path in paths)]))


def _configs(benchmark: Benchmark) -> tuple[str, ...]:
    return NO_CONFIG if benchmark.config is None else (benchmark.config, *NO_CONFIG)


def _is_config(benchmark: Benchmark, split: Path) -> bool:
    """Tell configurations with the same columns apart by what was saved and the folder's name."""
    told = _told(split / "dataset_info.json", "config_name")
    names = {told, split.parent.name}
    if benchmark.config is None or benchmark.config in names:
        return True
    others = {other.config for other in BENCHMARKS.values() if other.path == benchmark.path}
    return not benchmark.group and not names & others and told in (None, *NO_CONFIG)


def _told(file: Path, key: str) -> str | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def split_of(place: Path, name: str, advice: str) -> Path:
    """Return the folder of a split. Raises InputError, listing the splits there."""
    found = splits(place)
    if name not in found:
        raise InputError(f"{place} has no split {name}, it has {', '.join(found)}: {advice}")
    return found[name]


def read(split: Path) -> Sequence[dict[str, Any]]:
    """Return the rows of a saved split. Raises InputError for a damaged one."""
    datasets = library()
    try:
        return datasets.load_from_disk(str(split))
    except Exception as error:  # of pyarrow, json and datasets
        raise InputError(f"{split} cannot be read by datasets: {error}") from None
