"""DeepSeek-V3 as single-device code: it knows torch, and nothing of meshes.

Attention is multi-head latent attention (models/latent_attention.py). All layers but the first few
are mixtures of experts with shared experts, whose load a bias balances. `models/family.py` explains
what stands below. Source: DeepSeek-V3 technical report, arXiv:2412.19437.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from models import latent_attention, layers, moe, mtp
from models.family import Family
from models.flavors.deepseek_v3 import NUMBERS
from models.latent_attention import LatentAttention
from models.yarn import mscale, yarn


@dataclass(frozen=True)
class Args:
    """The numbers that define a model: a row of FLAVORS, with the overrides of the [model] table
    laid on top."""

    dim: int
    n_layers: int
    n_dense_layers: int  # of them, the first ones have no mixture of experts
    n_heads: int
    # width of the vector that a token's queries are computed from; 0: directly from the hidden
    # state
    q_rank: int
    kv_rank: int  # width of the vector that its keys and values are computed from
    nope_dim: int  # U, the part of a query's and a key's head that is not rotated
    rope_dim: int  # P
    value_dim: int  # V
    hidden_dim: int  # of the feed-forward layer where there is no mixture
    n_experts: int
    experts_per_token: int
    expert_dim: int  # hidden units of one expert
    n_shared_experts: int
    expert_groups: int
    groups_per_token: int
    routed_scale: float
    balance_loss: float  # factor of the sequence-wise balance loss
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, float] | None  # YaRN (arXiv:2309.00071)
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool
    mtp_depth: int = 0  # layers that predict further tokens (models/mtp.py)

    router_score: ClassVar[str] = "sigmoid"
    normalised_weights: ClassVar[bool] = True
    balancing_bias: ClassVar[bool] = True


class DeepSeekV3(mtp.MultiTokenDecoder):
    def latents(self) -> list[nn.Module]:
        return [layer.attention.latents for layer in self.layers.values()]

    def block(self, args: Args, number: int) -> nn.Module:
        if number < args.n_dense_layers:
            return layers.Block(
                args, LatentAttention(args), layers.FeedForward(args.dim, args.hidden_dim)
            )
        return moe.MixtureBlock(args, LatentAttention(args), moe.MixtureOfExperts(args))

    def prediction(self, args: Args, number: int) -> nn.Module:
        return mtp.PredictionMixture(args, LatentAttention(args), moe.MixtureOfExperts(args))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        frequencies = layers.rope_frequencies(args.rope_dim, args.rope_theta, positions.device)
        if args.rope_scaling is None:
            return layers.rope_tables(frequencies, positions)
        scaling = args.rope_scaling
        cos, sin = layers.rope_tables(yarn(frequencies, args.rope_theta, **scaling), positions)
        length = mscale(scaling["factor"], scaling["mscale"]) / mscale(
            scaling["factor"], scaling["mscale_all_dim"]
        )
        return cos * length, sin * length


def has_mixtures(args: Args) -> bool:
    return args.n_dense_layers < args.n_layers or args.mtp_depth > 0


def tp_plan(args: Args) -> dict[str, str]:
    first = {}
    for layer in range(args.n_dense_layers):
        first |= layers.tp_plan_of_feed_forward(str(layer))
    return (
        layers.TP_PLAN
        | latent_attention.tp_plan(args)
        | first
        | (moe.tp_plan(args) if has_mixtures(args) else {})
        | mtp.tp_plan(args)
    )


# Arithmetic ---------------------------------------------------------------------------------------


def multiplied(args: Args) -> int:
    """Count the weights that a token is multiplied with."""
    feed_forward = args.n_dense_layers * 3 * args.dim * args.hidden_dim
    layers = args.n_layers + args.mtp_depth
    mixtures = (layers - args.n_dense_layers) * moe.multiplied(args)
    return (
        layers * latent_attention.weights(args)
        + feed_forward
        + mixtures
        + args.dim * args.vocab_size
    )


def flops_per_token(args: Args, seq_len: int) -> float:
    """Count FLOPs as `models/arithmetic.py::flops_per_token` does, with W numbers in each query and
    V in each value."""
    attention = (
        6.0
        * (args.n_layers + args.mtp_depth)
        * args.n_heads
        * (args.nope_dim + args.rope_dim + args.value_dim)
        * seq_len
    )
    weights = multiplied(args) + args.mtp_depth * mtp.multiplied(args)
    return 6.0 * weights + attention


def describe(args: Args) -> str:
    return (
        f"{latent_attention.describe(args)}; {moe.describe(args, FAMILY.active_parameters(args))} "
        f"and {args.n_shared_experts} shared{mtp.describe(args)}"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    return args.dim, max(args.hidden_dim, args.n_heads * (args.nope_dim + args.rope_dim))


FAMILY = Family(
    name="deepseek_v3",
    numbers=NUMBERS,
    Args=Args,
    build=DeepSeekV3,
    initial_values=layers.initial_values,
    decay=layers.DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
    largest_weight=largest_weight,
)
