"""Stopping on request, in every window of a run; and dying, when a rank hangs."""

import ctypes
import itertools
import json
import logging
import logging.handlers
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import train
from checkpoint import hf, state
from reliability import health, stop
from tests.launched import Launcher, ended
from tests.programs import ROOT, environment
from tests.ranks import WORKERS, run_ranks, step_timeout, wait_until
from tests.runs import MESHES, ends, run, samples, series, tiny_run
from training import validate

STEPS, TWO = 12, MESHES["fsdp2"][1]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Return the options of a tiny run; the uninterrupted run is in folder `whole` next to its
    corpus."""
    place = tmp_path_factory.mktemp("run")
    made = [
        *tiny_run(place),
        *TWO,
        f"--training.steps={STEPS}",
        "--checkpoint.interval=4",
        "--training.local_batch_size=1",
        "--validation.interval=4",
        "--validation.steps=3",
        "--data.validation_fraction=0.2",
        "--checkpoint.keep_last=1",
    ]
    (place / "whole").mkdir()
    assert run_ranks(2, run, made, place / "whole") == [(0, "")] * 2
    return made


def whole(options: list[str]) -> Path:
    return (
        Path(next(o for o in options if o.startswith("--data.cache=")).partition("=")[2]).parent
        / "whole"
    )


def kill(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def once(fn: Callable, then: Callable, calls: int) -> Callable:
    """fn, but at its n-th call `then` happens first."""
    count = 0

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls:
            then()
        return fn(*args, **kwargs)

    return counting


# Where the signal comes: each puts it there, in a rank's process.


def in_preparation() -> None:
    train.open_corpora = once(train.open_corpora, kill, 1)


def between_microbatches() -> None:
    """4 microbatches on each of 2 ranks: the third of step 6."""
    train.linear_cross_entropy = once(train.linear_cross_entropy, kill, 5 * 4 + 3)


def in_validation() -> None:
    """The second batch after step 4."""
    real = validate.validate
    validate.validate = lambda model, mesh, batches, *rest: real(
        model, mesh, signalled(batches), *rest
    )

    def signalled(batches):
        for i, batch in enumerate(batches):
            if i == 1:
                kill()
            yield batch


def while_a_save_is_written() -> None:
    """After step 4 the thread has only begun."""
    state.stage = once(state.stage, lambda: (kill(), time.sleep(0.5)), 1)


def while_an_old_checkpoint_is_removed() -> None:
    """When step 8 is published and 4 goes. Step 10 waits for that: on a busy machine the thread that
    publishes could be any number of steps late."""
    removing = threading.Event()

    def signalled():
        kill()
        removing.set()
        time.sleep(0.5)

    shutil.rmtree = once(shutil.rmtree, signalled, 1)
    if dist.get_rank() == 0:  # the one that removes
        train.train_step = once(train.train_step, lambda: removing.wait(60 * WORKERS), 10)


# where, and how many steps the run may have done; a removal begins when all ranks know that the
# save is done
WINDOWS = {
    in_preparation: None,
    between_microbatches: (5, 6),
    in_validation: (3, 4),
    while_a_save_is_written: (4, 5),
    while_an_old_checkpoint_is_removed: (8, 9, 10),
}
SHORT = (in_validation, while_a_save_is_written)


def start(
    folder: Path, options: list[str], window: Callable | None, only: int | None = None
) -> tuple[int, str]:
    if window and only in (None, dist.get_rank()):
        window()
    return run(options, folder)


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(w, marks=() if w in SHORT else pytest.mark.torture, id=w.__name__)
        for w in WINDOWS
    ],
)
def test_a_signal_stops_the_run_at_any_point_with_a_checkpoint(window, options, tmp_path):
    """At most one step later it is saved, and the resumed run is bitwise the uninterrupted one."""
    assert ends(2, tmp_path / "ranks", start, tmp_path, options, window) == [75, 75]
    steps = WINDOWS[window]
    saved = sorted(int(p.name[5:]) for p in tmp_path.glob("checkpoints/step-*"))
    end = json.loads((tmp_path / "starts" / "0001" / "end.json").read_text())
    if steps is None:
        assert not saved and not (tmp_path / "metrics.jsonl").exists() or series(tmp_path) == {}
        assert "nothing to save" in end["reason"] and end["exit_code"] == 75
    else:
        assert saved[-1] in steps and max(series(tmp_path)) == saved[-1] == end["step"]
    assert run_ranks(2, run, options, tmp_path) == [(0, "")] * 2
    for key in ("loss", "grad_norm"):
        assert series(tmp_path, key) == series(whole(options), key)
    assert samples(tmp_path, 2)[-STEPS:] == samples(whole(options), 2)


def stopped_in_step_6(folder: Path, options: list[str], number: signal.Signals, only: int):
    if dist.get_rank() == only:
        train.train_step = once(train.train_step, partial(kill, number), 6)
    return run(options, folder)


@pytest.mark.parametrize(
    ("number", "only"),
    [(signal.SIGTERM, 1), (signal.SIGUSR2, 0)],
    ids=["one rank only", "SIGUSR2 to one"],
)
def test_all_ranks_stop_at_the_same_step(number, only, options, tmp_path):
    assert run_ranks(2, stopped_in_step_6, tmp_path, options, number, only) == [(75, "")] * 2
    assert max(series(tmp_path)) == 6 and (tmp_path / "checkpoints" / "step-00000006").is_dir()
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert log.count(f"stopped on request after step 6 of {STEPS}; run the same command again") == 1


def each_for_itself(folder: Path, options: list[str]) -> tuple[int, str]:
    real = train.train_step

    def deaf(job, batch, skip_above, replay, flags):
        return replace(real(job, batch, skip_above, replay, flags), flags=flags())

    train.train_step = deaf
    return stopped_in_step_6(folder, options, signal.SIGTERM, 1)


@pytest.mark.torture
def test_negative_control_ranks_that_do_not_agree_stop_at_different_steps(options, tmp_path):
    """The negative control."""
    given = [*options, step_timeout(2)]
    assert ends(2, tmp_path / "ranks", each_for_itself, tmp_path, given, seconds=20) != [75, 75]


def signalled_twice(folder: Path, options: list[str]) -> tuple[int, str]:
    stop.ECHO = 0.1

    def deaf():
        def again():
            kill()
            time.sleep(0.5)
            kill()

        threading.Thread(target=again).start()
        dist.new_group([0], backend="gloo").rank()
        dist.distributed_c10d._get_default_store().get("never set")  # waits in C

    train.train_step = once(train.train_step, deaf, 6)
    return run(options, folder)


def test_the_same_signal_again_ends_the_process_at_once(options, tmp_path):
    """The signal ends even a process whose main thread is blocked; what was saved stays."""
    options = [o for o in options if not o.startswith("--parallelism")]
    assert ends(1, tmp_path / "ranks", signalled_twice, tmp_path, options) == [128 + signal.SIGTERM]
    assert [p.name for p in tmp_path.glob("checkpoints/step-*")] == ["step-00000004"]
    end = json.loads((tmp_path / "starts" / "0001" / "end.json").read_text())
    assert end["exit_code"] == 143 and "a second time" in end["reason"]


def test_the_first_ctrl_c_says_what_it_does_and_its_echo_nothing():
    heard = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(heard)
    stop.logger.addHandler(handler)
    try:
        with stop.Stop(time.monotonic(), 0, print) as asked:
            asked.at_once = False
            os.kill(os.getpid(), signal.SIGINT)
            first = heard.get(timeout=10 * WORKERS).getMessage()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            assert asked.asked()
    finally:
        stop.logger.removeHandler(handler)
    again = "Ctrl-C again after 2 s ends without saving"
    assert first == f"SIGINT: stopping after this step and saving; {again}" and heard.empty()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue:
    """Return the codes and reasons with which this process would have ended."""
    monkeypatch.setattr(stop, "ECHO", 0.2)
    found = queue.SimpleQueue()
    monkeypatch.setattr(stop.Stop, "_leave", lambda _, code, reason: found.put((code, reason)))
    return found


def test_another_signal_during_a_stop_is_no_repeat(left):
    """Slurm sends SIGUSR1, and SIGTERM later: the save is waited for. The same one again ends it."""
    with stop.Stop(time.monotonic(), 0, print) as asked:
        asked.at_once = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.5)
        assert left.empty()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert left.get(timeout=10 * WORKERS)[0] == 128 + signal.SIGUSR1 and left.empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_run_ends_at_once(number, left):
    """A person does not want it back, a scheduler does."""
    with stop.Stop(time.monotonic(), 0, print):
        os.kill(os.getpid(), number)
        code, reason = left.get(timeout=10 * WORKERS)
    assert code == (130 if number == signal.SIGINT else 75)
    assert reason == f"stopped by {number.name} before the first step was done: nothing to save"


def test_a_signal_after_the_last_save_says_what_is_saved(left):
    """What is left asks whether it is to end; the same signal again ends the process."""
    with stop.Stop(time.monotonic(), 0, print) as asked:
        asked.saved = 20
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        assert left.empty() and asked.asked()
        os.kill(os.getpid(), signal.SIGINT)
        code, reason = left.get(timeout=10 * WORKERS)
    assert code == 75
    assert reason == "SIGINT a second time: step 20 is saved, and the run ends at once"


def in_the_last_step() -> None:
    train.train_step = once(train.train_step, partial(kill, signal.SIGINT), STEPS)


def in_the_export() -> None:
    """With its file begun."""
    hf.write_safetensors = once(hf.write_safetensors, partial(kill, signal.SIGINT), 1)


@pytest.mark.slow
def test_a_signal_in_the_last_step_leaves_no_score_out(options, tmp_path):
    """No later start would compute it: it comes when all is saved, and the run is done."""
    more = [*options, "--debug.sample_tokens=100"]
    assert ends(2, tmp_path / "ranks", start, tmp_path, more, in_the_last_step) == [0, 0]
    assert series(tmp_path, "validation_loss") == series(whole(options), "validation_loss")
    said = (tmp_path / "logs" / "rank-00000.log").read_text()
    put_off = f"step {STEPS}: the validation comes after the save, since the run is to stop"
    assert put_off in said
    assert "a sample from the final weights, cut short since the run is to stop:" in said
    assert json.loads((tmp_path / "starts" / "0001" / "end.json").read_text())["exit_code"] == 0


def test_an_export_that_is_stopped_is_made_by_the_next_start(options, tmp_path):
    """The run is not done before. Nothing is left of the first try, not even of one that was
    killed."""
    options = [*(o for o in options if not o.startswith("--parallelism")), "--training.steps=3"]
    options.append("--checkpoint.export_hf=float32")
    assert ends(1, tmp_path / "ranks", start, tmp_path, options, in_the_export) == [75]
    said = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "is left out, since the run is to stop: the same command makes it" in said
    assert not list((tmp_path / "hf").iterdir())
    (tmp_path / "hf" / ".tmp-0123abcd-step-00000003").mkdir()
    assert run_ranks(1, run, options, tmp_path) == [(0, "")]
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-00000003"]


AT_THE_END = """import ctypes
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).getchar, ctypes.c_void_p))
"""


def is_caught(number: signal.Signals, process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) & 1 << number - 1)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_while_libraries_end_leaves_the_exit_code(number, tmp_path):
    """Python has then taken its handlers away, and torch takes a second to end. Here getchar does,
    which returns when the test closes the other end."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END)
    given = [*tiny_run(tmp_path), "--training.steps=4", f"--run.folder={tmp_path}/run"]
    ending = subprocess.Popen(
        [sys.executable, "train.py", *given],
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        wait_until(lambda: is_caught(number, ending.pid))
        wait_until(lambda: not is_caught(number, ending.pid))
        ending.send_signal(number)
    finally:
        ending.stdin.close()
        code = ending.wait(60 * WORKERS)
    assert code == 0


def test_libraries_that_hang_at_the_end_are_ended(tmp_path):
    """getchar returns only when the other end is closed."""
    soon = "from configs import program\nprogram.LIBRARIES_END = 0.5\n"
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END + soon)
    with subprocess.Popen(
        [sys.executable, "-m", "configs.load", "--help"],
        env=environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    ) as ending:
        assert ending.wait(60 * WORKERS) == -signal.SIGALRM


def limited(folder: Path, options: list[str], seconds: float, pause: float) -> tuple[int, str]:
    """Do a run whose third step takes `pause` seconds more than the others, with a limit of so many
    seconds from now."""
    real, steps = stop.Stop.__init__, itertools.count(1)

    def born_now(self, born, max_minutes, end):
        real(self, time.monotonic(), max_minutes, end)

    def slow(job, batch, *options, real=train.train_step):
        if next(steps) == 3:
            time.sleep(pause)
        return real(job, batch, *options)

    stop.Stop.__init__, train.train_step = born_now, slow
    return run([*options, f"--run.max_minutes={seconds / 60}"], folder)


@pytest.mark.slow
def test_the_time_limit_stops_as_a_signal_does(options, tmp_path):
    """The limit counts from the start of the process, so it is over before the first step, or
    within the third one."""
    assert ends(1, tmp_path / "a", limited, tmp_path, options, 0.0006, 0.0) == [75]
    assert not list(tmp_path.glob("checkpoints/step-*"))
    seconds = 4.0 * WORKERS
    assert ends(1, tmp_path / "b", limited, tmp_path, options, seconds, seconds) == [75]
    assert max(series(tmp_path)) == 3


# Hanging


def hang(how: str) -> None:
    if how == "loop":
        while True:
            time.sleep(0.01)
    ctypes.PyDLL(None).sleep(600)  # in C, without releasing the GIL


def hung(folder: Path, options: list[str], how: str) -> tuple[int, str]:
    health.Watchdog.GRACE = 2.0
    if dist.get_rank() == 1:
        train.train_step = once(train.train_step, lambda: hang(how), 3)
    return run(options, folder)


@pytest.mark.parametrize("how", ["loop", pytest.param("holds the GIL", marks=pytest.mark.torture)])
def test_a_hung_rank_ends_and_leaves_its_stacks(how, options, tmp_path):
    """The hung rank dies of its watchdog, and the rank that waited for it of the collective; both
    leave the stacks of all threads."""
    codes = ends(2, tmp_path / "ranks", hung, tmp_path, [*options, step_timeout(1)], how)
    assert codes[1] == -signal.SIGALRM and codes[0] in (1, -signal.SIGALRM), codes
    stacks = (tmp_path / "logs" / "rank-00001.stacks").read_text()
    assert " in hang" in stacks and " in train_step" not in stacks and stacks.count("hread 0x") >= 2
    waiting = (tmp_path / "logs" / "rank-00000.stacks").read_text()
    assert "in train_step" in waiting and waiting.count("hread 0x") >= 1


def limits_of_a_run(folder: Path, options: list[str]) -> list[float]:
    real, limits = health.Watchdog.arm, []
    health.Watchdog.arm = lambda watchdog, seconds, *phase: (
        limits.append(seconds),
        real(watchdog, seconds, *phase),
    )[1]
    assert run(options, folder) == (0, "")
    return limits


def test_a_batch_has_its_own_time_limit_on_top_of_the_steps(options, tmp_path):
    limits = [
        "--run.init_timeout_seconds=900",
        "--run.step_timeout_seconds=500",
        "--data.timeout_seconds=70",
    ]
    [seen] = run_ranks(1, limits_of_a_run, tmp_path, [*options, *limits])
    first, others = (970, 900), (570, 500)
    pairs = list(zip(seen, seen[1:]))
    assert pairs.count(first) == 1 and pairs.count(others) == STEPS - 1


def dumping(folder: Path, seconds: float) -> bool:
    """Stacks are written while threads that are not Python's call it for the first time, as gloo's
    and autograd's do. They are joined: one that outlives `callback` would call freed memory."""
    libc = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    (folder / "logs").mkdir()
    sys.setswitchinterval(1e-5)
    end = time.monotonic() + seconds
    with health.Watchdog(folder, 0) as watchdog:
        while time.monotonic() < end:
            threads = [ctypes.c_ulong() for _ in range(4)]
            for thread in threads:
                libc.pthread_create(ctypes.byref(thread), None, callback, None)
            watchdog.stacks()
            for thread in threads:
                libc.pthread_join(thread, None)
            watchdog.file.seek(0)
            watchdog.file.truncate()
        watchdog.stacks()
    return "in dumping" in (folder / "logs" / "rank-00000.stacks").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts threads by the C library")
def test_stacks_are_written_while_threads_start_and_end(tmp_path):
    assert run_ranks(1, dumping, tmp_path, 2.0) == [True]


PATIENT = """
import sys
from datetime import timedelta
import torch.distributed as dist
import train
from reliability.health import Watchdog
from tests import test_signals
real_step, real_limit = train.train_step, dist.distributed_c10d._set_pg_timeout
def step(job, batch, *options, count=[0]):
    count[0] += 1
    if count[0] == 3 and job.mesh.rank == 1:
        test_signals.hang("loop")
    return real_step(job, batch, *options)
train.train_step = step
dist.distributed_c10d._set_pg_timeout = lambda limit, group: real_limit(limit + timedelta(seconds=60), group)
Watchdog.GRACE = 4 if train.meshes.world().rank else 2
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.torture
def test_the_rank_that_hung_is_named_where_the_waiting_ranks_die_as_with_nccl(options, tmp_path):
    """NCCL throws a minute after its limit, so the rank that waits dies of its own watchdog too:
    here it is even the first. But it has begun one collective more than the one that hangs."""
    (tmp_path / "wrapper.py").write_text(PATIENT)
    given = [f"--run.folder={tmp_path / 'run'}", *options, step_timeout(3)]
    words = ["--nproc-per-node=2", tmp_path / "wrapper.py", *given]
    (code,), errors = ended([Launcher(words, tmp_path / "said")], 100)
    said = [line for line in errors.splitlines() if line.startswith("launch: rank")]
    assert code == 128 + signal.SIGALRM, errors
    assert said[0].startswith("launch: rank 1 on") and "is behind: it had begun" in said[0], said
    killed = ("launch: rank 1 on", "killed by SIGALRM", "rank-00001.stacks")
    assert all(word in said[1] for word in killed), said
    assert " in hang" in (tmp_path / "run" / "logs" / "rank-00001.stacks").read_text()
