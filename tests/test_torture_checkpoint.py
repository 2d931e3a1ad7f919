"""Checkpoints under kill -9, full disks and flipped bits: the numbers that must be passed, and bugs
that must be caught.

    python -m pytest tests/test_torture_checkpoint.py -m torture

Without `-m torture` each test runs its short form, and with `-m exhaustive` its longest. A trial
forks its ranks, so it takes about a second; its seed is in its name and in its assertions.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from checkpoint import lease, manager, retention, storage, verify
from checkpoint.manager import CheckpointManager
from checkpoint.verify import Damaged
from configs.schema import InputError
from reliability import disk
from tests.checkpoints import (
    begun,
    build,
    copy_of,
    fill,
    flip,
    full_disk,
    heard,
    killed_run,
    open_manager,
    opened,
    resume,
    save_all,
    save_for_ever,
    saved,  # noqa: F401  a fixture
    values,
    values_on_disk,
    zeros,
)
from tests.programs import ROOT
from tests.ranks import WORKERS, run_ranks, step_timeout
from tests.runs import run, stopped_at, tiny_run


def short_and_long(name: str, short: list, long: list, longest: list = ()) -> Callable:
    """The test with each of these values; those of `long` only with -m torture, and of `longest`
    with -m exhaustive."""
    cases = list(short)
    for mark, more in (pytest.mark.torture, long), (pytest.mark.exhaustive, longest):
        for value in more:
            values = value if "," in name else [value]
            cases.append(pytest.param(*values, marks=[mark, pytest.mark.cap(300)]))
    return pytest.mark.parametrize(name, cases)


# Killed ranks


def check_whole(folder: Path, expected: Callable[[int, int], float]) -> tuple[int, int]:
    """Every published checkpoint is whole and of one state; (attempt, step) of the newest."""
    for name in verify.published(folder):
        verify.verify(folder / name)
        assert values_on_disk(folder / name) == [expected(*verify.parse_name(name))], name
    return verify.parse_name(verify.published(folder)[0])


@short_and_long("trials", [3], [], [50])
def test_a_rank_killed_while_saving_loses_at_most_that_save(trials, tmp_path):
    """One folder, many deaths: each trial resumes what the one before left, lease and half-written
    folder included."""
    folder, options, least = tmp_path / "c", {"keep_last": 2}, 1
    run_ranks(2, save_all, folder, [1])
    for trial in range(trials):
        rng = random.Random(trial)
        place = tmp_path / f"trial{trial}"
        victim, saves = rng.randrange(2), rng.randrange(3)
        killed_run(place, victim, (saves, rng.uniform(0, 0.25)), save_for_ever, folder, 0, options)
        _, newest = check_whole(folder, lambda attempt, step: step)
        assert newest >= max(begun(place), default=0) - 1, f"trial {trial}: lost more than one save"
        least += max(saves - 1, 0)
        assert run_ranks(2, resume, folder)[0][:2] == (newest, [newest]), f"trial {trial}"
    assert newest >= least and least > trials / 6  # it did save in between


@pytest.mark.slow
@short_and_long("trials", [2], [], [50])
def test_a_step_saved_again_is_old_or_new_and_never_a_mixture(trials, tmp_path):
    """Going back to step 1, whose future was saved already, and killed while saving that again with
    other values."""
    run_ranks(2, save_all, tmp_path / "first" / "checkpoints", [1, 2, 3])
    again = 0
    for trial in range(trials):
        rng = random.Random(1000 + trial)
        folder = copy_of(tmp_path / "first" / "checkpoints", tmp_path / f"copy{trial}")
        options = {"load_step": 1, "keep_last": 0, "async_save": bool(trial % 2)}
        victim, when = rng.randrange(2), (rng.randrange(3), rng.uniform(0, 0.25))
        killed_run(tmp_path / f"trial{trial}", victim, when, save_for_ever, folder, 100, options)
        attempt, step = check_whole(folder, lambda attempt, step: step + 100 * attempt)
        assert {"step-00000001", "step-00000002", "step-00000003"} <= set(verify.published(folder))
        assert run_ranks(2, resume, folder)[0][:2] == (step, [step + 100 * attempt]), (
            f"trial {trial}"
        )
        again += attempt
        shutil.rmtree(folder)
    assert again > trials / 6


BEFORE, AFTER, HALF = "before", "after", "in the middle of"
# where a rank dies, in the order of a save: (whose attribute, its name, which call from now on,
# when)
POINTS = {
    "plan": (CheckpointManager, "_make_plan", 1, BEFORE),
    "copied": (CheckpointManager, "_copy", 1, AFTER),
    "folder": (Path, "mkdir", 1, AFTER),
    "half a shard": (verify, "digest", 20, BEFORE),
    "shard not synced": (os, "fsync", 1, BEFORE),
    "shard synced": (os, "fsync", 1, AFTER),
    "all shards": (CheckpointManager, "_publish", 1, BEFORE),
    "half the manifest": (verify, "write_manifest", 1, HALF),
    "manifest": (verify, "write_manifest", 1, AFTER),
    "before the rename": (Path, "rename", 1, BEFORE),
    "after the rename": (Path, "rename", 1, AFTER),
    "published": (disk, "sync", 2, AFTER),
    "old one renamed": (Path, "rename", 2, AFTER),
    "old one half removed": (os, "unlink", 2, BEFORE),
    "load": (verify, "read_blocks", 10, BEFORE),
}
BY_RANK_0 = list(POINTS)[list(POINTS).index("all shards") : list(POINTS).index("load")]
# rank 0's alone: the other rank is done when these are reached
REMOVAL = ["old one renamed", "old one half removed"]

# In CI, a rank each in turn; in the longest form every point, and both ranks.
SHORT = ["half a shard", "half the manifest", "old one half removed"]
LONG = ["copied", "shard synced", "after the rename", "load"]


def arm(point: str, die: Callable[[], None]) -> None:
    """Replace the function so that its n-th call from now on dies before, after or half-way."""
    owner, name, nth, when = POINTS[point]
    real, calls = getattr(owner, name), count(1)

    def deadly(*args: object, **how: object) -> object:
        now = next(calls) == nth
        if now and when == HALF:
            (args[0] / verify.MANIFEST).write_text(
                '{"hash": "0123456789abcdef", "manifest": {"format"'
            )
        if now and when != AFTER:
            die()
        result = real(*args, **how)
        if now and when == AFTER:
            die()
        return result

    setattr(owner, name, deadly)


def die_at(place: Path, folder: Path, point: str, victim: int) -> None:
    """Resume from step 2 and save step 3; the victim dies at the point, by itself or, where only
    rank 0 gets there, by rank 0's signal."""
    job, checkpoints = opened(folder, keep_last=2)
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
        if point not in REMOVAL:
            # a rank that was done before the other died; killed at the end of the trial
            time.sleep(30)
    finally:
        checkpoints.thread.shutdown()


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory) -> Path:
    """Return the folder of a run of two ranks with checkpoints of steps 1 and 2. Copy it."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    run_ranks(2, save_all, folder, [1, 2])
    return folder


@short_and_long(
    "point, victim",
    [(point, i % 2) for i, point in enumerate(SHORT)],
    [(point, i % 2) for i, point in enumerate(LONG)],
    [(point, 0) for point in REMOVAL]
    + [(p, v) for p in POINTS if p not in REMOVAL for v in (0, 1)],
)
def test_a_kill_at_every_point_of_a_save_leaves_a_whole_checkpoint(
    point, victim, two_saved, tmp_path
):
    folder = copy_of(two_saved, tmp_path)
    killed_run(tmp_path / "trial", victim, None, die_at, folder, point, victim)
    _, newest = check_whole(folder, lambda attempt, step: step)
    assert newest in (2, 3)
    for step, found, words in run_ranks(2, resume, folder):
        assert (step, found, words) == (newest, [newest], [])
    assert not list(folder.glob(".tmp*")) and not list(folder.glob(".del*"))


def save_in_place(place: Path, folder: Path) -> None:
    """The bug: step 2 is written again where it is."""

    def careless(self: CheckpointManager, saved: manager.Snapshot) -> None:
        target = self.folder / saved.name

        def publish(temporary: Path, name: str, head: dict, files: list) -> None:
            (target / verify.MANIFEST).unlink()
            verify.write_manifest(target, {**head, "files": files, "tensors": self.plan.table})

        storage.open = lambda path, mode: open(path, mode.replace("x", "w"))
        self._publish = publish
        self._save(target, saved)

    CheckpointManager._write_kept = careless
    job, checkpoints = opened(folder)
    if job.mesh.rank == 1:
        arm("half a shard", lambda: os.kill(os.getpid(), signal.SIGKILL))
    fill(job, 102)
    checkpoints.save(2, job.model, job.optimizer, {"step": 2})
    checkpoints.close()


@pytest.mark.slow
def test_control_saving_in_place_is_caught(two_saved, tmp_path):
    folder = copy_of(two_saved, tmp_path)
    killed_run(tmp_path / "trial", 1, None, save_in_place, folder)
    with pytest.raises(Damaged):
        check_whole(folder, lambda attempt, step: step)
    assert values_on_disk(folder / "step-00000001") == [1]
    # and the hashes keep it from being used
    assert run_ranks(1, resume, folder)[0][:2] == (1, [1.0])


class PowerCut:
    """Disk state after a power cut: of a file the bytes, and of a folder the names, that it had
    when it was last synced. Unsynced data is lost. Ignores the sync of number `deaf_to`."""

    def __init__(self, deaf_to: int | None):
        # inode -> bytes, or name -> inode
        self.deaf_to, self.synced, self.contents = deaf_to, 0, {}
        self.fsync, os.fsync = os.fsync, self.listen

    def listen(self, fd: int) -> None:
        self.fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name == ".lease":
            return
        if self.synced != self.deaf_to:
            now = (
                {p.name: p.stat().st_ino for p in path.iterdir()}
                if path.is_dir()
                else path.read_bytes()
            )
            self.contents[os.fstat(fd).st_ino] = now
        self.synced += 1

    def leave(self, inode: int, path: Path) -> Path:
        """Make there what is left of a file or a folder."""
        content = self.contents.get(inode, {})
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir()
            for name, child in content.items():
                self.leave(child, path / name)
        return path


def _cut_the_power(place: Path) -> list[str]:
    """Save a checkpoint under a PowerCut that hears every sync, and then under those that miss one.
    What was lost."""
    job, rename, lost, deaf_to = build(), Path.rename, [], None
    while not lost or deaf_to < power.synced:
        root = place / f"{deaf_to}"
        root.mkdir(parents=True)
        power, at_rename = PowerCut(deaf_to), []

        def watched_rename(self: Path, target: Path) -> Path:
            # From now on the new name may be durable at any time, so what it names must be durable
            # already.
            at_rename.append(power.leave(self.stat().st_ino, place / f"{deaf_to}-renamed"))
            return rename(self, target)

        Path.rename = watched_rename
        save_here = open_manager(job, root / "run" / "checkpoints")
        save_here.save(1, job.model, job.optimizer, {"step": 1})
        save_here.close()
        os.fsync, Path.rename = power.fsync, rename
        left = (
            power.leave(root.stat().st_ino, place / f"{deaf_to}-left")
            / "run"
            / "checkpoints"
            / "step-00000001"
        )
        try:
            verify.verify(at_rename[0])
            verify.verify(left)
            lost.append("nothing")
        except Damaged as error:
            lost.append(str(error))
        deaf_to = 0 if deaf_to is None else deaf_to + 1
    return lost


def test_a_power_cut_loses_no_published_checkpoint(tmp_path):
    """Kills lose nothing that was written, so they cannot show whether it was synced. Each sync is
    needed: without any one of them something is lost."""
    (whole, *damages) = run_ranks(1, _cut_the_power, tmp_path)[0]
    assert whole == "nothing"
    assert len(damages) == 6 and "nothing" not in damages, damages


# Failing disks


def fails_then_works(
    folder: Path, sabotage: object, async_save: bool, *options: str
) -> list[tuple]:
    """Step 1 is saved, step 2 meets `sabotage`, step 3 is saved: after each, the failures counted,
    the folder, the words."""
    job = build(*options)
    checkpoints = open_manager(job, folder, async_save=async_save)
    after = []
    for step in (1, 2, 3):
        fill(job, step)
        with heard() as words, sabotage() if step == 2 else nullcontext():
            checkpoints.save(step, job.model, job.optimizer, {"step": step})
            polls = poll_until_told(checkpoints)
        if checkpoints.retention:
            checkpoints.retention.wait(60)  # what the failed save left
        job.mesh.any_rank(False)
        assert polls <= 1  # steps between the end of the save and its being told
        after.append((checkpoints.failures, sorted(p.name for p in folder.iterdir()), words))
        job.mesh.any_rank(False)  # no rank continues before all have looked
    checkpoints.close()
    return after


def poll_until_told(checkpoints: CheckpointManager) -> int:
    """Polls as a training loop does; how many times after all ranks' threads were done."""
    after_end = 0
    while checkpoints.in_flight is not None:
        ended = not checkpoints.mesh.any_rank(not checkpoints.in_flight.future.done())
        after_end += ended
        checkpoints.poll()
        time.sleep(0.002)
    return after_end


def check_failed_save(results: list, folder: Path, words: str = "No space left on device") -> None:
    for rank, (first, second, third) in enumerate(results):
        assert first[:2] == (0, [".lease", "step-00000001"])
        assert second[:2] == (1, [".lease", "step-00000001"]), (
            "a failed save must be told and leave nothing"
        )
        assert third[:2] == (0, [".lease", "step-00000001", "step-00000003"])
        assert rank or words in second[2][0] and "step 2" in second[2][0]
    for step in (1, 3):
        assert values_on_disk(folder / verify.step_name(step, 0)) == [step]


MODELS = [(), ("--parallelism.tensor_parallel=2",), ("--model.dim=6",), ("--model.dim=400",)]
# what cannot be written, and whose it is
FULL = list(product([("shard", 0), ("shard", 1), ("manifest", 0)], (True, False), MODELS))


@short_and_long("cases", [[FULL[9], FULL[16]]], [], [FULL])
def test_a_save_to_a_full_disk_never_counts_as_a_success(cases, tmp_path):
    for i, (place, async_save, options) in enumerate(cases):
        sabotage = partial(full_disk, *place)
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


@pytest.mark.parametrize("size", [300, 100_000])
def test_a_save_over_the_file_size_limit_fails_cleanly(size, tmp_path):
    limit = partial(file_size_limit, size)
    results = run_ranks(2, fails_then_works, tmp_path, limit, True)
    check_failed_save(results, tmp_path, "File too large")


@contextmanager
def out_of_step():
    """Rank 1 sends a message that rank 0 does not wait for, and fails when they have agreed."""
    agreed, stray = manager.agree, []

    def agree(error: BaseException | None, group: dist.ProcessGroup) -> None:
        agreed(error, group)
        if dist.get_rank() == 1:
            stray.append(dist.broadcast(torch.zeros(1), src=1, group=group, async_op=True))
            raise ConnectionError("the peer is gone")

    manager.agree = agree
    try:
        yield
    finally:
        manager.agree = agreed


def test_ranks_that_did_not_agree_save_again(tmp_path):
    """A rank fails where the others do not know it: all go on, its own log has the cause, and the
    next save does not wait for a message that has gone astray."""
    results = run_ranks(2, fails_then_works, tmp_path, out_of_step, True)
    assert [[failures for failures, *_ in saves] for saves in results] == [[0, 1, 0]] * 2
    told, cause = (saves[1][2] for saves in results)
    assert "another rank failed" in told[0] and "the checkpoint of step 2" in cause[0]
    for step in (1, 2, 3):
        verify.verify(tmp_path / verify.step_name(step, 0))


# Slow and late file systems


def stopped_while_removing(options: list[str], folder: Path, seconds: float) -> tuple[int, float]:
    """Return the exit code of a run that is asked to stop while rank 0 takes `seconds` to remove an
    old checkpoint, and how long the run took after that."""
    began, rmtree = [], shutil.rmtree

    def slow_rmtree(path: Path, **how: object) -> None:
        began.append(time.monotonic())
        time.sleep(seconds)
        rmtree(path, **how)

    # of this module alone
    retention.GRACE, retention.shutil = 1.0, SimpleNamespace(rmtree=slow_rmtree)
    code = stopped_at(8, options, folder)
    assert os.environ["RANK"] != "0" or began, "nothing was removed, so the test shows nothing"
    return code, time.monotonic() - began[0] if began else 0.0


@pytest.mark.slow
def test_no_rank_waits_for_the_removal_of_old_checkpoints(tmp_path):
    """However slow the file system is: the removal takes longer than a step may, and a stop still
    ends as a stop."""
    options = [
        *tiny_run(tmp_path),
        "--checkpoint.interval=1",
        "--checkpoint.keep_last=1",
        step_timeout(3),
    ]
    removal = 8 * WORKERS
    results = run_ranks(2, stopped_while_removing, options, tmp_path, removal)
    assert [code for code, _ in results] == [75, 75]
    assert results[0][1] < removal, "the run waited for the removal"
    assert "step-00000008" in verify.published(tmp_path / "checkpoints")


def hide(hidden: Path, seconds: float) -> None:
    """From its first look on, this process does not find this folder for so long: another host has
    just made it."""
    scandir, opened, first = os.scandir, os.open, []

    def gone(path: object) -> bool:
        if not (isinstance(path, (str, Path)) and Path(path).is_relative_to(hidden)):
            return False
        first.append(time.monotonic())
        return time.monotonic() < first[0] + seconds

    @contextmanager
    def late_scandir(folder: object):
        with scandir(folder) as entries:
            yield iter([entry for entry in entries if not gone(entry.path)])

    def late_open(path: object, *rest: object, **how: object) -> int:
        if gone(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return opened(path, *rest, **how)

    os.scandir, os.open = late_scandir, late_open


def resumes_late(folder: Path, blind: list[int]) -> tuple[int, list[float], list[int]]:
    """Resume while these ranks do not see step 30 yet, then save steps 30 and 40 when all do: the
    step and values it resumed with, the failures counted after each save."""
    job = build()
    if job.mesh.rank in blind:
        hide(folder / "step-00000030", 3)
    checkpoints = open_manager(job, folder, keep_last=0)
    step, failures = checkpoints.load(job.model, job.optimizer)["step"], []
    found = values(job)
    time.sleep(3)
    for later in (30, 40):
        fill(job, later + 0.5)
        checkpoints.save(later, job.model, job.optimizer, {"step": later})
        poll_until_told(checkpoints)
        failures.append(checkpoints.failures)
    checkpoints.close()
    return step, found, failures


@pytest.mark.slow
@pytest.mark.parametrize("blind", [[0], [1]])
def test_ranks_that_see_a_checkpoint_late_agree_and_write_none_again(blind, saved, tmp_path):
    """Rank 0 chooses among what it sees. What it did not see is not overwritten; what another rank
    cannot open is damaged for all, and a new attempt begins."""
    folder = copy_of(saved, tmp_path)
    file = folder / "step-00000030" / "rank-00001.safetensors"
    before = file.read_bytes()
    results = run_ranks(2, resumes_late, folder, blind)
    assert results == [(20, [20.0], [1, 0] if 0 in blind else [0, 0])] * 2
    again = ["step-00000040"] if 0 in blind else ["step-00000040.1", "step-00000030.1"]
    assert verify.published(folder) == [*again, "step-00000030", "step-00000020", "step-00000010"]
    assert file.read_bytes() == before and values_on_disk(folder / again[0]) == [40.5]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run_with_temporary(place: Path, options: list[str], folder: Path) -> tuple[int, str]:
    os.environ["TMPDIR"], tempfile.tempdir = str(place), None
    return run(options, folder)


@pytest.mark.slow
def test_a_run_without_a_folder_for_temporary_files(tmp_path):
    """TMPDIR is a place where nothing can be made: a run does without and leaves nothing behind."""
    options = [*tiny_run(tmp_path), "--training.steps=3"]
    found = []
    for place in tmp_path, Path("/proc"):
        folder = tmp_path / f"run-{place.name}"
        folder.mkdir()
        assert run_ranks(2, run_with_temporary, place, options, folder) == [(0, "")] * 2
        verify.verify(folder / "checkpoints" / "step-00000003")
        found.append([name for name in files(folder) if not name.startswith("samples-")])
    assert found[0] == found[1]
    assert not list(ROOT.glob("tmp*")) + list(ROOT.glob("plumbline-*"))


# Damage


def parsed(content: bytes) -> dict:
    return json.loads(content)["manifest"]


def silent_flips(folder: Path, name: str, n: int, seed: int) -> int:
    """Return how many of n random bit flips in a file `verify` does not see, although they change
    the loaded values."""
    original, rng, silent = (folder / name).read_bytes(), random.Random(seed), 0
    for _ in range(n):
        flip(folder / name, rng.randrange(len(original)), rng.randrange(8))
        try:
            verify.verify(folder)
            is_same = name == "manifest.json" and parsed((folder / name).read_bytes()) == parsed(
                original
            )
            silent += not is_same
        except Damaged:
            pass
        (folder / name).write_bytes(original)
    return silent


@short_and_long("flips", [100], [], [500])
def test_every_flipped_bit_in_a_checkpoint_is_detected(flips, saved, tmp_path):
    folder = copy_of(saved, tmp_path) / "step-00000030"
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"):
        assert silent_flips(folder, name, flips, seed=flips) == 0, name


def test_truncated_files_and_zeroed_pages_are_detected(saved, tmp_path):
    cuts, pages = 3, 10
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
        # a page of the generators' states may be lost, which another mesh does not read
        if i % 10 == 0:
            found = run_ranks(1, resume, folder.parent)[0][:2]
            assert found == (20, [20.0]) or (i >= cuts and found == (30, [30.0])), i
        path.write_bytes(original)
    verify.verify(folder)


# One run per folder, any mesh


def contend(folder: Path, seed: int, hold: float = 20.0) -> str:
    """Start 0 to 50 ms after the other; whether this run got the folder, which it keeps until the
    other has been refused, however late that comes, at most for `hold` seconds."""
    time.sleep(dist.get_rank() * random.Random(seed).uniform(0, 0.05))
    try:
        mine = lease.Lease(folder / ".lease")
    except InputError as error:
        (folder / f"refused-{seed}").touch()
        return str(error)
    deadline = time.monotonic() + hold
    while time.monotonic() < deadline and not (folder / f"refused-{seed}").exists():
        time.sleep(0.01)
    mine.release()
    return "mine"


@short_and_long("trials", [2], [], [20])
def test_of_two_runs_one_gets_the_folder(trials, tmp_path):
    for seed in range(trials):
        answers = run_ranks(2, contend, tmp_path, seed)
        assert answers.count("mine") == 1, answers
        assert any("is being written by another run" in a for a in answers), answers
