"""Twelve ways to hang, on four ranks each: `python -m tools.hang` names the culprit in each.

All hang side by side, and are asked while they hang. Seven ways befall one run of train.py, one
after another (tests/hangs.py::Tour); the others have ranks of their own, which run collectives and
no model.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forks, hangs
from tests.ranks import NEIGHBOURS
from tests.runs import tiny_run
from tools import hang

pytestmark = pytest.mark.waits
RANKS = 4
PATIENCE = 30.0  # seconds in which a way must be named

# way: the culprits, and what the first lines say of them
EXPECTED = {
    "sleeps in forward": (
        [1],
        "rank 1 .*: forward of layers.1, microbatch 2 of step 2, at tests/hangs.py:.* hold, waits "
        "for nobody .*sleeps in forward.; 3 wait in its all_gather #",
    ),
    "sleeps in backward": (
        [2],
        "rank 2 .*: backward of layers.0, microbatch 2 of step 3, at tests/hangs.py:.* hold, waits "
        "for nobody .*sleeps in backward.; 3 wait in its all_reduce #",
    ),
    "sleeps in data": (
        [3],
        "rank 3 .*: data, step 4, at tests/hangs.py:.* hold, waits for nobody .*; 3 wait in its",
    ),
    "sleeps in a save": (
        [0],
        "rank 0 .*: save, step 5, at tests/hangs.py:.* hold, waits for nobody .*; 3 wait in its",
    ),
    "stopped": (
        [1],
        "rank 1 .*: forward, step 7, waits for nobody .its process does not answer: it is stopped "
        ".*; 3 wait in its all_reduce #",
    ),
    "a data worker loops": (
        [3],
        "rank 3 .*: data, step 8, .*its worker [0-9]+ computes .*; 3 wait in its all_reduce #",
    ),
    "a disk that blocks": (
        [2],
        "rank 2 .*: save, step 12, at tests/hangs.py:.* fill, waits for nobody .*; . waits? in its",
    ),
    "leaves_one_out": (
        [2],
        "rank 2 runs another collective than the rest as #11 of group default_pg .*: ranks 0, 1, "
        "3: all_to_all; rank 2: all_reduce float.3.",
    ),
    "other_order": (
        [1],
        "rank 1 runs another collective than the rest as #10 of group default_pg .*: ranks 0, 2, "
        "3: all_reduce float.5.; rank 1: broadcast float.5.",
    ),
    "other_size": (
        [3],
        "rank 3 runs another collective than the rest as #10 of group default_pg .*: ranks 0, 1, "
        "2: all_reduce float.4194304.; rank 3: all_reduce float.6291456.",
    ),
    "two_groups": (
        [0, 1],
        "ranks 0, 1 wait for each other: a deadlock\n.*inside all_reduce #1 of group .ranks 0, 1, "
        "2., waits for rank 1\n.*inside all_reduce #1 of group .ranks 0, 1, 3., waits for rank 0",
    ),
}


def names(way: str, verdict: hang.Verdict) -> bool:
    culprits, words = EXPECTED[way]
    said = "\n".join(verdict.lines)
    return verdict.stands and verdict.culprits == culprits and re.match(words, said) is not None


class Hung:
    """Ranks that hang, or will."""

    def __init__(self, folder: Path, function: Callable, *arguments: object) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        self.ranks = [
            forks.start(function, folder, rank, RANKS, *arguments) for rank in range(RANKS)
        ]

    def asked(self, way: str) -> hang.Verdict:
        """The verdict when it names the way's culprits, twice in a row; the last one where it does
        not in time."""
        deadline = time.monotonic() + PATIENCE * NEIGHBOURS
        verdict = hang.Verdict([], ["the ranks have left nothing"], False)
        named = 0
        while named < 2 and time.monotonic() < deadline:
            time.sleep(0.3)
            if list(self.folder.glob("logs/*.position")):
                verdict = hang.judge(hang.read(self.folder))
            named = named + 1 if names(way, verdict) else 0
            through = list(self.folder.glob("through-*"))
            assert not through, f"{way}: {through[0].name} {through[0].read_text()}"
        return verdict


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def verdicts(place: Path) -> Iterator[dict[str, hang.Verdict]]:
    """By way; a copy of the run's logs in each way is in `place`."""
    place.joinpath("data").mkdir()
    run = Hung(place / "run", hangs.tour_rank, tiny_run(place / "data"))
    alone = {
        name: Hung(place / name, hangs.light_rank, getattr(hangs, name))
        for name in ("leaves_one_out", "other_order", "other_size", "two_groups")
    }
    try:
        found = {way: hung.asked(way) for way, hung in alone.items()}
        for way in hangs.OF_A_RUN:
            found[way] = run.asked(way)
            shutil.copytree(run.folder / "logs", place / way / "logs")
            go_on(run, way)
        yield found
    finally:
        for process in [p for hung in (run, *alone.values()) for p in hung.ranks]:
            forks.end(process)


def go_on(run: Hung, way: str) -> None:
    if way == "stopped":
        _, rank = hangs.OF_A_RUN[way]
        os.kill(run.ranks[rank].pid, signal.SIGCONT)
    elif way == "a disk that blocks":
        hangs.read_all(run.folder / "disk")
    (run.folder / f"at-{way}").unlink()


@pytest.mark.parametrize("way", EXPECTED)
def test_the_culprit_is_named(way: str, verdicts: dict[str, hang.Verdict]) -> None:
    assert names(way, verdicts[way]), "\n".join(verdicts[way].lines)
