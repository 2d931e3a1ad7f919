"""Qwen3-Next (80B-A3B) as single-device code: it knows torch, and nothing of meshes.

A hybrid: in three of four layers tokens see each other through the state of a gated delta net
(models/delta_net.py), in the fourth through attention. That attention has QK-norm as Qwen3's,
rotates a part of each head, and multiplies each head's output by a sigmoid gate (Qiu et al.,
arXiv:2505.06708). Norms store their gain's distance from 1. The feed-forward layer of every block
is a mixture with one shared expert, whose output a sigmoid gate scales for each token.
`models/family.py` explains what stands below. Sources: the Qwen team's article "Qwen3-Next" of
September 2025 and Qwen3NextForCausalLM of transformers, with which tests compare it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models import arithmetic, delta_net, layers, moe, mtp
from models.delta_net import GatedDeltaNet
from models.family import Family
from models.flavors.qwen3_next import NUMBERS
from models.layers import Documents
from models.norms import ZeroCentredRMSNorm


@dataclass(frozen=True)
class Args:
    """The numbers that define one Qwen3-Next: a row of FLAVORS, with the overrides of the [model]
    table laid on top."""

    dim: int
    n_layers: int
    attention_interval: int  # every so many layers one has attention
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int  # numbers of a head that are rotated, the first ones
    delta_key_heads: int  # of a gated delta net
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_width: int  # tokens that a convolution sees
    n_experts: int
    experts_per_token: int
    expert_dim: int  # hidden units of one expert
    shared_dim: int  # hidden units of the shared expert
    balance_loss: float  # factor of the sequence-wise balance loss
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool
    mtp_depth: int = 0  # layers that predict further tokens (models/mtp.py)

    router_score: ClassVar[str] = "softmax"
    normalised_weights: ClassVar[bool] = True
    routed_scale: ClassVar[float] = 1.0
    expert_groups: ClassVar[int] = 1
    n_shared_experts: ClassVar[int] = 0  # of the experts' width; the shared one here has its own
    balancing_bias: ClassVar[bool] = False


def has_attention(args: Any, number: int) -> bool:
    """Return True if this layer has attention, and False if it has a gated delta net. One that
    predicts a further token has attention."""
    return number >= args.n_layers or (number + 1) % args.attention_interval == 0


def attention_layers(args: Any) -> int:
    """Count the layers with attention, those that predict further tokens included."""
    return args.n_layers // args.attention_interval + args.mtp_depth


def delta_layers(args: Any) -> int:
    return mtp.layers_in_all(args) - attention_layers(args)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of each head of x [B, T, heads, E], as many as cos has."""
    width = cos.shape[-1]
    rotated = layers.apply_rope(x[..., :width], cos, sin)
    return torch.cat((rotated, x[..., width:]), -1)


class Attention(layers.Attention):
    """Attention with QK-norm, partial rotary positions and a gate for every number of its heads."""

    def __init__(self, args: Any):
        super().__init__(args)
        self.wg = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.q_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = ZeroCentredRMSNorm(args.head_dim, eps=args.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None
    ) -> Tensor:
        q, k, v = self.heads(x)  # [B, T, H, E], [B, T, K, E] twice
        q = rotate_first(self.q_norm(q), cos, sin)
        k = rotate_first(self.k_norm(k), cos, sin)
        o = self.core(q, k, v, documents).flatten(2)  # [B, T, H E]
        return self.wo(o * self.wg(x).sigmoid())  # [B, T, D]


class GatedMixture(moe.MixtureOfExperts):
    """A mixture of experts and one more expert, which works on every token and is scaled by a gate
    of one number per token."""

    def __init__(self, args: Args):
        super().__init__(args)
        self.shared_experts = layers.FeedForward(args.dim, args.shared_dim)
        self.shared_gate = nn.Linear(args.dim, 1, bias=False)

    def shared(self, x: Tensor) -> Tensor:
        return self.shared_gate(x).sigmoid() * self.shared_experts(x)  # [B, T, D]


class Block(moe.MixtureBlock):
    def __init__(self, args: Args, number: int):
        attention = Attention(args) if has_attention(args, number) else GatedDeltaNet(args)
        super().__init__(args, attention, GatedMixture(args))
        self.attention_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)


class PredictionBlock(mtp.Prediction, Block):
    """A block that predicts a token further on."""


class Qwen3Next(mtp.MultiTokenDecoder):
    def __init__(self, args: Args, layers: range | None = None):
        super().__init__(args, layers)
        if self.last:
            self.norm = ZeroCentredRMSNorm(args.dim, eps=args.norm_eps)

    def block(self, args: Args, number: int) -> nn.Module:
        return Block(args, number)

    def prediction(self, args: Args, number: int) -> nn.Module:
        return PredictionBlock(args, number)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope(self.args, positions)


def rope(args: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the part of a head that is rotated, float32 [..., rope_dim]."""
    frequencies = layers.rope_frequencies(args.rope_dim, args.rope_theta, positions.device)
    return layers.rope_tables(frequencies, positions)


def initial_values(args: Any) -> list[tuple[str, str, float]]:
    """Return how weights are drawn: matrices as in all our decoders, gains at 1."""
    gains = [("*.attention.norm.weight", "ones", 0.0), ("*norm.weight", "zeros", 0.0)]
    return gains + delta_net.initial_values(args) + layers.initial_values(args)


# Gains decay to 1, but for that of a gated delta net, which is stored as it is ("zero-centred and
# weight-decayed" norms, in the Qwen team's words).
DECAY = [*delta_net.DECAY, ("*.attention.norm.weight", False), ("*", True)]


def tp_plan(args: Args) -> dict[str, str]:
    """Return a plan that splits heads, and the shared expert's hidden units, over the ranks."""
    gate = {"layers.*.feed_forward.shared_gate": "slice_linear"}
    plan = layers.TP_PLAN | tp_plan_of_mixers(args) | moe.tp_plan(args) | gate
    return plan | moe.TP_PLAN_OF_SHARED | mtp.tp_plan(args)


def tp_plan_of_mixers(args: Any) -> dict[str, str]:
    """Return the rows that split the heads of both kinds of layers, a key head with the value heads
    that it serves."""
    plan = {}
    for number in range(mtp.layers_in_all(args)):
        name = f"layers.{number}.attention"
        if has_attention(args, number):
            plan |= {
                name: "gather_sequence",
                f"{name}.wg": "columns",
                f"{name}.q_norm": "heads",
                f"{name}.k_norm": "heads",
            }
            for row in ("wq", "wk", "wv", "wo"):
                plan[f"{name}.{row}"] = layers.TP_PLAN_OF_ATTENTION[f"layers.*.attention.{row}"]
        else:
            plan |= delta_net.tp_plan(str(number))
    return plan


# Arithmetic ---------------------------------------------------------------------------------------


def weights_of_mixers(args: Any) -> int:
    """Count the weights of both kinds of layers that a token is multiplied with."""
    # wq, wg and wo, wk and wv
    attention = args.dim * args.head_dim * (3 * args.n_heads + 2 * args.n_kv_heads)
    return attention_layers(args) * attention + delta_layers(args) * delta_net.multiplied(args)


def multiplied(args: Args) -> int:
    """Count the weights that a token is multiplied with."""
    shared = 3 * args.dim * args.shared_dim + args.dim
    mixtures = mtp.layers_in_all(args) * (moe.multiplied(args) + shared)
    return weights_of_mixers(args) + mixtures + args.dim * args.vocab_size


def flops_of_tokens(args: Any, seq_len: int) -> float:
    """Count the FLOPs per token of attention, and of the states of gated delta nets, whose cost does
    not depend on the length."""
    attention = 12.0 * args.n_heads * args.head_dim * attention_layers(args) * seq_len
    return attention + delta_layers(args) * delta_net.flops_of_state(args)


def flops_per_token(args: Args, seq_len: int) -> float:
    """Count FLOPs as `models/arithmetic.py::flops_per_token` does, with those of states."""
    weights = multiplied(args) + args.mtp_depth * mtp.multiplied(args)
    return 6.0 * weights + flops_of_tokens(args, seq_len)


def describe(args: Args) -> str:
    states = arithmetic.layers(delta_layers(args))
    return (
        f"{arithmetic.describe(args)}; {states} with gated "
        f"delta nets of {args.delta_value_heads} states; "
        f"{moe.describe(args, FAMILY.active_parameters(args))} and a shared one{mtp.describe(args)}"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    widths = args.n_heads * args.head_dim, args.delta_value_heads * args.delta_value_dim
    return args.dim, max(widths)


FAMILY = Family(
    name="qwen3_next",
    numbers=NUMBERS,
    Args=Args,
    build=Qwen3Next,
    initial_values=initial_values,
    decay=DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
    largest_weight=largest_weight,
)
