"""Hugging Face's files of Kimi Linear: KimiLinearForCausalLM."""

from collections.abc import Container
from typing import Any

from models.family import Formats, TensorLayout
from models.formats import deepseek_v3, dense
from models.formats.layouts import Grouped, WithOnes
from models.kimi_linear import Args, has_attention

FIXED = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
}
HF_FIXED = dense.HF_FIXED | FIXED

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
NAMES_OF_MIXTURE = dense.of_shared_experts(f"{_MIXTURE}.shared_experts") | {
    "layers.*.feed_forward.router.weight": f"{_MIXTURE}.gate.weight",
    "layers.*.feed_forward.router.bias": f"{_MIXTURE}.gate.e_score_correction_bias",
    "layers.*.feed_forward.experts.w1": f"{_MIXTURE}.experts.#.w1.weight",
    "layers.*.feed_forward.experts.w2": f"{_MIXTURE}.experts.#.w2.weight",
    "layers.*.feed_forward.experts.w3": f"{_MIXTURE}.experts.#.w3.weight",
}
NAMES_OF_ATTENTION = deepseek_v3.NAMES_OF_QUERIES | deepseek_v3.NAMES_OF_LATENTS
FIELDS = (
    dense.with_defaults(
        dim=2304, n_layers=27, n_heads=32, hidden_dim=9216, vocab_size=163840, norm_eps=1e-5
    )
    | deepseek_v3.FIELDS_OF_LATENTS
    | {
        "n_experts": ("num_experts", 256),
        "experts_per_token": ("num_experts_per_token", 8),
        "expert_dim": ("moe_intermediate_size", 1024),
        "routed_scale": ("routed_scaling_factor", 2.446),
        "max_seq_len": ("model_max_length", 1048576),
    }
)


def hf_names(args: Args) -> dict[str, str]:
    names = dense.hf_names(args, dense.NAMES_OF_ALL)
    for number in range(args.n_layers):
        mixer = NAMES_OF_ATTENTION if has_attention(args, number) else NAMES_OF_KDA
        is_dense = number < args.n_dense_layers
        rest = dense.NAMES_OF_FEED_FORWARD if is_dense else NAMES_OF_MIXTURE
        names |= dense.of_layer(number, mixer | rest)
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
    numbers = range(1, n_layers + 1)
    see_all = (number % interval == 0 or number == n_layers for number in numbers)
    return dense.layer_types(see_all, "linear_attention")


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json: those of the hub's file, in which layers count from 1, and
    `layer_types` and `linear_*`, which transformers 5 writes. Raises ValueError for a tied model."""
    if args.tied_embeddings:
        raise ValueError("transformers' Kimi Linear ties no embeddings: its output would be random")
    kinds = kinds_of_layers(args.n_layers, args.attention_interval)
    numbers = {
        kind: [number for number, own in enumerate(kinds, 1) if own == kind]
        for kind in ("full_attention", "linear_attention")
    }
    mixtures = ["sparse"] * (args.n_layers - args.n_dense_layers)
    return (
        dense.hf_numbers(args, FIELDS)
        | FIXED
        | {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_act": "silu",
            "first_k_dense_replace": args.n_dense_layers,
            "mlp_layer_types": ["dense"] * args.n_dense_layers + mixtures,
            "num_key_value_heads": args.n_heads,
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
            "num_shared_experts": args.n_shared_experts,
            "aux_loss_alpha": args.balance_loss,
            "pad_token_id": None,  # 163839 by default, which a small vocabulary lacks
            "tie_word_embeddings": args.tied_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
        }
    )


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have KimiLinearConfig's defaults, but for the kinds of layers,
    which it must name."""
    numbers = dense.numbers_of(config, FIELDS)
    n_layers = numbers["n_layers"]
    deepseek_v3.check_latents(config, numbers["n_heads"])
    return Args(
        **numbers,
        **kda_from_hf(config),
        n_dense_layers=dense_layers_from_hf(config, n_layers),
        attention_interval=interval_from_hf(config, n_layers),
        n_shared_experts=int(config.get("num_shared_experts", 1)),
        balance_loss=float(config.get("aux_loss_alpha", 0.0)),
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
