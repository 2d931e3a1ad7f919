"""Overlap an all-to-all with computation, in forward and in backward.

    pending = start(rows, received, sent, group)
    ...                                            # is computed meanwhile, from other tensors
    rows = wait(pending)

Autograd runs backward in the reverse order of forward. So there `wait` begins the all-to-all of the
gradient, then comes the backward pass of what was computed meanwhile, and `start` waits for the
gradient. PyTorch's own differentiable all-to-all waits for a gradient at once.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol


class Route(NamedTuple):
    received: list[int]  # rows from each rank of the group
    sent: list[int]
    group: dist.ProcessGroup


class Pending(NamedTuple):
    """An all-to-all that was started. Every one must be passed to `wait` once."""

    arriving: Tensor  # [rows received, D]; not to be read before `wait`
    link: Tensor  # [rows sent, D], without memory: leads autograd from `wait` to `start`
    route: Route


def start(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Pending:
    """Start to send rows [M, D] to the ranks of the group, and return at once."""
    route = Route(received, sent, group)
    if torch.compiler.is_compiling():  # a compiler waits where the result is used first
        arriving = funcol.all_to_all_single_autograd(rows, received, sent, group)
        return Pending(arriving, rows, route)
    return Pending(*StartAllToAll.apply(rows, route), route)


def wait(pending: Pending) -> Tensor:
    """Wait for the rows of the other ranks and return them."""
    if torch.compiler.is_compiling():
        return pending.arriving
    return WaitAllToAll.apply(pending.link, pending.arriving, pending.route)


def send(rows: Tensor, route: Route) -> Tensor:
    """Begin an all-to-all, outside of autograd."""
    return torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), route.received, route.sent, route.group.group_name
    )


def arrived(rows: Tensor) -> Tensor:
    """Wait for the all-to-all, outside of autograd."""
    return torch.ops._c10d_functional.wait_tensor(rows)


class StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        arriving = send(rows, route)
        ctx.mark_non_differentiable(arriving)
        ctx.set_materialize_grads(False)  # `arriving` has no gradient here
        return arriving, rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[Tensor, None]:
        return arrived(grad), None


class WaitAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, arriving: Tensor, route: Route) -> Tensor:
        ctx.back = Route(route.sent, route.received, route.group)
        return arrived(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return send(grad, ctx.back), None, None
