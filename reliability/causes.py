"""Why a start failed, as far as what it left tells: a run that fails at one step for one cause again
and again is a crash loop, and kills that come from outside are none. Imports no torch."""

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
    """In words, the same for the same cause; "" where it is not known: a kill from outside, or the
    loss of another rank. past: a start that has failed; later: start.json of the next one, which
    says whether the kernel had to kill meanwhile; folder: of the run."""
    if "reason" in past.ended:
        reason = past.ended["reason"]
        # addresses, ports and sizes differ each time
        return "" if LOST_ANOTHER.search(reason) else re.sub(r"\d+", "#", reason)
    kills = [about.get("memory_kills", 0) for about in (past.about, later)]
    if kills[0] < kills[1] and past.about["host"] == later["host"]:
        return OUT_OF_MEMORY
    stacks = folder / "logs" / "rank-00000.stacks"
    began = past.lines[0]["time"] if past.lines else 0.0
    if stacks.exists() and stacks.stat().st_size and stacks.stat().st_mtime >= began:
        return HUNG
    return ""


def memory_kills() -> int:
    """How many processes the kernel of this machine has killed since it started because memory was
    short (/proc/vmstat); 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
