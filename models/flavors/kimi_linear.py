"""The published size of Kimi Linear, and a small one of ours. No torch: `configs/` imports this
file."""

from typing import Any

from models.flavors import deepseek_v3, qwen3_next
from models.options import Numbers

# Source: the config.json of moonshotai/Kimi-Linear-48B-A3B-Base on the Hugging Face hub, which names
# no balance loss: its factor is DeepSeek-V3's.
_NOT_HERE = {
    "rope_theta",
    "rope_scaling",
    "q_rank",
    "expert_groups",
    "groups_per_token",
    "mtp_depth",
}
FLAVORS: dict[str, dict] = {
    "debug": {
        key: value for key, value in deepseek_v3.FLAVORS["debug"].items() if key not in _NOT_HERE
    }
    | {
        "n_layers": 4,
        "attention_interval": 4,
        "delta_heads": 4,
        "delta_dim": 32,
        "conv_width": 4,
        "norm_eps": 1e-5,
    },
    "48B-A3B": {
        "dim": 2304,
        "n_layers": 27,
        "n_dense_layers": 1,
        "attention_interval": 4,
        "n_heads": 32,
        "kv_rank": 512,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
        "delta_heads": 32,
        "delta_dim": 128,
        "conv_width": 4,
        "hidden_dim": 9216,
        "n_experts": 256,
        "experts_per_token": 8,
        "expert_dim": 1024,
        "n_shared_experts": 1,
        "routed_scale": 2.446,
        "balance_loss": 0.0001,
        "vocab_size": 163840,
        "norm_eps": 1e-5,
        "max_seq_len": 1048576,
        "tied_embeddings": False,
    },
}

OPTIONS = {key: row for key, row in deepseek_v3.OPTIONS.items() if key not in _NOT_HERE} | {
    "attention_interval": qwen3_next.OPTIONS["attention_interval"],
    "conv_width": qwen3_next.OPTIONS["conv_width"],
    "delta_heads": (
        int,
        {"ge": 1},
        "Number of heads of Kimi delta attention, each with its own state.",
    ),
    "delta_dim": (int, {"ge": 1}, "Width of a head of Kimi delta attention."),
}
_RULES = ("experts", "dense_layers", "no_experts", "rope_dim", "value_dim")
RULES = {key: deepseek_v3.RULES[key] for key in _RULES} | {
    "tp_kda_heads": (
        lambda c: c.model.delta_heads % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {model.delta_heads}: each rank computes whole "
        "heads of Kimi delta attention",
    ),
    "flash_kda_keys": (
        lambda c: c.training.delta_rule == "flash" and c.model.delta_dim > 256,
        "{training.delta_rule} has keys of at most 256 numbers, but {model.delta_dim}: set delta_rule "
        'to "auto"',
    ),
}


def toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    return deepseek_v3.toy(flavor, dim) | {
        "attention_interval": 4,
        "delta_heads": 2,
        "delta_dim": dim // 4,
    }


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES,
    query_width=("nope_dim", "rope_dim"),
    kv_heads="",
    layers=(
        *("wq", "wk", "wv", "wb", "wf_a", "wf_b", "wg_a", "wg_b"),
        *("wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"),
    ),
    toy=toy,
)
