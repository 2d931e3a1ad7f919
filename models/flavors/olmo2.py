"""Published sizes of OLMo 2 and OLMo 3, and a small one of ours. No torch: `configs/` imports
this file."""

from models.options import OPTIONS, OPTIONS_OF_WINDOWS, RULES, Numbers

# Sources: the config.json of allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B,
# OLMo-2-0325-32B, Olmo-3-1025-7B and Olmo-3-1125-32B on the Hugging Face hub, as far as other
# repositories repeat them (litgpt, fairseq2), and src/olmo_core/nn/transformer/config.py in
# allenai/OLMo-core. `3-7B-8k` and `3-32B-8k` are OLMo 3 before its context was extended: the models
# of the pretraining scripts in src/scripts/official/OLMo3 there, with as many rows of the embedding
# as were published. `debug` is ours, sized for two CPU cores; it has 4 key/value heads so that
# tensor parallelism up to 4 can be tried on a laptop, and windows that are shorter than sequences.
FLAVORS: dict[str, dict] = {
    "debug": {
        "dim": 256,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 32,
        "hidden_dim": 704,
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 8192,
        "tied_embeddings": False,
        "window": 64,
        "rope_scaling": None,
    },
    "1B": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 16,
        "n_kv_heads": 16,
        "head_dim": 128,
        "hidden_dim": 8192,
        "vocab_size": 100352,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 4096,
        "tied_embeddings": False,
        "window": 0,
        "rope_scaling": None,
    },
    "7B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "head_dim": 128,
        "hidden_dim": 11008,
        "vocab_size": 100352,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 4096,
        "tied_embeddings": False,
        "window": 0,
        "rope_scaling": None,
    },
    "13B": {
        "dim": 5120,
        "n_layers": 40,
        "n_heads": 40,
        "n_kv_heads": 40,
        "head_dim": 128,
        "hidden_dim": 13824,
        "vocab_size": 100352,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 4096,
        "tied_embeddings": False,
        "window": 0,
        "rope_scaling": None,
    },
    "32B": {
        "dim": 5120,
        "n_layers": 64,
        "n_heads": 40,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 27648,
        "vocab_size": 100352,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 4096,
        "tied_embeddings": False,
        "window": 0,
        "rope_scaling": None,
    },
    "3-7B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "head_dim": 128,
        "hidden_dim": 11008,
        "vocab_size": 100278,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 65536,
        "tied_embeddings": False,
        "window": 4096,
        "rope_scaling": {
            "factor": 8.0,
            "original_max_seq_len": 8192.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
    "3-32B": {
        "dim": 5120,
        "n_layers": 64,
        "n_heads": 40,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 27648,
        "vocab_size": 100278,
        "rope_theta": 500000.0,
        "norm_eps": 1e-6,
        "max_seq_len": 65536,
        "tied_embeddings": False,
        "window": 4096,
        "rope_scaling": {
            "factor": 8.0,
            "original_max_seq_len": 8192.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
}
BEFORE_EXTENSION = {"max_seq_len": 8192, "rope_scaling": None}
FLAVORS["3-7B-8k"] = FLAVORS["3-7B"] | BEFORE_EXTENSION
FLAVORS["3-32B-8k"] = FLAVORS["3-32B"] | BEFORE_EXTENSION


NUMBERS = Numbers(
    flavors=FLAVORS, options=OPTIONS | OPTIONS_OF_WINDOWS, rules=RULES, branch_ends=()
)
