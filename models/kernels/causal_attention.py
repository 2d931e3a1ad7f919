"""Causal attention over whole windows: PyTorch's, and in bfloat16 on a CPU a faster backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.cpu import causal_attention as cpu


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention: q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return cpu.causal_attention(q, k, v)
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
