"""Expert parallelism: the ranks of an ep group share the experts of every mixture, and all-to-alls
dispatch rows to their experts (parallelisms/ep_dispatch.py; here the mixtures get their parts).

An ep group is taken from the ranks that have different tokens, dp_shard x cp x tp (GShard,
arXiv:2006.16668). Of X experts a rank holds X / ep. Dispatch is an all-to-all that sends each row
to the rank of its expert, combine is one that sends the result back: two in forward and two in
backward, of exactly as many rows as there are, so none is dropped. FSDP shards the weights of a
rank's experts over the edp = dp_shard x cp x tp / ep ranks that have the same experts, and all
other weights over all their ranks.

Tensor parallelism splits no expert. Between blocks each of its ranks has a slice of the sequence,
and a mixture works on single tokens, so a rank dispatches the tokens of its slice and gathers no
others: for the experts, it is one more rank of data parallelism.

Shapes:  B sequences   X experts
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import Shard, distribute_tensor

from configs.schema import InputError, Parallelism
from models.moe import LocalDispatcher
from parallelisms import ep_hosts
from parallelisms.ep_dispatch import AllToAllDispatcher, ChunkedDispatcher, RemoteDispatcher
from parallelisms.mesh import Mesh


def apply(model: nn.Module, mesh: Mesh, cfg: Parallelism) -> nn.Module:
    """Shard the experts of every mixture over the ep group, in place, and give the mixtures a
    dispatcher that sends rows to the experts of other ranks, and a balance loss that counts the
    tokens of whole sequences. The model is on `meta`."""
    sharing_dims = [dim for dim in ("cp", "tp") if mesh.sizes[dim] > 1]
    sharing_sequences = [mesh.device_mesh.get_group(dim) for dim in sharing_dims]
    for mixture in model.mixtures().values():
        if sharing_sequences:
            mixture.balance = BalanceLossOverRanks(mixture.balance, sharing_sequences)
        if mesh.experts_mesh is not None:
            distribute(mixture.experts, mesh)
    if mesh.ep == 1:
        return model
    make = dispatchers(mesh, cfg)
    for layer, mixture in model.mixtures().items():
        own = type(mixture.dispatcher)
        if own is not LocalDispatcher:
            raise InputError(
                f"parallelism.expert_parallel = {mesh.ep} puts another dispatcher in the place of "
                f"that of layer {layer}, a {own.__qualname__}, whose code would be dropped: do what "
                "it does in the router or the experts, or set expert_parallel to 1"
            )
    for mixture in model.mixtures().values():
        mixture.dispatcher = make()
    return model


def dispatchers(mesh: Mesh, cfg: Parallelism) -> Callable[[], nn.Module]:
    """Return a factory of the dispatcher that the options select. Every rank calls this for each of
    its stages, also for one without mixtures: it may open groups."""
    make: Callable[[], RemoteDispatcher]
    if cfg.expert_exchange == "hierarchical":
        make = partial(ep_hosts.HierarchicalDispatcher, *ep_hosts.open_groups(mesh))
    else:
        make = partial(AllToAllDispatcher, mesh.experts_mesh["ep"].get_group())
    if cfg.expert_chunks == 1:
        return make
    return lambda: ChunkedDispatcher(make(), cfg.expert_chunks)


def distribute(experts: nn.Module, mesh: Mesh) -> None:
    """Shard the experts, a models/moe.py::Experts, over the ep group, in place.

    An expert gets the rows of all ranks of its ep group, so its gradient is their sum already. FSDP
    then averages over edp = dp_shard * cp * tp / ep ranks. All other weights are averaged over
    dp_shard * cp ranks, for which the loss is scaled, so experts' gradients get the factor tp / ep.
    """
    shard(experts, [name for name, _ in experts.named_parameters()], mesh)
    experts.gradient_factor = mesh.tp / mesh.ep


def shard(experts: nn.Module, names: list[str], mesh: Mesh) -> None:
    """Shard these parameters, whose first dimension is the expert, over the ep group, in place."""
    for name in names:
        whole = getattr(experts, name)
        part = distribute_tensor(whole, mesh.experts_mesh["ep"], [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


class BalanceLossOverRanks(nn.Module):
    """The balance loss where ranks share a sequence: the choices of its tokens are summed over them.
    Each rank computes the term of its tokens."""

    def __init__(self, balance: nn.Module, groups: list[dist.ProcessGroup]):
        """balance: a models/moe.py::BalanceLoss; groups: of the ranks that share a sequence."""
        super().__init__()
        self.balance = balance
        self.groups = groups

    def forward(self, affinities: Tensor, counts: Tensor) -> Tensor:
        """counts int64 [B, X]: of this rank's tokens."""
        for group in self.groups:
            counts = funcol.all_reduce(counts, "sum", group)
        return self.balance(affinities, counts)
