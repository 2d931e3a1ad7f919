"""Run contenders in separate processes, in turn, where some may fail: the results of the others
stay.

Like `harness.in_turn`, but each process first prints facts about itself, may take its time to
compile while the others do, and answers with more facts at the end. One that dies, or takes too
long, is left out of the rest, with its last output as the reason.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lab.bench.harness import end_with_parent

END = "end"
THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # for they all compile at the same time


class Contender:
    """Contender in one process. facts: its printed facts; seconds: of each round; why: the reason
    of its failure, "" without one."""

    def __init__(self, arguments: list[str]) -> None:
        self.facts: dict = {}
        self.seconds: list[float] = []
        self.why = ""
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | THREADS,
            preexec_fn=end_with_parent,
        )

    def ask(self, question: str) -> None:
        if self.why:
            return
        try:
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
        except OSError:
            self.give_up("it has ended")

    def answer(self, deadline: float) -> dict:
        """Return its next line of JSON; {} and a reason if there is none by then (of
        time.monotonic)."""
        while not self.why:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                self.give_up("no answer in time")
                break
            line = self.process.stdout.readline()
            if not line:
                self.give_up(f"ended with code {self.process.wait()}")
            elif line.startswith("{"):  # what else libraries print is passed over
                return json.loads(line)
        return {}

    def give_up(self, reason: str) -> None:
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        self.why = f"{reason}: {' / '.join(lines[-4:])[-600:]}"
        print(self.why, "\n", "\n".join(lines[-30:]), file=sys.stderr, flush=True)


def in_turn(
    contenders: dict[str, list[str]],
    rounds: int,
    ready_seconds: float,
    round_seconds: float,
    noted: Callable[[dict[str, Contender]], None] = lambda all_of_them: None,
) -> dict[str, Contender]:
    """Start all (arguments of python) at once, and when each has said its facts, time them in turn.

    ready_seconds: for all to get ready; round_seconds: for each answer after that. noted: called
    whenever there is more to write down.
    """
    running = {name: Contender(arguments) for name, arguments in contenders.items()}
    deadline = time.monotonic() + ready_seconds
    for contender in running.values():
        contender.facts |= contender.answer(deadline)
    noted(running)
    for _ in range(rounds):
        for contender in running.values():
            contender.ask("")
            seconds = contender.answer(time.monotonic() + round_seconds).get("seconds")
            if seconds is not None:
                contender.seconds.append(seconds)
    noted(running)
    for contender in running.values():
        contender.ask(END)
        contender.facts |= contender.answer(time.monotonic() + 3 * round_seconds)
    for contender in running.values():
        if not contender.why:
            contender.process.communicate()
    noted(running)
    return running


def numbers(running: dict[str, Contender]) -> dict[str, dict]:
    """Return all that is known of them, for programs."""
    return {
        name: {"facts": one.facts, "seconds": one.seconds, "why": one.why}
        for name, one in running.items()
    }


def note(path: str | None, running: dict[str, Contender]) -> None:
    """Write down what is known so far, should the rest be cut off."""
    if path:
        Path(path).write_text(json.dumps({"so far": numbers(running)}) + "\n", encoding="utf-8")


def serve(facts: dict, run: Callable[[], object], last: Callable[[], dict]) -> None:
    """Serve the other end of `in_turn`."""
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        if line.strip() == END:
            print(json.dumps(last()), flush=True)
            return
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
