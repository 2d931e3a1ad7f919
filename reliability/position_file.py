"""Define the file in which a rank keeps where it is, for position.py, which writes it, and tools.hang,
which reads it without torch. You can skip this file."""

import struct
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = Path(find_spec("torch").origin).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
PHASES = (
    "start",
    "build",
    "load",
    "data",
    "forward",
    "backward",
    "optimizer",
    "between steps",
    "validate",
    "save",
    "end",
)
NO_LAYER = -1


@cache
def own(file: str) -> str:
    """Return the path of a source file of this repository from its root; "" for another file, also
    of an environment below the root. Python names a script as it was started: train.py. The disk is
    not asked, for it may be what hangs."""
    path = ROOT / file
    is_other = "site-packages" in path.parts or path.is_relative_to(STANDARD_LIBRARY)
    ours = path.suffix == ".py" and path.is_relative_to(ROOT) and not is_other
    return str(path.relative_to(ROOT)) if ours else ""


# The file: who writes it; where it is; seconds since 1970; then two texts, each a length and JSON.
MAGIC = b"PLUMB-1\n"
WHO = struct.Struct("<8siiqd")  # MAGIC, rank, ranks, process, when the process came here
WHERE = struct.Struct("<qqiii")  # moves, step, phase, microbatch, layer
# when the heartbeat last looked; when it last saw a move; when the rank failed, or 0; the last time
# for which the heartbeat did not run, from and to, or 0
SEEN = struct.Struct("<ddddd")
LENGTH = struct.Struct("<i")
WHERE_AT, SEEN_AT, ABOUT_AT, STANDING_AT, SIZE = 64, 128, 192, 16 << 10, 64 << 10

QUIET = 2.5  # seconds without a tick of the heartbeat after which a process does not respond


def as_row(entry: dict[str, Any]) -> list[Any]:
    """Shorten an entry of a flight recorder to a row. Messages between two ranks are counted
    apart."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return [
        entry["process_group"][0],
        number,
        entry["profiling_name"],
        entry["input_sizes"],
        entry.get("input_dtypes", []),
        bool(entry["retired"]) or entry["state"] == "completed",
    ]
