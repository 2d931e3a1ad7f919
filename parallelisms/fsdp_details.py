"""The private API of FSDP2 that pipelines, mixtures of experts and `reshard_after_forward` = N
need. A dense model without a pipeline that reshards wholly or not at all needs none of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp2_common
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2
from torch.distributed.tensor import Shard

from configs.schema import Parallelism
from parallelisms.mesh import Mesh


def gathers_once(cfg: Parallelism) -> bool:
    """Return whether a stage of a pipeline all-gathers its weights once a step, and keeps them
    unsharded from its first forward to its last backward. Otherwise it gathers them for each
    microbatch."""
    return cfg.reshard_after_forward in ("default", False)


def gather_ahead(model: nn.Module) -> None:
    """Start to all-gather all weights, in the order of forward, in which each module waits for its
    own. The optimizer has made its step, and nothing is unsharded."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()  # before the first forward FSDP does not know its root
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)


@contextmanager
def shared_groups() -> Iterator[None]:
    """Let all modules with `reshard_after_forward` = N reshard to the same groups of N ranks,
    inside of the context.

    FSDP2 opens two groups for each module (torch 2.13), so their number grows with the layers. It
    cannot be given groups that exist, so its private function that makes them is replaced by one
    that makes them once.
    """
    original = fsdp2._get_post_forward_mesh_info
    made: dict[int, object] = {}

    def once(reshard: bool | int, info: object) -> object:
        if isinstance(reshard, bool):
            return original(reshard, info)
        if reshard not in made:
            made[reshard] = original(reshard, info)
        return made[reshard]

    fsdp2._get_post_forward_mesh_info = once
    try:
        yield
    finally:
        fsdp2._get_post_forward_mesh_info = original


def shard_experts(model: nn.Module, mesh: Mesh, options: dict[str, Any], reshard: bool) -> None:
    """Let FSDP shard a rank's experts over the edp ranks that have the same ones: by expert, or by
    row where they are fewer than the ranks. Rows must divide evenly, which experts need not (FSDP2
    pads the first dimension alone).

    A block is then one module of FSDP2 with weights on two meshes, by `options`. In torch 2.11 a module
    has one mesh, so there the experts become separate FSDP modules. These are not prefetched, and
    selective checkpointing gathers them once more.
    """
    mixtures = model.mixtures().values()
    edp = mesh.experts_mesh["edp"].size()
    experts_mesh = mesh.experts_mesh["edp"]
    if mesh.dp_replicate > 1:
        experts_mesh = mesh.experts_mesh["dp_replicate", "edp"]

    def placement(param: nn.Parameter) -> Shard:
        experts_here, rows = param.to_local().shape[:2]
        return Shard(1 if experts_here < edp and rows % edp == 0 else 0)

    if not hasattr(fsdp2_common, "ShardPlacementResult"):  # torch 2.11
        own = options | {"mesh": experts_mesh, "shard_placement_fn": placement}
        for mixture in mixtures:
            fully_shard(mixture.experts, **own, reshard_after_forward=reshard)
        return
    info = fsdp2_common.FSDPMeshInfo(experts_mesh, shard_mesh_dim=0)
    if mesh.dp_replicate > 1:
        info = fsdp2_common.HSDPMeshInfo(experts_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    experts = {p for mixture in mixtures for p in mixture.experts.parameters()}

    def placement_and_mesh(param: nn.Parameter) -> object:
        if param in experts:
            return fsdp2_common.ShardPlacementResult(placement(param), info)
        return None

    options["shard_placement_fn"] = placement_and_mesh
