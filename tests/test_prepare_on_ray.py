"""A corpus that the machines of a Ray cluster prepare is, to the byte, the one of one machine."""

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.schema import Data, InputError
from data import sources
from data.prepare import __main__ as command
from data.prepare import cluster, prepare
from data.prepare.job import PrepareJob
from data.prepare.part import SplitWriter
from data.prepare.workers import Processes, raise_error
from tests.ranks import WORKERS
from tests.runs import free_port
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)

ROOT = Path(__file__).parents[1]
MACHINES = 3
PART_BYTES = 400_000
RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "ray"'
)
# the command, with smaller parts
COMMAND = """
import sys
from data.prepare import __main__, cluster, job
job.PART_BYTES, cluster.RETRIES = map(int, sys.argv[1:3])
del sys.argv[1:3]
sys.exit(__main__.main())
"""


def corpus(folder: Path, megabytes: int) -> Path:
    folder.mkdir()
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklm", k=2 + i % 7)) for i in range(300)]
    for i in range(2 * megabytes):
        rows = [json.dumps({"text": " ".join(dice.choices(words, k=170))}) for _ in range(500)]
        (folder / f"{i:02}.jsonl").write_text("\n".join(rows))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def until(condition: Callable[[], object], seconds: float, said: Callable[[], str]) -> object:
    deadline = time.monotonic() + seconds * WORKERS
    while not (value := condition()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.003)
    return value


@pytest.fixture
def store(running_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    pytest.importorskip("obstore")
    return emptied(running_store, monkeypatch, ())


@pytest.fixture(scope="module")
def machines(running_store: Server) -> Iterator[object]:
    """Yield a cluster of a head, which makes no part, and three machines of one CPU each. They are
    processes of this machine, and know the store."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running_store.environment.items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        # Ray gives a machine up that has not answered five times: on a busy one, its own
        patch.setenv("RAY_health_check_timeout_ms", str(10_000 * WORKERS))
        from ray.cluster_utils import Cluster

        small = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        try:
            for _ in range(MACHINES):
                made.add_node(num_cpus=1, **small)
            yield made
        finally:
            made.shutdown()


class Command:
    """`python -m data.prepare --on ray`, running."""

    def __init__(self, machines: object, source: Path, out: Path, retries: int = 8) -> None:
        self.log = out.parent / f"{out.name}.log"
        numbers = [str(PART_BYTES), str(retries)]
        options = ["--source", str(source), "--tokenizer", "bytes", "--out", str(out)]
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *numbers, *options, "--on", "ray"],
                cwd=ROOT,
                env={**os.environ, "RAY_ADDRESS": machines.address},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        until(lambda: self.process.poll() is not None, 60, self.said)
        return self.process.returncode


def open_files(process: int) -> list[str]:
    names = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            names.append(os.readlink(link))
        except OSError:
            continue
    return names


def halt_in_mid_part(machine: object, folder: Path) -> int:
    """Return a process of the machine that is making a part in `folder`, stopped there; or 0."""
    raylet = machine.all_processes["raylet"][0].process.pid
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    for child in map(int, children):
        try:
            if not any(name.startswith(f"{folder}.tmp/") for name in open_files(child)):
                continue
            os.kill(child, signal.SIGSTOP)
            if any(name.startswith(f"{folder}.tmp/train-") for name in open_files(child)):
                return child
            os.kill(child, signal.SIGCONT)
        except OSError:
            continue
    return 0


def lose(machines: object, machine: object, process: int) -> None:
    machines.remove_node(machine, allow_graceful=False)
    os.kill(process, signal.SIGKILL)


@RAY
@pytest.mark.slow
@pytest.mark.alone  # on a busy machine Ray takes minutes until its first task runs
@pytest.mark.cap(300)
def test_neither_a_lost_machine_nor_a_killed_command_changes_a_byte(
    machines: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines, one of which is lost while it makes a part. Then, with what is left of them:
    the command is killed and begun again, and goes on. Negative control: without retries the same
    loss of a machine is the end of the preparation."""
    monkeypatch.setattr("data.prepare.job.PART_BYTES", PART_BYTES)
    source = corpus(tmp_path / "corpus", 8)
    one = prepare(Data(source=str(source), tokenizer="bytes"), out=str(tmp_path / "one"), workers=1)
    want = content(Path(one.folder))
    assert len(one.train.shards) > 15

    out = tmp_path / "lost"
    command = Command(machines, source, out)
    lost, *_ = machines.worker_nodes
    process = until(lambda: halt_in_mid_part(lost, out), 60, command.said)
    assert not out.exists()
    lose(machines, lost, process)
    assert command.wait() == 0, command.said()
    assert content(out) == want, command.said()
    assert "Ray: 4 machines, 3 CPUs" in command.said()
    assert f"corpus       {one.fingerprint}" in command.said()

    out = tmp_path / "killed"
    command = Command(machines, source, out)
    records = tmp_path / "killed.tmp" / "parts"
    until(lambda: len(list(records.glob("*.json"))) > 2, 60, command.said)
    command.process.kill()
    command.process.wait()
    finished = {path.name: path.stat().st_ino for path in records.glob("*.json")}
    assert 2 < len(finished) < len(one.train.shards)
    command = Command(machines, source, out)
    kept = dict.fromkeys(finished, 0)

    def look() -> bool:
        for name in finished:
            try:
                kept[name] = (records / name).stat().st_ino
            except FileNotFoundError:
                pass
        return command.process.poll() is not None

    until(look, 60, command.said)
    assert command.process.returncode == 0, command.said()
    assert kept == finished, "a finished part was made again"
    assert content(out) == want

    out = tmp_path / "given-up"
    command = Command(machines, source, out, retries=0)
    lost, *_ = machines.worker_nodes
    process = until(lambda: halt_in_mid_part(lost, out), 60, command.said)
    lose(machines, lost, process)
    assert command.wait() == 1 and "was given up after 0 retries" in command.said()
    assert not out.exists()


ALONE = "mount -t tmpfs none {} && exec "  # a folder that no other machine sees


@RAY
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.cap(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a folder needs root")
def test_a_store_is_all_that_machines_need_to_share(
    store: Server, machines: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is at a URL, and so is the corpus: its bytes are those of one machine. Negative
    control: the folder of the command is empty for all others, and a file in it is no source."""
    monkeypatch.setattr("data.prepare.job.PART_BYTES", PART_BYTES)
    for path in corpus(tmp_path / "corpus", 3).iterdir():
        store.put(f"text/{path.name}", path.read_bytes())
    source = "s3://bucket/text"
    one = prepare(Data(source=source, tokenizer="bytes"), out=str(tmp_path / "one"), workers=1)
    cache = tmp_path / "cache"
    cache.mkdir()
    words = ["-c", COMMAND, str(PART_BYTES), "2", "--tokenizer", "bytes", "--cache", str(cache)]
    outs = []
    for place, out in (source, "s3://bucket/made"), (str(cache / "text.txt"), str(cache / "made")):
        options = [*words, "--source", place, "--out", out, "--on", "ray"]
        written = f"echo some text > {cache}/text.txt && "
        script = ALONE.format(cache).replace("exec", f"{written} exec") + '"$0" "$@"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, sys.executable, *options],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": machines.address},
            capture_output=True,
            text=True,
            timeout=120 * WORKERS,
        )
        outs.append((done.returncode, done.stdout + done.stderr))
    assert outs[0][0] == 0, outs[0][1]
    assert f"corpus       {one.fingerprint}" in outs[0][1]
    for name, made in content(Path(one.folder)).items():
        if name != "manifest.json":  # which has the hashes of blocks in a store
            assert store.object(f"made/{name}") == made, name
    assert outs[1][0] == 2 and "text.txt is another file on" in outs[1][1], outs[1][1]
    assert not list(cache.iterdir())


# ---- what a machine of the cluster does, without a cluster


def planned(tmp_path: Path) -> PrepareJob:
    cfg = Data(source=str(corpus(tmp_path / "corpus", 1)), tokenizer="bytes")
    return PrepareJob.open(str(tmp_path / "out.tmp"), "key", cfg, sources.find(cfg.source), print)


def test_a_task_makes_the_part_that_a_process_makes(tmp_path: Path) -> None:
    job = planned(tmp_path)
    made = {}
    Processes(1, 0).make(job, [0], {}, print, made.__setitem__)
    shard = Path(job.folder, "train-00000.bin")
    want = shard.read_bytes()
    shard.unlink()
    assert cluster.make_part(job.folder, job.plan(), 0, {}) == (made[0], {})
    assert made[0] == job.record(0) and shard.read_bytes() == want


@pytest.mark.parametrize("there", ["nothing", "another job"])
def test_a_machine_that_does_not_see_the_folder_sends_the_part(there: str, tmp_path: Path) -> None:
    """Another preparation may have a folder of the same name there, which stays as it is."""
    job = planned(tmp_path)
    assert cluster.make_part(job.folder, job.plan(), 0, {})[1] == {}
    want = content(Path(job.folder)) | content(Path(job.folder, "parts"))
    elsewhere = tmp_path / "elsewhere"
    if there == "another job":
        (elsewhere / "parts").mkdir(parents=True)
        (elsewhere / "parts" / "plan").write_text("{}")
    plan = job.plan()
    for name in job.take(0):
        assert not Path(job.folder, name).exists()
    Path(job.folder, "parts", "00000.json").unlink()
    for _ in range(2):  # a process makes many
        record, files = cluster.make_part(str(elsewhere), plan, 0, {})
    assert job.record(0) is None and len(files) > 4
    job.receive(0, record, files)
    assert content(Path(job.folder)) | content(Path(job.folder, "parts")) == want
    assert record == job.record(0)
    left = [path.name for path in elsewhere.rglob("*") if path.is_file()]
    assert left == (["plan"] if there == "another job" else [])


def test_a_machine_with_another_file_is_named(tmp_path: Path) -> None:
    """Another file under the same path would end as other tokens, in silence."""
    job = planned(tmp_path)
    first = Path(job.files[0].path)
    os.utime(first, (1, 1))
    for folder in job.folder, str(tmp_path / "elsewhere"):
        message, files = cluster.make_part(folder, job.plan(), 0, {})
        sentence = f"{first} is another file on {socket.gethostname()}: the source must be a URL"
        assert message["input_error"].startswith(sentence) and not files
        first.unlink(missing_ok=True)
    with pytest.raises(InputError, match="or on storage that all machines"):
        raise_error(message)


def test_two_processes_with_one_number_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two machines may have the same number, and be given the same part."""
    job = planned(tmp_path)
    monkeypatch.setattr("os.getpid", lambda: 7)
    one, two = (SplitWriter(job.folder, "train", 0, {}) for _ in range(2))
    assert one.suffix != two.suffix
    one.close(), two.close()


def test_what_ray_cannot_do_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    cfg = Data(source=str(corpus(tmp_path / "corpus", 1)), tokenizer="bytes")
    monkeypatch.setattr("data.prepare.cluster.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match='--on ray needs Ray: pip install "ray==2'):
        prepare(cfg, out=str(tmp_path / "out" / "mine"), on="ray")
    assert not (tmp_path / "out").exists()
    words = ["prepare", "--source", cfg.source, "--on", "ray", "--workers", "2"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "--workers is for one machine" in capsys.readouterr().err


@RAY
def test_no_cluster_at_the_address_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    cfg = Data(source=str(corpus(tmp_path / "corpus", 1)), tokenizer="bytes")
    with pytest.raises(InputError, match="no Ray cluster answers there") as caught:
        prepare(cfg, out=str(tmp_path / "mine"), on="ray")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["corpus"]
