"""Makes parts with several processes, and shows how much of the source they have read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
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
        `add` each part and its record.

        Each process takes the next part when it is free. They inherit the lock, so no other process
        begins while one of them still writes after its parent has died. Threads in one process would
        not do, as reading JSON and Parquet holds the GIL."""
        count = min(self.most, len(todo))
        if count <= 1:
            for part in todo:
                add(part, job.make(part, change, self.most, progress))
            return
        parts = iter(todo)
        guard = threading.Lock()

        def report(size: int) -> None:
            with guard:
                progress(size)

        def serve(process: subprocess.Popen) -> None:
            """Give one process its parts, until none are left."""
            for part in parts:
                record = _ask(process, part, change, report)
                with guard:
                    add(part, record)

        threads = max(1, self.most // count)
        command = [sys.executable, "-m", "data.prepare", "--work", job.folder, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        running: list[subprocess.Popen] = []
        try:
            for _ in range(count):
                running.append(subprocess.Popen(command, cwd=ROOT, pass_fds=(self.lock,), **pipes))
            with ThreadPoolExecutor(count) as pool:
                try:
                    served = [pool.submit(serve, process) for process in running]
                    wait(served, return_when=FIRST_EXCEPTION)
                finally:
                    if not all(future.done() and not future.exception() for future in served):
                        for process in running:
                            process.kill()
        finally:
            for process in running:
                process.kill()
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.stdout.close()
                process.wait()
        errors = [error for future in served if (error := future.exception())]
        errors.sort(key=lambda error: isinstance(error, Died))  # of the error of another
        if errors:
            raise errors[0]


class Died(RuntimeError):
    """A process has died."""


def _ask(
    process: subprocess.Popen, part: int, change: dict, progress: Callable[[int], object]
) -> dict:
    """Have a process make a part, and return its record. Raises the process's error, or Died."""
    try:
        pickle.dump((part, change), process.stdin)
        process.stdin.flush()
        while isinstance(message := pickle.load(process.stdout), int):
            progress(message)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        code = process.wait()
        raise Died(f"the process that tokenised part {part} died (exit code {code})") from None
    if isinstance(message, Exception):
        raise message
    return message


def work(job: PrepareJob, threads: int) -> int:
    """Run as one of the processes: read parts, and write progress (bytes) and records or errors."""
    reported = time.monotonic()
    done = 0
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no message

    def send(message: int | dict | Exception) -> None:
        pickle.dump(message, messages)
        messages.flush()

    def progress(size: int) -> None:
        nonlocal reported, done
        done += size
        if time.monotonic() - reported > REPORT_SECONDS:
            send(done)
            reported, done = time.monotonic(), 0

    with suppress(EOFError, BrokenPipeError):  # the parent has no more parts, or is gone
        while True:
            part, change = pickle.load(sys.stdin.buffer)
            try:
                record = job.make(part, change, threads, progress)
            except InputError as error:
                record = InputError(str(error))
            except BrokenPipeError:
                raise
            except OSError as error:
                record = OSError(error.errno, error.strerror)
            send(done)
            send(record)
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
