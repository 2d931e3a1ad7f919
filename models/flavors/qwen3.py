"""Published sizes of Qwen3, and small ones of ours. No torch: `configs/` imports
this file."""

from models.options import (
    DENSE_DEBUG,
    MIXTURE_DEBUG,
    OPTIONS,
    OPTIONS_OF_EXPERTS,
    RULES,
    RULES_OF_EXPERTS,
    Numbers,
)

# Sources: arXiv:2505.09388, table 1 (layers, heads, tied embeddings), and the config.json of
# Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B and -32B on the Hugging Face hub; table 2 and the
# config.json of Qwen/Qwen3-30B-A3B and -235B-A22B. The factor of the balance loss is the hub's
# router_aux_loss_coef. The heads of `debug` have a width that is not dim / n_heads.
_DENSE = {
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "max_seq_len": 40960,
    "tied_embeddings": False,
}
_TIED = _DENSE | {"tied_embeddings": True}
_MIXTURE = _DENSE | {
    "n_kv_heads": 4,
    "n_experts": 128,
    "experts_per_token": 8,
    "balance_loss": 0.001,
}
FLAVORS: dict[str, dict] = {
    "debug": DENSE_DEBUG | {"head_dim": 48, "hidden_dim": 640, "norm_eps": 1e-6},
    "0.6B": _TIED | {"dim": 1024, "n_layers": 28, "n_heads": 16, "hidden_dim": 3072},
    "1.7B": _TIED | {"dim": 2048, "n_layers": 28, "n_heads": 16, "hidden_dim": 6144},
    "4B": _TIED | {"dim": 2560, "n_layers": 36, "n_heads": 32, "hidden_dim": 9728},
    "8B": _DENSE | {"dim": 4096, "n_layers": 36, "n_heads": 32, "hidden_dim": 12288},
    "14B": _DENSE | {"dim": 5120, "n_layers": 40, "n_heads": 40, "hidden_dim": 17408},
    "32B": _DENSE | {"dim": 5120, "n_layers": 64, "n_heads": 64, "hidden_dim": 25600},
    "debug_moe": MIXTURE_DEBUG
    | {"n_layers": 6, "hidden_dim": 512, "balance_loss": 0.001, "norm_eps": 1e-6},
    "30B-A3B": _MIXTURE
    | {"dim": 2048, "n_layers": 48, "n_heads": 32, "hidden_dim": 6144, "expert_dim": 768},
    "235B-A22B": _MIXTURE
    | {"dim": 4096, "n_layers": 94, "n_heads": 64, "hidden_dim": 12288, "expert_dim": 1536},
}

NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS | OPTIONS_OF_EXPERTS,
    rules=RULES | RULES_OF_EXPERTS,
)
