"""Hugging Face's files of Gemma 3: Gemma3ForCausalLM, and the text model in those of
Gemma3ForConditionalGeneration, which sees images too. What is written is the text model."""

from functools import partial
from typing import Any

from models.family import Formats
from models.formats import dense
from models.gemma3 import Args, has_window

HF_NAMES = (
    dense.HF_NAMES
    | dense.NAMES_OF_QK_NORMS
    | {
        "layers.*.post_attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "layers.*.ffn_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
        "layers.*.post_ffn_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
    }
)
FIELDS = dense.with_defaults(
    dim=2304,
    n_layers=26,
    n_heads=8,
    n_kv_heads=4,
    head_dim=256,
    hidden_dim=9216,
    vocab_size=262208,
    norm_eps=1e-6,
    max_seq_len=131072,
) | {"window": ("sliding_window", 4096), "query_scalar": ("query_pre_attn_scalar", 256)}

ACTIVATION = "gelu_pytorch_tanh"
HF_FIXED = dense.HF_FIXED | {
    "hidden_act": ACTIVATION,
    "hidden_activation": ACTIVATION,
    # transformers has it for Gemma 2, and drops it in Gemma 3
    "attn_logit_softcapping": None,
}
del HF_FIXED["query_pre_attn_scalar"]

# Their names of the text model in files of the whole one, as the hub has them and as transformers 5
# holds them in memory -> its names alone
HF_STEMS = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"

WINDOW = "sliding_attention"
NO_WINDOW = "full_attention"
KINDS = {WINDOW: {"default": ()}, NO_WINDOW: {"default": (), "linear": ("factor",)}}


def hf_ignored(args: Args) -> str:
    return rf"{dense.hf_ignored(args)}|{IMAGES}"


def layer_types(args: Args) -> list[str]:
    return dense.layer_types(not has_window(args, number) for number in range(args.n_layers))


def check(args: Any) -> None:
    """Raise ValueError for numbers that transformers refuses."""
    if not args.window:
        raise ValueError("transformers' Gemma has windows, and model.window is 0")
    if args.dim % args.n_heads:
        raise ValueError(f"transformers wants n_heads ({args.n_heads}) to divide dim ({args.dim})")


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError as `check`."""
    check(args)
    scaling = None
    if args.rope_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": args.rope_factor}
    fields = dense.hf_fields(args, FIELDS, scaling)
    del fields["hidden_act"]
    of_windows = {"rope_type": "default", "rope_theta": args.local_rope_theta}
    return fields | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": ACTIVATION,
        "sliding_window_pattern": args.window_pattern,
        "layer_types": layer_types(args),
        "rope_parameters": {WINDOW: of_windows, NO_WINDOW: fields["rope_parameters"]},
        "rope_local_base_freq": args.local_rope_theta,
        # by default, transformers would never update row 0 of the embedding
        "pad_token_id": None,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Gemma3TextConfig's defaults."""
    sliding, full = ropes_from_hf(config)
    dense.check_window(config)
    numbers = dense.numbers_of(config, FIELDS)
    return Args(
        **numbers,
        rope_theta=dense.real_number(full, "rope_theta"),
        tied_embeddings=dense.is_tied({"tie_word_embeddings": True} | config),
        window_pattern=pattern_from_hf(config, numbers["n_layers"]),
        local_rope_theta=dense.real_number(sliding, "rope_theta"),
        rope_factor=dense.real_number(full, "factor", 1.0),
    )


def pattern_from_hf(config: dict[str, Any], n_layers: int) -> int:
    """Return `Args.window_pattern`. A list of types counts where there is one, as in transformers.
    Raises ValueError for one that has no period."""
    pattern = dense.whole_number(config, "sliding_window_pattern", 6)
    kinds = config.get("layer_types")
    if kinds is None:
        return pattern
    first = kinds.index(NO_WINDOW) + 1 if NO_WINDOW in kinds else max(pattern, n_layers + 1)
    for period in (pattern, first):
        if kinds == dense.layer_types(n % period == 0 for n in range(1, n_layers + 1)):
            return period
    raise ValueError(
        f"layer_types is {kinds}, only equally many {WINDOW} before each {NO_WINDOW} are supported"
    )


def ropes_from_hf(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary numbers of the layers with a window, and of the others. transformers 5
    writes both in `rope_parameters`, everything older the fields rope_local_base_freq, rope_theta
    and rope_scaling. Raises ValueError."""
    by_kind = config.get("rope_parameters") or {}
    if not by_kind.keys() <= KINDS.keys():
        raise ValueError(
            f"rope_parameters is {by_kind}, and must say what holds in {NO_WINDOW} and what in "
            f"{WINDOW}"
        )
    ropes = []
    for kind, theta, scaling in (
        (WINDOW, config.get("rope_local_base_freq") or 1e4, {}),
        (NO_WINDOW, config.get("rope_theta") or 1e6, config.get("rope_scaling") or {}),
    ):
        rope = {"rope_theta": theta} | (by_kind.get(kind) or {}) | scaling
        if config.get("partial_rotary_factor") is not None:
            rope = {"partial_rotary_factor": config["partial_rotary_factor"]} | rope
        rope = {"rope_type": rope.get("type", "default")} | rope
        dense.check_rope(rope, KINDS[kind])
        ropes.append(rope)
    if ropes[1]["rope_type"] == "linear":
        dense.real_number(ropes[1], "factor")  # must be there
    return ropes[0], ropes[1]


FORMATS = Formats(
    Args=Args,
    hf_types=("gemma3_text", "gemma3"),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=partial(dense.hf_names, table=HF_NAMES),
    hf_ignored=hf_ignored,
    hf_nested=("gemma3",),
    hf_stems=HF_STEMS,
)
