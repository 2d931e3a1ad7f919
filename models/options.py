"""The numbers that the [model] table may override, and the rules between them and the options of a
run: those of dense decoders, and those of mixtures of experts. `models/family.py::Family` explains
each table.

No torch: `configs/` evaluates what a family takes from here (`models/__init__.py::tables`).
"""

from collections.abc import Callable
from typing import Any

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


QUERY_WIDTH = ("head_dim",)


def ulysses_rule(number: str, heads: str) -> tuple[Callable[[Any], bool], str]:
    """The rule that ranks which swap heads for tokens get whole ones. number: how many heads there
    are to deal out."""
    return (
        lambda c: (
            c.parallelism.context_parallel > 1
            and c.parallelism.context_parallel_method == "ulysses"
            and getattr(c.model, number)
            % (c.parallelism.context_parallel * c.parallelism.tensor_parallel)
            != 0
        ),
        f"{{parallelism.context_parallel}} times {{parallelism.tensor_parallel}} does not divide "
        f"{{model.{number}}}: with "
        f"{{parallelism.context_parallel_method}} each rank computes whole {heads}. Use fewer "
        "ranks, or "
        'context_parallel_method = "gather", which any number of heads suits',
    )


RULES = {
    "tp_heads": (
        lambda c: c.model.n_heads % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {model.n_heads}: each rank computes whole "
        "query heads",
    ),
    "tp_kv_heads": (
        lambda c: c.model.n_kv_heads % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {model.n_kv_heads}: each rank computes "
        "whole key/value heads, "
        "which are not duplicated, so tensor_parallel is at most n_kv_heads and divides it",
    ),
    "tp_hidden": (
        lambda c: c.model.hidden_dim % c.parallelism.tensor_parallel != 0,
        "{parallelism.tensor_parallel} does not divide {model.hidden_dim}: each rank computes an "
        "equal share of the "
        "hidden units",
    ),
    "cp_heads": ulysses_rule("n_kv_heads", "key/value heads"),
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


LLAMA_RULES = RULES | {
    "export_hf": (
        lambda c: c.checkpoint.export_hf and c.model.dim % c.model.n_heads != 0,
        "{checkpoint.export_hf}, but transformers refuses a Llama whose {model.dim} is not a "
        "multiple of "
        "{model.n_heads}: change one of them, or remove export_hf",
    ),
}


def width_of_head(numbers: dict[str, Any]) -> float:
    """head_dim after a change of dim or n_heads. Where the two do not fit, it is a fraction, which
    the rule "head_dim" refuses."""
    dim = numbers["dim"]
    n_heads = numbers["n_heads"]
    return dim / n_heads if dim % n_heads else dim // n_heads


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
    "experts_ep": (
        lambda c: c.model.n_experts % c.parallelism.expert_parallel != 0,
        "{parallelism.expert_parallel} does not divide {model.n_experts}: each rank has equally "
        "many experts",
    ),
    "experts_async": (
        lambda c: c.model.n_experts and c.parallelism.async_tensor_parallel,
        "{parallelism.async_tensor_parallel} together with experts ({model.n_experts}) is not "
        "supported, since nobody has tried the "
        "two: set it to false",
    ),
}
