"""Ctrl-C in every tool, and stop signals to a run that does not listen itself: exit codes, words, no
traceback at any moment (configs/program.py)."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.programs import PYTHON, environment, finished
from tests.ranks import WORKERS, wait_until
from tests.runs import free_port

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def programs() -> list[str]:
    """Every module of ours that is started with `python -m`."""
    names = []
    for package in ("tools", "lab", "data", "checkpoint", "configs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                names.append(module.removesuffix(".__main__"))
    return names


def test_every_program_begins_and_ends_the_same_way():
    """A `main` that is called by itself would show a traceback."""
    own = {
        "tools.launch": "leave(main(",
        "tools.launch.rank": "main(pid, ",
        "tools.preflight": "os._exit(",
    }
    assert len(programs()) > 25
    for name in programs():
        path = ROOT / name.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        last = file.read_text(encoding="utf-8").partition('if __name__ == "__main__":')[2]
        assert own.get(name, "program.run(main") in last, f"{name} ends with program.run(main)"


def hangs_up() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Started:
    """A program that the test signals."""

    def __init__(self, *command: object, **settings: str) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=settings.pop("cwd", ROOT),
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hangs_up,  # also where nohup started the tests
        )

    def wait_until(self, ready: Callable[[int], bool], seconds: float = 60) -> "Started":
        def complaint() -> str:
            self.process.kill()
            return f"it did not come so far: {self.process.communicate()}"

        pid, ended = self.process.pid, lambda: self.process.poll() is not None
        wait_until(lambda: ready(pid), seconds, complaint, 0.005, ended)
        return self

    def gets(self, number: signal.Signals) -> "Started":
        """Send a signal to every process of the group, like a terminal."""
        os.killpg(self.process.pid, number)
        return self

    def end(self, seconds: float = 20) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds * WORKERS)
        return self.process.returncode, out, err


def listens(pid: int) -> bool:
    """Return True if the thread of configs/program.py runs."""
    return len(os.listdir(f"/proc/{pid}/task")) > 1


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
@pytest.mark.cap(300)
def test_ctrl_c_while_any_tool_is_imported():
    """Before it knows its arguments. All end alike: test_every_program_begins_and_ends_the_same_way."""
    for name in ("tools.launch", "tools.mirror", "tools.plan", "data.prepare", "checkpoint.verify"):
        for _ in range(5):
            done = Started(sys.executable, "-m", name).wait_until(listens).gets(signal.SIGINT).end()
            if (
                done[0] != 2
            ):  # on a busy machine it may have refused its arguments before the signal
                break
        if name in ("tools.launch", "tools.mirror"):
            assert done == (130, "", "interrupted before training began\n"), name
        else:
            code, _, error = done  # a quick one has printed by now
            assert (code, error) == (130, "interrupted\n"), name


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.cap(240)
def test_ctrl_c_while_processes_work_for_it():
    """The processes are killed, and print nothing."""
    command = ("tools.plan", "configs/llama_8b.toml", "--gpus=64", "--search")
    started = Started(sys.executable, "-m", *command)
    started.wait_until(lambda pid: len(children(pid)) > 1, 120)
    time.sleep(0.5)
    code, _, err = started.gets(signal.SIGINT).end()
    assert (code, err.splitlines()[-1]) == (130, "interrupted") and "Traceback" not in err
    with pytest.raises(ProcessLookupError):  # its group is empty
        for _ in range(100):
            os.killpg(started.process.pid, 0)
            time.sleep(0.05)


# main of a program without torch; what it prints is the moment of the signal
MAINS = {
    "cleans up": """
    try: waits()
    finally: print("cleaned")
    """,
    "in C": """
    print("now", flush=True)
    ctypes.CDLL(None).sleep(30)
    """,
    "in a destructor": """
    class Dropped:
        def __del__(self): waits()
    Dropped()
    waits()
    """,
    "in a fork": """
    if not os.fork(): waits()
    os.wait()
    """,
    "while closing": """
    atexit.register(waits)
    """,
}
PROGRAM = """
import atexit, ctypes, os, signal, sys, tempfile, time
from configs import program
with_process = []
def waits():
    print("now", flush=True)
    time.sleep(30)
def main():
{main}
if __name__ == "__main__": {end}
"""


def program(folder: Path, main: str, end: str = "program.run(main)") -> Started:
    (folder / "ours").mkdir()
    (folder / "ours/__init__.py").write_text("import configs.cpu\n" if "run" in end else "")
    (folder / "ours/program.py").write_text(PROGRAM.format(main=main, end=end))
    (folder / "temporary").mkdir()
    settings = {"cwd": folder, "PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": f"{folder}/temporary"}
    started = Started(sys.executable, "-m", "ours.program", **settings)
    assert started.process.stdout.readline() == "now\n"
    return started


@pytest.mark.parametrize(
    "main",
    [pytest.param(main, marks=() if main == "cleans up" else pytest.mark.slow) for main in MAINS],
)
def test_ctrl_c_at_any_moment_of_a_tool(main, tmp_path):
    code, out, err = program(tmp_path, MAINS[main]).gets(signal.SIGINT).end()
    assert (code, err) == (130, "interrupted\n")
    assert out == ("cleaned\n" if main == "cleans up" else "")
    assert not list(tmp_path.glob("temporary/*"))


@pytest.mark.slow
def test_without_it_there_is_a_traceback(tmp_path):
    """The negative control."""
    started = program(tmp_path, MAINS["cleans up"], "sys.exit(main())")
    code, _, err = started.gets(signal.SIGINT).end()
    assert code == -signal.SIGINT and "Traceback" in err


@pytest.mark.slow
def test_ctrl_c_again_ends_a_tool_that_takes_long_to_clean_up(tmp_path):
    """The echo of the first one does not."""
    main = """
    try: waits()
    finally: waits()
    """
    started = program(tmp_path, main).gets(signal.SIGINT)
    assert started.process.stdout.readline() == "now\n"
    started.gets(signal.SIGINT)
    time.sleep(1.3)
    assert started.process.poll() is None
    code, _, err = started.gets(signal.SIGINT).end()
    assert (code, err) == (130, "interrupted again: ended at once\n")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_that_does_not_listen_yet_is_75_and_130_after_ctrl_c(number):
    """torch is being imported."""
    code, out, err = Started(sys.executable, "train.py").wait_until(listens).gets(number).end()
    expected = (75, f"stopped by {number.name} before training began: run it again to go on\n")
    if number == signal.SIGINT:
        expected = (130, "interrupted before training began\n")
    assert (code, out, err) == (expected[0], "", expected[1])


# the thread does not run before the main thread waits
OTHER_HANDLER = """
import signal, sys, time
from configs.program import Program
Program(is_run=True).listen()
sys.setswitchinterval(60)
signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, print)
time.sleep(5)
"""


def test_a_signal_that_comes_just_before_a_run_sets_another_handler_is_75():
    done = finished(PYTHON, "-c", OTHER_HANDLER)
    sentence = "stopped by SIGTERM before training began: run it again to go on\n"
    assert (done.returncode, done.stderr) == (75, sentence)


@pytest.mark.slow
def test_what_nohup_ignores_stays_ignored():
    line = f"trap '' HUP; exec {sys.executable} train.py"
    started = Started("bash", "-c", line).wait_until(listens).gets(signal.SIGHUP)
    time.sleep(0.1)
    assert started.process.poll() is None
    assert started.gets(signal.SIGTERM).end()[0] == 75


@pytest.mark.waits
def test_a_rank_that_waits_for_the_others_is_75(tmp_path):
    """Python's handlers do not run while the process group is opened."""
    port = free_port()
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = Started(sys.executable, "train.py", f"--run.folder={tmp_path}", **world)

    def has_opened(pid: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    code, _, err = started.wait_until(has_opened).gets(signal.SIGUSR1).end()
    assert code == 75 and re.match(r"stopped by SIGUSR1 before training began: .*\n$", err), err


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        signal.SIGINT,
    ],
)
def test_a_signal_before_the_configuration_is_checked(number):
    """The script gets it alone, as Slurm's --signal=B: sends it."""
    started = Started("./run_train.sh").wait_until(children)
    started.process.send_signal(number)
    code, _, err = started.end()
    if number == signal.SIGINT:
        assert (code, err) == (130, "plumbline: interrupted before training began\n")
    else:
        sentence = f"stopped by {number.name} before training began: run it again to go on"
        assert (code, err) == (75, f"plumbline: {sentence}\n")


def runs(pid: int, words: bytes) -> bool:
    """Return True if a process, or a child of it, is a Python that was given these words."""
    with contextlib.suppress(OSError):  # one has ended
        for one in (pid, *children(pid)):
            program, _, given = Path(f"/proc/{one}/cmdline").read_bytes().partition(b"\0")
            if b"python" in program and given.startswith(words):
                return True
    return False


@pytest.mark.parametrize(
    "words", [b"-m\0tools.check", pytest.param(b"train.py", marks=pytest.mark.slow)]
)
def test_ctrl_c_while_python_only_starts_is_one_sentence(words, tmp_path):
    """The press comes as soon as the process is there, before it has imported anything. A terminal
    sends it to all."""
    options = ["--run.device=cpu", f"--run.folder={tmp_path}"]
    started = Started("./run_train.sh", *options).wait_until(partial(runs, words=words))
    code, _, err = started.gets(signal.SIGINT).end()
    assert code == 130
    assert re.fullmatch(r"(plumbline: )?interrupted before training began\n", err), err


def test_streams_that_the_parent_has_closed_go_nowhere(tmp_path):
    """Python has none then, and the next file that is opened would be what C writes errors to."""
    text = f"""
from configs import program
program.open_streams()
print("out", file=program.sys.stderr)
with open("{tmp_path}/file", "w") as file:
    file.write(str(file.fileno()))
"""
    line = f"exec {sys.executable} -c '{text}' <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment(), timeout=60 * WORKERS)
    assert done.returncode == 0 and int((tmp_path / "file").read_text()) > 2


@pytest.mark.waits
def test_at_a_terminal_a_tool_is_not_silent_for_more_than_five_seconds(tmp_path):
    """A tool says where it is. One that prints by itself is left alone, as is one without a
    terminal."""
    main = """
    for _ in range(3):
        print("mine")
        time.sleep(1.9)
    time.sleep(5.5)
    """
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/__init__.py").write_text("import configs.cpu\n")
    text = PROGRAM.format(main=main, end="program.run(main)")
    (tmp_path / "ours/program.py").write_text(text)
    told, terminal = os.openpty()
    with os.fdopen(told, "rb") as reader:
        process = subprocess.Popen(
            [sys.executable, "-m", "ours.program"],
            cwd=tmp_path,
            env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        assert process.wait(60 * WORKERS) == 0
        said = os.read(reader.fileno(), 4096).decode()
    assert re.fullmatch(r"(mine\r\n){3}at work for \d+ s: configs/program.py::run\r\n", said), said
