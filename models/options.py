"""The numbers of a family: the sizes that it is published in, those that the [model] table may
override, and the rules between them. Below stand those of dense decoders and of mixtures of experts.

No torch: `configs/` imports this file and models/flavors/, and checks a configuration in less time
than the import of torch takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def dense_toy(flavor: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return the numbers of a dense decoder of this width, for measurements; flavor: gives all
    others."""
    return flavor | {
        "dim": dim,
        "n_layers": 4,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": dim // 2,
        "hidden_dim": dim,
        "vocab_size": 16,
    }


# What the flavors `debug` share, which are ours: sized for two CPU cores, with 4 key/value heads, so that
# tensor parallelism up to 4 can be tried on a laptop.
DEBUG = {
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "rope_theta": 10000.0,
    "max_seq_len": 8192,
    "tied_embeddings": False,
}
DENSE_DEBUG = DEBUG | {"dim": 256, "n_layers": 6, "hidden_dim": 704}
MIXTURE_DEBUG = DEBUG | {"dim": 192, "n_experts": 16, "experts_per_token": 4, "expert_dim": 96}

WIDTHS = (
    "dim",
    "n_heads",
    "n_kv_heads",
    "hidden_dim",
    "expert_dim",
    "shared_dim",
    "delta_heads",
    "delta_key_heads",
    "delta_value_heads",
)
BRANCH_ENDS = ("*.wo.weight", "*.w2.weight", "*.experts.w2")


@dataclass(frozen=True)
class Numbers:
    """Sizes, options and rules of a family, without torch: `NUMBERS` in
    models/flavors/<name>.py."""

    flavors: dict[str, dict[str, Any]]
    """Flavor -> the numbers of the family's `Args`. Each row names its source. `debug` is small
    enough for two CPU cores."""
    options: dict[str, tuple[type, dict[str, Any], str]]
    """Number that the [model] table may override -> its type, its bounds in pydantic's words, one
    line that explains it."""
    rules: dict[str, tuple[Callable[[Any], bool], str]]
    """Rules between these numbers and the options of a run, in the form of
    `configs/check.py::RULES`. What a mesh can split follows from the members below: no rule here
    asks for it."""
    follows: dict[str, tuple[tuple[str, ...], Callable[[dict], Any]]] = field(default_factory=dict)
    """Number -> the numbers that it follows from, and how: it is computed where one of those is
    overridden and it is not."""
    query_width: tuple[str, ...] = ("head_dim",)
    """The numbers whose sum is the width of a query's head, which decides what kernels of attention
    there are."""
    heads: str = "n_heads"
    """The number of query heads: tensor parallelism gives each rank whole ones."""
    kv_heads: str = "n_kv_heads"
    """The number of key/value heads, of which each rank has whole ones too. Empty for a family whose
    query heads have keys and values of their own."""
    hidden_units: str = "hidden_dim"
    """The number of hidden units of a feed-forward layer, which tensor parallelism splits. Empty for
    a family that has no such layer."""
    widths: tuple[str, ...] = WIDTHS
    """The numbers that grow with the width of a model, as far as it has them: heads keep theirs."""
    branch_ends: tuple[str, ...] = BRANCH_ENDS
    """Patterns of the parameters whose products and sums a block adds to the residual stream. Empty
    for a family that normalises these: a factor would not be seen."""
    scales_embedding: bool = False
    """Whether forward multiplies what the embedding returns by the root of the width."""
    layers: tuple[str, ...] = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    """The linear layers of a block, by the last word of their names: those that lora.targets may
    name. Experts have w1, w2 and w3."""
    toy: Callable[[dict[str, Any], int], dict[str, Any]] = dense_toy
    """(a flavor's numbers, a width) -> those of a toy of this width, which measures what an operator
    costs apart from its FLOPs."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is none of the options: its rules would be skipped in
        silence."""
        for name in (*self.query_width, self.heads, self.kv_heads, self.hidden_units):
            if name and name not in self.options:
                known = ", ".join(self.options)
                raise ValueError(f"a family's Numbers name {name!r}, which is none of its {known}")


OPTIONS = {
    "dim": (
        int,
        {"ge": 2},
        "Width of the residual stream; replaces the flavor's number, as does every option below.",
    ),
    "n_layers": (int, {"ge": 1}, "Number of transformer blocks."),
    "n_heads": (int, {"ge": 1}, "Number of query heads."),
    "n_kv_heads": (int, {"ge": 1}, "Number of key and value heads (grouped-query attention)."),
    "head_dim": (int, {"ge": 2}, "Width of one head (Llama: dim / n_heads, if it is not set)."),
    "hidden_dim": (int, {"ge": 1}, "Width of the SwiGLU feed-forward layer."),
    "vocab_size": (int, {"ge": 2}, "Rows of the embedding; at least the tokenizer's vocabulary."),
    "rope_theta": (float, {"gt": 0}, "Base of the rotary position frequencies."),
    "max_seq_len": (
        int,
        {"ge": 1},
        "Positions that the model is made for; training.seq_len may not be more.",
    ),
    "tied_embeddings": (
        bool,
        {},
        "Use the embedding matrix as the output projection too (Llama 3.2, small Qwen3).",
    ),
}

OPTIONS_OF_WINDOWS = {
    "window": (
        int,
        {"ge": 0},
        "Tokens that a layer with a sliding window attends to; 0: no layer has one.",
    ),
}


RULES = {
    "kv_heads": (
        lambda c: c.model.n_heads % c.model.n_kv_heads != 0,
        "{model.n_kv_heads} does not divide {model.n_heads}: each key/value head serves an equal "
        "group of query heads",
    ),
    "head_dim": (
        lambda c: c.model.head_dim % 2 != 0,
        "model.head_dim would be {numbers.head_dim:.5g}, but must be a whole even number, since "
        "rotary positions turn "
        "pairs: set it, or change {model.dim} or {model.n_heads}, whose quotient it is otherwise",
    ),
}


# Models with mixtures of experts (models/moe.py) ---------------------------------------------------

OPTIONS_OF_EXPERTS = {
    "n_experts": (
        int,
        {"ge": 0},
        "Number of experts of each mixture (0: a dense model, where the family has one).",
    ),
    "experts_per_token": (
        int,
        {"ge": 1},
        "Experts that each token is sent to, besides shared ones.",
    ),
    "expert_dim": (int, {"ge": 1}, "Hidden units of one expert."),
    "balance_loss": (
        float,
        {"ge": 0},
        "Factor of the sequence-wise balance loss of the mixtures; 0: none.",
    ),
}
RULES_OF_EXPERTS = {
    "experts": (
        lambda c: c.model.n_experts and c.model.experts_per_token > c.model.n_experts,
        "{model.experts_per_token} is above {model.n_experts}: a token cannot be sent to more "
        "experts than there are",
    ),
}


# Layers that predict further tokens (models/mtp.py) -------------------------------------------------

OPTIONS_OF_MTP = {
    "mtp_depth": (
        int,
        {"ge": 0},
        "Layers behind the last one that each predict a token further on (multi-token prediction).",
    ),
}
RULES_OF_MTP = {
    "mtp_tied": (
        lambda c: (
            c.model.mtp_depth
            and c.model.tied_embeddings
            and c.parallelism.pipeline_parallel > 1
            and c.schedule.splits_backward
        ),
        "{parallelism.pipeline_schedule} splits the backward pass, which {model.mtp_depth} and "
        '{model.tied_embeddings} do not allow together: set pipeline_schedule = "1f1b"',
    ),
}
