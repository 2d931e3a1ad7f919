"""A second start in the folder of a run that is alive, or one that has nothing to do, changes
nothing; and what goes away under a run ends it in a sentence."""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import train
from checkpoint import lease, place
from configs.schema import InputError
from reliability.position import Position
from reliability.record import Start
from tests import fork_server, ranks
from tests.checkpoints import saved_state
from tests.programs import ROOT, finished
from tests.ranks import run_ranks, wait_until
from tests.runs import printed, series, tiny_run
from tools import check

OTHER = ["--optimizer.lr=0.5", "--training.steps=20"]


def main(folder: Path, options: list[str]) -> tuple[int, str]:
    """train.main on this rank: its exit code, and what it printed as an error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = train.main([f"--run.folder={folder}", *options])
    return code, errors.getvalue()


def waiting(folder: Path, options: list[str], until: Path) -> tuple[int, str]:
    """Do a run that says in its 7th step that it is there, and waits until a file is."""
    real = train.train_step
    lease.BEAT = 0.2
    calls = []

    def step(*args: object) -> train.StepResult:
        calls.append(1)
        if len(calls) == 7:
            until.with_suffix(f".ready-{os.getpid()}").touch()
            wait_until(until.exists, 240)
        return real(*args)

    train.train_step = step
    return main(folder, options)


def elsewhere(folder: Path, options: list[str]) -> tuple[int, str]:
    """Start on another node, whose file system does not share locks."""

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    fcntl.lockf = no_lock
    socket.gethostname = lambda: "elsewhere"
    lease.PATIENCE = 3.0
    return main(folder, options)


def as_it_was(folder: Path, options: list[str]) -> tuple[int, str]:
    """A start that takes the folder after it has written there, as all once did."""

    @contextlib.contextmanager
    def later(cfg):
        yield place.open_place(cfg.checkpoint, Path(cfg.run.folder) / "checkpoints")

    train.claimed = later
    return main(folder, options)


def contents(folder: Path, but: tuple[str, ...] = (".lease", ".position")) -> dict[str, bytes]:
    """Return the files of a run but those that it writes all the time while it lives."""
    found = {}
    for path in sorted(folder.rglob("*")):
        parts = {*path.parts, path.suffix}
        if path.is_file() and not parts & {*but}:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Do a run on two ranks that no other start disturbs; return its folder and its options."""
    place = tmp_path_factory.mktemp("alone")
    options = [*tiny_run(place), "--checkpoint.keep_last=2"]
    (place / "run").mkdir()
    assert run_ranks(2, main, place / "run", options) == [(0, "")] * 2
    return place / "run", options


@pytest.mark.cap(300)
def test_a_second_start_leaves_the_first_as_it_is_alone(alone, tmp_path):
    """On the same node, and on another one: each is refused, nothing in the folder
    changes, and the first run ends with 0 and the bits that it has alone."""
    oracle, options = alone
    folder, until = tmp_path / "run", tmp_path / "go"
    with ThreadPoolExecutor(1) as first:
        ends = first.submit(run_ranks, 2, waiting, folder, options, until)
        try:
            wait_until(lambda: len(list(tmp_path.glob("*.ready-*"))) == 2)
            wait_until((folder / "checkpoints" / "step-00000005").exists)
            before = contents(folder)
            for start in main, elsewhere:
                first_rank, second_rank = run_ranks(2, start, folder, [*options, *OTHER])
                code, said = first_rank
                assert code == 2 and "another run" in said and "Traceback" not in said, said
                assert second_rank == (2, ""), "one rank says what all of them raise"
            assert contents(folder) == before
            run_ranks(2, as_it_was, folder, [*options, *OTHER])
            assert contents(folder) != before, "the comparison sees no start that writes"
        finally:
            until.touch()
        assert ends.result() == [(0, "")] * 2
    assert series(folder) == series(oracle)
    ours, theirs = saved_state(folder), saved_state(oracle)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def opened_again(path: Path) -> None:
    """Another process that makes the same rank's file, again and again."""
    for _ in range(30):
        other = Position(path, 0)
        other.open()
        other.close(failed=False)


def opened_in_place(path: Path) -> None:
    """The same as it once was: the file of the first process is written over."""
    for _ in range(30):
        path.open("wb+").close()


def moving(path: Path, until: Path) -> None:
    own = Position(path, 0)
    own.open()
    until.with_suffix(".ready").touch()
    while not until.exists():
        own.begin("data")
    own.close(failed=False)
    os._exit(0)


@pytest.mark.parametrize(("other", "code"), [(opened_again, 0), (opened_in_place, -signal.SIGBUS)])
def test_a_position_that_another_process_opens_stays_mapped(other, code, tmp_path):
    path, until = tmp_path / "rank-00000.position", tmp_path / "go"
    process = fork_server.start(moving, path, until)
    try:
        wait_until(until.with_suffix(".ready").exists)
        fork_server.call(other, path)
        until.touch()
        process.join(30 * ranks.WORKERS)
        assert process.exitcode == code
    finally:
        fork_server.end(process)


def test_a_start_without_a_step_changes_nothing_that_a_reader_sees(alone, tmp_path):
    """It prints one line. Where it may not be the same run, the start is not that short."""
    oracle, options = alone
    folder = Path(shutil.copytree(oracle, tmp_path / "run"))
    before = contents(folder)
    more = [*options, "--training.steps=16", "--optimizer.lr=0.5"]
    (code, said), second = run_ranks(2, printed, more, folder)
    done = f"{folder} has already trained 16 of 16 steps; raise training.steps to go on"
    assert (code, said) == (0, f"nothing to do: {done}\n")
    assert second == (0, "")
    assert contents(folder) == before
    (code, said), _ = run_ranks(2, main, folder, [*more, "--model.hidden_dim=40"])
    assert code == 2 and "model.hidden_dim" in said, said
    # one that does a step is what a reader sees
    run_ranks(2, main, folder, [*options, "--training.steps=17"])
    assert "steps = 17\n" in (folder / "config.toml").read_text()


def test_a_run_that_is_done_is_said_before_torch_is_imported(alone, tmp_path):
    """From the script, which has asked all else then too."""
    oracle, options = alone
    folder = Path(shutil.copytree(oracle, tmp_path / "run"))
    before = contents(folder)
    words = [ROOT / "run_train.sh", f"--run.folder={folder}", *options]
    done = finished(*words, NGPU="2", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing to do: ") and done.stdout.count("\n") == 1
    assert "checkpoint.ended" in done.stderr and " torch\n" not in done.stderr
    assert contents(folder) == before


def full(folder: Path, options: list[str], name: str) -> tuple[int, str]:
    """Do a run on a disk that is full: nothing of this name can be written."""
    usage = shutil.disk_usage("/")
    if name == "checkpoints":
        shutil.disk_usage = lambda _: usage._replace(free=1000)
    real = Start._write

    def write(start: Start, file: str, text: str) -> None:
        if file == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
        real(start, file, text)

    Start._write = write
    return main(folder, options)


def test_a_full_disk_refuses_a_start_without_a_trace_and_an_end_is_said(alone, tmp_path):
    """A start that is refused for room leaves no record. One that cannot write how it ended says
    so."""
    oracle, options = alone
    folder = Path(shutil.copytree(oracle, tmp_path / "run"))
    more = [*options, "--training.steps=17"]
    (code, said), _ = run_ranks(2, full, folder, more, "checkpoints")
    assert code == 2 and "make room" in said, said
    assert [path.name for path in (folder / "starts").iterdir()] == ["0001"]
    for name in "given.toml", "start.json":
        [(code, said)] = run_ranks(1, full, folder, more, name)
        assert code == 2 and said.startswith(f"cannot write {name}: No space left"), said
        assert [path.name for path in (folder / "starts").iterdir()] == ["0001"]
    run_ranks(2, full, folder, more, "end.json")
    log = (folder / "logs" / "rank-00000.log").read_text()
    assert (
        "end.json cannot be written (No space left on device): this start, which ends with" in log
    )


def removing(folder: Path, options: list[str], steps: dict[int, list[str]]) -> tuple[int, str, int]:
    """Do a run under which rank 0 removes these parts of its folder as it begins a step. Returns how
    many steps it has begun, too."""
    real = train.train_step
    lease.BEAT = 1000  # it would write its file again first
    calls = []

    def step(*args: object) -> train.StepResult:
        calls.append(1)
        for name in steps.get(len(calls), ()) if args[0].mesh.rank == 0 else ():
            part = folder / name
            if part.is_file():
                part.unlink()
            while part.exists():  # a save may write there meanwhile
                shutil.rmtree(part, ignore_errors=True)
        return real(*args)

    train.train_step = step
    return *main(folder, options), len(calls)


def test_a_folder_that_is_removed_ends_the_run_in_a_sentence(alone, tmp_path):
    """At once, logged or not, and nothing is written after it: a save that meets `rm -rf` leaves
    the folder of checkpoints there."""
    _, options = alone
    folder = tmp_path / "run"
    options = [*options, "--metrics.interval=50", "--checkpoint.interval=7", "--training.steps=50"]
    first, second = run_ranks(2, removing, folder, options, {7: [""]})
    for code, _, steps in first, second:
        assert code == 1  # 2 would say that nothing was started
        assert steps == 7, "the step in which it is removed is the last"
    assert first[1].startswith(f"{folder} was removed during the run") and first[1].count("\n") == 1
    assert second[1] == "", "one rank says what all of them raise"
    assert not folder.exists()


@pytest.mark.slow
def test_a_part_that_is_removed_is_written_again_and_said(alone, tmp_path):
    """What the run does not need to go on; it has the numbers that it has alone."""
    oracle, options = alone
    folder = tmp_path / "run"
    parts = {
        3: ["logs"],
        5: ["tensorboard"],
        7: ["metrics.jsonl"],
        9: ["config.toml", "tokenizer.json"],
        12: ["checkpoints"],
    }
    options = [*options, "--metrics.tensorboard=true", "--run.step_timeout_seconds=100"]
    ends = run_ranks(2, removing, folder, options, parts)
    assert [(code, said) for code, said, _ in ends] == [(0, "")] * 2
    log = (folder / "logs" / "rank-00000.log").read_text()
    for said in (
        "rank-00000.log was removed: it begins anew here",
        "tensorboard was removed: the curves in it begin anew with step 5",
        "metrics.jsonl was removed: it begins anew with step 7",
        "config.toml and tokenizer.json removed during the run; written again",
        "checkpoints was removed: it is made again, for a new checkpoint",
    ):
        assert log.count(said) == 1, (said, log)
    assert (folder / "logs" / "rank-00001.log").exists() and list(folder.glob("tensorboard/*"))
    theirs = series(oracle)
    assert series(folder) == {step: loss for step, loss in theirs.items() if step >= 7}
    assert (folder / "config.toml").exists() and (folder / "tokenizer.json").exists()
    saved = sorted(path.name for path in folder.glob("checkpoints/*"))
    assert saved == [".lease", "step-00000015", "step-00000016"]
    ours, found = saved_state(oracle), saved_state(folder)
    assert all(torch.equal(found[name], ours[name]) for name in ours)


def test_metrics_that_cannot_be_written_are_refused_on_all_ranks(alone, tmp_path):
    _, options = alone
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").mkdir(parents=True)
    first, second = run_ranks(2, main, folder, options)
    assert first[0] == second[0] == 2 and second[1] == "", "one rank says what all of them raise"
    assert first[1] == f"{folder / 'metrics.jsonl'} is no file that can be written: move it away\n"


def test_a_folder_that_is_removed_before_training_does_too(alone, tmp_path):
    _, options = alone
    folder = tmp_path / "run"
    code, said = fork_server.call(without_folder_at, "build", folder, options)
    assert code == 1 and said.count("\n") == 1 and "was removed during the run" in said, said


def without_folder_at(moment: str, folder: Path, options: list[str]) -> tuple[int, str]:
    """Do a run whose folder is removed when this function of train.py is called."""
    real = getattr(train, moment)

    def removing(*args: object, **kwargs: object) -> object:
        shutil.rmtree(folder)
        return real(*args, **kwargs)

    setattr(train, moment, removing)
    return main(folder, options)


# The file of the lease


def garbage(path: Path) -> None:
    path.write_text("x" * 500)


@pytest.mark.parametrize("harm", [garbage, pytest.param(Path.unlink, marks=pytest.mark.slow)])
def test_a_lease_that_is_damaged_or_removed_is_mended(harm, tmp_path, monkeypatch):
    """During a run and before a start: it is no other run's."""
    monkeypatch.setattr(lease, "PATIENCE", 0.6)
    path = tmp_path / ".lease"
    for _ in range(2):
        mine = lease.Lease(path)
        fork_server.call(harm, path)  # to close a file gives up this process's lock on it
        mine.check()
        refused = fork_server.call(refusal, path)
        assert f"another run (process {os.getpid()} on" in refused
        assert path.stat().st_size == lease.SIZE
        mine.check()
        mine.release()
        harm(path)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        lease.Lease(path)
    return str(error.value)


def test_the_script_refuses_a_second_start_before_it_imports_anything_large(tmp_path):
    """A node that comes late to a run of several finds that run alive, so there no check is made."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    mine = lease.Lease(folder / "checkpoints" / ".lease")
    before = contents(folder)
    options = [f"--run.folder={folder}", "--data.tokenizer=bytes"]
    done = finished(ROOT / "run_train.sh", *options)
    assert done.returncode == 2 and done.stdout == "", done
    sentence = f"is being written by another run (process {os.getpid()} on {socket.gethostname()})"
    assert sentence in done.stderr and done.stderr.count("\n") == 1
    assert contents(folder) == before
    assert fork_server.call(check.main, options) == 0
    mine.check()  # a look at the lock has not taken it
    mine.release()
    assert fork_server.call(check.main, [*options, "--one-node"]) == 0


def test_a_run_that_slept_through_another_one_sees_it(tmp_path, monkeypatch):
    """The other has taken the folder over, and has given it back since."""
    monkeypatch.setattr(lease, "BEAT", 1000)
    path = tmp_path / ".lease"
    mine = lease.Lease(path)
    lease.Lease(path).release()  # within one process locks exclude no one
    with pytest.raises(lease.Lost, match="taken over"):
        mine.check()
    mine.release()
