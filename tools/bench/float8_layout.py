"""A trial: factors of 8 bits laid out by a kernel of their own, so that no other pass writes bytes
far apart."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.float8_product import PRECISE, Recipe, Rounded, multiplied, rounded


@triton.jit
def _transpose(source, out, ROWS, COLUMNS, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
    tile = tl.load(source + rows[:, None] * COLUMNS + columns[None, :], inside)
    inside = (columns[:, None] < COLUMNS) & (rows[None, :] < ROWS)
    tl.store(out + columns[:, None] * ROWS + rows[None, :], tl.trans(tile), inside)


@torch.library.custom_op("plumbline::laid_out", mutates_args=())
def laid_out(matrix: Tensor) -> Tensor:
    """8 bits [rows, columns] -> the same numbers, [columns, rows]."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    out = matrix.new_empty(columns, rows)
    grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    _transpose[grid](
        matrix.view(torch.uint8), out.view(torch.uint8), rows, columns, BLOCK=128, num_warps=8
    )
    return out


@laid_out.register_fake
def _(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[1], matrix.shape[0])


def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    """In place of `_Float8Linear.backward`."""
    x, weight = ctx.saved_tensors
    recipe: Recipe = ctx.recipe
    rows = rounded(grad, recipe.of_grad, recipe, along=1)
    columns = rounded(weight, PRECISE, recipe, along=0)
    of_x = multiplied(rows, columns, grad.dtype, recipe)
    rows = rounded(grad, recipe.of_grad, recipe, along=0).transposed()
    values, scale = rounded(x, PRECISE, recipe, along=0)
    columns = Rounded(laid_out(values).t(), scale)
    return of_x, multiplied(rows, columns, grad.dtype, recipe), None, None, None
