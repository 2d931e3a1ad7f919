"""Restart without a scheduler: the launcher starts the ranks again, and the run equals the
undisturbed one.

The ranks are separate processes under tools.launch (tests/launched.py); faults are put into them by
a script around train.py (tests/faults.py): FAULT is "RANK WHAT
STEP STARTS", or several with ";" between them.
"""

import itertools
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from reliability.goodput import account, read
from tests.faults import WRAPPER
from tests.launched import Launcher, ended, nothing_first
from tests.ranks import WORKERS, run_ranks, step_timeout, wait_until
from tests.runs import STEPS, free_port, run, samples, series, tiny_run
from tools.launch import launcher as launch

pytestmark = pytest.mark.waits
# rank 1 waits until these are published, which other steps do not wait for
AFTER_5, AFTER_10 = (f"1 wait:checkpoints/step-{step:08d}" for step in (5, 10))
NUMBER = itertools.count()  # of what a launcher says


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("run")
    made = tiny_run(place)
    (place / "whole").mkdir()
    (place / "wrapper.py").write_text(WRAPPER)
    assert run_ranks(2, run, made, place / "whole") == [(0, "")] * 2
    return made


def place(options: list[str]) -> Path:
    return Path(next(o for o in options if o.startswith("--data.cache=")).partition("=")[2]).parent


def nodes(
    options: list[str],
    folder: Path,
    fault: str,
    *flags: str,
    each: int = 2,
    script: str = "wrapper.py",
    prepare: Callable[[], None] = nothing_first,
) -> list[Launcher]:
    """Return the launchers, one for each `--node-rank` in flags, or the only one."""
    ranks = [flag for flag in flags if flag.startswith("--node-rank")] or ["--node-rank=0"]
    flags = [flag for flag in flags if flag not in ranks]
    before = [f"--nproc-per-node={each}", *flags]
    after = [place(options) / script, f"--run.folder={folder}", *options]
    launchers = []
    for rank in ranks:
        said = folder.parent / f"said-{next(NUMBER)}"
        launchers.append(Launcher([*before, rank, *after], said, prepare, FAULT=fault))
    return launchers


def how_it_went(folder: Path) -> str:
    found = account(read(folder)).per_event()
    return "; ".join(f"{name} {value:.2f}" for name, value in found.items())


@pytest.mark.slow
@pytest.mark.cap(400)
def test_after_a_kill_a_freeze_and_a_hang_the_run_equals_the_uninterrupted_one(options, tmp_path):
    """The run is bitwise equal, and the launcher names the rank each time. Prints (-s) the seconds
    of stall, detection and restart, and the steps that were redone."""
    faults = f"{AFTER_5} 8 1; 1 SIGKILL 8 1; 1 SIGSTOP 9 2; {AFTER_10} 13 3; 1 hang 13 3"
    more = [*options, step_timeout(5)]
    codes, said = ended(nodes(more, tmp_path / "run", faults, "--max-restarts=3"), 250)
    assert codes == [0], said
    assert re.findall("launch: restart (.) of 3", said) == ["1", "2", "3"], said
    kill, freeze, hang, _ = re.split("launch: restart . of 3", said)
    for words, how in (kill, "was killed by SIGKILL"), (freeze, "is frozen"), (hang, "is behind"):
        first = next(line for line in words.splitlines() if line.startswith("launch: rank"))
        assert first.startswith("launch: rank 1 on") and how in first, said
    assert re.search("rank 1 on .* was killed by SIGALRM", hang), said
    for key in "loss", "grad_norm", "tokens_seen":
        assert series(tmp_path / "run", key) == series(place(options) / "whole", key)
    found = account(read(tmp_path / "run"))
    # of 7, 8 and 12 steps done, 5, 5 and 10 were saved
    assert [row["redone"] for row in found.interruptions] == [2, 3, 2] and found.steps == STEPS
    print("\n" + how_it_went(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.cap(300)
def test_what_fails_at_one_step_again_and_again_is_not_restarted_for_ever(options, tmp_path):
    launchers = nodes(options, tmp_path / "run", "0 raise 8 99", "--max-restarts=9", each=1)
    codes, said = ended(launchers, 250)
    assert codes == [76] and "restart 3 of 9" in said and "restart 4" not in said, said
    assert len(list((tmp_path / "run" / "starts").iterdir())) == 4


def two(port: int, least: int = 2) -> list[str]:
    return [
        f"--nnodes={least}:2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--node-rank=0",
        "--node-rank=1",
    ]


@pytest.mark.slow
@pytest.mark.cap(300)
def test_two_nodes_restart_together(options, tmp_path):
    """Either of them may fail first."""
    faults = "1 SIGKILL 8 1; 0 SIGKILL 9 2"
    flags = ["--max-restarts=2", *two(free_port())]
    codes, said = ended(nodes(options, tmp_path / "run", faults, *flags, each=1), 200)
    assert codes == [0, 0], said
    assert said.count("launch: restart 1 of 2") == said.count("launch: restart 2 of 2") == 2, said
    assert series(tmp_path / "run") == series(place(options) / "whole")
    print("\n" + how_it_went(tmp_path / "run"))


def slow_to_hear() -> None:
    """In a launcher: node 1 hears three seconds late of the end of its rank."""
    monitor = launch.Agent._monitor_workers

    def monitor_late(agent: launch.Agent, group: object) -> object:
        ended = {handler.proc.poll() for handler in agent._pcontext.subprocess_handlers.values()}
        if ended != {None} and agent.rendezvous.options.node_rank == 1:
            time.sleep(3)
        return monitor(agent, group)

    launch.Agent._monitor_workers = monitor_late


@pytest.mark.slow
def test_two_nodes_stop_together_before_the_first_step(options, tmp_path):
    """The node that was asked to stop reports so after the one that fails without it."""
    flags = ["--max-restarts=1", *two(free_port())]
    fault = "1 SIGTERM 1 9"
    launchers = nodes(options, tmp_path / "run", fault, *flags, each=1, prepare=slow_to_hear)
    codes, said = ended(launchers)
    assert codes == [75, 75] and "launch: restart" not in said, said


def patient(returned: Path) -> None:
    """In a launcher: when the file `returned` is there, node 0 waits for more nodes for ten
    minutes and not for --last-call seconds: how soon a node comes is then no matter."""
    collect = launch.Rendezvous._collect

    def collect_patiently(rendezvous: launch.Rendezvous, *rest: object) -> list[int]:
        if returned.exists():
            rendezvous.options.last_call = 600
        return collect(rendezvous, *rest)

    launch.Rendezvous._collect = collect_patiently


@pytest.mark.slow
@pytest.mark.cap(400)
def test_a_node_that_does_not_come_back_leaves_a_smaller_run_and_a_returned_one_joins_the_next(
    options, tmp_path
):
    """1:2 nodes of a rank each: two, then node 0 alone, and after the next failure two again. The
    same batches: equal to rounding. Rank 0 waits until node 1 is dead, and then until it is back:
    nothing here must be done in time."""
    folder, returned = tmp_path / "run", tmp_path / "returned"
    lone, pair = folder / "lone", folder / "pair"  # what rank 0 waits for
    flags = ["--max-restarts=2", "--last-call=2", f"--join-timeout={120 * WORKERS}"]
    flags += two(free_port(), least=1)
    fault = "0 hold:lone 8 1; 0 hold:pair 13 2; 0 SIGKILL 13 2"
    prepare = partial(patient, returned)
    first, second = nodes(options, folder, fault, *flags, each=1, prepare=prepare)

    def until(true: Callable[[], bool]) -> None:
        said = lambda: str(ended([first], 0))  # noqa: E731
        wait_until(true, 90, said, over=lambda: first.poll() is not None)

    until(lone.exists)
    second.kill()
    lone.unlink()
    until(pair.exists)
    again = [flag for flag in flags if flag != "--node-rank=0"]
    (third,) = nodes(options, folder, fault, *again, each=1)
    waits = "launch: node 1 waits: the run goes on without it until its next start"
    until(lambda: waits in third.said.read_text())
    returned.touch()
    pair.unlink()
    codes, said = ended([first, third], 200)
    assert codes == [0, 0], said
    sizes = [start.about["mesh"]["dp_shard"] for start in read(folder)]
    assert sizes == [2, 1, 2], sizes
    want, got = series(place(options) / "whole"), series(folder)
    assert want.keys() == got.keys() and max(abs(got[s] / want[s] - 1) for s in want) < 3e-4
    print("\n" + how_it_went(folder))


# Back over bad data


@pytest.mark.slow
def test_going_back_and_around_bad_batches_is_a_run_that_never_met_them(options, tmp_path):
    """The command of docs/reliability.md: steps 11 to 13 of a run are not to have been; then it
    goes on, restarts included."""
    back, never = tmp_path / "back", tmp_path / "never"
    options = [*options, "--lr_schedule.kind=constant"]
    around = "--data.skip=[[10,3]]"
    for folder in back, never:
        folder.mkdir()
    assert run_ranks(2, run, options, back) == [(0, "")] * 2  # all 16 steps
    command = [*options, around, "--checkpoint.load_step=10"]
    (code, said), _ = run_ranks(2, run, command, back)
    assert code == 2 and "data.skip was [] and is [[10, 3]]" in said
    assert "data.allow_splice = true" in said
    forward = [*options, around, "--data.allow_splice=true", "--training.steps=20"]
    (code, said), _ = run_ranks(2, run, forward, back)
    assert code == 2 and "go back with checkpoint.load_step = 10" in said
    assert run_ranks(2, run, [*command, "--data.allow_splice=true"], back) == [(0, "")] * 2
    seen = samples(back, 2)
    assert len(seen) == STEPS + 6
    assert seen[STEPS : STEPS + 3] == seen[13:16], "after step 10 comes what was step 14's"
    skipped = {n for batch in seen[10:13] for n in batch}
    assert skipped.isdisjoint(n for batch in seen[STEPS:] for n in batch)
    # one goes on, now without going back; the other jumps as it comes by
    for folder in back, never:
        assert run_ranks(2, run, [*options, around, "--training.steps=20"], folder) == [(0, "")] * 2
    assert samples(never, 2)[10:] == samples(back, 2)[STEPS:], "the same batches"
    for key in ("loss", "grad_norm", "tokens_seen"):
        assert series(back, key) == series(never, key), "bitwise"


# A stop that the launcher cannot wait for


SLOW_SAVES = """
import time
from checkpoint import verify
real = verify.write_manifest
def slow(folder, manifest):
    time.sleep(30 * (manifest["step"] > 5))
    return real(folder, manifest)
verify.write_manifest = slow
"""


@pytest.mark.slow
@pytest.mark.cap(200)
def test_a_save_that_takes_longer_than_the_grace_leaves_the_previous_checkpoint(options, tmp_path):
    (place(options) / "slow.py").write_text(SLOW_SAVES + WRAPPER)
    flags = ("--shutdown-timeout=2", "--max-restarts=2")
    fault = f"{AFTER_5} 8 1; 1 launcher:SIGTERM 8 1"
    codes, said = ended(nodes(options, tmp_path / "run", fault, *flags, script="slow.py"))
    assert codes == [128 + signal.SIGKILL], said
    assert "not stopped after 2 s: the ranks are killed" in said
    assert "launch: restart" not in said, "it was asked to stop"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000005"]
    assert ended(nodes(options, tmp_path / "run", fault))[0] == [0]
    assert series(tmp_path / "run") == series(place(options) / "whole")


# A signal while the launcher starts the ranks


# A rank: writes which signal it was told. Rank 1 fails once if there is a file `fails`.
TOLD = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
file = folder / f"told-{rank}"
file.unlink(missing_ok=True)  # of the start before
if rank == "1" and (folder / "fails").exists():
    (folder / "fails").unlink()
    sys.exit(9)
def told(number, frame):
    file.write_text(signal.Signals(number).name)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, told)
(folder / str(os.getpid())).touch()
time.sleep(60)
"""


def signalled(folder: Path, number: int, start: int, born: int) -> None:
    """In a launcher: it gets this signal in that start, when one or both of its two ranks are born.
    It goes on when both have their handlers."""
    signal.signal(number, signal.SIG_DFL)  # also where nohup started the tests
    real_init, real_start = SubprocessHandler.__init__, LocalElasticAgent._start_workers
    pids = []

    def signal_if(now: bool) -> None:
        if now and len(pids) == 2 * (start - 1) + born:
            signal.raise_signal(number)

    def init(handler, *words, **more):
        real_init(handler, *words, **more)
        pids.append(handler.proc.pid)
        signal_if(born == 1)

    def start_workers(agent, group):
        ranks = real_start(agent, group)
        while len(pids) == 2 * start and not all((folder / str(pid)).exists() for pid in pids[-2:]):
            time.sleep(0.01)
        signal_if(born == 2)
        return ranks

    SubprocessHandler.__init__, LocalElasticAgent._start_workers = init, start_workers


@pytest.mark.parametrize("start, born", [(1, 1), (1, 2), (2, 1)])
def test_a_signal_while_ranks_are_started_reaches_them_all(start, born, tmp_path):
    """Every rank is told, ends as it likes, and the launcher says nothing."""
    script = tmp_path / "told.py"
    script.write_text(TOLD)
    launchers = []
    for number in launch.PASSED_ON:
        folder = tmp_path / number.name
        folder.mkdir()
        if start == 2:
            (folder / "fails").touch()
        words = ["--nproc-per-node=2", "--max-restarts=1", script, folder]
        prepare = partial(signalled, folder, number, start, born)
        launchers.append(Launcher(words, folder / "said", prepare))
    codes, _ = ended(launchers, 60)
    for launcher, code, number in zip(launchers, codes, launch.PASSED_ON):
        said = launcher.said.read_text()
        assert code == 75 and "before training" not in said, (number, code, said)
        assert said.count("\n") == 2 * (start - 1), "of the first start, and that there is another"
        told = {file.name: file.read_text() for file in (tmp_path / number.name).glob("told-*")}
        assert told == {"told-0": number.name, "told-1": number.name}, said
