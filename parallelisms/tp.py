"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et al., arXiv:2205.05198).

A model's TP_PLAN says which style each of its modules gets; this file defines the styles. Between blocks a hidden state
is split over the *sequence*, inside attention and MLP over *heads* and *hidden units*. So a block costs two all-gathers
and two reduce-scatters in forward: the same bytes as the two all-reduces of plain tensor parallelism. And norms and
residuals are computed once, not on every rank.
"""

import warnings
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from configs.schema import InputError

SYMMETRIC_MEMORY = ("cuda",)  # devices whose ranks can read each other's memory


class VocabEmbedding(RowwiseParallel):
    """Splits the vocabulary rows of an embedding. The output is this rank's slice of the sequence, as a plain tensor.

    The output is exchanged synchronously. RowwiseParallel's asynchronous exchange hands the first block a tensor that
    torch 2.13 unwraps without its gradient when the block is compiled: the embedding would silently not be trained.
    """

    def __init__(self):
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.redistribute(placements=output_layouts, async_op=False).to_local()


class VocabWeight(ParallelStyle):
    """Splits the vocabulary rows of a weight, and leaves the arithmetic to the code that uses it (training/loss.py)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(weight))

        return distribute_module(module, device_mesh, shard)


class GatherSequence(ParallelStyle):
    """Gathers the first input, which the norm before it left split over the sequence. The other inputs (rotary tables,
    documents) are whole already. The result stays a DTensor, so that three projections share one gather, and the sum of
    their gradients is one scatter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].redistribute(placements=[Replicate()]), *inputs[1:]))
        return module


STYLES = {
    "vocab_embedding": VocabEmbedding,
    "vocab_weight": VocabWeight,
    "sequence": SequenceParallel,
    "gather_sequence": GatherSequence,
    # A norm of each head of [B, T, heads, E], which are split over the ranks, with one gain for all: the style keeps the gain
    # whole and sums its gradient, as for a sequence that is split.
    "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "columns": ColwiseParallel,
    "rows": lambda: RowwiseParallel(output_layouts=Shard(1)),
}


def apply(model: nn.Module, tp_mesh: DeviceMesh, plan: dict[str, str]) -> nn.Module:
    """Shard the modules that `plan` (pattern of the module's name -> key of STYLES) matches, in place. The model is on
    `meta`, so this costs nothing.

    Raises ValueError if a row of the plan matches no module: a misspelt row would leave a module whole on every rank.
    Only `output` may be missing, as in a tied model, and in a stage of a pipeline what stands outside of the layers.
    """
    if tp_mesh.size() == 1:
        return model
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        is_optional = pattern == "output" if model.first and model.last else not pattern.startswith("layers.")
        if not matched and not is_optional:
            raise ValueError(f"TP_PLAN: no module is called {pattern}")
        for name in matched:
            parallelize_module(model.get_submodule(name), tp_mesh, STYLES[style]())
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise ValueError(f"TP_PLAN leaves parameters unsharded, which clipping and the optimizer cannot mix: {plain}")
    return model


def check_overlap(device_type: str) -> None:
    """Raises InputError if the ranks of a host cannot read each other's memory."""
    if device_type not in SYMMETRIC_MEMORY:
        raise InputError("parallelism.async_tensor_parallel = true needs GPUs that are connected by NVLink, this is a "
                         f"{device_type}: set it to false")  # fmt: skip


def overlap(tp_mesh: DeviceMesh) -> None:
    """Asynchronous tensor parallelism (Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959), by inductor. In blocks
    that are compiled after this call, a gather before products and a product before a scatter become one operator each,
    in which pieces travel over NVLink while others are multiplied. Raises InputError if ranks cannot read each other's
    memory."""
    check_overlap(tp_mesh.device_type)
    from torch._inductor import config  # imported here because it takes two seconds
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    # torch 2.13 warns that this call is superfluous, but without it fuses nothing, in silence (pytorch #193027).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp_mesh.get_group().group_name)
