"""Keep the results of `lab.bench device`: a JSON file, and the Markdown tables and the planner's
device made of it."""

import json
from pathlib import Path
from textwrap import fill

from configs.schema import InputError
from lab.bench import harness
from reliability import disk

DONE = "done"
FAILED = "failed"
NOT_RUN = "not run"
SAME = ("device", "torch", "python")  # parts that differ in these are no table of one machine
CALIBRATION = "rates"  # the part whose numbers the planner reads


class Record:
    """Entries by part: `state`; `why`, unless it is done; `ended`; and if the part was started,
    `seconds`, `log` and `report` (what `harness.report` wrote). Every change is written at once,
    and a crash leaves the old file or the new."""

    def __init__(self, path: Path, machine: dict[str, str], names: list[str]) -> None:
        """names: of all parts, in their order. Raises InputError if the file cannot be read, or is
        from another machine."""
        self.path = path
        self.machine = machine
        self.names = names
        self.entries: dict[str, dict] = {}
        if not path.exists():
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            self.entries = dict(before["parts"])
            then = dict(before["machine"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = (
                f"{path} is not a record of this command ({error!r}): move it away, or give "
                "another --json"
            )
            raise InputError(problem) from None
        different = [
            f"{key} was {then.get(key)} and is {now}"
            for key, now in machine.items()
            if key in SAME and then.get(key) != now
        ]
        if different:
            raise InputError(
                f"{path} was measured elsewhere: {'; '.join(different)}. Give another --json"
            )

    def state(self, name: str) -> str:
        return self.entries.get(name, {}).get("state", NOT_RUN)

    def put(self, name: str, entry: dict) -> None:
        """Note a result. That of an earlier call stays if the part could not be run in this one."""
        if entry["state"] != NOT_RUN or self.state(name) == NOT_RUN:
            self.entries[name] = entry
        self.write()

    def files(self) -> list[Path]:
        device = [self.path.with_suffix(".toml")] if self.calibration() else []
        return [self.path, self.path.with_suffix(".md"), *device]

    def write(self) -> None:
        content = {"machine": self.machine, "parts": self.entries}
        texts = json.dumps(content, indent=1), self.markdown(), self.calibration()
        for path, text in zip(self.files(), texts):
            disk.write_whole(str(path.absolute()), (text + "\n").encode())

    def summary(self) -> str:
        """Return a Markdown table with the outcome of every part."""
        rows = ["| part | result | seconds | |", "| --- | --- | --- | --- |"]
        for name in self.names:
            entry = self.entries.get(name, {"state": NOT_RUN, "why": "not asked for yet"})
            why = entry.get("why", "").replace("|", "\\|")
            log = f" (log: {entry['log']})" if entry["state"] == FAILED and "log" in entry else ""
            rows.append(f"| {name} | {entry['state']} | {entry.get('seconds', '')} | {why}{log} |")
        return "\n".join(rows)

    def markdown(self) -> str:
        """Return the summary and the table of every part that has one. Numbers of a device that was
        not at hand are missing, never those of a different one."""
        about = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        tables = [harness.table(*table, dict(machine)) for table, machine in self.tables()]
        lines = "\n\n".join(
            ["## Everything on one device", f"{about}.", self.summary(), *tables]
        ).splitlines()
        return "\n".join(line if line.startswith(("|", "#")) else fill(line, 118) for line in lines)

    def tables(self) -> list[tuple]:
        """Title, columns, rows and notes of each table, and the machine it was measured on. Parts
        that differ in their rows alone make one table."""
        rows_of: dict[tuple, list] = {}
        for name in self.names:
            if report := self.entries.get(name, {}).get("report"):
                key = (
                    report["title"],
                    tuple(report["columns"]),
                    report["notes"],
                    tuple(report["machine"].items()),
                )
                rows_of.setdefault(key, []).extend(report["rows"])
        return [
            ((title, columns, rows, notes), machine)
            for (title, columns, notes, machine), rows in rows_of.items()
        ]

    def calibration(self) -> str:
        """Return the device as a file for `tools.plan --device`; "" before the part that measures
        it is done."""
        entry = self.entries.get(CALIBRATION, {})
        numbers = (entry.get("report") or {}).get("numbers") if entry.get("state") == DONE else None
        if not numbers:
            return ""
        heading = (
            f"# Measured by lab.bench device, {entry['ended']}; tools/plan/devices.toml "
            "explains the fields."
        )
        return "\n".join(
            [
                heading,
                "[device]",
                *(f"{field} = {json.dumps(value)}" for field, value in numbers.items()),
            ]
        )


def read_report(path: Path) -> dict | None:
    """Return the report of a part; None if it ended before."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
