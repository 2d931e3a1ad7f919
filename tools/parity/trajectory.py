"""Note on one rank, for a few steps, the output of every module, loss, norm, gradients and weights.

Values are noted as the rank has them. `tools/parity/compare.py` puts the parts of all ranks
together.

Shapes:  A microbatches   b sequences of a microbatch   t this rank's tokens of a sequence
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import train
from configs.load import load_config
from data.loader import IGNORE
from models.cores import CONVOLUTION, kind_of
from parallelisms.mesh import world
from parallelisms.pp import stages_of
from tools.parity import in_memory

WINDOWS = 1 << 40  # more than a source has
DOCUMENTS = 7  # tokens that the longest document of a window has, with data.mask_documents


@dataclass
class Notes:
    """Notes of one rank."""

    samples: np.ndarray  # int64 [A, b]: which sequences of the global batch it has in step 1
    positions: np.ndarray  # int64 [t]: which tokens of these
    tp_rank: int
    # step 1. Module -> its output in each microbatch [b, t or fewer, features or fewer]
    outputs: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    token_losses: np.ndarray | None = None  # float32 [A, b, t]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # whole, before clipping
    clipped: dict[str, np.ndarray] = field(default_factory=dict)  # whole, as the optimizer has them
    terms: dict[str, float] = field(default_factory=dict)  # auxiliary ones: this rank's parts
    # one value for each step
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    counts: list[dict[str, list[int]]] = field(default_factory=list)  # tokens of each expert
    # before step 1, and after each step; whole
    weights: list[dict[str, np.ndarray]] = field(default_factory=list)


def whole(x: Tensor) -> np.ndarray:
    """Return the whole tensor, gathered where it is a DTensor (a collective). numpy has no
    bfloat16, so it becomes float32."""
    full = x.full_tensor() if isinstance(x, DTensor) else x
    copy = full.detach().to("cpu", copy=True)
    return (copy.float() if copy.dtype == torch.bfloat16 else copy).numpy()


def is_recomputing() -> bool:
    """Return True during backward: a forward inside of it repeats one that was noted."""
    return torch._C._current_graph_task_id() != -1


def note_outputs(model: nn.Module, seen: Notes) -> list[Any]:
    """Note what every module returns in step 1, if it is a tensor by sequences and tokens: `#2` behind
    the name is the second call in a forward. Returns the hooks."""
    calls: dict[str, int] = {}  # of each module, in the forward that runs

    def hook(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if is_recomputing() or not isinstance(first, Tensor) or not first.is_floating_point():
            return
        if first.ndim < 3 or first.shape[0] != seen.samples.shape[1]:
            return  # a loss, or rows that are sorted by expert
        calls[name] = calls.get(name, 0) + 1
        which = name if calls[name] == 1 else f"{name}#{calls[name]}"
        seen.outputs[which].append(whole(first))

    def noting(name: str) -> Any:
        return lambda module, inputs, output: hook(name, output)

    def beginning(names: list[str]) -> Any:
        return lambda module, inputs: calls.update(dict.fromkeys(names, 0))

    handles = []
    names = {module: plain_name(name) for name, module in model.named_modules() if name}
    for stage in stages_of(model):
        inside = [names[module] for module in stage.modules() if module in names]
        handles.append(stage.register_forward_pre_hook(beginning(inside)))
    for module, name in names.items():
        if kind_of(module) == CONVOLUTION:
            continue  # its channels may be those of several projections, each of which ranks split
        handles.append(module.register_forward_hook(noting(name)))
    return handles


def plain_name(name: str) -> str:
    """Return a module's name without wrappers: stages of a pipeline, checkpointing, compile."""
    for wrapper in "_checkpoint_wrapped_module.", "_orig_mod.":
        name = name.replace(wrapper, "")
    return name.removesuffix("._checkpoint_wrapped_module").removesuffix("._orig_mod")


def prepare(batch: dict[str, Tensor], positions: Tensor, cfg: Any) -> None:
    """Mask labels, unevenly over ranks and microbatches, and cut documents of several lengths, in
    place."""
    sample = batch["window"].view(*batch["labels"].shape[:2], 1)  # [A, b, 1]
    masked = (sample * 7 + positions) % 11 < sample % 5
    batch["labels"] = batch["labels"].masked_fill(masked, IGNORE)
    if cfg.data.mask_documents:
        every = torch.arange(cfg.training.seq_len)
        batch["positions"] = every % (DOCUMENTS - 4 + sample % 5)


def begin(job: train.Job, batch: dict[str, Tensor]) -> Notes:
    """Notes without values. batch: the first one of which values are noted."""
    ranges = job.mesh.token_ranges(job.cfg.training.seq_len)
    numbers = batch["source"] * WINDOWS + batch["window"]
    return Notes(
        samples=numbers.view(batch["labels"].shape[:2]).numpy(),
        positions=torch.cat([torch.arange(part.start, part.stop) for part in ranges]).numpy(),
        tp_rank=job.mesh.tp_mesh.get_local_rank() if job.mesh.tp > 1 else 0,
    )


def parameters(job: train.Job) -> dict[str, np.ndarray]:
    return {name: whole(weight) for name, weight in job.model.named_parameters()}


def whole_gradients(job: train.Job) -> dict[str, np.ndarray]:
    """Return the gradients of all trained weights; zeros for a weight without one."""
    trained = {name: w for name, w in job.model.named_parameters() if w.requires_grad}
    missing = torch.zeros_like
    grads = {name: missing(w) if w.grad is None else w.grad for name, w in trained.items()}
    return {name: whole(grad) for name, grad in grads.items()}


@contextmanager
def noting(job: train.Job, seen: Notes) -> Iterator[None]:
    """Note the outputs of modules, and the gradients before and after clipping, of the step that is made
    meanwhile."""
    clip = train.clip_grad_norm

    def note_gradients(*args: Any) -> Tensor:
        seen.gradients = whole_gradients(job)
        norm = clip(*args)
        seen.clipped = whole_gradients(job)
        return norm

    with mock.patch.object(train, "clip_grad_norm", note_gradients), ExitStack() as hooks:
        for handle in note_outputs(job.model, seen):
            hooks.enter_context(handle)
        yield
    seen.outputs = dict(seen.outputs)


def add(result: train.StepResult, job: train.Job, seen: Notes) -> None:
    """Note the numbers of a step, and the weights after it."""
    if seen.token_losses is None:
        seen.token_losses = result.losses.numpy()
        for name, of_layers in result.terms.sums.items():
            for layer, value in of_layers.items():
                where = name if layer is None else f"{name}/layer-{layer}"
                if name != "expert_counts":  # those are of the global batch
                    seen.terms[where] = value.double().sum().item()
    seen.loss.append(result.loss)
    seen.norm.append(result.grad_norm)
    counts = result.terms.sums.get("expert_counts", {})
    seen.counts.append({layer: value.tolist() for layer, value in counts.items()})
    seen.weights.append(parameters(job))


def record(argv: list[str], steps: int) -> Notes:
    """Train on this rank; its notes."""
    warnings.simplefilter("ignore")
    cfg = load_config(argv, world().size, world().local_size)
    job = train.build(cfg)
    rng = np.random.default_rng(0)
    tokens = steps * cfg.training.global_batch_size * cfg.training.seq_len + 1
    ids = rng.integers(0, job.args.vocab_size, tokens).astype(np.uint32)
    batches = in_memory.batches(cfg, job.mesh, ids)
    seen = begin(job, batches[0])
    seen.weights.append(parameters(job))
    for step in range(steps):
        batch = batches[step]
        prepare(batch, torch.from_numpy(seen.positions), cfg)
        with noting(job, seen) if step == 0 else nullcontext():
            result = train.train_step(job, batch)
        add(result, job, seen)
    return seen
