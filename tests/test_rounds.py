"""Runs that lose ranks go on without them, and with others again (checkpoint/rounds.py).

    python -m pytest tests/test_rounds.py -m "slow or torture"          exhaustive: many more trials

Ranks are killed with kill -9, or frozen, at a random moment; all steps' losses and gradient norms,
and the weights at the end, are those of one process that nothing happened to, in float64 to 1e-12,
with clipping in force.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoint import joining, verify
from configs.load import load_config
from configs.rounds import NO_STATE, WholeMesh, next_round
from configs.schema import InputError
from tests.checkpoints import saved_state
from tests.hosts import (
    ADDRESSES,
    Hosts,
    enter,
    hosts,  # noqa: F401  a fixture
)
from tests.launched import Launcher, ended
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks, step_timeout, wait_until
from tests.runs import TINY, as_typed, free_port, run, series, tiny_run
from tools import hang

pytestmark = [pytest.mark.waits, pytest.mark.cap(300)]
STEPS = 40
EXPERTS = (
    "--model.family=qwen3 --model.flavor=debug_moe --model.n_experts=4 --model.experts_per_token=2 "
    "--model.expert_dim=12"
).split()
# name: (ranks, options of the mesh, of the model)
MESHES = {
    "hsdp2x2": (4, "data_parallel_replicate=2", []),
    "ddp2": (2, "data_parallel_replicate=2", []),
    "ddp3": (3, "data_parallel_replicate=3", []),
    "hsdp2xtp2": (4, "data_parallel_replicate=2 tensor_parallel=2", []),
    "hsdp2xpp2": (4, "data_parallel_replicate=2 pipeline_parallel=2", []),
    "hsdp2xcp2": (4, "data_parallel_replicate=2 context_parallel=2", []),
    "hsdp2xep2": (4, "data_parallel_replicate=2 expert_parallel=2", EXPERTS),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], list[str]]:
    """Return the options of a run of this model, which has been trained by one process in `whole`."""
    made: dict[str, list[str]] = {}

    def train_once(model: list[str]) -> list[str]:
        name = " ".join(model)
        if name not in made:
            place = tmp_path_factory.mktemp("run")
            made[name] = as_typed([*tiny_run(place), *MORE, *model])
            (place / "whole").mkdir()
            assert run_ranks(1, run, made[name], place / "whole") == [(0, "")]
        return made[name]

    return train_once


MORE = (
    f"--training.steps={STEPS} --training.param_dtype=float64 --training.global_batch_size=12 "
    "--training.local_batch_size=1 --training.max_norm=0.2 --checkpoint.interval=0"
).split()


# A run may fail at one step as often as it likes.
AGAIN_AND_AGAIN = """
import train
from reliability import record
record.MOST_FAILURES = 10**9
"""


# train.py with slower steps, so that ranks that have come can join before the last
PACED = """
import sys, time, train
real_step = train.train_step
def train_step(*arguments):
    time.sleep(0.1)
    return real_step(*arguments)
train.train_step = train_step
sys.exit(train.main())
"""


# The same: while a replica is lost, a step takes up to a second, until it has come
WAITING = """
import time, train as waiting
from checkpoint.rounds import Door
def wait_for_others(*arguments, step=waiting.train_step):
    here = Door.here
    for _ in range(50):
        is_alone = here.round and here.round.replicas == 1
        if (here.number == 1 or is_alone) and not here.run.stop.called:
            time.sleep(0.02)
    return step(*arguments)
waiting.train_step = wait_for_others
"""


SLOW_AFTER_A_LOSS = """
import time, train as slow
from checkpoint.rounds import Door
def slow_step(*arguments, step=slow.train_step):
    time.sleep(0.3 * (Door.here.number > 0))
    return step(*arguments)
slow.train_step = slow_step
"""


# replicas, ranks of each, steps by slot: the slots, replicas, source and microbatch's rows of the next
# round, and whether all of them have the state
CHOICES = [
    (2, 2, {0: 7, 1: 7}, ([0, 1], 1, 0, 2, True)),
    (2, 2, {0: 7, 1: 7, 3: 7}, ([0, 1], 1, 0, 2, True)),
    # one is ahead: the update was under way
    (2, 2, {0: 7, 1: 7, 2: 8, 3: 8}, ([0, 1, 2, 3], 2, 1, 2, False)),
    # the ranks of one differ, so the other's state counts
    (2, 2, {0: 7, 1: 8, 2: 7, 3: 7}, ([0, 1, 2, 3], 2, 1, 2, False)),
    # one is new
    (2, 2, {0: NO_STATE, 1: NO_STATE, 2: 7, 3: 7}, ([0, 1, 2, 3], 2, 1, 2, False)),
    # three do not divide the batch of eight: one row is padding
    (4, 1, {0: 7, 1: 7, 3: 7}, ([0, 1, 3], 3, 0, 2, True)),
    (2, 2, {0: 7, 1: 8, 2: 7}, None),
    (2, 2, {0: NO_STATE, 1: NO_STATE}, None),
]


@pytest.mark.parametrize("replicas, ranks, steps, expected", CHOICES)
def test_who_goes_on(
    replicas: int, ranks: int, steps: dict[int, int], expected: tuple | None
) -> None:
    argv = [*TINY, f"--parallelism.data_parallel_replicate={replicas}", "--run.fault_tolerant=true"]
    cfg = load_config(argv, replicas * ranks, replicas * ranks)
    mesh = WholeMesh.of(cfg, replicas * ranks)
    found = next_round(argv, cfg, mesh, steps, replicas * ranks)
    if expected is None:
        assert found is None
        return
    slots, count, source, rows, whole = expected
    assert (found.slots, found.replicas, found.source, found.whole) == (slots, count, source, whole)
    assert f"--training.local_batch_size={rows}" in found.options


@pytest.mark.parametrize(
    "option",
    [
        "checkpoint.peers=1 --checkpoint.peer_interval=3",
        "debug.replica_check_interval=5",
        "run.fault_tolerant=true --debug.leave_out_odd_replica=true --debug.replica_check_interval=5",
    ],
)
def test_one_replica_goes_on_without_options_of_several(option: str) -> None:
    """Each is refused where there is but one replica, or one host."""
    argv = [*TINY, "--parallelism.data_parallel_replicate=2", *f"--{option}".split()]
    cfg = load_config(argv, 4, 2)
    found = next_round(argv, cfg, WholeMesh.of(cfg, 4), {0: 7, 1: 7}, 2)
    assert found.slots == [0, 1]
    both = next_round(argv, cfg, WholeMesh.of(cfg, 4), dict.fromkeys(range(4), 7), 2)
    assert load_config([*argv, *both.options], 4, 2) == cfg
    with pytest.raises(InputError, match=r"training\.steps"):
        next_round([*argv, "--training.steps=0"], cfg, WholeMesh.of(cfg, 4), {0: 7, 1: 7}, 2)


def test_ranks_of_a_pipeline_belong_to_one_replica() -> None:
    """The stages are outermost in the mesh."""
    mesh = WholeMesh(pp=2, replicas=2, rest=2)
    assert mesh.slots([0]) == [0, 1, 4, 5] and mesh.slots([1]) == [2, 3, 6, 7]


class Run:
    """A run on several hosts of this machine, each a launcher."""

    def __init__(
        self,
        options: list[str],
        folder: Path,
        hosts: int,
        ranks: int,
        restarts: int,
        more: str,
        spares: int = 0,
        net: Hosts | None = None,
    ) -> None:
        self.folder = folder
        self.net = net
        steps = [o.partition("=")[2] for o in options if o.startswith("--training.steps=")]
        self.last = int(steps[-1])
        self.place = Path(
            next(o for o in options if o.startswith("--data.cache=")).partition("=")[2]
        ).parent
        self.flags = [f"--nproc-per-node={ranks // hosts}", f"--max-restarts={restarts}"]
        if hosts > 1:
            port = f"--master-port={free_port()}"
            nodes = f"--nnodes={hosts}:{hosts + spares}"
            self.flags += [nodes, f"--master-addr={ADDRESSES[0] if net else '127.0.0.1'}", port]
        script = folder.parent / "paced.py"
        script.write_text(AGAIN_AND_AGAIN + more + PACED)
        self.words = [
            script,
            *options,
            step_timeout(5),
            f"--run.folder={folder}",
            "--run.fault_tolerant=true",
        ]
        self.starts = 0
        self.launchers = {host: self.start(host) for host in range(hosts + spares)}

    def start(self, host: int) -> Launcher:
        self.starts += 1
        said = self.folder.parent / f"said-{self.starts}"
        words = [*self.flags, f"--node-rank={host}", *self.words]
        if self.net is None:
            return Launcher(words, said)
        begin = partial(enter, self.net.names[host])
        return Launcher(words, said, begin, GLOO_SOCKET_IFNAME="cable")

    def ranks(self, host: int) -> list[int]:
        return self.ranks_of(self.launchers[host])

    def ranks_of(self, launcher: Launcher) -> list[int]:
        """Return the processes that are ranks of a host: each leads a session."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            is_child = int(fields[1]) == launcher.process.pid
            if is_child and int(fields[3]) == int(process.name) and fields[0] != "Z":
                found.append(int(process.name))
        return sorted(found)

    def of_rank(self, rank: int) -> int:
        """Return the process of a rank of the first round."""
        return hang.read_rank(self.folder / "logs" / f"rank-{rank:05d}.position").process

    def step(self) -> int:
        path = self.folder / "metrics.jsonl"
        while path.exists():
            with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
                return max(series(self.folder), default=0)
        return 0

    def wait_for(self, step: int) -> None:
        def codes() -> list[int | None]:
            return [launcher.poll() for launcher in self.launchers.values()]

        wait_until(
            lambda: self.step() >= step,
            complaint=lambda: f"exit codes {codes()}\n{self.where()}{self.said()}",
            every=0.01,
            over=lambda: None not in codes(),
        )

    def wait_for_words(self, words: str) -> None:
        is_over = lambda: self.launchers[0].poll() is not None  # noqa: E731
        wait_until(lambda: words in self.said(), 300, self.said, over=is_over)

    def where(self) -> str:
        """Return what tools.hang says of the ranks."""
        return finished(PYTHON, "-m", "tools.hang", self.folder).stdout

    def said(self) -> str:
        texts = [path.read_text() for path in sorted(self.folder.parent.glob("said-*"))]
        return "\n".join(texts)

    def end(self) -> list[int]:
        codes, _ = ended(list(self.launchers.values()))
        return codes


def check(run: Run, about: str = "", losses: int = 1) -> None:
    """Compare all of a run with that of one process. Experts amplify rounding: on their mesh a run
    that nothing happened to differs as much. losses: how often the line of a step may be missing,
    because ranks were lost in the messages that follow its update."""
    bound = 1e-10 if "qwen3" in " ".join(map(str, run.words)) else 1e-12
    for key in ("loss", "grad_norm"):
        expected, found = series(run.place / "whole", key), series(run.folder, key)
        missing = expected.keys() - found.keys()
        assert len(missing) <= losses and found.keys() <= expected.keys(), about or run.said()
        for step in found:
            value = expected[step]
            assert found[step] == pytest.approx(value, rel=bound), (step, about or run.said())
    expected, found = saved_state(run.place / "whole"), saved_state(run.folder)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=100 * bound, atol=bound)


def begin(
    whole: Callable,
    mesh: str,
    folder: Path,
    hosts: int = 1,
    restarts: int = 0,
    more: str = "",
    length: Sequence[str] = (),
    options: Sequence[str] = (),
    spares: int = 0,
    net: Hosts | None = None,
) -> Run:
    """more: what the ranks' script does before it trains; length: options of a longer run; options:
    that the run of one process does not have."""
    ranks, degrees, model = MESHES[mesh]
    mesh_options = [f"--parallelism.{degree}" for degree in degrees.split()]
    given = as_typed([*whole([*model, *length]), *mesh_options, *options])
    return Run(given, folder, hosts, ranks, restarts, more, spares, net)


OTHERS_LOSE = ("hsdp2x2", "ddp3")  # meshes of which the tests below lose ranks


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=() if mesh == "ddp2" else pytest.mark.slow)
        for mesh in MESHES
        if mesh not in OTHERS_LOSE
    ],
)
def test_a_run_goes_on_without_a_lost_rank(mesh: str, whole: Callable, tmp_path: Path) -> None:
    run = begin(whole, mesh, tmp_path / "run", length=["--training.steps=20"])
    run.wait_for(5)
    os.kill(run.of_rank(1), signal.SIGKILL)
    assert run.end() == [0], run.said()
    assert "replicas go on after step" in run.said()
    ended = json.loads((run.folder / "starts" / "0001" / "end.json").read_text())
    assert ended["reason"].startswith("ranks were lost: "), ended
    check(run)


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "negative control: not sent"])
def test_a_rank_that_comes_back_gets_the_state(
    is_sent: bool, whole: Callable, tmp_path: Path
) -> None:
    more = WAITING if is_sent else WAITING + NOT_SENT
    run = begin(whole, "hsdp2x2", tmp_path / "run", restarts=1, more=more)
    run.wait_for(5)
    os.kill(run.of_rank(0), signal.SIGKILL)
    assert run.end() == [0], run.said()
    assert "2 of 2 replicas go on" in run.said()
    log = (run.folder / "logs" / "rank-00000.log").read_text()
    assert "all ranks meet those that have come" in log and "stopped on request" not in log
    if is_sent:
        check(run)
    else:
        with pytest.raises(AssertionError):
            check(run)


NOT_SENT = """
from checkpoint import rounds
rounds._broadcast = lambda *arguments: None
"""


FLIPPED = """
import torch, train as flipped, parallelisms.mesh
step_of_train, calls = flipped.train_step, []
def flipping(job, *arguments):
    result = step_of_train(job, *arguments)
    calls.append(job)
    if len(calls) == 7 and parallelisms.mesh.world().rank == 1:
        weight = next(job.model.parameters()).detach().to_local().view(torch.int64)
        weight.view(-1)[3] ^= 1
    return result
flipped.train_step = flipping
"""


@pytest.mark.slow
def test_the_odd_replica_is_left_out(whole: Callable, tmp_path: Path) -> None:
    """A last bit flips, which the losses do not show."""
    options = [
        "--debug.leave_out_odd_replica=true",
        "--debug.replica_check_interval=5",
        "--checkpoint.interval=5",
    ]
    more = WAITING + FLIPPED
    run = begin(whole, "ddp3", tmp_path / "run", restarts=1, more=more, options=options)
    assert run.end() == [0], run.said()
    assert "2 of 3 replicas go on after step 10" in run.said()
    assert "3 of 3 replicas go on" in run.said()
    log = (run.folder / "logs" / "rank-00000.log").read_text()
    assert "the others go on without rank 1" in log
    check(run)


FLIPPED_LATER = FLIPPED.replace("== 7", "== 12").replace(
    "world().rank == 1", "world().rank == 0 and os.environ['PLUMBLINE_ROUNDS'] == 'member'"
)
NOT_COMPARED = """
from checkpoint import rounds
rounds._compare = lambda *arguments: None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_compared", [True, False], ids=["compared", "negative control: not compared"]
)
def test_an_odd_replica_gives_its_state_to_no_other(
    is_compared: bool, whole: Callable, tmp_path: Path
) -> None:
    """Rank 0 would send its state to the rank that comes, before the comparison at step 20. After that
    all four have the same state."""
    options = [
        "--debug.leave_out_odd_replica=true",
        "--debug.replica_check_interval=20",
        "--checkpoint.interval=20",
    ]
    more = f'{DIES}dies(3, "train", "train_step", 14)\n{WAITING}{FLIPPED_LATER}'
    more += "" if is_compared else NOT_COMPARED
    options = [*whole([]), f"--parallelism.{FOUR}", *options]
    run = Run(options, tmp_path / "run", 1, 4, 3, more)
    assert run.end() == [0], run.said()
    assert ("was seen before ranks that are new got it: rank 0" in run.said()) == is_compared
    assert ("rank 0 on" in run.said()) == is_compared
    check(run, losses=2)


@pytest.mark.slow
def test_without_a_whole_replica_all_start_again(whole: Callable, tmp_path: Path) -> None:
    """By one restart, however many ranks were lost."""
    run = begin(whole, "hsdp2x2", tmp_path / "run", restarts=1)
    run.wait_for(5)
    for rank in 1, 2:
        os.kill(run.of_rank(rank), signal.SIGKILL)
    assert run.end() == [0], run.said()
    assert "no replica is left whole" in run.said() and "launch: restart 1 of 1" in run.said()
    check(run)


@pytest.mark.slow
def test_hosts_share_the_restarts(whole: Callable, tmp_path: Path) -> None:
    """Host 0 has used the one that there is, so host 1 does not wait for it to start again."""
    run = begin(whole, "ddp2", tmp_path / "run", hosts=2, restarts=1, more=WAITING)
    run.wait_for(5)
    os.kill(run.ranks(0)[0], signal.SIGKILL)
    run.wait_for_words("2 of 2 replicas go on")
    run.wait_for(run.step() + 2)
    for host in 0, 1:
        os.kill(run.ranks(host)[0], signal.SIGKILL)
    assert run.end() == [137, 137], run.said()
    assert "launch: restart" not in run.said()


@pytest.mark.slow
def test_edits_have_no_part_in_a_run_that_goes_on(whole: Callable, tmp_path: Path) -> None:
    """Its configuration is edited, for another run. Then a rank is lost, whose successor reads that."""
    file = tmp_path / "edited.toml"
    file.write_text("[optimizer]\nlr = 0.01\n")
    options = [option for option in whole([]) if not option.startswith("--optimizer.lr=")]
    options += [f"--parallelism.{MESHES['ddp3'][1]}"]
    run = Run([str(file), *options], tmp_path / "run", 1, 3, 1, SLOW_AFTER_A_LOSS)
    run.wait_for(5)
    file.write_text("[optimizer]\nlr = 0.1\n")
    os.kill(run.of_rank(1), signal.SIGKILL)
    assert run.end() == [0], run.said()
    assert "2 of 3 replicas go on" in run.said() and "3 of 3" not in run.said()
    assert "optimizer.lr was 0.01 and is 0.1" in run.said()
    check(run)
    for start in (run.folder / "starts").iterdir():
        assert (start / "given.toml").read_text() == "[optimizer]\nlr = 0.01\n"


def test_a_rank_with_other_code_does_not_join() -> None:
    began = {"options": {"run.seed": 1}, "files": {"train.py": "a", "models/llama.py": "b"}}
    joining.refuse(began, began)
    with pytest.raises(InputError, match=r"otherwise: added\.py is another; train\.py is another"):
        files = {"train.py": "c", "models/llama.py": "b", "added.py": "d"}
        joining.refuse(began, began | {"files": files})


@pytest.mark.slow
def test_a_host_that_is_started_twice_waits(whole: Callable, tmp_path: Path) -> None:
    run = begin(whole, "ddp3", tmp_path / "run", hosts=3)
    run.wait_for(5)
    second = run.start(2)
    assert run.end() == [0, 0, 0], run.said()
    assert ended([second])[0] == [0] and "go on" not in run.said()
    check(run, losses=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_takes_the_place_of_a_lost_host(
    number: int, whole: Callable, tmp_path: Path
) -> None:
    """A host that was stopped, and comes back after that, takes no part any more."""
    run = begin(whole, "ddp2", tmp_path / "run", hosts=2, spares=1, more=WAITING)
    run.wait_for(5)
    lost = run.launchers.pop(1)
    of_host = [lost.process.pid, *run.ranks_of(lost)]
    for process in of_host:
        os.kill(process, number)
    run.wait_for_words("2 of 2 replicas go on")
    for process in of_host if number == signal.SIGSTOP else []:
        os.kill(process, signal.SIGCONT)
    assert run.end() == [0, 0], run.said()
    assert "node 2 takes the place of node 1" in run.said()
    assert ended([lost])[0] != [0]
    check(run)


@pytest.mark.slow
def test_a_cable_that_is_cut_costs_its_replica_once(
    hosts: Hosts,
    whole: Callable,
    tmp_path: Path,
) -> None:
    """No side hears that the other is gone. When the cable is back TCP waits about as long again as
    it was cut; a launcher whose signs of life came so late had its ranks lost again and again. On a
    slow machine a first try to join may come too late."""
    length = ["--training.steps=100", "--optimizer.lr=1e-4"]
    run = begin(whole, "hsdp2x2", tmp_path / "run", 2, more=WAITING, length=length, net=hosts)
    run.wait_for(5)
    hosts.cable("down", (1,))
    time.sleep(28)
    hosts.cable("up", (1,))
    assert run.end() == [0, 0], run.said()
    rounds = [line for line in run.said().splitlines() if "replicas go on" in line]
    assert "1 of 2" in rounds[0] and "2 of 2" in rounds[-1] and len(rounds) <= 3, rounds
    assert "node 1 has given no sign of life for 5 s" in run.said()
    check(run)


@pytest.mark.slow
def test_a_run_that_goes_on_stops_on_request_and_resumes(whole: Callable, tmp_path: Path) -> None:
    """The signal comes while the ranks meet."""
    run = begin(whole, "hsdp2x2", tmp_path / "run")
    run.wait_for(5)
    os.kill(run.of_rank(1), signal.SIGKILL)
    run.wait_for_words("replicas go on after")
    os.kill(run.launchers[0].process.pid, signal.SIGTERM)
    assert run.end() == [75], run.said()
    run.launchers[0] = run.start(0)
    assert run.end() == [0], run.said()
    check(run)


# the script's first lines: rank SLOT ends at its NUMBERth call of MODULE.FUNCTION, once in a run; or
# the rank that has come in its place
DIES = """
import importlib, os, pathlib, signal
def dies(slot, module, name, number, role="member"):
    place = importlib.import_module(module)
    real, calls = getattr(place, name), []
    mark = pathlib.Path(__file__).with_name(f"{module}.{name}.{number}")
    def call(*arguments, **options):
        calls.append(1)
        if (own, of_this) == (slot, role) and len(calls) == number and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    setattr(place, name, call)
own, of_this = int(os.environ["RANK"]), os.environ["PLUMBLINE_ROUNDS"]
"""
FOUR = "data_parallel_replicate=4"
EIGHT = "--training.global_batch_size=8"  # three replicas share it with a row of padding
STAGES = "--training.stages=[{begin=20,seq_len=32}]"
SAVES = "--validation.interval=10 --checkpoint.interval=10"
# name: (mesh, restarts, options, who dies where)
PHASES = {
    # it takes one restart, and not one more for each rank that waits for it
    "build": (FOUR, 1, EIGHT, [(3, "train", "build", 1)]),
    # no step is done in the second round, which is no start that fails again and again
    "first step": (
        FOUR,
        0,
        f"{EIGHT} --debug.check_collectives=true",
        [(1, "train", "train_step", 12), (2, "train", "train_step", 13)],
    ),
    # a rank that could not open its group, and then waited, meets one that has opened none; then a
    # stage begins
    "meeting": (
        MESHES["hsdp2x2"][1],
        2,
        STAGES,
        [(1, "train", "train_step", 12), (1, "parallelisms.mesh", "open_group", 1, "newcomer")],
    ),
    # rank 0 of that round has taken the run's folder, and is not in the next
    "claim": (
        MESHES["hsdp2x2"][1],
        1,
        "",
        [
            (1, "train", "train_step", 12),
            (1, "checkpoint.place", "on_rank_0", 1, "newcomer"),
        ],
    ),
    # the scores of this step are computed before the save, and again after it has failed
    "save": (MESHES["hsdp2x2"][1], 0, SAVES, [(3, "checkpoint.storage", "write", 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_goes_on_where_a_rank_is_lost(phase: str, whole: Callable, tmp_path: Path) -> None:
    mesh, restarts, options, deaths = PHASES[phase]
    more = DIES + "".join(f"dies{death}\n" for death in deaths)
    if phase == "first step":
        more += "record.MOST_FAILURES = 1\n"
    options = [*whole(options.split()), f"--parallelism.{mesh}"]
    run = Run(options, tmp_path / "run", 1, 4, restarts, more)
    assert run.end() == [0], run.said()
    went_on = "replicas go on after step" in run.said()
    assert went_on != ("launch: restart 1 of 1" in run.said()), run.said()
    check(run)
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    seen = Counter((line["step"], "loss" in line) for line in lines)
    assert set(seen.values()) == {1}, seen


# the first rank that comes lacks its data; the second is told to end while it waits for the others
LATE = """
import threading, train
from checkpoint import rounds
from configs.schema import InputError
def lacks_data(*arguments, **options):
    raise InputError("no such text here")
def is_told_to_end(door, error):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return pass_through(door, error)
pass_through = rounds.Door.pass_through
came = pathlib.Path(__file__).with_name("came")
if os.environ["PLUMBLINE_ROUNDS"] == "newcomer" and came.exists():
    rounds.Door.pass_through = is_told_to_end
elif os.environ["PLUMBLINE_ROUNDS"] == "newcomer":
    came.touch()
    train.open_corpora = lacks_data
"""


@pytest.mark.slow
def test_a_rank_that_comes_late_speaks_not_for_the_run(whole: Callable, tmp_path: Path) -> None:
    more = f'{DIES}dies(3, "train", "train_step", 12)\n{LATE}'
    run = begin(whole, "hsdp2x2", tmp_path / "run", restarts=2, more=more)
    assert run.end() == [75], run.said()
    assert "ended with exit code 2: the replicas that are left go on" in run.said()
    assert run.step() < STEPS and verify.published(run.folder / "checkpoints")
    run.launchers[0] = run.start(0)
    assert run.end() == [0], run.said()
    check(run)


@dataclass(frozen=True)
class Loss:
    """What happens to a run: a rank is killed or frozen, a host is lost and comes back, or its cable
    is cut for a while."""

    steps: int  # that are done after the loss before; 0: the run may still be without that one
    seconds: float  # later
    kind: str  # rank, freeze, host, cable
    host: int
    away: float  # seconds


def losses(rng: random.Random, hosts: int, has_cable: bool) -> Iterator[Loss]:
    kinds = ["rank", "rank", "freeze", *["host"] * 2 * (hosts > 1), *["cable"] * 2 * has_cable]
    while True:
        kind = rng.choice(kinds)
        # node 0 serves the store: when it is lost all ranks are started again
        host = rng.randrange(kind in ("host", "cable"), hosts)
        steps = rng.choice([0, 0, 1, 4, 12])
        seconds = rng.uniform(0, 0.3 if steps else 3.0)
        yield Loss(steps, seconds, kind, host, rng.uniform(0, 2))


def suffer(run: Run, loss: Loss, rng: random.Random) -> None:
    run.wait_for(min(run.step() + loss.steps, run.last - 2))
    time.sleep(loss.seconds)
    if loss.kind == "host":
        run.launchers[loss.host].kill()
        time.sleep(loss.away)
        run.launchers[loss.host] = run.start(loss.host)
    elif loss.kind == "cable":
        run.net.cable("down", (loss.host,))
        time.sleep(8 * loss.away)
        run.net.cable("up", (loss.host,))
    elif ranks := run.ranks(loss.host):
        number = signal.SIGSTOP if loss.kind == "freeze" else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(ranks), number)


# Some losses leave no replica whole: then all ranks start again from a checkpoint. At a higher rate
# of learning rounding grows from step to step.
LONG = (
    "--training.steps=400 --optimizer.lr=1e-4 --checkpoint.interval=10 --checkpoint.keep_last=2"
).split()


def trial(
    whole: Callable,
    folder: Path,
    seed: int,
    most: int,
    length: Sequence[str] = (),
    net: Hosts | None = None,
) -> int:
    """Train through losses, of which at most so many. Returns their number. net: two hosts, on which
    the run is."""
    rng = random.Random(seed)
    mesh = rng.choice([name for name, (ranks, _, _) in MESHES.items() if net is None or ranks != 3])
    # tensor parallelism stays within a host
    hosts = 2 if net else rng.choice([1, 2 if mesh == "hsdp2xtp2" else MESHES[mesh][0]])
    run = begin(whole, mesh, folder / "run", hosts, restarts=1000, length=length, net=net)
    happened: list[Loss] = []
    try:
        run.wait_for(3)
        for loss in itertools.islice(losses(rng, hosts, net is not None), most):
            if run.step() >= run.last - 2:
                break
            happened.append(loss)
            suffer(run, loss, rng)
        codes = run.end()
    finally:
        for launcher in run.launchers.values():
            launcher.kill()
    about = f"{mesh} on {hosts} hosts: {happened}\n{run.said()}"
    assert codes[0] == 0, f"{codes} {about}"
    check(run, about, len(happened))
    return len(happened)


@pytest.mark.torture
@pytest.mark.cap(600)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_goes_on_whatever_is_lost(seed: int, whole: Callable, tmp_path: Path) -> None:
    assert trial(whole, tmp_path, seed, 3)


@pytest.mark.exhaustive
@pytest.mark.cap(1800)
@pytest.mark.parametrize("seed", range(3, 60))
def test_a_run_goes_on_whatever_is_lost_again_and_again(
    seed: int, whole: Callable, tmp_path: Path
) -> None:
    print(f"seed {seed}: {trial(whole, tmp_path, seed, 100, LONG)} losses")


@pytest.mark.exhaustive
@pytest.mark.cap(1800)
@pytest.mark.parametrize("seed", range(60, 70))
def test_a_run_goes_on_whatever_link_is_cut(
    seed: int, hosts: Hosts, whole: Callable, tmp_path: Path
) -> None:
    print(f"seed {seed}: {trial(whole, tmp_path, seed, 100, LONG, hosts)} losses")
