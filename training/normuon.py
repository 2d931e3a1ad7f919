"""NorMuon (Li et al., arXiv:2510.05491): Muon, whose orthogonalised update is divided, row by row, by
the root of an average of the row's mean square.

Algorithm 1, lines 7 to 9: v_t = beta2 v_(t-1) + (1 - beta2) mean over columns of O^2, and O becomes
O / (sqrt(v_t) + eps). The Frobenius norm stays that of O, as in the authors' code
(github.com/zichongli5/NorMuon), so that learning rates of Muon fit; algorithm 1 sets it to
0.2 sqrt(rows * columns), which it is with `adjust_lr_fn = "match_rms_adamw"` up to the error of the
Newton-Schulz iteration.

State of a weight [R, C], besides Muon's: `second_momentum_buffer` [R], sharded as the rows are; of a
stack of experts' matrices [X, R, C] it is [X, R]. Where ranks hold parts of a row, or of the rows,
sums over them are exchanged: one number of each row, and two of each matrix.

Shapes:  X matrices in a stack   R, C rows and columns   r, c of them on this rank
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.boxes import cuts, shard_of
from training.kept import Kept, Shape
from training.muon import Muon

# What a root is at least, in the authors' code.
EPSILON = 1e-10


def rows(shape: Shape) -> Shape | None:
    """Return the shape of one number for each row of a matrix, or of a stack of matrices."""
    return shape[:-1] if len(shape) > 1 else None


ROW_AVERAGES = Kept(rows, axes=(0,))


class NorMuon(Muon):
    """NorMuon for the groups whose "rule" is "NorMuon", fused AdamW for the others. A group has
    Muon's options, and beta2."""

    RULE = "NorMuon"

    def normalise(
        self,
        weights: list[nn.Parameter],
        groups: list[dict],
        updates: list[Tensor],
        skip: Tensor | None,
    ) -> None:
        """Divide each row of the updates ([r, c] or [x, r, c]) by the root of its average, and keep
        the norm of each matrix. The averages stay as they are where `skip` is true."""
        squares = []
        for update in updates:
            wide = update.to(torch.promote_types(update.dtype, torch.float32))
            squares.append(wide.square().sum(-1))  # [r] or [x, r]
        sum_over_parts(weights, squares, axis=-1)
        divisors = []
        for weight, group, sums in zip(weights, groups, squares, strict=True):
            divisors.append(self.add_squares(weight, group, sums, skip))  # [r] or [x, r]
        norms = []
        for sums, divisor in zip(squares, divisors, strict=True):
            after = sums / divisor.square()
            norms.append(torch.stack((sums.sum(-1), after.sum(-1))))  # [2] or [2, x]
        sum_over_parts(weights, norms, axis=-2)
        for update, divisor, (before, after) in zip(updates, divisors, norms, strict=True):
            factor = before.sqrt() / (after.sqrt() + EPSILON)  # a scalar or [x]
            of_rows = factor[..., None] / divisor  # [r] or [x, r]
            update.mul_(of_rows[..., None])

    def add_squares(
        self, weight: nn.Parameter, group: dict, sums: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Add each row's mean square to its average. sums: of squares, [r] or [x, r]. Returns what
        the rows are divided by."""
        state = self.state[weight]
        if "second_momentum_buffer" not in state:
            state["second_momentum_buffer"] = ROW_AVERAGES.zeros(weight, weight.device)
        average = shard_of(state["second_momentum_buffer"])
        mean = (sums / weight.shape[-1]).to(average.dtype)
        if skip is not None:
            mean = torch.where(skip, average, mean)  # a step towards itself leaves it as it is
        average.lerp_(mean, 1 - group["beta2"])
        return average.to(sums.dtype).sqrt() + EPSILON


def sum_over_parts(weights: list[nn.Parameter], sums: list[Tensor], axis: int) -> None:
    """Sum over the ranks that hold different parts of this axis of a weight (-1: columns, -2: rows),
    in place: one all-reduce for all weights that the same ranks hold."""
    split: dict[tuple, list[Tensor]] = {}
    for weight, part in zip(weights, sums, strict=True):
        for dim in dims_that_split(weight, weight.ndim + axis):
            split.setdefault((weight.device_mesh, dim), []).append(part)
    for (mesh, dim), parts in split.items():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=mesh.get_group(dim))
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def dims_that_split(weight: Tensor, axis: int) -> list[int]:
    """Return the dimensions of a weight's mesh, by number, whose ranks hold other parts of this
    axis."""
    if not isinstance(weight, DTensor):
        return []
    return [mesh_dim for cut, mesh_dim in cuts(weight) if cut == axis]
