"""Run contenders in separate processes, in turn: each has its own memory and allocator.

All are started at once, because they may have to compile. Each prints {} when it is ready, and
answers each line that it reads by a line of JSON. One that dies, or takes too long, is left out of
the rest, with its last output as the reason.
"""

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

from lab.bench.harness import alternate
from tools.launch.rank import end_with_parent

LATE = "no answer in time"
PATIENCE = 900.0  # seconds


class Contender:
    """Contender in one process. why: the reason of its failure, "" without one."""

    def __init__(self, arguments: list[str]) -> None:
        self.why = ""
        self.unread = b""
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            bufsize=0,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )

    def ask(self, question: str) -> None:
        if self.why:
            return
        try:
            self.process.stdin.write(f"{question}\n".encode())
        except OSError:
            self.give_up("it has ended")

    def answer(self, deadline: float) -> dict:
        """Return its next line of JSON; {} and a reason if there is none by then (of
        time.monotonic)."""
        while not self.why:
            line, ended, self.unread = self.unread.partition(b"\n")
            if not ended:
                self.unread = line + self.more(deadline)
            elif line.startswith(b"{"):  # what else libraries print is passed over
                return json.loads(line)
        return {}

    def more(self, deadline: float) -> bytes:
        """Return what it has printed since, and wait for it; b"" and a reason if nothing comes."""
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self.process.stdout], [], [], left)[0]:
            self.give_up(LATE)
            return b""
        printed = self.process.stdout.read(65536)
        if not printed:
            self.give_up(f"ended with code {self.process.wait()}")
        return printed

    def give_up(self, reason: str) -> None:
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        last = " / ".join(line.strip() for line in lines[-4:])
        self.why = f"{reason}: {last[-600:]}"
        print(self.why, "\n", "\n".join(lines[-30:]), file=sys.stderr, flush=True)


def timed(contenders: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Start all (arguments of python) at once, and time them in turn when all are ready. Returns the
    seconds of each, after a round that does not count. Raises RuntimeError if one of them fails."""
    running = {name: Contender(words) for name, words in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    deadline = time.monotonic() + PATIENCE
    for contender in running.values():
        contender.answer(deadline)
    for _ in range(1 + rounds):
        for name, contender in running.items():
            contender.ask("")
            seconds[name] += contender.answer(time.monotonic() + PATIENCE).values()
    for name, contender in running.items():
        if contender.why:
            raise RuntimeError(f"{name}: {contender.why}")
        contender.process.communicate()
    return {name: found[1:] for name, found in seconds.items()}


def serve(run: Callable[[], object]) -> None:
    """Serve the other end of `timed`. The first call compiles, and is not timed."""
    run()
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": alternate({"": run}, 1, 0)[""][0]}), flush=True)
