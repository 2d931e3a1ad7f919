"""Hugging Face's files of gpt-oss: GptOssForCausalLM. The hub's own have the experts' weights in
MXFP4, which is read; what is written is not quantised."""

from collections.abc import Container
from typing import Any

from models.family import Formats, TensorLayout
from models.formats import dense
from models.formats.layouts import Interleaved, Mxfp4
from models.gpt_oss import ALPHA, LIMIT, Args

HF_FIXED = dense.HF_NEUTRAL | {
    "hidden_act": "silu",
    "attention_bias": True,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": LIMIT,
}

_MIXTURE = "model.layers.*.mlp"
HF_NAMES = (
    dense.NAMES_OF_ALL
    | dense.NAMES_OF_ATTENTION
    | {
        ours.replace(".weight", ".bias"): theirs.replace(".weight", ".bias")
        for ours, theirs in dense.NAMES_OF_ATTENTION.items()
    }
    | {
        "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
        "layers.*.feed_forward.router.weight": f"{_MIXTURE}.router.weight",
        "layers.*.feed_forward.router.bias": f"{_MIXTURE}.router.bias",
        # w1 and w3 in one, so `hf_layouts` says how
        "layers.*.feed_forward.experts.w1": f"{_MIXTURE}.experts.gate_up_proj",
        "layers.*.feed_forward.experts.w3": f"{_MIXTURE}.experts.gate_up_proj",
        "layers.*.feed_forward.experts.b1": f"{_MIXTURE}.experts.gate_up_proj_bias",
        "layers.*.feed_forward.experts.b3": f"{_MIXTURE}.experts.gate_up_proj_bias",
        "layers.*.feed_forward.experts.w2": f"{_MIXTURE}.experts.down_proj",
        "layers.*.feed_forward.experts.b2": f"{_MIXTURE}.experts.down_proj_bias",
    }
)
FIELDS = dense.with_defaults(
    dim=2880,
    n_layers=36,
    n_heads=64,
    n_kv_heads=8,
    head_dim=64,
    vocab_size=201088,
    norm_eps=1e-5,
    max_seq_len=131072,
) | {
    "window": ("sliding_window", 128),
    "n_experts": ("num_local_experts", 128),
    "experts_per_token": ("num_experts_per_tok", 4),
    "expert_dim": ("intermediate_size", 2880),
}


def hf_names(args: Args) -> dict[str, str]:
    return dense.hf_names(args, HF_NAMES)


TURNS = {"1": (0, 2), "3": (1, 2), "2": (0, 1)}  # number of a weight -> its turn, of how many


def hf_layouts(args: Args, there: Container[str]) -> dict[str, TensorLayout]:
    """Return the layouts of the experts' weights. gate_up_proj is [X, D, 2 F], gate and up in
    turns, down_proj [X, F, D]: ours transposed. In MXFP4 they are not transposed."""
    layouts: dict[str, TensorLayout] = {}
    for ours, theirs in hf_names(args).items():
        if ".experts." not in ours:
            continue
        turn, n = TURNS[ours[-1]]
        is_matrix = ours[-2] == "w"
        if is_matrix and f"{theirs}_blocks" in there:
            layouts[ours] = Mxfp4(theirs, turn, n)
        else:
            layouts[ours] = Interleaved(theirs, is_matrix, turn, n)
    return layouts


def layer_types(n_layers: int) -> list[str]:
    return dense.layer_types(number % 2 == 1 for number in range(n_layers))


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. transformers adds a balance loss to the loss only where
    output_router_logits is true. Its formula is not ours: it mixes the layers' counts. Raises
    ValueError for a model without windows."""
    if not args.window:
        raise ValueError("transformers' gpt-oss has windows, and model.window is 0")
    scaling = dense.hf_scaling("yarn", args.rope_scaling)
    return dense.hf_fields(args, FIELDS, scaling) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "layer_types": layer_types(args.n_layers),
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
        "router_aux_loss_coef": args.balance_loss,
        "output_router_logits": args.balance_loss > 0,
    }


# that of a file without rotary numbers (GptOssConfig)
DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have GptOssConfig's defaults."""
    _check_quantisation(config.get("quantization_config"))
    numbers = dense.numbers_of(config, FIELDS)
    kinds = layer_types(numbers["n_layers"])
    if (config.get("layer_types") or kinds) != kinds:
        raise ValueError(
            "layer_types must be sliding_attention and full_attention in turns, beginning with "
            "sliding_attention"
        )
    dense.check_window(config)
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = config | {"rope_scaling": DEFAULT_YARN}
    rope = dense.hf_rope(config, 150000.0)
    balance = config.get("router_aux_loss_coef", 0.001)
    return Args(
        **numbers,
        balance_loss=float(balance) if config.get("output_router_logits") else 0.0,
        rope_theta=dense.real_number(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=dense.is_tied(config),
    )


def _check_quantisation(quantisation: Any) -> None:
    """Raise ValueError for any quantisation but MXFP4."""
    if not quantisation:
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    if method != "mxfp4":
        raise ValueError(
            f"the weights are quantised by {method!r} (quantization_config), and only mxfp4 is "
            "read: convert them to bfloat16 first"
        )


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    dense.check_rope(rope, {"default": (), "yarn": (*dense.YARN, "truncate")})
    if rope["rope_type"] == "default":
        return None
    numbers = dense.yarn_from_hf(rope, dense.YARN)
    return numbers | {"truncate": rope.get("truncate", True) is True}


FORMATS = Formats(
    Args=Args,
    hf_types=("gpt_oss",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=dense.hf_ignored,
    hf_layouts=hf_layouts,
)
