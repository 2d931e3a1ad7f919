"""The published sizes of each family, and small ones of ours: one file for each family, a table
FLAVORS. No torch: `configs/` reads these tables (`models/__init__.py::tables`)."""


def toy(flavor: dict, dim: int) -> dict:
    """The numbers of a dense decoder of this width, for measurements; flavor: gives all others."""
    return flavor | {
        "dim": dim,
        "n_layers": 4,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": dim // 2,
        "hidden_dim": dim,
        "vocab_size": 16,
    }
