"""What every benchmark here shares: alternating runs, medians, the machine, one table as Markdown and JSON.

Machines are noisy and drift; a ratio of two things measured in turn in one process is not. So contenders run A B C A B C,
the first round is thrown away, and each is reported as its median with its ratio to the first.
"""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch


def alternate(contenders: dict[str, Callable[[], None]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each call, contender by contender in turn; a call must leave no device work in flight."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> float:
    """Median over the rounds of time(name) / time(to): each pair ran side by side."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to]))


def machine() -> dict[str, str]:
    """What a reader needs to place the figures: processor or GPU, threads, versions, commit."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = next((line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), cpu)
    units = [name for name, probe in (("AMX", "_is_amx_tile_supported"), ("AVX512-BF16", "_is_avx512_bf16_supported"))
             if getattr(torch.cpu, probe, lambda: False)()]  # fmt: skip
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu} ({', '.join(units) or 'no bf16 units'})",
        "threads": str(torch.get_num_threads()), "torch": torch.__version__, "python": platform.python_version(),
        "commit": commit or "unknown",
    }  # fmt: skip


def table(title: str, columns: list[str], rows: list[list[str]], notes: str = "") -> str:
    """Markdown: a heading, the machine, the rows."""
    about = ", ".join(f"{k} {v}" for k, v in machine().items())
    lines = [f"### {title}", "", f"{about}. {notes}".rstrip(), "", "| " + " | ".join(columns) + " |"]
    lines += ["|" + "|".join(" --- " for _ in columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(title: str, columns: list[str], rows: list[list[str]], notes: str = "", json_path: str | None = None) -> None:
    print("\n" + table(title, columns, rows, notes) + "\n", flush=True)
    if json_path:
        about = {"title": title, "machine": machine(), "notes": notes, "columns": columns, "rows": rows}
        Path(json_path).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
