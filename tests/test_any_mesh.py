"""A checkpoint of any mesh continues on any other mesh like the uninterrupted run.

Twelve meshes use every dimension together. Their state is bitwise the same after a load: weights,
both moments, the routing biases, and on the same mesh the generators. No sample is repeated or
skipped, the losses are those of one plain process, and what a mesh saves again exports to the same
files. CI passes one run from mesh to mesh, so that each is once the source and once the target;
`-m exhaustive` has all 144 ordered pairs in both types.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train
from checkpoint import hf, state, storage, verify
from checkpoint.manager import CheckpointManager
from configs.schema import Checkpoint
from models import FORMATS
from parallelisms.mesh import world
from tests.parity import DEEPSEEK, EXACT, FLOAT64
from tests.ranks import run_ranks
from tests.runs import ADAMW, CP2, EP2, run, samples, series, tiny_run, whole

TP2, PP2 = "--parallelism.tensor_parallel=2", "--parallelism.pipeline_parallel=2"
REPLICATE2 = "--parallelism.data_parallel_replicate=2"
MESHES = {  # name: (ranks, options, data-parallel ranks); the first is the plain model's
    "one": (1, [], 1),
    "fsdp3": (3, [], 3),
    "ddp2": (2, [REPLICATE2], 2),
    "tp2": (2, [TP2], 1),
    "pp2": (2, [PP2], 1),
    "cp2": (2, [CP2], 1),
    "ep2": (2, [EP2], 2),
    "fsdp2xtp2": (4, [TP2], 2),
    "ep2xfsdp3": (6, [EP2], 6),
    "hsdp2x2xcp2": (8, [REPLICATE2, CP2], 4),
    "pp2xfsdp2xtp2": (8, [PP2, TP2], 2),
    "ep2xpp2xcp2": (8, [EP2, PP2, CP2], 2),
}
SAVED, COMPARED, STEPS = 2, 10, 27  # a pair saves after SAVED, and goes on for COMPARED
LIMITS = {"float32": 1e-5, "float64": EXACT}  # of losses, relative
RUN = (
    "--training.global_batch_size=12 --training.local_batch_size=1 --checkpoint.interval=0 "
    f"--training.steps={STEPS} --model.expert_dim=12"
).split()
MODEL = (
    "--model.dim=50 --model.n_layers=3 --model.n_dense_layers=1 --model.n_heads=4 "
    "--model.hidden_dim=44 --model.vocab_size=263"
).split()


def nothing() -> None:
    """The change of a run that is right."""


# On the ranks -------------------------------------------------------------------------------------


def state_of(job: train.Job) -> dict[str, torch.Tensor]:
    """Return the whole state as DTensors themselves put it together, not by the boxes of a
    checkpoint. A replica gets its own. The generator is this rank's."""
    live = state.tensors(job.model, job.optimizer)
    return {name: whole(tensor) for name, tensor in live.items()}


def note_state(folder: Path, job: train.Job) -> None:
    """Write the state next to the checkpoint of this step."""
    noted = state_of(job)
    noted[f"rng.{job.mesh.rank}"] = noted.pop("rng.cpu")
    (folder / "noted").mkdir(exist_ok=True)
    torch.save(noted, folder / "noted" / f"{job.mesh.rank}.pt")


def noted_in(folder: Path) -> dict[str, torch.Tensor]:
    """Join the notes of all ranks. In a pipeline they have other weights."""
    noted = {}
    for path in (folder / "noted").iterdir():
        for name, tensor in torch.load(path, weights_only=True).items():
            assert torch.equal(noted.setdefault(name, tensor), tensor), f"{name} of {path}"
    return noted


def other_names(
    job: train.Job, noted: dict[str, torch.Tensor], same_mesh: bool
) -> tuple[list[str], list[str]]:
    """Return the names of this rank's tensors, and of those that are not bitwise what was noted. A
    generator goes on where it was on the same mesh alone."""
    live = state_of(job)
    generator = live.pop("rng.cpu")
    wrong = [name for name, tensor in live.items() if not torch.equal(tensor, noted[name])]
    if same_mesh and not torch.equal(generator, noted[f"rng.{job.mesh.rank}"]):
        wrong.append("rng.cpu")
    return list(live), wrong


def save_again(folder: Path, job: train.Job, facts: dict, progress: dict) -> None:
    manager = CheckpointManager(Checkpoint(), folder / "again", job.mesh, facts)
    manager.save(progress["step"], job.model, job.optimizer, progress)
    manager.close()


def start(
    source: Path | None, folder: Path, options: list[str], stop: int | None, same_mesh: bool
) -> tuple[list[str], list[str]]:
    """Start train.py on this rank, from the checkpoints in its folder, until `stop`. Returns the
    record of other_names on the state that was loaded."""
    found: tuple[list[str], list[str]] = [], []
    real_resume, real_step, real_save = train.resume, train.train_step, CheckpointManager.save
    jobs = []

    def resume(job: train.Job, *rest: Any) -> tuple:
        jobs.append(job)
        checkpoints, progress, *others = real_resume(job, *rest)
        if source is not None:
            seen = other_names(job, noted_in(source), same_mesh)
            for names, more in zip(found, seen, strict=True):
                names += more
            save_again(folder, job, checkpoints.facts, progress)
        steps.append(progress.get("step", 0))
        return checkpoints, progress, *others

    steps = []

    def step(job: train.Job, *rest: Any) -> train.StepResult:
        steps.append(steps[-1] + 1)
        if steps[-1] == stop and job.mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_step(job, *rest)

    def save(manager: CheckpointManager, *rest: Any) -> None:
        torch.rand(1 + world().rank)  # the generators of ranks part
        if manager.folder.name == "checkpoints":
            note_state(folder, jobs[0])
        real_save(manager, *rest)

    train.resume, train.train_step, CheckpointManager.save = resume, step, save
    try:
        code, said = run(options, folder)
    finally:
        train.resume, train.train_step, CheckpointManager.save = (
            real_resume,
            real_step,
            real_save,
        )
    assert code == (0 if stop is None else 75), said
    return found


def starts(
    legs: list[tuple], store: Path, change: Callable = nothing
) -> list[tuple[list[str], list[str]]]:
    """Several in the same processes: the first pays for what PyTorch looks up once."""
    change()
    found = []
    for number, leg in enumerate(legs):
        if not dist.is_initialized():  # a run ends its own
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}-{number}",
                rank=world().rank,
                world_size=world().size,
            )
        found.append(start(*leg))
    return found


# In the test --------------------------------------------------------------------------------------


class Runs:
    """Runs of one model over one corpus, and what several tests need of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.given = [o for o in tiny_run(place) if not o.startswith("--model.")]

    def options(self, mesh: str, dtype: str) -> list[str]:
        """Return sizes that meshes do not divide evenly, and 8 experts."""
        more = [*MODEL, *DEEPSEEK, *ADAMW, *MESHES[mesh][1]]
        return self.given + more + RUN + ([FLOAT64] if dtype == "float64" else [])

    def plain(self, dtype: str) -> Path:
        """Return the uninterrupted run, in one process."""
        return self.made("one", dtype, None)

    def saved(self, mesh: str, dtype: str) -> Path:
        """Train on this mesh, and save after the steps SAVED."""
        return self.made(mesh, dtype, SAVED)

    def made(self, mesh: str, dtype: str, stop: int | None) -> Path:
        """Return the folder of such a run, which is made once."""
        folder = self.place / "runs" / f"{mesh}-{dtype}-{stop}"
        if not folder.exists():
            folder.mkdir(parents=True)
            legs = [(None, folder, self.options(mesh, dtype), stop, False)]
            run_ranks(MESHES[mesh][0], starts, legs, folder / "store", timeout=200)
        return folder

    def check(
        self,
        sources: dict[str, Path],
        target: str,
        dtype: str,
        steps: range,
        change: Callable = nothing,
    ) -> tuple[Path, list[str]]:
        """Go on from each of these runs on this mesh, for `steps`. Returns the last folder and what
        is wrong."""
        ranks, _, dp_size = MESHES[target]
        legs = []
        for name, source in sources.items():
            title = f"{name}-to-{target}-{dtype}-{steps.stop}-{change.__name__}"
            folder = self.place / "runs" / title
            shutil.copytree(source / "checkpoints", folder / "checkpoints")
            legs.append(
                (source, folder, self.options(target, dtype), steps.stop - 1, name == target)
            )
        store = folder / "store"
        results = run_ranks(ranks, starts, legs, store, change, timeout=60 + 60 * len(legs))
        problems = []
        for number, (source, folder, *_) in enumerate(legs):
            said = self.differences(source, folder, dtype, steps, dp_size)
            names: set[str] = set()
            for rank, of_rank in enumerate(results):
                names |= set(of_rank[number][0])
                said += [f"rank {rank}: {name} after the load" for name in of_rank[number][1]]
            noted = noted_in(source)
            if names != {name for name in noted if not name.startswith("rng.")}:
                said.append("tensors that no rank has, or too many")
            problems += [f"{folder.name}: {line}" for line in said]
        return folder, problems

    def differences(
        self, source: Path, folder: Path, dtype: str, steps: range, dp_size: int
    ) -> list[str]:
        """List the differences between the run that continued in this folder and the plain one, and
        those of its next checkpoint."""
        problems = []
        plain = self.plain(dtype)
        want, got = series(plain), series(folder)
        if list(got) != list(steps):
            problems.append(f"steps {list(got)}")
        for step in steps:
            error = abs(got.get(step, 0.0) / want[step] - 1)
            if not error <= LIMITS[dtype]:
                problems.append(f"the loss of step {step} is off by {error:.1e}")
        rows = samples(plain, 1)[steps.start - 1 : steps.stop - 1]
        if samples(folder, dp_size) != rows:
            problems.append("other samples")
        again = verify.newest(folder / "again")
        saved = folder / "checkpoints" / again.name
        noted = noted_in(source)
        kept = {name: noted[name] for name in noted if not name.startswith("rng.")}
        if not is_equal(stored(again), kept):
            problems.append("what was saved again is not what was loaded")
        if exported(again) != exported(saved):
            problems.append("the exports")
        return problems


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Return the contents of a checkpoint."""
    manifest = verify.read_manifest(path)
    names = [name for name in manifest["tensors"] if not name.startswith("rng.")]
    return dict(zip(names, hf.read_whole(path, manifest, names), strict=True))


def is_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def exported(path: Path) -> dict[str, bytes]:
    """Return the files that transformers would read, by name."""
    out = path.parent / f"hf-{path.name}"
    dtype = stored(path)["model.norm.weight"].dtype
    hf.export(path, out, FORMATS["deepseek_v3"], dtype, {})
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("any-mesh"))


@pytest.mark.slow
@pytest.mark.cap(300)
def test_a_run_that_is_handed_from_mesh_to_mesh_is_the_plain_one(runs: Runs) -> None:
    """Two steps on each: every mesh is once the source, and once the target."""
    names = list(MESHES)
    at, step, problems = runs.saved(names[0], "float64"), SAVED, []
    for source, target in zip(names, names[1:] + names[:1], strict=True):
        steps = range(step + 1, step + 2 + 1)
        at, said = runs.check({source: at}, target, "float64", steps)
        problems += said
        step += 2
    assert not problems, "\n".join(problems)


@pytest.mark.exhaustive
@pytest.mark.cap(1200)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("target", MESHES)
def test_any_mesh_to_any_mesh(target: str, dtype: str, runs: Runs) -> None:
    """All ordered pairs, and each mesh to itself, twelve in a test."""
    sources = {mesh: runs.saved(mesh, dtype) for mesh in MESHES}
    steps = range(SAVED + 1, SAVED + COMPARED + 1)
    _, problems = runs.check(sources, target, dtype, steps)
    assert not problems, "\n".join(problems)


def moments_swapped() -> None:
    """Swap the halves of a first moment that two ranks share evenly."""
    real = storage.box_of

    def box_of(name: str, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        offset, shape = real(name, tensor)
        if name.endswith(".exp_avg") and 2 * shape[0] == tensor.shape[0]:
            offset = [shape[0] - offset[0], *offset[1:]]
        return offset, shape

    storage.box_of = box_of


@pytest.mark.slow
@pytest.mark.parametrize("change", [nothing, moments_swapped])
def test_swapped_shards_of_a_moment_are_seen(change: Callable, runs: Runs) -> None:
    """Swap two shards of a moment; without the swap there is nothing to see."""
    steps = range(SAVED + 1, SAVED + 3)
    _, problems = runs.check({"one": runs.saved("one", "float32")}, "ep2", "float32", steps, change)
    if change is nothing:
        assert not problems, "\n".join(problems)
        return
    said = "\n".join(problems)
    assert "rank 1: optimizer.layers.1.feed_forward.experts.w1.exp_avg after the load" in said, said
    loaded = [line for line in problems if line.endswith(" after the load")]
    assert all(".exp_avg " in line for line in loaded), said
    # the next step has the right weights, and the one after it has not
    assert f"the loss of step {SAVED + 2} is off by" in said, said
    assert f"the loss of step {SAVED + 1} is off by" not in said, said
    assert "what was saved again is not what was loaded" in said, said
