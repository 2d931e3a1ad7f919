"""Hugging Face's files of Qwen3-Next: Qwen3NextForCausalLM."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from models import mtp
from models.family import Formats, TensorLayout
from models.formats import dense
from models.formats.layouts import Grouped
from models.qwen3_next import Args, has_attention

FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
HF_FIXED = (
    dense.HF_FIXED
    | FIXED
    | {
        "attn_output_gate": True,
        "use_sliding_window": False,
    }
)

_DELTA_NET = "model.layers.*.linear_attn"
NAMES_OF_ATTENTION = (
    dense.NAMES_OF_ATTENTION
    | dense.NAMES_OF_QK_NORMS
    # queries and their gates are one tensor there (`hf_layouts`), as are four and two below
    | {"layers.*.attention.wg.weight": "model.layers.*.self_attn.q_proj.weight"}
)
NAMES_OF_DELTA_NET = {
    "layers.*.attention.wq.weight": f"{_DELTA_NET}.in_proj_qkvz.weight",
    "layers.*.attention.wk.weight": f"{_DELTA_NET}.in_proj_qkvz.weight",
    "layers.*.attention.wv.weight": f"{_DELTA_NET}.in_proj_qkvz.weight",
    "layers.*.attention.wz.weight": f"{_DELTA_NET}.in_proj_qkvz.weight",
    "layers.*.attention.wb.weight": f"{_DELTA_NET}.in_proj_ba.weight",
    "layers.*.attention.wa.weight": f"{_DELTA_NET}.in_proj_ba.weight",
    "layers.*.attention.conv_q": f"{_DELTA_NET}.conv1d.weight",
    "layers.*.attention.conv_k": f"{_DELTA_NET}.conv1d.weight",
    "layers.*.attention.conv_v": f"{_DELTA_NET}.conv1d.weight",
    "layers.*.attention.A_log": f"{_DELTA_NET}.A_log",
    "layers.*.attention.dt_bias": f"{_DELTA_NET}.dt_bias",
    "layers.*.attention.norm.weight": f"{_DELTA_NET}.norm.weight",
    "layers.*.attention.wo.weight": f"{_DELTA_NET}.out_proj.weight",
}
NAMES_OF_ALL = (
    dense.NAMES_OF_ALL
    | dense.NAMES_OF_MIXTURES
    | dense.of_shared_experts("model.layers.*.mlp.shared_expert")
    | {"layers.*.feed_forward.shared_gate.weight": "model.layers.*.mlp.shared_expert_gate.weight"}
)


FIELDS_OF_DELTA_NET: dense.Fields = {
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_value_heads": ("linear_num_value_heads", 32),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
}
FIELDS = (
    dense.with_defaults(
        dim=2048,
        n_layers=48,
        n_heads=16,
        n_kv_heads=2,
        head_dim=256,
        vocab_size=151936,
        norm_eps=1e-6,
        max_seq_len=32768,
    )
    | FIELDS_OF_DELTA_NET
    | {
        "n_experts": ("num_experts", 512),
        "experts_per_token": ("num_experts_per_tok", 10),
        "expert_dim": ("moe_intermediate_size", 512),
        "shared_dim": ("shared_expert_intermediate_size", 512),
    }
)
NAMES_OF_PREDICTION = {  # of the layer that predicts a further token, what others lack
    "token_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "w_pair.weight": "mtp.fc.weight",
    "norm.weight": "mtp.norm.weight",
}


def hf_names(args: Args) -> dict[str, str]:
    layers = mtp.layers_in_all(args)
    names = dense.hf_names(replace(args, n_layers=layers), NAMES_OF_ALL)
    for number in range(layers):
        table = NAMES_OF_ATTENTION if has_attention(args, number) else NAMES_OF_DELTA_NET
        names |= dense.of_layer(number, table)
    if not args.mtp_depth:
        return names
    last = f"model.layers.{args.n_layers}."
    names = {ours: theirs.replace(last, "mtp.layers.0.") for ours, theirs in names.items()}
    for ours, theirs in NAMES_OF_PREDICTION.items():
        names[f"layers.{args.n_layers}.{ours}"] = theirs
    return names


def hf_layouts(args: Args, there: Container[str]) -> dict[str, TensorLayout]:
    """Return the layouts of the tensors that join several of ours. For each head, q_proj has a
    query's rows and those of its gate; for each key head, in_proj_qkvz has the rows of its query,
    its key, the values that it serves and their gates, and in_proj_ba those of beta and the decay.
    conv1d has all channels of queries, then of keys, then of values."""
    served = args.delta_value_heads // args.delta_key_heads
    values = served * args.delta_value_dim
    key_rows = args.delta_key_heads * args.delta_key_dim
    value_rows = args.delta_value_heads * args.delta_value_dim
    joined = {  # a tensor of theirs -> its groups of rows, and the rows of each of ours in a group
        "q_proj": (args.n_heads, {"wq.weight": args.head_dim, "wg.weight": args.head_dim}),
        "in_proj_qkvz": (
            args.delta_key_heads,
            {
                "wq.weight": args.delta_key_dim,
                "wk.weight": args.delta_key_dim,
                "wv.weight": values,
                "wz.weight": values,
            },
        ),
        "in_proj_ba": (args.delta_key_heads, {"wb.weight": served, "wa.weight": served}),
        "conv1d": (1, {"conv_q": key_rows, "conv_k": key_rows, "conv_v": value_rows}),
    }
    layouts: dict[str, TensorLayout] = {}
    for ours, theirs in hf_names(args).items():
        tensor = theirs.split(".")[-2]
        if ".attention." not in ours or tensor not in joined:
            continue
        groups, parts = joined[tensor]
        part = ours.split(".attention.")[1]
        turn = list(parts).index(part)
        layouts[ours] = Grouped(theirs, groups, tuple(parts.values()), turn, tensor == "conv1d")
    return layouts


def hf_ignored(args: Args) -> str:
    """Return a pattern of the names of tensors to ignore: those of the layer that predicts a further
    token, where the model has none. transformers ignores them too."""
    return dense.hf_ignored(args) + ("" if args.mtp_depth else r"|mtp\..*")


def layer_types(n_layers: int, interval: int) -> list[str]:
    """Return the type of each layer, as transformers names it."""
    see_all = (number % interval == 0 for number in range(1, n_layers + 1))
    return dense.layer_types(see_all, "linear_attention")


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. transformers 5 reads `layer_types`; the hub's file and older
    readers have `full_attention_interval`. No layer uses intermediate_size. vLLM reads
    num_nextn_predict_layers, which the hub's file leaves out, as 1."""
    return (
        hybrid_fields(args, FIELDS)
        | FIXED
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_nextn_predict_layers": args.mtp_depth,
            "intermediate_size": args.shared_dim,
            "router_aux_loss_coef": args.balance_loss,
        }
    )


def hybrid_fields(args: Any, fields: dense.Fields) -> dict[str, Any]:
    """Return the fields that Qwen3-Next and Qwen3.5 share, with these numbers."""
    share = {"partial_rotary_factor": args.rope_dim / args.head_dim}
    found = dense.hf_fields(args, fields) | share
    return found | {
        "full_attention_interval": args.attention_interval,
        "layer_types": layer_types(args.n_layers, args.attention_interval),
        "rope_parameters": found["rope_parameters"] | share,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Qwen3NextConfig's defaults."""
    predictions = config.get("num_nextn_predict_layers", 1) or 0
    if predictions not in (0, 1):
        raise ValueError(
            f"num_nextn_predict_layers is {predictions!r}: one layer that predicts a further token "
            "can be read"
        )
    rope = {"partial_rotary_factor": 0.25} | dense.hf_rope(config)
    dense.check_rope(rope, {"default": ("partial_rotary_factor",)})
    return Args(
        **hybrid_numbers(config, FIELDS, rope),
        balance_loss=float(config.get("router_aux_loss_coef", 0.001)),
        tied_embeddings=dense.is_tied(config),
        mtp_depth=int(predictions),
    )


def hybrid_numbers(
    config: dict[str, Any], fields: dense.Fields, rope: dict[str, Any]
) -> dict[str, Any]:
    """Return the numbers that Qwen3-Next and Qwen3.5 share. rope: the rotary ones of config.json.
    Raises ValueError for heads that cannot be."""
    numbers = dense.numbers_of(config, fields)
    keys, values, key_dim, value_dim, _ = (numbers[name] for name in FIELDS_OF_DELTA_NET)
    if values % keys or max(keys * key_dim, values * value_dim) > 2**24:
        raise ValueError(
            f"linear_num_key_heads is {keys} (of {key_dim}) and linear_num_value_heads {values} (of "
            f"{value_dim}): each key head must serve an equal group of value heads"
        )
    return numbers | {
        "attention_interval": interval_from_hf(config, numbers["n_layers"]),
        "rope_dim": rope_dim_from_hf(rope, numbers["head_dim"]),
        "rope_theta": dense.real_number(rope, "rope_theta"),
    }


def rope_dim_from_hf(rope: dict[str, Any], head_dim: int) -> int:
    """Return how many numbers of a head are rotated. Raises ValueError."""
    share = dense.real_number(rope, "partial_rotary_factor")
    width = int(head_dim * share)
    if share > 1 or width < 2 or width % 2:
        raise ValueError(
            f"partial_rotary_factor is {share:g}: {width} of the {head_dim} numbers of a head would "
            "be rotated, and rotary positions turn pairs of them"
        )
    return width


def interval_from_hf(config: dict[str, Any], n_layers: int) -> int:
    """Return the number of layers from one with attention to the next. transformers 5 writes the
    type of each layer, everything older the interval. Raises ValueError for types in another
    order."""
    kinds = config.get("layer_types")
    if kinds is None:
        return dense.whole_number(config, "full_attention_interval", 4)
    interval = n_layers + 1
    if "full_attention" in kinds:
        interval = kinds.index("full_attention") + 1
    if kinds != layer_types(n_layers, interval):
        raise ValueError(
            f"layer_types is {kinds!r}: only linear_attention with full_attention at equal intervals "
            f"is supported, for each of the {n_layers} layers"
        )
    return interval


FORMATS = Formats(
    Args=Args,
    hf_types=("qwen3_next",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=hf_ignored,
    hf_layouts=hf_layouts,
)
