"""Kimi Linear (48B-A3B) as single-device code: it knows torch, and nothing of meshes.

A hybrid: in three of four layers tokens see each other through the state of Kimi Delta Attention
(KDA), a gated delta net (models/delta_net.py) with a decay for each channel of the keys. The fourth,
and the last layer, have multi-head latent attention (models/latent_attention.py) without positions: the
order of tokens is in the states. All layers but the first are mixtures of experts as DeepSeek-V3's.
`models/family.py` explains what stands below. Sources: the Kimi team's report, arXiv:2510.26692, and
KimiLinearForCausalLM of transformers, with which tests compare it.

Shapes:  B batch   T sequence   H heads of KDA   E their width, of keys and of values
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import arithmetic, delta_net, latent_attention, layers, moe
from models.family import Family
from models.flavors.kimi_linear import NUMBERS
from models.kernels.precision import wide
from models.local import local


@dataclass(frozen=True)
class Args:
    """The numbers that define one Kimi Linear: a row of FLAVORS, with the overrides of the [model]
    table laid on top."""

    dim: int
    n_layers: int
    n_dense_layers: int  # of them, the first ones have no mixture of experts
    attention_interval: int  # every so many layers one has attention, and the last layer has
    n_heads: int  # of attention
    kv_rank: int  # width of the vector that a token's keys and values are computed from
    nope_dim: int  # width of a head of queries and keys, without
    rope_dim: int  # the part of it that all heads of the keys share
    value_dim: int  # width of a head of values
    delta_heads: int  # of KDA
    delta_dim: int  # width of one, and of the vectors that decay and gate are computed from
    conv_width: int  # tokens that a convolution sees
    hidden_dim: int  # of the feed-forward layer where there is no mixture
    n_experts: int
    experts_per_token: int
    expert_dim: int  # hidden units of one expert
    n_shared_experts: int
    routed_scale: float
    balance_loss: float  # factor of the sequence-wise balance loss
    vocab_size: int
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool

    q_rank: ClassVar[int] = 0
    rope_scaling: ClassVar[None] = None
    router_score: ClassVar[str] = "sigmoid"
    normalised_weights: ClassVar[bool] = True
    balancing_bias: ClassVar[bool] = True
    expert_groups: ClassVar[int] = 1


def has_attention(args: Args, number: int) -> bool:
    """Return True if this layer has attention, and False if it has KDA."""
    return (number + 1) % args.attention_interval == 0 or number == args.n_layers - 1


def attention_layers(args: Args) -> int:
    return -(-args.n_layers // args.attention_interval)


class KimiDeltaAttention(delta_net.DeltaNet):
    """Decay and gate are computed from narrow vectors, and the gate is a sigmoid (arXiv:2510.26692,
    section 4)."""

    def __init__(self, args: Args):
        H, E = args.delta_heads, args.delta_dim
        super().__init__(args, H, H, E, E)
        self.wf_a = nn.Linear(args.dim, E, bias=False)  # decay: f for forget
        self.wf_b = nn.Linear(E, H * E, bias=False)
        self.wg_a = nn.Linear(args.dim, E, bias=False)  # gate
        self.wg_b = nn.Linear(E, H * E, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(H * E))

    def decay(self, x: Tensor) -> Tensor:
        """Return the decay of each channel, [B, T, H, E]."""
        step = F.softplus(wide(self.wf_b(self.wf_a(x))) + wide(local(self.dt_bias)))
        rate = wide(local(self.A_log)).exp()[:, None]  # [H, 1]
        return -rate * step.unflatten(-1, (-1, self.key_dim))

    def gate(self, x: Tensor) -> Tensor:
        return wide(self.wg_b(self.wg_a(x))).sigmoid()


class KimiLinear(moe.SparseDecoder):
    def block(self, args: Args, number: int) -> nn.Module:
        kind = (
            latent_attention.LatentAttention if has_attention(args, number) else KimiDeltaAttention
        )
        mixer = kind(args)
        if number < args.n_dense_layers:
            return layers.Block(args, mixer, layers.FeedForward(args.dim, args.hidden_dim))
        return moe.MixtureBlock(args, mixer, moe.MixtureOfExperts(args))

    def latents(self) -> list[nn.Module]:
        with_attention = (number for number in self.layers if has_attention(self.args, int(number)))
        return [self.layers[number].attention.latents for number in with_attention]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of frequencies that are 0: no pair is turned, at any position."""
        frequencies = torch.zeros(self.args.rope_dim // 2, device=positions.device)
        return layers.rope_tables(frequencies, positions)


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    return delta_net.initial_values(args) + layers.initial_values(args)


DECAY = [*delta_net.DECAY, *layers.DECAY]


def tp_plan(args: Args) -> dict[str, str]:
    """Return a plan that splits the heads of both kinds of layers. The narrow vectors of attention are
    gathered; those of KDA, of the width of one head, are computed by every rank."""
    plan = dict(layers.TP_PLAN)
    for number in range(args.n_layers):
        mixer = f"layers.{number}.attention"
        if has_attention(args, number):
            plan |= latent_attention.tp_plan(args, str(number))
        else:
            plan |= delta_net.tp_plan(str(number), own=())
            plan |= {f"{mixer}.{name}": "whole_linear" for name in ("wf_a", "wg_a")}
            plan |= {f"{mixer}.{name}": "columns_plain" for name in ("wf_b", "wg_b")}
        if number < args.n_dense_layers:
            plan |= layers.tp_plan_of_feed_forward(str(number))
    return plan | (moe.tp_plan(args) if args.n_dense_layers < args.n_layers else {})


# Arithmetic ---------------------------------------------------------------------------------------


def kda_weights(args: Args) -> int:
    """Count the weights of one layer of KDA that a token is multiplied with, those of the
    convolution among them."""
    width = args.delta_heads * args.delta_dim
    projections = args.dim * (4 * width + args.delta_heads)  # q, k, v, o and beta
    narrow = 2 * args.delta_dim * (args.dim + width)
    return projections + narrow + 3 * width * args.conv_width


def multiplied(args: Args) -> int:
    """Count the weights that a token is multiplied with."""
    with_attention = attention_layers(args)
    mixers = with_attention * latent_attention.weights(args)
    mixers += (args.n_layers - with_attention) * kda_weights(args)
    feed_forward = args.n_dense_layers * 3 * args.dim * args.hidden_dim
    mixtures = (args.n_layers - args.n_dense_layers) * moe.multiplied(args)
    return mixers + feed_forward + mixtures + args.dim * args.vocab_size


def flops_per_token(args: Args, seq_len: int) -> float:
    """Count FLOPs as `models/arithmetic.py::flops_per_token` does, with the states of KDA, whose cost
    does not depend on the length."""
    with_attention = attention_layers(args)
    widths = args.nope_dim + args.rope_dim + args.value_dim
    attention = 6.0 * with_attention * args.n_heads * widths * seq_len
    state = delta_net.GatedDeltaCore.products * args.delta_heads * args.delta_dim**2
    states = 6.0 * (args.n_layers - with_attention) * state
    return 6.0 * multiplied(args) + attention + states


def describe(args: Args) -> str:
    states = arithmetic.layers(args.n_layers - attention_layers(args))
    return (
        f"{latent_attention.describe(args)}; {states} with Kimi delta attention of "
        f"{args.delta_heads} states; {moe.describe(args, FAMILY.active_parameters(args))} and "
        f"{args.n_shared_experts} shared"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    queries = args.n_heads * (args.nope_dim + args.rope_dim)
    return args.dim, max(args.hidden_dim, queries, args.delta_heads * args.delta_dim)


FAMILY = Family(
    name="kimi_linear",
    numbers=NUMBERS,
    Args=Args,
    build=KimiLinear,
    initial_values=initial_values,
    decay=DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
    largest_weight=largest_weight,
)
