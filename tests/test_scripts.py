"""Scripts and launcher, run for real in separate processes: exit codes, signals, deaths,
environments.

A script of a few lines replaces train.py, so that the tests cover how it is started and how it
ends.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.programs import environment, finished, lives, started
from tests.ranks import WORKERS, wait_until
from tools.launch.launcher import FailedRank, listen
from tools.launch.launcher import _named as named

ROOT = Path(__file__).resolve().parent.parent

# Says "ready RANK PID", then does what its first argument says.
STAND_IN = """
import os, signal, sys, time
from pathlib import Path
rank, action, words = int(os.environ.get("RANK", 0)), sys.argv[1], sys.argv[2:]
stop = []
if action != "default":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stop.append(number) if action != "deaf" else None)
write = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, unlike print
write("ready", rank, os.getpid())
failing = Path(__file__).with_name("failing")
if action == "raise":
    if rank == 0:  # fails while rank 1 is about to end, as a rank does that is sent nothing any more
        for _ in range(100): print("noise of rank 0", file=sys.stderr)
        while not failing.exists(): time.sleep(0.005)
        raise ValueError("a consequence")
    cause = ValueError("the cause")
    cause.failed_at = time.time()  # as reliability/health.py::failure_time notes it
    failing.write_text("")
    time.sleep(0.5)  # saving
    raise cause
if action == "exit" and rank == len(words) - 1:
    sys.exit(int(words[rank]))
deadline = time.monotonic() + 60
while time.monotonic() < deadline and action != "exit":
    time.sleep(0.02)
    if stop and action == "insist":  # a save takes long
        if len(stop) == 2:
            sys.exit(130)
    elif stop:
        time.sleep(0.3)  # saving
        write("stopped by", signal.Signals(stop[0]).name)
        sys.exit(75)
"""


class Started:
    """A command in the background whose ranks have all said that they are ready."""

    def __init__(self, *command: str | Path, ranks: int, cwd: Path = ROOT, **settings: str) -> None:
        self.process = started(*command, cwd=cwd, **settings)
        said = sorted(self.process.stdout.readline().split() for _ in range(ranks))
        expected = [["ready", str(rank)] for rank in range(ranks)]
        assert [line[:2] for line in said] == expected, self.process.communicate()
        self.pids = [int(line[2]) for line in said]

    def end(self) -> tuple[int, str, str, float]:
        """Exit code, stdout, stderr, and the seconds until it ended; asserts that no rank outlived
        it."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=60 * WORKERS)
        seconds = time.monotonic() - began
        wait_until(lambda: not any(map(lives, self.pids)), 3, lambda: "ranks survive")
        return self.process.returncode, out, err, seconds


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "stand-in.py"
    path.write_text(STAND_IN)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a copy of the scripts and their dependencies, with the replacement as train.py and one
    test file."""
    for name in ("run_train.sh", "run_tests.sh", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    # so that the environment of these tests will do
    (tmp_path / "requirements-test.txt").write_text("pytest==8\n")
    for name in ("checkpoint", "configs", "models", "data", "reliability", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests" / "conftest.py")
    (tmp_path / "train.py").write_text(STAND_IN)
    return tmp_path


LAUNCH = (sys.executable, "-m", "tools.launch")


# The launcher -------------------------------------------------------------------------------------


def test_exit_code_of_the_failing_rank(stand_in: Path) -> None:
    done = finished(*LAUNCH, "--nproc-per-node=2", stand_in, "exit", "0", "9")
    assert done.returncode == 9
    assert done.stderr == f"launch: rank 1 on {socket.gethostname()} ended with exit code 9\n"


@pytest.mark.slow
def test_ranks_of_a_run_that_failed_in_a_sentence_are_not_named_too(repository: Path) -> None:
    """The other may be stopped before it trains, and says that."""
    done = finished(*LAUNCH, "--nproc-per-node=2", "train.py", "exit", "0", "1", cwd=repository)
    assert done.returncode == 1 and "rank" not in done.stderr


def test_the_traceback_of_the_first_rank_to_fail_comes_last(stand_in: Path) -> None:
    """Another one fails because of it and ends sooner."""
    done = finished(*LAUNCH, "--nproc-per-node=2", stand_in, "raise")
    assert done.returncode == 1
    _, title, traceback = done.stderr.partition(
        "launch: the traceback of rank 1, the first to fail"
    )
    head, first, script, *_, last = traceback.splitlines()
    assert title and head == " here:" and first == "Traceback (most recent call last):"
    assert script.startswith(f'  File "{stand_in}", line '), "as if it was started by hand"
    assert last == "ValueError: the cause" and "noise" not in traceback


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_a_rank_that_ended_in_a_sentence_or_by_a_signal_is_before_those_that_lost_it(code):
    """Its end is noticed in the second after the one in which the others failed for it."""
    lost_it = {"message": "Traceback ...", "time": 100.7}
    failures = [
        SimpleNamespace(pid=1, exitcode=1, message=lost_it, timestamp=100, signal_name=str),
        SimpleNamespace(pid=2, exitcode=code, message="", timestamp=101, signal_name=str),
    ]
    failed = [FailedRank(rank, failure) for rank, failure in enumerate(failures)]
    assert min(failed, key=FailedRank.blame).rank == 1


@pytest.mark.slow
def test_ranks_that_a_signal_finds_before_they_listen_are_75(stand_in: Path) -> None:
    """A stop during the import of torch, say: nothing to save yet, and a scheduler may start it
    again."""
    run = Started(*LAUNCH, "--nproc-per-node=2", stand_in, "default", ranks=2)
    run.process.send_signal(signal.SIGUSR1)
    code, _, err, _ = run.end()
    sentence = "stopped by SIGUSR1 before training began: run it again to go on"
    lines = err.splitlines()
    assert code == 75 and lines.count(f"launch: {sentence}") == 1
    assert {*lines} <= {f"launch: {sentence}", sentence}  # of a rank that was quicker


def test_the_store_of_several_nodes_listens_on_the_masters_own_address() -> None:
    """The address is one that is known to be reachable; tests/test_two_hosts.py looks at real
    addresses."""
    anywhere = dict.fromkeys(("localhost", "192.0.2.1", "no.such"), "0.0.0.0")
    for address, expected in ({"127.0.0.1": "127.0.0.1"} | anywhere).items():
        with listen(address, 0) as listener:
            assert listener.getsockname()[0] == expected, address


def test_a_signal_reaches_the_ranks_and_their_exit_code_comes_back(stand_in: Path) -> None:
    run = Started(*LAUNCH, "--nproc-per-node=2", stand_in, "wait", ranks=2)
    run.process.send_signal(signal.SIGINT)
    code, out, err, _ = run.end()
    assert (code, err) == (75, "")
    assert out.count("stopped by SIGINT") == 2, "both ranks saved, each told once"


# Of a rank, which waits where Python has its own handler of Ctrl-C and ours is not there yet; the
# first, which says the sentence, is the slower one.
SITE = """
import os, signal, time
if "RANK" in os.environ:
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    deadline = time.monotonic() + 20
    while signal.SIGINT not in signal.sigpending() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0 if int(os.environ["RANK"]) else 1.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script, who", [("train.py", ""), ("tools/check.py", "launch: ")])
def test_ctrl_c_while_python_starts_the_ranks_is_one_sentence(
    script: str, who: str, tmp_path: Path
) -> None:
    """Also of a script that has no handler before it begins."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = f"{tmp_path}:{ROOT}"
    run = Started(*LAUNCH, "--nproc-per-node=2", script, ranks=2, PYTHONPATH=path)
    run.process.send_signal(signal.SIGINT)
    code, out, err, _ = run.end()
    assert (code, out, err) == (130, "", f"{who}interrupted before training began\n")


@pytest.mark.slow
def test_what_nohup_ignores_does_not_end_the_run(stand_in: Path) -> None:
    """The terminal is closed: SIGHUP. The ranks of a run under nohup must not end with it."""
    line = shlex.join(str(word) for word in (*LAUNCH, "--nproc-per-node=2", stand_in, "wait"))
    run = Started("bash", "-c", f"trap '' HUP; exec {line}", ranks=2)
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    code, out, err, _ = run.end()
    assert (code, err) == (75, "") and out.count("stopped by SIGTERM") == 2


@pytest.mark.slow
@pytest.mark.alone
def test_a_rank_that_does_not_stop_is_killed_after_the_grace(stand_in: Path) -> None:
    words = ("--nproc-per-node=2", "--shutdown-timeout=1", stand_in, "deaf")
    run = Started(*LAUNCH, *words, ranks=2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err, seconds = run.end()
    assert code == 128 + signal.SIGKILL and "not stopped after 1 s" in err
    assert 0.9 < seconds < 10


def test_a_rank_that_left_no_stacks_has_none_to_read(tmp_path: Path) -> None:
    """Its watchdog has opened the file, and kill -9 left it empty."""
    log, stacks = tmp_path / "rank-00000.log", tmp_path / "rank-00000.stacks"
    for path in (log, stacks):
        path.touch()
    assert named(log) == f"; its log: {log}"
    stacks.write_text("Thread 1")
    assert named(log) == f"; its log: {log}, its stacks: {stacks}"


@pytest.mark.slow
@pytest.mark.alone
def test_the_second_interrupt_reaches_the_ranks_which_say_what_it_does(stand_in: Path) -> None:
    """Only they know what is saved: the launcher says nothing, and returns their exit code."""
    run = Started(*LAUNCH, "--nproc-per-node=2", stand_in, "insist", ranks=2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)  # an echo
    time.sleep(2)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, _, err, seconds = run.end()
    assert (code, err) == (130, "") and seconds < 10


@pytest.mark.alone
def test_kill_9_of_one_rank_ends_the_other_within_seconds(stand_in: Path) -> None:
    run = Started(*LAUNCH, "--nproc-per-node=2", stand_in, "wait", ranks=2)
    os.kill(run.pids[1], signal.SIGKILL)
    code, _, err, seconds = run.end()
    assert code == 128 + signal.SIGKILL
    assert err == f"launch: rank 1 on {socket.gethostname()} was killed by SIGKILL\n"
    assert seconds < 10


@pytest.mark.skipif(sys.platform != "linux", reason="dying with the parent is a service of Linux")
def test_kill_9_of_the_launcher_ends_the_ranks(stand_in: Path, tmp_path: Path) -> None:
    run = Started(*LAUNCH, "--nproc-per-node=2", stand_in, "deaf", ranks=2, TMPDIR=str(tmp_path))
    run.process.kill()
    run.end()


# run_train.sh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"NGPU": "two"}, "NGPU=two: must be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK below NNODES"),
        ({"NNODES": "2"}, "needs MASTER_ADDR"),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, "8 Slurm tasks on 1 nodes"),
        # and 3 processes: configs/check.py says so
        ({"NGPU": "3"}, "parallelism.data_parallel_shard = 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    settings: dict[str, str], words: str, repository: Path
) -> None:
    before = sorted(repository.rglob("*"))
    done = finished(repository / "run_train.sh", "--parallelism.data_parallel_shard=1", **settings)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and "ready" not in done.stdout
    created = {path.name for path in repository.rglob("*")} - {path.name for path in before}
    assert not [name for name in created if not name.endswith(".pyc") and name != "__pycache__"]


@pytest.mark.alone
def test_mistakes_in_the_configuration_are_told_before_anything_starts(repository: Path) -> None:
    # torch takes seconds to import
    (repository / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = finished(
        repository / "run_train.sh", "--training.steps=none", "--optimizer.lr=-1", NGPU="2"
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "training.steps" in done.stderr and "optimizer.lr" in done.stderr
    assert finished(repository / "run_train.sh", "no_such.toml").returncode == 2


def test_help_lists_the_options_and_starts_nothing(repository: Path) -> None:
    done = finished(repository / "run_train.sh", "--help")
    assert done.returncode == 0
    assert "tensor_parallel" in done.stdout and "ready 0" not in done.stdout


PRINT_ENVIRONMENT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
shown = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "cwd": os.getcwd()}
os.write(1, (json.dumps(shown) + "\\n").encode())
"""


def test_one_process_runs_without_a_launcher_from_any_folder(repository: Path) -> None:
    (repository / "train.py").write_text(PRINT_ENVIRONMENT)
    arguments = ["configs/llama_debug.toml", "--training.steps=50"]
    done = finished(repository / "run_train.sh", *arguments, cwd=Path("/"), OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["RANK"] is None and shown["OMP_NUM_THREADS"] == "7", "the user's choice stays"
    assert shown["argv"] == arguments and shown["cwd"] == str(repository)


@pytest.mark.slow
def test_ranks_share_out_the_cores_and_meet_on_the_loopback(repository: Path) -> None:
    (repository / "train.py").write_text(PRINT_ENVIRONMENT)
    done = finished(repository / "run_train.sh", NGPU="4")
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(s["RANK"] for s in shown) == ["0", "1", "2", "3"]
    assert all(s["WORLD_SIZE"] == s["LOCAL_WORLD_SIZE"] == "4" for s in shown)
    most = max(1, len(os.sched_getaffinity(0)) // 4)
    assert all(1 <= int(s["OMP_NUM_THREADS"]) <= most for s in shown)
    assert all(s["MASTER_ADDR"] == "127.0.0.1" and int(s["MASTER_PORT"]) > 0 for s in shown)


def test_a_run_of_one_node_in_a_step_of_two_has_node_rank_0(repository: Path) -> None:
    """Two runs of one node each, as in a sweep: NNODES=1 on both nodes of a Slurm step."""
    (repository / "train.py").write_text(PRINT_ENVIRONMENT)
    slurm = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "1",
    }
    done = finished(
        repository / "run_train.sh", "--training.local_batch_size=1", NNODES="1", **slurm
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["RANK"], shown["WORLD_SIZE"]) == (None, None), "one process needs no ranks"


@pytest.mark.slow
def test_sigterm_to_the_script_saves_and_returns_75(repository: Path) -> None:
    train = (repository / "train.py").read_text().replace("sys.argv[1]", '"wait"')
    (repository / "train.py").write_text(train)
    for ranks in (1, 2):
        words = (repository / "run_train.sh", "--training.local_batch_size=1")
        run = Started(*words, ranks=ranks, NGPU=str(ranks))
        run.process.send_signal(signal.SIGTERM)
        code, out, err, _ = run.end()
        assert (code, out, err) == (75, "stopped by SIGTERM\n" * ranks, "")


# The environment ----------------------------------------------------------------------------------


def wheel(folder: Path, version: str) -> None:
    """A package of one empty module, so that pip installs something real without a network."""
    info = f"probe-{version}.dist-info"
    files = {
        "probe.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: probe\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"probe-{version}-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.slow
def test_the_environment_is_made_once_and_brought_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "environment.sh", tmp_path / "tools")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "active"], check=True)
    settings = environment(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    settings["PATH"] = f"{tmp_path / 'active' / 'bin'}:{os.environ['PATH']}"
    settings.pop("INSTALL_FIRST", None)
    script = "source tools/environment.sh; find_python requirements.txt; echo $PYTHON"
    made = f"{tmp_path}/.venv/bin/python\n"
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def start() -> subprocess.Popen:
        return subprocess.Popen(["bash", "-euc", script], cwd=tmp_path, env=settings, **pipes)

    def installed() -> str:
        words = "import importlib.metadata as m; print(m.version('probe'))"
        return subprocess.run([made.strip(), "-c", words], **pipes).stdout.strip()

    for version in ("1.4", "2.0"):
        wheel(tmp_path, version)
    (tmp_path / "requirements.txt").write_text("probe==1.4\n")
    both = [start(), start()]
    said = [process.communicate(timeout=60 * WORKERS) for process in both]
    assert [out for out, _ in said] == [made, made], said
    installing = sorted(err.count("installing") for _, err in said)
    assert installing == [0, 1], "the second waits for the first"
    assert installed() == "1.4"
    assert start().communicate(timeout=60 * WORKERS) == (made, ""), (
        "complete: nothing to do or to say"
    )

    (tmp_path / "requirements.txt").write_text("probe==2.0\n")
    out, err = start().communicate(timeout=60 * WORKERS)
    assert out == made and "installing requirements.txt into .venv" in err and installed() == "2.0"

    (tmp_path / "requirements.txt").write_text("probe==3.0\n")
    process = start()
    out, err = process.communicate(timeout=60 * WORKERS)
    assert process.returncode == 2 and out == ""
    words = "plumbline: pip could not install requirements.txt: ERROR: Could not find a version"
    assert words in err

    # The active environment is taken as soon as what it has is recent enough, and is never written
    # to.
    active = next((tmp_path / "active" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(tmp_path / "probe-1.4-py3-none-any.whl") as archive:
        archive.extractall(active)
    (tmp_path / "requirements.txt").write_text("probe==1.9  # >= 1.10\n")
    assert start().communicate(timeout=60 * WORKERS)[0] == "", "1.4 is older than 1.10"
    (tmp_path / "requirements.txt").write_text("probe==1.9  # >= 1.3\n")
    assert start().communicate(timeout=60 * WORKERS) == (f"{tmp_path}/active/bin/python3\n", "")


# run_tests.sh ------------------------------------------------------------------------------------

TESTS = """
import time
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.torture
@pytest.mark.cap(0.5)
def test_hangs():
    time.sleep(30)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_the_tests_are_chosen_by_marker_and_capped(repository: Path) -> None:
    (repository / "tests" / "test_it.py").write_text(TESTS)
    quick = finished(repository / "run_tests.sh", cwd=Path("/"))
    assert quick.returncode == 0 and "1 passed" in quick.stdout
    began = time.monotonic()
    capped = finished(repository / "run_tests.sh", "-m", "torture", "-n", "0")
    assert capped.returncode == 1 and "took longer than its cap of 0.5 s" in capped.stdout
    assert time.monotonic() - began < 20


LISTENING = """
import sys, threading, time
from datetime import timedelta
from torch.distributed import DistStoreError, TCPStore
from configs.program import leave
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def hear():
    while True:
        try: store.wait(["end"], timedelta(milliseconds=20))
        except DistStoreError: pass
threading.Thread(target=hear, daemon=True).start()
time.sleep(0.1)
print("done", flush=True)
leave(75)
"""


@pytest.mark.slow
def test_a_launcher_ends_with_its_code_while_a_thread_hears_of_other_nodes():
    """Python's own exit would abort in such a thread."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (75, "done\n"), done.stderr


def test_a_program_whose_reader_has_left_ends_quietly():
    """`... | head`: the pipe is closed before the program writes."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        words = [sys.executable, "-m", "configs.load", "--help"]
        streams = {"stdout": closed, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(words, cwd=ROOT, timeout=60 * WORKERS, **streams)
    assert done.returncode == -signal.SIGPIPE and "BrokenPipe" not in done.stderr, done.stderr
