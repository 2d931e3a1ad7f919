"""Read what a run has logged."""

import json
import operator
from collections.abc import Iterator
from pathlib import Path

from configs.schema import InputError


def logged(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metric -> value) of each line of metrics.jsonl, oldest first. Raises InputError."""
    path = folder / "metrics.jsonl"
    damaged = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if damaged:  # the last line may be cut: the run was killed, or is writing it
                    raise InputError(f"{path}: line {damaged} is not an object with a step")
                try:
                    line = json.loads(text)
                    step = operator.index(line.pop("step"))
                    values = {key: float(value) for key, value in line.items()}
                except (ValueError, KeyError, AttributeError, TypeError):
                    damaged = number
                    continue
                yield step, values
    except OSError as error:
        raise InputError(
            f"{folder} is not the folder of a run: {path.name}: {error.strerror}"
        ) from None
