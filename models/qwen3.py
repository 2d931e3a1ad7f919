"""Qwen3, dense (0.6B to 32B) and with mixtures of experts (30B-A3B, 235B-A22B), as single-device
code: it knows torch, and nothing of meshes.

Two things distinguish it from Llama. Queries and keys are normalised within each head before they
are rotated, with one gain for all heads (QK-norm; Dehghani et al., arXiv:2302.05442, section 2).
And the width of a head is a number of its own, which need not be dim / n_heads. In models with
experts the feed-forward layer of every block is a mixture. `models/family.py` explains what stands
below. Source: Qwen3 technical report, arXiv:2505.09388.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from models import dense, layers, moe
from models.dense import (  # noqa: F401  what holds for all decoders
    DECAY,
    OPTIONS_OF_EXPERTS,
    QUERY_WIDTH,
    RULES_OF_EXPERTS,
    hf_ignored,
    initial_values,
    largest_product,
)
from models.dense import OPTIONS as DENSE_OPTIONS
from models.dense import RULES as DENSE_RULES


@dataclass(frozen=True)
class Args(dense.Args):
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


class Qwen3(layers.Decoder):
    def block(self, args: Args, number: int) -> nn.Module:
        if args.n_experts:
            return moe.MixtureBlock(args, Attention(args), moe.MixtureOfExperts(args))
        return layers.Block(args, Attention(args), layers.FeedForward(args.dim, args.hidden_dim))


def build(args: Args, layers: range | None = None) -> Qwen3:
    return Qwen3(args, layers)


# Sources: arXiv:2505.09388, table 1 (layers, heads, tied embeddings), and the config.json of
# Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B and -32B on the Hugging Face hub; table 2 and the
# config.json of Qwen/Qwen3-30B-A3B and -235B-A22B. The factor of the balance loss is the hub's
# router_aux_loss_coef. `debug` is ours, sized for two CPU cores; it has 4 key/value heads so that
# tensor parallelism up to 4 can be tried on a laptop, and heads of a width that is not dim /
# n_heads. So is `debug_moe`.
FLAVORS = {
    "debug": {
        "dim": 256,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 48,
        "hidden_dim": 640,
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 8192,
        "tied_embeddings": False,
    },
    "0.6B": {
        "dim": 1024,
        "n_layers": 28,
        "n_heads": 16,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 3072,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": True,
    },
    "1.7B": {
        "dim": 2048,
        "n_layers": 28,
        "n_heads": 16,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 6144,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": True,
    },
    "4B": {
        "dim": 2560,
        "n_layers": 36,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 9728,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": True,
    },
    "8B": {
        "dim": 4096,
        "n_layers": 36,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 12288,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": False,
    },
    "14B": {
        "dim": 5120,
        "n_layers": 40,
        "n_heads": 40,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 17408,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": False,
    },
    "32B": {
        "dim": 5120,
        "n_layers": 64,
        "n_heads": 64,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 25600,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": False,
    },
    "debug_moe": {
        "dim": 192,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 32,
        "hidden_dim": 512,
        "n_experts": 16,
        "experts_per_token": 4,
        "expert_dim": 96,
        "balance_loss": 0.001,
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 8192,
        "tied_embeddings": False,
    },
    "30B-A3B": {
        "dim": 2048,
        "n_layers": 48,
        "n_heads": 32,
        "n_kv_heads": 4,
        "head_dim": 128,
        "hidden_dim": 6144,
        "n_experts": 128,
        "experts_per_token": 8,
        "expert_dim": 768,
        "balance_loss": 0.001,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": False,
    },
    "235B-A22B": {
        "dim": 4096,
        "n_layers": 94,
        "n_heads": 64,
        "n_kv_heads": 4,
        "head_dim": 128,
        "hidden_dim": 12288,
        "n_experts": 128,
        "experts_per_token": 8,
        "expert_dim": 1536,
        "balance_loss": 0.001,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "max_seq_len": 40960,
        "tied_embeddings": False,
    },
}

OPTIONS = DENSE_OPTIONS | OPTIONS_OF_EXPERTS
RULES = DENSE_RULES | RULES_OF_EXPERTS
FOLLOWS = {}  # the width of a head stays what it is


def tp_plan(args: Args) -> dict[str, str]:
    """Heads are split over the ranks and all use the same gain, whose gradient is therefore a sum
    over ranks."""
    norms = {"layers.*.attention.q_norm": "heads", "layers.*.attention.k_norm": "heads"}
    feed_forward = moe.tp_plan(args) if args.n_experts else dense.tp_plan_of_feed_forward()
    return dense.TP_PLAN | dense.TP_PLAN_OF_ATTENTION | norms | feed_forward


def feed_forward_weights(args: Args, experts: int) -> int | None:
    return moe.weights(args, experts) if args.n_experts else None


def parameters(args: Args) -> int:
    return (
        dense.parameters(args, feed_forward_weights(args, args.n_experts))
        + args.n_layers * 2 * args.head_dim
    )


def active_parameters(args: Args) -> int:
    """Those that work on a token."""
    return (
        dense.parameters(args, feed_forward_weights(args, args.experts_per_token))
        + args.n_layers * 2 * args.head_dim
    )


def flops_per_token(args: Args, seq_len: int) -> float:
    return dense.flops_per_token(args, seq_len, feed_forward_weights(args, args.experts_per_token))


def describe(args: Args) -> str:
    if not args.n_experts:
        return dense.describe(args)
    return (
        f"{dense.describe(args)}; {active_parameters(args):,} of the parameters for each token: "
        f"{args.experts_per_token} of {args.n_experts} experts"
    )


def small(dim: int) -> Args:
    sizes = {
        "dim": dim,
        "n_layers": 4,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": dim // 2,
        "hidden_dim": dim,
        "vocab_size": 16,
    }
    return Args(**FLAVORS["debug"] | sizes)


# Hugging Face: Qwen3ForCausalLM, Qwen3MoeForCausalLM ----------------------------------------------

HF_TYPES = ("qwen3", "qwen3_moe")
HF_FIXED = dense.HF_FIXED | {"use_sliding_window": False}

QK_NORMS = {
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
HF_NAMES = dense.HF_NAMES | QK_NORMS
HF_NAMES_OF_EXPERTS = {
    ours: theirs for ours, theirs in HF_NAMES.items() if ".feed_forward." not in ours
} | moe.HF_NAMES


def hf_names(args: Args) -> dict[str, str]:
    return dense.hf_names(args, HF_NAMES_OF_EXPERTS if args.n_experts else HF_NAMES)


def hf_config(args: Args) -> dict[str, Any]:
    fields = dense.hf_fields(args) | {
        "use_sliding_window": False,
        "max_window_layers": args.n_layers,
    }
    if not args.n_experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | fields
    numbers = {
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_dim,
        "router_aux_loss_coef": args.balance_loss,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | fields | numbers


def args_from_hf(config: dict[str, Any]) -> Args:
    """What config.json does not say has Qwen3Config's default."""
    rope, kinds = dense.hf_rope(config), config.get("layer_types") or ["full_attention"]
    if rope["rope_type"] != "default":
        raise ValueError(
            f"rotary positions of type {rope['rope_type']!r} ({rope}) are not supported, only "
            "default"
        )
    if set(kinds) != {"full_attention"}:
        raise ValueError(f"layer_types has {sorted(set(kinds))}, only full_attention is supported")
    if config.get("model_type") != "qwen3_moe":
        return Args(**dense.numbers_from_hf(config, head_dim=128, kv_heads=32, context=32768))
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError(
            "some layers have no experts (decoder_sparse_step, mlp_only_layers): all must have them"
        )
    if not config.get("norm_topk_prob", False):
        raise ValueError(
            "norm_topk_prob is false: the weights of a token's experts must add up to 1"
        )
    numbers = dense.numbers_from_hf(config, head_dim=None, kv_heads=4, context=32768)
    return Args(
        **numbers,
        n_experts=dense.whole_number(
            config, "num_experts" if "num_experts" in config else "num_local_experts", 128
        ),
        experts_per_token=dense.whole_number(config, "num_experts_per_tok", 8),
        expert_dim=dense.whole_number(config, "moe_intermediate_size", 768),
        balance_loss=float(config.get("router_aux_loss_coef", 0.001)),
    )
