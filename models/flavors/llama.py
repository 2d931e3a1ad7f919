"""Published sizes of Llama 3.1, 3.2 and 3.3, and a small one of ours. No torch: `configs/` imports
this file."""

from typing import Any

from models.options import OPTIONS, RULES, Numbers

# Sources: Llama 3 paper (arXiv:2407.21783) table 3 for 8B, 70B, 405B; config.json of
# meta-llama/Llama-3.1-8B, -70B, -405B and meta-llama/Llama-3.2-1B, -3B on the Hugging Face hub for
# the rest. `debug` is ours, sized for two CPU cores; it has 4 key/value heads so that tensor
# parallelism up to 4 can be tried on a laptop.
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
        "rope_scaling": None,
        "norm_eps": 1e-5,
        "max_seq_len": 8192,
        "tied_embeddings": False,
    },
    "1B": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 64,
        "hidden_dim": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": True,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "3B": {
        "dim": 3072,
        "n_layers": 28,
        "n_heads": 24,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": True,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "8B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 14336,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "70B": {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 28672,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "405B": {
        "dim": 16384,
        "n_layers": 126,
        "n_heads": 128,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 53248,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
}


def width_of_head(numbers: dict[str, Any]) -> float:
    """Return head_dim after a change of dim or n_heads. Where the two do not fit, it is a fraction,
    which the rule "head_dim" refuses."""
    dim = numbers["dim"]
    n_heads = numbers["n_heads"]
    return dim / n_heads if dim % n_heads else dim // n_heads


HUGGING_FACE = {
    "export_hf": (
        lambda c: c.checkpoint.export_hf and c.model.dim % c.model.n_heads != 0,
        "{checkpoint.export_hf}, but transformers refuses a Llama whose {model.dim} is not a "
        "multiple of "
        "{model.n_heads}: change one of them, or remove export_hf",
    ),
}
NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS,
    rules=RULES | HUGGING_FACE,
    follows={"head_dim": (("dim", "n_heads"), width_of_head)},
)
