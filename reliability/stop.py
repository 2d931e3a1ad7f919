"""Stopping on request: a signal or the time limit, and what is left to do when it comes.

Before the first step is done there is nothing new to save, so the process ends at once. From then on the loop is told, and
all ranks stop at the end of the same step with a checkpoint. The same signal once more ends the process at once.

Python runs its handlers on the main thread, and only between two of its instructions: a main thread that waits for another
rank would never hear a signal. So a thread hears them as well, through the pipe that C's handler writes to.
"""

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again to go on
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ECHO = 2.0  # seconds in which the same signal is one request: under Slurm it comes from srun and from the launcher
say = logging.getLogger("plumbline")


class Stop:
    """A context manager around a run, on the main thread.

    at_once: nothing to save yet; the loop sets it to False when its first step is done.
    """

    def __init__(self, born: float, max_minutes: float, end: Callable[[int, str], object]) -> None:
        """born: when the process was, on the monotonic clock; max_minutes: its time limit since then, 0 for none; end: of
        (exit code, reason), the last words of a process that ends without unwinding its stack."""
        self.at_once, self.end, self.heard = True, end, False
        self.deadline = born + 60 * max_minutes if max_minutes else math.inf

    def asked(self) -> bool:
        """Whether this process has been asked to stop, or its time is over."""
        return self.heard or time.monotonic() > self.deadline

    def __enter__(self) -> "Stop":
        self.pipe = os.pipe()
        for fd in self.pipe:
            os.set_blocking(fd, False)
        self.before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP, and so do we then
                signal.signal(number, self._on_signal)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.write(self.pipe[1], b"\0")  # closing would not do: a loader worker may have a copy of it
        self.thread.join()
        for fd in self.pipe:
            os.close(fd)

    def _on_signal(self, number: int, frame: object) -> None:
        self.heard = True  # here, so that a step in which a signal comes is the one that it stops

    def _listen(self) -> None:
        """The thread, until a 0 comes through the pipe."""
        first: dict[int, float] = {}  # signal -> when it came
        limited = math.isfinite(self.deadline)
        while True:
            left = max(0.0, self.deadline - time.monotonic()) if limited else None
            if select.select([self.pipe[0]], [], [], left)[0]:
                numbers = os.read(self.pipe[0], 4096)
                if 0 in numbers:
                    return
                for number in sorted(set(numbers) & set(STOP_SIGNALS)):
                    name, now = signal.Signals(number).name, time.monotonic()
                    if now - first.setdefault(number, now) > ECHO:
                        self._leave(128 + number, f"{name} a second time: ended without waiting for a checkpoint")
                    self._heard(name)
            else:
                limited = False
                self._heard("the time limit (run.max_minutes)")

    def _heard(self, what: str) -> None:
        if self.at_once:
            self._leave(STOPPED, f"stopped by {what} before the first step was done: nothing to save")
        self.heard = True

    def _leave(self, code: int, words: str) -> None:
        """Whatever the main thread is doing or waiting for."""
        say.warning(words)
        self.end(code, words)
        os._exit(code)
