"""Hugging Face's files of Kimi Linear: KimiLinearForCausalLM."""

from collections.abc import Container
from typing import Any

from models.family import Formats, TensorLayout
from models.formats import deepseek_v3, dense
from models.formats.layouts import Grouped, WithOnes
from models.kimi_linear import Args, has_attention

HF_FIXED = dense.HF_FIXED | {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
}

_MIXER = "model.layers.*.self_attn"
_MIXTURE = "model.layers.*.block_sparse_moe"
NAMES_OF_KDA = {
    **{
        f"layers.*.attention.{ours}.weight": f"{_MIXER}.{theirs}_proj.weight"
        for ours, theirs in (
            *(("wq", "q"), ("wk", "k"), ("wv", "v"), ("wo", "o"), ("wb", "b")),
            *(("wf_a", "f_a"), ("wf_b", "f_b"), ("wg_a", "g_a"), ("wg_b", "g_b")),
        )
    },
    "layers.*.attention.conv_q": f"{_MIXER}.q_conv1d.weight",
    "layers.*.attention.conv_k": f"{_MIXER}.k_conv1d.weight",
    "layers.*.attention.conv_v": f"{_MIXER}.v_conv1d.weight",
    "layers.*.attention.A_log": f"{_MIXER}.A_log",
    "layers.*.attention.dt_bias": f"{_MIXER}.dt_bias",
    "layers.*.attention.norm.weight": f"{_MIXER}.o_norm.weight",
}
NAMES_OF_MIXTURE = {
    "layers.*.feed_forward.router.weight": f"{_MIXTURE}.gate.weight",
    "layers.*.feed_forward.router.bias": f"{_MIXTURE}.gate.e_score_correction_bias",
    "layers.*.feed_forward.experts.w1": f"{_MIXTURE}.experts.#.w1.weight",
    "layers.*.feed_forward.experts.w2": f"{_MIXTURE}.experts.#.w2.weight",
    "layers.*.feed_forward.experts.w3": f"{_MIXTURE}.experts.#.w3.weight",
    **{
        f"layers.*.feed_forward.shared_experts.{ours}.weight": (
            f"{_MIXTURE}.shared_experts.{theirs}_proj.weight"
        )
        for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
}
NAMES_OF_ATTENTION = {
    ours: theirs.replace("q_b_proj", "q_proj")
    for ours, theirs in deepseek_v3.HF_NAMES.items()
    if ".attention." in ours and ".wq_a." not in ours and ".q_norm." not in ours
}
NAMES_OF_FEED_FORWARD = {
    ours: theirs for ours, theirs in dense.HF_NAMES.items() if ".feed_forward." in ours
}
NAMES_OF_ALL = {
    ours: theirs
    for ours, theirs in dense.HF_NAMES.items()
    if ".attention." not in ours and ".feed_forward." not in ours
}


def hf_names(args: Args) -> dict[str, str]:
    names = dense.hf_names(args, NAMES_OF_ALL)
    for number in range(args.n_layers):
        table = NAMES_OF_ATTENTION if has_attention(args, number) else NAMES_OF_KDA
        if number < args.n_dense_layers:
            table = table | NAMES_OF_FEED_FORWARD
        else:
            table = table | NAMES_OF_MIXTURE
        for ours, theirs in table.items():
            names[ours.replace("*", str(number))] = theirs.replace("*", str(number))
    return names


def hf_layouts(args: Args, there: Container[str]) -> dict[str, TensorLayout]:
    """Return the layouts of the tensors that have dimensions of 1 more than ours, or another name:
    transformers 5.23 writes dense layers by the name of mixtures, and reads both."""
    rows = (args.delta_heads * args.delta_dim,)
    layouts: dict[str, TensorLayout] = {}
    for ours, theirs in hf_names(args).items():
        if ours.endswith(".A_log"):
            layouts[ours] = WithOnes(theirs, before=2, behind=1)
        elif ".conv_" in ours:
            layouts[ours] = Grouped(theirs, 1, rows, 0, has_middle=True)
        elif (other := theirs.replace(".mlp.", ".block_sparse_moe.")) != theirs and other in there:
            layouts[ours] = WithOnes(other, before=0, behind=0)
    return layouts


def kinds_of_layers(n_layers: int, interval: int) -> list[str]:
    """Return the kind of each layer, as transformers names it."""
    kinds = []
    for number in range(1, n_layers + 1):
        is_attention = number % interval == 0 or number == n_layers
        kinds.append("full_attention" if is_attention else "linear_attention")
    return kinds


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json: those of the hub's file, in which layers count from 1, and
    `layer_types` and `linear_*`, which transformers 5 writes. Raises ValueError for a tied model."""
    if args.tied_embeddings:
        raise ValueError("transformers' Kimi Linear ties no embeddings: its output would be random")
    kinds = kinds_of_layers(args.n_layers, args.attention_interval)
    numbers: dict[str, list[int]] = {"full_attention": [], "linear_attention": []}
    for number, kind in enumerate(kinds, 1):
        numbers[kind].append(number)
    mixtures = ["sparse"] * (args.n_layers - args.n_dense_layers)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "first_k_dense_replace": args.n_dense_layers,
        "mlp_layer_types": ["dense"] * args.n_dense_layers + mixtures,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": None,
        "kv_lora_rank": args.kv_rank,
        "qk_nope_head_dim": args.nope_dim,
        "qk_rope_head_dim": args.rope_dim,
        "v_head_dim": args.value_dim,
        "mla_use_nope": True,
        "layer_types": kinds,
        "linear_attn_config": {
            "full_attn_layers": numbers["full_attention"],
            "kda_layers": numbers["linear_attention"],
            "num_heads": args.delta_heads,
            "head_dim": args.delta_dim,
            "short_conv_kernel_size": args.conv_width,
        },
        "linear_num_heads": args.delta_heads,
        "linear_head_dim": args.delta_dim,
        "linear_conv_kernel_dim": args.conv_width,
        "intermediate_size": args.hidden_dim,
        "num_experts": args.n_experts,
        "num_experts_per_token": args.experts_per_token,
        "moe_intermediate_size": args.expert_dim,
        "num_shared_experts": args.n_shared_experts,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": args.routed_scale,
        "aux_loss_alpha": args.balance_loss,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "vocab_size": args.vocab_size,
        "pad_token_id": None,  # 163839 by default, which a small vocabulary lacks
        "model_max_length": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have KimiLinearConfig's defaults, but for the kinds of layers,
    which it must name."""
    whole = dense.whole_number
    n_layers = whole(config, "num_hidden_layers", 27, most=1000)
    return Args(
        **kda_from_hf(config),
        **deepseek_v3.latents_from_hf(config, 32),
        dim=whole(config, "hidden_size", 2304),
        n_layers=n_layers,
        n_dense_layers=dense_layers_from_hf(config, n_layers),
        attention_interval=interval_from_hf(config, n_layers),
        hidden_dim=whole(config, "intermediate_size", 9216),
        n_experts=whole(config, "num_experts", 256),
        experts_per_token=whole(config, "num_experts_per_token", 8),
        expert_dim=whole(config, "moe_intermediate_size", 1024),
        n_shared_experts=int(config.get("num_shared_experts", 1)),
        routed_scale=dense.real_number(config, "routed_scaling_factor", 2.446),
        balance_loss=float(config.get("aux_loss_alpha", 0.0)),
        vocab_size=whole(config, "vocab_size", 163840),
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-5),
        max_seq_len=whole(config, "model_max_length", 1048576),
        tied_embeddings=dense.is_tied(config),
    )


def kda_from_hf(config: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of KDA: those of linear_attn_config come first, as in transformers. Raises
    ValueError."""
    whole = dense.whole_number
    table = config.get("linear_attn_config") or {}
    if not isinstance(table, dict):
        raise ValueError(f"linear_attn_config is {table!r}, and must be a table")
    return {
        "delta_heads": whole(table, "num_heads", whole(config, "linear_num_heads", 32)),
        "delta_dim": whole(table, "head_dim", whole(config, "linear_head_dim", 128)),
        "conv_width": whole(
            table, "short_conv_kernel_size", whole(config, "linear_conv_kernel_dim", 4)
        ),
    }


def dense_layers_from_hf(config: dict[str, Any], n_layers: int) -> int:
    """Return the number of first layers without a mixture. Raises ValueError for others."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return min(int(config.get("first_k_dense_replace", 1)), n_layers)
    n_dense = kinds.index("sparse") if "sparse" in kinds else n_layers
    if kinds != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
        raise ValueError(
            f"mlp_layer_types is {kinds!r}: only dense layers before all sparse ones are supported, "
            f"of {n_layers}"
        )
    return n_dense


def interval_from_hf(config: dict[str, Any], n_layers: int) -> int:
    """Return the number of layers from one with attention to the next. Raises ValueError for layers
    in another order than ours."""
    kinds = config.get("layer_types")
    if kinds is None:
        table = config["linear_attn_config"]
        full = table["full_attn_layers"]
        numbers = range(1, n_layers + 1)
        if sorted([*full, *table["kda_layers"]]) != list(numbers):
            raise ValueError(f"linear_attn_config does not name each of {n_layers} layers once")
        kinds = ["full_attention" if n in full else "linear_attention" for n in numbers]
    interval = n_layers
    if "full_attention" in kinds:
        interval = kinds.index("full_attention") + 1
    if kinds != kinds_of_layers(n_layers, interval):
        raise ValueError(
            f"the layers are {kinds!r}: only linear_attention with full_attention at equal intervals, "
            f"and in the last layer, is supported, for each of the {n_layers} layers"
        )
    return interval


FORMATS = Formats(
    Args=Args,
    hf_types=("kimi_linear",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=dense.hf_ignored,
    hf_in_memory=(
        (r"\.self_attn\.(f_[ab]_proj|A_log|dt_bias)", r".self_attn.forget_gate.\1"),
        (r"\.block_sparse_moe\.", r".mlp."),
    ),
    hf_layouts=hf_layouts,
)
