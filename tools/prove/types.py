"""Check the types of distributed tensors in one forward pass of a configuration, on its own mesh and at
full size.

On each dimension of the mesh a tensor is the same on every rank (R; I, where its gradient is the same
too), another part on every rank (V), or one term of a sum (P). `spmd_types` (Meta, BSD licence,
https://github.com/meta-pytorch/spmd_types) follows these through every operator. It refuses a term
that is used as if it were the sum, and a tensor whose gradient nothing sums. So it sees what no run on
8 ranks can show: the mesh of the real run. Numbers show what types cannot: parts in the wrong order,
and a wrong formula.

The pass runs on PyTorch's fake process group with tensors that have no memory
(tools/plan/trace.py::fake_job). tools/prove/rules.py declares what each of our operators does. A
pipeline's stages are checked as one model. Backward has the types that forward implies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import spmd_types as spmd
import torch
from spmd_types import SpmdTypeError, checker
from spmd_types.types import format_axis
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import train
from configs.schema import Config
from models.terms import AuxiliaryTerms
from tools.plan import trace
from tools.plan.routing import BALANCED
from tools.prove.rules import Types, declared
from training.loss import linear_cross_entropy
from training.microbatches import Microbatches


def first_mistake(cfg: Config, world_size: int, per_host: int) -> str:
    """Return the module and the operator whose types are wrong, and why; "" if all are right.

    world_size: the ranks of the run, and how many of them a host has. The mesh is that of `cfg`, but
    for its pipeline. All other ranks run the same program, so rank 0 stands for them.
    """
    stages = cfg.parallelism.pipeline_parallel
    whole = cfg.parallelism.model_copy(update={"pipeline_parallel": 1})
    cfg = trace.tracing(cfg.model_copy(update={"parallelism": whole}))
    ranks = world_size // stages
    with trace.fake_job(cfg, ranks, min(per_host, ranks), 0, BALANCED) as (job, fake), fake:
        trace.prepare(job)
        return forward(job)


def forward(job: train.Job) -> str:
    """Run a microbatch of zeros, and return what `first_mistake` does."""
    types = Types(job.mesh)
    if not types.groups:
        return ""
    inside: list[str] = []  # names of the modules that run now
    microbatches, number = zeros(job)
    with declared(types), watched(job.model, types, inside):
        try:
            with spmd.set_current_mesh(job.mesh.device_mesh), checker.typecheck():
                add_types(microbatches, types)
                spmd.assert_type(number, types.of_number)
                loss = job.model(*microbatches(0))
                spmd.assert_type(loss, types.of_loss)
        except SpmdTypeError as error:
            return f"{inside[-1] if inside else 'the model'}: {sentence(error, types)}"
    return ""


def zeros(job: train.Job) -> tuple[Microbatches, Tensor]:
    """Return a step of one microbatch, and the number by which its terms are scaled."""
    batch = trace.batch_of(job, 1)
    chunk = job.cfg.training.loss_chunk_tokens
    microbatches = Microbatches(job.model, batch, job.mesh, linear_cross_entropy, chunk)
    number = torch.ones(())
    microbatches.terms = AuxiliaryTerms(number, number, number)
    return microbatches, number


def add_types(microbatches: Microbatches, types: Types) -> None:
    """Declare what the model is given."""
    for tensor in (microbatches.tokens, microbatches.labels, microbatches.losses):
        spmd.assert_type(tensor, types.of_tokens)
    spmd.assert_type(microbatches.positions, types.of_positions)


@contextmanager
def watched(model: nn.Module, types: Types, inside: list[str]) -> Iterator[None]:
    """Give plain weights types before their module runs, and keep the names of those that run."""
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, _: tuple, name: str = name) -> None:
            inside.append(name or "the model")
            for weight in module.parameters(recurse=False):
                add_type(weight, types)

        def leave(*_: object) -> None:
            inside.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def add_type(weight: Tensor, types: Types) -> None:
    """Declare a weight that is no DTensor after FSDP has gathered it: every rank has it whole."""
    if not isinstance(weight, DTensor) and not spmd.has_local_type(weight):
        spmd.assert_type(weight, types.of_weight({}, is_expert=False))


def sentence(error: SpmdTypeError, types: Types) -> str:
    """Return the reason of a refusal, and the operator with the types of its arguments, in the names of
    the mesh's dimensions."""
    reason = str(error).split("\n", 1)[0].rstrip(". ")
    context = str(getattr(error, "context", "") or "")
    text = "; ".join(filter(None, (reason, " ".join(context.split()))))
    for name, group in types.groups.items():
        text = text.replace(format_axis(group), name)
    return text.replace("PerMeshAxisLocalSpmdType.", "")
