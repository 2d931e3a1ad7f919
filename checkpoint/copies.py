"""Record the copies of a run's state in the memory of hosts (`checkpoint.peers`): a file
`copies.jsonl` in the run's folder, with a line for each start, and after it one for each copy that it
made. tools/report shows it. Imports no torch, so that a report starts at once.

    {"time": 1770.2, "source": "memory", "step": 20, "seconds": 0.21,          a start goes on from it
     "sent": [[0, 1, 2, 52208298]],            from host 0 to host 1: 2 files, and their bytes
     "held": {"step-00000020": [2, 0, 2]},     files of the copy that each host had
     "unused": ["step-00000030: no host has the files of ranks 1"]}
    {"time": 1764.1, "step": 20, "seconds": 0.31, "bytes": 78312448}           made
    {"time": 1764.9, "step": 30, "failed": "OSError: ..."}

source: one of PLACES; "new" for a new run, "none" where nothing whole was left and it began anew.
"""

import contextlib
import json
import time
from pathlib import Path

FILE = "copies.jsonl"
PREFIX = "plumbline-"  # begins the name of a run's folder in the memory of a host
PLACES = {"memory": "memory of hosts", "disk": "disk", "store": "store"}

KEYS = (  # of each kind of line
    {"time", "step", "seconds", "bytes"},
    {"time", "step", "failed"},
    {"time", "source", "held", "unused"},
)


def place_of(path: str) -> str:
    """Return which of PLACES a checkpoint is in that a start has recorded as `loaded`."""
    if "://" in path:
        return "store"
    return "memory" if Path(path).parent.name.startswith(PREFIX) else "disk"


class CopyRecord:
    """Appends to a run's record; on ranks other than 0 does nothing. A full disk costs the line, not
    the run."""

    def __init__(self, folder: Path, writes: bool) -> None:
        """folder: the run's."""
        self.path = folder / FILE
        self.writes = writes

    def add(self, **values: object) -> None:
        if not self.writes:
            return
        line = json.dumps({"time": round(time.time(), 3), **values})
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def recorded(folder: Path) -> list[dict]:
    """Read a run's record, oldest line first; [] for a run without one. What is no such line, as a
    crash leaves one, is left out."""
    found = []
    with contextlib.suppress(OSError):
        text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and any(keys <= row.keys() for keys in KEYS):
                    found.append(row)
    return found
