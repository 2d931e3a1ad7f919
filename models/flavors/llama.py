"""Published sizes of Llama 3.1, 3.2 and 3.3, and a small one of ours. No torch: `configs/` imports
this file."""

from typing import Any

from models.options import DENSE_DEBUG, OPTIONS, RULES, Numbers

# Sources: Llama 3 paper (arXiv:2407.21783) table 3 for 8B, 70B, 405B; config.json of
# meta-llama/Llama-3.1-8B, -70B, -405B and meta-llama/Llama-3.2-1B, -3B on the Hugging Face hub for
# the rest.
_LLAMA_3_1 = {
    "n_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 8192,
    },
    "norm_eps": 1e-5,
    "max_seq_len": 131072,
    "tied_embeddings": False,
}
_LLAMA_3_2 = _LLAMA_3_1 | {
    "hidden_dim": 8192,
    "rope_scaling": _LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
    "tied_embeddings": True,
}
FLAVORS: dict[str, dict] = {
    "debug": DENSE_DEBUG | {"rope_scaling": None, "norm_eps": 1e-5},
    "1B": _LLAMA_3_2 | {"dim": 2048, "n_layers": 16, "n_heads": 32, "head_dim": 64},
    "3B": _LLAMA_3_2 | {"dim": 3072, "n_layers": 28, "n_heads": 24},
    "8B": _LLAMA_3_1 | {"dim": 4096, "n_layers": 32, "n_heads": 32, "hidden_dim": 14336},
    "70B": _LLAMA_3_1 | {"dim": 8192, "n_layers": 80, "n_heads": 64, "hidden_dim": 28672},
    "405B": _LLAMA_3_1 | {"dim": 16384, "n_layers": 126, "n_heads": 128, "hidden_dim": 53248},
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
