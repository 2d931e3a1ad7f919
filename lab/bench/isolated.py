"""Run contenders in separate processes, in turn: each has its own memory and allocator.

All are started at once, because they may have to compile. Each prints {} when it is ready,
answers each line that it reads with the seconds of one call, and ends with facts about itself. One
that dies, or takes too long, is left out of the rest, with its last output as the reason.
"""

import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from lab.bench.harness import alternate, end_with_parent
from training.metrics import memory_gib

END = "end"
LATE = "no answer in time"
PATIENCE = 900.0  # seconds


class Contender:
    """Contender in one process. facts: what it printed last; seconds: of each round; why: the reason
    of its failure, "" without one."""

    def __init__(self, arguments: list[str]) -> None:
        self.facts: dict = {}
        self.seconds: list[float] = []
        self.why = ""
        self.unread = b""
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            bufsize=0,
            preexec_fn=end_with_parent,
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


def timed(
    contenders: dict[str, list[str]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Start all (arguments of python) at once, and time them in turn when all are ready.

    Returns the seconds and the facts of each, after a round that does not count. Raises
    RuntimeError if one of them fails."""
    running = {name: Contender(words) for name, words in contenders.items()}
    deadline = time.monotonic() + PATIENCE
    for contender in running.values():
        contender.answer(deadline)
    for _ in range(1 + rounds):
        for contender in running.values():
            contender.ask("")
            answer = contender.answer(time.monotonic() + PATIENCE)
            contender.seconds += [answer["seconds"]] if answer else []
    for contender in running.values():
        contender.ask(END)
        contender.facts |= contender.answer(time.monotonic() + PATIENCE)
    for name, contender in running.items():
        if contender.why:
            raise RuntimeError(f"{name}: {contender.why}")
        contender.process.communicate()
    seconds = {name: contender.seconds[1:] for name, contender in running.items()}
    return seconds, {name: contender.facts for name, contender in running.items()}


def serve(run: Callable[[], object], last: Callable[[], dict] = dict) -> None:
    """Serve the other end of `timed`. The first call compiles, and is not timed. The facts at the
    end begin with the peak GiB of the calls."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what building took
        torch.cuda.reset_peak_memory_stats()
    run()
    print("{}", flush=True)
    for line in sys.stdin:
        if line.strip() == END:
            gib = memory_gib(device)
            print(json.dumps({"gib": gib, **last()}), flush=True)
            return
        print(json.dumps({"seconds": alternate({"": run}, 1, 0)[""][0]}), flush=True)
