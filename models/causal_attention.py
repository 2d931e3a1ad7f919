"""Causal attention over whole windows, for any model of this folder: PyTorch's own, but for a backward that it is slow at.

Shapes:  B batch   T sequence   H query heads   K key/value heads   G = H / K   E head_dim
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, TILE = 64, 2**18  # queries, and scores, of one tile: its float32 scores stay in a core's L2 cache
LONGEST = 2048  # tokens: beyond, a row of scores is too long for that, and PyTorch's kernel takes 0.6 to 0.8 of the time


@torch.library.custom_op("plumbline::causal_attention_backward", mutates_args=())
def _cpu_causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Grad of q, k, v in their types; grad, q and out are [B, H, T, E], k and v [B, K, T, E], lse float32 [B, H, T].

    Five products per tile of queries (Dao, arXiv:2307.08691, algorithm 2), by the library that multiplies all other
    matrices: PyTorch's kernel reaches a tenth of that rate on CPU in bfloat16. Products of bfloat16 are rounded to it,
    everything between them is float32. One operator, so that neither autograd nor torch.compile unrolls the loop.
    """
    (B, H, T, E), K = q.shape, k.shape[1]
    if torch.get_num_threads() > 1:  # the kernel divides heads among threads; tiles of products are too small to (measured)
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, True)
        return dq.contiguous(), dk.view(B, K, -1, T, E).sum(2), dv.view(B, K, -1, T, E).sum(2)
    scale, groups = 1 / math.sqrt(E), (B * K, H // K, T)
    delta = (grad.float() * out).sum(-1).view(*groups, 1)
    q, grad, lse = q.reshape(*groups, E), grad.reshape(*groups, E), lse.reshape(*groups, 1)
    k, v = k.reshape(B * K, T, E), v.reshape(B * K, T, E)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))  # sums over the tiles
    later = torch.full((ROWS, ROWS), -math.inf).triu_(1)
    for a in range(0, T, ROWS):
        b = min(a + ROWS, T)
        heads = max(1, TILE // (groups[1] * ROWS * b))
        for first in range(0, B * K, heads):
            h = slice(first, first + heads)
            shape = (-1, groups[1], b - a, b)  # scores of queries a ... b with keys 0 ... b
            x, y = (q[h, :, a:b] * scale).flatten(1, 2), grad[h, :, a:b].flatten(1, 2)
            scores = torch.bmm(x, k[h, :b].mT).view(shape)
            scores[..., a:] += later[: b - a, : b - a]
            p = (scores - lse[h, :, a:b]).exp_()
            dp = torch.bmm(y, v[h, :b].mT).view(shape)
            ds = (dp - delta[h, :, a:b]).mul_(p).to(q.dtype).flatten(1, 2)
            dv[h, :b] += torch.bmm(p.to(q.dtype).flatten(1, 2).mT, y)
            dk[h, :b] += torch.bmm(ds.mT, x)
            dq[h, :, a:b] = torch.bmm(ds, k[h, :b]).view(-1, groups[1], b - a, E) * scale
    return dq.view(B, H, T, E), dk.to(k.dtype).view(B, K, T, E), dv.to(v.dtype).view(B, K, T, E)


@_cpu_causal_attention_backward.register_fake
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
        return _cpu_causal_attention_backward(grad, *ctx.saved_tensors)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]. Forward is PyTorch's kernel everywhere."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= LONGEST:
        return _CPUAttention.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
