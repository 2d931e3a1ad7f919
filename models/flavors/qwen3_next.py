"""The published size of Qwen3-Next, and a small one of ours. No torch: `configs/` imports this
file."""

from typing import Any

from models.options import (
    MIXTURE_DEBUG,
    OPTIONS_OF_EXPERTS,
    OPTIONS_OF_MTP,
    RULES_OF_EXPERTS,
    RULES_OF_MTP,
    Numbers,
    dense_toy,
)
from models.options import OPTIONS as DENSE_OPTIONS
from models.options import RULES as DENSE_RULES

# Source: the config.json of Qwen/Qwen3-Next-80B-A3B-Instruct on the Hugging Face hub; Qwen3-Coder-Next
# has the same numbers. The factor of the balance loss is its router_aux_loss_coef.
FLAVORS: dict[str, dict] = {
    "debug": MIXTURE_DEBUG
    | {
        "n_layers": 4,
        "attention_interval": 4,
        "rope_dim": 8,
        "delta_key_heads": 4,
        "delta_value_heads": 8,
        "delta_key_dim": 32,
        "delta_value_dim": 32,
        "conv_width": 4,
        "shared_dim": 96,
        "balance_loss": 0.001,
        "norm_eps": 1e-6,
        "mtp_depth": 0,
    },
    "80B-A3B": {
        "dim": 2048,
        "n_layers": 48,
        "attention_interval": 4,
        "n_heads": 16,
        "n_kv_heads": 2,
        "head_dim": 256,
        "rope_dim": 64,
        "delta_key_heads": 16,
        "delta_value_heads": 32,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
        "conv_width": 4,
        "n_experts": 512,
        "experts_per_token": 10,
        "expert_dim": 512,
        "shared_dim": 512,
        "balance_loss": 0.001,
        "vocab_size": 151936,
        "rope_theta": 1e7,
        "norm_eps": 1e-6,
        "max_seq_len": 262144,
        "tied_embeddings": False,
        "mtp_depth": 0,
    },
}

OPTIONS = (
    {key: row for key, row in DENSE_OPTIONS.items() if key != "hidden_dim"}
    | OPTIONS_OF_EXPERTS
    | OPTIONS_OF_MTP
    | {
        "attention_interval": (
            int,
            {"ge": 1},
            "Every so many layers one has attention, the others a gated delta net.",
        ),
        "rope_dim": (
            int,
            {"ge": 2},
            "Width of the part that is rotated (in Kimi Linear no part is: shared by all heads).",
        ),
        "delta_key_heads": (int, {"ge": 1}, "Number of query and key heads of a gated delta net."),
        "delta_value_heads": (
            int,
            {"ge": 1},
            "Number of value heads of a gated delta net, each with its own state.",
        ),
        "delta_key_dim": (int, {"ge": 1}, "Width of a query or key head of a gated delta net."),
        "delta_value_dim": (int, {"ge": 1}, "Width of a value head of a gated delta net."),
        "conv_width": (
            int,
            {"ge": 1},
            "Tokens that the convolution of a gated delta net sees, its own among them.",
        ),
        "shared_dim": (int, {"ge": 1}, "Hidden units of the expert that works on every token."),
    }
)
RULES = (
    DENSE_RULES
    | RULES_OF_EXPERTS
    | RULES_OF_MTP
    | {
        "mtp_shared": (
            lambda c: c.model.mtp_depth > 1,
            "{model.mtp_depth}, but Qwen3-Next has one such layer: further ones would share its "
            "projection and norms in the published files: set mtp_depth to 1",
        ),
        "qwen3_next_experts": (
            lambda c: c.model.n_experts == 0,
            "{model.n_experts}, but every layer is a mixture of experts: set n_experts to 1 or more",
        ),
        "partial_rope": (
            lambda c: c.model.rope_dim % 2 != 0 or c.model.rope_dim > c.model.head_dim,
            "{model.rope_dim} must be even and at most {model.head_dim}, since rotary positions turn "
            "pairs of a head",
        ),
        "delta_heads": (
            lambda c: c.model.delta_value_heads % c.model.delta_key_heads != 0,
            "{model.delta_key_heads} does not divide {model.delta_value_heads}: each key head of a "
            "gated delta net serves an equal group of value heads",
        ),
        "tp_delta_heads": (
            lambda c: c.model.delta_key_heads % c.parallelism.tensor_parallel != 0,
            "{parallelism.tensor_parallel} does not divide {model.delta_key_heads}: each rank "
            "computes whole key heads of a gated delta net, with their value heads",
        ),
        "flash_delta_keys": (
            lambda c: c.training.delta_rule == "flash" and c.model.delta_key_dim > 256,
            "{training.delta_rule} has keys of at most 256 numbers, but {model.delta_key_dim}: set "
            'delta_rule to "auto"',
        ),
    }
)


def toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    numbers = dense_toy(flavor, dim)
    del numbers["hidden_dim"]
    return numbers | {
        "attention_interval": 4,
        "rope_dim": dim // 4,
        "delta_key_heads": 2,
        "delta_value_heads": 4,
        "delta_key_dim": dim // 4,
        "delta_value_dim": dim // 4,
        "expert_dim": dim // 2,
        "shared_dim": dim // 2,
    }


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES,
    hidden_units="shared_dim",
    layers=("wq", "wk", "wv", "wg", "wz", "wa", "wb", "wo", "w1", "w2", "w3"),
    toy=toy,
)
