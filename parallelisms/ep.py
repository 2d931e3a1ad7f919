"""Expert parallelism: the ranks of an ep group share the experts of every mixture, and all-to-alls
dispatch rows to their experts.

An ep group is taken from the ranks that have different tokens, dp_shard x cp x tp (GShard,
arXiv:2006.16668). Of X experts a rank holds X / ep. Dispatch is an all-to-all that sends each row to
the rank of its expert, combine is one that sends the result back: two in forward and two in
backward, of exactly as many rows as there are, so none is dropped. FSDP shards the weights of a
rank's experts over the edp = dp_shard x cp x tp / ep ranks that have the same experts, and all
other weights as ever.

Tensor parallelism splits no expert. Between blocks each of its ranks has a slice of the sequence,
and a mixture works on single tokens, so a rank dispatches the tokens of its slice and gathers no
others: for the experts, it is one more rank of data parallelism.

Shapes:  M rows of this rank   D = dim   X experts
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import Shard, distribute_tensor

from configs.schema import Parallelism
from models.kernels.combine import inverse, weighted
from parallelisms import async_all_to_all, ep_chunks, ep_hosts
from parallelisms.mesh import Mesh


def apply(model: nn.Module, mesh: Mesh, cfg: Parallelism) -> nn.Module:
    """Leave this rank its experts, in place, let the mixtures dispatch rows to those of others, and
    let them count the tokens of whole sequences. The model is on `meta`."""
    sharing_dims = [dim for dim in ("cp", "tp") if mesh.sizes[dim] > 1]
    sharing_sequences = [mesh.device_mesh.get_group(dim) for dim in sharing_dims]
    sum_over_ranks = partial(summed, groups=sharing_sequences)
    for mixture in model.mixtures().values():
        if sharing_sequences:
            mixture.counts_of_whole_sequences = sum_over_ranks
        if mesh.experts_mesh is not None:
            distribute(mixture.experts, mesh)
    if mesh.ep == 1:
        return model
    exchange = partial(flat, group=mesh.experts_mesh["ep"].get_group())
    if cfg.expert_exchange == "hierarchical":
        peers, host = ep_hosts.open_groups(mesh)
        exchange = partial(ep_hosts.by_host, peers=peers, host=host)
    for mixture in model.mixtures().values():
        mixture.dispatch = ep_chunks.in_chunks(exchange(mixture.experts), cfg.expert_chunks)
    return model


def summed(counts: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """The sum over the ranks of all these groups."""
    for group in groups:
        counts = funcol.all_reduce(counts, "sum", group)
    return counts


def distribute(experts: nn.Module, mesh: Mesh) -> None:
    """Leave this rank its part of the experts, a models/moe.py::Experts, in place."""
    ep_mesh = mesh.experts_mesh["ep"]
    for name, weight in list(experts.named_parameters()):
        part = distribute_tensor(weight, ep_mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part))
    experts.weights_for_forward = local_parts(experts.weights_for_forward, mesh.tp / mesh.ep)


class ScaledGradient(torch.autograd.Function):
    """The identity; backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def local_parts(weights: Callable[[], list[Tensor]], factor: float) -> Callable[[], list[Tensor]]:
    """A `weights_for_forward` for `Experts`, which returns this rank's part of each.

    An expert gets the rows of all ranks of its ep group, so its gradient is their sum already. FSDP
    then averages over edp = dp_shard * cp * tp / ep ranks. All other weights are averaged over
    dp_shard * cp ranks, and the loss is scaled for that. factor = tp / ep makes the two alike.
    """

    def weights_for_forward() -> list[Tensor]:
        return [ScaledGradient.apply(weight.to_local(), factor) for weight in weights()]

    return weights_for_forward


def rows_per_rank(leaving: Tensor, coming: Tensor) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from each. Both arguments: int64 [ranks, X /
    ep].

    This is a host-device sync. tools/plan, whose tensors have no values, replaces this function."""
    # [2, ranks]: one copy to the host, so one sync
    both = torch.stack((leaving.sum(1), coming.sum(1)))
    sent, received = both.tolist()
    return sent, received


def flat(
    experts: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup
) -> ep_chunks.Prepare:
    """The exchange by one all-to-all of rows, sorted by expert. experts: those of this rank, which
    get the rows for them from all ranks."""

    def prepare(x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> ep_chunks.Leave:
        order = chosen.flatten().argsort(stable=True)  # [M], as in models/moe.py
        leaving = counts.view(group.size(), -1)  # [ranks, X / ep]
        # [ranks, X / ep]
        coming = funcol.wait_tensor(funcol.all_to_all_single(leaving, None, None, group))
        sent, received = rows_per_rank(leaving, coming)

        def leave() -> ep_chunks.Compute:
            # Dispatch: rank after rank, each by expert.
            pending = async_all_to_all.start(x[order // chosen.shape[1]], received, sent, group)

            def compute() -> ep_chunks.Combine:
                arrived = async_all_to_all.wait(pending)
                own = torch.arange(coming.shape[1], device=coming.device).repeat(group.size())
                numbers = own.repeat_interleave(coming.flatten(), output_size=sum(received))
                by_expert = numbers.argsort(stable=True)  # whatever the rank
                results = experts(arrived[by_expert], coming.sum(0))
                # Combine: back into the order of arrival, and to the ranks that sent the rows.
                in_order = results[inverse(by_expert)]
                returning = async_all_to_all.start(in_order, sent, received, group)
                return lambda: weighted(async_all_to_all.wait(returning), order, weights)

            return compute

        return leave

    return prepare
