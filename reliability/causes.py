"""Diagnoses why a start failed from the files it left: a run that fails repeatedly at one step for
one cause is in a crash loop, kills from outside are not counted. Imports no torch."""

import re
from pathlib import Path

from reliability.goodput import Past

# What a rank says that has lost another one: the cause is that one's.
LOST_ANOTHER = re.compile(
    r"(closed|reset) by peer|broken pipe|remote process exited", re.IGNORECASE
)
OUT_OF_MEMORY = "a kill by the kernel, which was out of memory"
HUNG = "a hang, which its watchdog ended"


def cause(past: Past, later: dict, folder: Path) -> str:
    """Name the cause of a failed start, in the same words for the same cause; "" where it is not
    known: a kill from outside, or the loss of another rank. A crash (SIGSEGV, SIGABRT, SIGBUS)
    comes from inside. past: a start that has failed; later: start.json of the next one, which says
    whether the kernel had to kill meanwhile; folder: of the run."""
    if "cause_before" in later:  # as it was found then
        return later["cause_before"]
    if "reason" in past.ended:
        reason = past.ended["reason"]
        # addresses, ports and sizes differ each time
        return "" if LOST_ANOTHER.search(reason) else re.sub(r"\d+", "#", reason)
    kills = [about.get("memory_kills", 0) for about in (past.about, later)]
    if kills[0] < kills[1] and past.about.get("host") == later["host"]:
        return OUT_OF_MEMORY
    began = past.lines[0]["time"] if past.lines else 0.0
    stacks = (folder / "logs").glob("rank-*.stacks")
    written = [path for path in sorted(stacks) if path.stat().st_mtime >= began]
    for path in written:
        if crash := crash_in(path):
            return f"a crash in C or C++ ({crash}), whose stacks are in {path.name}"
    first = folder / "logs" / "rank-00000.stacks"
    return HUNG if first in written and first.stat().st_size else ""


def crash_in(stacks: Path) -> str:
    """Return the signal of a process that its own code has ended, such as "Segmentation fault", as
    faulthandler wrote it last in this file; "" if a watchdog wrote it, or if it is empty."""
    text = stacks.read_text(encoding="utf-8", errors="replace")
    _, found, last = text.rpartition("Fatal Python error: ")
    is_newest = last.count("Current thread ") < 2  # a later start may have hung
    return last.splitlines()[0] if found and is_newest else ""


def memory_kills() -> int:
    """Count the processes that the kernel of this machine has killed since boot because memory was
    short (/proc/vmstat); 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
