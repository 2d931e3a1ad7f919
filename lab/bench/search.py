"""Measure the planner's search: wall time, memory of all its processes, plans traced.

    python -m lab.bench.search                  # Llama 8B on 64 GPUs
    python -m lab.bench.search --large          # DeepSeek-V3 on 2,048 GPUs
    python -m lab.bench.search configs/llama_debug.toml --gpus 2 --training.global_batch_size=4

Each search runs in a separate session. Memory is the sum over the session's processes of the
proportional set size, in which a page that several share counts once, looked at every second.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from configs import program
from lab.bench import harness

SMALL = ("configs/llama_8b.toml", 64)
LARGE = ("configs/deepseek_v3_671b.toml", 2048)


def memory_of(session: int) -> int:
    """Return the bytes of all processes of a session. One that ends meanwhile counts as nothing."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # the command's name, in parentheses, may have spaces
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                rollup = (folder / "smaps_rollup").read_text()
                total += 1024 * int(re.search(r"^Pss: +(\d+)", rollup, re.M)[1])
        except (OSError, TypeError):
            continue
    return total


def searched(options: list[str]) -> tuple[float, int, str]:
    """Return seconds, peak bytes, and the search's output. Ends with its exit code if it fails."""
    command = [sys.executable, "-m", "tools.plan", *options, "--search"]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, stderr=None
    )
    most = 0
    while True:
        most = max(most, memory_of(process.pid))
        try:
            said, _ = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            continue
    if process.returncode == 2:
        sys.exit(2)
    return time.monotonic() - began, most, said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default=SMALL[0])
    parser.add_argument("--gpus", type=int, default=SMALL[1])
    parser.add_argument("--large", action="store_true", help="DeepSeek-V3 on 2,048 GPUs instead")
    args, rest = parser.parse_known_args()
    config, gpus = LARGE if args.large else (args.config, args.gpus)
    seconds, most, said = searched([config, "--gpus", str(gpus), *rest])
    traced, choices = re.search(r"([\d,]+) of ([\d,]+) choices were traced", said).groups()
    memory = f"{most / 1e9:.2f} GB"
    rows = [[" ".join([config, *rest]), f"{gpus:,}", choices, traced, f"{seconds:.1f} s", memory]]
    columns = ["configuration", "GPUs", "choices", "traced", "time", "memory"]
    notes = "One run. Memory: proportional set sizes of all processes, looked at every second."
    harness.report("The planner's search", columns, rows, notes)


if __name__ == "__main__":
    program.run(main)
