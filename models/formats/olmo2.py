"""Hugging Face's files of OLMo 2 and OLMo 3: Olmo2ForCausalLM and Olmo3ForCausalLM."""

from functools import partial
from typing import Any

from models.family import Formats
from models.formats import dense
from models.olmo2 import Args, has_window
from models.yarn import mscale

HF_NAMES = (
    dense.HF_NAMES
    | dense.NAMES_OF_QK_NORMS
    | {
        "layers.*.attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "layers.*.ffn_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
    }
)

# By default, transformers would never update row 1 of the embedding, the padding of OLMo 1.
NO_PADDING = {"pad_token_id": None}

# The length of queries and keys follows from the factor.
KINDS = {"default": (), "yarn": (*dense.YARN, "attention_factor")}


def hf_config(args: Args) -> dict[str, Any]:
    scaling = dense.hf_scaling("yarn", args.rope_scaling)
    if scaling:
        scaling[dense.ORIGINAL] = int(scaling[dense.ORIGINAL])
    fields = dense.hf_fields(args, scaling=scaling) | NO_PADDING
    if not args.window:
        return {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"} | fields
    unscaled = {"rope_type": "default", "rope_theta": args.rope_theta}
    rope = {"full_attention": fields["rope_parameters"], "sliding_attention": unscaled}
    windows = {
        "sliding_window": args.window,
        "layer_types": layer_types(args),
        "rope_parameters": rope,
    }
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} | fields | windows


def layer_types(args: Args) -> list[str]:
    return dense.layer_types(not has_window(args, number) for number in range(args.n_layers))


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have the defaults of Olmo2Config or Olmo3Config."""
    is_olmo3 = config.get("model_type") == "olmo3"
    theta = 500000.0 if is_olmo3 else 10000.0
    rope = rope_of_olmo3(config, theta) if is_olmo3 else dense.hf_rope(config, theta)
    known = config | {"rope_scaling": {"rope_theta": rope["rope_theta"]}}
    known["rms_norm_eps"] = config.get("rms_norm_eps") or 1e-5
    numbers = dense.numbers_from_hf(known, head_dim=None, kv_heads=0, context=2048)
    window = dense.whole_number(config, "sliding_window", 4096) if is_olmo3 else 0
    if not is_olmo3:
        dense.check_full_attention(config)
    args = Args(**numbers, window=window, rope_scaling=scaling_from_hf(rope))
    if is_olmo3 and config.get("layer_types") not in (None, layer_types(args)):
        raise ValueError(
            f"layer_types is {config['layer_types']}, only three layers of sliding_attention and "
            "one of full_attention, over and over, are supported"
        )
    return args


def rope_of_olmo3(config: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the rotary numbers of the layers of full attention. The others have the same base, and
    nothing is scaled in them. transformers 5 writes both, everything older one `rope_scaling`."""
    by_kind = config.get("rope_parameters") or {}
    if "rope_type" in by_kind:
        raise ValueError(
            f"rope_parameters is {by_kind}, and must say what holds in full_attention and what in "
            "sliding_attention"
        )
    base = {"rope_theta": config.get("rope_theta") or theta, "rope_type": "default"}
    if config.get("partial_rotary_factor") is not None:
        base["partial_rotary_factor"] = config["partial_rotary_factor"]
    sliding = base | (by_kind.get("sliding_attention") or {})
    full = base | (by_kind.get("full_attention") or {}) | (config.get("rope_scaling") or {})
    if sliding != base | {"rope_theta": full["rope_theta"]}:
        raise ValueError(
            f"rotary positions of sliding_attention are {sliding}, only those of full_attention "
            "without scaling are supported"
        )
    outer = config.get(dense.ORIGINAL)
    if outer is not None and outer != full.get(dense.ORIGINAL):
        raise ValueError(
            f"{dense.ORIGINAL} is {outer!r}, and {full.get(dense.ORIGINAL)!r} in the rotary "
            "positions of full_attention: transformers reads the latter"
        )
    return full


def scaling_from_hf(rope: dict[str, Any]) -> dict[str, float] | None:
    """Return `Args.rope_scaling` from the rotary numbers of a config.json."""
    dense.check_rope(rope, KINDS)
    if rope["rope_type"] == "default":
        return None
    scaling = dense.yarn_from_hf(rope, dense.YARN)
    length = dense.real_number(rope, "attention_factor", mscale(scaling["factor"]))
    return scaling | {"attention_factor": length}


FORMATS = Formats(
    Args=Args,
    hf_types=("olmo2", "olmo3"),
    hf_fixed=dense.HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=partial(dense.hf_names, table=HF_NAMES),
    hf_ignored=dense.hf_ignored,
)
