"""Published sizes of OLMo 2 and OLMo 3, and a small one of ours. No torch: `configs/` imports
this file."""

from models.options import DENSE_DEBUG, OPTIONS, OPTIONS_OF_WINDOWS, RULES, Numbers

# Sources: the config.json of allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B,
# OLMo-2-0325-32B, Olmo-3-1025-7B and Olmo-3-1125-32B on the Hugging Face hub, as far as other
# repositories repeat them (litgpt, fairseq2), and src/olmo_core/nn/transformer/config.py in
# allenai/OLMo-core. `3-7B-8k` and `3-32B-8k` are OLMo 3 before its context was extended: the models
# of the pretraining scripts in src/scripts/official/OLMo3 there, with as many rows of the embedding
# as were published. The windows of `debug` are shorter than sequences.
_OLMO2 = {
    "head_dim": 128,
    "vocab_size": 100352,
    "rope_theta": 500000.0,
    "norm_eps": 1e-6,
    "max_seq_len": 4096,
    "tied_embeddings": False,
    "window": 0,
    "rope_scaling": None,
}
_7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "hidden_dim": 11008}
_32B = {"dim": 5120, "n_layers": 64, "n_heads": 40, "n_kv_heads": 8, "hidden_dim": 27648}
_BEFORE_EXTENSION = _OLMO2 | {"vocab_size": 100278, "max_seq_len": 8192, "window": 4096}
_OLMO3 = _BEFORE_EXTENSION | {
    "max_seq_len": 65536,
    "rope_scaling": {
        "factor": 8.0,
        "original_max_seq_len": 8192.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
    },
}
FLAVORS: dict[str, dict] = {
    "debug": DENSE_DEBUG | {"norm_eps": 1e-6, "window": 64, "rope_scaling": None},
    "1B": _OLMO2
    | {"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 8192},
    "7B": _OLMO2 | _7B,
    "13B": _OLMO2
    | {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "hidden_dim": 13824},
    "32B": _OLMO2 | _32B,
    "3-7B": _OLMO3 | _7B,
    "3-32B": _OLMO3 | _32B,
    "3-7B-8k": _BEFORE_EXTENSION | _7B,
    "3-32B-8k": _BEFORE_EXTENSION | _32B,
}


NUMBERS = Numbers(
    flavors=FLAVORS, options=OPTIONS | OPTIONS_OF_WINDOWS, rules=RULES, branch_ends=()
)
