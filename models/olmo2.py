"""OLMo 2 (1B to 32B) and OLMo 3 (7B, 32B) as single-device code: it knows torch, and nothing of
meshes.

A block normalises what attention and the feed-forward layer return, and not what they get. Queries
and keys are normalised before they are split into heads, each over the whole width of its
projection. In OLMo 3 three of four layers attend to a window of tokens; where the rotary positions
are scaled for longer contexts, they are so in the other layers only. `models/family.py` explains
what stands below. Sources: arXiv:2501.00656 (OLMo 2), arXiv:2512.13961 (OLMo 3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import arithmetic, layers
from models.family import Family
from models.flavors.olmo2 import NUMBERS
from models.layers import AttentionSpec, Documents
from models.yarn import yarn


@dataclass(frozen=True)
class Args(layers.Args):
    """The numbers that define one OLMo."""

    window: int  # tokens that a layer with a window attends to, its own among them; 0: no windows
    # factor, original_max_seq_len, beta_fast, beta_slow, attention_factor; None: positions as they
    # are
    rope_scaling: dict[str, float] | None


def has_window(args: Args, number: int) -> bool:
    """Return True if this layer has a window: in OLMo 3 every fourth layer attends to all
    tokens."""
    return args.window > 0 and (number + 1) % 4 != 0


def spec_of(args: Args, number: int) -> AttentionSpec:
    """Return the attention spec of this layer."""
    return AttentionSpec(window=args.window if has_window(args, number) else None)


class Attention(layers.Attention):
    def __init__(self, args: Args, spec: AttentionSpec):
        super().__init__(args, spec)
        self.q_norm = nn.RMSNorm(args.n_heads * args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.n_kv_heads * args.head_dim, eps=args.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x)).view(B, T, -1, self.head_dim)  # [B, T, H, E]
        k = self.k_norm(self.wk(x)).view(B, T, -1, self.head_dim)  # [B, T, K, E]
        v = self.wv(x).view(B, T, -1, self.head_dim)  # [B, T, K, E]
        return q, k, v


class PostNormBlock(layers.Block):
    def __init__(
        self, args: Args, attention: nn.Module, feed_forward: nn.Module, table: int | None
    ):
        """table: which of the rotary tables is that of this layer; None: all layers have one."""
        super().__init__(args, attention, feed_forward)
        self.table = table

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        if self.table is not None:
            cos = cos[self.table]  # [T, E], or [B, T, E]
            sin = sin[self.table]
        h = x + self.attention_norm(self.attention(x, cos, sin, documents))  # [B, T, D]
        return h + self.ffn_norm(self.feed_forward(h))  # [B, T, D]


class Olmo2(layers.Decoder):
    def block(self, args: Args, number: int) -> nn.Module:
        attention = Attention(args, spec_of(args, number))
        feed_forward = layers.FeedForward(args.dim, args.hidden_dim)
        table = None
        if args.rope_scaling is not None:
            table = 0 if has_window(args, number) else 1
        return PostNormBlock(args, attention, feed_forward, table)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tables in each of cos and sin where positions are scaled, [2, ..., E]: of the
        layers with a window, and of the others."""
        args = self.args
        frequencies = layers.rope_frequencies(args.head_dim, args.rope_theta, positions.device)
        cos, sin = layers.rope_tables(frequencies, positions)
        if args.rope_scaling is None:
            return cos, sin
        length = args.rope_scaling["attention_factor"]
        slower = yarn(frequencies, args.rope_theta, **args.rope_scaling)
        scaled_cos, scaled_sin = layers.rope_tables(slower, positions)
        return torch.stack((cos, scaled_cos * length)), torch.stack((sin, scaled_sin * length))


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    """Return how weights are drawn: all matrices with the same deviation at every depth
    (arXiv:2501.00656)."""
    return [("*norm.weight", "ones", 0.0), ("*", "normal", 0.02)]


# Gains of norms are decayed, the embedding is not (arXiv:2501.00656; the group overrides in
# OLMo-core's src/scripts/official).
DECAY = [("tok_embeddings.weight", False), ("*", True)]


def tp_plan(args: Args) -> dict[str, str]:
    """Shard the outputs of attention and the feed-forward layer, and the norms after them, over the
    sequence. The norms of queries and keys sum squares over all heads, so their ranks all-reduce
    them."""
    norms = {
        "layers.*.attention_norm": "sequence_plain",
        "layers.*.ffn_norm": "sequence_plain",
        "layers.*.attention.q_norm": "norm_of_columns",
        "layers.*.attention.k_norm": "norm_of_columns",
    }
    return layers.tp_plan(args) | norms


def flops_per_token(args: Args, seq_len: int) -> float:
    specs = [spec_of(args, number) for number in range(args.n_layers)]
    return arithmetic.flops_per_token(args, seq_len, specs=specs)


def describe(args: Args) -> str:
    if not args.window:
        return arithmetic.describe(args)
    windows = sum(has_window(args, number) for number in range(args.n_layers))
    return f"{arithmetic.describe(args)}; {arithmetic.layers(windows)} with windows of {args.window:,} tokens"


FAMILY = Family(
    name="olmo2",
    numbers=NUMBERS,
    Args=Args,
    build=Olmo2,
    initial_values=initial_values,
    decay=DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
)
