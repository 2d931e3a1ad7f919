"""Published sizes of Qwen3.5 without experts, and a small one of ours. No torch: `configs/` imports this
file."""

from typing import Any

from models.flavors import qwen3_next
from models.options import OPTIONS as DENSE_OPTIONS
from models.options import RULES as DENSE_RULES
from models.options import Numbers

# Source: the config.json of Qwen/Qwen3.5-27B on the Hugging Face hub, as far as other repositories
# repeat it. `debug` is ours, sized for two CPU cores: its 4 key heads and 4 key/value heads allow tensor
# parallelism up to 4.
_OF_EXPERTS = (
    "n_experts",
    "experts_per_token",
    "expert_dim",
    "shared_dim",
    "balance_loss",
    "mtp_depth",
)
FLAVORS: dict[str, dict] = {
    "debug": {
        key: value for key, value in qwen3_next.FLAVORS["debug"].items() if key not in _OF_EXPERTS
    }
    | {"hidden_dim": 512},
    "27B": {
        "dim": 5120,
        "n_layers": 64,
        "attention_interval": 4,
        "n_heads": 24,
        "n_kv_heads": 4,
        "head_dim": 256,
        "rope_dim": 64,
        "delta_key_heads": 16,
        "delta_value_heads": 48,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
        "conv_width": 4,
        "hidden_dim": 17408,
        "vocab_size": 248320,
        "rope_theta": 1e7,
        "norm_eps": 1e-6,
        "max_seq_len": 262144,
        "tied_embeddings": False,
    },
}

_OPTIONS = ("attention_interval", "rope_dim", "conv_width")
OPTIONS = DENSE_OPTIONS | {
    key: row
    for key, row in qwen3_next.OPTIONS.items()
    if key in _OPTIONS or key.startswith("delta_")
}
_RULES = ("partial_rope", "delta_heads", "tp_delta_heads", "flash_delta_keys")
RULES = DENSE_RULES | {key: qwen3_next.RULES[key] for key in _RULES}


def toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    numbers = qwen3_next.toy(flavor, dim)
    return {key: value for key, value in numbers.items() if key not in _OF_EXPERTS} | {
        "hidden_dim": dim
    }


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES,
    layers=qwen3_next.NUMBERS.layers,
    toy=toy,
)
