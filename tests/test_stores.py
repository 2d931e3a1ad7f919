"""Checkpoints in an object store keep the promises of a disk, even if the store fails meanwhile.

The store is tests/s3.py, a real server in another process. A state is filled with the number of its
step, as in tests/test_checkpoint.py.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from checkpoint import manager, verify
from checkpoint.lease import Lost
from checkpoint.stores import bucket, lease
from configs.load import load_config
from configs.schema import Checkpoint, InputError
from reliability import answers, objects
from reliability.objects import Key, Unreachable, Version, location
from tests import checkpoints as helpers
from tests import fork_server, ranks
from tests.checkpoints import (
    begun,
    build,
    fill,
    heard,
    killed_run,
    load_pattern,
    open_manager,
    opened,
    resume,
    save_all,
    save_filled,
    save_for_ever,
    save_pattern,
    values_on_disk,
)
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools import check

URL = "s3://bucket/runs/a"
AT = "runs/a/"
MANIFEST = verify.MANIFEST


@pytest.fixture
def store(running_store, monkeypatch) -> Server:
    return emptied(running_store, monkeypatch, HURRY)


HURRY = (  # no test waits as long as a run does
    (objects, "RETRIES", 5),
    (objects, "BACKOFF", 0.02),
    (objects, "PAUSE", 0.05),
    (objects, "REQUEST_SECONDS", 2.0 * ranks.WORKERS),
    (lease, "BEAT", 0.3),
    (lease, "PATIENCE", 1.5),
    (answers, "SILENT", 1000.0),
)


def there(fn: Callable, *args: Any, **options: Any) -> Any:
    """On a rank: fn, whose checkpoints go to the store."""
    for module, name, value in HURRY:
        setattr(module, name, value)
    helpers.Checkpoint = partial(Checkpoint, store=URL)
    return fn(*args, **options)


def step_of(step: int) -> str:
    return AT + verify.step_name(step, 0)


def shards(store: Server, step: int) -> list[str]:
    """Return the objects of a checkpoint that hold tensors."""
    return [key for key in store.keys(step_of(step)) if key.endswith(".safetensors")]


# What is saved comes back


def test_a_save_has_the_bytes_of_one_on_a_disk(store, tmp_path):
    run_ranks(2, there, save_all, tmp_path, [10, 20])
    run_ranks(2, save_all, tmp_path / "disk", [10, 20])
    assert verify.main([URL, "--all"]) == 0
    for step in (10, 20):
        store.download(step_of(step), tmp_path / f"{step}")
        (draft,) = [path for path in (tmp_path / f"{step}").iterdir() if path.is_dir()]
        assert len(list(draft.iterdir())) == 2
        for path in draft.iterdir():
            on_disk = tmp_path / "disk" / verify.step_name(step, 0) / path.name
            assert path.read_bytes() == on_disk.read_bytes()
        assert values_on_disk(draft) == [step]
        verify.verify(tmp_path / f"{step}")  # a download is a checkpoint too
    assert not list(tmp_path.glob("step-*"))
    from_copy = partial(resume, load_path=str(tmp_path / "20"))
    assert run_ranks(1, from_copy, tmp_path / "new")[0][1] == [-1.0, 20.0]


def test_the_state_is_bitwise_that_of_a_disk_on_another_mesh(store, tmp_path):
    run_ranks(2, there, save_pattern, tmp_path, ["--parallelism.tensor_parallel=2"])
    assert run_ranks(1, there, load_pattern, [tmp_path], []) == [[[]]]


def test_a_resume_reads_what_its_rank_needs(store, tmp_path):
    """Ranges, not objects: a rank of four reads about a quarter of a large file."""
    content = bytes(range(256)) * (1 << 14)  # 4 MiB
    store.put(AT + "x", content)
    store.ask("clear", b"")
    with location(URL + "/x").open() as reader:
        reader.seek(1000)
        block = bytearray(objects.NEAR + 7)
        assert reader.readinto(memoryview(block)) == len(block)
        assert block == content[1000 : 1000 + len(block)]
        assert reader.read(10) == content[1000 + len(block) : 1010 + len(block)]
        reader.seek(len(content) - 3)
        assert reader.read() == content[-3:]
    fetched = 0
    for method, _, wanted in store.status()["log"]:
        if method == "GET":
            first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
            fetched += last + 1 - first
    assert fetched <= len(content) * 0.6


def test_training_goes_on_while_parts_are_sent(store, tmp_path):
    store.rules({"kind": "stall", "key": "safetensors", "methods": ["PUT"], "seconds": 1.5})
    began, copied, ended = run_ranks(1, there, _times_of_a_save, tmp_path)[0]
    assert copied - began < 1.0 < 1.5 <= ended - began


def _times_of_a_save(folder: Path) -> list[float]:
    job, checkpoints = opened(folder)
    checkpoints.load(job.model, job.optimizer)
    times = [time.monotonic()]
    checkpoints.save(1, job.model, job.optimizer, {"step": 1})
    checkpoints.wait_for_copy()
    times.append(time.monotonic())
    checkpoints.close()
    return [*times, time.monotonic()]


def test_an_upload_takes_bounded_memory(store):
    """Only a few parts of 96 MiB, sent as views of one block, are held at once."""
    grown = run_ranks(1, there, _memory_of_an_upload, 96 << 20)[0]
    assert grown < 8 * CHUNK, f"{grown / 2**20:.0f} MiB"
    assert len(store.object(AT + "large")) == 96 << 20
    store.remove(AT + "large")


CHUNK = 4 << 20


def _memory_of_an_upload(size: int) -> int:
    """Return the additional peak memory of this process in bytes."""
    objects.CHUNK = CHUNK
    block = memoryview(bytearray(4 << 20))
    key = location(URL + "/large")
    (key.parent / "small").upload(lambda: [block[:9]], 9)
    before = _peak()
    key.upload(lambda: (block for _ in range(size // len(block))), size)
    return _peak() - before


def _peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024


# Kills


@pytest.mark.slow
def test_a_rank_killed_while_saving_loses_at_most_that_save(store, tmp_path):
    """Its remains are removed by the next start. Another run's files next to it stay."""
    other = "runs/b/step-00000003/01234567-1/rank-00000.safetensors"
    mine = AT + "step-00000007/0badcafe-1/rank-00000.safetensors"
    for key in (other, mine, AT + "notes.txt"):
        store.put(key, b"something")
    store.rules({"kind": "stall", "key": "safetensors", "methods": ["PUT"], "seconds": 0.1})
    least = 0
    for death in range(2):
        place = tmp_path / f"{death}"
        when = (3, 0.07 * (2 + death))
        saving = partial(there, save_for_ever)
        killed_run(place, 1, when, saving, tmp_path, 0, {"keep_last": 2})
        least = max(begun(place))
    store.rules()
    words = run_ranks(2, there, resume, tmp_path)[0]
    assert words[0] >= least - 1 > 0 and words[1] == [words[0]]
    assert [line for line in words[2] if "notes.txt" not in line] == []
    named = verify.published(location(URL))
    assert verify.main([URL, "--all"]) == 0
    for key in store.keys(AT):
        assert key in (AT + ".lease", AT + "notes.txt") or key.split("/")[2] in named
    drafts = {key.rpartition("/")[0] for key in store.keys(AT) if "safetensors" in key}
    assert len(drafts) == len(named)  # no parts that no manifest names
    assert other in store.keys()


def published_too_early(folder: Path) -> None:
    """The bug: the manifest goes first, and the rank dies while it sends its file."""

    def careless(self: bucket.Bucket, draft: Key, plan: Any, parts: Any) -> list:
        facts = verify.read_manifest(self.path / "step-00000002")["facts"]
        job_head = {"format": verify.FORMAT, "step": 3, "progress": {}, "mesh": {}, "facts": facts}
        past = ["step-00000001", "step-00000002"]
        more = {"optimizer": "AdamW", "hyperparameters": {}, "parent": past[1], "ancestors": past}
        rest = {"torch": "", "saved": "", "files": [[plan.nbytes, "0" * 16]]}
        manifest = {**job_head, **more, **rest, "tensors": plan.table}
        self.publish(draft, "step-00000003", manifest)
        os.kill(os.getpid(), signal.SIGKILL)

    bucket.Bucket.write = careless
    save_all(folder, [3])


@pytest.mark.slow
def test_control_a_manifest_before_the_parts_is_seen(store, tmp_path):
    run_ranks(1, there, save_all, tmp_path, [1, 2])
    with pytest.raises(AssertionError, match="died of signal 9"):
        run_ranks(1, there, published_too_early, tmp_path)
    assert step_of(3) + "/" + MANIFEST in store.keys()
    assert verify.main([URL]) == 1
    step, values, words = run_ranks(1, there, resume, tmp_path)[0]
    assert (step, values) == (2, [2.0])  # and the hashes keep it from being used
    assert "step-00000003 is damaged and not used" in words[0]


# Leases


def test_a_second_run_is_refused_and_a_released_prefix_is_not(store, tmp_path):
    run_ranks(1, there, save_all, tmp_path, [1])
    before = store.keys()
    mine = lease.StoreLease(location(URL) / ".lease")
    step, _, words = run_ranks(2, there, resume, tmp_path)[0]
    assert step == -1 and "s3://bucket/runs/a is being written by another run" in words[-1]
    assert f"process {os.getpid()}" in words[-1] and "checkpoint.store" in words[-1]
    assert store.keys() == before
    mine.check()
    mine.release()
    assert run_ranks(1, there, resume, tmp_path)[0][:2] == (1, [1.0])


def test_a_release_waits_for_no_store_that_stalls(store, monkeypatch, caplog):
    monkeypatch.setattr(lease, "STALLED", 0.2)
    mine = lease.StoreLease(location(URL) / ".lease")
    store.rules({"kind": "stall", "seconds": 100})
    time.sleep(3 * lease.BEAT)  # a beat waits for its answer
    mine.release()
    assert "the lease could not be given back: s3://" in caplog.text


def test_a_release_whose_connection_breaks_is_sent_again(store):
    """A broken connection alone does not keep the prefix from the next run. obstore does not repeat
    a conditional put."""
    mine = lease.StoreLease(location(URL) / ".lease")
    with heard() as words:
        store.rules({"kind": "reset", "methods": ["PUT"], "count": 2})
        mine.release()
    assert words == [] and store.status()["counts"]["reset"] == 2
    owner, _ = lease._read(location(URL) / ".lease")
    assert owner["id"] == ""


def test_a_living_run_of_this_machine_is_refused_without_a_beat(store, tmp_path, monkeypatch):
    """By a start, and by the check before it. Negative control: where a number of a process says
    nothing, only a beat does, and the silent one is taken over."""
    monkeypatch.setattr(lease, "BEAT", 1000)
    mine = lease.StoreLease(location(URL) / ".lease")
    here = f"being written by another run (process {os.getpid()} on"
    assert here in fork_server.call(_refusal, lease._where(), 1000.0)
    fork_server.call(
        check.check_free, load_config([f"--checkpoint.store={URL}", "--run.mirror=s3://b"])
    )
    with pytest.raises(InputError, match="another run"):
        fork_server.call(check.check_free, load_config([f"--checkpoint.store={URL}"]))
    assert fork_server.call(_refusal, "another machine", 0.3) == ""
    assert not mine.held()
    mine.release()


def test_a_round_takes_the_lease_of_another_rank_at_once(store):
    lost = lease.StoreLease(location(URL) / ".lease", of_start="s")
    mine = lease.StoreLease(location(URL) / ".lease", of_start="s")
    mine.check()
    assert not lost.held()
    mine.release()
    lost.release()


def _refusal(where: str, patience: float) -> str:
    lease.PATIENCE = patience
    lease._where = lambda: where
    try:
        lease.StoreLease(location(URL) / ".lease").release()
    except InputError as error:
        return str(error)
    return ""


def test_a_killed_process_whose_parent_has_not_asked_yet_is_dead():
    """Its number is still taken. Negative control: before it is killed it lives."""
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = {"where": lease._where(), "pid": process.pid}
        assert lease._is_alive(owner) is None, "an earlier version wrote no start"
        assert lease._is_alive(owner | {"started": 1}) is False, "the number is another's by now"
        owner["started"] = lease._started(process.pid)
        assert lease._is_alive(owner)
        process.kill()
        ranks.wait_until(lambda: not lease._is_alive(owner), 30)
        os.kill(process.pid, 0)  # it can still be asked for


def test_of_many_that_come_at_once_one_gets_the_prefix(store):
    for owner in (None, {"host": "elsewhere", "pid": 1, "where": "", "id": "0badcafe"}):
        store.remove(AT + ".lease")
        if owner:
            text = json.dumps(owner)
            outer = {"hash": lease._hash(text), "owner": text}
            store.put(AT + ".lease", json.dumps(outer).encode())
        got: list[lease.StoreLease] = []
        refused: list[str] = []

        def take(got=got, refused=refused) -> None:
            try:
                got.append(lease.StoreLease(location(URL) / ".lease"))
            except InputError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7)
        got[0].check()
        got[0].release()


def test_a_lease_that_was_taken_over_publishes_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 1000)  # its process is frozen
    frozen = lease.StoreLease(location(URL) / ".lease")
    thawed = lease.StoreLease(location(URL) / ".lease")  # having watched
    with pytest.raises(Lost, match="was taken over by another run"):
        frozen.check()
    frozen._replace(frozen.id)  # a late beat of the frozen one changes nothing
    thawed.check()
    frozen.release()
    thawed.check()
    thawed.release()


def test_a_beat_whose_answer_is_lost_is_not_the_last(store):
    mine = lease.StoreLease(location(URL) / ".lease")
    store.rules({"kind": "lost", "key": ".lease", "methods": ["PUT"], "count": 3})
    ranks.wait_until(lambda: store.status()["counts"].get("lost", 0) >= 3)
    before = store.object(AT + ".lease")
    ranks.wait_until(lambda: store.object(AT + ".lease") != before, 20 * lease.BEAT)
    mine.check()
    mine.release()
    assert lease._read(location(URL) / ".lease")[0]["id"] == ""


def test_a_dead_process_of_this_machine_is_not_watched(store, tmp_path):
    process = fork_server.start(_take_and_wait)
    ranks.wait_until(lambda: AT + ".lease" in store.keys())
    fork_server.end(process)
    began = time.monotonic()
    lease.StoreLease(location(URL) / ".lease").release()
    assert time.monotonic() - began < lease.PATIENCE


def _take_and_wait() -> None:
    lease.StoreLease(location(URL) / ".lease")
    time.sleep(100)


def test_a_checkpoint_that_is_there_is_not_replaced(store, tmp_path):
    """Another run has published the step meanwhile, and a listing did not show it."""
    words = run_ranks(1, there, _publishes_what_is_there, tmp_path)[0]
    assert "holds a checkpoint already, which this run has not written" in words
    assert store.object(step_of(2) + "/" + MANIFEST) == b"another's"


def _publishes_what_is_there(folder: Path) -> str:
    job, checkpoints = opened(folder)
    checkpoints.load(job.model, job.optimizer)
    (location(URL) / "step-00000002" / MANIFEST).create(b"another's")
    checkpoints.save(2, job.model, job.optimizer, {"step": 2})
    with pytest.raises(InputError) as refusal:
        checkpoints.close()
    return str(refusal.value)


def test_a_run_that_is_frozen_while_it_publishes_does_no_harm(store, tmp_path):
    """Another run takes the prefix over, and removes what has no manifest, between the last look at
    the lease and the put of the manifest."""
    said = run_ranks(1, there, _publishes_too_late, tmp_path)[0]
    assert "was taken over by another run" in said
    step, values, words = run_ranks(1, there, resume, tmp_path)[0]
    assert (step, values) == (1, [1.0])
    assert any("step-00000002 is damaged and not used" in line for line in words)


def _publishes_too_late(folder: Path) -> str:
    job, checkpoints = opened(folder)
    checkpoints.load(job.model, job.optimizer)
    save_filled(job, checkpoints, 1)
    checkpoints.wait_for_copy()
    checkpoints._finish()
    real = checkpoints.place.lease.check

    def check() -> None:
        real()
        if len(location(URL).folders()) == 2:
            text = json.dumps({"host": "elsewhere", "pid": 1, "where": "", "id": "0badcafe"})
            content = json.dumps({"hash": lease._hash(text), "owner": text}).encode()
            key = location(URL) / ".lease"
            while key.replace(content, key.read_version()[1]) is None:
                pass
            (location(URL) / "step-00000002").remove_below()

    checkpoints.place.lease.check = check
    checkpoints.save(2, job.model, job.optimizer, {"step": 2})
    with pytest.raises(InputError) as refusal:
        checkpoints.close()
    return str(refusal.value)


# Retention


def test_retention_removes_the_manifest_first(store, tmp_path):
    run_ranks(2, there, partial(save_all, keep_last=2), tmp_path, [1, 2, 3, 4])
    assert verify.published(location(URL)) == ["step-00000004", "step-00000003"]
    assert not store.keys(step_of(1)) and not store.keys(step_of(2))
    removed = [key for key in store.status()["removed"] if key.startswith(step_of(1))]
    assert removed[0] == step_of(1) + "/" + MANIFEST and len(removed) == 3


# Damage


@pytest.mark.parametrize("how", ["flipped", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_damaged_object_is_named_and_the_checkpoint_before_used(how, store, tmp_path):
    run_ranks(2, there, save_all, tmp_path, [10, 20])
    key = shards(store, 20)[1]
    store.flip(key, 60_000) if how == "flipped" else store.remove(key)
    results = run_ranks(2, there, resume, tmp_path)
    assert [result[:2] for result in results] == [(10, [10.0])] * 2
    (words,) = results[0][2]
    assert "step-00000020 is damaged and not used" in words and "rank-00001.safetensors" in words
    assert verify.main([URL]) == 1


# Faults


def test_no_fault_loses_or_damages_anything(store, tmp_path):
    """Saves, then resumes that save more, while connections break. Nothing is lost, damaged, or
    reported as such. All kinds at once: test_of_many_faults_none_loses_or_damages_anything."""
    store.rules({"kind": "reset", "rate": 0.15})
    for last in (3, 6):
        steps = list(range(last - 2, last + 1))
        (words,) = run_ranks(1, there, _saves_all_it_can, tmp_path, steps)
        assert words == [], "a store with such faults is a store that works"
        step, values, words = run_ranks(1, there, resume, tmp_path)[0]
        assert (step, values, words) == (last, [float(last)], [])
    assert store.status()["counts"].get("reset", 0) > 0
    store.rules()
    assert verify.main([URL, "--all"]) == 0
    assert len(shards(store, 6)) == 1


MANY = [  # of each request, so that it succeeds in the end
    {"kind": "500", "rate": 0.2},
    {"kind": "slow", "rate": 0.2},
    {"kind": "reset", "rate": 0.03},
    {"kind": "truncated", "rate": 0.1},
    {"kind": "flipped", "rate": 0.005},
    {"kind": "lost", "rate": 0.03},
    {"kind": "stale", "rate": 0.3},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "least", [100, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.cap(3000)])]
)
def test_of_many_faults_none_loses_or_damages_anything(least, store, tmp_path):
    """Runs that save and resume until so many requests have failed: each finds the newest checkpoint
    that was published, whole, and none is published twice."""
    store.rules(*MANY)
    starts = run_ranks(1, there, _goes_on_and_on, store.port, tmp_path, least, timeout=2400)[0]
    counts = store.status()["counts"]
    store.rules()
    print(f"{sum(counts.values())} faults in {starts} starts: {counts}")
    assert sum(counts.values()) >= least and len(counts) == len(MANY)
    published = store.status()["created"]
    manifests = {key: times for key, times in published.items() if key.endswith(MANIFEST)}
    assert len(manifests) == 3 * starts and set(manifests.values()) == {1}
    assert verify.main([URL, "--all"]) == 0
    _, oldest = verify.parse_name(verify.published(location(URL))[-1])
    assert oldest > 3 * (starts - 3)  # retention has lost sight of none


def _goes_on_and_on(port: int, folder: Path, least: int) -> int:
    """Starts of a run that saves three steps each, in many parts. How many there were."""
    objects.CHUNK = 1 << 14
    objects.RETRIES, objects.TRIES = 12, 10  # two of three requests fail
    job = build()
    newest = 0
    for starts in count(1):
        fill(job, -1)
        with heard() as words:
            checkpoints = open_manager(job, folder, keep_last=2)
            progress = checkpoints.load(job.model, job.optimizer) or {"step": 0}
            assert progress["step"] == newest
            assert helpers.values(job) == [float(newest or -1)]
            for _ in range(3):
                newest += 1
                save_filled(job, checkpoints, newest)
                checkpoints.wait_for_copy()
                checkpoints.poll()
            with suppress(InputError):  # what it says is among the words
                checkpoints.close()
        # a listing in which a bit of a name has flipped names what is no checkpoint
        known = ("waited", "left alone")
        assert not [line for line in words if not any(word in line for word in known)], words
        counts = Server(port, None).status()["counts"]
        faults = sum(counts.values())
        print(f"{faults} faults in {starts} starts", flush=True)
        if faults >= least and len(counts) == len(MANY):
            return starts
    raise AssertionError("it counts for ever")


def _saves_all_it_can(folder: Path, steps: list[int]) -> list[str]:
    with heard() as words:
        save_all(folder, steps)
    return [line for line in words if "waited" not in line]


def test_a_conditional_put_whose_answer_is_lost_is_known_as_ours(store):
    for name in ("create", "replace"):
        key = location(f"{URL}/{name}")
        store.rules()
        before = key.replace(b"two", key.create(b"one")) if name == "replace" else None
        store.rules({"kind": "lost", "methods": ["PUT"], "count": 1})
        version = key.replace(b"three", before) if before else key.create(b"one")
        assert version is not None and key.replace(b"four", version) is not None
        assert store.status()["counts"]["lost"] > 0
        assert key.create(b"five") is None  # another's stays another's
        assert key.replace(b"six", version) is None


def test_an_upload_whose_last_answer_is_lost_is_sent_again(store, monkeypatch):
    monkeypatch.setattr(objects, "CHUNK", 1 << 16)
    content = os.urandom(300_000)
    store.rules({"kind": "lost", "methods": ["POST"], "skip": 1, "count": 1})
    key = location(URL + "/x")
    key.upload(lambda: [memoryview(content)], len(content))
    assert store.status()["counts"]["lost"] == 1
    assert key.read_bytes() == content


def test_a_conflict_is_no_answer_and_one_that_stays_is_said(store):
    """409 is S3's word for two requests that meet: nothing was written, so the put is sent again."""
    key = location(f"{URL}/x")
    store.rules({"kind": "conflict", "count": objects.TRIES - 1})
    assert key.create(b"zero") and store.status()["counts"]["conflict"] == objects.TRIES - 1
    key.remove()
    store.rules({"kind": "conflict"})
    with pytest.raises(Unreachable, match="HTTP 409 ConditionalRequestConflict"):
        key.create(b"one")
    store.put(f"{AT}x", b"two")
    with pytest.raises(Unreachable, match="HTTP 409"):
        key.replace(b"three", key.read_version()[1])
    assert key.create(b"one") is None  # Azure's answer where an object is there
    assert key.create(b"two") and key.replace(b"three", Version('"another"', None)) is None


def test_a_checkpoint_whose_manifest_is_there_is_published(store, tmp_path):
    """A later failure of the lease is no failure of the save, and retention removes the checkpoint
    in its turn."""
    words = run_ranks(1, there, _saves_while_its_lease_fails, store.port, tmp_path)[0]
    assert all("is published, but the lease does not name it yet" in line for line in words)
    assert len(words) == 3
    assert verify.published(location(URL)) == ["step-00000004", "step-00000003"]
    assert run_ranks(1, there, resume, tmp_path)[0][:2] == (4, [4.0])


def _saves_while_its_lease_fails(port: int, folder: Path) -> list[str]:
    objects.RETRIES = objects.TRIES = manager.MOST_FAILURES = 1
    lease.BEAT = 1000
    job, checkpoints = opened(folder, keep_last=2)
    checkpoints.load(job.model, job.optimizer)
    with heard() as words:
        for step in range(1, 5):
            if step == 4:
                Server(port, None).rules()
            else:
                Server(port, None).rules({"kind": "500", "key": ".lease", "methods": ["PUT"]})
            save_filled(job, checkpoints, step)
            checkpoints.wait_for_copy()
            checkpoints._finish()
        checkpoints.retention.wait(30)
        checkpoints.close()
    return [line for line in words if "waited" not in line]


def test_a_checkpoint_whose_answers_were_all_lost_is_found_at_the_next_save(store, tmp_path):
    """Its state is unknown then: the save has failed, and the files are accounted for."""
    words = run_ranks(1, there, _saves_without_an_answer, store.port, tmp_path)[0]
    assert "step 1 could not be written" in words[0] and "step-00000001 is published" in words[1]
    assert verify.read_manifest(location(URL) / "step-00000002")["parent"] == "step-00000001"


def _saves_without_an_answer(port: int, folder: Path) -> list[str]:
    objects.RETRIES = objects.TRIES = 1
    job, checkpoints = opened(folder)
    checkpoints.load(job.model, job.optimizer)
    with heard() as words:
        lost = {"kind": "lost", "key": MANIFEST, "methods": ["PUT"]}
        Server(port, None).rules(lost, {"kind": "500", "key": MANIFEST, "methods": ["GET"]})
        for step in 1, 2:
            checkpoints.save(step, job.model, job.optimizer, {"step": step})
            checkpoints.wait_for_copy()
            checkpoints._finish()
            Server(port, None).rules()
        checkpoints.close()
    return [line for line in words if "waited" not in line]


@pytest.mark.parametrize(
    ("quirk", "said"),
    [
        ("no etag", "gives no ETag"),
        ("no If-None-Match", "ignores If-None-Match"),
        ("no If-Match", "ignores If-Match"),
    ],
)
def test_a_store_without_conditions_is_refused_at_the_start(quirk, said, store):
    store.rules({"kind": quirk})
    with pytest.raises(InputError, match=f"{URL}: this store {said}, so two runs could write"):
        lease.StoreLease(location(URL) / ".lease")
    assert store.keys() == []
    store.rules()
    lease.StoreLease(location(URL) / ".lease").release()


BAD = [AT + "logs//x", AT + "./x", AT + "step-00000001/../x", AT + "a\nb", AT + "/x"]


@pytest.mark.slow
def test_a_name_that_cannot_be_read_hides_no_other(store, tmp_path, capsys):
    """`a//b` in a prefix makes obstore's listing fail. All else goes on, with the folders that a
    console has made, and more objects than a page has."""
    run_ranks(1, there, save_all, tmp_path, [1])
    for name in [*BAD, AT, AT + "step-00000001/", "runs/"]:
        store.put(name, b"x" if name in BAD else b"")
    step, values, words = run_ranks(1, there, resume, tmp_path)[0]
    assert (step, values) == (1, [1.0])
    assert all("the object" in line or "an empty" in line for line in words) and words
    assert verify.main([URL, "--all"]) == 0
    key = location("s3://bucket/many")
    for i in range(1100):
        store.put(f"many/{i:04d} +&é", b"x")
    store.put("many//", b"")
    assert list(key.below()) == [f"{i:04d} +&é" for i in range(1100)]
    (key / "0000 +&é").remove()
    key.remove_below()
    assert store.keys("many/") == ["many//"]
    store.remove("many//")


@pytest.mark.slow
def test_a_store_that_is_gone_ends_the_run_with_a_sentence(store, tmp_path, monkeypatch):
    options = [*tiny_run(tmp_path), f"--checkpoint.store={URL}"]
    folder = tmp_path / "run"
    folder.mkdir()
    code, said = run_ranks(1, there, _goes_after_step_5, store.port, options, folder)[0]
    assert code == 1  # 2 would say that nothing was started
    assert "the checkpoint of step 10 could not be written to s3://bucket/runs/a" in said
    assert "tries with up to 5 retries each" in said
    # while it is gone, no run starts
    code, said = run_ranks(1, there, run, options, folder)[0]
    assert code == 2 and "s3://bucket/runs/a: no connection, or no answer" in said
    store.rules()
    assert verify.main([URL, "--all"]) == 0
    assert verify.published(location(URL)) == ["step-00000005"]
    # and the run goes on
    assert run_ranks(1, there, run, options, folder) == [(0, "")]
    check_no_secret(folder, store)


def _goes_after_step_5(port: int, options: list[str], folder: Path) -> tuple[int, str]:
    real = bucket.Bucket.publish

    def publish(self: bucket.Bucket, draft: Key, name: str, manifest: dict) -> None:
        real(self, draft, name, manifest)
        Server(port, None).rules({"kind": "gone"})

    bucket.Bucket.publish = publish
    manager.MOST_FAILURES = 1
    return run(options, folder)


def check_no_secret(folder: Path, store: Server) -> None:
    """No file of the run, and no object, has a credential in it."""
    secrets = [store.environment[name] for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")]
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    written += [store.object(key) for key in store.keys(AT)]
    assert len(written) > 5
    for content in written:
        assert not any(secret.encode() in content for secret in secrets)


# What is refused


def test_without_the_package_a_url_is_refused(monkeypatch):
    monkeypatch.setattr(objects.importlib.util, "find_spec", lambda name: None)
    objects._open.cache_clear()
    with pytest.raises(InputError, match="pip install obstore"):
        (location(URL) / ".lease").read_bytes()
    cfg = load_config([f"--checkpoint.store={URL}"])
    assert any("pip install obstore" in problem for problem in check.problems(cfg, 1))


def test_a_file_url_is_a_folder(tmp_path):
    run_ranks(1, partial(save_all, store=f"file://{tmp_path}/c"), tmp_path / "no", [3])
    assert values_on_disk(tmp_path / "c" / "step-00000003") == [3]
    assert not (tmp_path / "no").exists()


OPERATIONS: dict[str, Callable[[Key], object]] = {
    "read": Key.read_bytes,
    "range": lambda key: key.read_range(0, 1),
    "list": Key.below,
    "folders": Key.folders,
    "upload": lambda key: key.upload(lambda: [memoryview(b"x")], 1),
    "lease": lambda key: lease.StoreLease(key / ".lease"),  # its name is not the user's
}
REFUSALS = {  # what the store answers -> what is said
    "denied": "HTTP 403 AccessDenied: the store refuses it",
    "clock": "RequestTimeTooSkewed: the clock of this machine is wrong",
    "signature": "the secret key in the environment is another's",
    "region": "the bucket is in another region than AWS_REGION says (us-east-1)",
    "no bucket": "there is no bucket or container 'bucket'",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_asked_for_once_and_names_its_cause_and_the_endpoint(kind, store):
    store.rules({"kind": kind})
    for name, operation in OPERATIONS.items():
        store.ask("clear", b"")
        with pytest.raises(Unreachable) as refusal:
            operation(location(f"{URL}/x"))
        said = str(refusal.value)
        assert said.startswith(f"{URL}/x: ") and REFUSALS[kind] in said, (name, said)
        assert said.endswith(f"endpoint is http://127.0.0.1:{store.port} (AWS_ENDPOINT_URL)")
        assert len(store.status()["log"]) == 1, name


def test_a_store_that_is_busy_is_asked_again(store):
    key = location(f"{URL}/x")
    store.rules({"kind": "busy", "count": 3})
    key.upload(lambda: [memoryview(b"x")], 1)
    assert store.status()["counts"] == {"busy": 3} and key.read_bytes() == b"x"


def test_what_a_silent_store_is_waited_for_is_said_once(store, monkeypatch):
    """Until it has answered. Negative control: then a slow answer is no news."""
    monkeypatch.setattr(answers, "SILENT", 0.05)
    monkeypatch.setattr(answers, "HEARD", set())
    answers._say_awaited.cache_clear()
    key = location(f"{URL}/x")
    slow = {"kind": "stall", "seconds": 0.5}
    with heard() as words:
        for rules in ({"kind": "gone"}, slow, slow):
            store.rules(rules)
            with suppress(Unreachable, FileNotFoundError):
                key.read_bytes()
    where = f"http://127.0.0.1:{store.port} (AWS_ENDPOINT_URL)"
    assert words == [f"s3://bucket has not answered yet; the endpoint is {where}"]
    answers._say_awaited.cache_clear()
    with heard() as words, suppress(FileNotFoundError):
        key.read_bytes()
    assert words == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "Amazon's, as AWS_ENDPOINT_URL is not set"),
        ({"AWS_ENDPOINT": "https://me:SECRET@s:9/x"}, "https://s:9 (AWS_ENDPOINT)"),
    ],
)
def test_an_endpoint_is_named_without_a_password(settings, said, monkeypatch):
    for name in answers.ENDPOINTS["s3"][0]:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert answers.endpoint("s3") == said


def test_an_endpoint_without_tls_must_be_allowed(store, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(Unreachable, match="needs AWS_ALLOW_HTTP=true"):
        (location(URL) / ".lease").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Error performing GET http://169.254.169.254/latest in 1ms", "no credentials"),
        ("performing GET https://a/c?sig=SECRET&x=1 - strange", "performing GET https://a/c - str"),
        ("GET http://metadata.google.internal/computeMetadata/v1", "no credentials"),
        (
            "GET http://s/c/.metadata: status code: 503 S: <Code>SlowDown</Code>",
            "HTTP 503 SlowDown",
        ),
        ("Unable to extract metadata from headers: ETag Header missing", "gives no ETag"),
        ("x: status code: 503 Slow: <Error><Code>SlowDown</Code>", "HTTP 503 SlowDown"),
        ("a - HTTP error: error sending request\n\nDebug source:\nSECRET", "no connection"),
    ],
)
def test_what_is_said_of_an_error_has_no_signature(text, said):
    words = answers.cause(Exception(text))
    assert said in words and "SECRET" not in words


def test_no_manifest_leads_out_of_its_folder(store):
    run_ranks(1, there, save_all, Path("/nonexistent"), [1])
    path = location(URL) / "step-00000001"
    manifest = verify.read_manifest(path)
    for parts in ("..", "../../b", "/etc", "", "0badcafe"):
        with pytest.raises(ValueError, match="parts"):
            verify.manifest_text({**manifest, "parts": parts})


def apart(options: list[str], place: Path, run_number: int) -> tuple[int, str]:
    """Run a rank on a separate host: it shares no folder with the other one, nor with the run
    before."""
    host = place / f"host-{os.environ['RANK']}-{run_number}"
    (host / "run").mkdir(parents=True)
    os.chdir(host)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return run([*options, "--data.cache=cache"], Path("run"))


@pytest.mark.slow
def test_hosts_that_share_no_folder_train_and_resume(store, tmp_path):
    """Pods of Kubernetes without a shared volume are like this, and come back on other machines."""
    options = [*tiny_run(tmp_path), "--lr_schedule.kind=constant"]
    there_too = f"--checkpoint.store={URL}"
    disk = tmp_path / "disk"
    disk.mkdir()
    seen = {}
    for number, steps in enumerate((8, 16)):
        part = [*options, f"--training.steps={steps}"]
        assert run_ranks(2, run, part, disk) == [(0, "")] * 2
        assert run_ranks(2, there, apart, [*part, there_too], tmp_path, number) == [(0, "")] * 2
        seen[number] = series(tmp_path / f"host-0-{number}" / "run")
    assert min(seen[1]) == 9  # it went on where the other hosts had stopped
    assert seen[0] | seen[1] == series(disk)
