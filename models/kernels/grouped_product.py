"""The product of rows with as many weights as there are groups of rows, as one operator.

PyTorch's `grouped_mm` is what runs on a GPU in 16 bits. Elsewhere it is a loop over the groups: `grouped_mm` is not faster on
a CPU, refuses sizes that are no multiple of 16 bytes, and cannot be traced in float32 (torch 2.13). One operator, so that
neither autograd nor torch.compile unrolls the loop, and selective checkpointing knows its name.

Shapes:  M rows   X groups   D width of a row   F width of a result
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def fits_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[1] % 8 == weight.shape[1] % 8 == 0


@torch.library.custom_op("plumbline::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows [M, D], group after group; weight [X, F, D]; counts int64 [X], the rows of each group, M in sum -> [M, F]: each row
    times the transposed weight of its group."""
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    if fits_grouped_mm(rows, weight):
        return F.grouped_mm(rows, weight.mT, offs=counts.cumsum(0).int())
    out = rows.new_empty(len(rows), weight.shape[1])
    for part, group, into in zip(_groups(rows, counts), weight.unbind(0), _groups(out, counts), strict=True):
        torch.mm(part, group.t(), out=into)
    return out


@torch.library.custom_op("plumbline::grouped_product_backward", mutates_args=())
def grouped_product_backward(grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Grad of the rows [M, D] and of the weight [X, F, D].

    A group without rows has a gradient of 0. The kernel of Blackwell GPUs leaves it as the memory was (pytorch#172439,
    pytorch#193633, cutlass#2674), so it is set here, by a mask: which groups are empty is known to the GPU alone.
    """
    if not len(rows):
        return rows.new_empty(rows.shape), weight.new_zeros(weight.shape)
    grad = grad.contiguous()
    if fits_grouped_mm(rows, weight):
        ends = counts.cumsum(0).int()
        of_weight = F.grouped_mm(grad.t(), rows, offs=ends)
        of_weight.masked_fill_((counts == 0)[:, None, None], 0)
        return F.grouped_mm(grad, weight, offs=ends), of_weight
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight, memory_format=torch.contiguous_format)
    parts = zip(_groups(grad, counts), _groups(rows, counts), _groups(of_rows, counts), strict=True)
    for (own, part, into), group, gradient in zip(parts, weight.unbind(0), of_weight.unbind(0), strict=True):
        torch.mm(own, group, out=into)
        torch.mm(own.t(), part, out=gradient)
    return of_rows, of_weight


def _groups(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return x.split(counts.tolist())


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_product_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), weight.new_empty(weight.shape)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_product_backward(grad, *ctx.saved_tensors), None


grouped_product.register_autograd(_backward, setup_context=_keep)
