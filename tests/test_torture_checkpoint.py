"""Checkpoints under kill -9, full disks and flipped bits: the numbers that must be passed, and bugs that must be
caught.

    python -m pytest tests/test_torture_checkpoint.py -m torture          about 5 minutes on two cores

Without `-m torture` each test runs its short form. A trial forks its ranks, so it takes about a second; its seed is
in its name and in its assertions.
"""

import faulthandler
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoint import lease, manager, storage, verify
from checkpoint.manager import CheckpointManager
from checkpoint.verify import Damaged
from configs.schema import InputError
from tests import ranks
from tests.ranks import run_ranks
from tests.test_checkpoint import (
    MESHES,
    build,
    copy_of,
    fill,
    flip,
    full_disk,
    heard,
    load_pattern,
    mesh_options,
    open_manager,
    resume,
    save_all,
    save_pattern,
    saved,  # noqa: F401  a fixture
    values_on_disk,
    zeros,
)


def short_and_long(name: str, short: list, long: list) -> Callable:
    """The test with each of these values; those of `long` only with -m torture."""
    marks = [pytest.mark.torture, pytest.mark.cap(300)]
    return pytest.mark.parametrize(name, [*short, *(pytest.param(value, marks=marks) for value in long)])


# Killed ranks


def killed_run(place: Path, victim: int, when: float | None, fn: Callable, *args: object) -> None:
    """Two ranks of fn(place, *args); `when` seconds after both touched ready-N, kill -9 one (None: it dies by itself).

    The other must end by itself within 5 seconds of that.
    """
    place.mkdir()
    pids = {}
    for rank in range(2):
        if (pid := os.fork()) == 0:
            faulthandler.register(signal.SIGUSR1, open(place / f"stacks-{rank}", "w"))  # noqa: SIM115
            ranks._child(place, rank, 2, fn, (place, *args))
        pids[rank] = pid
    try:
        if when is not None:
            wait_until(lambda: len(list(place.glob("ready-*"))) == 2, 30, "the ranks did not start")
            time.sleep(when)
            os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: ended(pids[victim]), 20, "the victim lives")
        try:
            wait_until(lambda: ended(pids[1 - victim]), 5, "the survivor hangs")
        except AssertionError:
            os.kill(pids[1 - victim], signal.SIGUSR1)
            time.sleep(0.5)
            stacks = (place / f"stacks-{1 - victim}").read_text()
            if "fsync" not in stacks and "sync_folder" not in stacks:  # a disk that others keep busy is not a hang
                pytest.fail("the survivor hangs\n" + stacks)
            wait_until(lambda: ended(pids[1 - victim]), 60, "the survivor hangs after its fsync")
        assert ended(pids[victim]).si_code == os.CLD_KILLED
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def ended(pid: int) -> os.waitid_result | None:
    """How it ended, if it has; it stays a zombie, and the caller still has to wait for it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def wait_until(true: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.002)


def save_for_ever(place: Path, folder: Path, offset: int, options: dict) -> None:
    """Steps that are nothing but saves; the state of step s is filled with s + offset. Writes down the saves begun."""
    job = build()
    checkpoints = open_manager(job, folder, **options)
    start = checkpoints.load(job.model, job.optimizer)["step"]
    try:
        with open(place / f"begun-{job.mesh.rank}", "w", buffering=1) as begun:
            (place / f"ready-{job.mesh.rank}").touch()
            for step in count(start + 1):
                fill(job, step + offset)
                checkpoints.save(step, job.model, job.optimizer, {"step": step})
                begun.write(f"{step}\n")
                checkpoints.poll()
    finally:
        checkpoints.thread.shutdown()  # as the end of a process waits for it


def last_begun(place: Path) -> int:
    """Of both ranks, 0 if none: the last save that `save` returned from."""
    lines = [line for rank in range(2) for line in (place / f"begun-{rank}").read_text().split("\n")[:-1]]
    return max(map(int, lines), default=0)


def check_whole(folder: Path, expected: Callable[[int, int], float]) -> tuple[int, int]:
    """Every published checkpoint is whole and of one state; (attempt, step) of the newest."""
    for name in verify.published(folder):
        verify.verify(folder / name)
        assert values_on_disk(folder / name) == [expected(*verify.parse_name(name))], name
    return verify.parse_name(verify.published(folder)[0])


@pytest.mark.parametrize("async_save", [True, False])
@short_and_long("trials", [4], [50])
def test_k1_a_rank_killed_while_saving_loses_at_most_that_save(trials, async_save, tmp_path):
    """One folder, many deaths: each trial resumes what the one before left, lease and half-written folder included."""
    folder, options = tmp_path / "c", {"async_save": async_save, "keep_last": 2}
    run_ranks(2, save_all, folder, [1])
    for trial in range(trials):
        rng = random.Random(trial)
        place = tmp_path / f"trial{trial}"
        killed_run(place, rng.randrange(2), rng.uniform(0, 0.25), save_for_ever, folder, 0, options)
        _, newest = check_whole(folder, lambda attempt, step: step)
        assert newest >= last_begun(place) - 1, f"trial {trial}: lost more than one save"
        assert run_ranks(2, resume, folder)[0][:2] == (newest, [newest]), f"trial {trial}"
    assert newest > trials / 2  # it did save in between


@short_and_long("trials", [3], [50])
def test_k2_a_step_saved_again_is_old_or_new_and_never_both(trials, tmp_path):
    """Going back to step 1, whose future was saved already, and killed while saving that again with other values."""
    run_ranks(2, save_all, tmp_path / "first" / "checkpoints", [1, 2, 3])
    again = 0
    for trial in range(trials):
        rng = random.Random(1000 + trial)
        folder = copy_of(tmp_path / "first" / "checkpoints", tmp_path / f"copy{trial}")
        options = {"load_step": 1, "keep_last": 0, "async_save": bool(trial % 2)}
        victim, when = rng.randrange(2), rng.uniform(0, 0.25)
        killed_run(tmp_path / f"trial{trial}", victim, when, save_for_ever, folder, 100, options)
        attempt, step = check_whole(folder, lambda attempt, step: step + 100 * attempt)
        assert {"step-00000001", "step-00000002", "step-00000003"} <= set(verify.published(folder))
        assert run_ranks(2, resume, folder)[0][:2] == (step, [step + 100 * attempt]), f"trial {trial}"
        again += attempt
        shutil.rmtree(folder)
    assert again > trials / 4


BEFORE, AFTER, HALF = "before", "after", "in the middle of"
POINTS = {  # where a rank dies, in the order of a save: (whose attribute, its name, which call from now on, when)
    "plan": (storage.StagedSave, "create_local_plan", 1, BEFORE),
    "folder": (storage.ShardWriter, "set_up_storage_writer", 1, AFTER),
    "half a shard": (storage.StagedSave, "lookup_object", 20, BEFORE),
    "shard not synced": (os, "fsync", 1, BEFORE),
    "shard synced": (os, "fsync", 1, AFTER),
    "all shards": (storage.ShardWriter, "finish", 1, BEFORE),
    "half the manifest": (verify, "write_manifest", 1, HALF),
    "manifest": (verify, "write_manifest", 1, AFTER),
    "before the rename": (Path, "rename", 1, BEFORE),
    "after the rename": (Path, "rename", 1, AFTER),
    "published": (verify, "sync_folder", 2, AFTER),
    "old one renamed": (Path, "rename", 2, AFTER),
    "old one half removed": (os, "unlink", 2, BEFORE),
    "load": (storage.StagedLoad, "lookup_tensor", 10, BEFORE),
}
BY_RANK_0 = list(POINTS)[list(POINTS).index("all shards") : list(POINTS).index("load")]

SHORT = ["half a shard", "half the manifest", "old one half removed"]


def arm(point: str, die: Callable[[], None]) -> None:
    """Replace the function so that its n-th call from now on dies before, after or half-way."""
    owner, name, nth, when = POINTS[point]
    real, calls = getattr(owner, name), count(1)

    def deadly(*args: object, **how: object) -> object:
        now = next(calls) == nth
        if now and when == HALF:
            (args[0] / verify.MANIFEST).write_text('{"hash": "0123456789abcdef", "manifest": {"format"')
        if now and when != AFTER:
            die()
        result = real(*args, **how)
        if now and when == AFTER:
            die()
        return result

    setattr(owner, name, deadly)


def die_at(place: Path, folder: Path, point: str, victim: int) -> None:
    """Resume from step 2 and save step 3; the victim dies at the point, of its own or, where only rank 0 gets there, of
    rank 0's hand."""
    job = build()
    checkpoints = open_manager(job, folder, keep_last=2)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    watcher = 0 if point in BY_RANK_0 else victim

    def die() -> None:
        os.kill(pids[victim], signal.SIGKILL)

    if job.mesh.rank == watcher and point == "load":
        arm(point, die)
    checkpoints.load(job.model, job.optimizer)
    if job.mesh.rank == watcher and point != "load":
        arm(point, die)
    fill(job, 3)
    try:
        checkpoints.save(3, job.model, job.optimizer, {"step": 3})
        checkpoints.close()
        time.sleep(30)  # a rank that was done before the other died; killed at the end of the trial
    finally:
        checkpoints.thread.shutdown()


@short_and_long("point", SHORT, [point for point in POINTS if point not in SHORT])
def test_k3_killed_at_every_point_of_a_save(point, tmp_path):
    run_ranks(2, save_all, tmp_path / "first" / "checkpoints", [1, 2])
    for victim in (0, 1):
        folder = copy_of(tmp_path / "first" / "checkpoints", tmp_path / f"copy{victim}")
        killed_run(tmp_path / f"trial{victim}", victim, None, die_at, folder, point, victim)
        _, newest = check_whole(folder, lambda attempt, step: step)
        assert newest in (2, 3)
        for step, found, words in run_ranks(2, resume, folder):
            assert (step, found, words) == (newest, [newest], []), (point, victim)
        assert not list(folder.glob(".tmp*")) and not list(folder.glob(".del*"))


def save_in_place(place: Path, folder: Path) -> None:
    """The bug: step 2 is written again where it is."""

    def careless(self: CheckpointManager, step: int, live: dict, staged: dict, head: dict) -> None:
        target = self.folder / verify.step_name(step, 0)

        def publish(tensors: dict, files: dict) -> None:
            (target / verify.MANIFEST).unlink()
            verify.write_manifest(target, {**head, "tensors": tensors, "files": files})

        storage.open = lambda path, mode: open(path, mode.replace("x", "w"))
        writer = storage.ShardWriter(target, self.mesh.rank, self.mesh.size, publish)
        manager.dcp.save(live, storage_writer=writer, planner=storage.StagedSave(staged), process_group=self.group)

    CheckpointManager._write = careless
    job = build()
    checkpoints = open_manager(job, folder)
    if job.mesh.rank == 1:
        arm("half a shard", lambda: os.kill(os.getpid(), signal.SIGKILL))
    fill(job, 102)
    checkpoints.save(2, job.model, job.optimizer, {"step": 2})
    checkpoints.close()


def test_control_saving_in_place_is_caught(tmp_path):
    folder = tmp_path / "c"
    run_ranks(2, save_all, folder, [1, 2])
    killed_run(tmp_path / "trial", 1, None, save_in_place, folder)
    with pytest.raises(Damaged):
        check_whole(folder, lambda attempt, step: step)
    assert values_on_disk(folder / "step-00000001") == [1]
    assert run_ranks(1, resume, folder)[0][:2] == (1, [1.0])  # and the hashes keep it from being used


@short_and_long("trials", [2], [10])
def test_k4_killed_while_loading_changes_no_byte(trials, saved, tmp_path):  # noqa: F811
    def contents(folder: Path) -> dict[str, str]:
        files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lease"]
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    folder = copy_of(saved, tmp_path)
    before = contents(folder)
    for trial in range(trials):
        killed_run(tmp_path / f"trial{trial}", trial % 2, None, die_at, folder, "load", trial % 2)
        assert contents(folder) == before
    assert run_ranks(2, resume, folder)[0][:2] == (30, [30.0])


# Failing disks


def fails_then_works(folder: Path, sabotage: object, async_save: bool, *options: str) -> list[tuple]:
    """Step 1 is saved, step 2 meets `sabotage`, step 3 is saved: after each, the failures counted, the folder, the
    words."""
    job = build(*options)
    checkpoints = open_manager(job, folder, async_save=async_save)
    after = []
    for step in (1, 2, 3):
        fill(job, step)
        with heard() as words:
            if step == 2:
                with sabotage():
                    checkpoints.save(step, job.model, job.optimizer, {"step": step})
                    polls = poll_until_told(checkpoints)
            else:
                checkpoints.save(step, job.model, job.optimizer, {"step": step})
                polls = poll_until_told(checkpoints)
        assert polls <= 1  # steps between the end of the save and its being told
        after.append((checkpoints.failures, sorted(p.name for p in folder.iterdir()), words))
        job.mesh.any_rank(False)  # nobody goes on before all have looked
    checkpoints.close()
    return after


def poll_until_told(checkpoints: CheckpointManager) -> int:
    """Polls as a training loop does; how many times after all ranks' threads were done."""
    after_end = 0
    while checkpoints.in_flight is not None:
        ended = not checkpoints.mesh.any_rank(not checkpoints.in_flight[1].done())
        after_end += ended
        checkpoints.poll()
        time.sleep(0.002)
    return after_end


def check_failed_save(results: list, folder: Path, words: str = "No space left on device") -> None:
    for rank, (first, second, third) in enumerate(results):
        assert first[:2] == (0, [".lease", "step-00000001"])
        assert second[:2] == (1, [".lease", "step-00000001"]), "a failed save must be told and leave nothing"
        assert third[:2] == (0, [".lease", "step-00000001", "step-00000003"])
        assert rank or words in second[2][0] and "step 2" in second[2][0]
    assert values_on_disk(folder / "step-00000001") == [1] and values_on_disk(folder / "step-00000003") == [3]


D1 = [
    (place, rank, async_save, options)
    for place, rank in [("shard", 0), ("shard", 1), ("manifest", 0)]
    for async_save in (True, False)
    for options in [(), ("--parallelism.tensor_parallel=2",), ("--model.dim=6",), ("--model.dim=400",)]
]


@short_and_long("cases", [[D1[9], D1[16]]], [D1])
def test_d1_a_full_disk_is_never_a_success(cases, tmp_path):
    for i, (place, rank, async_save, options) in enumerate(cases):
        sabotage = partial(full_disk, place, rank)
        results = run_ranks(2, fails_then_works, tmp_path / str(i), sabotage, async_save, *options)
        check_failed_save(results, tmp_path / str(i))


@contextmanager
def file_size_limit(size: int):
    """No file of this process may grow beyond: a real EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@short_and_long("sizes", [[100_000]], [[300, 4096, 8192, 10_000, 30_000, 65_536, 100_000, 200_000, 300_000, 320_000]])
def test_d2_files_that_cannot_grow(sizes, tmp_path):
    for size in sizes:
        results = run_ranks(2, fails_then_works, tmp_path / str(size), partial(file_size_limit, size), True)
        check_failed_save(results, tmp_path / str(size), "File too large")


# Damage


def silent_flips(folder: Path, name: str, n: int, seed: int) -> int:
    """How many of n random bit flips in a file `verify` does not see, although they change what would be loaded."""
    original, step = (folder / name).read_bytes(), folder
    sound, rng, silent = json.loads((folder / "manifest.json").read_bytes()), random.Random(seed), 0
    for _ in range(n):
        flip(folder / name, rng.randrange(len(original)), rng.randrange(8))
        try:
            verify.verify(step)
            same = name == "manifest.json" and json.loads((folder / name).read_bytes())["manifest"] == sound["manifest"]
            silent += not same
        except Damaged:
            pass
        (folder / name).write_bytes(original)
    return silent


@short_and_long("flips", [100], [500])
def test_d4_no_flipped_bit_is_silent(flips, saved, tmp_path):  # noqa: F811
    folder = copy_of(saved, tmp_path) / "step-00000030"
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"):
        assert silent_flips(folder, name, flips, seed=flips) == 0, name


def test_control_without_hashes_most_flipped_bits_are_silent(saved, tmp_path, monkeypatch):  # noqa: F811
    folder = copy_of(saved, tmp_path) / "step-00000030"
    monkeypatch.setattr(verify, "digest", lambda data: "")
    for file in (manifest := json.loads((folder / "manifest.json").read_bytes())["manifest"])["files"].values():
        file["header_hash"] = ""
    for tensor in manifest["tensors"].values():
        for part in tensor["parts"]:
            part["hashes"] = [""] * len(part["hashes"])
    (folder / "manifest.json").unlink()
    verify.write_manifest(folder, manifest)
    assert silent_flips(folder, "rank-00000.safetensors", 40, seed=1) == 40


@short_and_long("n", [(3, 10)], [(12, 100)])
def test_d5_cuts_and_pages_of_zeros_are_found(n, saved, tmp_path):  # noqa: F811
    cuts, pages = n
    folder = copy_of(saved, tmp_path) / "step-00000030"
    path, rng = folder / "rank-00001.safetensors", random.Random(5)
    original = path.read_bytes()
    for i in range(cuts + pages):
        if i < cuts:
            os.truncate(path, int(len(original) * i / cuts))
        else:
            zeros(path, min(rng.randrange(len(original) // 4096) * 4096, len(original) - 4096))
        with pytest.raises(Damaged, match="rank-00001"):
            verify.verify(folder)
        if i % 10 == 0:  # of a shard's header, which loading does not read, a page may be lost: then nothing is wrong
            found = run_ranks(1, resume, folder.parent)[0][:2]
            assert found == (20, [20.0]) or (i >= cuts and found == (30, [30.0])), i
        path.write_bytes(original)
    verify.verify(folder)


# One run per folder, any mesh


def contend(folder: Path, delay: float, hold: float = 0.5) -> str:
    """Start after `delay`; whether this run got the folder."""
    time.sleep(delay)
    try:
        mine = lease.Lease(folder / ".lease")
    except InputError as error:
        return str(error)
    time.sleep(hold)
    mine.release()
    return "mine"


def two_runs(folder: Path, rng: random.Random) -> list[str]:
    """Two runs that start 0 to 50 ms apart."""
    pids, ends = [], []
    for delay in (0.0, rng.uniform(0, 0.05)):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(write, contend(folder, delay).encode())
            os._exit(0)
        os.close(write)
        pids.append(pid)
        ends.append(read)
    answers = [os.read(end, 1000).decode() for end in ends]
    for pid, end in zip(pids, ends, strict=True):
        os.waitpid(pid, 0)
        os.close(end)
    return answers


def check_one_winner(answers: list[str]) -> None:
    assert sorted(answers)[1].startswith("/") or "mine" in answers
    assert answers.count("mine") == 1 and any("is being written by another run" in a for a in answers), answers


@short_and_long("trials", [2], [20])
def test_d9_of_two_runs_one_gets_the_folder(trials, tmp_path):
    for seed in range(trials):
        check_one_winner(two_runs(tmp_path, random.Random(100 + seed)))


@pytest.mark.torture
@pytest.mark.cap(300)
@pytest.mark.parametrize("more", [[], ["--model.tied_embeddings=true"]])
def test_r2_every_mesh_loads_what_every_mesh_saved(more, tmp_path):
    """6 x 6 pairs, weights and optimizer bitwise; sizes that no mesh divides."""
    for source in MESHES:
        n, options = mesh_options(source, *more)
        run_ranks(n, save_pattern, tmp_path / source, options)
    folders = [tmp_path / source for source in MESHES]
    for target in MESHES:
        n, options = mesh_options(target, *more)
        assert run_ranks(n, load_pattern, folders, options) == [[[]] * 6] * n, target


def test_control_one_wrong_bit_fails_the_matrix(tmp_path, monkeypatch):
    n, options = mesh_options("2x1")
    run_ranks(n, save_pattern, tmp_path, options)
    flip(tmp_path / "step-00000007" / "rank-00001.safetensors")
    read = verify.read_blocks
    monkeypatch.setattr(verify, "read_blocks", lambda *args: read(*args[:5], check=False))
    assert len(run_ranks(1, load_pattern, [tmp_path], [])[0][0]) == 1
