"""Open the connections of a pipeline before the first step, and its second process group. You can
skip this file unless you use pipeline parallelism."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from parallelisms.mesh import Mesh


def group_to_lower_ranks(device_mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Open a second pp group, for sends to lower ranks; None without a pipeline. All ranks call it.

    The mesh's own pp group carries the sends to higher ranks. NCCL runs what two ranks of a group
    send each other one after another. With one group for both directions, two ranks that send at
    the same time would wait for each other for ever.
    """
    pp = device_mesh["pp"].size()
    if pp == 1:
        return None
    own_group = None
    pipelines = device_mesh.mesh.view(pp, -1).t().tolist()
    for ranks in pipelines:  # all ranks make all groups, in the same order
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own_group = group
    return own_group


def warm_up_p2p(mesh: "Mesh", device: torch.device, limit: timedelta) -> None:
    """Open every connection that sends of a pipeline use, for tensors of this device. All ranks of
    a pipeline call it.

    NCCL connects two ranks of a group at their first send, and gloo does where its connections are
    lazy. The rank that comes first waits for its peer. In a step both may come at the same time for
    different tensors: rank 0 receives a gradient from rank 1, while rank 1 receives a hidden state
    from rank 0. Both would wait for ever. So each pair exchanges one number in each direction here,
    and all ranks go through the pairs in one order.
    """
    to_higher = mesh.device_mesh.get_group("pp")
    for lower, higher in p2p_pairs(mesh.pp):
        _exchange(mesh.pp_rank, lower, higher, to_higher, device, limit)
        _exchange(mesh.pp_rank, higher, lower, mesh.to_lower, device, limit)


def _exchange(
    rank: int,
    sender: int,
    receiver: int,
    group: dist.ProcessGroup,
    device: torch.device,
    limit: timedelta,
) -> None:
    """Send one number from the one rank to the other. All other ranks return at once."""
    if rank not in (sender, receiver):
        return
    number = torch.zeros(1, device=device)
    if rank == sender:
        work = dist.isend(number, group=group, group_dst=receiver)
    else:
        work = dist.irecv(number, group=group, group_src=sender)
    work.wait(limit)


def p2p_pairs(ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks of a pipeline that send to each other, the lower rank first. No
    pair waits for more than two others, however many ranks there are."""
    even = [(i, i + 1) for i in range(0, ranks - 1, 2)]
    odd = [(i, i + 1) for i in range(1, ranks - 1, 2)]
    # A loop of stages continues at rank 0, and a tied weight is at both ends.
    ring = [(0, ranks - 1)] if ranks > 2 else []
    return even + odd + ring
