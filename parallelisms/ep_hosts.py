"""Hierarchical dispatch and combine: in an ep group that spans hosts, a token crosses the network
to each other host once, however many of its experts are there, and its result comes back once.  An
ep group is hosts x ranks of a host. Dispatch goes in two steps. First each rank sends a token to
its peer, the rank with the same local rank, on every host that has one of the token's experts. The
peer then sends copies to the ranks of its host that have these experts, over the links inside the
host. Combine goes back the same way. Each rank adds the weighted results of its experts, the peer
adds these partial sums of its host's ranks, and the token's rank adds those of the hosts. So the
weights of a token's experts are sent along with it. Backward retraces these steps: a gradient also
crosses once in each direction. (DeepSeek-V3, arXiv:2412.19437, section 3.2.2, sends tokens by such
a route.)

The flat exchange (parallelisms/ep_dispatch.py) sends a row for each expert of a token. The sums here are
added in another order, and in bfloat16 a partial sum is rounded before it is sent.

Shapes:  N tokens of this rank   D = dim   X experts   k experts of a token   H hosts   L ranks of a
         host   n tokens that have arrived at a step   m copies of them that are sent on
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from configs.schema import InputError
from models.kernels.precision import wide, wide_type
from parallelisms.ep_dispatch import (
    Pending,
    RemoteDispatcher,
    start_all_to_all,
    wait_all_to_all,
)
from parallelisms.mesh import Mesh, world

PEERS, HOST = "ep_peers", "ep_host"  # names of the two groups, in Mesh.more_groups


class Dispatched(NamedTuple):
    """Tokens that arrive at a step of dispatch."""

    x: Tensor  # [n, D]
    # int64 [n, k]: counted from the first expert of this host or rank, so those of others are out
    # of range
    experts: Tensor
    weights: Tensor  # [n, k], in the type of x: of the experts' results


class Sizes(NamedTuple):
    """The copies of tokens that this rank sends and gets, counted on the host."""

    to_peers: list[int]  # [H]
    from_peers: list[int]
    to_ranks: list[int]  # [L], of its host
    from_ranks: list[int]
    rows: int  # of its experts: a copy has one for each expert that it is there for


def open_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Open two groups: the ranks with this one's local rank on the hosts of its ep group, and the
    ranks of its host. Every rank calls this, for each of its stages: all share what the first one
    opens, so that `Mesh.set_timeout` knows every group. Raises InputError, on every rank, where
    hosts have different numbers of ranks."""
    if PEERS in mesh.more_groups:
        return mesh.more_groups[PEERS], mesh.more_groups[HOST]
    local = world().local_size  # configs/check.py: it divides ep
    on_hosts = mesh.gather(local)
    if len(set(on_hosts)) > 1:
        raise InputError(
            'parallelism.expert_exchange = "hierarchical" needs as many processes on every host, '
            f'and some have {min(on_hosts)}, others {max(on_hosts)}: use "flat", or start as many '
            "on each (NGPU)"
        )
    rank = mesh.rank
    first = rank // mesh.ep * mesh.ep
    first_here = rank // local * local
    ranks = {
        PEERS: list(range(first + rank % local, first + mesh.ep, local)),
        HOST: list(range(first_here, first_here + local)),
    }
    for name, members in ranks.items():
        mesh.more_groups[name] = dist.new_group(
            members, timeout=mesh.timeout(), use_local_synchronization=True
        )
    return mesh.more_groups[PEERS], mesh.more_groups[HOST]


@dataclass
class Visit:
    """Copies of tokens on their way to the ranks of a group, and what their results need to come
    back."""

    pending: Pending  # of rows [m, D + k]
    experts: Tensor  # int64 [n of the next step, k]; it must be waited for
    copies: Tensor  # int64 [m]: the token of each
    tokens: int  # n
    width: int  # D
    sent: list[int]  # copies, by rank
    received: list[int]


@dataclass
class WayBack:
    """The results of these copies, on their way back."""

    pending: Pending  # of rows [m, D]
    copies: Tensor
    tokens: int


@dataclass
class VisitToPrepare:
    """The state of `HierarchicalDispatcher` before the rows are sent."""

    tokens: Dispatched
    sizes: Sizes
    experts_of_host: int


@dataclass
class VisitOfHosts:
    """The state of `HierarchicalDispatcher` while rows are between hosts."""

    visit: Visit
    sizes: Sizes
    experts_of_host: int


class HierarchicalDispatcher(RemoteDispatcher):
    """Dispatch and combine in two steps each, between hosts and inside of one."""

    def __init__(self, peers: dist.ProcessGroup, host: dist.ProcessGroup):
        """peers, host: the groups of `open_groups`."""
        super().__init__()
        self.peers = peers
        self.host = host

    def prepare(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor
    ) -> VisitToPrepare:
        sizes = exchange_sizes(chosen, counts, self.peers, self.host)
        dispatched = Dispatched(tokens, chosen, weights.to(tokens.dtype))
        return VisitToPrepare(dispatched, sizes, len(counts) // self.peers.size())

    def send(self, state: VisitToPrepare) -> VisitOfHosts:
        sizes = state.sizes
        visit = leave(
            self.peers, state.tokens, state.experts_of_host, sizes.to_peers, sizes.from_peers
        )
        return VisitOfHosts(visit, sizes, state.experts_of_host)

    def compute(self, state: VisitOfHosts, experts: nn.Module) -> WayBack:
        """Wait for the tokens of other hosts, let the ranks of this one compute, and start to send
        the sums of their results back."""
        sizes = state.sizes
        of_rank = state.experts_of_host // self.host.size()
        here = arrive(self.peers, state.visit, state.experts_of_host)
        inside = leave(self.host, here, of_rank, sizes.to_ranks, sizes.from_ranks)
        own = arrive(self.host, inside, of_rank)
        results = results_of(experts, own, of_rank, sizes.rows)
        sums = collect(send_back(self.host, inside, results))
        return send_back(self.peers, state.visit, sums)

    def combine(self, state: WayBack) -> Tensor:
        return collect(state)


def leave(
    group: dist.ProcessGroup, tokens: Dispatched, size: int, sent: list[int], received: list[int]
) -> Visit:
    """Send a copy of each token to the ranks of the group where it has experts. size: the experts of
    a rank, or of all ranks that it stands for. sent, received: copies, by rank."""
    n, width = tokens.x.shape
    # [m]: rank after rank, each in the tokens' order
    copies = first_true(reached(tokens.experts, group.size(), size).T, sum(sent)) % n
    rows = torch.cat((tokens.x, tokens.weights), 1).index_select(0, copies)  # [m, D + k]
    experts = tokens.experts.index_select(0, copies)  # [m, k]
    experts = funcol.all_to_all_single(experts, received, sent, group)
    pending = start_all_to_all(rows, received, sent, group)
    return Visit(pending, experts, copies, n, width, sent, received)


def arrive(group: dist.ProcessGroup, visit: Visit, size: int) -> Dispatched:
    """Wait for the copies that come to this rank. size: as that of `leave`."""
    own = funcol.wait_tensor(visit.experts) - group.rank() * size
    arrived = wait_all_to_all(visit.pending)  # [n of the next step, D + k]
    return Dispatched(arrived[:, : visit.width], own, arrived[:, visit.width :])


def send_back(group: dist.ProcessGroup, visit: Visit, results: Tensor) -> WayBack:
    """Start to send the results [n of the next step, D] of the copies that came back to their
    ranks."""
    pending = start_all_to_all(results, visit.sent, visit.received, group)  # [m, D]
    return WayBack(pending, visit.copies, visit.tokens)


def collect(way: WayBack) -> Tensor:
    """Wait for the results of the copies, and add those of each token -> [n, D]."""
    return added(wait_all_to_all(way.pending), way.copies, way.tokens)


def results_of(experts: nn.Module, tokens: Dispatched, size: int, rows: int) -> Tensor:
    """Return the weighted results of this rank's experts, added for each token -> [n, D]. size:
    their number. rows: for all tokens together."""
    n, k = tokens.experts.shape
    is_here = (tokens.experts >= 0) & (tokens.experts < size)
    numbers = tokens.experts.where(is_here, size).flatten()  # [n k]; size: elsewhere
    counts = numbers.new_zeros(size + 1).scatter_add(0, numbers, torch.ones_like(numbers))
    order = numbers.argsort(stable=True)[:rows]  # by expert
    copies = order // k
    results = experts(tokens.x.index_select(0, copies), counts[:size])  # [rows, D]
    weights = tokens.weights.flatten().index_select(0, order)
    return added(results * weights[:, None], copies, n)


def added(rows: Tensor, places: Tensor, n: int) -> Tensor:
    """Add the rows [m, D] of each place in float32 -> [n, D]. places int64 [m]."""
    sums = rows.new_zeros(n, rows.shape[1], dtype=wide_type(rows.dtype))
    return sums.index_add(0, places, wide(rows)).to(rows.dtype)


def reached(experts: Tensor, places: int, size: int) -> Tensor:
    """Return which of the places have an expert of each token: experts int64 [n, k] -> bool [n,
    places]. size: the experts of a place."""
    numbers = torch.arange(places, device=experts.device)
    return (experts[:, :, None] // size == numbers).any(1)


def first_true(flags: Tensor, count: int) -> Tensor:
    """Return the positions, int64 [count], of the flags that are set, of which there are so
    many."""
    return flags.flatten().logical_not().byte().argsort(stable=True)[:count]


def exchange_sizes(
    chosen: Tensor, counts: Tensor, peers: dist.ProcessGroup, host: dist.ProcessGroup
) -> Sizes:
    """Exchange what each step of dispatch sends, by two small all-to-alls and one host-device sync.
    chosen int64 [N, k]; counts int64 [X]: the rows of each expert."""
    hosts = peers.size()
    ranks = host.size()
    of_rank = len(counts) // (hosts * ranks)
    to_ranks = reached(chosen, hosts * ranks, of_rank).unflatten(1, (hosts, ranks))  # [N, H, L]
    to_hosts = to_ranks.any(2).sum(0)  # [H]
    rows = counts.view(hosts, ranks, of_rank).sum(2)  # [H, L]
    leaving = torch.cat((to_hosts[:, None], to_ranks.sum(0), rows), 1)  # [H, 1 + 2 L]
    coming = funcol.wait_tensor(funcol.all_to_all_single(leaving, None, None, peers))
    # [L, 2]: what all hosts send to each rank of this one, in copies and in rows
    inside = coming[:, 1:].sum(0).view(2, ranks).T.contiguous()
    arriving = funcol.wait_tensor(funcol.all_to_all_single(inside, None, None, host))
    return on_the_host(to_hosts, coming[:, 0], inside[:, 0], arriving)


def on_the_host(to_peers: Tensor, from_peers: Tensor, to_ranks: Tensor, arriving: Tensor) -> Sizes:
    """Copy the numbers, int64 [H], [H], [L] and [L, 2], to the host at once.

    This is a host-device sync. tools/plan, whose tensors have no values, replaces this function.
    """
    between = torch.stack((to_peers, from_peers))  # [2, H]
    inside = torch.stack((to_ranks, arriving[:, 0], arriving[:, 1]))  # [3, L]
    numbers = torch.cat((between.flatten(), inside.flatten())).tolist()
    hosts = len(to_peers)
    ranks = len(to_ranks)
    numbers_inside = numbers[2 * hosts :]
    return Sizes(
        to_peers=numbers[:hosts],
        from_peers=numbers[hosts : 2 * hosts],
        to_ranks=numbers_inside[:ranks],
        from_ranks=numbers_inside[ranks : 2 * ranks],
        rows=sum(numbers_inside[2 * ranks :]),
    )
