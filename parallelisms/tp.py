"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et
al., arXiv:2205.05198).

A family's `tp_plan` gives each of its modules a style; this file defines the styles.
Between blocks a hidden state is split over the *sequence*, inside attention and MLP over *heads*
and *hidden units*. So a block costs two all-gathers and two reduce-scatters in forward: the same
bytes as the two all-reduces of plain tensor parallelism. And norms and residuals are computed once,
not on every rank.

The table shows what a rank has of a hidden state before and after a module with a style
(parallelisms/tp_check.py compares every plan with it before a run begins). `whole` or `slice`: of the
sequence; `any`: plain or DTensor. A container has no parameters, and gives this to the modules
inside it; so does `other`, which also has parameters.

    style                       module    takes                        gives
    vocab_embedding             embedding whole, all features, plain   slice, all features, plain
    vocab_weight                linear    slice, all features, any     no logits (training/loss.py)
    sequence                    norm      slice, all features, any     slice, all features, DTensor
    sequence_plain              norm      slice, all features, any     slice, all features, plain
    gather_sequence             container slice, all features, any     whole, all features, DTensor
    gather_sequence_split_sinks other     slice, all features, any     whole, all features, DTensor
    gather_plain                container slice, all features, plain   whole, all features, plain
    slice                       container slice, all features, any     slice, all features, plain
    slice_linear                linear    slice, all features, any     slice, all features, plain
    router                      router    slice, all features, plain   choice of experts
    heads                       norm      whole, own heads, any        whole, own heads, plain
    columns                     linear    whole, all features, any     whole, own columns, plain
    norm_of_columns             norm      whole, own columns, plain    whole, own columns, plain
    gather_columns              linear    slice, all features, any     whole, own columns, plain
    columns_plain               linear    whole, all features, plain   whole, own columns, plain
    rows                        linear    whole, own columns, any      slice, all features, plain
"""

import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
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

from parallelisms.tp_plain import (
    GatherPlain,
    LinearOfPart,
    NormOfColumns,
    RouterOfSlice,
    SequenceSlice,
    SplitSinks,
    VocabEmbedding,
)


class VocabWeight(ParallelStyle):
    """Splits the vocabulary rows of a weight, and leaves the arithmetic to the code that uses it
    (training/loss.py)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: Any, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(weight))

        return distribute_module(module, device_mesh, shard)


class GatherSequence(ParallelStyle):
    """All-gathers the first input, which is split over the sequence. The other inputs (rotary
    tables, documents) are whole already. The result stays a DTensor, so that three projections
    share one all-gather, and the sum of their gradients is one reduce-scatter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class GatherSequenceSplitSinks(GatherSequence):
    """`GatherSequence` for attention with a sink for each of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return SplitSinks()._apply(super()._apply(module, device_mesh), device_mesh)


STYLES = {
    "vocab_embedding": VocabEmbedding,
    "vocab_weight": VocabWeight,
    "sequence": SequenceParallel,
    "sequence_plain": lambda: SequenceParallel(use_local_output=True),
    "gather_sequence": GatherSequence,
    "gather_sequence_split_sinks": GatherSequenceSplitSinks,
    "gather_plain": GatherPlain,
    "slice": SequenceSlice,
    "slice_linear": lambda: LinearOfPart(Replicate()),
    "router": RouterOfSlice,
    # A norm of each head of [B, T, heads, E], which are split over the ranks, with one gain for
    # all: the style keeps the gain whole and sums its gradient, as for a sequence that is split.
    "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    "columns": ColwiseParallel,
    # a norm over the heads of all ranks
    "norm_of_columns": NormOfColumns,
    # gathers its input by itself
    "gather_columns": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "columns_plain": lambda: LinearOfPart(Shard(0)),
    "rows": lambda: RowwiseParallel(output_layouts=Shard(1)),
}


def apply(model: nn.Module, tp_mesh: DeviceMesh, plan: dict[str, str]) -> nn.Module:
    """Apply to every module the style of the first row of `plan` (pattern of a module's name -> key
    of STYLES) that matches its name, in place. The model, or the stage of a pipeline, is on `meta`,
    so this costs nothing."""
    if tp_mesh.size() == 1:
        return model
    for name, module in list(model.named_modules()):
        for pattern, style in plan.items():
            if fnmatch.fnmatchcase(name, pattern):
                part = parallelize_module(module, tp_mesh, STYLES[style]())
                if part is not module:
                    model.set_submodule(name, part)
                break
    plain = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor)
    ]
    if plain:
        raise ValueError(
            "the plan of tensor parallelism leaves parameters whole, which clipping and the "
            f"optimizer cannot mix with others: {plain}"
        )
    return model
