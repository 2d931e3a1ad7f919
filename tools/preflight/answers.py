"""Collect the answers of all ranks on rank 0, and explain missing ones."""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from configs.schema import InputError
from configs.words import plural
from tools.preflight.machine import ROOT
from tools.preflight.probe import Probe, ProbeRow, failed, short


class Stopped(BaseException):
    """Raised by a signal: the launcher's, because another rank has ended, or the user's."""


class ResultStore:
    """Answers to rank 0 and its verdicts, as JSON: the store has no password, so no pickles."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size

    def answer(self, check: str, text: dict) -> None:
        self.store.set(f"{check}/{self.rank}", json.dumps(text))
        self.store.add(f"{check}/answers", 1)

    def collect(self, check: str, seconds: float) -> list[dict]:
        """Return the answer of each rank; {} for those that have not answered within that time."""
        deadline = time.monotonic() + seconds
        while self.store.add(f"{check}/answers", 0) < self.size and time.monotonic() < deadline:
            time.sleep(0.01)
        keys = [f"{check}/{rank}" for rank in range(self.size)]
        if self.store.add(f"{check}/answers", 0) >= self.size and self.store.has_extended_api():
            texts = self.store.multi_get(keys)
        else:
            texts = [self.store.get(key) if self.store.check([key]) else b"{}" for key in keys]
        return [json.loads(text) for text in texts]

    def decide(self, check: str, verdict: dict) -> None:
        self.store.set(f"{check}/verdict", json.dumps(verdict))

    def verdict(self, check: str, seconds: float) -> dict | None:
        """Return rank 0's verdict; None if it does not come. Polls with growing pauses, so that
        thousands of ranks do not overload the store."""
        deadline = time.monotonic() + seconds
        pause = 0.005
        while time.monotonic() < deadline:
            if self.store.check([f"{check}/verdict"]):
                return json.loads(self.store.get(f"{check}/verdict"))
            time.sleep(pause)
            pause = min(2 * pause, max(0.1, self.size / 20_000))
        return None


class Worker:
    """Thread that runs all checks of this rank, so that the main thread can notice one that hangs."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True, name="preflight")
        self.thread.start()

    def _work(self) -> None:
        while True:
            fn, argument = self.calls.get()
            try:
                self.answers.put({"value": fn(argument)})
            except Exception as error:
                self.answers.put(_described(error))

    def call(self, fn: Callable, argument: object, seconds: float) -> dict:
        """{"value": what fn returned}, {"error": ..., "kind": ...} or {"hangs": where}."""
        self.calls.put((fn, argument))
        try:
            return self.answers.get(timeout=seconds)
        except queue.Empty:
            frame = sys._current_frames()[self.thread.ident]
            return {"hangs": _in_our_code(traceback.extract_stack(frame))}


NO_ANSWER = "gave no answer: it died, hangs or was never started; see its log and its host"
HINT = (
    "what it waited for was another rank: see how hosts reach each other "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)
WAITING = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|gloo|nccl|socket|peer", re.IGNORECASE
)


def _described(error: Exception) -> dict:
    """kind: input, a mistake of the user; wait, another rank did not take part; error."""
    if isinstance(error, InputError):
        return {"error": str(error), "kind": "input"}
    where = _in_our_code(traceback.extract_tb(error.__traceback__))
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, OSError) and not isinstance(error, dist.DistError):
        return {"error": f"{error.filename or ''}: {error.strerror or error}", "kind": "error"}
    waits = isinstance(error, (dist.DistError, RuntimeError)) and not isinstance(
        error, torch.OutOfMemoryError
    )
    return {
        "error": f"{short(text)} (in {where})",
        "kind": "wait" if waits and WAITING.search(text) else "error",
    }


def _in_our_code(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of ours in a stack."""
    for frame in reversed(stack):
        if frame.filename.startswith(f"{ROOT}{os.sep}") and frame.name not in ("_work", "call"):
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} ({frame.name})"
    return "code that is not ours"


def judge_trouble(probe: Probe, check: str, answers: list[dict]) -> list[ProbeRow]:
    """Return rows about ranks without a value, first those that the others may have waited for."""
    troubles: dict[str, list[int]] = defaultdict(list)
    waits: dict[str, list[int]] = defaultdict(list)
    for r, a in enumerate(answers):
        if "hangs" in a:
            text = f"did not finish within {probe.limit(check)} s; it is in {a['hangs']}"
            troubles[text].append(r)
        elif not a:
            troubles[NO_ANSWER].append(r)
        elif a.get("kind") in ("error", "input"):
            troubles[a["error"]].append(r)
        elif "error" in a or "stopped" in a:
            waits[a.get("error", a.get("stopped"))].append(r)
    if not troubles:
        return [failed(f"{probe.named(ranks)}: {text}; {HINT}") for text, ranks in waits.items()]
    # the troubles of the fewest ranks first: many may hang in one place because of a few
    fewest_first = sorted(troubles.items(), key=lambda trouble: len(trouble[1]))
    rows = [failed(f"{probe.named(ranks)}: {text}") for text, ranks in fewest_first]
    if waits:
        waited = probe.named(chain(*waits.values()))
        rows.append(failed(f"{waited} waited for {plural(len(rows), 'it', 'them')} in vain"))
    return rows
