"""Hugging Face's files of Gemma 2: Gemma2ForCausalLM."""

from functools import partial
from typing import Any

from models.family import Formats
from models.formats import dense, gemma3
from models.gemma2 import Args

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
HF_FIXED = {key: value for key, value in gemma3.HF_FIXED.items() if key not in CAPS}
HF_NAMES = {
    ours: theirs for ours, theirs in gemma3.HF_NAMES.items() if ours not in dense.NAMES_OF_QK_NORMS
}
FIELDS = gemma3.FIELDS | dense.with_defaults(vocab_size=256000, max_seq_len=8192)


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError for numbers that transformers refuses."""
    gemma3.check(args)
    return dense.hf_fields(args, FIELDS) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": gemma3.ACTIVATION,
        "hidden_activation": gemma3.ACTIVATION,
        "layer_types": gemma3.layer_types(args),
        CAPS[0]: args.attention_cap or None,
        CAPS[1]: args.logit_cap or None,
        # by default, transformers would never update row 0 of the embedding
        "pad_token_id": None,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Gemma2Config's defaults."""
    rope = dense.hf_rope(config)
    dense.check_rope(rope, {"default": ()})
    dense.check_window(config)
    args = Args(
        **dense.numbers_of(config, FIELDS),
        rope_theta=dense.real_number(rope, "rope_theta"),
        tied_embeddings=dense.is_tied({"tie_word_embeddings": True} | config),
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
    hf_names=partial(dense.hf_names, table=HF_NAMES),
    hf_ignored=dense.hf_ignored,
)
