"""Makes parts with several processes, and shows how much of the source they have read."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from configs.schema import InputError

if TYPE_CHECKING:
    from data.prepare.job import PrepareJob

ROOT = Path(__file__).parents[2]
REPORT_SECONDS = 0.25  # between two messages of a process about its progress


@dataclass
class Processes:
    """The cores of this machine."""

    most: int  # processes at a time
    lock: int  # the descriptor of the lock, which the processes inherit

    def make(
        self,
        job: PrepareJob,
        todo: list[int],
        change: dict,
        progress: Callable[[int], object],
        add: Callable[[int, dict], None],
    ) -> None:
        """Make the parts `todo`. `progress` receives bytes of the source, as they are read, and
        `add` each part and its record."""
        if min(self.most, len(todo)) > 1:
            in_processes(job.folder, todo, change, self.most, self.lock, progress, add)
            return
        for part in todo:
            add(part, job.make(part, change, self.most, progress))


def in_processes(
    folder: str,
    todo: list[int],
    change: dict,
    workers: int,
    lock: int,
    progress: Callable[[int], object],
    add: Callable[[int, dict], None],
) -> None:
    """Make the parts `todo` with at most `workers` processes, each of which takes the next part
    when it is free. They inherit the lock, so no other process begins while one of them still
    writes after its parent has died. Threads in one process would not do, as reading JSON and
    Parquet holds the GIL. `add` receives each part and its record."""
    waiting = deque(todo)
    count = min(workers, len(todo))
    command = [
        sys.executable,
        "-m",
        "data.prepare",
        "--work",
        folder,
        str(max(1, workers // count)),
    ]
    running: list[subprocess.Popen] = []
    guard = threading.Lock()

    def serve(process: subprocess.Popen) -> None:
        """Give one process its parts, until none are left."""
        while (part := _next(waiting)) is not None:
            record = _ask(process, [part, change], progress, guard)
            if record is None:
                raise RuntimeError(
                    f"the process that tokenised part {part} of {folder} died (exit code "
                    f"{process.wait()})"
                )
            with guard:
                add(part, record)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "ascii"}
    try:
        for _ in range(count):
            running.append(subprocess.Popen(command, cwd=ROOT, pass_fds=(lock,), **pipes))
        with ThreadPoolExecutor(count) as pool:
            try:
                served = [pool.submit(serve, process) for process in running]
                wait(served, return_when=FIRST_EXCEPTION)
            finally:
                waiting.clear()
                if not all(future.done() and not future.exception() for future in served):
                    for process in running:
                        process.kill()
        _raise_cause([error for future in served if (error := future.exception())])
    finally:
        for process in running:
            process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()


def _raise_cause(errors: list[BaseException]) -> None:
    """Raise the error that caused the others, if there is any."""
    for kind in (InputError, OSError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error


def _next(waiting: deque[int]) -> int | None:
    with suppress(IndexError):
        return waiting.popleft()


def _ask(
    process: subprocess.Popen, part: list, progress: Callable[[int], object], guard: threading.Lock
) -> dict | None:
    """Have a process make a part ([number, change]). Returns the record, or None if the process
    died. Raises the process's error."""
    line = ""
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(part) + "\n")
        process.stdin.flush()
        while (line := process.stdout.readline()) and "bytes" in (message := json.loads(line)):
            with guard:
                progress(message["bytes"])
    if not line:
        return None
    raise_error(message)
    return message


def answer(
    job: PrepareJob, part: int, change: dict, threads: int, progress: Callable[[int], object]
) -> dict:
    """Make a part and return its record; or the error, as a message to another process."""
    try:
        return job.make(part, change, threads, progress)
    except InputError as error:
        return {"input_error": str(error)}
    except BrokenPipeError:  # of `progress`: the reader is gone
        raise
    except OSError as error:
        return {"os_error": [error.errno, error.strerror]}


def raise_error(message: dict) -> None:
    """Raise the error in what `answer` returned, if there is one."""
    if "input_error" in message:
        raise InputError(message["input_error"])
    if "os_error" in message:
        raise OSError(*message["os_error"])


def work(job: PrepareJob, threads: int) -> int:
    """Run as a process of `in_processes`: read numbers of parts line by line, and write progress
    and records."""
    reported, done = time.monotonic(), 0

    def progress(size: int) -> None:
        nonlocal reported, done
        done += size
        if time.monotonic() - reported > REPORT_SECONDS:
            print(json.dumps({"bytes": done}), flush=True)
            reported, done = time.monotonic(), 0

    for line in sys.stdin:
        part, change = json.loads(line)
        try:
            record = answer(job, part, change, threads, progress)
        except BrokenPipeError:
            return 1
        print(json.dumps({"bytes": done}), json.dumps(record), sep="\n", flush=True)
        done = 0
    return 0


class Progress:
    """Progress of reading the source: a bar at a terminal, otherwise a line every five seconds."""

    def __init__(self, total: int, done: int, log: Callable[[str], object]) -> None:
        """total, done: bytes of the source, and how many of them earlier processes have read."""
        self.total, self.before, self.done, self.log = total, done, done, log
        self.began = self.reported = time.monotonic()

    def __enter__(self) -> Progress:
        self.bar = tqdm(
            total=self.total or None,
            initial=self.before,
            unit="B",
            unit_scale=True,
            desc="tokenising",
            disable=not sys.stderr.isatty(),
            leave=False,
        )
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.bar.close()
        seconds = time.monotonic() - self.began
        size = self.done - self.before
        if size and not error:
            rate = size / 1e6 / seconds
            self.log(
                f"tokenised {size / 1e6:,.1f} MB of the source in {seconds:.1f} s, {rate:.1f} MB/s"
            )

    def add(self, size: int) -> None:
        self.done += size
        self.bar.update(size)
        now = time.monotonic()
        if self.bar.disable and now - self.reported > 5:
            rate = (self.done - self.before) / (now - self.began)
            time_left = (
                f", {(self.total - self.done) / rate:,.0f} s left" if self.total and rate else ""
            )
            share = f"{self.done / self.total:.0%}" if self.total else f"{self.done / 1e6:,.0f} MB"
            self.log(f"tokenised {share}, {rate / 1e6:.1f} MB/s{time_left}")
            self.reported = now
