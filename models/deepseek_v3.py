"""DeepSeek-V3 as single-device code: it knows torch, and nothing of meshes.

Attention is multi-head latent attention (MLA): keys and values of all heads are computed from one
narrow vector of each token, and only a part of each head, the same for all heads of the keys, is
rotated. All layers but the first few are mixtures of experts with shared experts, whose load a bias
balances. `models/family.py` explains what stands below. Source: DeepSeek-V3 technical report,
arXiv:2412.19437; MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1.

Shapes:  B batch   T sequence   H heads   P rotated part of a head   U the part that is not
         W = U + P   V width of a value
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import arithmetic, layers, moe, mtp
from models.family import Family
from models.flavors.deepseek_v3 import NUMBERS
from models.layers import Documents
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


# of the norms of latents, independent of norm_eps (DeepSeek's and transformers' code)
LATENT_EPS = 1e-6


class Latents(nn.Module):
    """Return the latents from which a token's keys and values are computed: kv_rank numbers, and P
    rotary ones that all heads share. This module has no parameters. It exists as a hook point:
    tensor parallelism gathers the sequence before it, and sampling caches its output."""

    def __init__(self, args: Args):
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


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, args: Args):
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


def score_scale(args: Args) -> float:
    """YaRN's factor of the attention scores (arXiv:2309.00071, section 3.4, in DeepSeek-V2's form:
    mscale_all_dim)."""
    scaling = args.rope_scaling
    return mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2 if scaling else 1.0


class DeepSeekV3(mtp.MultiTokenDecoder):
    def latents(self) -> list[nn.Module]:
        return [layer.attention.latents for layer in self.layers.values()]

    def block(self, args: Args, number: int) -> nn.Module:
        if number < args.n_dense_layers:
            return layers.Block(
                args, Attention(args), layers.FeedForward(args.dim, args.hidden_dim)
            )
        return moe.MixtureBlock(args, Attention(args), moe.MixtureOfExperts(args))

    def prediction(self, args: Args, number: int) -> nn.Module:
        return mtp.PredictionMixture(args, Attention(args), moe.MixtureOfExperts(args))

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
    """Return a plan that splits the heads. The narrow vectors of a token are computed once, by the
    rank that has the token in its slice of the sequence, and gathered: these are sent, not the
    hidden state."""
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
    attention = {f"layers.*.attention.{name}": style for name, style in attention.items()}
    if not args.q_rank:
        del attention["layers.*.attention.wq_a"], attention["layers.*.attention.q_norm"]
    first = {}
    for layer in range(args.n_dense_layers):
        first |= layers.tp_plan_of_feed_forward(str(layer))
    return (
        layers.TP_PLAN
        | attention
        | first
        | (moe.tp_plan(args) if has_mixtures(args) else {})
        | mtp.tp_plan(args)
    )


# Arithmetic ---------------------------------------------------------------------------------------


def attention_weights(args: Args) -> int:
    queries = args.n_heads * (args.nope_dim + args.rope_dim)
    down = args.dim * args.q_rank + args.dim * (args.kv_rank + args.rope_dim)
    up = (args.q_rank or args.dim) * queries + args.kv_rank * args.n_heads * (
        args.nope_dim + args.value_dim
    )
    return down + up + args.n_heads * args.value_dim * args.dim


def multiplied(args: Args, experts: int) -> int:
    """Count the weights that are multiplied, where so many of the experts that are not shared
    count."""
    feed_forward = args.n_dense_layers * 3 * args.dim * args.hidden_dim
    layers = args.n_layers + args.mtp_depth
    mixtures = (layers - args.n_dense_layers) * moe.weights(args, experts)
    return layers * attention_weights(args) + feed_forward + mixtures + args.dim * args.vocab_size


def _not_multiplied(args: Args) -> int:
    """Count the parameters that are not multiplied: an embedding that is not tied, the norms, and
    the biases of the routers."""
    embedding = 0 if args.tied_embeddings else args.dim * args.vocab_size
    norms = 2 * args.dim + args.q_rank + args.kv_rank
    layers = args.n_layers + args.mtp_depth
    return embedding + layers * norms + args.dim + args.mtp_depth * mtp.parameters(args)


def parameters(args: Args) -> int:
    """Count the trained parameters; the routers' biases are not trained."""
    return multiplied(args, args.n_experts) + _not_multiplied(args)


def active_parameters(args: Args) -> int:
    """Count the parameters that work on a token."""
    return multiplied(args, args.experts_per_token) + _not_multiplied(args)


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
    weights = multiplied(args, args.experts_per_token) + args.mtp_depth * mtp.multiplied(args)
    return 6.0 * weights + attention


def describe(args: Args) -> str:
    return (
        f"{arithmetic.layers(args.n_layers)} of width {args.dim}, {args.n_heads} heads, vocabulary "
        f"{args.vocab_size:,}"
        f"{' (tied)' if args.tied_embeddings else ''}; {moe.describe(args, active_parameters(args))} "
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
    parameters=parameters,
    flops_per_token=flops_per_token,
    describe=describe,
    largest_weight=largest_weight,
    active_parameters=active_parameters,
)
