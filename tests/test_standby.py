"""Processes that have imported torch and wait for a restart (tools/launch/standby.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from reliability import goodput
from tests.programs import ROOT
from tests.ranks import WORKERS
from tests.runs import STEPS, free_port, series, tiny_run
from tools.launch.rank import STANDBY
from tools.launch.standby import Standby

SCRIPT = """
import json, os, sys
about = {"pid": os.getpid(), "had torch": "torch" in sys.modules, "rank": os.environ["RANK"]}
about["ours"] = [name for name in ("train", "models", "checkpoint") if name in sys.modules]
about["words"] = sys.argv[1:]
with open(f"{os.environ['ANSWER']}-{os.getpid()}", "w") as file:
    json.dump(about | {"standby": "PLUMBLINE_STANDBY" in os.environ}, file)
"""


@pytest.fixture
def command(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    (tmp_path / "script.py").write_text(SCRIPT)
    rank = ["-u", "-m", "tools.launch.rank", str(os.getpid()), str(tmp_path / "script.py"), "word"]
    return [sys.executable, *rank]


def prepared(command: list[str], count: int) -> Standby:
    standby = Standby(command, count)
    standby.begin(more=True)
    standby.prepare()
    assert not standby.waiting  # the ranks need the cores
    standby.due = 0.0
    standby.prepare()
    return standby


@pytest.mark.slow
def test_a_process_that_waits_becomes_a_rank(command, tmp_path):
    """It has the environment and the arguments of a new one, and no module of ours. One that has
    died while it waited is replaced by a new process."""
    environment = os.environ | {"RANK": "3", "ANSWER": str(tmp_path / "answer")}
    handler = SimpleNamespace(_stdout=None, _stderr=None)
    with prepared(command, 2) as standby:
        (dies, _), (waits, _) = standby.waiting
        dies.kill()
        dies.wait()
        first, second = (standby.take(handler, command, environment) for _ in range(2))
        assert first is waits and not standby.waiting
    same = {"rank": "3", "words": ["word"], "standby": False, "ours": []}
    for process, had_torch in (first, True), (second, False):
        assert process.wait(60 * WORKERS) == 0
        answer = json.loads((tmp_path / f"answer-{process.pid}").read_text())
        assert answer == {"pid": process.pid, "had torch": had_torch} | same


@pytest.mark.slow
def test_a_process_that_waits_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = [*tiny_run(tmp_path), f"--run.folder={tmp_path / 'run'}"]
    rank = ["-u", "-m", "tools.launch.rank", str(os.getpid()), "train.py", *options]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with prepared([sys.executable, *rank], 1) as standby:
        [(waits, _)] = standby.waiting
        time.sleep(1)
        taken = time.time()
        process = standby.take(None, rank, os.environ | alone | meets)
        assert process is waits and process.wait(90 * WORKERS) == 0
    assert len(series(tmp_path / "run")) == STEPS
    # the seconds in which it waited are those of the start before
    [start] = goodput.read(tmp_path / "run")
    assert start.lines[0]["time"] >= round(taken, 3)


@pytest.mark.slow
def test_those_that_wait_end_with_the_launcher(command):
    with prepared(command, 1) as standby:
        [(waits, _)] = standby.waiting
    assert waits.returncode == -signal.SIGKILL
    theirs, ours = os.pipe()
    launcher_gone = subprocess.Popen(
        command, env=os.environ | {STANDBY: str(theirs)}, pass_fds=[theirs], stderr=subprocess.PIPE
    )
    os.close(theirs)
    os.close(ours)
    assert "the launcher is gone" in launcher_gone.communicate(timeout=60 * WORKERS)[1].decode()


def test_the_last_start_prepares_none(command):
    with Standby(command, 2) as standby:
        standby.begin(more=False)
        standby.due = 0.0
        standby.prepare()
        assert not standby.waiting
