"""Muon: momentum, whose matrices are orthogonalised (Jordan et al., 2024,
kellerjordan.github.io/posts/muon).

It updates the hidden matrices of a model. AdamW updates all other parameters, in the same optimizer,
so that a run has one. The arithmetic is that of `torch.optim.Muon`, which cannot work on shards:
there, every rank would orthogonalise its own part, which is a different update. Here whole matrices
are orthogonalised on any mesh (parallelisms/gather_matrices.py).

The Newton-Schulz iteration computes in bfloat16, as Jordan's code and `torch.optim.Muon` do: it is
made of GEMMs, and needs no precision, because it stops where singular values are between 0.7 and
1.2. What ranks exchange has that type too. In float32 (`optimizer.ns_dtype`) the update is
the same on every mesh up to float32's rounding. In bfloat16 the rounding of a gradient's sum may
change an update by 2^-8 of its size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.boxes import shard_of
from parallelisms.gather_matrices import GatheredMatrices
from training.matrices import MatrixOptimizer

# Of the odd polynomial a x + b x^3 + c x^5, whose slope at 0 is as large as it can be while so
# many iterations stay near 1; and what a norm is at least. All are Jordan's.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LEAST_NORM = 1e-7

# Factor of the learning rate for a matrix with these rows and columns, by torch's name for it.
LR_FACTORS: dict[str, Callable[[int, int], float]] = {
    # Jordan: so that the update's effect on the output does not depend on the shape
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    # Moonlight (arXiv:2502.16982, section 2.2): the size of AdamW's update, so that its learning
    # rate and weight decay fit
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Count the FLOPs of the GEMMs that orthogonalise a matrix: in each iteration [m, n] @ [n, m], [m,
    m] @ [m, m] and [m, m] @ [m, n], where m is the shorter side."""
    m, n = sorted((rows, columns))
    return ITERATIONS * (4 * m * m * n + 2 * m * m * m)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns, approximately. [X, R, C] -> [X,
    R, C] in the same type, each matrix for itself."""
    if len(matrices) == 1:
        return _newton_schulz(matrices[0])[None]
    return _newton_schulz(matrices)


def _newton_schulz(x: Tensor) -> Tensor:
    """x [R, C] or [X, R, C]."""
    a, b, c = COEFFICIENTS
    add_matmul = torch.addmm if x.ndim == 2 else torch.baddbmm
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT  # fewer rows than columns, so that the gram matrix is small
    # No singular value may be above 1, and none is above this norm.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = add_matmul(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        x = add_matmul(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class Muon(MatrixOptimizer):
    """Muon for the groups whose "rule" is the class's RULE, fused AdamW for the others.

    A group of Muon has lr, weight_decay, momentum, adjust_lr_fn and ns_dtype (a
    torch.dtype's name). Its state of a weight is `momentum_buffer`, sharded as the weight.
    """

    RULE = "Muon"

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(groups, adamw, group)
        self.whole: GatheredMatrices | None = None
        self.weights_of_whole: list[nn.Parameter] = []
        of_muon = [g for g in self.param_groups if g["rule"] == self.RULE]
        if of_muon:
            weights = [weight for g in of_muon for weight in g["params"]]
            self.matrices_of(weights)

    def update_matrices(
        self, weights: list[nn.Parameter], groups: list[dict], skip: Tensor | None
    ) -> None:
        """skip: bool, a scalar; whether nothing must change."""
        options = groups[0]  # how matrices are orthogonalised is the same in all groups
        dtype = getattr(torch, options["ns_dtype"])
        updates = []
        for weight, group in zip(weights, groups, strict=True):
            updates.append(self.add_momentum(weight, group, skip).to(dtype, copy=True))
        self.matrices_of(weights).apply(updates, orthogonalised)
        self.normalise(weights, groups, updates, skip)
        for weight, group, update in zip(weights, groups, updates, strict=True):
            move(weight, group, update, skip)

    def normalise(
        self,
        weights: list[nn.Parameter],
        groups: list[dict],
        updates: list[Tensor],
        skip: Tensor | None,
    ) -> None:
        """Normalise this rank's parts of the orthogonalised updates, in place: not in Muon, but in
        rules that follow from it (training/normuon.py)."""

    def add_momentum(self, weight: nn.Parameter, group: dict, skip: Tensor | None) -> Tensor:
        """Add the gradient to this rank's part of the momentum, and return its part of what is to
        be orthogonalised."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        momentum = group["momentum"]
        average = shard_of(state["momentum_buffer"])
        gradient = shard_of(weight.grad)
        if skip is not None:
            # a step towards itself leaves the average as it is, and keeps out what is not finite
            gradient = torch.where(skip, average, gradient)
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)  # Nesterov: the newest gradient counts once more

    def matrices_of(self, weights: list[nn.Parameter]) -> GatheredMatrices:
        """Assign matrices to ranks. The assignment stays the same unless other weights have
        gradients."""
        known = self.weights_of_whole
        same = len(known) == len(weights) and all(map(lambda a, b: a is b, known, weights))
        if self.whole is None or not same:
            self.whole = GatheredMatrices(weights, newton_schulz_flops, self.group)
            self.weights_of_whole = weights
        return self.whole


def move(weight: nn.Parameter, group: dict, update: Tensor, skip: Tensor | None) -> None:
    """Decay this rank's part of a weight, and subtract its part of the orthogonalised update."""
    lr = group["lr"]
    rows, columns = weight.shape[-2:]
    factor = LR_FACTORS[group["adjust_lr_fn"]](rows, columns)
    part = shard_of(weight.data)
    kept: Any = 1 - lr * group["weight_decay"]
    if skip is not None:
        # a Python number next to a condition would become float32
        dtype = torch.promote_types(part.dtype, torch.float32)
        kept = torch.where(skip, 1.0, torch.full_like(skip, kept, dtype=dtype))
        update = update.masked_fill(skip, 0.0)
    part.mul_(kept)
    part.add_(update, alpha=-lr * factor)
