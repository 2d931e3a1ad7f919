"""Accounts for the seconds of a run: a clock writes them down during each start, and `account` adds
up all starts.

Goodput is the productive share of all seconds, not counting those between an orderly end and the
next start. Seconds inside a start come from the monotonic clock. The wall clock only tells how long
nothing ran between two starts; if it was set back, that time counts as 0, never as negative. This
file imports no torch, so tools that read a run start at once.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from configs import program
from configs.schema import InputError
from configs.words import number_of

# of every line of time.jsonl: with a fixed length the last line can be written over
LINE_BYTES = 256

# What the seconds of a run go into, and its description. The first six are measured inside a start;
# the others follow from comparing several starts.
KINDS = {
    "productive": "productive: steps that count",
    "starting": "starting: from the process's birth to the end of its first step",
    "data": "waiting for data",
    "save": "stalled by saves",
    "validation": "validation",
    "other": "other: logging, garbage, steps that were skipped, the end of the run",
    "redone": "redone: steps that a resume threw away",
    "detecting": "detecting: from the last sign of life of a start that failed to the next start",
    "paused": "paused: between an orderly end and the next start; not part of goodput",
}
MEASURED = tuple(KINDS)[:6]
# exit codes: done, stopped on request, not tried again, ended by Ctrl-C
ORDERLY = (0, 75, 76, 130)


class Clock:
    """Counts every second of this start, by kind, beginning when this process was born (also a
    forked or restarted one), became a rank (tools/launch/standby.py), or when its start before has
    ended."""

    counted = (
        -math.inf
    )  # until when the starts of this process have counted, on the monotonic clock

    def __init__(self, path: Path | None):
        """path: the folder of this start on the rank that writes, None on the others."""
        now = time.monotonic()
        self.born = max(now - _process_age(), program.stood_by_until)
        self.since = max(self.born, Clock.counted) if Clock.counted < now else self.born
        age = now - self.since
        self.seconds = dict.fromkeys(MEASURED, 0.0)
        self.at: int | None = None  # the last finished step
        self.saves, self.started = 0, False
        # seconds of earlier starts, as they count since this one resumed
        self.before = dict.fromkeys(KINDS, 0.0)
        self.file, self.place = None, 0
        self.path = path and path / "time.jsonl"
        if self.path:
            self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            self.write(stays=True, ago=age)

    def record(self, kind: str) -> float:
        """Count the seconds since the last call as `kind`, and return them. Until the first step is
        done they are `starting`."""
        now = time.monotonic()
        seconds = now - self.since
        self.since = now
        self.seconds[kind if self.started else "starting"] += seconds
        return seconds

    def move(self, seconds: float, source: str, kind: str) -> None:
        """Count this many of the `source` seconds as `kind` instead."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[kind] += seconds

    def resume(self, step: int) -> None:
        """Record that the loop goes on after this step."""
        self.record("other")
        self.at = step
        self.write(stays=True)

    def step(self, step: int) -> None:
        """Record that this step is finished. Its line, a sign of life, overwrites the line of the
        step before."""
        self.at, self.started = step, True
        self.write()

    def end_step(self, step: int, skipped: bool, stalled: float) -> float:
        """Record that this step is finished. Returns the seconds since the last record: they are
        productive unless the step was skipped, and `stalled` of them go to the save in flight."""
        seconds = self.record("other" if skipped else "productive")
        self.move(stalled, "productive", "save")
        self.step(step)
        return seconds

    def saved(self) -> None:
        """Record that a save has begun. A resume may go on from here, so the line stays."""
        self.saves += 1
        self.write(stays=True)

    def write(self, stays: bool = False, ago: float = 0.0) -> None:
        """Write the last line of the file, dated `ago` seconds back. If it `stays`, the next write
        adds a line after it."""
        if self.file is None:
            return
        now = round(time.time() - ago, 3)
        line = {"step": self.at, "time": now, "saves": self.saves}
        line |= {kind: round(seconds, 4) for kind, seconds in self.seconds.items()}
        with contextlib.suppress(OSError):  # a full disk costs this line, not the run
            os.pwrite(
                self.file, json.dumps(line).ljust(LINE_BYTES - 1).encode() + b"\n", self.place
            )
        self.place += LINE_BYTES * stays

    def is_gone(self) -> bool:
        """Return whether the file was removed, most likely with all of the run's folder. Always
        False on ranks other than 0. A disk that does not answer says nothing of it."""
        try:
            return self.file is not None and not self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        Clock.counted = self.since
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def metrics(self) -> dict[str, float]:
        """Return the run's goodput so far, over all its starts, and the seconds by kind; {} on
        every rank but 0."""
        if self.file is None:
            return {}
        seconds = {kind: self.before[kind] + self.seconds.get(kind, 0.0) for kind in KINDS}
        return {"goodput": goodput(seconds)} | {
            f"seconds/{kind}": value for kind, value in seconds.items() if value
        }


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the productive share of the seconds in which the run was meant to run; 0 if there are
    none."""
    counted = sum(value for kind, value in seconds.items() if kind != "paused")
    return seconds["productive"] / counted if counted > 0 else 0.0


def _process_age() -> float:
    """Return the seconds since this process was born, imports included; 0 where the system does not
    tell (proc(5))."""
    try:
        stat = Path("/proc/self/stat").read_text()
        after_name = stat.rpartition(")")[2].split()
        ticks = int(after_name[19])  # starttime, since the machine was started
        born = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born)
    except (OSError, ValueError, AttributeError):
        return 0.0


# Reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    """One start, as read from its folder. A file that is missing or not whole counts as empty."""

    number: int
    about: dict  # start.json
    ended: dict  # end.json; empty for a start that was killed or is running
    lines: list[dict]  # time.jsonl

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if line["step"] is not None]

    @property
    def did_nothing(self) -> bool:
        """Return whether the start ended before it did a step, because its input was wrong or
        nothing was left to do. Such a start is no interruption, and its seconds are not the
        run's."""
        steps = {line["step"] for line in self.steps}
        return len(steps) < 2 and self.ended.get("exit_code") in (0, 2)


def folders(folder: Path) -> list[Path]:
    """Return the folders of all starts of a run, oldest first: by number, never by time."""
    paths = [path for path in (folder / "starts").glob("*") if re.fullmatch("[0-9]{4,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name))


def read(folder: Path) -> list[Past]:
    """Read every start of a run, oldest first. Raises InputError where there is none."""
    starts = []
    for path in folders(Path(folder)):
        lines = []
        with contextlib.suppress(OSError):
            for text in (
                (path / "time.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
            ):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    # zeros: lines that a full disk did not take
                    line = json.loads(text.strip("\0"))
                    lines.append(
                        {name: line[name] for name in ("step", "time", "saves", *MEASURED)}
                    )
        starts.append(
            Past(
                int(path.name), read_json(path / "start.json"), read_json(path / "end.json"), lines
            )
        )
    if not starts:
        raise InputError(f"{folder} is not the folder of a run: it has no starts/0001")
    return starts


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass
class Account:
    """Time of a run, by kind of use."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    steps: int = 0  # that count
    redone: int = 0  # that a resume threw away
    saves: int = 0
    # one per start but the last; one for the last if it failed
    interruptions: list[dict] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return goodput(self.seconds)

    @property
    def total(self) -> float:
        """Seconds from the birth of the first process to the last sign of life: the sum of all
        kinds."""
        return sum(self.seconds.values())

    def per_event(self) -> dict[str, float]:
        """Average the seconds stalled per save, and the seconds to detect, the seconds to restart
        and the steps redone per interruption."""
        failed = [row for row in self.interruptions if row["how"] == "failed"]
        mean = {
            name: sum(row[name] for row in failed) / max(len(failed), 1)
            for name in ("detecting", "starting", "redone")
        }
        return {
            "stall": self.seconds["save"] / max(self.saves, 1),
            "detect": mean["detecting"],
            "restart": mean["starting"],
            "redone_steps": mean["redone"],
        }

    def line(self) -> str:
        parts = [f"{kind} {value:,.1f} s" for kind, value in self.seconds.items() if value >= 0.05]
        failed = sum(row["how"] == "failed" for row in self.interruptions)
        meant = self.total - self.seconds["paused"]
        return (
            f"goodput {self.goodput:.1%} of {meant:,.1f} s, {number_of(failed, 'interruption')}: "
            f"{', '.join(parts)}"
        )


def account(starts: list[Past]) -> Account:
    """Add up what the starts of a run have written."""
    result, alive, before = Account(), 0.0, None
    counted = [start for start in starts if start.lines and not start.did_nothing]
    for start, (steps, seconds) in zip(counted, _redone(counted), strict=True):
        gap = max(0.0, start.lines[0]["time"] - alive) if before else 0.0
        last = start.lines[-1]
        if before:
            result.seconds["paused" if before["how"] == "stopped" else "detecting"] += gap
            before |= {"detecting": gap, "starting": last["starting"]}
            before["lost"] += (gap if before["how"] == "failed" else 0.0) + last["starting"]
        for kind in MEASURED:
            result.seconds[kind] += last[kind]
        result.seconds["productive"] -= seconds
        result.seconds["redone"] += seconds
        if start.steps:
            result.steps += start.steps[-1]["step"] - start.steps[0]["step"] - steps
        result.redone += steps
        result.saves += last["saves"]
        if start.ended.get("exit_code") in ORDERLY:
            how = "stopped"
        elif start.ended or start is not counted[-1]:
            how = "failed"
        else:
            how = "no end"
        alive = last["time"]
        before = {
            "start": start.number,
            "when": datetime.fromtimestamp(alive, timezone.utc).isoformat(" ", "seconds"),
            "step": last["step"],
            "how": how,
            "exit_code": start.ended.get("exit_code"),
            "reason": start.ended.get(
                "reason", "killed" if how == "failed" else "running, or killed"
            ),
            "redone": steps,
            "detecting": 0.0,
            "starting": 0.0,
            "lost": seconds,
        }
        if start is not counted[-1] or how != "stopped":
            result.interruptions.append(before)
    return result


def _redone(starts: list[Past]) -> list[tuple[int, float]]:
    """Count the steps of each start that a later one did again, and the seconds they had taken."""
    result = []
    resumed = math.inf  # the lowest step from which a later start went on
    for start in reversed(starts):
        steps, lost = 0, 0.0
        if start.steps:
            seconds = {line["step"]: line["productive"] for line in start.steps}
            first, last = start.steps[0]["step"], start.steps[-1]["step"]
            kept = max(first, min(last, resumed))
            steps = last - kept
            lost = _seconds_at(seconds, last) - _seconds_at(seconds, kept)
            resumed = min(resumed, first)
        result.append((steps, lost))
    return result[::-1]


def _seconds_at(seconds: dict[int, float], step: int) -> float:
    """Productive seconds up to a step. They are known at every save and at the last step, and
    interpolated in between."""
    below = max(s for s in seconds if s <= step)
    above = min(s for s in seconds if s >= step)
    if below == above:
        return seconds[step]
    return seconds[below] + (seconds[above] - seconds[below]) * (step - below) / (above - below)
