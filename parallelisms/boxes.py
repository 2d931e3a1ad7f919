"""Compute the box of a tensor that a rank holds, for initial values, checkpoints, exports and Muon.

PyTorch's own computes wrong boxes (torch 2.13, `compute_local_shape_and_global_offset`) where FSDP
shards unevenly what tensor parallelism has cut.
"""

from collections.abc import Iterator
from itertools import product

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from configs.boxes import Box, box_at


def cuts(tensor: DTensor) -> list[tuple[int, int]]:
    """Return (tensor dimension, mesh dimension) of each cut, in the order in which they are made.

    If FSDP shards what tensor parallelism has already cut, FSDP's placement is a `_StridedShard`,
    whose cut comes second although its mesh dimension comes first. Raises ValueError for a
    placement that is no shard and no replica.
    """
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(
                f"a tensor with the placements {tensor.placements} has no part for each rank, so it "
                "can be neither filled nor saved nor gathered"
            )
        cut = (placement.dim, mesh_dim)
        if isinstance(placement, _StridedShard):
            second.append(cut)
        else:
            first.append(cut)
    return first + second


def box_of(tensor: Tensor) -> Box:
    """Return the box of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    split = _split(tensor)
    taken = [mesh.get_local_rank(mesh_dim) for _, _, mesh_dim in split]
    return box_at(list(tensor.shape), split, taken)


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered where it is sharded: then all ranks of its mesh call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write(tensor: Tensor, values: Tensor) -> None:
    """Write this rank's part of these whole values into a tensor of their shape, in place."""
    offset, size = box_of(tensor)
    box = [slice(start, start + length) for start, length in zip(offset, size, strict=True)]
    shard_of(tensor).copy_(values[tuple(box)])


def every_box(tensor: DTensor) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield each place of the tensor's mesh, and the box that the rank there holds."""
    shape = list(tensor.shape)
    split = _split(tensor)
    for coordinate in product(*map(range, tensor.device_mesh.shape)):
        yield coordinate, box_at(shape, split, [coordinate[mesh_dim] for _, _, mesh_dim in split])


def _split(tensor: DTensor) -> list[list[int]]:
    """Return (tensor dimension, pieces, mesh dimension) of each cut."""
    return [[dim, tensor.device_mesh.size(mesh_dim), mesh_dim] for dim, mesh_dim in cuts(tensor)]
