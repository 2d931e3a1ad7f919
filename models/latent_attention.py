"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1), the attention of
DeepSeek-V3 and of one in four layers of Kimi Linear.

Keys and values of all heads are computed from one narrow vector of each token, and only a part of
each head, the same for all heads of the keys, is rotated. args has n_heads, q_rank, kv_rank, nope_dim,
rope_dim, value_dim and rope_scaling, as models/deepseek_v3.py::Args explains them.

Shapes:  B batch   T sequence   H heads   P rotated part of a head   U the part that is not
         W = U + P   V width of a value
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import arithmetic, layers
from models.layers import Documents
from models.yarn import mscale

# of the norms of latents, independent of norm_eps (DeepSeek's and transformers' code)
LATENT_EPS = 1e-6


class Latents(nn.Module):
    """Return the latents from which a token's keys and values are computed: kv_rank numbers, and P
    rotary ones that all heads share. This module has no parameters. It exists as a hook point:
    tensor parallelism gathers the sequence before it, and sampling caches its output."""

    def __init__(self, args: Any):
        super().__init__()
        self.widths = args.kv_rank, args.rope_dim

    def forward(self, narrow: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """narrow [B, T, kv_rank + P] -> the same with the last P numbers rotated."""
        latent, k_rope = narrow.split(self.widths, -1)
        return torch.cat((latent, rotate(k_rope[:, :, None], cos, sin).flatten(2)), -1)


class Core(layers.AttentionCore):
    """Values are narrower than keys, and fast kernels want them as wide. They are padded here, so
    that a module that exchanges keys and values between ranks sends no zeros (parallelisms/cp.py)."""

    supports_spec = True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q and k [B, T, H, W], v [B, T, H, V] -> [B, T, H, V]."""
        padded = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return super().forward(q, k, padded, documents, sinks)[..., : v.shape[-1]]


class LatentAttention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        width = args.nope_dim + args.rope_dim
        if args.q_rank:
            self.wq_a = nn.Linear(args.dim, args.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(args.q_rank, eps=LATENT_EPS)
        self.wq_b = nn.Linear(args.q_rank or args.dim, args.n_heads * width, bias=False)
        self.wkv_a = nn.Linear(args.dim, args.kv_rank + args.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.kv_rank, eps=LATENT_EPS)
        self.latents = Latents(args)
        self.wkv_b = nn.Linear(
            args.kv_rank, args.n_heads * (args.nope_dim + args.value_dim), bias=False
        )
        self.wo = nn.Linear(args.n_heads * args.value_dim, args.dim, bias=False)
        self.core = Core()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        args, narrow_widths = self.args, (self.args.kv_rank, self.args.rope_dim)
        q = self.wq_b(self.q_norm(self.wq_a(x)) if args.q_rank else x).unflatten(
            -1, (-1, args.nope_dim + args.rope_dim)
        )
        q_nope, q_rope = q.split((args.nope_dim, args.rope_dim), -1)  # [B, T, H, U], [B, T, H, P]
        # the core scales by 1 / sqrt(W) alone
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1) * score_scale(args)
        latent, k_rope = self.wkv_a(x).split(narrow_widths, -1)
        latent, k_rope = self.latents(
            torch.cat((self.kv_norm(latent), k_rope), -1), cos, sin
        ).split(narrow_widths, -1)
        kv = self.wkv_b(latent).unflatten(-1, (-1, args.nope_dim + args.value_dim))
        k_nope, v = kv.split((args.nope_dim, args.value_dim), -1)  # [B, T, H, U], [B, T, H, V]
        k = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, k_nope.shape[2], -1)), -1)
        return self.wo(self.core(q, k, v, documents).flatten(2))  # [B, T, D]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the pairs (2i, 2i + 1) of x [B, T, heads, P], as DeepSeek's weights have them. The
    result has the first numbers of all pairs, then the second ones: scores do not depend on the
    order, and it is that of `layers.apply_rope`."""
    return layers.apply_rope(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def score_scale(args: Any) -> float:
    """YaRN's factor of the attention scores (arXiv:2309.00071, section 3.4, in DeepSeek-V2's form:
    mscale_all_dim)."""
    scaling = args.rope_scaling
    return mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2 if scaling else 1.0


# What a family says of these layers ---------------------------------------------------------------


def tp_plan(args: Any, layer: str = "*") -> dict[str, str]:
    """Return a plan that splits the heads. The narrow vectors of a token are computed once, by the
    rank that has the token in its slice of the sequence, and gathered: these are sent, not the
    hidden state. layer: the number of the layer, or * for all."""
    attention = {
        "wq_a": "slice_linear",
        "q_norm": "sequence",
        "wq_b": "gather_columns",
        "wkv_a": "slice_linear",
        "kv_norm": "sequence_plain",
        "latents": "gather_plain",
        "wkv_b": "columns_plain",
        "wo": "rows",
    }
    if not args.q_rank:
        del attention["wq_a"], attention["q_norm"]
    return {f"layers.{layer}.attention.{name}": style for name, style in attention.items()}


def weights(args: Any) -> int:
    """Count the weights of one layer; all are multiplied."""
    queries = args.n_heads * (args.nope_dim + args.rope_dim)
    down = args.dim * args.q_rank + args.dim * (args.kv_rank + args.rope_dim)
    up = (args.q_rank or args.dim) * queries + args.kv_rank * args.n_heads * (
        args.nope_dim + args.value_dim
    )
    return down + up + args.n_heads * args.value_dim * args.dim


def describe(args: Any) -> str:
    """Return the sizes of a decoder with these layers (`models/family.py::Family.describe`)."""
    return (
        f"{arithmetic.layers(args.n_layers)} of width {args.dim}, {args.n_heads} heads, vocabulary "
        f"{args.vocab_size:,}{' (tied)' if args.tied_embeddings else ''}"
    )
