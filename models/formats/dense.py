"""Hugging Face's files of dense decoders with grouped-query attention: the names of tensors, the
fields of config.json, and how numbers are read from a file that may say anything.

`models/family.py::Formats` explains what a family's file takes from here.
"""

import math
from typing import Any

from models.layers import Args

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

HF_NAMES_OF_MIXTURES = {  # of Qwen3-MoE and DeepSeek-V3; `#` is an expert's number
    "layers.*.feed_forward.router.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.mlp.experts.#.gate_proj.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.mlp.experts.#.up_proj.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.mlp.experts.#.down_proj.weight",
}


def hf_names(args: Args, table: dict[str, str] = HF_NAMES) -> dict[str, str]:
    """The table with every layer's number. A tied model has one matrix for both, here as in Hugging
    Face's files."""
    names = {}
    for ours, theirs in table.items():
        if ours == "output.weight" and args.tied_embeddings:
            continue
        numbers = range(args.n_layers) if "*" in ours else [0]
        for number in numbers:
            name = ours.replace("*", str(number))
            names[name] = theirs.replace("*", str(number))
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
    dim = whole_number(config, "hidden_size")
    heads = whole_number(config, "num_attention_heads")
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
    heads = numbers["n_heads"]
    kv_heads = numbers["n_kv_heads"]
    head_dim = numbers["head_dim"]
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
