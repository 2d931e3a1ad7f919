"""SOAP (Vyas et al., arXiv:2409.11321, algorithm 3): Adam in the eigenbases of Shampoo's factors.

A gradient G [R, C] is turned into these bases, Q_L^T G Q_R; Adam's second moment is kept there, and
its update is turned back. Shampoo's factors are averages, with Adam's beta2, of G G^T [R, R] and of
G^T G [C, C]. Their eigenbases come from the first gradient, which changes no weight, and then, every
`frequency` steps, from one step of orthogonal iteration and a QR decomposition (algorithm 4). All of
that is as in the authors' code (github.com/nikhilvyas/SOAP), except for:

- hidden matrices alone, and AdamW for all other parameters, as with Muon: the authors turn an
  embedding or an output projection on its short side;
- weight decay comes before the update, as in AdamW;
- `RIDGE`, without which float64's rounding would choose the basis where a factor has no full rank,
  another on each mesh. Float32's rounding is larger, and chooses it.

State of a weight: `exp_avg`, not turned, and `exp_avg_sq`, turned; `left` [R, 2R] and `right` [C, 2C],
each a factor with its eigenbasis to its right, sharded by rows as the weight's axis is (of a stack of
experts' matrices with an axis [X] in front). A side longer than `max_dim` has none. Every rank turns
the whole matrices that it has parts of, so that costs each rank as much as one process. The
decompositions, which cost more, are dealt to the ranks (parallelisms/gather_matrices.py).

Shapes:  X matrices in a stack   R, C rows and columns   r, c of them on this rank   S = R or C
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallelisms.boxes import box_of, shard_of, whole, write
from parallelisms.gather_matrices import GatheredMatrices
from training.kept import LIKE, SCALAR, Kept, Shape
from training.matrices import MatrixOptimizer

# What the eigenvalues of a factor are raised by, relative to their mean: from 0 to this for the first
# basis, which makes them distinct, and by this in an iteration.
RIDGE = 1e-6
SIDES = {"left": -2, "right": -1}  # key of the state -> its axis of the weight


def side(axis: int, max_dim: int) -> Callable[[Shape], Shape | None]:
    """Return the function from a weight's shape to that of a factor and its basis."""

    def shape(of_weight: Shape) -> Shape | None:
        if len(of_weight) < 2 or of_weight[axis] > max_dim:
            return None
        return *of_weight[:-2], of_weight[axis], 2 * of_weight[axis]

    return shape


def kept_by_soap(group: dict[str, Any]) -> dict[str, Kept]:
    """Return the state of a weight: key -> what is kept."""
    kept = {"exp_avg": LIKE, "exp_avg_sq": LIKE, "step": SCALAR}
    for key, axis in SIDES.items():
        kept[key] = Kept(side(axis, group["max_dim"]), axes=(2 + axis, None))
    return kept


class SOAP(MatrixOptimizer):
    """SOAP for the groups whose "rule" is "SOAP", fused AdamW for the others.

    A group has lr, weight_decay, betas, eps, frequency (steps between decompositions) and max_dim.
    """

    RULE = "SOAP"

    def __init__(self, groups: list[dict[str, Any]], adamw: dict[str, Any], group: Any) -> None:
        super().__init__(groups, adamw, group)
        # the host knows which step this is, and so whether it counts
        self._step_supports_amp_scaling = False
        self.dealt: dict[tuple[int, ...], GatheredMatrices] = {}

    def update_matrices(
        self, weights: list[nn.Parameter], groups: list[dict], skip: Tensor | None
    ) -> None:
        first: list[Tensor] = []
        later: list[Tensor] = []
        for weight, group in zip(weights, groups, strict=True):
            state = self.state_of(weight, group)
            done = int(state["step"])  # gradients before this one
            factors = [state[key] for key in SIDES if key in state]
            gradient = whole(weight.grad)  # [R, C] or [X, R, C]
            if done:
                self.move(weight, group, gradient, done)
            add_to_factors(state, gradient, group["betas"][1])
            state["step"] += 1
            if not done:
                first += factors
            elif done % group["frequency"] == 0:
                later += factors
        self.decompose(first, eigenbases)
        self.decompose(later, iterated)

    def state_of(self, weight: nn.Parameter, group: dict) -> dict[str, Tensor]:
        state = self.state[weight]
        if "step" not in state:
            for key, kept in kept_by_soap(group).items():
                zeros = kept.zeros(weight, torch.device("cpu"))
                if zeros is not None:
                    state[key] = zeros
        return state

    def move(self, weight: nn.Parameter, group: dict, gradient: Tensor, step: int) -> None:
        """Decay this rank's part of a weight, and subtract its part of the update. gradient: whole;
        step: of Adam, from 1."""
        state = self.state[weight]
        beta1, beta2 = group["betas"]
        bases = {key: basis(whole(state[key])) for key in SIDES if key in state}
        shard_of(state["exp_avg"]).lerp_(shard_of(weight.grad), 1 - beta1)
        squares = whole(state["exp_avg_sq"]).lerp(turned(gradient, bases).square(), 1 - beta2)
        write(state["exp_avg_sq"], squares)
        direction = turned(whole(state["exp_avg"]), bases) / (squares.sqrt() + group["eps"])
        update = torch.empty_like(weight)
        write(update, turned_back(direction, bases))
        # Kingma and Ba, arXiv:1412.6980, section 2, with epsilon as in the authors' code
        size = group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        shard_of(weight.data).mul_(1 - group["lr"] * group["weight_decay"])
        shard_of(weight.data).sub_(shard_of(update), alpha=size)

    def decompose(self, factors: list[Tensor], compute: Callable[[Tensor], Tensor]) -> None:
        """Replace the bases of these factors with their bases, each on one rank."""
        if not factors:
            return
        key = tuple(map(id, factors))
        if key not in self.dealt:
            self.dealt = {key: GatheredMatrices(factors, cost_of_decomposition, self.group)}
        self.dealt[key].apply([shard_of(factor) for factor in factors], compute)


def cost_of_decomposition(rows: int, columns: int) -> float:
    return float(rows) ** 3


def add_to_factors(state: dict[str, Tensor], gradient: Tensor, beta: float) -> None:
    """Add this rank's rows of G G^T and of G^T G to their averages. gradient: whole."""
    for key in SIDES:
        if key not in state:
            continue
        rows = gradient if key == "left" else gradient.mT  # [S, other] or [X, S, other]
        offset, size = box_of(state[key])
        box = [slice(o, o + n) for o, n in zip(offset[:-1], size[:-1], strict=True)]
        here = rows[tuple(box)]
        of_stack = rows[box[0]] if rows.ndim == 3 else rows
        average = shard_of(state[key])[..., : rows.shape[-2]]  # [s, S] or [x, s, S]
        average.lerp_(here @ of_stack.mT, 1 - beta)


def basis(pair: Tensor) -> Tensor:
    """[..., S, 2S] -> [..., S, S]."""
    return pair[..., pair.shape[-2] :]


def turned(x: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Turn [R, C] or [X, R, C] into the bases."""
    if "left" in bases:
        x = bases["left"].mT @ x
    return x @ bases["right"] if "right" in bases else x


def turned_back(x: Tensor, bases: dict[str, Tensor]) -> Tensor:
    return turned(x, {key: each.mT for key, each in bases.items()})


def with_mean(factor: Tensor) -> Tensor:
    """Return the mean of the eigenvalues, [X, 1, 1]."""
    return factor.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def eigenbases(pairs: Tensor) -> Tensor:
    """Return factors with their eigenbases, the largest eigenvalue first. [X, S, 2S]."""
    size = pairs.shape[-2]
    factor = pairs[..., :size]
    ridge = torch.linspace(RIDGE, 0, size, dtype=pairs.dtype, device=pairs.device).diag()
    vectors = torch.linalg.eigh(factor + ridge * with_mean(factor)).eigenvectors
    return torch.cat((factor, vectors.flip(-1)), -1)


def iterated(pairs: Tensor) -> Tensor:
    """Return factors with bases that are one step of orthogonal iteration closer to their
    eigenbases. [X, S, 2S].

    It begins with the vector of the largest eigenvalue, as it is estimated. The vectors keep their
    places, so that the second moment does: the authors sort both.
    """
    size = pairs.shape[-2]
    factor, vectors = pairs[..., :size], pairs[..., size:]
    images = factor @ vectors
    estimates = (vectors * images).sum(-2)  # [X, S], Rayleigh quotients
    order = estimates.argsort(dim=-1, descending=True)
    images = images + RIDGE * with_mean(factor) * vectors
    in_order = order[:, None].expand_as(images)
    found = torch.linalg.qr(images.gather(-1, in_order)).Q
    return torch.cat((factor, torch.empty_like(found).scatter_(-1, in_order, found)), -1)
