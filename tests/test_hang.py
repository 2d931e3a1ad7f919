"""Twelve ways to hang, on four ranks each: `python -m tools.hang` names the culprit in each.

All hang at the same time and are examined meanwhile. Seven hang one run of train.py, one after
another (tests/hangs.py::Tour); the others have separate ranks, which run collectives and no model.
"""

import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from parallelisms.pp import stages_of
from reliability import position
from tests import fork_server, hangs
from tests.hosts import (
    ADDRESSES,
    Hosts,
    hosts,  # noqa: F401  a fixture
)
from tests.launched import Launcher, ended
from tests.programs import ROOT
from tests.ranks import WORKERS, run_ranks, step_timeout, wait_until
from tests.runs import TINY, tiny_run
from tools import hang

pytestmark = pytest.mark.waits
RANKS = 4
PATIENCE = 30.0  # seconds in which a way must be named

# way: the culprits, and what the first lines say of them
EXPECTED = {
    "sleeps in forward": (
        [1],
        "rank 1 .*: forward of layers.1, microbatch 2 of step 2, at tests/hangs.py:.* hold, waits "
        "for no rank .*sleeps in forward.; 3 wait in its all_gather #",
    ),
    "sleeps in backward": (
        [2],
        "rank 2 .*: backward of layers.0, microbatch 2 of step 3, at tests/hangs.py:.* hold, waits "
        "for no rank .*sleeps in backward.; 3 wait in its all_reduce #",
    ),
    "sleeps in data": (
        [3],
        "rank 3 .*: data, step 4, at tests/hangs.py:.* hold, waits for no rank .*; 3 wait in its",
    ),
    "sleeps in a save": (
        [0],
        "rank 0 .*: save, step 5, at tests/hangs.py:.* hold, waits for no rank .*; 3 wait in its",
    ),
    "stopped": (
        [1],
        "rank 1 .*: forward, step 7, waits for no rank .its process does not answer: it is stopped "
        ".*; .*3 wait in its all_reduce #",  # a save may wait for it, too
    ),
    "a data worker loops": (
        [3],
        "rank 3 .*: data, step 8, .*its worker [0-9]+ computes .*; 3 wait in its all_reduce #",
    ),
    "a disk that blocks": (
        [2],
        "rank 2 .*: save, step 12, at tests/hangs.py:.* fill, waits for no rank .*; . waits? in its",
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
    return verdict.stuck and verdict.culprits == culprits and re.match(words, said) is not None


class Hung:
    """Ranks that hang, or will."""

    def __init__(
        self, folder: Path, function: Callable, *arguments: object, size: int = RANKS
    ) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        self.ranks = [
            fork_server.start(function, folder, rank, size, *arguments) for rank in range(size)
        ]

    def end(self) -> None:
        for process in self.ranks:
            fork_server.end(process)

    def until(self, right: Callable[[hang.Verdict], bool]) -> hang.Verdict:
        """Return the verdict when it is right, twice in a row; the last one where it is not in
        time."""
        deadline = time.monotonic() + PATIENCE * WORKERS
        verdict = hang.Verdict([], ["the ranks have left nothing"], False)
        found = 0
        while found < 2 and time.monotonic() < deadline:
            time.sleep(0.3)
            if list(self.folder.glob("logs/*.position")):
                verdict = hang.judge(hang.read(self.folder))
            found = found + 1 if right(verdict) else 0
            through = list(self.folder.glob("through-*"))
            assert not through, f"{through[0]}: {through[0].read_text()}"
        return verdict


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def verdicts(place: Path) -> Iterator[dict[str, hang.Verdict]]:
    """By way; a copy of the run's logs in each way is in `place`."""
    place.joinpath("data").mkdir()
    run = Hung(place / "run", hangs.tour_rank, tiny_run(place / "data"))
    alone = {name: Hung(place / name, hangs.light_rank, getattr(hangs, name)) for name in ALONE}
    try:
        found = {way: hung.until(partial(names, way)) for way, hung in alone.items()}
        for way in hangs.OF_A_RUN:
            found[way] = run.until(partial(names, way))
            copy_logs(run, way, place / way)
            go_on(run, way)
        yield found
    finally:
        for hung in (run, *alone.values()):
            hung.end()


ALONE = ("leaves_one_out", "other_order", "other_size", "two_groups")


def copy_logs(run: Hung, way: str, to: Path) -> None:
    """Copy the logs of ranks that hang, again where a rank wrote one of them meanwhile."""
    for _ in range(5):
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(run.folder / "logs", to / "logs")
        if names(way, hang.judge(hang.read(to))):
            return
        time.sleep(0.3)


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


@pytest.mark.slow
def test_the_network_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """Two ranks on each of two hosts, between which the cable is cut."""
    hung = Hung(tmp_path / "run", hangs.cut_off, hosts.names)
    try:
        wait_until(lambda: len(list(hung.folder.glob("at-*"))) == RANKS)
        hosts.cable("down")
        verdict = hung.until(of_network)
    finally:
        hung.end()
        hosts.cable("up")
    assert of_network(verdict), "\n".join(verdict.lines)


@pytest.mark.parametrize(
    "mapped",
    [pytest.param(False, id="IPv4"), pytest.param(True, id="IPv6 socket", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("end", [0, 1], ids=["own end", "other end"])
def test_an_address_that_acknowledges_nothing_is_listed(
    end: int, mapped: bool, hosts: Hosts, tmp_path: Path
) -> None:
    """Cut the cable at one end, before data is written: the kernel probes without a route, and
    sends again with one."""
    sends = fork_server.start(hangs.send_over_a_cable, tmp_path, hosts.names, mapped)
    try:
        wait_until((tmp_path / "connected").exists)
        hosts.cable("down", (end,))
        (tmp_path / "cut").touch()
        wait_until(lambda: ADDRESSES[1] in _listed(tmp_path))
    finally:
        fork_server.end(sends)
        hosts.cable("up")
    assert _listed(tmp_path)[0] == ""


def _listed(folder: Path) -> list[str]:
    listed = folder / "listed"
    return listed.read_text().split("\n") if listed.exists() else []


def of_network(verdict: hang.Verdict) -> bool:
    said = "\n".join(verdict.lines)
    here, there = ADDRESSES
    between = f"rank [01] .* to {there}|rank [23] .* to {here}"
    whole = f"the network does not answer what was sent by .*({between}).*\nall have come to "
    return bool(verdict.culprits) and re.match(whole, said) is not None


# Controls ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_negative_control_positions_that_stand_still_name_another(
    verdicts: dict[str, hang.Verdict], place: Path, tmp_path: Path
) -> None:
    """Files of all ranks, or of the culprit, that were not written since the way before."""
    before, now = "sleeps in forward", "sleeps in backward"
    assert names(now, hang.judge(hang.read(place / now)))
    assert not names(now, hang.judge(hang.read(place / before)))
    shutil.copytree(place / now, tmp_path / "mixed")
    culprit = "logs/rank-00002.position"
    shutil.copy(place / before / culprit, tmp_path / "mixed" / culprit)
    assert not names(now, hang.judge(hang.read(tmp_path / "mixed")))


@pytest.mark.slow
def test_negative_control_without_flights_a_missing_call_is_not_named(
    verdicts: dict[str, hang.Verdict], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / "leaves_one_out"
    assert names("leaves_one_out", hang.judge(hang.read(run)))
    real = hang.text

    def without_flights(data: bytes, at: int) -> dict:
        return {key: value for key, value in real(data, at).items() if key != "flights"}

    monkeypatch.setattr(hang, "text", without_flights)
    assert not names("leaves_one_out", hang.judge(hang.read(run)))


# The cost ------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """The names of all operators, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def steps_of(options: list[str], folder: Path) -> tuple[list, list, list, int]:
    """Return the operators and losses of a step without and with positions, of the same job and
    batch; graph breaks and graphs of both; how often the positions were written."""
    job = train.build(load_config(options, dist.get_world_size()))
    numbers = torch.randint(0, 263, (2, 1, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": numbers[..., :-1], "labels": numbers[..., 1:]}
    here = position.Position(folder / f"{dist.get_rank()}.position", dist.get_rank())

    def step() -> tuple[list[str], float]:
        if job.cfg.compile.enabled:
            return [], train.train_step(job, batch).loss
        with Operators() as seen:
            loss = train.train_step(job, batch).loss
        return seen.names, loss

    def graphs() -> tuple[int, int]:
        found = torch._dynamo.utils.counters
        return sum(found["graph_break"].values()), found["stats"]["unique_graphs"]

    job.optimizer.step = lambda: None  # the same weights again
    step()  # makes what only the first one makes
    without, before = step(), graphs()
    here.open()
    here.follow(stages_of(job.model), job.optimizer, 0)
    moves = here.moves
    with_positions, after = step(), graphs()
    moves = here.moves - moves
    here.close(failed=False)
    return without, with_positions, [before, after], moves


MESHES_OF_COST = {
    "fsdp2": (2, []),
    "fsdp2, compiled": (2, ["--compile.enabled=true", "--compile.backend=eager"]),
    "pp2": (2, ["--parallelism.pipeline_parallel=2"]),
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=() if mesh == "fsdp2" else pytest.mark.slow)
        for mesh in MESHES_OF_COST
    ],
)
def test_positions_add_no_operator_and_no_graph(mesh: str, tmp_path: Path) -> None:
    """A position is written for each block in forward and in backward, but by no operator."""
    ranks, options = MESHES_OF_COST[mesh]
    given = [*small(), *options]
    for without, with_positions, (before, after), moves in run_ranks(
        ranks, steps_of, given, tmp_path
    ):
        assert without == with_positions and (without[0] or "compiled" in mesh)
        assert before == after and before[0] == 0 and (before[1] > 0) == ("compiled" in mesh)
        blocks = 1 if "pipeline" in str(options) else 2
        assert moves == 2 * (2 * blocks + 2)


def small() -> list[str]:
    return [
        *(option for option in TINY if not option.startswith("--training.global_batch_size")),
        "--training.local_batch_size=1",
        "--training.global_batch_size=4",
    ]


# The launcher ---------------------------------------------------------------------------------------

WRAPPER = """
import sys, train
from tests import hangs
hangs.leave_out_a_sum()
sys.exit(train.main())
"""


@pytest.mark.slow
def test_the_launcher_says_where_everyone_was(tmp_path: Path) -> None:
    """The launcher says it when it ends a run that hangs; and the tool says the same afterwards."""
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    folder = tmp_path / "run"
    given = [f"--run.folder={folder}", *tiny_run(tmp_path), step_timeout(4)]
    words = ["--nproc-per-node=2", tmp_path / "wrapper.py", *given]
    (code,), said = ended([Launcher(words, tmp_path / "said")], 100)
    assert code not in (0, 2, 75), said
    assert "launch: where everyone was:\n" in said, said
    where = said.partition("launch: where everyone was:\n")[2]
    assert re.match("ranks 0, 1 run another collective than the rest as #", where), said
    verdict = hang.judge(hang.read(folder))
    assert verdict.stuck and where.startswith("\n".join(verdict.lines)), verdict
    assert hang.main([str(folder)]) == 1


# The command ----------------------------------------------------------------------------------------


def test_a_folder_without_positions_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A folder whose only file is half written is one too."""
    (tmp_path / "logs").mkdir()
    assert hang.main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"{tmp_path} has no positions of ranks" in said.err and not said.out
    (tmp_path / "logs" / "rank-00000.position").write_bytes(position.MAGIC)
    assert hang.main([str(tmp_path)]) == 2


def test_a_run_that_moves_or_is_over_hangs_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A file of a start with more ranks is not read."""
    (tmp_path / "logs").mkdir()
    older = position.Position(tmp_path / "logs" / "rank-00005.position", 5)
    older.open()
    older.close(failed=True)
    here = position.Position(tmp_path / "logs" / "rank-00000.position", 0)
    here.open()
    here.begin("data")
    assert hang.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no rank is stuck: step 1\n"
    here.close(failed=True)
    assert hang.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no rank was stuck before the end: step 1\n"
    here.close(failed=False)
    assert hang.main([str(tmp_path)]) == 0
    assert "all have come to the end" in capsys.readouterr().out


def test_a_rank_that_was_stopped_and_woke_to_end_did_not_answer(tmp_path: Path) -> None:
    """Its heartbeat thread never ran again: on a busy machine the rank's own end comes first. Rank
    0 had given up before."""
    (tmp_path / "logs").mkdir()
    now = time.time()
    for rank, looked in (0, now), (1, now - 20):
        here = position.Position(tmp_path / "logs" / f"rank-0000{rank}.position", rank)
        here.open()
        here.begin("forward")
        position.WHO.pack_into(here.memory, 0, position.MAGIC, rank, 2, os.getpid(), now)
        position.SEEN.pack_into(here.memory, position.SEEN_AT, looked, looked, 0.0, 0.0, 0.0)
        here.close(failed=True)
        if rank == 0:
            seen = list(position.SEEN.unpack_from(here.memory, position.SEEN_AT))
            seen[2] = now - 5
            position.SEEN.pack_into(here.memory, position.SEEN_AT, *seen)
    with mock.patch.object(hang, "understand", lambda *_: None):
        assert [rank.silent for rank in hang.read(tmp_path)] == [False, True]


HEARTBEAT = 'Thread 0x1 (most recent call first):\n  File "{}/position.py", line 195 in _watch\n\n'
MAIN = """{} 0x2 (most recent call first):
  File "{}/.venv/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "<frozen runpy>", line 88 in _run_code
  File "train.py", line 300 in accumulate_gradients
  File "{}/training/graphs.py", line 33 in directly
"""


@pytest.mark.parametrize("title", ["Current thread", "Thread"])
def test_the_line_of_stacks_is_the_innermost_of_ours(title: str, tmp_path: Path) -> None:
    """Of a process that was stopped no thread runs Python, so none is the current one."""
    stacks = tmp_path / "rank-00001.stacks"
    stacks.write_text(HEARTBEAT.format(ROOT / "reliability") + MAIN.format(title, ROOT, ROOT))
    assert hang.line_of_stacks(stacks, 0.0) == "train.py:300 accumulate_gradients"


@pytest.mark.parametrize("name", ["train.py", ROOT / "train.py"])
def test_lines_of_the_script_are_our_own(name: str | Path) -> None:
    """Python gives the script of a process the name with which it was started."""
    names: dict = {}
    other = ROOT / ".venv" / "lib" / "site-packages" / "other.py"
    exec(compile("def of_other(look): return look()", other, "exec"), names)
    exec(compile("def step(look): return of_other(look)", name, "exec"), names)
    lines = names["step"](lambda: position.own_lines(sys._getframe()))
    assert lines[:2] == [lines[0], "train.py:1 step"] and "<lambda>" in lines[0], lines


def test_a_dump_that_is_a_program_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(pickle.dumps({"entries": []}))
    (tmp_path / "half").write_bytes(pickle.dumps({"entries": []})[:-3])
    (tmp_path / "program").write_bytes(pickle.dumps({"entries": [Path("x")]}))
    assert [hang.read_dump(path) for path in sorted(tmp_path.iterdir())] == [[], [], []]


def test_ranks_are_short_where_they_are_many() -> None:
    assert position.as_range([0, 1, 5]) == [0, 1, 5]
    assert position.as_range(list(range(3, 4096, 8))) == {"start": 3, "stop": 4092, "step": 8}
    assert position.as_range([0, 1, 2, 3, 4, 5, 6, 7, 9]) == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert hang.ranks_of(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
