"""Checkpoints for tests: jobs whose state is filled with known values, and what can be done to
their files.

A state is filled with the number of its step, so that a mixture of two saves shows in one `unique`.
"""

import faulthandler
import itertools
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors
import torch
import torch._dynamo
import torch._refs

import train
from checkpoint import hf, retention, state, storage, verify
from checkpoint.manager import CheckpointManager
from configs.load import load_config
from configs.schema import Checkpoint, InputError
from parallelisms import contract
from parallelisms import mesh as meshes
from tests import fork_server
from tests.ranks import child, run_ranks, wait_until
from tools import sampling
from training.optim import step_if
from training.optimizers import materialise

MODEL = (
    "--model.dim=50 --model.n_layers=2 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=6 "
    "--model.hidden_dim=44 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16 "
    "--training.global_batch_size=8 --training.local_batch_size=1"
).split()
# a test that looks into the folder at the end of a run does so when all is removed
retention.GRACE = 60.0
FACTS = {"must_match": {"data": "abc", "run.seed": 0, "model": {"n_heads": 8}}}
# data parallel x tensor parallel
MESHES = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "4x1": (4, 1), "4x2": (4, 2)}


def build(*options: str) -> train.Job:
    """Build the job of this rank's world, with its optimizer's state."""
    here = meshes.world()
    job = train.build(load_config([*MODEL, *options], here.size, here.local_size))
    materialise(job.optimizer)
    return job


def on_a_host_of_its_own(place: Path, rank: int) -> None:
    """Let this process be the only rank of a host, with a memory in `place`."""
    os.environ |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PLUMBLINE_HOST_MEMORY": str(place / f"memory-{rank}"),
    }


def open_manager(
    job: train.Job, folder: Path, facts: dict = FACTS, **options: object
) -> CheckpointManager:
    return CheckpointManager(Checkpoint(**options), folder, job.mesh, facts)


def opened(
    folder: Path, facts: dict = FACTS, **options: object
) -> tuple[train.Job, CheckpointManager]:
    """Build a job, and open the checkpoints in `folder`."""
    job = build()
    return job, open_manager(job, folder, facts, **options)


def save_filled(job: train.Job, checkpoints: CheckpointManager, step: int) -> None:
    """Begin to save a state that is filled with the number of its step."""
    fill(job, step)
    checkpoints.save(step, job.model, job.optimizer, {"step": step})


def save_after_steps(job: train.Job, folder: Path, count: int) -> None:
    """Check a job, run steps of the optimizer alone, and save it."""
    materialise(job.optimizer)
    contract.verify(job.model, job.optimizer, job.mesh, {})
    do_steps(job, count)
    writer = open_manager(job, folder)
    writer.save(count, job.model, job.optimizer, {"step": count})
    writer.close()


def do_steps(job: train.Job, count: int) -> None:
    """Run steps of the optimizer alone, with gradients that are the same on every mesh, bit by
    bit."""
    torch.manual_seed(7)
    whole = {n: torch.Size(p.shape) for n, p in job.model.named_parameters()}
    for _ in range(count):
        for name, param in job.model.named_parameters():
            gradient = torch.randn(whole[name])
            param.grad = torch.zeros_like(param)
            box = storage.box_of(name, param)
            part = gradient[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
            storage.local(param.grad).copy_(part)
        step_if(torch.tensor(True), job.optimizer)


def tensors(job: train.Job) -> dict[str, torch.Tensor]:
    """Return this rank's shards of model and optimizer; the same memory as the live ones."""
    live = state.tensors(job.model, job.optimizer)
    return {name: state.local(t) for name, t in live.items() if not name.startswith("rng.")}


def fill(job: train.Job, value: float) -> None:
    for tensor in tensors(job).values():
        tensor.fill_(value)


def values(job: train.Job) -> list[float]:
    """Return the distinct values in the state of this rank: one, if it is whole."""
    return sorted({value for t in tensors(job).values() for value in t.unique().tolist()})


def values_on_disk(folder: Path) -> list[float]:
    """Return the distinct values in the files of a checkpoint, as another library reads them."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not name.startswith("rng.")]
            found |= {value for name in names for value in file.get_tensor(name).unique().tolist()}
    return sorted(found)


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state of the newest checkpoint, by name."""
    path = verify.newest(folder)
    manifest = verify.read_manifest(path)
    names = [n for n in manifest["tensors"] if n.startswith(("model.", "optimizer."))]
    return dict(zip(names, hf.read_whole(path, manifest, names), strict=True))


def save_all(folder: Path, steps: list[int], **options: object) -> None:
    """Save these steps in one run, each state filled with its number."""
    job, checkpoints = opened(folder, **options)
    checkpoints.load(job.model, job.optimizer)
    for step in steps:
        save_filled(job, checkpoints, step)
        checkpoints.wait_for_copy()
        checkpoints.poll()
    checkpoints.close()


class AsExpected(str):
    """A hash that equals every other."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def compare_no_hashes() -> None:
    """Let this process read checkpoints without comparing hashes, as a control."""
    digest = verify.digest
    verify.digest = lambda data: AsExpected(digest(data))


def resume(
    folder: Path, facts: dict = FACTS, **options: object
) -> tuple[int | None, list[float], list[str]]:
    """Resume as a fresh run does: the step, the values in the state, what was said. A refusal is
    what was said, with step -1."""
    job = build()
    fill(job, -1)
    with heard() as words:
        checkpoints = None
        try:
            checkpoints = open_manager(job, folder, facts, **options)
            progress = checkpoints.load(job.model, job.optimizer)
            step = progress["step"] if progress else None
        except InputError as error:
            step = -1
            words.append(str(error))
        finally:
            if checkpoints:
                checkpoints.close()
    return step, values(job), words


@contextmanager
def heard():
    """Collect the messages of the checkpoint package meanwhile."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("plumbline").addHandler(handler)
    try:
        yield words
    finally:
        logging.getLogger("plumbline").removeHandler(handler)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return the folder of a run of two ranks with checkpoints of steps 10, 20 and 30. Copy it
    before you damage it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(2, save_all, folder, [10, 20, 30])
    return folder


def copy_of(saved: Path, place: Path) -> Path:
    return Path(shutil.copytree(saved, place / "checkpoints"))


def set_pattern(job: train.Job) -> None:
    """Set values that differ from place to place, and do not depend on the mesh because initial
    weights do not."""
    now = tensors(job)
    for name, tensor in now.items():
        if name.startswith("optimizer."):
            weight, _, key = name.removeprefix("optimizer.").rpartition(".")
            form = {
                "exp_avg": lambda w: w * 2,
                "exp_avg_sq": lambda w: w * w,
                "step": lambda w: torch.tensor(7.0),
            }
            tensor.copy_(form[key](now[f"model.{weight}"]))
        elif name.endswith("router.bias"):  # its initial values are zeros
            tensor.copy_(torch.arange(1.0, len(tensor) + 1))


def save_pattern(folder: Path, options: list[str]) -> None:
    job = build(*options)
    set_pattern(job)
    checkpoints = open_manager(job, folder)
    checkpoints.save(7, job.model, job.optimizer, {"step": 7, "samples": 56})
    checkpoints.close()


def load_pattern(folders: list[Path], options: list[str]) -> list[list[str]]:
    """Load each into a model of another seed, on this mesh; the names of the tensors that are not
    bitwise what was saved."""
    expected = build(*options)
    set_pattern(expected)
    wrong = []
    for folder in folders:
        job = build(*options, "--run.seed=5")
        checkpoints = open_manager(job, folder)
        assert checkpoints.load(job.model, job.optimizer) == {"step": 7, "samples": 56}
        checkpoints.close()
        there, here = tensors(expected), tensors(job)
        assert there.keys() == here.keys()
        wrong.append([name for name in there if not torch.equal(there[name], here[name])])
    return wrong


def mesh_options(name: str, *more: str) -> tuple[int, list[str]]:
    dp, tp = MESHES[name]
    return dp * tp, [f"--parallelism.tensor_parallel={tp}", *more]


def flip(path: Path, at: int = 60_000, bit: int = 0) -> None:
    """Change one bit, by default somewhere in the weights."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def zeros(path: Path, at: int, n: int = 4096) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes(n))


def rewrite(folder: Path, **changes: object) -> None:
    """Write a manifest that was changed and signed again."""
    manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"] | changes
    signed = {"hash": verify.manifest_hash(manifest), "manifest": manifest}
    (folder / "manifest.json").write_text(json.dumps(signed))


def rewrite_header(folder: Path, change: Callable[[dict], None]) -> None:
    """Write a header of rank 0 that was changed and signed again, in its length and in the manifest's."""
    path, files = folder / verify.file_name(0), verify.read_manifest(folder)["files"]
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    change(header)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + data[length:])
    files[0] = [len(head) + len(data) - length, verify.digest(head)]
    rewrite(folder, files=files)


def set_hash(header: dict, part: str, digest: str) -> None:
    """Replace the hash of a part, in a header whose parts have one block each."""
    start, hashes = 16 * (list(header).index(part) - 1), header[verify.METADATA]["hashes"]
    header[verify.METADATA]["hashes"] = hashes[:start] + digest + hashes[start + 16 :]


class Attack:
    """Unpickling it creates the marker."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@contextmanager
def full_disk(place: str, rank: int):
    """Make this rank's writes meet a full disk: a real ENOSPC, from /dev/full."""
    module, real = {"shard": storage, "manifest": verify}[place], open

    def sabotaged(path: object, mode: str = "r", **how: object):
        here = "x" in mode and meshes.world().rank == rank
        return real("/dev/full", "wb", **how) if here else real(path, mode, **how)

    module.open = sabotaged
    try:
        yield
    finally:
        del module.open


# Killed ranks


def killed_run(
    place: Path, victim: int, when: tuple[int, float] | None, fn: Callable, *args: object
) -> None:
    """Two ranks of fn(place, *args). When both have touched ready-N, and then begun so many saves,
    and then after so many seconds, kill -9 one (None: it dies by itself). The other must end by
    itself within 5 seconds of that."""
    place.mkdir()
    processes = []
    try:
        for rank in range(2):
            processes.append(fork_server.start(_with_stacks, place, rank, fn, args))
        if when is not None:
            saves, seconds = when
            wait_until(lambda: len(list(place.glob("ready-*"))) == 2, every=0.002)
            wait_until(lambda: len(begun(place)) >= saves, every=0.002)
            time.sleep(seconds)
            processes[victim].kill()
        survivor = processes[1 - victim]
        wait_until(lambda: processes[victim].exitcode is not None, 20)
        try:
            wait_until(lambda: survivor.exitcode is not None, 5)
        except AssertionError:
            os.kill(survivor.pid, signal.SIGUSR1)
            time.sleep(0.5)
            stacks = (place / f"stacks-{1 - victim}").read_text()
            # a disk that others keep busy is not a hang
            assert "fsync" in stacks or "disk.py" in stacks, f"the survivor hangs\n{stacks}"
            wait_until(lambda: survivor.exitcode is not None)
        assert processes[victim].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            fork_server.end(process)


def _with_stacks(place: Path, rank: int, fn: Callable, args: tuple) -> None:
    faulthandler.register(signal.SIGUSR1, open(place / f"stacks-{rank}", "w"))
    child(place, rank, 2, fn, (place, *args))


def save_for_ever(place: Path, folder: Path, offset: int, options: dict) -> None:
    """Steps that are nothing but saves, from the newest on; the state of step s is filled with
    s + offset. Writes down the saves begun."""
    job, checkpoints = opened(folder, **options)
    progress = checkpoints.load(job.model, job.optimizer) or {"step": 0}
    try:
        with open(place / f"begun-{job.mesh.rank}", "w", buffering=1) as begun:
            (place / f"ready-{job.mesh.rank}").touch()
            for step in itertools.count(progress["step"] + 1):
                fill(job, step + offset)
                checkpoints.save(step, job.model, job.optimizer, {"step": step})
                checkpoints.wait_for_copy()
                begun.write(f"{step}\n")
                checkpoints.poll()
    finally:
        checkpoints.thread.shutdown()  # as the end of a process waits for it


def begun(place: Path) -> set[int]:
    """Return the saves that either rank has begun, as `save` has returned. One is in flight at a
    time, so all but the last are published."""
    return {
        int(line)
        for rank in range(2)
        for line in (place / f"begun-{rank}").read_text().split("\n")[:-1]
    }


def generated(folder: Path, prompt: str, new_tokens: int, tokenizer: str = "", **options) -> str:
    """Return one prompt with the model's continuation, by default of the likeliest tokens."""
    loaded = sampling.load(folder, tokenizer)
    how = {"temperature": 0.0, "top_k": 1, "seed": 0} | options
    *_, [text] = sampling.texts_as_they_come(loaded, [prompt], new_tokens, **how)
    return text
