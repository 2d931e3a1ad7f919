"""Qwen3, dense (0.6B to 32B) and with mixtures of experts (30B-A3B, 235B-A22B), as single-device
code: it knows torch, and nothing of meshes.

Two things distinguish it from Llama. Queries and keys are normalised within each head before they
are rotated, with one gain for all heads (QK-norm; Dehghani et al., arXiv:2302.05442, section 2).
And the width of a head is an independent number, which need not be dim / n_heads. In models with
experts the feed-forward layer of every block is a mixture. `models/family.py` explains what stands
below. Source: Qwen3 technical report, arXiv:2505.09388.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from models import arithmetic, layers, moe
from models.family import Family
from models.flavors.qwen3 import NUMBERS


@dataclass(frozen=True)
class Args(layers.Args):
    """The numbers of a dense decoder, and those of the mixtures. Without experts `hidden_dim` is
    that of every feed-forward layer; with experts it is written to config.json and used by no
    layer."""

    n_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0  # hidden units of one expert
    balance_loss: float = 0.0  # factor of the sequence-wise balance loss

    router_score: ClassVar[str] = "softmax"
    normalised_weights: ClassVar[bool] = True
    routed_scale: ClassVar[float] = 1.0
    expert_groups: ClassVar[int] = 1
    n_shared_experts: ClassVar[int] = 0
    balancing_bias: ClassVar[bool] = False


class Attention(layers.Attention):
    def __init__(self, args: Args):
        super().__init__(args)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v  # [B, T, H, E], [B, T, K, E] twice


class Qwen3(moe.SparseDecoder):
    def block(self, args: Args, number: int) -> nn.Module:
        if args.n_experts:
            return moe.MixtureBlock(args, Attention(args), moe.MixtureOfExperts(args))
        return layers.Block(args, Attention(args), layers.FeedForward(args.dim, args.hidden_dim))


def tp_plan(args: Args) -> dict[str, str]:
    """Return a plan that splits the heads over the ranks. All use the same gain, whose gradient is
    therefore a sum over ranks."""
    norms = {"layers.*.attention.q_norm": "heads", "layers.*.attention.k_norm": "heads"}
    feed_forward = moe.tp_plan(args) if args.n_experts else layers.tp_plan_of_feed_forward()
    return layers.TP_PLAN | layers.TP_PLAN_OF_ATTENTION | norms | feed_forward


def flops_per_token(args: Args, seq_len: int) -> float:
    feed_forward = moe.multiplied(args) if args.n_experts else None
    return arithmetic.flops_per_token(args, seq_len, feed_forward)


def describe(args: Args) -> str:
    if not args.n_experts:
        return arithmetic.describe(args)
    return f"{arithmetic.describe(args)}; {moe.describe(args, FAMILY.active_parameters(args))}"


FAMILY = Family(
    name="qwen3",
    numbers=NUMBERS,
    Args=Args,
    build=Qwen3,
    initial_values=layers.initial_values,
    decay=layers.DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
)
