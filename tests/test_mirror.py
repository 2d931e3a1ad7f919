"""The copy of a run's folder in a store has what the folder has, in intervals and at the end, and is
where a run on another machine begins."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from checkpoint.stores import lease
from configs.schema import InputError
from reliability import objects
from reliability.objects import location
from tests.programs import lives
from tests.ranks import WORKERS, wait_until
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools import mirror

ROOT = Path(__file__).parents[1]
URL = "s3://bucket/runs/a"
AT = "runs/a/"
HURRY = (
    (objects, "PAUSE", 0.05),
    (objects, "RETRIES", 1),
    (objects, "BACKOFF", 0.02),
    (objects, "TRIES", 2),
)
# writes lines for some seconds, and ends with a code
WRITER = """
import pathlib, signal, sys, time
folder, seconds, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / "logs").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints").mkdir(exist_ok=True)
(folder / "checkpoints" / "large").write_text("a checkpoint")
(folder / "config.toml.tmp12").write_text("half")
end = time.monotonic() + seconds
with open(folder / "logs" / "rank-00000.log", "a") as log:
    while time.monotonic() < end:
        print("a line", time.monotonic(), file=log, flush=True)
        time.sleep(0.02)
(folder / "config.toml").write_text("done")
sys.exit(code)
"""


@pytest.fixture
def store(running_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    return emptied(running_store, monkeypatch, HURRY)


def command(folder: Path, seconds: float, code: int = 0) -> list[str]:
    return [sys.executable, "-c", WRITER, str(folder), str(seconds), str(code)]


def started(folder: Path) -> subprocess.Popen:
    """Start the command in a separate process, which writes until it is told to end."""
    words = ["-m", "tools.mirror", "--seconds=0.2", URL, str(folder), *command(folder, 60)]
    return subprocess.Popen([sys.executable, *words], cwd=ROOT)


def copies(store: Server) -> dict[str, bytes]:
    names = [key for key in store.keys() if mirror.LEASE not in key]
    return {key.removeprefix(AT): store.object(key) for key in names}


def test_the_copy_has_what_the_folder_has_but_checkpoints(store, tmp_path, capsys):
    """The exit code is that of the command."""
    folder = tmp_path / "run"
    assert mirror.main([URL, str(folder), *command(folder, 0.1, 75)]) == 75
    log = folder / "logs" / "rank-00000.log"
    assert copies(store) == {"logs/rank-00000.log": log.read_bytes(), "config.toml": b"done"}
    said = capsys.readouterr().err
    assert f"{folder}/checkpoints is not copied: checkpoint.store keeps" in said


def test_a_machine_that_is_lost_loses_what_an_interval_has(store, tmp_path):
    """SIGKILL: what is in the store is the beginning of the log, and has grown in between."""
    folder = tmp_path / "run"
    log = folder / "logs" / "rank-00000.log"
    process = started(folder)
    try:
        wait_until(lambda: AT + "logs/rank-00000.log" in store.keys())
        first = len(copies(store)["logs/rank-00000.log"])
        wait_until(lambda: len(copies(store)["logs/rank-00000.log"]) > first)
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    kept = copies(store)["logs/rank-00000.log"]
    assert log.read_bytes().startswith(kept) and b"a line" in kept


def test_the_command_ends_with_what_copies_its_folder(store, tmp_path):
    """By SIGTERM, so that a run saves. Negative control: it lives until then."""
    folder = tmp_path / "run"
    process = started(folder)
    wait_until(lambda: AT + "logs/rank-00000.log" in store.keys())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (command_of_run,) = map(int, children)
    os.kill(command_of_run, 0)
    process.kill()
    process.wait()
    wait_until(lambda: not lives(command_of_run))


def test_a_command_that_a_signal_kills_is_128_and_its_number(store, tmp_path):
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert mirror.main([URL, str(tmp_path), *killed]) == 128 + signal.SIGKILL


def test_a_new_machine_goes_on_with_what_the_store_has(store, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert mirror.main([URL, str(first), *command(first, 0.1)]) == 0
    before = copies(store)
    assert mirror.main([URL, str(second), *command(second, 0.1)]) == 0
    after = copies(store)
    log = "logs/rank-00000.log"
    assert after[log].startswith(before[log]) and len(after[log]) > len(before[log])
    assert after[log] == (second / log).read_bytes()
    # what the first has is older now
    store.put(f"{AT}metrics.jsonl", b"of the second machine")
    os.utime(first / log, (1, 1))
    again = mirror.Mirror(first, location(URL))
    assert again.fetch() == 2 and (first / log).read_bytes() == after[log]
    assert (first / "metrics.jsonl").read_bytes() == b"of the second machine"
    assert not (first / "checkpoints" / "metrics.jsonl").exists()


def test_a_replacement_waits_for_the_last_lines_of_the_first(store, tmp_path, monkeypatch):
    """The replacement starts on another machine before the first is told to stop, as where that is
    taken away. If it fetched at once, it would put an older log over the first one's."""
    first, second = tmp_path / "first", tmp_path / "second"
    running = started(first)
    wait_until(lambda: AT + "logs/rank-00000.log" in store.keys())
    said = []

    def stop_the_first_when_it_is_waited_for(sentence):
        said.append(sentence)
        if "for its end" in sentence:
            running.terminate()

    monkeypatch.setattr(lease, "_where", lambda: "another machine")
    monkeypatch.setattr(lease.logger, "warning", stop_the_first_when_it_is_waited_for)
    assert mirror.main([URL, str(second), *command(second, 0.1)]) == 0
    assert running.wait(30 * WORKERS) == 75
    log = "logs/rank-00000.log"
    last = (first / log).read_bytes()
    assert copies(store)[log].startswith(last) and (second / log).read_bytes().startswith(last)
    states = "watching for up to 30 s whether", "waiting for up to 180 s for its end"
    assert len(said) == 2 and all(map(str.__contains__, said, states)), "each is said once"


TERMINATED_AGAIN = """
import os, signal, sys, threading
sys.path.insert(0, ".")
from tools import mirror
real = mirror.Mirror.send
def send(self):
    if threading.current_thread() is threading.main_thread():  # the last round
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self)
mirror.Mirror.send = send
sys.exit(mirror.main(sys.argv[1:]))
"""


def test_a_second_signal_does_not_end_the_last_round(store, tmp_path):
    folder = tmp_path / "run"
    words = [sys.executable, "-c", TERMINATED_AGAIN, URL, str(folder), *command(folder, 0.1, 7)]
    assert subprocess.run(words, cwd=ROOT, timeout=60 * WORKERS).returncode == 7
    assert copies(store)["config.toml"] == b"done"


WAITS_LITTLE = """
import sys
from tools import mirror

mirror.LAST = 1.0
mirror.SILENT = 0.0
sys.exit(mirror.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("way", ["alone", "Ctrl-C"])
def test_a_store_that_stalls_does_not_keep_the_exit_code(way, store, tmp_path):
    """Its answers take longer than this test once the command runs. Ctrl-C ends at once."""
    folder = tmp_path / "run"
    words = ["-c", WAITS_LITTLE] if way == "alone" else ["-m", "tools.mirror"]
    words += ["--seconds=0.1", URL, str(folder), *command(folder, 2.0, 75)]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE)
    wait_until(lambda: AT + "logs/rank-00000.log" in store.keys())
    store.rules({"kind": "stall", "seconds": 3600})
    said = b""
    if way == "Ctrl-C":
        wait_until(lambda: (folder / "config.toml").exists())
        for line in process.stderr:
            said += line
            if b"has ended with 75" in line:
                break
        process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=30 * WORKERS)[1]
    assert process.returncode == 75 and b"Traceback" not in said
    assert f"what is missing in {URL} is still in {folder}" in said.decode()


def test_a_run_that_goes_on_is_not_taken_over(store, tmp_path, capsys):
    """It is refused at once on the same machine. Nodes of one run do not wait for each other."""
    running = started(tmp_path / "first")
    try:
        wait_until(lambda: AT + "logs/rank-00000.log" in store.keys())
        second = tmp_path / "second"
        assert mirror.main([URL, str(second), *command(second, 0.1)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith(f"{URL} is being written by another run")
        assert f"(process {running.pid} on" in said and "set another run.folder" in said
        assert not second.exists()
        assert mirror.main(["--node=1", URL, str(second), *command(second, 0.1)]) == 0
    finally:
        running.terminate()
        running.wait(30 * WORKERS)


def test_a_node_does_not_send_what_another_one_writes(store, tmp_path):
    """The second of two nodes without a shared folder has fetched the first one's metrics. Negative
    control: without the record of what it fetched, it would put the old ones back."""
    store.put(f"{AT}metrics.jsonl", b"step 1")
    node = mirror.Mirror(tmp_path / "node", location(URL))
    assert node.fetch() == 1
    store.put(f"{AT}metrics.jsonl", b"step 1 step 2")
    (tmp_path / "node" / "rank-00001.log").write_text("of this node")
    assert node.send() == ""
    want = {"metrics.jsonl": b"step 1 step 2", "rank-00001.log": b"of this node"}
    assert want.items() <= copies(store).items()
    node.sent = {}
    node.send()
    assert copies(store)["metrics.jsonl"] == b"step 1"


@pytest.mark.parametrize("name", ["logs/../../elsewhere", "/elsewhere"])
def test_no_name_leads_out_of_the_folder(name, store, tmp_path, monkeypatch):
    store.put(f"{AT}{name}", b"x")
    assert mirror.Mirror(tmp_path / "node", location(URL)).fetch() == 0
    assert not list(tmp_path.iterdir())
    elsewhere = {name: objects.Stat(1, 0)}
    monkeypatch.setattr(objects.Key, "stats_below", lambda self: elsewhere)
    with pytest.raises(InputError, match="invalid path"):
        mirror.Mirror(tmp_path / "node", location(URL)).fetch()


def test_folder_markers_and_a_name_that_is_both(store, tmp_path, capsys):
    """Consoles make `prefix/` and `logs/`; an object may share its name with a prefix."""
    for name in "", "logs/", "starts/0001/":
        store.put(AT + name, b"")
    for name in "x", "x/y", "logs/rank-00000.log", "bad//name":
        store.put(AT + name, b"a line")
    folder = tmp_path / "run"
    assert mirror.main([URL, str(folder), *command(folder, 0.1, 7)]) == 7
    assert (folder / "x" / "y").read_bytes() == b"a line"
    said = capsys.readouterr().err
    assert f"{URL}/x is left there: objects below it make it a folder" in said
    assert copies(store)["logs/rank-00000.log"].startswith(b"a line")
    assert store.object(AT + "x") == b"a line"


@pytest.mark.parametrize("where", ["files", "_upload"])
def test_no_error_ends_the_copying_or_changes_the_exit_code(
    where, store, tmp_path, monkeypatch, capsys
):
    """Errors of every kind, at any place, for a while and in the last round."""
    real, left = getattr(mirror.Mirror, where), [3]

    def fails(self, *args):
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("a fault of the test")
        return real(self, *args)

    monkeypatch.setattr(mirror.Mirror, where, fails)
    folder = tmp_path / "run"
    assert mirror.main(["--seconds=0.1", URL, str(folder), *command(folder, 1.5, 7)]) == 7
    assert "KeyError: 'a fault of the test'; it is tried again" in capsys.readouterr().err
    assert copies(store)["config.toml"] == b"done"
    left[0] = 1000
    monkeypatch.setattr(lease, "PATIENCE", 1.0)
    assert mirror.main(["--seconds=0.1", URL, str(folder), *command(folder, 0.3, 7)]) == 7
    left[0] = 0
    release = lease.StoreLease.release

    def release_and_fail(self):
        release(self)  # a lease that is never released keeps beating into the store of later tests
        raise ZeroDivisionError

    monkeypatch.setattr(lease.StoreLease, "release", release_and_fail)
    assert mirror.main([URL, str(folder), *command(folder, 0.1, 7)]) == 7


def test_files_that_come_and_go(store, tmp_path, monkeypatch):
    """A folder is removed while it is walked, a file is cut or removed while it is sent. All others
    arrive, in this round and the next."""
    for name in "a/1", "b/2", "c/3", "d":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"0123456789")
    here = mirror.Mirror(tmp_path, location(URL))
    real = mirror.Mirror._upload

    def upload(self, name, size):
        if name == "a/1":
            (tmp_path / "b" / "2").unlink()
            (tmp_path / "b").rmdir()
            (tmp_path / "a" / "1").write_bytes(b"01")
        if name == "c/3":
            (tmp_path / name).unlink()
        return real(self, name, size)

    monkeypatch.setattr(mirror.Mirror, "_upload", upload)
    assert here.send() == "" and copies(store)["d"] == b"0123456789"
    assert here.send() == "" and copies(store)["a/1"] == b"01"
    looked = mirror.is_regular
    monkeypatch.setattr(mirror, "is_regular", lambda path: path.unlink() or looked(path))
    assert list(here.files([])) == []


def test_what_is_being_written_is_not_sent_and_what_cannot_be_named_is_said(store, tmp_path):
    names = ["hf/.tmp-0badcafe-step-00000010/model.safetensors", "x.tmp12", ".x.tmp", "my.tmpl"]
    for name in [*names, "bad\nname", "good"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    said = mirror.Mirror(tmp_path, location(URL)).send()
    assert "'bad\\nname' is no name for an object" in said
    assert sorted(copies(store)) == ["good", "my.tmpl"]


YEARS = 1e8  # seconds that a clock is wrong by


@pytest.mark.parametrize("known, ahead", [(True, YEARS), (False, -YEARS)])
def test_what_is_newer_here_is_sent_and_not_replaced(known, ahead, store, tmp_path):
    """A run that was killed before its last lines were sent, on the same machine, whose clock is
    wrong. known: whether it still knows what it has sent. A file that does not only grow is replaced
    where that is not known."""
    files = {"metrics.jsonl": (b"step 1", b"step 1 step 2"), "data.json": (b"old", b"new")}
    here = mirror.Mirror(tmp_path, location(URL))
    for name, (sent, _) in files.items():
        (tmp_path / name).write_bytes(sent)
    assert here.send() == ""
    for name, (_, unsent) in files.items():
        (tmp_path / name).write_bytes(unsent)
        then = time.time() + ahead
        os.utime(tmp_path / name, (then, then))
    if not known:
        here.record.unlink()
    again = mirror.Mirror(tmp_path, location(URL))
    assert again.fetch() == (0 if known else 1) and again.send() == ""
    assert copies(store)["metrics.jsonl"] == b"step 1 step 2"
    assert copies(store)["data.json"] == (b"new" if known else b"old")


@pytest.mark.parametrize("ahead", [YEARS, -YEARS])
def test_files_of_another_machine_are_fetched_independent_of_clocks(ahead, store, tmp_path):
    """This machine has an older version, or one that went another way."""
    first = mirror.Mirror(tmp_path, location(URL))
    for name in "older", "another":
        (tmp_path / name).write_bytes(b"step 1 ")
    assert first.send() == ""
    (tmp_path / "another").write_bytes(b"step 1 step 2 which was computed again")
    for name in "older", "another":
        store.put(AT + name, b"step 1 step 2")
        then = time.time() + ahead
        os.utime(tmp_path / name, (then, then))
    again = mirror.Mirror(tmp_path, location(URL))
    assert again.fetch() == 1 and (tmp_path / "older").read_bytes() == b"step 1 step 2"
    (tmp_path / "another").write_bytes(b"step 1 step 3")
    assert mirror.Mirror(tmp_path, location(URL)).fetch() == 1
    assert (tmp_path / "another").read_bytes() == b"step 1 step 2"
    assert mirror.Mirror(tmp_path, location(URL)).fetch() == 0


def test_a_fetch_that_ends_half_way_leaves_no_half_file(store, tmp_path, monkeypatch):
    """A large file is fetched in pieces. A half file would be the newer one: it was written later.
    Negative control: without the failure it is there, whole."""
    content = bytes(range(256)) * 16
    store.put(f"{AT}metrics.jsonl", content)
    monkeypatch.setattr(objects, "CHUNK", 1000)
    denied = {"kind": "denied", "methods": ["GET"], "key": "metrics", "skip": 4}
    store.rules(denied)
    with pytest.raises(InputError, match="the store refuses it"):
        mirror.Mirror(tmp_path, location(URL)).fetch()
    assert not (tmp_path / "metrics.jsonl").exists()
    store.rules()
    assert mirror.Mirror(tmp_path, location(URL)).fetch() == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_model_that_was_exported_is_sent_and_not_fetched(store, tmp_path):
    """An exported model may be larger than the disk of a node."""
    for name in "hf/step-00000010/model.safetensors", "logs/hf":
        path = tmp_path / "first" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    assert mirror.Mirror(tmp_path / "first", location(URL)).send() == ""
    assert len(copies(store)) == 2
    assert mirror.Mirror(tmp_path / "second", location(URL)).fetch() == 1
    assert [path.name for path in (tmp_path / "second").rglob("hf*")] == ["hf"]


def test_a_folder_that_cannot_be_written_is_a_sentence(store, tmp_path, capsys):
    store.put(f"{AT}metrics.jsonl", b"step 1")
    (tmp_path / "file").write_text("in the way")
    assert mirror.main([URL, str(tmp_path / "file" / "run"), "true"]) == 2
    assert "file/run cannot be written: Not a directory" in capsys.readouterr().err


def test_a_damaged_record_is_none(store, tmp_path):
    (tmp_path / "log").write_bytes(b"a line")
    here = mirror.Mirror(tmp_path, location(URL))
    assert here.send() == "" and mirror.Mirror(tmp_path, location(URL)).sent == here.sent != {}
    assert not mirror.Mirror(tmp_path, location(f"{URL}2")).sent
    for damaged in "{", "[]", '["s3://bucket/runs/a", {"log": [1]}]', '["s3://bucket/runs/a", 3]':
        here.record.write_text(damaged)
        assert not mirror.Mirror(tmp_path, location(URL)).sent
    assert mirror.Mirror(tmp_path, location(URL)).fetch() == 0


ASKS = """
import os, pathlib, sys, time
sys.path.insert(0, ".")
from reliability.objects import ask_mirror
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "metrics.jsonl").write_text("step 1")
time.sleep(1.5)
sys.argv[2] == "asks" and ask_mirror()
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("asks", ["asks", "does not"])
def test_a_command_that_asks_is_not_kept_waiting_for_the_interval(asks, store, tmp_path):
    """A run asks when it has published a checkpoint. Negative control: one that does not ask."""
    folder = tmp_path / "run"
    words = ["--seconds=600", URL, str(folder), sys.executable, "-c", ASKS, str(folder), asks, "60"]
    process = subprocess.Popen([sys.executable, "-m", "tools.mirror", *words], cwd=ROOT)
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists())
        if asks == "asks":
            wait_until(lambda: copies(store).get("metrics.jsonl") == b"step 1")
            assert not [key for key in store.keys() if "asked" in key or "sent" in key]
        else:
            time.sleep(1.5 + 2 * mirror.WATCH + 1)
            assert not copies(store)
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(30 * WORKERS)


def test_a_store_that_fails_does_not_end_the_command(store, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    denied = {"kind": "denied", "methods": ["PUT"], "rate": 1.0}
    later = threading.Timer(1.0, store.rules, [denied])
    later.start()
    options = ["--seconds=0.1", URL, str(folder), *command(folder, 2.0)]
    assert mirror.main(options) == 0
    later.join()
    said = capsys.readouterr().err
    assert "it is tried again in 0 s" in said
    assert f"what else is missing in {URL} is still in {folder}" in said
    store.rules()
    monkeypatch.setattr(lease, "PATIENCE", 1.0)  # this process holds it still
    assert mirror.main([URL, str(folder), sys.executable, "-c", ""]) == 0
    assert copies(store)["config.toml"] == b"done"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["file:///tmp/x", "run", "true"], "file:///tmp/x is a folder: let run.folder name it"),
        (["http://host/a", "run", "true"], "http://host/a names no place in a store"),
        ([URL, "run"], "there is no command to run"),
    ],
)
def test_what_cannot_be_mirrored_is_a_sentence(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mirror.main(words) == 2 and said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
