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

_PROJECTIONS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_MIXTURE = "model.layers.*.mlp"
HF_NAMES = (
    {ours: theirs for ours, theirs in dense.HF_NAMES.items() if ".feed_forward." not in ours}
    | {
        f"layers.*.attention.{ours}.bias": f"model.layers.*.self_attn.{theirs}.bias"
        for ours, theirs in _PROJECTIONS.items()
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
    """Return the type of each layer, as transformers names it."""
    kinds = ["sliding_attention", "full_attention"] * n_layers
    return kinds[:n_layers]


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. transformers adds a balance loss to the loss only where
    output_router_logits is true. Its formula is not ours: it mixes the layers' counts. Raises
    ValueError for a model without windows."""
    if not args.window:
        raise ValueError("transformers' gpt-oss has windows, and model.window is 0")
    scaling = None
    if args.rope_scaling:
        scaling = {"rope_type": "yarn"} | args.rope_scaling
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    fields = dense.hf_fields(args, scaling)
    return fields | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "sliding_window": args.window,
        "layer_types": layer_types(args.n_layers),
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
        "router_aux_loss_coef": args.balance_loss,
        "output_router_logits": args.balance_loss > 0,
    }


YARN = {  # number of config.json -> its default in transformers; None: it must be there
    "factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
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
    whole = dense.whole_number
    _check_quantisation(config.get("quantization_config"))
    n_layers = whole(config, "num_hidden_layers", 36, most=1000)
    kinds = config.get("layer_types") or layer_types(n_layers)
    if kinds != layer_types(n_layers):
        raise ValueError(
            "layer_types must be sliding_attention and full_attention in turns, beginning with "
            "sliding_attention"
        )
    if config.get("sliding_window", 128) is None:
        raise ValueError("sliding_window is None: the layers called sliding_attention need one")
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = config | {"rope_scaling": DEFAULT_YARN}
    rope = dense.hf_rope(config, 150000.0)
    numbers = dense.check_heads(
        {
            "n_heads": whole(config, "num_attention_heads", 64),
            "n_kv_heads": whole(config, "num_key_value_heads", 8),
            "head_dim": whole(config, "head_dim", 64),
        }
    )
    balance = config.get("router_aux_loss_coef", 0.001)
    return Args(
        **numbers,
        dim=whole(config, "hidden_size", 2880),
        n_layers=n_layers,
        window=whole(config, "sliding_window", 128),
        n_experts=whole(config, "num_local_experts", 128),
        experts_per_token=whole(config, "num_experts_per_tok", 4),
        expert_dim=whole(config, "intermediate_size", 2880),
        balance_loss=float(balance) if config.get("output_router_logits") else 0.0,
        vocab_size=whole(config, "vocab_size", 201088),
        rope_theta=dense.real_number(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-5),
        max_seq_len=whole(config, "max_position_embeddings", 131072),
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
    dense.check_rope(rope, {"default": (), "yarn": (*YARN, "truncate")})
    if rope["rope_type"] == "default":
        return None
    numbers: dict[str, Any] = {
        key: dense.real_number(rope, key, default) for key, default in YARN.items()
    }
    numbers["original_max_seq_len"] = numbers.pop("original_max_position_embeddings")
    numbers["truncate"] = rope.get("truncate", True) is True
    return numbers


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
