"""Balances the load of experts by a bias, without a loss (Wang et al., arXiv:2408.15664, algorithm
1).

After a step, the bias of an expert that got fewer tokens than the mean goes up by a fixed amount,
and that of one that got more goes down. What counts is the global batch: the counts are integers,
summed over all microbatches and ranks, so the biases are the same on every mesh, bit by bit.
"""

import torch
from torch import Tensor, nn

from models.terms import AuxiliaryTerms
from parallelisms.mesh import Mesh


def sum_over_routed(x: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the ranks whose mixtures have different tokens, in place. Those of a tp group are
    among them: each has a slice of the sequence. Every rank of the mesh must call it."""
    return mesh.sum_over_tp(mesh.sum_over_tokens(x))


def sum_counts(terms: AuxiliaryTerms, mesh: Mesh) -> None:
    """Make "expert_counts" of `terms` those of the global batch: int64 [X] per layer, how many
    tokens each of its experts got. Every rank calls it; a stage of a pipeline has its own
    layers."""
    counts = terms.sums["expert_counts"]
    if not counts:
        # a stage with mixtures begins two collectives here, and is not ahead for that
        mesh.progress_counter.advance(by=2)
        return
    together = sum_over_routed(torch.stack(list(counts.values())), mesh)
    counts.update(zip(counts, together, strict=True))


@torch.no_grad()
def move_biases(model: nn.Module, terms: AuxiliaryTerms, fine: Tensor, speed: float) -> None:
    """Move the biases of the routers towards a balanced load. fine: bool, a scalar: whether the
    step counts; if not, no bias changes. speed: by how much a bias moves."""
    counts = terms.sums["expert_counts"]
    mixtures = model.mixtures() if counts else {}
    for layer, tokens in counts.items():
        router = mixtures[layer].router
        # where only adapters are trained, a router is frozen with its bias
        if mixtures[layer].args.balancing_bias and router.weight.requires_grad:
            router.bias += speed * fine * torch.sign(tokens.sum() - tokens * len(tokens))
