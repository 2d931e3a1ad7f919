"""Hugging Face's files of dense decoders with grouped-query attention: the names of tensors, the
fields of config.json, and how numbers are read from a file that may say anything.

`models/family.py::Formats` explains what a family's file takes from here.
"""

import math
from collections.abc import Iterable
from typing import Any

# Fields that change what a decoder computes without any tensor that would show it, and the value at
# which they change nothing. They are other architectures' (Granite, Gemma, Cohere, MiniCPM, OLMo 1,
# Llama 4, GPT-NeoX); forks write them under a model_type of ours.
HF_NEUTRAL = {
    "alibi": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "clip_qkv": None,
    "compression_config": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "hidden_activation": "silu",
    "is_causal": True,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "no_rope_layers": None,
    "parallel_attn": False,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "rotary_pct": 1.0,
    "scale_depth": None,
    "scale_emb": 1.0,
    "use_bidirectional_attention": False,
    "use_parallel_residual": False,
    "use_qk_norm": False,
}
HF_FIXED = HF_NEUTRAL | {
    "hidden_act": "silu",
    "attention_bias": False,
    "quantization_config": None,
    "rope_interleave": False,
    "swiglu_limit": None,
}

# Our name of a parameter -> theirs. `*` is a layer's number, `#` an expert's.
NAMES_OF_ALL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NAMES_OF_ATTENTION = {
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
}
NAMES_OF_QK_NORMS = {
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
NAMES_OF_FEED_FORWARD = {
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
}
NAMES_OF_MIXTURES = {  # of Qwen3-MoE and DeepSeek-V3
    "layers.*.feed_forward.router.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.mlp.experts.#.gate_proj.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.mlp.experts.#.up_proj.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.mlp.experts.#.down_proj.weight",
}
HF_NAMES = NAMES_OF_ALL | NAMES_OF_ATTENTION | NAMES_OF_FEED_FORWARD


def of_shared_experts(theirs: str) -> dict[str, str]:
    """Return the names of the experts that work on every token; theirs: of the module."""
    return {
        f"layers.*.feed_forward.shared_experts.{ours}.weight": f"{theirs}.{name}_proj.weight"
        for ours, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    }


def of_layer(number: int, table: dict[str, str]) -> dict[str, str]:
    """Return the names of a table with the number of a layer."""
    n = str(number)
    return {ours.replace("*", n): theirs.replace("*", n) for ours, theirs in table.items()}


def hf_names(args: Any, table: dict[str, str] = HF_NAMES) -> dict[str, str]:
    """Return the table of names with every layer's number. A tied model has one matrix for both,
    here as in Hugging Face's files."""
    names = {}
    for ours, theirs in table.items():
        if ours != "output.weight" or not args.tied_embeddings:
            for number in range(args.n_layers if "*" in ours else 1):
                names |= of_layer(number, {ours: theirs})
    return names


def hf_ignored(args: Any) -> str:
    """Return a pattern of the tensors to ignore: the copy of a tied matrix, and tables that old
    versions saved; transformers reads neither."""
    tables = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    return rf"{tables}|lm_head\.weight" if args.tied_embeddings else tables


# Number of `Args` -> its field in config.json, and transformers' default: a whole one for a whole
# number, 0 where the field must be there.
Fields = dict[str, tuple[str, int | float]]
FIELDS: Fields = {
    "dim": ("hidden_size", 0),
    "n_layers": ("num_hidden_layers", 0),
    "n_heads": ("num_attention_heads", 0),
    "n_kv_heads": ("num_key_value_heads", 0),
    "head_dim": ("head_dim", 0),
    "hidden_dim": ("intermediate_size", 0),
    "vocab_size": ("vocab_size", 0),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "max_seq_len": ("max_position_embeddings", 0),
}
MOST_LAYERS = 1000


def with_defaults(**defaults: int | float) -> Fields:
    """Return FIELDS, as far as these numbers go, with these defaults."""
    return {name: (FIELDS[name][0], default) for name, default in defaults.items()}


def numbers_of(config: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the numbers that a config.json has in these fields. Raises KeyError or ValueError."""
    numbers: dict[str, Any] = {}
    for ours, (theirs, default) in fields.items():
        if isinstance(default, float):
            numbers[ours] = real_number(config, theirs, default)
        elif ours == "n_layers":
            numbers[ours] = whole_number(config, theirs, default, MOST_LAYERS)
        else:
            numbers[ours] = whole_number(config, theirs, default)
    return check_heads(numbers) if "n_kv_heads" in fields else numbers


def hf_numbers(args: Any, fields: Fields) -> dict[str, Any]:
    """Return the fields of config.json that have these numbers."""
    return {theirs: getattr(args, ours) for ours, (theirs, _) in fields.items()}


def hf_fields(args: Any, fields: Fields = FIELDS, scaling: dict | None = None) -> dict[str, Any]:
    """Return the fields that Hugging Face's configurations of decoders share, with these numbers;
    scaling: of the rotary positions, in its words.

    The rotary numbers are there twice: transformers 5 calls them `rope_parameters`; everything
    older, and other readers such as vLLM and llama.cpp, `rope_theta` and `rope_scaling`.
    transformers 5 reads both to the same effect.
    """
    return hf_numbers(args, fields) | {
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta}
        | (scaling or {}),
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def hf_scaling(kind: str, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `Args.rope_scaling` in the words of transformers."""
    if not scaling:
        return None
    named = {"rope_type": kind} | scaling
    named[ORIGINAL] = named.pop("original_max_seq_len")
    return named


def yarn_from_hf(rope: dict[str, Any], keys: dict[str, float | None]) -> dict[str, Any]:
    """Return the numbers of YaRN among the rotary ones of a config.json. keys: as YARN."""
    numbers = {key: real_number(rope, key, default) for key, default in keys.items()}
    numbers["original_max_seq_len"] = numbers.pop(ORIGINAL)
    return numbers


def hf_rope(config: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Return the rotary numbers of a config.json, from the first place that has them in
    transformers' order of preference. `rope_type` and `rope_theta` are always in the result; theta:
    the default of the family's configuration. An original length at the top level takes precedence
    over the one next to the factor, and without any it is the model's."""
    rope = {"rope_theta": config.get("rope_theta") or theta}
    if config.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {"rope_type": rope.get("type", "default")} | rope
    if rope["rope_type"] in ("llama3", "yarn"):
        lengths = (config.get(ORIGINAL), rope.get(ORIGINAL), config.get("max_position_embeddings"))
        known = [length for length in lengths if length is not None]
        rope |= {ORIGINAL: known[0]} if known else {}
    return rope


ORIGINAL = "original_max_position_embeddings"
# Key of a rope_scaling -> the default of transformers; None: it must be there.
YARN = {"factor": None, ORIGINAL: None, "beta_fast": 32.0, "beta_slow": 1.0}
# Keys of rotary numbers that change nothing at this value, for any rope_type.
NEUTRAL_ROPE = {"partial_rotary_factor": 1.0, "truncate": True}


def check_rope(rope: dict[str, Any], kinds: dict[str, tuple[str, ...]]) -> None:
    """Raise ValueError for rotary numbers that a family does not have: another type, or a key that
    would be ignored. kinds: type -> its keys."""
    kind = rope["rope_type"]
    if kind not in kinds:
        raise ValueError(
            f"rotary positions of type {kind!r} ({rope}) are not supported, only "
            f"{' and '.join(kinds)}"
        )
    known = ("rope_type", "type", "rope_theta", *kinds[kind])
    for key, value in rope.items():
        if key not in known and value is not None and NEUTRAL_ROPE.get(key) != value:
            raise ValueError(
                f"{key} of the rotary positions is not supported ({rope}), only {', '.join(known)} "
                f"for type {kind}"
            )


def check_full_attention(config: dict[str, Any], window: str = "sliding_window") -> None:
    """Raise ValueError for layers with a window, in a family where all layers see every token.
    window: the field that gives it; "" where another one says that it is not used."""
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise ValueError(f"layer_types has {sorted(kinds)}, only full_attention is supported")
    if window and config.get(window) is not None:
        raise ValueError(
            f"{window} is {config[window]!r}: layers with a window are not supported in this family"
        )


def check_window(config: dict[str, Any]) -> None:
    """Raise ValueError for a file that says that the layers with a window have none."""
    if "sliding_window" in config and config["sliding_window"] is None:
        raise ValueError("sliding_window is None: the layers called sliding_attention need one")


def layer_types(see_all: Iterable[bool], others: str = "sliding_attention") -> list[str]:
    """Return the type of each layer, as transformers names it. see_all: which see every token."""
    return ["full_attention" if is_full else others for is_full in see_all]


def numbers_from_hf(
    config: dict[str, Any], head_dim: int | None, kv_heads: int, context: int
) -> dict[str, Any]:
    """Return the numbers of `Args` from the fields of a config.json. The rest of the arguments are
    the defaults of the family's configuration class; head_dim None: hidden_size /
    num_attention_heads. Raises KeyError, TypeError or ValueError."""
    dim = whole_number(config, "hidden_size")
    heads = whole_number(config, "num_attention_heads")
    fields = FIELDS | with_defaults(
        n_kv_heads=kv_heads or heads, head_dim=head_dim or dim // heads, max_seq_len=context
    )
    return numbers_of(config, fields) | {
        "rope_theta": real_number(hf_rope(config), "rope_theta"),
        "tied_embeddings": is_tied(config),
    }


def is_tied(config: dict[str, Any]) -> bool:
    """Return True if config.json ties the embedding to the output projection.
    Raises ValueError."""
    tied = config.get("tie_word_embeddings")
    if tied not in (None, True, False) or type(tied) is int:
        raise ValueError(f"tie_word_embeddings is {tied!r}, and must be true or false")
    return tied is True


def check_heads(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the same numbers. Raises ValueError for heads that no attention can have."""
    heads = numbers["n_heads"]
    kv_heads = numbers["n_kv_heads"]
    head_dim = numbers["head_dim"]
    if heads % kv_heads or head_dim % 2 or heads * head_dim > 2**24:
        raise ValueError(f"{heads} heads, {kv_heads} of keys and values, {head_dim} wide")
    return numbers


def whole_number(
    table: dict[str, Any], key: str, default: int | None = None, most: int = 2**24
) -> int:
    """Return a size from an untrusted file, up to what a model can have. Raises KeyError or
    ValueError."""
    value = default if table.get(key) is None and default else table[key]
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{key} is {value!r}")
    return value


def real_number(table: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive finite number from an untrusted file. Raises KeyError or ValueError."""
    value = default if table.get(key) is None and default else table[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}")
    return float(value)
