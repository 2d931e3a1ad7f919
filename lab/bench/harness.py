"""Shared parts of the benchmarks: alternating runs, medians, the machine, one table as Markdown and
JSON.

Machines are noisy and drift; a ratio of two things measured in turn is not. So contenders run A B C
A B C, the first rounds are thrown away, and each is reported as its median with its ratio to the
first.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.cpu import bfloat16_is_fast

import torch

from reliability.record import code, source_hash


def narrow() -> str:
    """bfloat16, or float32 on a CPU that multiplies that far faster."""
    if torch.cuda.is_available() or bfloat16_is_fast():
        return "bfloat16"
    return "float32"


def alternate(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Return the seconds of each call, contender by contender in turn; a call must leave no device
    work in flight."""
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


def parser(about: str) -> argparse.ArgumentParser:
    """Return the command line of a benchmark, which may write its table as JSON."""
    found = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=in_a_folder, help="also write the table into this file")
    return found


def in_a_folder(path: str) -> str:
    """Return the path of a file that can be written. Raises argparse's error."""
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {path}")
    return path


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> float:
    """Return the median over the rounds of time(name) / time(to): each pair ran in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to]))


def matmul(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], None], float]:
    """Return a matmul to measure the machine's rate with, between the contenders; and its FLOPs."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return lambda: torch.mm(a, b), 2.0 * n**3


def printed(command: list[str], **how: Any) -> str:
    """Run a command to its end and return what it printed. Raises RuntimeError with its last output."""
    ended = subprocess.run(command, capture_output=True, text=True, **how)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(ended.stdout + ended.stderr)[-2000:]}")
    return ended.stdout


def child(bench: str, *args: str) -> dict:
    """Run `python -m lab.bench BENCH args` and return its last line of JSON. It is a separate process,
    so that what it measures of memory is its own. Raises RuntimeError."""
    command = [sys.executable, "-m", "lab.bench", bench, *args]
    return json.loads(printed(command).strip().splitlines()[-1])


def machine() -> dict[str, str]:
    """Describe the machine for a reader of the figures: processor or GPU, threads, versions, commit
    (without git a hash of the sources)."""
    # it imports all of training, which not every benchmark needs
    from tools.preflight.machine import device_table

    is_gpu = torch.cuda.is_available()
    at = torch.cuda.current_device() if is_gpu else None
    device = device_table(torch.device("cuda" if is_gpu else "cpu", at))
    gpu = {"driver": device["driver"] or "unknown", "CUDA": str(torch.version.cuda)}
    units = [
        name
        for name, probe in (
            ("AMX", "_is_amx_tile_supported"),
            ("AVX512-BF16", "_is_avx512_bf16_supported"),
        )
        if getattr(torch.cpu, probe, lambda: False)()
    ]
    return {
        "device": device["name"]
        if is_gpu
        else f"{device['name']} ({', '.join(units) or 'no bf16 units'})",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **(gpu if is_gpu else {}),
        "commit": code()["commit"][:7] or f"sources {source_hash()}",
    }


def table(title: str, columns: list[str], rows: list[list[str]], notes: str = "") -> str:
    """Markdown: a heading, the machine, the rows."""
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = [" | ".join(row) for row in (columns, ["---"] * len(columns), *rows)]
    table = "\n".join(f"| {line} |" for line in lines)
    return f"### {title}\n\n{about}. {notes}".rstrip() + f"\n\n{table}"


def report(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    notes: str = "",
    json_path: str | None = None,
    numbers: dict | None = None,
) -> None:
    """Print the table; with json_path write it there, with `numbers`, which are for programs."""
    print("\n" + table(title, columns, rows, notes) + "\n", flush=True)
    if json_path:
        about = {
            "title": title,
            "machine": machine(),
            "notes": notes,
            "columns": columns,
            "rows": rows,
            "numbers": numbers or {},
        }
        Path(json_path).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
