"""Grouped GEMM: each group of rows is multiplied with another weight, as one operator.

PyTorch's `grouped_mm` is what runs on a GPU in 16 bits. Elsewhere it is a loop over the groups:
`grouped_mm` is not faster on a CPU, refuses sizes that are no multiple of 16 bytes, and cannot be
traced in float32 (torch 2.13). One operator, so that neither autograd nor torch.compile unrolls the
loop, and selective checkpointing knows its name.

Shapes:  M rows   X groups   D width of a row   F width of a result
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ONES = 8  # columns of ones: the narrowest rows of 16 bits that the kernel takes


class AdaptedWeight(NamedTuple):
    """A weight with its low-rank adapter (models/lora.py). On a GPU the kernel wants a
    rank that is a multiple of 8."""

    weight: Tensor  # [X, F, D]
    a: Tensor  # [X, rank, D]
    b: Tensor  # [X, F, rank]
    scale: float


def fits_grouped_mm(rows: Tensor, width: int) -> bool:
    """Return whether torch's grouped GEMM takes these operands. width: of a result, F."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[1] % 8 == width % 8 == 0


def grouped_product(rows: Tensor, weight: Tensor | AdaptedWeight, counts: Tensor) -> Tensor:
    """Multiply each row by the transposed weight of its group: rows [M, D], group after group;
    weight [X, F, D]; counts int64 [X], the rows of each group, M in sum -> [M, F].

    The gradients of the rows and of the weight are two nodes of autograd's graph, as they are two
    GEMMs. A node with both would compute both whenever a backward needs one of them: twice in a
    pipeline that splits the backward (parallelisms/pp.py).
    """
    if isinstance(weight, AdaptedWeight):
        narrow = weight.scale * grouped_product(rows, weight.a, counts)  # [M, rank]
        of_adapter = grouped_product(narrow, weight.b, counts)
        return grouped_product(rows, weight.weight, counts) + of_adapter
    product = _grouped_product(rows, weight.detach(), counts)
    return _Joined.apply(product, _OfWeight.apply(weight, rows.detach(), counts))


class _OfWeight(torch.autograd.Function):
    """Nothing in forward, in the shape of the result. Its gradient is the result's, from which it
    computes the weight's."""

    @staticmethod
    def forward(ctx, weight: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, counts)
        # [M, F], expanded from one number; only its shape is used
        return rows.new_empty(()).expand(rows.shape[0], weight.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grouped_product_backward_weight(grad, *ctx.saved_tensors), None, None


class _Joined(torch.autograd.Function):
    """The result. Both its parts get its gradient."""

    @staticmethod
    def forward(ctx, product: Tensor, of_weight: Tensor) -> Tensor:
        return product.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def add_bias_of_group(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Add to each row the bias of its group: rows [M, F], group after group; bias [X, F]; counts as
    above -> [M, F]. No host-device sync."""
    return _AddBias.apply(rows, bias, counts)


class _AddBias(torch.autograd.Function):
    """The gradient of a bias is a sum over its rows. It is computed as a grouped GEMM with ones,
    whose result does not depend on the order of threads, as that of atomic additions would."""

    @staticmethod
    def forward(ctx, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return rows + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (counts,) = ctx.saved_tensors
        ones = grad.new_ones(grad.shape[0], ONES)
        return grad, grouped_product_backward_weight(grad, ones, counts)[..., 0], None


@torch.library.custom_op("plumbline::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute `grouped_product` without a gradient for the weight."""
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    if fits_grouped_mm(rows, weight.shape[1]):
        return F.grouped_mm(rows, weight.mT, offs=counts.cumsum(0).int())
    out = rows.new_empty(len(rows), weight.shape[1])
    for part, group, into in zip(
        _groups(rows, counts), weight.unbind(0), _groups(out, counts), strict=True
    ):
        torch.mm(part, group.t(), out=into)
    return out


@torch.library.custom_op("plumbline::grouped_product_backward_rows", mutates_args=())
def grouped_product_backward_rows(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Grad of the rows [M, D], from that of the result [M, F]."""
    if not len(grad):
        return grad.new_empty(0, weight.shape[2])
    grad = grad.contiguous()
    if fits_grouped_mm(grad, weight.shape[2]):
        return F.grouped_mm(grad, weight, offs=counts.cumsum(0).int())
    of_rows = grad.new_empty(len(grad), weight.shape[2])
    parts = _groups(grad, counts), weight.unbind(0), _groups(of_rows, counts)
    for own, group, into in zip(*parts, strict=True):
        torch.mm(own, group, out=into)
    return of_rows


@torch.library.custom_op("plumbline::grouped_product_backward_weight", mutates_args=())
def grouped_product_backward_weight(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Grad of the weight [X, F, D], from that of the result [M, F].

    A group without rows has a gradient of 0. The kernel of Blackwell GPUs leaves it as the memory
    was (pytorch#172439, pytorch#193633, cutlass#2674), so it is set here, by a mask: which groups
    are empty is known to the GPU alone.
    """
    shape = len(counts), grad.shape[1], rows.shape[1]
    if not len(rows):
        return rows.new_zeros(shape)
    grad = grad.contiguous()
    if fits_grouped_mm(rows, grad.shape[1]):
        of_weight = F.grouped_mm(grad.t(), rows, offs=counts.cumsum(0).int())
        return of_weight.masked_fill_((counts == 0)[:, None, None], 0)
    of_weight = rows.new_empty(shape)
    parts = _groups(grad, counts), _groups(rows, counts), of_weight.unbind(0)
    for own, part, into in zip(*parts, strict=True):
        torch.mm(own.t(), part, out=into)
    return of_weight


def _groups(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return x.split(counts.tolist())


@_grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_product_backward_rows.register_fake
def _(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


@grouped_product_backward_weight.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1])


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    _, weight, counts = inputs
    ctx.save_for_backward(weight, counts)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return grouped_product_backward_rows(grad, *ctx.saved_tensors), None, None


_grouped_product.register_autograd(_backward, setup_context=_keep)
