"""Keep processes ready that have imported torch, so that a restart does not wait for that: most of
the seconds of a restart are the import of torch (lab/bench/results/restart.txt).

Each is started as a rank is, imports what takes long, and waits (tools/launch/rank.py). The next
start of the ranks takes these processes instead of new ones, and sends each the environment of its
rank. Before that they import of this repository only what starts a program (tools/launch/rank.py,
configs/program.py), so a restart runs the code that is there then. They use no GPU while they wait,
and some 300 MB of memory each.
"""

import json
import os
import subprocess
import time
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tools.launch.rank import STANDBY

# seconds after a start in which ranks need the cores to start themselves
AFTER = 20.0


class Standby:
    """The processes that wait for the next start of this node's ranks, while the context lasts."""

    def __init__(self, command: list[str], count: int) -> None:
        """command: of a rank, with its interpreter; count: the ranks."""
        self.command = command
        self.count = count
        self.wanted = 0
        self.waiting: list[tuple[subprocess.Popen, int]] = []  # with the end of its pipe
        self.due = 0.0

    def __enter__(self) -> "Standby":
        """Let the launcher's agent take these processes when it starts ranks. torch has no hook for
        that: `SubprocessHandler._popen` is where it starts a process."""
        self.start_anew = SubprocessHandler._popen
        SubprocessHandler._popen = lambda handler, args, env: self.take(handler, args, env)
        return self

    def __exit__(self, *_: object) -> None:
        """End those that wait."""
        SubprocessHandler._popen = self.start_anew
        for process, ours in self.waiting:
            process.kill()  # before it hears that the launcher is gone, and says so
            process.wait()
            os.close(ours)

    def begin(self, more: bool) -> None:
        """Note that a start begins. more: another may follow."""
        self.wanted = self.count if more else 0
        self.due = time.monotonic() + AFTER

    def prepare(self) -> None:
        """Start the processes that are missing, once the ranks have had time to start."""
        if time.monotonic() < self.due:
            return
        while len(self.waiting) < self.wanted:
            theirs, ours = os.pipe()
            # RANK: a process without it is no rank, and would check the arguments for itself
            environment = os.environ | {STANDBY: str(theirs), "RANK": "0"}
            process = subprocess.Popen(
                self.command, env=environment, pass_fds=[theirs], start_new_session=True
            )
            os.close(theirs)
            self.waiting.append((process, ours))

    def take(self, handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen:
        """Return a process that becomes this rank: one that waits, or a new one."""
        while self.waiting:
            process, ours = self.waiting.pop(0)
            with os.fdopen(ours, "w", encoding="utf-8") as word:
                if process.poll() is None:
                    word.write(json.dumps(env))
                    return process
            process.kill()
            process.wait()
        return self.start_anew(handler, args, env)
