"""A token's way to its experts on other ranks and back, in the order in which it goes: dispatch,
compute, combine.

`models/moe.py::MixtureOfExperts` calls these three, and its shared experts compute while rows are
on their way. parallelisms/ep_hosts.py has the way over several hosts.

Shapes:  N tokens of this rank   D = dim   X experts   k experts of a token   M = N k rows
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from models.moe import inverse, weighted


class RemoteDispatcher(nn.Module):
    """Dispatch and combine between ranks; replaces `models/moe.py::LocalDispatcher`.

    `dispatch` is two methods here, because all host-device syncs must come before the first row is
    sent: where one waits, it then waits for no rows. `compute` and `combine` are those of
    `LocalDispatcher`. Each method takes the state that the one before it returned.
    """

    def prepare(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Any:
        """Exchange the numbers of rows between ranks, which is a host-device sync. Arguments: those
        of `LocalDispatcher.dispatch`."""
        raise NotImplementedError

    def send(self, state: Any) -> Any:
        """Start to send the rows to their experts."""
        raise NotImplementedError

    def dispatch(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Any:
        """Start to send each token to its experts; arguments as for `LocalDispatcher.dispatch`."""
        return self.send(self.prepare(tokens, chosen, weights, counts))


class Route(NamedTuple):
    received: list[int]  # rows from each rank of the group
    sent: list[int]
    group: dist.ProcessGroup


class Pending(NamedTuple):
    """An all-to-all that was started. Every one must be passed to `wait_all_to_all` once."""

    arriving: Tensor  # [rows received, D]; not to be read before `wait_all_to_all`
    link: Tensor  # [rows sent, D], without memory: leads autograd from the wait to the start
    route: Route


# One all-to-all of rows that are sorted by expert ---------------------------------------------------


@dataclass
class RowsToSend:
    """The state of `AllToAllDispatcher` before the rows are sent."""

    tokens: Tensor  # [N, D]
    order: Tensor  # int64 [M]: which (token, choice) each row is of, as in models/moe.py
    weights: Tensor  # [N, k]
    coming: Tensor  # int64 [ranks, X / ep]: the rows that each rank sends to each expert here
    sent: list[int]  # rows, by rank
    received: list[int]


@dataclass
class RowsInFlight:
    """The state of `AllToAllDispatcher` while rows are on their way."""

    pending: Pending
    sizes: RowsToSend


@dataclass
class ResultsInFlight:
    """The state of `AllToAllDispatcher` while the results are on their way back."""

    pending: Pending
    order: Tensor  # those of `RowsToSend`
    weights: Tensor


class AllToAllDispatcher(RemoteDispatcher):
    """Dispatch by one all-to-all of rows that are sorted by expert, and combine by another."""

    def __init__(self, group: dist.ProcessGroup):
        """group: the ranks that share the experts."""
        super().__init__()
        self.group = group

    def prepare(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> RowsToSend:
        order = chosen.flatten().argsort(stable=True)
        leaving = counts.view(self.group.size(), -1)  # [ranks, X / ep]
        coming = funcol.wait_tensor(funcol.all_to_all_single(leaving, None, None, self.group))
        sent, received = rows_per_rank(leaving, coming)
        return RowsToSend(tokens, order, weights, coming, sent, received)

    def send(self, state: RowsToSend) -> RowsInFlight:
        """Dispatch the rows, sorted by rank and by expert within a rank."""
        per_token = state.weights.shape[1]
        rows = state.tokens[state.order // per_token]
        return RowsInFlight(start_all_to_all(rows, state.received, state.sent, self.group), state)

    def compute(self, state: RowsInFlight, experts: nn.Module) -> ResultsInFlight:
        """Wait for the rows, run the experts, and start to send the results back."""
        sizes = state.sizes
        coming = sizes.coming
        arrived = wait_all_to_all(state.pending)
        own = torch.arange(coming.shape[1], device=coming.device).repeat(self.group.size())
        numbers = own.repeat_interleave(coming.flatten(), output_size=sum(sizes.received))
        by_expert = numbers.argsort(stable=True)  # from all ranks
        by_arrival = inverse(by_expert)
        results = experts(arrived[by_expert], coming.sum(0))[by_arrival]
        pending = start_all_to_all(results, sizes.sent, sizes.received, self.group)
        return ResultsInFlight(pending, sizes.order, sizes.weights)

    def combine(self, state: ResultsInFlight) -> Tensor:
        return weighted(wait_all_to_all(state.pending), state.order, state.weights)


def rows_per_rank(leaving: Tensor, coming: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank, and how many come from each. Both arguments: int64
    [ranks, X / ep].

    This is a host-device sync. tools/plan, whose tensors have no values, replaces this function.
    """
    # [2, ranks]: one copy to the host, so one sync
    both = torch.stack((leaving.sum(1), coming.sum(1)))
    sent, received = both.tolist()
    return sent, received


# The same in chunks ---------------------------------------------------------------------------------


class ChunkedDispatcher(nn.Module):
    """Runs another dispatcher on one chunk of the tokens after the other: while the experts compute
    one chunk, the rows of the next arrive and the results of the one before go back (Tutel,
    arXiv:2206.03382, calls it adaptive pipelining). Its state is a list of that dispatcher's states.

    All chunks are sent at once, before the shared experts compute. So of dispatch only the first
    chunk can be waited for, and of combine only the last. Autograd retraces this in reverse order,
    so the backward pass hides as much. Each chunk is a smaller grouped GEMM of every expert, and an
    expert's gradient is the sum over the chunks, in the type of the weights.
    """

    def __init__(self, dispatcher: RemoteDispatcher, chunks: int):
        super().__init__()
        self.dispatcher = dispatcher
        self.chunks = chunks

    def dispatch(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> list[Any]:
        """Start to send the tokens of all chunks, after all host-device syncs; arguments as for
        `LocalDispatcher.dispatch`."""
        of_chunks = [tensor.tensor_split(self.chunks) for tensor in (tokens, chosen, weights)]
        prepared = [
            self.dispatcher.prepare(*part, rows_of_experts(part[1], len(counts)))
            for part in zip(*of_chunks, strict=True)
        ]
        return [self.dispatcher.send(state) for state in prepared]

    def compute(self, states: list[Any], experts: nn.Module) -> list[Any]:
        """Run the experts on each chunk, as `LocalDispatcher.compute` does."""
        return [self.dispatcher.compute(state, experts) for state in states]

    def combine(self, states: list[Any]) -> Tensor:
        """Concatenate the combined results of the chunks."""
        return torch.cat([self.dispatcher.combine(state) for state in states])


def rows_of_experts(chosen: Tensor, experts: int) -> Tensor:
    """Count the rows of each expert: chosen int64 [N, k] -> int64 [X]."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add(0, chosen, torch.ones_like(chosen))


# An all-to-all that overlaps with computation, in forward and in backward ---------------------------
#
#     pending = start_all_to_all(rows, received, sent, group)
#     ...                                            # is computed meanwhile, from other tensors
#     rows = wait_all_to_all(pending)
#
# Autograd runs backward in the reverse order of forward. So there `wait_all_to_all` begins the
# all-to-all of the gradient, then comes the backward pass of what was computed meanwhile, and
# `start_all_to_all` waits for it. PyTorch's own differentiable all-to-all waits at once.


def start_all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Pending:
    """Start to send rows [M, D] to the ranks of the group, and return at once."""
    route = Route(received, sent, group)
    if torch.compiler.is_compiling():  # a compiler waits where the result is used first
        arriving = funcol.all_to_all_single_autograd(rows, received, sent, group)
        return Pending(arriving, rows, route)
    return Pending(*StartAllToAll.apply(rows, route), route)


def wait_all_to_all(pending: Pending) -> Tensor:
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
