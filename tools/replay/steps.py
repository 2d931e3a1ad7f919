"""One rank recomputes steps of a run from a checkpoint, and notes everything of those that were
asked for (tools/parity/trajectory.py)."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import train
from checkpoint import adapters, hf, state, verify
from checkpoint.storage import DTYPES, GENERATOR
from configs import stages
from configs.check import derive
from configs.load import load_config
from configs.schema import Config, InputError
from data.open import open_corpora
from models import FORMATS
from parallelisms.mesh import world
from reliability.guard import Guard
from reliability.objects import Key, location
from tools.parity import trajectory
from tools.parity.trajectory import Notes, whole
from training import digests
from training.optim import learning_rate, set_learning_rate
from training.optimizers import materialise


@dataclass(frozen=True)
class Recomputation:
    argv: list[str]
    checkpoint: Path | Key | None  # None: the initial values
    asked: range  # steps, of which the first is 1


@dataclass
class StepNotes(Notes):
    step: int = 0
    tokens: np.ndarray | None = None  # int64 [A, b, t]: what the model reads
    labels: np.ndarray | None = None  # int64 [A, b, t]
    # of the optimizer, by "parameter.key": before the step, and after it
    moments: list[dict[str, np.ndarray]] = field(default_factory=list)
    # by parameter of the whole model: its gradient's norm and digest (training/digests.py)
    digests: dict[str, list[float]] = field(default_factory=dict)


def recompute(task: Recomputation) -> list[StepNotes]:
    """Recompute, and return this rank's notes of the requested steps. Raises InputError."""
    warnings.simplefilter("ignore")
    cfg = stage_of(load_config(task.argv, world().size, world().local_size), task)
    corpora = open_corpora(cfg, lambda line: None)
    job = train.build(cfg)
    corpora.check_vocabulary(job.args.vocab_size)
    materialise(job.optimizer)
    if cfg.lora.rank:
        load_base(job)
    progress = {} if task.checkpoint is None else load(job, task.checkpoint)
    order = corpora.order(progress)
    first = progress.get("step", 0)
    wanted = range(first, task.asked.stop - 1)
    batches = corpora.batches(order, wanted, job.mesh, job.args.vocab_size)
    guard = Guard(cfg, job.mesh, job.model, job.optimizer, progress.get("spikes", {}))
    notes = []
    for step in wanted:
        batch = next(batches)
        set_learning_rate(job.optimizer, learning_rate(step, cfg))
        if step + 1 in task.asked:
            notes.append(noted_step(job, batch, step + 1, guard.skip_above()))
            result_loss, result_norm = notes[-1].loss[0], notes[-1].norm[0]
        else:
            result = train.train_step(job, batch, guard.skip_above())
            result_loss, result_norm = result.loss, result.grad_norm
        guard.note(result_loss, result_norm, skipped=False)
    batches.close()
    return notes


def stage_of(cfg: Config, task: Recomputation) -> Config:
    """Return the configuration of the stage that the steps are in. Raises InputError where they are
    in several, or the state before them is of an earlier one."""
    stage = stages.at(cfg, task.asked.start - 1)
    own = stages.own_steps(stage)
    begins = 0
    if task.checkpoint is not None:
        begins = verify.read_manifest(task.checkpoint)["step"]
    if not cfg.training.stages or (own.start <= begins and task.asked.stop - 1 <= own.stop):
        return derive(stage, world().size)
    raise InputError(
        f"steps {begins + 1} to {task.asked.stop - 1}, from the newest state before them, are in "
        f"several stages of the run; this one has steps {own.start + 1} to {own.stop}: name steps "
        "of one stage after its first checkpoint"
    )


def noted_step(job: train.Job, batch: dict, step: int, skip_above: float) -> StepNotes:
    begun = trajectory.begin(job, batch)
    seen = StepNotes(begun.samples, begun.positions, begun.tp_rank, step=step)
    seen.tokens = batch["tokens"].numpy()
    seen.labels = batch["labels"].numpy()
    seen.weights.append(trajectory.parameters(job))
    seen.moments.append(moments(job))
    with trajectory.noting(job, seen):
        result = train.train_step(job, batch, skip_above, digest=True)
    seen.digests = digests.of_all_stages(result.gradient_digests, job.mesh)
    trajectory.add(result, job, seen)
    seen.moments.append(moments(job))
    return seen


def moments(job: train.Job) -> dict[str, np.ndarray]:
    live = state.tensors(job.model, job.optimizer)
    kept = {}
    for name, tensor in live.items():
        if name.startswith("optimizer."):
            kept[name.removeprefix("optimizer.")] = whole(tensor)
    return kept


def load_base(job: train.Job) -> None:
    """Load an adapter run's base from where the run has it. Raises InputError."""
    cfg = job.cfg
    base = hf.base_of(job.model)
    group = dist.group.WORLD
    if cfg.checkpoint.load_hf:
        family = cfg.model.family
        hf.load(Path(cfg.checkpoint.load_hf), job.model, FORMATS, family, job.args, group)
    else:
        path = verify.newest(location(cfg.checkpoint.load_path))
        live = {f"model.{name}": tensor for name, tensor in base.items()}
        with verify.refuse_damage(f"checkpoint.load_path: {path}"):
            fill(path, verify.read_manifest(path), live, "model")


@torch.no_grad()
def check_base(job: train.Job, path: Path | Key, facts: dict) -> None:
    """Round the frozen weights as the run has rounded them. Raises InputError if they are not those
    that the adapters of a checkpoint were trained on. facts: of its manifest."""
    stored = DTYPES[facts["dtype"]]
    base = hf.base_of(job.model)
    if any(torch.finfo(tensor.dtype).eps > torch.finfo(stored).eps for tensor in base.values()):
        return  # in a narrower type they have no such values
    for tensor in base.values():
        tensor.copy_(tensor.to(stored))
    if adapters.hash_of(base, job.mesh, dist.group.WORLD) != facts["hash"]:
        raise InputError(
            f"{path} holds adapters of the weights of {facts['folder']}, and those of "
            "checkpoint.load_path or load_hf are no longer these: give the folder that has them"
        )


def load(job: train.Job, path: Path | Key) -> dict:
    """Fill the job from a checkpoint of any mesh and type, and return its progress."""
    with verify.refuse_damage(path):
        manifest = verify.read_manifest(path)
        if "base" in manifest["facts"]:
            check_base(job, path, manifest["facts"]["base"])
        live = state.tensors(job.model, job.optimizer)
        wanted = state.select(live, "model+optimizer", ())
        if verify.all_dimensions(manifest["mesh"]) == job.mesh.sizes:
            for name, tensor in live.items():
                if name.startswith(GENERATOR) and name in manifest["tensors"]:
                    wanted[name] = tensor
        fill(path, manifest, wanted, "model+optimizer")
    return manifest["progress"]


def fill(path: Path | Key, manifest: dict, live: dict, content: str) -> None:
    """Read live tensors from a checkpoint that may have them in another type. content: what of it
    they are, as of `checkpoint/state.py::select`."""
    stored = adapters.in_stored_types(live, manifest)
    state.check_fits(path, manifest, stored, content, (), dist.group.WORLD)
    state.read(path, manifest, live, state.buffers(live), dist.group.WORLD)
