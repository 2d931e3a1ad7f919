"""Stops a run on request: after a signal, or when its time limit is over.

Before the first step is done there is nothing new to save, so the process ends at once: with 130
after Ctrl-C, with 75 after a signal of a scheduler. After it
the training loop is notified, and all ranks stop at the end of the same step with a checkpoint. If
the same signal comes again, the process ends at once.

Python runs signal handlers on the main thread, and only between two Python instructions: a main
thread that waits for another rank would never run one. So a second thread listens too, on the pipe
that Python's C handler writes to.
"""

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from configs.program import INTERRUPTED, STOP_SIGNALS
from reliability.exit import STOPPED

# seconds in which a repeated signal is the same request: Slurm's srun and the launcher both send it
ECHO = 2.0
logger = logging.getLogger("plumbline")


class Stop:
    """A context manager around a run, on the main thread.

    at_once: whether to end at once because there is nothing to save. The loop sets it to False
    after its first step. saved: the last step, once the loop is over and all is saved: what is left,
    a sample or an export, asks by itself whether it is to stop. asked_in_last: of the last one in this
    process that has ended, whether it was asked: by then the run may have done all its steps.
    has_state: whether this process goes on from what is not saved yet (checkpoint/rounds.py).
    called: whether the ranks are to meet after this step (checkpoint/rounds.py). leaves: whether they
    have agreed to; left_in_last: the same of the last one in this process.
    """

    asked_in_last: ClassVar[bool] = False
    has_state: ClassVar[bool] = False
    left_in_last: ClassVar[bool] = False
    called = False
    leaves = False
    saved: int | None = None

    def __init__(self, born: float, max_minutes: float, end: Callable[[int, str], object]) -> None:
        """born: when the process was born, on the monotonic clock; max_minutes: its time limit
        since then, 0 for none; end(exit code, reason): called before the process ends without
        unwinding its stack."""
        self.at_once = not Stop.has_state
        self.end = end
        self.heard = False
        self.said = False
        self.deadline = born + 60 * max_minutes if max_minutes else math.inf

    def asked(self) -> bool:
        """Return whether this process was told to stop, or its time is over."""
        return self.heard or self.called or time.monotonic() > self.deadline

    def __enter__(self) -> "Stop":
        self.pipe = os.pipe()
        for fd in self.pipe:
            os.set_blocking(fd, False)
        self.before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:  # under nohup SIGHUP is ignored, and stays ignored
                signal.signal(number, self._on_signal)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        Stop.asked_in_last = self.heard or time.monotonic() > self.deadline
        Stop.left_in_last = self.leaves
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.write(self.pipe[1], b"\0")  # closing it is not enough: a loader worker may have a copy
        self.thread.join()
        for fd in self.pipe:
            os.close(fd)

    def _on_signal(self, number: int, frame: object) -> None:
        # set on the main thread too, so that the run stops at the step in which the signal came
        self.heard = True

    def _listen(self) -> None:
        """Run in the thread until a 0 comes through the pipe."""
        first_heard: dict[int, float] = {}  # signal -> when it came
        limited = math.isfinite(self.deadline)
        while True:
            seconds_left = max(0.0, self.deadline - time.monotonic()) if limited else None
            if select.select([self.pipe[0]], [], [], seconds_left)[0]:
                numbers = os.read(self.pipe[0], 4096)
                if 0 in numbers:
                    return
                for number in sorted(set(numbers) & set(STOP_SIGNALS)):
                    now = time.monotonic()
                    if now - first_heard.setdefault(number, now) > ECHO:
                        self._again(number)
                    self._heard(signal.Signals(number).name)
            else:
                limited = False
                self._heard("the time limit (run.max_minutes)")

    def _heard(self, request: str) -> None:
        if self.at_once and self.saved is None:
            code = INTERRUPTED if request == "SIGINT" else STOPPED
            self._leave(
                code, f"stopped by {request} before the first step was done: nothing to save"
            )
        self.heard = True
        if self.said:
            return
        self.said = True
        if self.saved is not None:
            logger.warning(f"{request}: step {self.saved} is saved, and the run ends here")
            return
        again = ""
        if request == "SIGINT":
            again = f"; Ctrl-C again after {ECHO:g} s ends without saving"
        logger.warning(f"{request}: stopping after this step and saving{again}")

    def _again(self, number: int) -> None:
        """End the process, and say what is saved, when the same signal comes again."""
        again = f"{signal.Signals(number).name} a second time"
        if self.saved is not None:
            self._leave(STOPPED, f"{again}: step {self.saved} is saved, and the run ends at once")
        self._leave(128 + number, f"{again}: ended without waiting for a checkpoint")

    def _leave(self, code: int, reason: str) -> None:
        """End the process at once, even if the main thread is busy or waits."""
        logger.warning(reason)
        self.end(code, reason)
        os._exit(code)
