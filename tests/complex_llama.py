"""Llama as Meta's code and TorchTitan's compute it: rotary positions are complex factors of
neighbouring pairs. Written down here once more, for tests of what is converted."""

import torch
import torch.nn.functional as F
from torch import Tensor

QKV = ("wq", "wk", "wv")


def projected(w: dict[str, Tensor], prefix: str, x: Tensor, sizes: tuple[int, int]) -> list[Tensor]:
    """Return queries, keys and values [B, T, heads, width]. sizes: key/value heads and the width of
    a head. TorchTitan 0.3 has the three as one matrix."""
    kv_heads, width = sizes
    fused = f"{prefix}qkv_linear.wqkv.weight"
    if fused not in w:
        parts = [F.linear(x, w[f"{prefix}{name}.weight"]) for name in QKV]
        return [part.unflatten(-1, (-1, width)) for part in parts]
    # of each head of keys: the queries that share it, itself, its values
    groups = F.linear(x, w[fused]).unflatten(-1, (kv_heads, -1, width))
    q, k, v = groups.split([groups.shape[-2] - 2, 1, 1], -2)
    return [part.flatten(2, 3) for part in (q, k, v)]


def turned(x: Tensor, theta: float) -> Tensor:
    """Turn x [B, T, heads, width], whose pairs (2i, 2i + 1) are complex numbers."""
    frequencies = theta ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[1]).double(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).float()


def logits(
    w: dict[str, Tensor], tokens: Tensor, sizes: tuple[int, int], theta: float = 10000.0
) -> Tensor:
    """Return [B, T, vocabulary] for tokens [B, T]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-5)

    h = F.embedding(tokens, w["tok_embeddings.weight"])
    layers = {name.split(".")[1] for name in w if name.startswith("layers.")}
    for layer in sorted(layers, key=int):
        prefix = f"layers.{layer}."
        x = norm(h, f"{prefix}attention_norm")
        q, k, v = projected(w, f"{prefix}attention.", x, sizes)
        q, k, v = (part.transpose(1, 2) for part in (turned(q, theta), turned(k, theta), v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + F.linear(o.transpose(1, 2).flatten(2), w[f"{prefix}attention.wo.weight"])
        x = norm(h, f"{prefix}ffn_norm")
        w1, w2, w3 = (w[f"{prefix}feed_forward.{name}.weight"] for name in ("w1", "w2", "w3"))
        h = h + F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
    output = w["lm_head.weight" if "lm_head.weight" in w else "output.weight"]
    return F.linear(norm(h, "norm"), output)
