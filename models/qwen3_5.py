"""Qwen3.5 without experts (0.8B to 27B), the text model, as single-device code: it knows torch, and
nothing of meshes.

Its mixers, norms and positions are Qwen3-Next's (models/qwen3_next.py), its feed-forward layers dense.
`models/family.py` explains what stands below. Source: Qwen3_5ForCausalLM of transformers, with which
tests compare it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from models import arithmetic, layers, qwen3_next
from models.delta_net import GatedDeltaNet
from models.family import Family
from models.flavors.qwen3_5 import NUMBERS
from models.norms import ZeroCentredRMSNorm


@dataclass(frozen=True)
class Args(layers.Args):
    """The numbers that define one Qwen3.5; those of states as in Qwen3-Next."""

    attention_interval: int  # every so many layers one has attention
    rope_dim: int  # numbers of a head that are rotated, the first ones
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_width: int

    mtp_depth: ClassVar[int] = 0


class Block(layers.Block):
    def __init__(self, args: Args, number: int):
        with_attention = qwen3_next.has_attention(args, number)
        mixer = qwen3_next.Attention(args) if with_attention else GatedDeltaNet(args)
        super().__init__(args, mixer, layers.FeedForward(args.dim, args.hidden_dim))
        self.attention_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)


class Qwen35(layers.Decoder):
    def __init__(self, args: Args, layers: range | None = None):
        super().__init__(args, layers)
        if self.last:
            self.norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)

    def block(self, args: Args, number: int) -> nn.Module:
        return Block(args, number)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return qwen3_next.rope(self.args, positions)


def tp_plan(args: Args) -> dict[str, str]:
    """Return a plan that splits heads and hidden units over the ranks."""
    mixers = qwen3_next.tp_plan_of_mixers(args)
    return layers.TP_PLAN | mixers | layers.tp_plan_of_feed_forward()


def multiplied(args: Args) -> int:
    """Count the weights that are multiplied."""
    feed_forward = args.n_layers * 3 * args.dim * args.hidden_dim
    return qwen3_next.weights_of_mixers(args) + feed_forward + args.dim * args.vocab_size


def flops_per_token(args: Args, seq_len: int) -> float:
    return 6.0 * multiplied(args) + qwen3_next.flops_of_tokens(args, seq_len)


def describe(args: Args) -> str:
    states = arithmetic.layers(qwen3_next.delta_layers(args))
    return (
        f"{arithmetic.describe(args)}; {states} with gated delta nets of {args.delta_value_heads} "
        "states"
    )


FAMILY = Family(
    name="qwen3_5",
    numbers=NUMBERS,
    Args=Args,
    build=Qwen35,
    initial_values=qwen3_next.initial_values,
    decay=qwen3_next.DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
)
