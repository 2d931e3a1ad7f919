"""What dense decoders with grouped-query attention have in common, apart from their layers:
numbers, rules, arithmetic, names.

A family takes from here what holds for it and says the rest itself. `models/family.py` explains
each name; the layers stand in `models/layers.py`. This file imports no torch, because `configs/`
evaluates the tables that a family takes from it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Args:
    """The numbers that define a model: a row of FLAVORS, with the overrides of the [model] table
    laid on top."""

    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads
    head_dim: int
    hidden_dim: int  # of the SwiGLU layer
    vocab_size: int
    rope_theta: float
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool


# Options and rules of a configuration -------------------------------------------------------------

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


# The same of models with mixtures of experts (models/moe.py).
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


# What is done to the parameters of models/layers.py::Decoder --------------------------------------


def initial_values(args: Args) -> list[tuple[str, str, float]]:
    """Normal values of deviation 0.02, and projections back into the residual stream scaled by
    1/sqrt(2 * n_layers) so that its variance does not grow with depth (GPT-2; Radford et al. 2019,
    section 2.3)."""
    residual = 0.02 / math.sqrt(2 * args.n_layers)
    return [
        ("*norm.weight", "ones", 0.0),
        ("*.wo.weight", "normal", residual),
        ("*.w2.weight", "normal", residual),
        ("*.experts.w2", "normal", residual),
        ("*.router.bias", "zeros", 0.0),
        ("*", "normal", 0.02),
    ]


# decaying a norm's gain towards 0 would shrink the signal itself
DECAY = [("*norm.weight", False), ("*", True)]

TP_PLAN = {  # what every decoder has
    # rows of the vocabulary split; output: this rank's slice of the sequence
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention_norm": "sequence",  # works on this rank's slice of the sequence
    "layers.*.ffn_norm": "sequence",
    "norm": "sequence",
    # rows of the vocabulary split; the loss in training/loss.py works on its share of the logits
    "output": "vocab_weight",
}
TP_PLAN_OF_ATTENTION = {
    "layers.*.attention": "gather_sequence",  # its input: the whole sequence
    "layers.*.attention.wq": "columns",  # heads split
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",  # sums over heads; output: a slice of the sequence again
}


def tp_plan_of_feed_forward(layer: str = "*") -> dict[str, str]:
    """layer: the number of the layer, or * for all."""
    return {
        f"layers.{layer}.feed_forward": "gather_sequence",
        f"layers.{layer}.feed_forward.w1": "columns",  # hidden units split
        f"layers.{layer}.feed_forward.w3": "columns",
        f"layers.{layer}.feed_forward.w2": "rows",
    }


def tp_plan(args: Any) -> dict[str, str]:
    return TP_PLAN | TP_PLAN_OF_ATTENTION | tp_plan_of_feed_forward()


# Arithmetic ---------------------------------------------------------------------------------------


def multiplied(args: Args, feed_forward: int | None = None) -> int:
    """Weights that a token is multiplied with: all matrices but the embedding, which is looked up.
    A tied embedding is multiplied too, as the output projection. feed_forward: those of one block
    where it has no w1, w2 and w3."""
    # wq and wo, wk and wv
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    if feed_forward is None:
        feed_forward = 3 * args.dim * args.hidden_dim  # w1 w2 w3
    return args.n_layers * (attention + feed_forward) + args.dim * args.vocab_size


def parameters(args: Args, feed_forward: int | None = None) -> int:
    """Those that are multiplied, an embedding that is not tied, two norms in each block and the
    last one."""
    embedding = 0 if args.tied_embeddings else args.dim * args.vocab_size
    return multiplied(args, feed_forward) + embedding + (2 * args.n_layers + 1) * args.dim


def flops_per_token(args: Args, seq_len: int, feed_forward: int | None = None) -> float:
    """6 N + 12 L H E T, as PaLM counts it (Chowdhery et al., arXiv:2204.02311, appendix B).

    A weight that is multiplied costs 2 per token forward and 4 backward (gradients of input and of
    weight); N counts those weights. Attention scores and their use cost 2 * 2 H E T per layer
    forward, three times that with backward. Like PaLM and TorchTitan, this does *not* halve
    attention for being causal, nor count what checkpointing computes twice: MFUs compare with
    theirs. Nor does it know of data.mask_documents, which computes less attention: then FLOP/s and
    MFU are upper bounds.
    """
    return (
        6.0 * multiplied(args, feed_forward)
        + 12.0 * args.n_layers * args.n_heads * args.head_dim * seq_len
    )


def describe(args: Args) -> str:
    return (
        f"{args.n_layers} layers of width {args.dim}, {args.n_heads} heads on {args.n_kv_heads} "
        "key/value heads, "
        f"vocabulary {args.vocab_size:,}{' (tied)' if args.tied_embeddings else ''}"
    )


def largest_product(args: Args) -> tuple[int, int]:
    return args.dim, args.hidden_dim


# Hugging Face -------------------------------------------------------------------------------------

HF_FIXED = {"hidden_act": "silu", "attention_bias": False, "quantization_config": None}

HF_NAMES = {  # `*` is a layer's number
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_names(args: Args, table: dict[str, str] = HF_NAMES) -> dict[str, str]:
    """The table with every layer's number. A tied model has one matrix for both, here as in Hugging
    Face's files."""
    names = {}
    for ours, theirs in table.items():
        if ours == "output.weight" and args.tied_embeddings:
            continue
        numbers = range(args.n_layers) if "*" in ours else [0]
        names |= {ours.replace("*", str(i)): theirs.replace("*", str(i)) for i in numbers}
    return names


def hf_ignored(args: Args) -> str:
    """The copy of a tied matrix, and tables that old versions saved; transformers reads neither."""
    tables = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    return rf"{tables}|lm_head\.weight" if args.tied_embeddings else tables


def hf_fields(args: Args, scaling: dict | None = None) -> dict[str, Any]:
    """The fields that Hugging Face's configurations of dense decoders share; scaling: of the rotary
    positions, in its words.

    The rotary numbers stand there twice: transformers 5 calls them `rope_parameters`; everything
    older, and other readers such as vLLM and llama.cpp, `rope_theta` and `rope_scaling`.
    transformers 5 reads both to the same effect.
    """
    return {
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "intermediate_size": args.hidden_dim,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta}
        | (scaling or {}),
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def hf_rope(config: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """The rotary numbers of a config.json, wherever it has them, in transformers' order of
    preference. `rope_type` and `rope_theta` are always there; theta: the default of the family's
    configuration."""
    rope = {"rope_theta": config.get("rope_theta") or theta}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    return {"rope_type": rope.get("type", "default")} | rope


def numbers_from_hf(
    config: dict[str, Any], head_dim: int | None, kv_heads: int, context: int
) -> dict[str, Any]:
    """The numbers of `Args` from the fields of a config.json. The rest of the arguments are the
    defaults of the family's configuration class; head_dim None: hidden_size / num_attention_heads.
    Raises KeyError, TypeError or ValueError."""
    dim, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    return check_heads(
        {
            "dim": dim,
            "n_layers": whole_number(config, "num_hidden_layers", most=1000),
            "n_heads": heads,
            "n_kv_heads": whole_number(config, "num_key_value_heads", kv_heads or heads),
            "head_dim": whole_number(config, "head_dim", head_dim or dim // heads),
            "hidden_dim": whole_number(config, "intermediate_size"),
            "vocab_size": whole_number(config, "vocab_size"),
            "rope_theta": real_number(hf_rope(config), "rope_theta"),
            "norm_eps": real_number(config, "rms_norm_eps", 1e-6),
            "max_seq_len": whole_number(config, "max_position_embeddings", context),
            "tied_embeddings": config.get("tie_word_embeddings", False) is True,
        }
    )


def check_heads(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same numbers. Raises ValueError for heads that no attention can have."""
    heads, kv_heads, head_dim = numbers["n_heads"], numbers["n_kv_heads"], numbers["head_dim"]
    if heads % kv_heads or head_dim % 2 or heads * head_dim > 2**24:
        raise ValueError(f"{heads} heads, {kv_heads} of keys and values, {head_dim} wide")
    return numbers


def whole_number(
    table: dict[str, Any], key: str, default: int | None = None, most: int = 2**24
) -> int:
    """A size from a file that may say anything, up to what a model can have. Raises KeyError or
    ValueError."""
    value = default if table.get(key) is None and default else table[key]
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{key} is {value!r}")
    return value


def real_number(table: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number from a file that may say anything. Raises KeyError or ValueError."""
    value = default if table.get(key) is None and default else table[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}")
    return float(value)
