"""Published sizes of Gemma 2, and a small one of ours. No torch: `configs/` imports this file."""

from models.flavors import gemma3
from models.options import OPTIONS, OPTIONS_OF_WINDOWS, RULES, Numbers

# Sources: arXiv:2408.00118, table 1, and the config.json of google/gemma-2-2b, -9b and -27b on the
# Hugging Face hub. 27B divides scores by the root of dim / n_heads. The caps of `debug` are
# low enough to bend scores and logits of a small model.
_PUBLISHED = {
    "head_dim": 256,
    "vocab_size": 256000,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "max_seq_len": 8192,
    "tied_embeddings": True,
    "window": 4096,
    "query_scalar": 256,
    "attention_cap": 50.0,
    "logit_cap": 30.0,
}
_DEBUG = {
    key: value
    for key, value in gemma3.FLAVORS["debug"].items()
    if key not in ("window_pattern", "local_rope_theta", "rope_factor")
}
FLAVORS: dict[str, dict] = {
    "debug": _DEBUG | {"attention_cap": 2.0, "logit_cap": 8.0},
    "2B": _PUBLISHED
    | {"dim": 2304, "n_layers": 26, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 9216},
    "9B": _PUBLISHED
    | {"dim": 3584, "n_layers": 42, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 14336},
    "27B": _PUBLISHED
    | {
        "dim": 4608,
        "n_layers": 46,
        "n_heads": 32,
        "n_kv_heads": 16,
        "hidden_dim": 36864,
        "head_dim": 128,
        "query_scalar": 144,
    },
}

OPTIONS_OF_CAPS = {
    "query_scalar": gemma3.OPTIONS_OF_GEMMA["query_scalar"],
    "attention_cap": (
        float,
        {"ge": 0},
        "Soft cap of attention's scores, cap * tanh(score / cap); 0: none. Slow on a GPU.",
    ),
    "logit_cap": (float, {"ge": 0}, "Soft cap of the logits, in the same way; 0: none."),
}

NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS | OPTIONS_OF_WINDOWS | OPTIONS_OF_CAPS,
    rules=RULES,
    branch_ends=(),
    scales_embedding=True,
)
