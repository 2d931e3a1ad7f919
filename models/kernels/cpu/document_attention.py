"""Attention inside documents on a CPU, where PyTorch has no kernel for it: its kernel for whole
sequences, document by document, as one operator, so that autograd, torch.compile and selective
checkpointing see a single call.

Shapes:  B batch   T sequence   N documents of a microbatch   H query heads   K key/value heads   E head_dim
"""

import torch
from torch import Tensor

from models.kernels.cpu.causal_attention import causal_attention_backward
from models.kernels.precision import wide, wide_type

# tokens of a document from which on matmuls take 0.3 to 1 of the kernel's time; at 64 they take 1
# to 4 times of it
LONG = 256


def pieces(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute models/kernels/document_attention.py::piece_attention by PyTorch's CPU kernel, piece
    by piece."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=wide_type(q.dtype))
    for one, keys in zip(slices(starts), slices(key_starts)):
        piece, lse_of_piece = _attend(*heads_first(one, q), *heads_first(keys, k, v))
        out[one] = piece[0].transpose(0, 1)
        lse[one] = lse_of_piece[0].transpose(0, 1)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of n queries [1, H, n, E] that are the last of m positions to the keys of all [1,
    K, m, E], and its log-sum-exp [1, H, n]. The kernel masks equally many queries and keys only, so
    earlier keys are a call of their own, and the two results are merged (Dao, arXiv:2307.08691,
    section 2.3.1)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    earlier = k.shape[2] - q.shape[2]
    out, lse = kernel(q, k[:, :, earlier:], v[:, :, earlier:], 0.0, True)
    if not earlier:
        return out, lse
    out_earlier, lse_earlier = kernel(q, k[:, :, :earlier], v[:, :, :earlier], 0.0, False)
    whole = torch.logaddexp(lse, lse_earlier)
    share = (lse - whole).exp()[..., None]
    share_earlier = (lse_earlier - whole).exp()[..., None]
    return out * share + out_earlier * share_earlier, whole


def pieces_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    key_starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types. Short documents in float32: PyTorch's bfloat16 kernel takes 5
    times as long on those of 30 to 100 tokens, and about as long on those of 1,000 (AVX512-BF16,
    torch 2.13). Long ones in bfloat16 by matmuls, if all their queries are here."""
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    given = [grad, q, k, v, out]
    in_wide = [wide(x) for x in given]
    for one, keys in zip(slices(starts), slices(key_starts)):
        length = one.stop - one.start
        is_whole = keys.stop - keys.start == length
        backward = _attend_backward
        inputs = in_wide
        if q.dtype == torch.bfloat16 and is_whole and length >= LONG:
            backward = causal_attention_backward
            inputs = given
        grad_, q_, k_, v_, out_ = inputs
        grad_, q_, out_ = heads_first(one, grad_, q_, out_)
        k_, v_ = heads_first(keys, k_, v_)
        lse_ = lse[one].transpose(0, 1)[None]
        dq_, dk_, dv_ = backward(grad_, q_, k_, v_, out_, lse_)
        dq[one] = dq_[0].transpose(0, 1)
        dk[keys] = dk_[0].transpose(0, 1)
        dv[keys] = dv_[0].transpose(0, 1)
    return dq, dk, dv


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v of `_attend`. With the merged out and lse each of its two calls has its part
    of the gradient."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    earlier = k.shape[2] - q.shape[2]
    dq, dk, dv = kernel(grad, q, k[:, :, earlier:], v[:, :, earlier:], out, lse, 0.0, True)
    if not earlier:
        return dq, dk, dv
    more, dk_earlier, dv_earlier = kernel(
        grad, q, k[:, :, :earlier], v[:, :, :earlier], out, lse, 0.0, False
    )
    return dq + more, torch.cat((dk_earlier, dk), 2), torch.cat((dv_earlier, dv), 2)


@torch.library.custom_op("plumbline::document_attention", mutates_args=())
def document_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention within each document on CPU: q [B*T, H, E], k, v [B*T, K, E], starts int32
    [N + 1] -> output [B*T, H, E] and log-sum-exp, float32 [B*T, H], which backward needs.

    PyTorch's own CPU kernel, document by document, as one operator: the loop is hidden from
    autograd (which would record and concatenate N pieces), from torch.compile (which would unroll
    it and recompile for each batch) and from selective checkpointing (which keeps one result).
    """
    return pieces(q, k, v, starts, starts)


@torch.library.custom_op("plumbline::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types."""
    return pieces_backward(grad, q, k, v, out, lse, starts, starts)


def slices(starts: Tensor) -> list[slice]:
    ends = starts.tolist()
    return [slice(a, b) for a, b in zip(ends, ends[1:])]


def heads_first(one: slice, *tensors: Tensor) -> list[Tensor]:
    """Return one document of each [B*T, heads, E], as the kernels want it: [1, heads, length, E]; a
    view."""
    return [x[one].transpose(0, 1)[None] for x in tensors]


@document_attention.register_fake
def _(q, k, v, starts):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide_type(q.dtype))


@document_attention_backward.register_fake
def _(grad, q, k, v, out, lse, starts):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, starts = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx, grad, _):
    return *document_attention_backward(grad, *ctx.saved_tensors), None


document_attention.register_autograd(_backward, setup_context=_keep_for_backward)
