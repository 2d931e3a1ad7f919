"""Published sizes of Gemma 3, and a small one of ours. No torch: `configs/` imports this
file."""

from models.options import DENSE_DEBUG, OPTIONS, OPTIONS_OF_WINDOWS, RULES, Numbers

# Sources: arXiv:2503.19786, tables 1 and 2, and the config.json of google/gemma-3-270m,
# gemma-3-1b-pt, gemma-3-4b-pt, gemma-3-12b-pt and gemma-3-27b-pt on the Hugging Face hub; what
# those of 4B and more leave out has the default of transformers. 27B divides scores by the root of
# dim / n_heads. The windows of `debug` are shorter than sequences.
_PUBLISHED = {
    "head_dim": 256,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "tied_embeddings": True,
    "window_pattern": 6,
    "local_rope_theta": 10000.0,
    "query_scalar": 256,
}
_OF_TEXT = _PUBLISHED | {
    "n_heads": 4,
    "n_kv_heads": 1,
    "vocab_size": 262144,
    "max_seq_len": 32768,
    "window": 512,
    "rope_factor": 1.0,
}
_OF_TEXT_AND_IMAGES = _PUBLISHED | {
    "vocab_size": 262208,
    "max_seq_len": 131072,
    "window": 1024,
    "rope_factor": 8.0,
}
FLAVORS: dict[str, dict] = {
    "debug": DENSE_DEBUG
    | {
        "norm_eps": 1e-6,
        "tied_embeddings": True,
        "window": 64,
        "window_pattern": 6,
        "local_rope_theta": 1000.0,
        "rope_factor": 8.0,
        "query_scalar": 48,
    },
    "270M": _OF_TEXT | {"dim": 640, "n_layers": 18, "hidden_dim": 2048},
    "1B": _OF_TEXT | {"dim": 1152, "n_layers": 26, "hidden_dim": 6912},
    "4B": _OF_TEXT_AND_IMAGES
    | {"dim": 2560, "n_layers": 34, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 10240},
    "12B": _OF_TEXT_AND_IMAGES
    | {"dim": 3840, "n_layers": 48, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 15360},
    "27B": _OF_TEXT_AND_IMAGES
    | {
        "dim": 5376,
        "n_layers": 62,
        "n_heads": 32,
        "n_kv_heads": 16,
        "hidden_dim": 21504,
        "head_dim": 128,
        "query_scalar": 168,
    },
}

OPTIONS_OF_GEMMA = {
    "window_pattern": (
        int,
        {"ge": 1},
        "Every layer whose number it divides (from 1) attends to all tokens, the others to a window.",
    ),
    "local_rope_theta": (
        float,
        {"gt": 0},
        "Base of the rotary position frequencies in layers with a window; rope_theta: in the others.",
    ),
    "rope_factor": (
        float,
        {"gt": 0},
        "Divides the positions of layers without a window, for longer contexts; 1: as they are.",
    ),
    "query_scalar": (int, {"ge": 1}, "Attention scores are divided by its root."),
}


NUMBERS = Numbers(
    flavors=FLAVORS,
    options=OPTIONS | OPTIONS_OF_WINDOWS | OPTIONS_OF_GEMMA,
    rules=RULES,
    branch_ends=(),
    scales_embedding=True,
)
