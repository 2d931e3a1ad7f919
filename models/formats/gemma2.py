"""Hugging Face's files of Gemma 2: Gemma2ForCausalLM."""

from typing import Any

from models.family import Formats
from models.formats import dense, gemma3
from models.gemma2 import Args

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
HF_FIXED = {key: value for key, value in gemma3.HF_FIXED.items() if key not in CAPS}
HF_NAMES = {
    ours: theirs
    for ours, theirs in gemma3.HF_NAMES.items()
    if not ours.endswith(("q_norm.weight", "k_norm.weight"))
}


def hf_names(args: Args) -> dict[str, str]:
    return dense.hf_names(args, HF_NAMES)


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError for numbers that transformers refuses."""
    gemma3.check(args)
    return dense.hf_fields(args) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": gemma3.ACTIVATION,
        "hidden_activation": gemma3.ACTIVATION,
        "query_pre_attn_scalar": args.query_scalar,
        "sliding_window": args.window,
        "layer_types": gemma3.layer_types(args),
        CAPS[0]: args.attention_cap or None,
        CAPS[1]: args.logit_cap or None,
        # by default, transformers would never update row 0 of the embedding
        "pad_token_id": None,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Gemma2Config's defaults."""
    whole = dense.whole_number
    rope = dense.hf_rope(config)
    dense.check_rope(rope, {"default": ()})
    if config.get("sliding_window", 4096) is None:
        raise ValueError(f"sliding_window is None: the layers called {gemma3.WINDOW} need one")
    args = Args(
        **dense.check_heads(
            {
                "n_heads": whole(config, "num_attention_heads", 8),
                "n_kv_heads": whole(config, "num_key_value_heads", 4),
                "head_dim": whole(config, "head_dim", 256),
            }
        ),
        dim=whole(config, "hidden_size", 2304),
        n_layers=whole(config, "num_hidden_layers", 26, most=1000),
        hidden_dim=whole(config, "intermediate_size", 9216),
        vocab_size=whole(config, "vocab_size", 256000),
        rope_theta=dense.real_number(rope, "rope_theta"),
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-6),
        max_seq_len=whole(config, "max_position_embeddings", 8192),
        tied_embeddings=dense.is_tied({"tie_word_embeddings": True} | config),
        window=whole(config, "sliding_window", 4096),
        query_scalar=whole(config, "query_pre_attn_scalar", 256),
        attention_cap=cap_from_hf(config, CAPS[0], 50.0),
        logit_cap=cap_from_hf(config, CAPS[1], 30.0),
    )
    kinds = config.get("layer_types")
    if kinds is not None and kinds != gemma3.layer_types(args):
        raise ValueError(
            f"layer_types is {kinds}: only {gemma3.WINDOW} and {gemma3.NO_WINDOW} in turn are supported"
        )
    return args


def cap_from_hf(config: dict[str, Any], key: str, default: float) -> float:
    """Return a soft cap, 0 where the file says null. Raises ValueError for one that is not positive."""
    if config.get(key, default) is None:
        return 0.0
    return dense.real_number(config, key, default)


FORMATS = Formats(
    Args=Args,
    hf_types=("gemma2",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=dense.hf_ignored,
)
