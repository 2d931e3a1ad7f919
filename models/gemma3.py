"""Gemma 3 (270M to 27B), the text model, as single-device code: it knows torch, and nothing of
meshes.

A block normalises what attention and the feed-forward layer get, and what they return too. Queries
and keys are normalised within each head. Gains of norms are 1 + weight, the embedding is multiplied
by sqrt(dim), the gate is a GELU. Five of six layers attend to a window of tokens and have rotary
positions of a base of their own; those of the sixth are divided by a factor in models of long
contexts. `models/family.py` explains what stands below. Source: Gemma 3 technical report,
arXiv:2503.19786, and the code of transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import arithmetic, layers
from models.family import Family
from models.flavors.gemma3 import NUMBERS
from models.layers import AttentionSpec, Documents
from models.norms import ZeroCentredRMSNorm


@dataclass(frozen=True)
class Args(layers.Args):
    """The numbers that define one Gemma; `rope_theta` is that of layers without a window."""

    window: int  # tokens that a layer with a window attends to, its own among them; 0: no windows
    window_pattern: int  # every layer whose number it divides, from 1, has no window
    local_rope_theta: float  # of layers with a window
    rope_factor: float  # positions of layers without a window are divided by it
    query_scalar: int  # scores are divided by its root


def has_window(args: Args, number: int) -> bool:
    """Return True if this layer, counted from 0, has a window."""
    return args.window > 0 and (number + 1) % args.window_pattern != 0


def spec_of(args: Args, number: int) -> AttentionSpec:
    """Return the attention spec of this layer."""
    return AttentionSpec(
        window=args.window if has_window(args, number) else None,
        scale=None if args.query_scalar == args.head_dim else args.query_scalar**-0.5,
    )


class Attention(layers.Attention):
    def __init__(self, args: Args, number: int):
        super().__init__(args, spec_of(args, number))
        self.q_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v  # [B, T, H, E], [B, T, K, E] twice


class GeGLU(layers.FeedForward):
    """w2(gelu(w1 x) * w3 x) (Shazeer, arXiv:2002.05202), with the tanh form of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))  # [B, T, D]


class Block(nn.Module):
    """One layer of the decoder, with a norm before and after attention and the feed-forward layer."""

    def __init__(self, args: layers.Args, attention: nn.Module, table: int):
        """table: which of the rotary tables is its."""
        super().__init__()
        self.table = table
        self.attention_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.post_attention_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = GeGLU(args.dim, args.hidden_dim)
        self.post_ffn_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        cos = cos[self.table]  # [T, E], or [B, T, E]
        sin = sin[self.table]
        attended = self.attention(self.attention_norm(x), cos, sin, documents)
        h = x + self.post_attention_norm(attended)  # [B, T, D]
        return h + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h)))  # [B, T, D]


class Gemma3(layers.Decoder):
    def __init__(self, args: Args, layers: range | None = None):
        super().__init__(args, layers)
        if self.last:
            self.norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)

    def block(self, args: Args, number: int) -> nn.Module:
        return Block(args, Attention(args, number), 0 if has_window(args, number) else 1)

    def embed(self, tokens: Tensor) -> Tensor:
        """Scale by sqrt(dim) as rounded to the type of the step, as published: 33.94 is 34 in
        bfloat16."""
        h = super().embed(tokens)
        return h * h.new_full((), self.args.dim**0.5)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tables in each of cos and sin, float32 [2, ..., E]: of the layers with a
        window, and of the others."""
        args = self.args
        device = positions.device
        of_windows = layers.rope_frequencies(args.head_dim, args.local_rope_theta, device)
        of_others = layers.rope_frequencies(args.head_dim, args.rope_theta, device)
        local_cos, local_sin = layers.rope_tables(of_windows, positions)
        cos, sin = layers.rope_tables(of_others / args.rope_factor, positions)
        return torch.stack((local_cos, cos)), torch.stack((local_sin, sin))


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    """Return how weights are drawn, as transformers does it: all matrices with the same deviation.
    A smaller one for wo and w2 would do nothing, since what they return is normalised."""
    return [("*norm.weight", "zeros", 0.0), ("*", "normal", 0.02)]


def tp_plan(args: Args) -> dict[str, str]:
    """Split the heads over the ranks, which use the same gains for them. The norms after attention
    and the feed-forward layer get a slice of the sequence."""
    norms = {
        "layers.*.post_attention_norm": "sequence_plain",
        "layers.*.post_ffn_norm": "sequence_plain",
        "layers.*.attention.q_norm": "heads",
        "layers.*.attention.k_norm": "heads",
    }
    return layers.tp_plan(args) | norms


def flops_per_token(args: Args, seq_len: int) -> float:
    specs = [spec_of(args, number) for number in range(args.n_layers)]
    return arithmetic.flops_per_token(args, seq_len, specs=specs)


def describe(args: Args) -> str:
    windows = sum(has_window(args, number) for number in range(args.n_layers))
    return (
        f"{arithmetic.describe(args)}; {arithmetic.layers(windows)} with windows of "
        f"{args.window:,} tokens"
    )


FAMILY = Family(
    name="gemma3",
    numbers=NUMBERS,
    Args=Args,
    build=Gemma3,
    initial_values=initial_values,
    decay=layers.DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
)
