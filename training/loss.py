"""The output projection and cross-entropy as one function that works through the sequence in
pieces.

The [B, T, V] logits never exist as a whole, only `chunk_tokens` rows of them at a time. The
gradient is computed in the forward pass, while a piece's logits are at hand. So nothing is
recomputed, and there are no more GEMMs than in the plain loss. The vocabulary may be
sharded over tensor-parallel ranks. Then three numbers per token cross the ranks (its maximum, its
sum of exponentials, its label's logit: Megatron-LM, arXiv:1909.08053 section 3), never logits.

Shapes:  N tokens (B*T)   C tokens of a piece   D width   V vocabulary (this rank's rows of it)
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from models.kernels import precision
from parallelisms.boxes import box_of
from training.loss_passes import EAGER, LossPasses, add_matmul, capped
from training.z_loss import ZLoss

IGNORE = -100  # a label that does not count; torch's own convention


class LossOptions(NamedTuple):
    """What the loss needs in addition to tensors of tokens; the rest as in `linear_cross_entropy`."""

    chunk_tokens: int
    group: dist.ProcessGroup | None  # ranks that hold the other rows of the vocabulary
    first_row: int  # global number of weight's row 0
    z_loss: ZLoss | None
    passes: LossPasses
    weights: Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, each, options):
        """h [N, D], weight [V, D] of one dtype, labels int64 [N] -> sum of the losses, a
        scalar in float32, or in float64 if that is their type.

        each: float32 [N] that receives the tokens' losses, or None; options: LossOptions.
        """
        chunk_tokens, group, first_row, z_loss, passes, weights = options
        need_h, need_w = ctx.needs_input_grad[:2]
        # a float32 total of many pieces is off by 1e-6
        total = torch.zeros((), device=h.device, dtype=torch.float64)
        grad_h = torch.empty_like(h) if need_h else None
        grad_w = None
        one_piece = len(h) <= chunk_tokens
        wide_type = precision.wide_type(h.dtype)
        # a piece's logits, then their gradient
        narrow = h.new_empty(min(len(h), chunk_tokens), len(weight))
        # the same if h is float32. Both are reused: fresh pages cost a CPU a tenth of the loss
        wide = precision.wide(narrow) if passes.use_wide else narrow
        for first in range(0, len(h), chunk_tokens):
            piece = slice(first, first + chunk_tokens)
            hc = h[piece]
            label = labels[piece]
            own = None if weights is None else weights[piece].to(wide_type)  # [C]
            logits = torch.mm(hc, weight.t(), out=narrow[: len(hc)])  # [C, V]
            buffer = logits if wide is narrow else wide[: len(hc)]
            counts = label != IGNORE
            row = label - first_row
            # labels whose logit this rank holds
            is_local = counts & (row >= 0) & (row < len(weight))
            row = row.where(is_local, 0)[:, None]

            top = passes.largest(logits, buffer)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group)
            sums, at_label = passes.sums(logits, buffer, top, row, is_local)
            if group is not None:
                sums_and_logits = torch.stack((sums, at_label))
                dist.all_reduce(sums_and_logits, dist.ReduceOp.SUM, group)
                sums, at_label = sums_and_logits
            log_sums = sums.log()
            losses = (log_sums - at_label).where(counts, 0)  # [C]
            total += losses.sum() if own is None else losses @ own
            if each is not None:
                each[piece] = losses

            # d loss / d logits = softmax - one_hot(label), 0 where the label does not count
            if need_h or need_w:
                scale = counts / sums
                if z_loss is not None:
                    scale *= z_loss.add((log_sums + top).where(counts, 0), own)
                if own is not None:
                    scale *= own
                    is_local = is_local * own
                d_logits = passes.gradient(logits, buffer, top, scale, row, is_local)
                if grad_h is not None:
                    torch.mm(d_logits, weight, out=grad_h[piece])
                if need_w and one_piece:
                    grad_w = d_logits.t() @ hc
                elif need_w:  # summed over pieces in float32
                    if grad_w is None:
                        grad_w = torch.zeros_like(weight, dtype=wide_type)
                    add_matmul(grad_w, d_logits.t(), hc)
        ctx.save_for_backward(*(g for g in (grad_h, grad_w) if g is not None))
        ctx.needs = (need_h, need_w)
        ctx.weight_dtype = weight.dtype
        return total.to(wide_type)

    @staticmethod
    def backward(ctx, grad):
        saved = list(ctx.saved_tensors)
        grad_h = saved.pop(0) * grad if ctx.needs[0] else None
        grad_w = (saved.pop(0) * grad).to(ctx.weight_dtype) if ctx.needs[1] else None
        return grad_h, grad_w, *[None] * 3


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    each: Tensor | None = None,
    z_loss: ZLoss | None = None,
    passes: LossPasses = EAGER,
    cap: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of -log softmax(h @ weight.T)[label], float32 scalar, equal on all
    tensor-parallel ranks.

    h [B, T, D], weight [V, D], labels int64 [B, T] with -100 where a token does not count. With
    tensor parallelism h and weight arrive as DTensors, split over the sequence and over the
    vocabulary, from which this function reads all that it knows of the mesh. It returns a sum, not
    a mean: the caller divides by the tokens of the *global* batch, so that the number does not
    depend on how that batch was split.

    each: contiguous float32 [B, T] that receives every token's loss (0 where it does not count),
    for statistics.

    z_loss: its gradient is added, and the returned sum is without it.

    passes: the elementwise work on logits (training/loss_passes.py).

    weights: float64 [B * T], by which each token's loss is multiplied in the sum, but not in
    `each`; None: 1 (training/counted.py).

    cap: logits become cap * tanh(logit / cap); 0: they stay.
    """
    if cap:
        passes = capped(passes, cap)
    group = None
    first_row = 0
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        group = mesh.get_group()
        assert isinstance(h, DTensor)
        # Each rank's h gradient comes from its rows of the vocabulary only: Partial, to be summed
        # on the way back.
        h = h.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        (first_row, _), _ = box_of(weight)
        weight = weight.to_local(grad_placements=[Shard(0)])
    if each is not None:
        each = each.view(-1)
    options = LossOptions(chunk_tokens, group, first_row, z_loss, passes, weights)
    return _LinearCrossEntropy.apply(h.flatten(0, 1), weight, labels.flatten(), each, options)
