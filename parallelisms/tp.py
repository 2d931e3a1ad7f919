"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et
al., arXiv:2205.05198).

A family's `tp_plan` gives each of its modules a style; `STYLES` has a row for each.
Between blocks a hidden state is split over the *sequence*, inside attention and MLP over *heads*
and *hidden units*. So a block costs two all-gathers and two reduce-scatters in forward: the same
bytes as the two all-reduces of plain tensor parallelism. And norms and residuals are computed once,
not on every rank.
"""

import fnmatch
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallelisms.tp_plain import (
    GatherPlain,
    GatherSequence,
    GatherSequenceSplitOwn,
    LinearOfPart,
    NormOfColumns,
    OwnParameters,
    RouterOfSlice,
    SequenceSlice,
    VocabEmbedding,
    VocabWeight,
)
from parallelisms.tp_style import (
    COLUMNS,
    COLUMNS_PLAIN,
    CONTAINER,
    EMBEDDING,
    HEADS,
    HEADS_PLAIN,
    LINEAR,
    NORM,
    OTHER,
    ROUTER,
    SLICE,
    SLICE_DTENSOR,
    SLICE_PLAIN,
    WHOLE,
    WHOLE_DTENSOR,
    WHOLE_PLAIN,
    Style,
)

# what it does, the kind of module, what that takes, what it gives (parallelisms/tp_style.py)
STYLES = {
    "vocab_embedding": Style(VocabEmbedding, EMBEDDING, WHOLE_PLAIN, SLICE_PLAIN),
    # logits are computed by training/loss.py
    "vocab_weight": Style(VocabWeight, LINEAR, SLICE, None),
    "sequence": Style(SequenceParallel, NORM, SLICE, SLICE_DTENSOR),
    "sequence_plain": Style(
        partial(SequenceParallel, use_local_output=True), NORM, SLICE, SLICE_PLAIN
    ),
    "gather_sequence": Style(GatherSequence, CONTAINER, SLICE, WHOLE_DTENSOR),
    "gather_sequence_split_own": Style(GatherSequenceSplitOwn, OTHER, SLICE, WHOLE_DTENSOR),
    # numbers for each feature of the residual stream
    "slice_own": Style(partial(OwnParameters, Replicate()), OTHER, SLICE, SLICE),
    "gather_plain": Style(GatherPlain, CONTAINER, SLICE_PLAIN, WHOLE_PLAIN),
    "slice": Style(SequenceSlice, CONTAINER, SLICE, SLICE_PLAIN),
    "slice_linear": Style(partial(LinearOfPart, Replicate()), LINEAR, SLICE, SLICE_PLAIN),
    # a narrow vector that this rank's heads are computed from, on every rank
    "whole_linear": Style(partial(LinearOfPart, Replicate()), LINEAR, WHOLE, WHOLE_PLAIN),
    # the choice of experts is no hidden state
    "router": Style(RouterOfSlice, ROUTER, SLICE_PLAIN, None),
    # A norm of each head of [B, T, heads, E], which are split over the ranks, with one gain for
    # all: the style keeps the gain whole and sums its gradient, as for a sequence that is split.
    "heads": Style(
        partial(SequenceParallel, sequence_dim=2, use_local_output=True), NORM, HEADS, HEADS_PLAIN
    ),
    "columns": Style(ColwiseParallel, LINEAR, WHOLE, COLUMNS_PLAIN),
    # a norm over the heads of all ranks
    "norm_of_columns": Style(NormOfColumns, NORM, COLUMNS_PLAIN, COLUMNS_PLAIN),
    # gathers its input by itself
    "gather_columns": Style(
        partial(ColwiseParallel, input_layouts=Shard(1)), LINEAR, SLICE, COLUMNS_PLAIN
    ),
    "columns_plain": Style(partial(LinearOfPart, Shard(0)), LINEAR, WHOLE_PLAIN, COLUMNS_PLAIN),
    "rows": Style(partial(RowwiseParallel, output_layouts=Shard(1)), LINEAR, COLUMNS, SLICE_PLAIN),
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
                part = parallelize_module(module, tp_mesh, STYLES[style].build())
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
