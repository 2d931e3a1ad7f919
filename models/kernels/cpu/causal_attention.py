"""Causal attention in bfloat16 on a CPU: PyTorch's forward, and a faster backward.

PyTorch's own backward reaches a tenth of the rate of the matmuls around it. The result is the same
up to rounding.

Shapes:  B batch   T sequence   H query heads   K key/value heads   G = H / K   E head_dim
"""

import math

import torch
from torch import Tensor

COLUMNS = 128  # keys of a tile
TILE = 2**20  # scores of a tile, for each thread: they stay in a core's cache


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]."""
    return _Attention.apply(q, k, v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return causal_attention_backward(grad, *ctx.saved_tensors)


@torch.library.custom_op("plumbline::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types; grad, q and out are [B, H, T, E], k and v [B, K, T, E], lse
    float32 [B, H, T].

    Five matmuls per tile of keys (Dao, arXiv:2307.08691, algorithm 2), by the library of all other
    matmuls. Tiles are bfloat16, as the matmuls return them. What is subtracted from two of them
    (lse from scores; delta, the rows' sums of grad * out, from grad v^T) is two more columns of the
    factors: a bfloat16 number, and the rest that it leaves. So it happens within the matmul, in
    float32, before it is rounded. One operator, so that neither autograd nor torch.compile unrolls
    the loop.
    """
    B, H, T, E = q.shape
    K = k.shape[1]
    G = H // K
    scale = 1 / math.sqrt(E)
    delta = (grad * out.float()).sum(-1)  # [B, H, T]
    minus_one = q.new_full((B, K, T, 2), -1)
    # [B K, G, T, E + 2]
    q_and_lse = torch.cat((q * scale, _in_two(lse)), -1).view(B * K, G, T, E + 2)
    grad_and_delta = torch.cat((grad, _in_two(delta)), -1).view(B * K, G, T, E + 2)
    # [B K, T, E + 2]
    k = torch.cat((k, minus_one), -1).view(B * K, T, E + 2)
    v = torch.cat((v, minus_one), -1).view(B * K, T, E + 2)
    dq = torch.zeros(B * K, G, T, E)
    dk = q.new_empty(B * K, T, E)
    dv = q.new_empty(B * K, T, E)
    later = q.new_full((COLUMNS, COLUMNS), -math.inf).triu_(1)
    for a in range(0, T, COLUMNS):  # keys a ... b, and the queries that see them: a ... T
        b = min(a + COLUMNS, T)
        queries = T - a
        keys = b - a
        several = max(1, TILE * torch.get_num_threads() // (G * queries * keys))
        for first in range(0, B * K, several):
            h = slice(first, first + several)
            q_tile = q_and_lse[h, :, a:].flatten(1, 2)  # [heads, G queries, E + 2]
            grad_tile = grad_and_delta[h, :, a:].flatten(1, 2)
            scores = torch.bmm(q_tile, k[h, a:b].mT)  # [heads, G queries, keys], less lse
            diagonal = scores.view(-1, G, queries, keys)[:, :, :keys]
            diagonal += later[:keys, :keys]
            p = scores.exp_()
            ds = torch.bmm(grad_tile, v[h, a:b].mT).mul_(p)
            dv[h, a:b] = torch.bmm(p.mT, grad_tile[..., :E])
            dk[h, a:b] = torch.bmm(ds.mT, q_tile[..., :E])
            dq[h, :, a:] += torch.bmm(ds, k[h, a:b, :E]).view(-1, G, queries, E)
    dq = dq.mul_(scale).to(q.dtype)
    return dq.view(B, H, T, E), dk.view(B, K, T, E), dv.view(B, K, T, E)


def _in_two(x: Tensor) -> Tensor:
    """Split float32 [...] into two bfloat16 [..., 2], whose sum it is to 16 bits."""
    high = x.bfloat16()
    return torch.stack((high, (x - high).bfloat16()), -1)


@causal_attention_backward.register_fake
def _(grad, q, k, v, out, lse):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
