"""Read a run's folder once, for a report."""

from array import array
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli

from checkpoint.copies import recorded
from configs.schema import InputError, redact
from reliability import goodput
from tools.logged import logged

# The sample is the last thing that a run logs: no more of a long log is read.
LOG_TAIL_BYTES = 200_000
SAMPLE_BEGINS = "a sample from the final weights:"


@dataclass(frozen=True)
class Points:
    """Points of one logged metric. Steps need not be in order, and values need not be finite."""

    steps: np.ndarray  # [N] int64
    values: np.ndarray  # [N] float64


@dataclass(frozen=True)
class LoadedRun:
    name: str  # as short as tells it from the other runs
    folder: Path
    metrics: dict[str, Points]
    starts: list[goodput.Past]
    account: goodput.Account
    options: dict[str, dict]  # table -> option -> value
    config: str  # config.toml, without secrets; "" if there is none
    experts: list[dict]  # training/experts.py::recorded
    sample: str
    copies: list[dict]  # checkpoint/copies.py::recorded

    @property
    def last_step(self) -> int:
        return max((int(points.steps.max()) for points in self.metrics.values()), default=0)


def read_runs(folders: list[Path]) -> list[LoadedRun]:
    """Raises InputError where a folder is no run's or is given twice."""
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise InputError(f"{folder} is given twice")
    return [read_run(path, name) for path, name in zip(folders, names(resolved), strict=True)]


def names(folders: list[Path]) -> list[str]:
    """Return the last parts of each path: as many as make all of them different."""
    for count in range(1, max(len(folder.parts) for folder in folders)):
        short = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(short)) == len(folders):
            return short
    return [str(folder) for folder in folders]


def read_run(folder: Path, name: str) -> LoadedRun:
    starts = goodput.read(folder)
    config = _text(folder / "config.toml")
    try:
        options = tomli.loads(config)
    except ValueError:
        options = {}
    copies = recorded(folder)
    metrics = _metrics(folder) | _of_copies(copies)
    account = goodput.account(starts)
    config, sample = redact(config), redact(_sample(folder))
    experts = _experts(folder)
    return LoadedRun(
        name, folder, metrics, starts, account, options, config, experts, sample, copies
    )


def _text(path: Path) -> str:
    """Return the content of a file, "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _metrics(folder: Path) -> dict[str, Points]:
    """Return every metric of metrics.jsonl; {} for a run that has not opened it yet."""
    if not (folder / "metrics.jsonl").exists():
        return {}
    # Lines with the same keys form a table: one append and one extend a line, as there are millions.
    tables: dict[tuple[str, ...], tuple[array, array]] = {}
    for step, values in logged(folder):
        keys = tuple(values)
        if keys not in tables:
            tables[keys] = (array("q"), array("d"))
        steps, numbers = tables[keys]
        steps.append(step)
        numbers.extend(values.values())
    parts: dict[str, list[Points]] = defaultdict(list)
    for keys, (steps, numbers) in tables.items():
        columns = np.array(numbers).reshape(-1, max(1, len(keys)))
        for column, key in enumerate(keys):
            parts[key].append(Points(np.array(steps), columns[:, column]))
    return {key: joined(group) for key, group in parts.items()}


def _of_copies(copies: list[dict]) -> dict[str, Points]:
    """Return the seconds of each copy as a metric; of a step that was done twice the later one."""
    seconds = {line["step"]: line["seconds"] for line in copies if "bytes" in line}
    if not seconds:
        return {}
    steps = np.array(list(seconds), dtype=np.int64)
    return {"copy_seconds": Points(steps, np.array(list(seconds.values()), dtype=float))}


def joined(group: list[Points]) -> Points:
    return Points(
        np.concatenate([points.steps for points in group]),
        np.concatenate([points.values for points in group]),
    )


def _experts(folder: Path) -> list[dict]:
    """Return the experts' record; [] for a dense model, which need not import torch."""
    if not (folder / "experts.jsonl").exists():
        return []
    from training import experts

    return experts.recorded(folder)


def _sample(folder: Path) -> str:
    """Return the text that the run sampled at its end, "" if it did not."""
    try:
        with (folder / "logs" / "rank-00000.log").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    _, found, after = tail.rpartition(SAMPLE_BEGINS + "\n")
    lines = []
    for line in after.splitlines() if found else []:
        if not line.startswith("    "):
            break
        lines.append(line[4:])
    return "\n".join(lines).rstrip()
