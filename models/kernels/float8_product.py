"""A linear layer whose three GEMMs multiply numbers of 8 bits (Micikevicius et al.,
arXiv:2209.05433).

Each GEMM rounds both of its factors on the way in, by scales of that moment: the largest number of
a matrix (tensorwise), or of each row that a dot product runs along (rowwise), becomes the largest
that 8 bits hold. `torch._scaled_mm` multiplies, adds up in float32, undoes the scales and writes
the wide type. This is plain PyTorch, so torch.compile joins the rounding with what is before it.

Shapes:  M tokens   K inputs   N outputs
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PRECISE = torch.float8_e4m3fn  # three bits of mantissa, up to 448
LARGE = torch.float8_e5m2  # two bits of mantissa, up to 57,344
# A matrix of zeros has a scale as well, and it is finite.
SMALLEST = 1e-30
SIGN_AND_EXPONENT = -(2**23)  # as int32, of a float32


class Recipe(NamedTuple):
    """Rounds and multiplies so. emulate: multiply the rounded numbers in float32, which any device
    can."""

    by_row: bool  # a scale for each row, a power of two; or one for the whole matrix
    of_grad: torch.dtype  # PRECISE or LARGE
    emulate: bool = False


# As torchao does by these names.
RECIPES = {"tensorwise": Recipe(False, LARGE), "rowwise": Recipe(True, PRECISE)}


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """Multiply in float8: x [..., K], weight [N, K], bias [N] -> [..., N] in the type of x. K and N
    must be multiples of 16, and for the gradient of the weight so must the number of tokens."""
    product = _Float8Linear.apply(x.flatten(0, -2), weight, *recipe)
    out = product.view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


@torch._dynamo.allow_in_graph  # AOTAutograd looks inside
class _Float8Linear(torch.autograd.Function):
    """Save the wide factors: backward casts them to 8 bits again, along the other dimension."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, *recipe: Any) -> Tensor:
        """recipe: the fields of a Recipe."""
        recipe = Recipe(*recipe)
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = rounded(x, PRECISE, recipe, along=1)
        columns = rounded(weight, PRECISE, recipe, along=1)
        return multiplied(rows, columns.transposed(), x.dtype, recipe, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        recipe = ctx.recipe
        rows = rounded(grad, recipe.of_grad, recipe, along=1)  # of M
        columns = rounded(weight, PRECISE, recipe, along=0)  # of K
        of_x = multiplied(rows, columns, grad.dtype, recipe)
        rows = rounded(grad, recipe.of_grad, recipe, along=0).transposed()  # of N
        columns = rounded(x, PRECISE, recipe, along=0)  # of K
        return of_x, multiplied(rows, columns, grad.dtype, recipe), None, None, None


class Rounded(NamedTuple):
    """A matrix in 8 bits, each row or column (or all) to be multiplied with its scale."""

    values: Tensor
    scale: Tensor  # float32, [] or [the places of one side]

    def transposed(self) -> "Rounded":
        return Rounded(self.values.t(), self.scale)


def rounded(matrix: Tensor, to: torch.dtype, recipe: Recipe, along: int) -> Rounded:
    """Round to float8 with scales. along: the side that the product sums over, so by_row there is a
    scale for each place of the other."""
    magnitude = matrix.abs()
    most = magnitude.amax(along, keepdim=True) if recipe.by_row else magnitude.amax()
    factor = torch.finfo(to).max / most.float().clamp(min=SMALLEST)
    if recipe.by_row:
        factor = (factor.view(torch.int32) & SIGN_AND_EXPONENT).view(torch.float32)
    # Nothing to clip: what the factor's rounding adds is less than what the 8 bits round away.
    values = (matrix.float() * factor).to(to)
    return Rounded(values, factor.reciprocal().squeeze())


def multiplied(
    a: Rounded, b: Rounded, out: torch.dtype, recipe: Recipe, fast: bool = False
) -> Tensor:
    """Multiply a [rows, K] by b [K, columns]. fast: sum up within the tensor cores, whose sums have
    14 bits; otherwise these are added in float32 at every 128 numbers."""
    of_rows = a.scale.unsqueeze(1) if recipe.by_row else a.scale
    of_columns = b.scale.unsqueeze(0) if recipe.by_row else b.scale
    if recipe.emulate:
        return (a.values.float() @ b.values.float() * of_rows * of_columns).to(out)
    # What the kernels take: both with the side that is summed over contiguous in memory.
    rows = a.values.contiguous()
    columns = b.values.t().contiguous().t()
    return torch._scaled_mm(rows, columns, of_rows, of_columns, out_dtype=out, use_fast_accum=fast)
