"""Causal attention over whole windows, with a faster backward for bfloat16 on a CPU.

You can skip this file. `causal_attention` is `F.scaled_dot_product_attention(q, k, v,
is_causal=True)`, and on a GPU it is nothing else. All of the rest replaces the backward of
PyTorch's CPU kernel in bfloat16, which reaches a tenth of the rate of the matrix products around
it; the result is the same up to rounding.

Shapes:  B batch   T sequence   H query heads   K key/value heads   G = H / K   E head_dim
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 128  # keys of a tile
TILE = 2**20  # scores of a tile, for each thread: they stay in a core's cache


@torch.library.custom_op("plumbline::causal_attention_backward", mutates_args=())
def cpu_causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types; grad, q and out are [B, H, T, E], k and v [B, K, T, E], lse
    float32 [B, H, T].

    Five products per tile of keys (Dao, arXiv:2307.08691, algorithm 2), by the library that
    multiplies all other matrices: PyTorch's kernel reaches a tenth of that rate on CPU in bfloat16.
    Tiles are bfloat16, as the products return them. What is subtracted from two of them (lse from
    scores; delta, the rows' sums of grad * out, from grad v^T) is two more columns of the factors,
    a bfloat16 and what that leaves of it: so it happens within the product, in float32, before it
    is rounded. One operator, so that neither autograd nor torch.compile unrolls the loop.
    """
    (B, H, T, E), K = q.shape, k.shape[1]
    scale, groups, heads = 1 / math.sqrt(E), (B * K, H // K, T), (B * K, T, E)
    delta = (grad * out.float()).sum(-1)
    less = q.new_full((B, K, T, 2), -1)
    x = torch.cat((q * scale, _in_two(lse)), -1).view(*groups, E + 2)
    y = torch.cat((grad, _in_two(delta)), -1).view(*groups, E + 2)
    k, v = (torch.cat((t, less), -1).view(B * K, T, E + 2) for t in (k, v))
    dq, dk, dv = torch.zeros(*groups, E), q.new_empty(heads), q.new_empty(heads)
    later = q.new_full((COLUMNS, COLUMNS), -math.inf).triu_(1)
    for a in range(0, T, COLUMNS):  # keys a ... b, and the queries that see them: a ... T
        b = min(a + COLUMNS, T)
        several = max(1, TILE * torch.get_num_threads() // (groups[1] * (T - a) * (b - a)))
        for first in range(0, B * K, several):
            h = slice(first, first + several)
            # [heads, G (T - a), E + 2]
            q_, grad_ = x[h, :, a:].flatten(1, 2), y[h, :, a:].flatten(1, 2)
            scores = torch.bmm(q_, k[h, a:b].mT)  # [heads, G (T - a), b - a], less lse
            scores.view(-1, groups[1], T - a, b - a)[:, :, : b - a] += later[: b - a, : b - a]
            p = scores.exp_()
            ds = torch.bmm(grad_, v[h, a:b].mT).mul_(p)
            dv[h, a:b] = torch.bmm(p.mT, grad_[..., :E])
            dk[h, a:b] = torch.bmm(ds.mT, q_[..., :E])
            dq[h, :, a:] += torch.bmm(ds, k[h, a:b, :E]).view(-1, groups[1], T - a, E)
    return dq.mul_(scale).to(q.dtype).view(B, H, T, E), dk.view(B, K, T, E), dv.view(B, K, T, E)


def _in_two(x: Tensor) -> Tensor:
    """Float32 [...] as two bfloat16 [..., 2], whose sum it is to 16 bits."""
    high = x.bfloat16()
    return torch.stack((high, (x - high).bfloat16()), -1)


@cpu_causal_attention_backward.register_fake
def _(grad, q, k, v, out, lse):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _CPUAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return cpu_causal_attention_backward(grad, *ctx.saved_tensors)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]. Forward is PyTorch's kernel everywhere."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _CPUAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
