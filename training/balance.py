"""Balances the load of experts by a bias, without a loss (Wang et al., arXiv:2408.15664, algorithm
1).

After a step, the bias of an expert that got fewer tokens than the mean goes up by a fixed amount,
and that of one that got more goes down. What counts is the global batch: the counts are integers,
summed over all microbatches and ranks, so the biases are the same on every mesh, bit by bit.
"""

import torch
from torch import Tensor, nn

from models.moe import RouterStatistics
from parallelisms.mesh import Mesh


def sum_over_routed(x: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the ranks whose mixtures have different tokens, in place. Those of a tp group are
    among them: each has a slice of the sequence. Every rank of the mesh must call it."""
    return mesh.sum_over_tp(mesh.sum_over_tokens(x))


def counts_of_step(router_statistics: RouterStatistics, mesh: Mesh) -> dict[int, Tensor]:
    """By the number of the layer, how many tokens of the global batch each of its experts got,
    int64 [X]. Every rank calls it; a stage of a pipeline has its own layers."""
    if not router_statistics.counts:
        # a stage with mixtures begins two collectives here, and is not ahead for that
        mesh.progress_counter.advance(by=2)
        return {}
    together = sum_over_routed(torch.stack(list(router_statistics.counts.values())), mesh)
    return dict(zip(router_statistics.counts, together, strict=True))


@torch.no_grad()
def move_biases(model: nn.Module, counts: dict[int, Tensor], fine: Tensor, speed: float) -> None:
    """fine: bool, a scalar: whether the step counts; if not, no bias changes. speed: by how much a
    bias moves."""
    mixtures = model.mixtures() if counts else {}
    for layer, tokens in counts.items():
        if mixtures[layer].args.balancing_bias:
            mixtures[layer].router.bias += (
                speed * fine * torch.sign(tokens.sum() - tokens * len(tokens))
            )
