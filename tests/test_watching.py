"""Code that reads the stacks of a process keeps nothing of what it saw: `gc` is off during steps,
so one cycle keeps every tensor of every frame."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reliability import position
from reliability.health import Watchdog
from tests import fork_server


def kept_after(look: Callable[[Path], object], folder: Path) -> int:
    """Return how many of ten tensors live on, each in the frame of a thread that was looked at and
    that has ended."""
    gc.collect()
    gc.disable()
    tensors: list[weakref.ref] = []

    def step(seen: threading.Event, there: threading.Event) -> None:
        activation = torch.zeros(1000)
        tensors.append(weakref.ref(activation))
        there.set()
        seen.wait()

    for _ in range(10):
        seen, there = threading.Event(), threading.Event()
        thread = threading.Thread(target=step, args=(seen, there))
        thread.start()
        there.wait()
        look(folder)
        seen.set()
        thread.join()
    return sum(tensor() is not None for tensor in tensors)


def heartbeat(folder: Path) -> None:
    own = position.Position(folder / "rank-00000.position", 0)
    assert own._standing()["threads"]


def stacks(folder: Path) -> None:
    """Write the stacks as the watchdog of a failing run does."""
    watchdog = Watchdog(folder, 0)
    watchdog.path.parent.mkdir(exist_ok=True)
    watchdog.file = watchdog.path.open("a")
    watchdog.stacks()
    watchdog.file.close()
    assert "in step" in watchdog.path.read_text()


def as_it_was(folder: Path) -> list:
    """A look whose own frame is among those that it holds."""
    frames = sys._current_frames()
    return [position.own_lines(frames[number]) for number in frames]


@pytest.mark.parametrize(("look", "kept"), [(heartbeat, 0), (stacks, 0), (as_it_was, 10)])
def test_a_look_keeps_nothing_of_what_it_saw(look, kept, tmp_path):
    assert fork_server.call(kept_after, look, tmp_path) == kept
