"""Shared parts of the benchmarks: alternating runs, medians, the machine, one table as Markdown and
JSON.

Machines are noisy and drift; a ratio of two things measured in turn is not. So contenders run A B C
A B C, the first rounds are thrown away, and each is reported as its median with its ratio to the
first.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from configs.cpu import bfloat16_is_fast

import torch

from reliability.record import code, source_hash
from training.metrics import memory_gib

PR_SET_PDEATHSIG = 1  # prctl(2)


def is_slow(options: str) -> bool:
    """Return True if a row with these options needs bfloat16 on a CPU that takes a hundred times
    longer for it: the row is then skipped, with one line."""
    slow = "bfloat16" in options and not torch.cuda.is_available() and not bfloat16_is_fast()
    if slow:
        print(f"left out, because bfloat16 is slow on this processor: {options}", file=sys.stderr)
    return slow


def narrow() -> str:
    """bfloat16, or float32 on a CPU that multiplies that far faster."""
    if torch.cuda.is_available() or bfloat16_is_fast():
        return "bfloat16"
    return "float32"


def alternate(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each call, contender by contender in turn; a call must leave no device
    work in flight."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(warm_up + rounds):
        for name, run in contenders.items():
            began = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warm_up:
                seconds[name].append(clock() - began)
    return seconds


def in_turn(
    contenders: dict[str, list[str]], rounds: int, warm_up: int = 2
) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Run like `alternate`, with each contender (arguments of python) in a separate process, so
    that it has its own memory and allocator. Returns the seconds, and the final output of each.
    Such a process answers every line that it reads with the seconds it took, and the end of input
    with its final output: `serve`. All begin at the same time, because they may have to compile."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, arguments in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for process in processes.values():
        ask(process)
    for i in range(warm_up + rounds):
        for name, process in processes.items():
            if i > 0:
                ask(process)
            if not (answer := process.stdout.readline()):
                raise RuntimeError(f"{' '.join(contenders[name])} ended with code {process.wait()}")
            if i >= warm_up:
                seconds[name].append(float(answer))
    return seconds, {
        name: json.loads(process.communicate()[0]) for name, process in processes.items()
    }


def ask(process: subprocess.Popen) -> None:
    """Request one more call."""
    process.stdin.write("\n")
    process.stdin.flush()


def serve(
    run: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    summary: Callable[[], dict] = dict,
) -> None:
    """Serve the other end of `in_turn`. The final output is the peak GiB and the given numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # what building took does not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in sys.stdin:
        print(alternate({"": run}, rounds=1, warm_up=0, clock=clock)[""][0], flush=True)
    print(json.dumps({"gib": memory_gib(device), **summary()}), flush=True)


def shapes_parser(about: str, rounds: int, shapes: str) -> argparse.ArgumentParser:
    """Return the command line of a benchmark that measures a list of shapes."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--shapes", nargs="+", default=shapes.split())
    parser.add_argument("--json")
    return parser


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> float:
    """Return the median over the rounds of time(name) / time(to): each pair ran in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to]))


def matmul(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], None], float]:
    """Return a matmul to measure the machine's rate with, between the contenders; and its FLOPs."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return lambda: torch.mm(a, b), 2.0 * n**3


def child(module: str, *args: str, ranks: int = 1, at_once: int = 1) -> dict:
    """Return the last line of JSON of `python -m module args`, run in a separate process (so that
    its memory is its own); with several ranks as torchrun would, which share this machine's
    threads; `at_once` such processes run at the same time. Raises RuntimeError with rank 0's last
    output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // (ranks * at_once)))}
    world = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | threads
            | (world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]
    said, complaints = processes[0].communicate()
    for process in processes[1:]:
        process.communicate()
    if processes[0].returncode:
        raise RuntimeError(f"{module} {' '.join(args)}: {complaints[-2000:]}")
    return json.loads(said.strip().splitlines()[-1])


def end_with_parent() -> None:
    """Make Linux kill the new process when its parent dies, even of kill -9. For `preexec_fn` of
    subprocess."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def machine() -> dict[str, str]:
    """Describe the machine for a reader of the figures: processor or GPU, threads, versions, commit
    (without git a hash of the sources)."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = next(
            (
                line.split(":", 1)[1].strip()
                for line in cpuinfo.read_text().splitlines()
                if "model name" in line
            ),
            cpu,
        )
    units = [
        name
        for name, probe in (
            ("AMX", "_is_amx_tile_supported"),
            ("AVX512-BF16", "_is_avx512_bf16_supported"),
        )
        if getattr(torch.cpu, probe, lambda: False)()
    ]
    gpu = {}
    if torch.cuda.is_available():
        # it imports all of training, which not every benchmark needs
        from tools.preflight.machine import nvidia_smi

        driver = nvidia_smi(torch.device("cuda", torch.cuda.current_device()), "driver_version")[0]
        gpu = {"driver": driver or "unknown", "CUDA": str(torch.version.cuda)}
    return {
        "device": torch.cuda.get_device_name()
        if gpu
        else f"{cpu} ({', '.join(units) or 'no bf16 units'})",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **gpu,
        "commit": code()["commit"][:7] or f"sources {source_hash()}",
    }


def table(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    notes: str = "",
    about: dict[str, str] | None = None,
) -> str:
    """Markdown: a heading, the machine, the rows. about: the machine, if it is not this one now."""
    about = ", ".join(f"{k} {v}" for k, v in (about or machine()).items())
    lines = [
        f"### {title}",
        "",
        f"{about}. {notes}".rstrip(),
        "",
        "| " + " | ".join(columns) + " |",
    ]
    lines += ["|" + "|".join(" --- " for _ in columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


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
