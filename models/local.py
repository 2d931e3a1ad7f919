"""The one place where a model meets a weight of which this rank holds a part."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def local(weight: Tensor, factor: float = 1.0) -> Tensor:
    """Return a weight as forward multiplies with it: of a DTensor this rank's part, as a plain
    tensor; a plain weight as it is. Backward multiplies its gradient by `factor`.

    A weight that every rank holds whole works on other tokens or columns on each of them, so its
    gradient here is one term of a sum over the ranks. FSDP takes that sum once per reduction.
    """
    if isinstance(weight, DTensor):
        gradient = [Partial() if kind.is_replicate() else kind for kind in weight.placements]
        weight = weight.to_local(grad_placements=gradient)
    return weight if factor == 1.0 else ScaledGradient.apply(weight, factor)


class ScaledGradient(torch.autograd.Function):
    """The identity; backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
