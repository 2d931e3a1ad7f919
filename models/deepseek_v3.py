"""DeepSeek-V3 as single-device code: it knows torch, and nothing of meshes.

Attention is multi-head latent attention (MLA): keys and values of all heads are computed from one
narrow vector of each token, and only a part of each head, the same for all heads of the keys, is
rotated. All layers but the first few are mixtures of experts with shared experts, whose load a bias
balances. `models/family.py` explains what stands below. Source: DeepSeek-V3 technical report,
arXiv:2412.19437; MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1.

Shapes:  B batch   T sequence   H heads   P rotated part of a head   U the part that is not
         W = U + P   V width of a value
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import dense, layers, moe
from models.dense import DECAY, initial_values  # noqa: F401  as in all decoders
from models.flavors.deepseek_v3 import FLAVORS
from models.layers import Documents
from models.options import OPTIONS as DENSE_OPTIONS
from models.options import OPTIONS_OF_EXPERTS, RULES_OF_EXPERTS, ulysses_rule
from models.options import RULES as DENSE_RULES


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

    router_score: ClassVar[str] = "sigmoid"
    normalised_weights: ClassVar[bool] = True
    balancing_bias: ClassVar[bool] = True


# of the norms of the narrow vectors, whatever norm_eps is (DeepSeek's and transformers' code)
LATENT_EPS = 1e-6


class Latents(nn.Module):
    """What the keys and values of a token are computed from: kv_rank numbers, and P for all heads
    of the keys. It has no parameters, and is a module for the sake of others: tensor parallelism
    gathers the sequence before it, and sampling keeps what it returns of earlier tokens."""

    def __init__(self, args: Args):
        super().__init__()
        self.widths = args.kv_rank, args.rope_dim

    def forward(self, narrow: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """narrow [B, T, kv_rank + P] -> the same with the last P numbers rotated."""
        latent, k_rope = narrow.split(self.widths, -1)
        return torch.cat((latent, rotate(k_rope[:, :, None], cos, sin).flatten(2)), -1)


class Core(layers.AttentionCore):
    """Values are narrower than keys, and fast kernels want them as wide. They are padded here, so
    that those who replace `forward` to exchange keys and values between ranks send no zeros."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        """q and k [B, T, H, W], v [B, T, H, V] -> [B, T, H, V]."""
        padded = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return super().forward(q, k, padded, documents)[..., : v.shape[-1]]


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
    return _mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2 if scaling else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class DeepSeekV3(moe.SparseDecoder):
    def latents(self) -> list[nn.Module]:
        return [layer.attention.latents for layer in self.layers.values()]

    def block(self, args: Args, number: int) -> nn.Module:
        if number < args.n_dense_layers:
            return layers.Block(
                args, Attention(args), layers.FeedForward(args.dim, args.hidden_dim)
            )
        return moe.MixtureBlock(args, Attention(args), moe.MixtureOfExperts(args))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        frequencies = layers.rope_frequencies(args.rope_dim, args.rope_theta, positions.device)
        if args.rope_scaling is None:
            return layers.rope_tables(frequencies, positions)
        scaling = args.rope_scaling
        cos, sin = layers.rope_tables(yarn(frequencies, args.rope_theta, **scaling), positions)
        length = _mscale(scaling["factor"], scaling["mscale"]) / _mscale(
            scaling["factor"], scaling["mscale_all_dim"]
        )
        return cos * length, sin * length


def yarn(
    frequencies: Tensor,
    theta: float,
    factor: float,
    original_max_seq_len: float,
    beta_fast: float,
    beta_slow: float,
    **_: float,
) -> Tensor:
    """Radians per position, float32 [P/2], with the slow ones divided by `factor` (Peng et al.,
    arXiv:2309.00071, section 3.2).

    A pair that turns more than beta_fast times within the original length keeps its frequency, one
    that turns less than beta_slow times is slowed down, and those in between are mixed in a
    straight line.
    """

    def pair_that_turns(times: float) -> float:
        """The number of the pair that turns so often, as a real number."""
        return (
            len(frequencies)
            * math.log(original_max_seq_len / (times * 2 * math.pi))
            / math.log(theta)
        )

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), 2 * len(frequencies) - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    # 0.001: as in the authors' code, for low = high
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / factor * slowed + frequencies * (1 - slowed)


def build(args: Args, layers: range | None = None) -> DeepSeekV3:
    return DeepSeekV3(args, layers)


OPTIONS = (
    {key: row for key, row in DENSE_OPTIONS.items() if key not in ("n_kv_heads", "head_dim")}
    | OPTIONS_OF_EXPERTS
    | {
        "n_dense_layers": (
            int,
            {"ge": 0},
            "Number of first layers that have no mixture of experts.",
        ),
        "q_rank": (
            int,
            {"ge": 0},
            "Width of the vector that a token's queries are computed from; 0: directly.",
        ),
        "kv_rank": (
            int,
            {"ge": 1},
            "Width of the vector that a token's keys and values are computed from.",
        ),
        "nope_dim": (
            int,
            {"ge": 1},
            "Width of the part of a head of queries and keys that is not rotated.",
        ),
        "rope_dim": (int, {"ge": 2}, "Width of the part that is rotated."),
        "value_dim": (int, {"ge": 1}, "Width of a head of values."),
        "n_shared_experts": (
            int,
            {"ge": 0},
            "Number of experts of each mixture that work on every token.",
        ),
        "expert_groups": (
            int,
            {"ge": 1},
            "Number of equal groups that the experts of a mixture form; 1: no groups.",
        ),
        "groups_per_token": (
            int,
            {"ge": 1},
            "Number of groups among whose experts a token's are chosen.",
        ),
        "routed_scale": (
            float,
            {"gt": 0},
            "Factor of the output of the experts that are not shared.",
        ),
    }
)
FOLLOWS = {}
QUERY_WIDTH = ("nope_dim", "rope_dim")
RULES = (
    {key: DENSE_RULES[key] for key in ("tp_heads", "tp_hidden")}
    | RULES_OF_EXPERTS
    | {
        "tp_shared": (
            lambda c: (
                c.model.n_shared_experts * c.model.expert_dim % c.parallelism.tensor_parallel != 0
            ),
            "{parallelism.tensor_parallel} does not divide {model.n_shared_experts} times "
            "{model.expert_dim}, the hidden units of "
            "the shared experts, of which each rank computes an equal share",
        ),
        "cp_latent_heads": ulysses_rule("n_heads", "heads"),
        "dense_layers": (
            lambda c: c.model.n_dense_layers > c.model.n_layers,
            "{model.n_dense_layers} is above {model.n_layers}: lower the one or raise the other",
        ),
        "no_experts": (
            lambda c: c.model.n_experts == 0 and c.model.n_dense_layers < c.model.n_layers,
            "{model.n_experts}, but all of {model.n_layers} but the first ones, "
            "{model.n_dense_layers}, are mixtures of experts: set "
            "n_experts to 1 or more, or n_dense_layers to n_layers",
        ),
        "rope_dim": (
            lambda c: c.model.rope_dim % 2 != 0,
            "{model.rope_dim} must be even, since rotary positions turn pairs",
        ),
        "value_dim": (
            lambda c: c.model.value_dim > c.model.nope_dim + c.model.rope_dim,
            "{model.value_dim} is above {model.nope_dim} plus {model.rope_dim}: values are padded "
            "to the width of a query, and cannot "
            "be wider",
        ),
        "expert_groups": (  # a group is as good as the sum of its two best experts
            lambda c: (
                c.model.n_experts
                and c.model.expert_groups > 1
                and (
                    c.model.n_experts % c.model.expert_groups != 0
                    or c.model.n_experts < 2 * c.model.expert_groups
                )
            ),
            "{model.expert_groups} must divide {model.n_experts} into groups of two experts or "
            "more",
        ),
        "groups_per_token": (
            lambda c: (
                c.model.groups_per_token > c.model.expert_groups
                or 0
                < c.model.n_experts // c.model.expert_groups * c.model.groups_per_token
                < c.model.experts_per_token
            ),
            "{model.experts_per_token} cannot be chosen within {model.groups_per_token} of "
            "{model.expert_groups} with {model.n_experts} "
            "in all: raise groups_per_token (up to expert_groups), or lower experts_per_token",
        ),
    }
)


def tp_plan(args: Args) -> dict[str, str]:
    """The narrow vectors of a token are computed once, by the rank that has the token in its slice
    of the sequence, and gathered: they are what crosses, not the hidden state. Heads are split."""
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
        first |= dense.tp_plan_of_feed_forward(str(layer))
    return (
        dense.TP_PLAN
        | attention
        | first
        | (moe.tp_plan(args) if args.n_dense_layers < args.n_layers else {})
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
    """Weights that are multiplied, where so many of the experts that are not shared count."""
    feed_forward = args.n_dense_layers * 3 * args.dim * args.hidden_dim
    mixtures = (args.n_layers - args.n_dense_layers) * moe.weights(args, experts)
    return (
        args.n_layers * attention_weights(args)
        + feed_forward
        + mixtures
        + args.dim * args.vocab_size
    )


def _beside(args: Args) -> int:
    """Parameters that are not multiplied: an embedding that is not tied, the norms, and the biases
    of the routers."""
    embedding = 0 if args.tied_embeddings else args.dim * args.vocab_size
    norms = 2 * args.dim + args.q_rank + args.kv_rank
    return embedding + args.n_layers * norms + args.dim


def parameters(args: Args) -> int:
    """Those that are trained; the routers' biases are not."""
    return multiplied(args, args.n_experts) + _beside(args)


def active_parameters(args: Args) -> int:
    """Those that work on a token."""
    return multiplied(args, args.experts_per_token) + _beside(args)


def flops_per_token(args: Args, seq_len: int) -> float:
    """As `models/dense.py::flops_per_token`; a score takes the W numbers of a query, and its use
    the V of a value."""
    attention = (
        6.0
        * args.n_layers
        * args.n_heads
        * (args.nope_dim + args.rope_dim + args.value_dim)
        * seq_len
    )
    return 6.0 * multiplied(args, args.experts_per_token) + attention


def describe(args: Args) -> str:
    return (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads, vocabulary "
        f"{args.vocab_size:,}"
        f"{' (tied)' if args.tied_embeddings else ''}; {active_parameters(args):,} of the "
        "parameters for each token: "
        f"{args.experts_per_token} of {args.n_experts} experts and {args.n_shared_experts} shared"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    return args.dim, max(args.hidden_dim, args.n_heads * (args.nope_dim + args.rope_dim))


def small(dim: int) -> Args:
    sizes = {
        "dim": dim,
        "n_layers": 4,
        "n_dense_layers": 1,
        "n_heads": 2,
        "kv_rank": dim // 2,
        "nope_dim": dim // 4,
        "rope_dim": dim // 4,
        "value_dim": dim // 2,
        "hidden_dim": dim,
        "expert_dim": dim // 2,
        "vocab_size": 16,
    }
    return Args(**FLAVORS["debug"] | sizes)
