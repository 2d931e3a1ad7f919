"""Qwen3 dense (0.6B to 32B) as single-device code: it knows torch, and nothing of meshes.

Two things distinguish it from Llama. Queries and keys are normalised within each head before they are rotated, with one gain
for all heads (QK-norm; Dehghani et al., arXiv:2302.05442, section 2). And the width of a head is a number of its own, which
need not be dim / n_heads. `models/family.py` explains what stands below. Source: Qwen3 technical report, arXiv:2505.09388.
"""

from typing import Any

from torch import Tensor, nn

from models import dense, layers
from models.dense import (  # noqa: F401  what holds for every dense decoder
    DECAY,
    OPTIONS,
    RULES,
    Args,
    describe,
    flops_per_token,
    hf_ignored,
    initial_values,
    largest_product,
)


class Attention(layers.Attention):
    def __init__(self, args: Args):
        super().__init__(args)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v  # [B, T, H, E], [B, T, K, E] twice


class Qwen3(layers.Decoder):
    def block(self, args: Args) -> nn.Module:
        return layers.Block(args, Attention(args), layers.FeedForward(args))


def build(args: Args, layers: range | None = None) -> Qwen3:
    return Qwen3(args, layers)


# Sources: arXiv:2505.09388, table 1 (layers, heads, tied embeddings), and the config.json of Qwen/Qwen3-0.6B, -1.7B, -4B, -8B,
# -14B and -32B on the Hugging Face hub. `debug` is ours, sized for two CPU cores; it has 4 key/value heads so that tensor
# parallelism up to 4 can be tried on a laptop, and heads of another width than dim / n_heads.
FLAVORS = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "head_dim": 48, "hidden_dim": 640,
              "vocab_size": 4096, "rope_theta": 10000.0, "norm_eps": 1e-6, "max_seq_len": 8192, "tied_embeddings": False},
    "0.6B": {"dim": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 3072,
             "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": True},
    "1.7B": {"dim": 2048, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 6144,
             "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": True},
    "4B": {"dim": 2560, "n_layers": 36, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 9728,
           "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": True},
    "8B": {"dim": 4096, "n_layers": 36, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 12288,
           "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": False},
    "14B": {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 17408,
            "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": False},
    "32B": {"dim": 5120, "n_layers": 64, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 25600,
            "vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960, "tied_embeddings": False},
}  # fmt: skip

FOLLOWS = {}  # the width of a head stays what it is

# Heads are split over the ranks and all use the same gain, whose gradient is therefore a sum over ranks.
TP_PLAN = dense.TP_PLAN | {"layers.*.attention.q_norm": "heads", "layers.*.attention.k_norm": "heads"}


def parameters(args: Args) -> int:
    return dense.parameters(args) + args.n_layers * 2 * args.head_dim


def small(dim: int) -> Args:
    sizes = {"dim": dim, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "head_dim": dim // 2, "hidden_dim": dim, "vocab_size": 16}
    return Args(**FLAVORS["debug"] | sizes)


# Hugging Face: Qwen3ForCausalLM ---------------------------------------------------------------------------------------

HF_FIXED = dense.HF_FIXED | {"model_type": "qwen3", "use_sliding_window": False}

HF_NAMES = dense.HF_NAMES | {
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}


def hf_names(args: Args) -> dict[str, str]:
    return dense.hf_names(args, HF_NAMES)


def hf_config(args: Args) -> dict[str, Any]:
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return names | dense.hf_fields(args) | {"use_sliding_window": False, "max_window_layers": args.n_layers}


def args_from_hf(config: dict[str, Any]) -> Args:
    """What config.json does not say has Qwen3Config's default."""
    rope, kinds = dense.hf_rope(config), config.get("layer_types") or ["full_attention"]
    if rope["rope_type"] != "default":
        raise ValueError(f"rotary positions of type {rope['rope_type']!r} ({rope}) are not supported, only default")
    if set(kinds) != {"full_attention"}:
        raise ValueError(f"layer_types has {sorted(set(kinds))}, only full_attention is supported")
    return Args(**dense.numbers_from_hf(config, head_dim=128, kv_heads=32, context=32768))
