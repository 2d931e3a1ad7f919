"""Find the parts that one rank holds: its shards of the weights, its rows of the batch, its
positions of a row."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OwnedShard:
    """Shard of one weight that this rank holds."""

    name: str
    shape: list[int]  # of the whole weight
    cuts: list[str]  # for each dimension of the mesh: how the weight is cut over it
    first: list[int]  # its first element in each dimension of the whole weight
    end: list[int]  # behind its last one


def shard_of(name: str, weight: DTensor) -> OwnedShard:
    """Find the shard by an experiment: a weight of this layout, in which each rank has written its
    number, is gathered. All ranks call this. Raises ValueError for a shard that is no rectangle."""
    rank = dist.get_rank()
    mine = torch.full_like(weight.to_local(), rank)
    owners = DTensor.from_local(
        mine,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    ).full_tensor()
    places = (owners == rank).nonzero()
    first = places.amin(0)
    end = places.amax(0) + 1
    if (end - first).prod() != len(places):
        raise ValueError(f"the shard of {name} on rank {rank} is no rectangle")
    return OwnedShard(name, list(weight.shape), cuts_of(weight), first.tolist(), end.tolist())


def cuts_of(weight: DTensor) -> list[str]:
    """Return the placements, in the order of the mesh. A strided shard is a shard of the part that
    later dimensions have cut."""
    cuts = []
    for placement in weight.placements:
        cuts.append("Replicate()" if placement.is_replicate() else f"Shard({placement.dim})")
    return cuts


def elements(model: nn.Module) -> tuple[int, int]:
    """Return the elements of all weights that this rank holds, and the total."""
    weights = list(model.parameters())
    held = sum(weight.to_local().numel() for weight in weights)
    return held, sum(weight.numel() for weight in weights)


def positions(hidden: Tensor, tokens: Tensor, table: Tensor) -> range:
    """Return the positions whose hidden states a rank has before the first block. They are still
    rows of the embedding there. Raises ValueError if they are not.

    hidden [b, t, D]; tokens int64 [b, T]; table [V, D], the whole embedding.
    """
    whole = table[tokens]  # [b, T, D]
    length = hidden.shape[1]
    for first in range(0, tokens.shape[1], length):
        if torch.equal(whole[:, first : first + length], hidden):
            return range(first, first + length)
    raise ValueError("the hidden states before the first block are no rows of the embedding")
