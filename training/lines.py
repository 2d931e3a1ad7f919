"""Files of JSON lines to which a run adds, and which a full disk does not end.

What cannot be written is kept and written when there is room again, so no line is lost while the
run lives, and none is cut.
"""

import json
import logging
import math
import os
from collections.abc import Collection
from functools import partial
from io import FileIO
from pathlib import Path

from configs.schema import InputError
from configs.words import number_of

logger = logging.getLogger("plumbline")

# Groups of TensorBoard's curves, by how keys begin; all other keys belong to "train". Those of
# "perf" measure the machine, not the model.
GROUPS = {
    "eval": ("validation_", "evaluation/"),
    "perf": (
        "tokens_per_second",
        "tflops_per_device",
        "mfu",
        "memory_gib",
        "data_wait",
        "step_seconds",
        "goodput",
        "seconds/",
        "late/",
    ),
}


class Lines:
    """One such file. Lines of steps after the one that was loaded are dropped before the first line
    is added: a start that trains nothing leaves the file as it is."""

    def __init__(self, path: Path, after: int) -> None:
        """after: the step that was loaded, 0 for a fresh start. Raises InputError for a path that
        more room on the disk would not make a file to write to."""
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise InputError(f"{path} is no file that can be written: move it away")
        self.path, self.after = path, after
        self.is_clean = False
        self.file: FileIO | None = None
        self.pending: list[str] = []
        self.failed = False

    def clean(self) -> None:
        """Drop the lines of steps that are computed again."""
        if not self.is_clean:
            self._try(self._clean)

    def add(self, line: dict) -> None:
        if line["step"] == self.after:  # scores that are computed again (checkpoint/rounds.py)
            self._try(partial(self._forget, line.keys()))
        self.pending.append(json.dumps(line) + "\n")
        self._try(self._write)

    def close(self) -> None:
        if self.pending:
            self._try(self._write)
        if self.pending and self.path.parent.is_dir():
            lines = number_of(len(self.pending), "line")
            first, last = (json.loads(self.pending[i])["step"] for i in (0, -1))
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            logger.error(f"{self.path}: not in it: the last {lines}, of {steps}")
        if self.file:
            self.file.close()

    def _try(self, action) -> None:
        try:
            action()
        except OSError as error:
            # where the run's folder was removed the run ends, and says so
            if not self.failed and self.path.parent.is_dir():
                logger.warning(
                    f"{self.path} cannot be written ({error.strerror}): training goes on, and its "
                    "lines are written when there is room"
                )
            self.failed = True
            return
        if self.failed and not self.pending:
            self.failed = False
            logger.info(f"{self.path} is written again, and no line is missing")

    def _forget(self, keys: Collection[str]) -> None:
        if self.file:
            self.file.close()
            self.file = None
        forget_after(self.path, self.after, keys)

    def _clean(self) -> None:
        forget_after(self.path, self.after)
        self.is_clean = True

    def _write(self) -> None:
        """Add all that is pending, or nothing."""
        if not self.is_clean:
            self._clean()
        if self.file and not is_at(self.file.fileno(), self.path):
            self.file.close()
            self.file = None
            first = json.loads(self.pending[0])["step"]
            logger.warning(f"{self.path} was removed: it begins anew with step {first}")
        if self.file is None:
            self.file = FileIO(self.path, "a")
        end = os.fstat(self.file.fileno()).st_size
        rest = memoryview("".join(self.pending).encode())
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            self.file.truncate(end)
            raise
        self.pending.clear()


def whole_lines(path: Path) -> list[dict]:
    """Read such a file, but for a last line that a run is writing. Raises OSError, ValueError."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def is_at(file: int, path: Path) -> bool:
    """Return whether this open file is still the one at the path: neither removed nor replaced. Its
    size tells, as some file systems change inodes."""
    return path.is_file() and path.stat().st_size == os.fstat(file).st_size


def json_number(value: float) -> float | str:
    """Replace NaN and infinity, which JSON has not, by the strings "nan", "inf" and "-inf", which
    float() reads back."""
    return value if math.isfinite(value) else str(float(value))


def forget_after(path: Path, step: int, again: Collection[str] = ()) -> None:
    """Drop the lines of later steps, and a line cut off by a crash; and one of this step that has the
    keys `again`. A crash in here leaves the old file or the new."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if again:
        kept = [line for line in kept if _step_of(line) < step or json.loads(line).keys() != again]
    if kept == lines:
        return
    new = path.with_suffix(".tmp")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _step_of(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinite if the line is not whole."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf
