"""The operators that only CUDA has, written out for tensors on a CPU: attention kernels, RMSNorm's
backward, matmuls with another output type. lab/simulate/kernels.py hands them aliases of the
device's memory.

Shapes:  B batch   H query heads   K key/value heads   T queries   S keys   E head_dim   N documents
  n tokens of all
"""

from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten
NOTHING = torch.empty(0)


def _state_of_random_numbers() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _one_head_each(x: Tensor, heads: int) -> Tensor:
    """[B, K, S, E] -> [B, H, S, E]: the keys or values that each query head uses."""
    return x.repeat_interleave(heads // x.shape[1], 1).contiguous()


def _sum_over_groups(grad: Tensor, heads: int) -> Tensor:
    """[B, H, S, E] -> [B, K, S, E]"""
    return grad.unflatten(1, (heads, -1)).sum(2)


# ------------------------------------------------------------------ F.scaled_dot_product_attention


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E], and its log-sum-exp, float32 [B, H, T]."""
    heads = q.shape[1]
    k = _one_head_each(k, heads)
    v = _one_head_each(v, heads)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q.contiguous(), k, v, 0.0, causal, scale=scale
    )
    return out, lse.float()


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[1]
    groups = k.shape[1]
    k = _one_head_each(k, heads)
    v = _one_head_each(v, heads)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad.contiguous(), q, k, v, out, lse.float(), 0.0, causal, scale=scale)
    return dq, _sum_over_groups(dk, groups), _sum_over_groups(dv, groups)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = _attend(q, k, v, is_causal, scale)
    return (
        out,
        lse,
        NOTHING,
        NOTHING,
        q.shape[2],
        k.shape[2],
        _state_of_random_numbers(),
        NOTHING,
        NOTHING,
    )


def flash_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    return _attend_backward(grad, q, k, v, out, lse, is_causal, scale)


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = _attend(q, k, v, is_causal, scale)
    return out, lse, _state_of_random_numbers()[0], _state_of_random_numbers()[0]


def efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    return *_attend_backward(grad, q, k, v, out, lse, is_causal, scale), NOTHING


def cudnn(
    q,
    k,
    v,
    bias,
    compute_lse,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    out, lse = _attend(q, k, v, is_causal, scale)
    state = _state_of_random_numbers()
    return (
        out,
        lse[..., None],
        NOTHING,
        NOTHING,
        q.shape[2],
        k.shape[2],
        state[0].clone(),
        state[1].clone(),
        NOTHING,
    )


def cudnn_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    bias,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    return _attend_backward(grad, q, k, v, out, lse[..., 0], is_causal, scale)


# ------------------------------------------------------------------ FlashAttention's own interface

Part = int | slice


def _parts(q: Tensor, cum_q: Tensor | None, cum_k: Tensor | None) -> Iterator[tuple[Part, Part]]:
    """Return the positions of the queries and the keys of each sequence: rows of a batch, or slices
    of packed documents."""
    if cum_q is None:
        for row in range(len(q)):
            yield row, row
        return
    of_queries = cum_q.tolist()
    of_keys = cum_k.tolist()
    for i in range(len(of_queries) - 1):
        yield slice(of_queries[i], of_queries[i + 1]), slice(of_keys[i], of_keys[i + 1])


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, left: int, right: int) -> Tensor:
    """q [T, H, E], k [S, K, E] -> float32 [H, T, S]. A causal mask is aligned to the last query and
    the last key. left, right: how many keys before and after its own a query sees; -1: all."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)  # [S, H, E]
    scores = torch.einsum("the,she->hts", q.float(), keys) * scale
    if causal:
        right = 0
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if right >= 0:
        seen = seen.tril(len(k) - len(q) + right)
    if left >= 0:
        seen = seen.triu(len(k) - len(q) - left)
    return scores.masked_fill(~seen, -torch.inf)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def packed(
    q,
    k,
    v,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    """q [n, H, E] or [B, T, H, E] -> output of that shape, log-sum-exp [H, n] or [B, H, T]"""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = q.shape[-2]
    window = _window(window_size_left, window_size_right)
    out = torch.zeros_like(q)
    lse = torch.zeros((heads, len(q)) if cum_q is not None else (len(q), heads, q.shape[1]))
    for at, keys_at in _parts(q, cum_q, cum_k):
        if q[at].numel() == 0 or k[keys_at].numel() == 0:
            continue
        scores = _scores(q[at], k[keys_at], is_causal, scale, *window)
        total = scores.logsumexp(-1)  # [H, T]
        values = v[keys_at].float().repeat_interleave(heads // v.shape[-2], 1)
        weights = (scores - total[..., None]).exp().nan_to_num()
        out[at] = torch.einsum("hts,she->the", weights, values).to(q.dtype)
        if cum_q is None:
            lse[at] = total
        else:
            lse[:, at] = total
    return out, lse, _state_of_random_numbers(), NOTHING, NOTHING


def packed_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    """Return the gradients of q, k, v; formulas of Dao et al., arXiv:2205.14135, appendix B.2."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = _window(window_size_left, window_size_right)
    groups = k.shape[-2]
    copies = q.shape[-2] // groups
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for at, keys_at in _parts(q, cum_q, cum_k):
        if q[at].numel() == 0 or k[keys_at].numel() == 0:
            continue
        total = lse[at] if cum_q is None else lse[:, at]
        # [H, T, S]
        scores = _scores(q[at], k[keys_at], is_causal, scale, *window)
        weights = (scores - total[..., None]).exp().nan_to_num()
        upstream = grad[at].float()  # [T, H, E]
        keys = k[keys_at].float().repeat_interleave(copies, 1)
        values = v[keys_at].float().repeat_interleave(copies, 1)
        through_out = (upstream * out[at].float()).sum(-1).T  # [H, T]
        of_weights = torch.einsum("the,she->hts", upstream, values)
        of_scores = weights * (of_weights - through_out[..., None]) * scale
        of_keys = torch.einsum("hts,the->she", of_scores, q[at].float())
        of_values = torch.einsum("hts,the->she", weights, upstream)
        dq[at] = torch.einsum("hts,she->the", of_scores, keys).to(q.dtype)
        dk[keys_at] = of_keys.unflatten(1, (groups, copies)).sum(2).to(k.dtype)
        dv[keys_at] = of_values.unflatten(1, (groups, copies)).sum(2).to(v.dtype)
    return dq, dk, dv


# ------------------------------------------------------------------------------------------ others


def rms_norm_backward(grad, x, normalized_shape, rstd, weight, mask):
    """Zhang and Sennrich, arXiv:1910.07467, differentiated by hand."""
    dims = tuple(range(-len(normalized_shape), 0))
    normalized = x.float() * rstd.float()
    of_normalized = grad.float() if weight is None else grad.float() * weight.float()
    along = (of_normalized * normalized).mean(dims, keepdim=True)
    of_x = ((of_normalized - normalized * along) * rstd.float()).to(x.dtype) if mask[0] else None
    of_weight = None
    if mask[1] and weight is not None:
        rows = tuple(range(x.ndim - len(normalized_shape)))
        of_weight = (grad.float() * normalized).sum(rows).to(weight.dtype)
    return of_x, of_weight


def matmul(a, b, out_dtype):
    return (a.float() @ b.float()).to(out_dtype)


def matmul_into(a, b, out_dtype, *, out):
    return out.copy_(matmul(a, b, out_dtype))


def sum_and_matmul(x, a, b, out_dtype, beta=1, alpha=1):
    return (beta * x.float() + alpha * (a.float() @ b.float())).to(out_dtype)


def sum_and_matmul_into(x, a, b, out_dtype, beta=1, alpha=1, *, out):
    return out.copy_(sum_and_matmul(x, a, b, out_dtype, beta, alpha))


WRITTEN_OUT = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten::_flash_attention_forward": packed,
    "aten::_flash_attention_backward": packed_backward,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::mm.dtype": matmul,
    "aten::mm.dtype_out": matmul_into,
    "aten::bmm.dtype": matmul,
    "aten::bmm.dtype_out": matmul_into,
    "aten::addmm.dtype": sum_and_matmul,
    "aten::addmm.dtype_out": sum_and_matmul_into,
    "aten::baddbmm.dtype": sum_and_matmul,
}
