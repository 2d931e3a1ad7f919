"""The operators that only CUDA has, written out for tensors on a CPU: attention kernels, RMSNorm's
backward, matmuls with another output type. lab/simulate/kernels.py hands them aliases of the
device's memory.

Shapes:  B batch   H query heads   K key/value heads   T queries   S keys   E head_dim   N documents
  n tokens of all
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NOTHING = torch.empty(0)
Arguments = SimpleNamespace  # of an operator: its arguments, by their names in its schema


def _state_of_random_numbers() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _one_head_each(x: Tensor, heads: int) -> Tensor:
    """[B, K, S, E] -> [B, H, S, E]: the keys or values that each query head uses."""
    return x.repeat_interleave(heads // x.shape[1], 1).contiguous()


def _sum_over_groups(grad: Tensor, heads: int) -> Tensor:
    """[B, H, S, E] -> [B, K, S, E]"""
    return grad.unflatten(1, (heads, -1)).sum(2)


# ------------------------------------------------------------------ F.scaled_dot_product_attention


def _mask(call: Arguments) -> Tensor | None:
    """Return what is added to the scores, if anything is. Raises NotImplementedError for dropout."""
    if call.dropout_p:
        raise NotImplementedError("a simulated GPU's attention has no dropout")
    bias = getattr(call, "attn_bias", None)  # FlashAttention takes none
    return bias if bias is not None and bias.numel() else None


def _attend(call: Arguments) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, E], and its log-sum-exp, float32 [B, H, T]."""
    heads = call.query.shape[1]
    k = _one_head_each(call.key, heads)
    v = _one_head_each(call.value, heads)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        call.query.contiguous(), k, v, 0.0, call.is_causal, attn_mask=_mask(call), scale=call.scale
    )
    return out, lse.float()


def _attend_backward(call: Arguments, grad: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = call.query.shape[1]
    groups = call.key.shape[1]
    k = _one_head_each(call.key, heads)
    v = _one_head_each(call.value, heads)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    known = (grad.contiguous(), call.query, k, v, call.out, lse.float())
    dq, dk, dv = backward(*known, 0.0, call.is_causal, attn_mask=_mask(call), scale=call.scale)
    return dq, _sum_over_groups(dk, groups), _sum_over_groups(dv, groups)


def flash(call: Arguments) -> tuple:
    out, lse = _attend(call)
    lengths = call.query.shape[2], call.key.shape[2]
    return out, lse, NOTHING, NOTHING, *lengths, _state_of_random_numbers(), NOTHING, NOTHING


def flash_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return _attend_backward(call, call.grad_out, call.logsumexp)


def efficient(call: Arguments) -> tuple:
    out, lse = _attend(call)
    return out, lse, _state_of_random_numbers()[0], _state_of_random_numbers()[0]


def efficient_backward(call: Arguments) -> tuple:
    return *_attend_backward(call, call.grad_out_, call.logsumexp), NOTHING


def cudnn(call: Arguments) -> tuple:
    out, lse = _attend(call)
    lengths = call.query.shape[2], call.key.shape[2]
    seed, offset = _state_of_random_numbers().unbind()
    more = (NOTHING, NOTHING, *lengths, seed.clone(), offset.clone(), NOTHING)
    return out, lse[..., None], *more


def cudnn_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return _attend_backward(call, call.grad_out, call.logsumexp[..., 0])


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


def _window(call: Arguments) -> tuple[int, int]:
    sides = call.window_size_left, call.window_size_right
    left, right = (-1 if side is None else side for side in sides)
    return left, right


def packed(call: Arguments) -> tuple:
    """query [n, H, E] or [B, T, H, E] -> output of that shape, log-sum-exp [H, n] or [B, H, T]"""
    q, k, v = call.query, call.key, call.value
    cum_q = call.cum_seq_q
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    heads = q.shape[-2]
    window = _window(call)
    out = torch.zeros_like(q)
    lse = torch.zeros((heads, len(q)) if cum_q is not None else (len(q), heads, q.shape[1]))
    for at, keys_at in _parts(q, cum_q, call.cum_seq_k):
        if q[at].numel() == 0 or k[keys_at].numel() == 0:
            continue
        scores = _scores(q[at], k[keys_at], call.is_causal, scale, *window)
        total = scores.logsumexp(-1)  # [H, T]
        values = v[keys_at].float().repeat_interleave(heads // v.shape[-2], 1)
        weights = (scores - total[..., None]).exp().nan_to_num()
        out[at] = torch.einsum("hts,she->the", weights, values).to(q.dtype)
        if cum_q is None:
            lse[at] = total
        else:
            lse[:, at] = total
    return out, lse, _state_of_random_numbers(), NOTHING, NOTHING


def packed_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; formulas of Dao et al., arXiv:2205.14135,
    appendix B.2."""
    q, k, v = call.query, call.key, call.value
    cum_q = call.cum_seq_q
    lse = call.logsumexp
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    window = _window(call)
    groups = k.shape[-2]
    copies = q.shape[-2] // groups
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for at, keys_at in _parts(q, cum_q, call.cum_seq_k):
        if q[at].numel() == 0 or k[keys_at].numel() == 0:
            continue
        total = lse[at] if cum_q is None else lse[:, at]
        # [H, T, S]
        scores = _scores(q[at], k[keys_at], call.is_causal, scale, *window)
        weights = (scores - total[..., None]).exp().nan_to_num()
        upstream = call.grad_out[at].float()  # [T, H, E]
        keys = k[keys_at].float().repeat_interleave(copies, 1)
        values = v[keys_at].float().repeat_interleave(copies, 1)
        through_out = (upstream * call.out[at].float()).sum(-1).T  # [H, T]
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


def by_name(name: str, compute: Callable[[Arguments], tuple]) -> Callable:
    """Return a function that is called as the operator is, and gives `compute` its arguments by
    name, those that are left out too."""
    arguments = getattr(aten, name.removeprefix("aten::")).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def operator(*args: Any, **kwargs: Any) -> tuple:
        return compute(Arguments(**defaults | dict(zip(defaults, args, strict=False)) | kwargs))

    return operator


ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "aten::_flash_attention_forward": packed,
    "aten::_flash_attention_backward": packed_backward,
}
WRITTEN_OUT = {name: by_name(name, compute) for name, compute in ATTENTION.items()} | {
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::mm.dtype": matmul,
    "aten::mm.dtype_out": matmul_into,
    "aten::bmm.dtype": matmul,
    "aten::bmm.dtype_out": matmul_into,
    "aten::addmm.dtype": sum_and_matmul,
    "aten::addmm.dtype_out": sum_and_matmul_into,
    "aten::baddbmm.dtype": sum_and_matmul,
}
