"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et
al., arXiv:2205.05198).

A family's `tp_plan` says which style each of its modules gets; this file defines the styles.
Between blocks a hidden state is split over the *sequence*, inside attention and MLP over *heads*
and *hidden units*. So a block costs two all-gathers and two reduce-scatters in forward: the same
bytes as the two all-reduces of plain tensor parallelism. And norms and residuals are computed once,
not on every rank.
"""

import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from configs.schema import InputError

SYMMETRIC_MEMORY = ("cuda",)  # devices whose ranks can read each other's memory


class VocabEmbedding(RowwiseParallel):
    """Splits the vocabulary rows of an embedding. The output is this rank's slice of the sequence,
    as a plain tensor.

    The output is exchanged synchronously. RowwiseParallel's asynchronous exchange hands the first
    block a tensor that torch 2.13 unwraps without its gradient when the block is compiled: the
    embedding would silently not be trained.
    """

    def __init__(self):
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.redistribute(placements=output_layouts, async_op=False).to_local()


class VocabWeight(ParallelStyle):
    """Splits the vocabulary rows of a weight, and leaves the arithmetic to the code that uses it
    (training/loss.py)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(weight))

        return distribute_module(module, device_mesh, shard)


class GatherSequence(ParallelStyle):
    """Gathers the first input, which is split over the sequence. The other inputs (rotary tables,
    documents) are whole already. The result stays a DTensor, so that three projections share one
    gather, and the sum of their gradients is one scatter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            x = (
                inputs[0]
                if isinstance(inputs[0], DTensor)
                else DTensor.from_local(inputs[0], device_mesh, [Shard(1)])
            )
            return x.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class SequenceSlice(ParallelStyle):
    """Gives the module this rank's slice of the sequence as a plain tensor. What it returns is a
    slice again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (_plain(inputs[0]), *inputs[1:]))
        return module


class GatherPlain(ParallelStyle):
    """Gathers the first input over the sequence, as a plain tensor. Every rank uses it for heads of
    its own, so backward sums its gradients over the ranks, and gives each the slice that was its
    own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            whole = DTensor.from_local(inputs[0], device_mesh, [Shard(1)]).redistribute(
                placements=[Replicate()]
            )
            return whole.to_local(grad_placements=[Partial()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class PlainLinear(ParallelStyle):
    """A linear layer whose input and output are plain tensors.

    Shard(0): the layer's rows are split. Its input is whole, and the gradient of that is this
    rank's part of a sum. Replicate(): the layer works on this rank's slice of the sequence. Its
    weight is whole on every rank, and the gradient of that is the sum over the ranks, which FSDP
    takes once per reduction.
    """

    def __init__(self, placement: Shard | Replicate):
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight_for_forward = _weight_for_forward(module, device_mesh, self.placement)
        module.forward = lambda x: F.linear(_plain(x), weight_for_forward())
        return module


class RouterOfSlice(ParallelStyle):
    """Lets a router (models/moe.py) work on this rank's slice of the sequence, as PlainLinear with
    Replicate()."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight_for_forward = _weight_for_forward(module, device_mesh, Replicate())
        return module


def _weight_for_forward(
    module: nn.Module, device_mesh: DeviceMesh, placement: Shard | Replicate
) -> Callable[[], Tensor]:
    """Distributes the weight of the module. Returns a function that returns this rank's part of it."""
    weight = distribute_tensor(module.weight, device_mesh, [placement], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))
    gradient = [Partial()] if placement.is_replicate() else [placement]
    return lambda: module.weight.to_local(grad_placements=gradient)


def _plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


STYLES = {
    "vocab_embedding": VocabEmbedding,
    "vocab_weight": VocabWeight,
    "sequence": SequenceParallel,
    "sequence_plain": lambda: SequenceParallel(use_local_output=True),
    "gather_sequence": GatherSequence,
    "gather_plain": GatherPlain,
    "slice": SequenceSlice,
    "slice_linear": lambda: PlainLinear(Replicate()),
    "router": RouterOfSlice,
    # A norm of each head of [B, T, heads, E], which are split over the ranks, with one gain for
    # all: the style keeps the gain whole and sums its gradient, as for a sequence that is split.
    "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "columns": ColwiseParallel,
    # gathers its input by itself
    "gather_columns": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "columns_plain": lambda: PlainLinear(Shard(0)),
    "rows": lambda: RowwiseParallel(output_layouts=Shard(1)),
}


def apply(model: nn.Module, tp_mesh: DeviceMesh, plan: dict[str, str]) -> nn.Module:
    """Give every module the style of the first row of `plan` (pattern of a module's name -> key of
    STYLES) that matches its name, in place. The model, or the stage of a pipeline, is on `meta`, so
    this costs nothing.
    """
    if tp_mesh.size() == 1:
        return model
    for name, module in list(model.named_modules()):
        matching = [pattern for pattern in plan if fnmatchcase(name, pattern)]
        if matching:
            parallelize_module(module, tp_mesh, STYLES[plan[matching[0]]]())
    plain = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor)
    ]
    if plain:
        raise ValueError(
            "the plan of tensor parallelism leaves parameters whole, which clipping and the "
            "optimizer cannot mix "
            f"with others: {plain}"
        )
    return model


def check_rows(plan: dict[str, str], whole_model: nn.Module) -> None:
    """Raise ValueError if a row of `plan` matches no module: a misspelt row would leave a module
    whole on every rank. Only `output` may be missing, as in a tied model. A stage of a pipeline has
    some of the modules, so the whole model is asked."""
    names = [name for name, _ in whole_model.named_modules()]
    unused = [
        pattern
        for pattern in plan
        if pattern != "output" and not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unused:
        raise ValueError(
            f"the plan of tensor parallelism has a row for {min(unused)}, and the model has no "
            "such module"
        )


def check_overlap(device_type: str) -> None:
    """Raises InputError if the ranks of a host cannot read each other's memory."""
    if device_type not in SYMMETRIC_MEMORY:
        raise InputError(
            "parallelism.async_tensor_parallel = true needs GPUs that are connected by NVLink, "
            "this is a "
            f"{device_type}: set it to false"
        )


def overlap(tp_mesh: DeviceMesh) -> None:
    """Asynchronous tensor parallelism (Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959), by
    inductor. In blocks that are compiled after this call, a gather before products and a product
    before a scatter become one operator each, in which pieces travel over NVLink while others are
    multiplied. Raises InputError if ranks cannot read each other's memory."""
    check_overlap(tp_mesh.device_type)
    from torch._inductor import config  # imported here because it takes two seconds
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    # torch 2.13 warns that this call is superfluous, but without it fuses nothing, in silence
    # (pytorch #193027).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)
