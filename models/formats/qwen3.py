"""Hugging Face's files of Qwen3: Qwen3ForCausalLM and Qwen3MoeForCausalLM."""

from typing import Any

from models.family import Formats
from models.formats import dense
from models.qwen3 import Args

HF_FIXED = dense.HF_FIXED | {"use_sliding_window": False}

_OF_BLOCKS = dense.NAMES_OF_ALL | dense.NAMES_OF_ATTENTION | dense.NAMES_OF_QK_NORMS
HF_NAMES = _OF_BLOCKS | dense.NAMES_OF_FEED_FORWARD
HF_NAMES_OF_EXPERTS = _OF_BLOCKS | dense.NAMES_OF_MIXTURES
FIELDS_OF_EXPERTS = {
    "n_experts": ("num_experts", 128),
    "experts_per_token": ("num_experts_per_tok", 8),
    "expert_dim": ("moe_intermediate_size", 768),
}


def hf_names(args: Args) -> dict[str, str]:
    return dense.hf_names(args, HF_NAMES_OF_EXPERTS if args.n_experts else HF_NAMES)


def hf_config(args: Args) -> dict[str, Any]:
    fields = dense.hf_fields(args) | {
        "use_sliding_window": False,
        "max_window_layers": args.n_layers,
    }
    if not args.n_experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | fields
    numbers = dense.hf_numbers(args, FIELDS_OF_EXPERTS) | {
        "router_aux_loss_coef": args.balance_loss,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | fields | numbers


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Qwen3Config's defaults."""
    rope = dense.hf_rope(config)
    dense.check_rope(rope, {"default": ()})
    dense.check_full_attention(config, window="")  # use_sliding_window is false
    if config.get("model_type") != "qwen3_moe":
        return Args(**dense.numbers_from_hf(config, head_dim=128, kv_heads=32, context=32768))
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError(
            "some layers have no experts (decoder_sparse_step, mlp_only_layers): all must have them"
        )
    if not config.get("norm_topk_prob", False):
        raise ValueError(
            "norm_topk_prob is false: the weights of a token's experts must add up to 1"
        )
    fields = FIELDS_OF_EXPERTS
    if "num_experts" not in config:
        fields = fields | {"n_experts": ("num_local_experts", 128)}
    return Args(
        **dense.numbers_from_hf(config, head_dim=None, kv_heads=4, context=32768),
        **dense.numbers_of(config, fields),
        balance_loss=float(config.get("router_aux_loss_coef", 0.001)),
    )


FORMATS = Formats(
    Args=Args,
    hf_types=("qwen3", "qwen3_moe"),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=dense.hf_ignored,
)
