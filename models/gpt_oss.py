"""gpt-oss (20B and 120B) as single-device code: it knows torch, and nothing of meshes.

Every block is a mixture of experts. What distinguishes it from Qwen3's: attention sees a window of
keys in every other layer, beginning with the first, and each head has a sink, a learned score that
joins the softmax's denominator; all projections, the router and the experts have biases; the gate
of SwiGLU is clamped; rotary positions are YaRN's. `models/family.py` explains what stands below.
Source: gpt-oss model card, arXiv:2508.10925, section 2, and OpenAI's code, github.com/openai/gpt-oss.

Shapes:  N tokens   M rows of all experts   X experts   D = dim   F hidden units of an expert
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models import arithmetic, layers, moe
from models.family import Family
from models.flavors.gpt_oss import NUMBERS
from models.kernels.grouped_product import add_bias_of_group, grouped_product
from models.kernels.precision import wide
from models.kernels.ruled_attention import AttentionSpec
from models.local import local
from models.yarn import mscale, yarn


@dataclass(frozen=True)
class Args:
    """The numbers that define a model: a row of FLAVORS, with the overrides of the [model] table
    laid on top."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int  # keys that a query sees in layers 0, 2, 4, ...; 0: all
    n_experts: int
    experts_per_token: int
    expert_dim: int  # hidden units of one expert, F
    balance_loss: float  # factor of the sequence-wise balance loss
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # YaRN
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool

    router_score: ClassVar[str] = "softmax"
    # a softmax over the chosen experts alone is one over all of them, divided by its sum over these
    normalised_weights: ClassVar[bool] = True
    routed_scale: ClassVar[float] = 1.0
    expert_groups: ClassVar[int] = 1
    n_shared_experts: ClassVar[int] = 0
    balancing_bias: ClassVar[bool] = False

    @property
    def hidden_dim(self) -> int:
        """Return the width of the MLP, config.json's intermediate_size."""
        return self.expert_dim


# Constants of OpenAI's code (`swiglu` of its torch model); config.json has the second, as
# swiglu_limit
ALPHA = 1.702
LIMIT = 7.0


def attention_spec(args: Args, number: int) -> AttentionSpec:
    """Return the attention spec of this layer."""
    has_window = args.window and number % 2 == 0
    return AttentionSpec(window=args.window if has_window else None, sinks=True)


class Attention(layers.Attention):
    def __init__(self, args: Args, number: int):
        super().__init__(args, attention_spec(args, number))
        for linear in (self.wq, self.wk, self.wv, self.wo):
            linear.bias = nn.Parameter(torch.empty(linear.out_features))


class BiasedRouter(moe.Router):
    """Its logits have a bias that is trained. Unlike a balancing bias it also moves the weights of
    the experts' outputs."""

    def __init__(self, args: Args):
        super().__init__(args)
        self.bias = nn.Parameter(torch.empty(args.n_experts))

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) + wide(local(self.bias))


class ClampedExperts(moe.Experts):
    """With biases, and with a SwiGLU that is clamped: w2((up + 1) * gate * sigmoid(ALPHA * gate))."""

    def __init__(self, args: Args):
        super().__init__(args)
        self.b1 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim))  # [X, F]
        self.b2 = nn.Parameter(torch.empty(args.n_experts, args.dim))  # [X, D]
        self.b3 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim))  # [X, F]

    def weights(self) -> list[Tensor]:
        return [*super().weights(), *self.parts(self.b1, self.b2, self.b3)]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute the experts as `moe.Experts` does, with biases. An expert's output includes b2,
        so combine weights the bias too."""
        w1, w2, w3, b1, b2, b3 = self.weights()
        gate = add_bias_of_group(grouped_product(rows, w1, counts), b1, counts)  # [M, F]
        up = add_bias_of_group(grouped_product(rows, w3, counts), b3, counts)  # [M, F]
        gate = gate.clamp(max=LIMIT)
        up = up.clamp(-LIMIT, LIMIT)
        hidden = (up + 1) * (gate * torch.sigmoid(ALPHA * gate))  # [M, F]
        return add_bias_of_group(grouped_product(hidden, w2, counts), b2, counts)  # [M, D]


class GptOss(moe.SparseDecoder):
    def block(self, args: Args, number: int) -> nn.Module:
        mixture = moe.MixtureOfExperts(args, BiasedRouter(args), ClampedExperts(args))
        return moe.MixtureBlock(args, Attention(args, number), mixture)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        frequencies = layers.rope_frequencies(args.head_dim, args.rope_theta, positions.device)
        if args.rope_scaling is None:
            return layers.rope_tables(frequencies, positions)
        frequencies = yarn(frequencies, args.rope_theta, **args.rope_scaling)
        cos, sin = layers.rope_tables(frequencies, positions)
        length = mscale(args.rope_scaling["factor"])
        return cos * length, sin * length


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    """Return how weights are drawn: matrices as in all our decoders, sinks as transformers does it
    (normal, 0.02). Biases are 0: for the router's that is our choice, so that no expert is
    preferred at first."""
    biases = [
        ("*.bias", "zeros", 0.0),
        ("*.experts.b[123]", "zeros", 0.0),
    ]
    return biases + layers.initial_values(args)


# Vectors do not decay, matrices do, as in nanoGPT. An expert's bias is a vector.
DECAY = [
    ("*norm.weight", False),
    ("*.bias", False),
    ("*.sinks", False),
    ("*.experts.b[123]", False),
    ("*", True),
]


def tp_plan(args: Args) -> dict[str, str]:
    attention = layers.TP_PLAN_OF_ATTENTION | {
        "layers.*.attention": "gather_sequence_split_own"  # a sink for each head
    }
    return layers.TP_PLAN | attention | moe.tp_plan(args)


# Arithmetic ---------------------------------------------------------------------------------------


def flops_per_token(args: Args, seq_len: int) -> float:
    specs = [attention_spec(args, number) for number in range(args.n_layers)]
    weights = moe.multiplied(args)
    return arithmetic.flops_per_token(args, seq_len, weights, specs)


def describe(args: Args) -> str:
    return (
        f"{arithmetic.describe(args)}, windows of {args.window} in every other layer; "
        f"{moe.describe(args, FAMILY.active_parameters(args))}"
    )


def largest_weight(args: Args) -> tuple[int, int]:
    return args.dim, args.n_heads * args.head_dim


FAMILY = Family(
    name="gpt_oss",
    numbers=NUMBERS,
    Args=Args,
    build=GptOss,
    initial_values=initial_values,
    decay=DECAY,
    tp_plan=tp_plan,
    flops_per_token=flops_per_token,
    describe=describe,
    largest_weight=largest_weight,
)
