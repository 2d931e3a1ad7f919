"""Records that a run writes about itself: each of its starts, how it ended, where the seconds went;
and that no secret is in it."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

import train
from checkpoint.manager import CheckpointManager
from configs import schema
from configs.schema import InputError
from reliability import causes, disk, goodput, health, record
from reliability.goodput import KINDS, MEASURED, Clock, Past, account, read
from tests import fork_server
from tests.ranks import run_ranks
from tests.runs import MESHES, STEPS, lines_of, run, series, stopped_at, tiny_run
from tools import goodput as tool

# published when save() returns; few log lines
SAVED = ["--checkpoint.async_save=false", "--metrics.interval=7"]


def begin(place: Path, config: str = "[run]\n") -> record.Start:
    """Begin a start of the run in place/run, on rank 0."""
    (place / "given.toml").write_text("")
    return record.Start(place / "run", 0, [], place / "given.toml", {}, config, {})


def dies_at(step: int, options: list[str], folder: Path) -> None:
    """Start a separate process that is killed with -9 when it begins `step` (of this start)."""
    process = fork_server.start(_dies_at, step, options, folder)
    try:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    finally:
        fork_server.end(process)


def _dies_at(step: int, options: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    note_the_time(folder)
    real, begun = train.train_step, itertools.count(1)

    def train_step(job, batch, *options):
        if next(begun) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(job, batch, *options)

    train.train_step = train_step
    run(options, folder)


def note_the_time(folder: Path) -> None:
    """Seconds of the machine's clock, as a rank sees them: no fork and no end of a process."""
    with open(folder / "noted", "a") as file:
        file.write(f"{time.monotonic()}\n")


def ends(options: list[str], folder: Path) -> tuple[int, str]:
    result = run(options, folder)
    note_the_time(folder)
    return result


def diverges(options: list[str], folder: Path) -> str:
    """Do a run that ends with an exception in its third step."""
    real, begun = train.train_step, itertools.count(1)

    def train_step(job, batch, *options):
        if next(begun) == 3:
            raise RuntimeError(
                "cannot reach https://ann:canary-in-url@host/x?token=canary-in-query now"
            )
        return real(job, batch, *options)

    train.train_step = train_step
    try:
        return str(run(options, folder))
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, tuple[float, float]]:
    """Do a run killed when it began step 9, again at 8, failing at 7, stopped after 13, then ended;
    and the least and the most seconds that it took by our clock."""
    place = tmp_path_factory.mktemp("interrupted")
    folder, options = place / "run", [*tiny_run(place), *SAVED]
    folder.mkdir()
    began = time.monotonic()
    dies_at(9, options, folder)  # 8 steps are done, 5 are saved
    time.sleep(0.5)
    dies_at(3, options, folder)  # from 5: 7 are done, nothing new is saved
    run_ranks(1, diverges, options, folder)  # from 5 too, and as far
    run_ranks(1, stopped_at, 8, options, folder)  # from 5: 13 are done and saved
    time.sleep(0.4)
    assert run_ranks(1, ends, options, folder) == [(0, "")]
    most = time.monotonic() - began
    noted = [float(line) for line in (folder / "noted").read_text().split()]
    return folder, (noted[-1] - noted[0], most)


def test_every_start_and_its_end_is_on_record(interrupted):
    folder, _ = interrupted
    starts = read(folder)
    assert [start.number for start in starts] == [1, 2, 3, 4, 5]
    assert [start.ended.get("exit_code") for start in starts] == [None, None, 1, 75, 0]
    assert [start.ended.get("step") for start in starts] == [None, None, 7, 13, 16]
    assert starts[2].ended["reason"].startswith("RuntimeError: cannot reach")
    assert starts[4].ended["reason"] == "done"
    ends = [(start.steps[0]["step"], start.steps[-1]["step"]) for start in starts]
    assert ends == [(0, 8), (5, 7), (5, 7), (5, 13), (13, 16)]


def test_steps_are_counted_exactly(interrupted):
    """Steps are counted exactly although lines were logged at steps 1, 7 and 14 only."""
    folder, _ = interrupted
    result = account(read(folder))
    trained = (folder / "samples-0.jsonl").read_text().count("\n")
    assert result.steps == STEPS and result.steps + result.redone == trained == 8 + 2 + 2 + 8 + 3
    assert [row["redone"] for row in result.interruptions] == [3, 2, 2, 0]
    assert [row["step"] for row in result.interruptions] == [8, 7, 7, 13]
    assert [row["how"] for row in result.interruptions] == ["failed", "failed", "failed", "stopped"]
    assert result.saves == 5  # at 5, 10, 13, 15, 16


def test_the_seconds_sum_to_the_clock_on_the_wall(interrupted):
    folder, (least, most) = interrupted
    result = account(read(folder))
    assert least - 0.1 <= result.total <= most + 0.1
    assert all(seconds >= 0 for seconds in result.seconds.values())
    assert result.seconds["detecting"] >= 0.5 and result.seconds["paused"] >= 0.4
    assert all(result.seconds[kind] > 0 for kind in ("productive", "redone", "starting"))
    meant = sum(seconds for kind, seconds in result.seconds.items() if kind != "paused")
    assert result.goodput == pytest.approx(result.seconds["productive"] / meant)
    lost = sum(row["lost"] for row in result.interruptions)
    first = read(folder)[0].lines[-1]["starting"]
    assert lost == pytest.approx(
        sum(result.seconds[kind] for kind in ("redone", "detecting", "starting")) - first, abs=0.01
    )


def test_metrics_and_the_summary_have_the_goodput(interrupted):
    folder, _ = interrupted
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    result = account(read(folder))
    assert last["seconds/redone"] == pytest.approx(result.seconds["redone"], abs=1e-3)
    assert last["seconds/detecting"] == pytest.approx(result.seconds["detecting"], abs=1e-3)
    assert 0 < last["goodput"] < 1
    assert "goodput" in (folder / "logs" / "rank-00000.log").read_text().splitlines()[-1]


def test_a_start_that_has_lost_a_rank_is_not_told_by_its_connection(interrupted):
    result = account(read(interrupted[0]))
    result.interruptions[2]["reason"] = "RuntimeError: [gloo] Connection reset by peer"
    text = tool.table(result)
    assert "exit code 1: rank 0 lost another rank" in text and "gloo" not in text


def test_the_tool_prints_the_table_and_json(interrupted, capsys):
    folder, _ = interrupted
    assert tool.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in KINDS.values())
    assert "16 steps count, 7 were redone" in text and "failed 3 times" in text
    assert "exit code 75: stopped on request" in text and "killed" in text
    assert tool.main([str(folder), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["redone"] == 7 and len(about["interruptions"]) == 4
    assert about["total"] == pytest.approx(sum(about["seconds"].values()))
    assert tool.main([str(folder / "logs")]) == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_what_a_start_says_about_itself(tmp_path, monkeypatch):
    ranks, extra, _ = MESHES["fsdp2"]
    toml = tmp_path / "mine.toml"
    toml.write_text("# a comment\n[optimizer]\nweight_decay = 0.25\n")
    folder = tmp_path / "run"
    short = ["--training.steps=3", "--lr_schedule.warmup_steps=1"]
    options = [str(toml), *tiny_run(tmp_path), *extra, *short]
    folder.mkdir()
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("HOME_OF_NOBODY", "not on the list")
    assert run_ranks(ranks, run, options, folder) == [(0, "")] * ranks
    (start,) = (folder / "starts").iterdir()
    about = json.loads((start / "start.json").read_text())
    assert (start / "given.toml").read_text() == toml.read_text()
    assert (start / "config.toml").read_text() == (folder / "config.toml").read_text()
    assert about["overrides"].items() >= {"training.steps": 3, "optimizer.lr": 0.01}.items()
    assert about["config"] == str(toml)
    assert about["command"][2:] == [f"--run.folder={folder}", *options]
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["python"].startswith("3.")
    assert about["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1}
    assert about["hosts"] == [{"host": about["host"], "device": "cpu", "ranks": [0, 1]}]
    assert about["environment"]["NGPU"] == "2"
    assert about["environment"].keys() <= set(record.ENVIRONMENT)
    files = about["code"]["files"].keys()
    assert {"train.py", "models/llama.py", "reliability/record.py"} <= files
    assert not any(path.startswith(("tests", "tools", "lab", ".")) for path in files)
    assert not any(path.stat().st_mode & stat.S_IWOTH for path in folder.rglob("*"))


# Inputs that are refused --------------------------------------------------------------------------


def test_a_start_that_is_refused_is_no_interruption(tmp_path):
    options = [*tiny_run(tmp_path), *SAVED]
    folder = tmp_path / "run"
    folder.mkdir()
    assert run_ranks(1, run, [*options, "--training.step=3"], folder)[0][0] == 2
    assert not (folder / "starts").exists(), "a wrong option starts nothing"
    missing = [*options, "--data.source=/no/such/corpus"]
    assert run_ranks(1, run, missing, folder)[0][0] == 2
    assert run_ranks(1, run, [*options, "--training.steps=4"], folder)[0][0] == 0
    assert run_ranks(1, run, missing, folder)[0][0] == 2
    starts = read(folder)
    assert [start.ended["exit_code"] for start in starts] == [2, 0, 2]
    assert "/no/such/corpus" in starts[0].ended["reason"]
    result = account(starts)
    assert not result.interruptions and result.steps == 4
    assert result.total == sum(starts[1].lines[-1][kind] for kind in MEASURED)


# Secrets ------------------------------------------------------------------------------------------

CANARIES = (
    "canary-in-environment",
    "canary-in-comment",
    "canary-in-url",
    "canary-in-query",
    "hf_canaryINatokenOFtheUSUALshape",
)


def leaks(folder: Path) -> set[str]:
    everything = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {
        canary for canary in CANARIES if any(canary.encode() in content for content in everything)
    }


def diverges_unredacted(options: list[str], folder: Path) -> str:
    record.redact = lambda text: text
    record.SECRET_NAME = record.re.compile("no such name")
    return diverges(options, folder)


def with_canaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable = diverges
) -> Path:
    monkeypatch.setenv("WANDB_API_KEY", CANARIES[0])
    toml = tmp_path / "mine.toml"
    toml.write_text(
        f"# from https://bob:canary-in-comment@host/corpus with {CANARIES[4]}\n[run]\nseed = 3\n"
    )
    options = [
        str(toml),
        *tiny_run(tmp_path),
        *SAVED,
        "--metrics.tensorboard=true",
        f"--data.cache={tmp_path / CANARIES[0]}",
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (words,) = run_ranks(1, ends, options, folder)
    assert "canary-in-url" in words
    return folder


def test_no_secret_is_written(tmp_path, monkeypatch):
    folder = with_canaries(tmp_path, monkeypatch)
    assert leaks(folder / "starts") == leaks(folder / "logs") == set()
    (start,) = (folder / "starts").iterdir()
    assert "https://***@host/corpus" in (start / "given.toml").read_text()
    assert "https://***@host/x?token=***" in json.loads((start / "end.json").read_text())["reason"]
    assert "***" in (start / "config.toml").read_text(), (
        "the value of a variable that is called a key is one, anywhere"
    )


@pytest.mark.slow
def test_control_without_redaction_the_canaries_are_found(tmp_path, monkeypatch):
    assert leaks(with_canaries(tmp_path, monkeypatch, diverges_unredacted) / "starts") == set(
        CANARIES
    )


def test_a_password_is_no_option(tmp_path):
    for option in ("data.source", "checkpoint.load_path", "metrics.wandb_project"):
        errors = io.StringIO()
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            password = f"--{option}=https://bob:canary-in-url@host/x"
            assert train.main([f"--run.folder={tmp_path / 'run'}", password]) == 2
        said = errors.getvalue()
        assert "canary" not in said and option in said and "password" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://u:p@h/x and s3://key@bucket", "https://***@h/x and s3://***@bucket"),
        ("https://h/x?X-Amz-Signature=abc&a=1", "https://h/x?X-Amz-Signature=***&a=1"),
        ("ghp_0123456789abcdefghij0123456789abcdef", "***"),
        (
            "a mail to ann@example.org, x = y @ z, https://h/a@b",
            "a mail to ann@example.org, x = y @ z, https://h/a@b",
        ),
    ],
)
def test_redact(text, shown):
    assert schema.redact(text) == shown


# Clocks -------------------------------------------------------------------------------------------


def with_a_clock(kind: str, options: list[str], folder: Path) -> int:
    """Do a run during which the wall clock does this, from its third step on."""
    real, step, begun = time.time, train.train_step, itertools.count(1)
    clocks = {
        "an hour ahead": lambda: real() + 3600,
        "backwards": lambda begun=real(): 2 * begun - 3600 - real(),
    }

    def train_step(job, batch, *options):
        if next(begun) == 3:
            time.time = clocks[kind]
        return step(job, batch, *options)

    train.train_step = train_step
    return run(options, folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an hour ahead", "backwards"])
def test_a_clock_that_jumps_makes_no_negative_figures(tmp_path, kind):
    """The next start, on the right clock, follows the first all the same."""
    options = [*tiny_run(tmp_path), "--metrics.interval=1", "--training.steps=8"]
    folder = tmp_path / "run"
    folder.mkdir()
    assert run_ranks(1, with_a_clock, kind, [*options, "--run.max_minutes=10"], folder) == [0]
    longer = [*options, "--training.steps=12", "--data.allow_splice=true"]
    assert run_ranks(1, run, longer, folder)[0][0] == 0
    result = account(read(folder))
    assert all(0 <= seconds < 60 or kind == "paused" for kind, seconds in result.seconds.items())
    assert 0 <= result.seconds["paused"] <= 3700 and result.steps == 12 and result.redone == 0
    rates = series(folder, "tokens_per_second")
    assert list(rates) == list(range(1, 13)) and all(rate > 0 for rate in rates.values())
    lines = lines_of(folder)
    assert not any(value < 0 for line in lines for value in line.values())


def test_a_lap_is_of_one_kind_and_the_kinds_sum_to_the_time(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(goodput.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(goodput, "_process_age", lambda: 5.0)
    clock = Clock(tmp_path)
    for kind, seconds in (("data", 1), ("productive", 2)):
        now[0] += seconds
        assert clock.record(kind) == (6 if kind == "data" else 2)
    assert clock.seconds["starting"] == 8, "all of the first step, and what was before"
    clock.step(1)
    for place, kind in enumerate(("other", "data", "productive", "validation", "save")):
        now[0] += 4 << place
        clock.record(kind)
    clock.move(10, "productive", "save")
    clock.move(100, "productive", "save")  # never more than there is
    assert clock.seconds == {
        "starting": 8,
        "other": 4,
        "data": 8,
        "productive": 0,
        "validation": 32,
        "save": 80,
    }


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path):
    (tmp_path / "starts" / "0001").mkdir(parents=True)
    clock = Clock(tmp_path / "starts" / "0001")
    file, clock.file = clock.file, os.open("/dev/full", os.O_WRONLY)
    clock.resume(0)
    clock.saved()
    clock.close()
    clock.file = file
    clock.step(2)
    clock.close()
    (start,) = read(tmp_path)
    assert [line["step"] for line in start.lines] == [None, 2]


def stalls(where: str, options: list[str], folder: Path) -> dict[str, float]:
    """Do a run whose copies of the state (at steps 5, 10, 15 and 16) end 0.25 s after something
    began to wait for them."""
    waited_for = threading.Event()
    copy, begin = CheckpointManager._copy, CheckpointManager._begin
    wait, finish = CheckpointManager.wait_for_copy, CheckpointManager._finish

    def copy_late(self, *arguments):
        waited_for.wait(60)
        time.sleep(0.25)
        return copy(self, *arguments)

    def begin_anew(self, *arguments, **options):
        waited_for.clear()
        return begin(self, *arguments, **options)

    CheckpointManager._copy = copy_late
    CheckpointManager._begin = begin_anew
    CheckpointManager.wait_for_copy = lambda self: waited_for.set() or wait(self)
    CheckpointManager._finish = lambda self, **last: waited_for.set() or finish(self, **last)
    if where == "no query":
        CheckpointManager.stall = lambda self: 0.0
    assert run(options, folder)[0] == 0
    return account(read(folder)).seconds


@pytest.mark.slow
def test_a_wait_of_the_optimizer_for_a_save_is_a_stall_and_no_work(tmp_path):
    options, seconds = tiny_run(tmp_path), {}
    for where in ("save", "no query"):
        (tmp_path / where).mkdir()
        (seconds[where],) = run_ranks(1, stalls, where, options, tmp_path / where)
    assert seconds["save"]["save"] >= 4 * 0.2
    assert seconds["no query"]["productive"] >= 3 * 0.2, "the control: they are booked as work"


# Accounts -----------------------------------------------------------------------------------------


def history(draw: random.Random) -> tuple[list[Past], int, int, float, float]:
    """Random starts, as their folders would tell of them; and what a ledger of single steps says:
    steps that count and that were redone, productive seconds and those redone."""
    ledger: dict[int, float] = {}  # step -> the seconds of the start that made it last
    redone_steps, redone_seconds, saved, starts, wall = 0, 0.0, {0}, [], 0.0
    for number in range(1, draw.randint(2, 7)):
        lines = [dict.fromkeys(MEASURED, 0.0) | {"step": None, "saves": 0, "time": wall}]
        productive = 0.0
        step = first = draw.choice(sorted(saved))
        lost = [s for s in ledger if s > step]
        redone_steps += len(lost)
        redone_seconds += sum(ledger.pop(s) for s in lost)
        saved = {s for s in saved if s <= step}
        lines.append(lines[-1] | {"step": step, "productive": productive, "time": wall})
        for _ in range(draw.randint(0, 9)):
            seconds = 0.0 if step == first else draw.uniform(0.1, 2)
            step += 1
            wall, productive, ledger[step] = wall + seconds, productive + seconds, seconds
            if lines[-1].get("passing"):
                lines.pop()
            lines.append(
                lines[-1] | {"step": step, "productive": productive, "time": wall, "passing": True}
            )
            if draw.random() < 0.3:
                lines[-1].pop("passing")
                saved.add(step)
        lines[-1].pop("passing", None)
        ended = draw.choice(
            [{}, {"exit_code": 1, "reason": "x"}, {"exit_code": 75, "reason": "stopped"}]
        )
        starts.append(Past(number, {}, ended, lines))
        wall += draw.uniform(-5, 10)
    return starts, len(ledger), redone_steps, sum(ledger.values()), redone_seconds


def test_failures_at_one_step_are_counted_across_meshes_but_not_across_options(tmp_path):
    """Numbers that follow from the mesh are comments in a start's config.toml."""
    configs = {
        ranks: f"[run]\nseed = 1\n# local_batch_size = {8 // ranks}  (not set)\n"
        for ranks in (1, 2)
    }

    def counted(config: str) -> tuple[int, int]:
        with contextlib.suppress(RuntimeError), begin(tmp_path, config) as start:
            step, times, _ = start.failures()
            start.resume(0)
            start.clock.record("productive")
            start.clock.step(3)
            raise RuntimeError("it fails after step 3")
        return step, times

    assert [counted(configs[ranks]) for ranks in (1, 2, 1)] == [(-1, 0), (3, 1), (3, 2)]
    assert counted(configs[1].replace("seed = 1", "seed = 2")) == (-1, 0)


def dies_in_training(folder: Path, number: signal.Signals) -> int:
    """Run rank 1, in a separate process."""
    (folder / "logs").mkdir(exist_ok=True)
    child = os.fork()
    if not child:
        with health.Watchdog(folder, 1):
            os.kill(os.getpid(), number)
    return int(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -number)


OUTSIDE = "RuntimeError: [127.0.0.1]:17{} Connection closed by peer"


@pytest.mark.parametrize(
    ("first", "reasons", "times"),
    [
        (0, ["ValueError: at 0x51", "ValueError: at 0x62", "ValueError: at 0x73"], 3),
        (0, ["ValueError: no", "OSError: no", "ValueError: no"], 1),
        (0, ["", "", ""], 0),  # kill -9 after steps that were done
        (0, [OUTSIDE, OUTSIDE, OUTSIDE], 0),  # of another rank
        (3, ["", "", ""], 3),  # kill -9 before a step was done
        (0, ["hung", "hung", "hung"], 3),
        (0, ["memory", "memory", "memory"], 3),
        (0, [signal.SIGSEGV, signal.SIGSEGV, signal.SIGSEGV], 3),
        (0, [signal.SIGSEGV, signal.SIGKILL, signal.SIGSEGV], 1),
    ],
)
def test_a_crash_loop_is_one_step_that_fails_for_one_cause(
    first, reasons, times, tmp_path, monkeypatch
):
    """first: the step after which each start went on; reasons: of its end, "" for kill -9; a signal:
    rank 1 dies of it."""
    folder = tmp_path / "run"
    kills = [7]
    monkeypatch.setattr(causes, "memory_kills", lambda: kills[0])
    monkeypatch.setattr(goodput, "_process_age", lambda: 0.0)  # each start is a separate process
    for number, reason in enumerate(reasons):
        start = begin(tmp_path)
        start.failures()
        start.resume(first)
        if first < 3:
            start.clock.step(3)
        start.clock.write()
        if reason == "hung":
            (folder / "logs").mkdir(exist_ok=True)
            with (folder / "logs" / "rank-00000.stacks").open("a") as stacks:
                stacks.write("Current thread 0x1:\n  File ...\n" * 2)
        elif reason == "memory":
            kills[0] += 1
        elif isinstance(reason, signal.Signals):
            assert fork_server.call(dies_in_training, folder, reason) == 0
        elif reason:
            start.end(1, reason.format(number))
    step, counted, _ = begin(tmp_path).failures()
    assert counted == times and step == (3 if times else -1)


def test_a_file_that_cannot_be_replaced_leaves_no_attempts(tmp_path):
    (tmp_path / "data.json").mkdir()
    with pytest.raises(OSError):
        disk.write_whole(str(tmp_path / "data.json"), b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


@pytest.mark.parametrize(("done", "kind", "code"), [(0, InputError, 2), (1, OSError, 1)])
def test_a_disk_that_is_full_before_the_first_step_is_wrong_input(done, kind, code, tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00000.position")
    with pytest.raises(kind, match="No space left on device"), begin(tmp_path) as start:
        for step in range(done):
            start.clock.step(step)
        raise full
    assert read(tmp_path / "run")[0].ended["exit_code"] == code


@pytest.mark.parametrize("left", [[], ["time.jsonl"]])
def test_a_start_without_its_record_ends_no_later_start(left, tmp_path, monkeypatch):
    """It was killed in its first moment, or someone has removed files. left: what is in its folder."""
    monkeypatch.setattr(causes, "memory_kills", lambda: 1)
    begin(tmp_path).resume(3)
    for path in (tmp_path / "run" / "starts" / "0001").iterdir():
        if path.name not in left:
            path.unlink()
    assert begin(tmp_path).failures() == (-1, 0, "")


def test_accounts_of_random_histories():
    for seed in range(200):
        starts, steps, redone, productive, thrown_away = history(random.Random(seed))
        result = account(starts)
        assert (result.steps, result.redone) == (steps, redone), seed
        assert result.seconds["productive"] == pytest.approx(productive, abs=1e-9), seed
        assert result.seconds["redone"] == pytest.approx(thrown_away, abs=1e-9), seed
        assert all(seconds >= -1e-9 for seconds in result.seconds.values()), seed


def test_a_damaged_record_is_read_as_far_as_it_goes(interrupted, tmp_path):
    folder, _ = interrupted
    for start in (folder / "starts").iterdir():
        (tmp_path / "starts" / start.name).mkdir(parents=True)
        (tmp_path / "starts" / start.name / "time.jsonl").write_bytes(
            (start / "time.jsonl").read_bytes()[:-100] + b"\0{]\xff\n[1]\n"
        )
        (tmp_path / "starts" / start.name / "end.json").write_text('{"exit_code": ')
    (tmp_path / "starts" / "0006").mkdir()
    (tmp_path / "starts" / "notes").mkdir()
    result = account(read(tmp_path))
    assert len(read(tmp_path)) == 6 and all(seconds >= 0 for seconds in result.seconds.values())
    assert all(row["how"] in ("failed", "no end") for row in result.interruptions)


# The code -----------------------------------------------------------------------------------------


def test_code_outside_of_git_and_a_diff_of_bounded_size(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text("a = 1\n")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    # cached per process, and this test edits files between calls
    monkeypatch.setattr(record, "source_files", record.source_files.__wrapped__)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    outside = record.code()
    assert outside["commit"] == record.changes() == ""
    assert outside["files"].keys() == {"train.py", "models/__init__.py"}
    identity = "-c user.name=x -c user.email=x@x -c commit.gpgsign=false"
    commit = f"git init -q && git add train.py && git {identity} commit -qm 1 >/dev/null"
    assert os.system(f"cd {tmp_path} && {commit}") == 0
    (tmp_path / "train.py").write_text("a = 2\n")
    (tmp_path / "models" / "new.py").write_text("b = 3\n")
    inside = record.code()
    assert len(inside["commit"]) == 40
    assert inside["files"]["train.py"] != outside["files"]["train.py"]
    assert "+a = 2" in record.changes() and "+b = 3" in record.changes(), "new files too"
    monkeypatch.setattr(record, "DIFF_BYTES", 50)
    assert len(record.changes()) < 200 and "[cut: this diff has" in record.changes()
    monkeypatch.setenv("PATH", "/nowhere")
    assert record.changes() == "" and record.code()["commit"] == ""


def test_an_unchanged_diff_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "changes", lambda: "a diff")
    for _ in range(3):
        with begin(tmp_path) as start:
            start.code = 0
    about = [start.about["code"]["changes"] for start in read(tmp_path / "run")]
    assert about == ["0001/changes.diff"] * 3
    assert len(list((tmp_path / "run").rglob("changes.diff"))) == 1


# What to expect -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hours, stall, detect, restart, interval, write",
    [(3, 1, 35, 150, 0, 0), (0.1, 10, 30, 300, 120, 30)],
)
def test_a_simulated_run_has_the_shares_that_are_expected(
    hours, stall, detect, restart, interval, write
):
    mtbf = hours * 3600
    interval = interval or tool.best_interval(mtbf, stall)
    shares = tool.shares(mtbf, stall, detect, restart, interval, write)
    assert sum(shares.values()) == pytest.approx(1)
    expected = tool.expected(mtbf, stall, detect + restart, interval, write)
    assert shares["productive"] == pytest.approx(expected)
    seconds = simulated(mtbf, stall, detect, restart, interval, write)
    total = sum(seconds.values())
    for kind, share in shares.items():
        assert seconds[kind] / total == pytest.approx(share, abs=0.002), kind


def simulated(mtbf, stall, detect, restart, interval, write) -> dict[str, float]:
    """Return the seconds by kind of a run that is interrupted 100,000 times."""
    draw = random.Random(1)
    seconds = dict.fromkeys(("productive", "save", "redone", "detecting", "starting"), 0.0)
    fails = draw.expovariate(1 / mtbf)  # seconds from now to the next failure
    for _ in range(100_000):
        # that were published before it
        saves = max(0, math.floor((fails - write) / (interval + stall)))
        whole, rest = divmod(fails, interval + stall)
        worked = whole * interval + min(rest, interval)
        seconds["productive"] += saves * interval
        seconds["redone"] += worked - saves * interval
        seconds["save"] += fails - worked
        back = 0.0
        while back <= detect + restart:  # a failure may also strike while the run comes back
            back = fails = draw.expovariate(1 / mtbf)
            seconds["detecting"] += min(back, detect)
            seconds["starting"] += min(max(back - detect, 0.0), restart)
        fails -= detect + restart
    return seconds


def test_the_best_interval():
    for mtbf, stall in ((10_800, 1), (3600, 60), (500, 100)):
        best = tool.best_interval(mtbf, stall)
        around = [
            tool.expected(mtbf, stall, 100, best * factor) for factor in (0.7, 0.97, 1, 1.03, 1.4)
        ]
        assert max(around) == around[2]
        young = (2 * stall * mtbf) ** 0.5
        # his equation 37
        daly = young * (1 + (stall / 2 / mtbf) ** 0.5 / 3 + stall / 18 / mtbf) - stall
        assert abs(best / daly - 1) < 0.01
    assert abs(tool.best_interval(10_800, 0.01) / (2 * 0.01 * 10_800) ** 0.5 - 1) < 0.01


def test_published_runs_are_plausible():
    """Llama 3 405B on 16,384 GPUs: more than 90% (arXiv:2407.21783, section 3.3.4), with storage of
    2 TB/s (section 3.3.1). On some 100,000 GPUs 44% with stalls of 10 minutes, and 80% with 3, where
    a replica fails alone (arXiv:2602.00277, abstract): the interval between failures that the first
    implies gives about the second."""
    mtbf = 54 * 86400 / 419
    written = 405.9e9 * 12 / 2e12
    llama = tool.expected(mtbf, 0.0, 600, written, written)
    assert 0.9 < llama < 0.97
    implied = 600 / -math.log(0.44)
    assert tool.expected(implied, 0.0, 180, 1.0, 0.0) == pytest.approx(0.8, abs=0.03)
