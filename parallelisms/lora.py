"""Adapters of low rank on a mesh (models/lora.py has the formula; Hu et al., arXiv:2106.09685).

The frozen weights are sharded as always, in `training.param_dtype`: without gradients, optimizer
state or float32 masters. Adapters are trained as other weights are, so FSDP, which comes later,
shards them too and keeps float32 masters. Tensor parallelism splits the side of an adapter that its
layer splits:

    style                       A         B         what a rank computes
    columns, gather_columns     whole     rows      its columns of the output
    columns_plain               whole     rows      the same
    rows                        columns   whole     its part of the sum over the ranks
    slice_linear                whole     whole     the output of its slice of the sequence
    whole_linear                whole     whole     the output, for its heads

A side that is whole on every rank meets other columns or other tokens on each, so its gradient is a
sum over the ranks. FSDP takes that sum once per reduction. The narrow vector between A and B is
never sent: `rows` adds B's partial result to that of the frozen weight, in front of the one
reduce-scatter that there is anyway.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from configs.schema import Config, Lora
from models import lora as adapters
from models.local import local
from parallelisms import dp, ep
from parallelisms.mesh import Mesh
from parallelisms.tp_plain import part_of


class Split(NamedTuple):
    """The split of a layer's adapters under tensor parallelism."""

    a: Shard | Replicate
    b: Shard | Replicate
    # of the gradient of an input that comes as a DTensor
    input_gradient: Placement
    output: Placement | None  # None: a plain tensor


OF_COLUMNS = Split(Replicate(), Shard(0), Partial(), Shard(2))
SPLITS = {  # style (parallelisms/tp.py::STYLES) -> its row
    "columns": OF_COLUMNS,
    "gather_columns": OF_COLUMNS,
    "columns_plain": OF_COLUMNS._replace(output=None),
    "rows": Split(Shard(1), Replicate(), Shard(2), Partial()),
    "slice_linear": Split(Replicate(), Replicate(), Shard(1), None),
    "whole_linear": Split(Replicate(), Replicate(), Partial(), None),
}


def apply(model: nn.Module, mesh: Mesh, cfg: Config, tp_plan: dict[str, str]) -> None:
    """Add the adapters of [lora], in place, split as the layers are, and cast all other weights to
    the type in which they are computed. The model is on `meta`, and split by tensor parallelism
    already."""
    if not cfg.lora.rank:
        return
    adapters.add(model, cfg.lora)
    keep_in(model, dp.param_dtype(cfg.training, mesh.device))
    if mesh.tp > 1:
        for name, module in model.named_modules():
            if isinstance(module, adapters.AdaptedLinear):
                style = next(style for row, style in tp_plan.items() if fnmatchcase(name, row))
                split(module, SPLITS[style], mesh.tp_mesh)
    if mesh.experts_mesh is not None:
        for mixture in model.mixtures().values():
            distribute(mixture.experts, mesh)


def keep_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all weights other than the adapters to this type. A tensor that is never trained, such
    as a router's bias, keeps its type."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.requires_grad and not adapters.is_adapter(name):
                module.register_parameter(name, nn.Parameter(param.to(dtype)))


class SplitLowRank(adapters.LowRank):
    """The output of this rank's part of a layer's adapters."""

    def __init__(self, scale: float, row: Split, mesh: DeviceMesh):
        super().__init__(scale)
        self.row = row
        self.mesh = mesh

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute `LowRank`; a and b are DTensors, and x may be one."""
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[self.row.input_gradient])
        out = super().forward(x, local(a), local(b))
        if self.row.output is None:
            return out
        return DTensor.from_local(out, self.mesh, [self.row.output], run_check=False)


def split(linear: nn.Module, row: Split, tp_mesh: DeviceMesh) -> None:
    """Shard a layer's adapters over the tensor-parallel ranks, in place."""
    linear.register_parameter("lora_a", part_of(linear.lora_a, tp_mesh, row.a))
    linear.register_parameter("lora_b", part_of(linear.lora_b, tp_mesh, row.b))
    linear.low_rank = SplitLowRank(linear.low_rank.scale, row, tp_mesh)


def distribute(experts: nn.Module, mesh: Mesh) -> None:
    """Shard the adapters of the experts over the ep ranks, in place."""
    names = [name for name, _ in experts.named_parameters() if adapters.is_adapter(name)]
    ep.shard(experts, names, mesh)


def freeze(model: nn.Module, lora: Lora) -> None:
    """Freeze all weights other than the adapters. It comes last: FSDP shards what is frozen as it
    shards all else, and would leave out what had no gradient before (a router's bias,
    parallelisms/dp.py)."""
    if lora.rank:
        for name, param in model.named_parameters():
            param.requires_grad_(adapters.is_adapter(name))
