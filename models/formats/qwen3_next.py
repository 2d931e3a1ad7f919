"""Hugging Face's files of Qwen3-Next: Qwen3NextForCausalLM."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from models import mtp
from models.family import Formats, TensorLayout
from models.formats import dense
from models.formats.layouts import Grouped
from models.qwen3_next import Args, has_attention

HF_FIXED = dense.HF_FIXED | {
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attn_output_gate": True,
    "use_sliding_window": False,
}

_ATTENTION = "model.layers.*.self_attn"
_DELTA_NET = "model.layers.*.linear_attn"
_SHARED = "model.layers.*.mlp.shared_expert"
NAMES_OF_ATTENTION = {
    # queries and their gates are one tensor there (`hf_layouts`), as are four and two below
    "layers.*.attention.wq.weight": f"{_ATTENTION}.q_proj.weight",
    "layers.*.attention.wg.weight": f"{_ATTENTION}.q_proj.weight",
    "layers.*.attention.wk.weight": f"{_ATTENTION}.k_proj.weight",
    "layers.*.attention.wv.weight": f"{_ATTENTION}.v_proj.weight",
    "layers.*.attention.wo.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.*.attention.q_norm.weight": f"{_ATTENTION}.q_norm.weight",
    "layers.*.attention.k_norm.weight": f"{_ATTENTION}.k_norm.weight",
}
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
    {
        ours: theirs
        for ours, theirs in dense.HF_NAMES.items()
        if ".attention." not in ours and ".feed_forward." not in ours
    }
    | dense.HF_NAMES_OF_MIXTURES
    | {
        "layers.*.feed_forward.shared_experts.w1.weight": f"{_SHARED}.gate_proj.weight",
        "layers.*.feed_forward.shared_experts.w3.weight": f"{_SHARED}.up_proj.weight",
        "layers.*.feed_forward.shared_experts.w2.weight": f"{_SHARED}.down_proj.weight",
        "layers.*.feed_forward.shared_gate.weight": "model.layers.*.mlp.shared_expert_gate.weight",
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
        for ours, theirs in table.items():
            names[ours.replace("*", str(number))] = theirs.replace("*", str(number))
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
    kinds = []
    for number in range(n_layers):
        is_attention = (number + 1) % interval == 0
        kinds.append("full_attention" if is_attention else "linear_attention")
    return kinds


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. transformers 5 reads `layer_types`; the hub's file and older
    readers have `full_attention_interval`. No layer uses intermediate_size. vLLM reads
    num_nextn_predict_layers, which the hub's file leaves out, as 1."""
    share = args.rope_dim / args.head_dim
    rope = {"rope_type": "default", "rope_theta": args.rope_theta, "partial_rotary_factor": share}
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "full_attention_interval": args.attention_interval,
        "layer_types": layer_types(args.n_layers, args.attention_interval),
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "partial_rotary_factor": share,
        "linear_num_key_heads": args.delta_key_heads,
        "linear_num_value_heads": args.delta_value_heads,
        "linear_key_head_dim": args.delta_key_dim,
        "linear_value_head_dim": args.delta_value_dim,
        "linear_conv_kernel_dim": args.conv_width,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_dim,
        "shared_expert_intermediate_size": args.shared_dim,
        "num_nextn_predict_layers": args.mtp_depth,
        "intermediate_size": args.shared_dim,
        "router_aux_loss_coef": args.balance_loss,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Qwen3NextConfig's defaults."""
    whole = dense.whole_number
    n_layers = whole(config, "num_hidden_layers", 48, most=1000)
    predictions = config.get("num_nextn_predict_layers", 1) or 0
    if predictions not in (0, 1):
        raise ValueError(
            f"num_nextn_predict_layers is {predictions!r}: one layer that predicts a further token "
            "can be read"
        )
    rope = {"partial_rotary_factor": 0.25} | dense.hf_rope(config)
    dense.check_rope(rope, {"default": ("partial_rotary_factor",)})
    numbers = dense.check_heads(
        {
            "n_heads": whole(config, "num_attention_heads", 16),
            "n_kv_heads": whole(config, "num_key_value_heads", 2),
            "head_dim": whole(config, "head_dim", 256),
        }
    )
    return Args(
        **numbers,
        **delta_net_from_hf(config),
        dim=whole(config, "hidden_size", 2048),
        n_layers=n_layers,
        attention_interval=interval_from_hf(config, n_layers),
        rope_dim=rope_dim_from_hf(rope, numbers["head_dim"]),
        n_experts=whole(config, "num_experts", 512),
        experts_per_token=whole(config, "num_experts_per_tok", 10),
        expert_dim=whole(config, "moe_intermediate_size", 512),
        shared_dim=whole(config, "shared_expert_intermediate_size", 512),
        balance_loss=float(config.get("router_aux_loss_coef", 0.001)),
        vocab_size=whole(config, "vocab_size", 151936),
        rope_theta=dense.real_number(rope, "rope_theta"),
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-6),
        max_seq_len=whole(config, "max_position_embeddings", 32768),
        tied_embeddings=dense.is_tied(config),
        mtp_depth=int(predictions),
    )


def delta_net_from_hf(config: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of the gated delta nets. Raises ValueError for heads that cannot be."""
    whole = dense.whole_number
    keys = whole(config, "linear_num_key_heads", 16)
    values = whole(config, "linear_num_value_heads", 32)
    key_dim = whole(config, "linear_key_head_dim", 128)
    value_dim = whole(config, "linear_value_head_dim", 128)
    if values % keys or max(keys * key_dim, values * value_dim) > 2**24:
        raise ValueError(
            f"linear_num_key_heads is {keys} (of {key_dim}) and linear_num_value_heads {values} (of "
            f"{value_dim}): each key head must serve an equal group of value heads"
        )
    return {
        "delta_key_heads": keys,
        "delta_value_heads": values,
        "delta_key_dim": key_dim,
        "delta_value_dim": value_dim,
        "conv_width": whole(config, "linear_conv_kernel_dim", 4),
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
