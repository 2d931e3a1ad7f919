"""Hugging Face's files of DeepSeek-V3: DeepseekV3ForCausalLM."""

from dataclasses import replace
from typing import Any

from models import mtp
from models.deepseek_v3 import Args
from models.family import Formats
from models.formats import dense

MOST_PREDICTIONS = 8  # layers that predict further tokens
FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
HF_FIXED = dense.HF_FIXED | FIXED

_ATTENTION = "model.layers.*.self_attn"
NAMES_OF_LATENTS = {
    "layers.*.attention.wkv_a.weight": f"{_ATTENTION}.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": f"{_ATTENTION}.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": f"{_ATTENTION}.kv_b_proj.weight",
    "layers.*.attention.wo.weight": f"{_ATTENTION}.o_proj.weight",
}
NAMES_OF_QUERIES = {"layers.*.attention.wq_b.weight": f"{_ATTENTION}.q_proj.weight"}
NAMES_OF_NARROW_QUERIES = {  # with q_rank
    "layers.*.attention.wq_a.weight": f"{_ATTENTION}.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": f"{_ATTENTION}.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": f"{_ATTENTION}.q_b_proj.weight",
}
NAMES_OF_MIXTURE = (
    dense.NAMES_OF_MIXTURES
    | dense.of_shared_experts("model.layers.*.mlp.shared_experts")
    | {"layers.*.feed_forward.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias"}
)
NAMES_OF_PREDICTIONS = {  # of a layer that predicts a further token, what others lack
    "layers.*.token_norm.weight": "model.layers.*.enorm.weight",
    "layers.*.hidden_norm.weight": "model.layers.*.hnorm.weight",
    "layers.*.w_pair.weight": "model.layers.*.eh_proj.weight",
    "layers.*.norm.weight": "model.layers.*.shared_head.norm.weight",
}
FIELDS_OF_LATENTS: dense.Fields = {
    "kv_rank": ("kv_lora_rank", 512),
    "nope_dim": ("qk_nope_head_dim", 128),
    "rope_dim": ("qk_rope_head_dim", 64),
    "value_dim": ("v_head_dim", 128),
}
FIELDS = (
    dense.with_defaults(
        dim=7168,
        n_layers=61,
        n_heads=128,
        hidden_dim=18432,
        vocab_size=129280,
        norm_eps=1e-6,
        max_seq_len=4096,
    )
    | FIELDS_OF_LATENTS
    | {
        "n_experts": ("n_routed_experts", 256),
        "experts_per_token": ("num_experts_per_tok", 8),
        "expert_dim": ("moe_intermediate_size", 2048),
        "expert_groups": ("n_group", 8),
        "groups_per_token": ("topk_group", 4),
        "routed_scale": ("routed_scaling_factor", 2.5),
    }
)


def hf_names(args: Args) -> dict[str, str]:
    every_layer = replace(args, n_layers=mtp.layers_in_all(args))
    names = dense.hf_names(every_layer, dense.NAMES_OF_ALL)
    attention = NAMES_OF_NARROW_QUERIES if args.q_rank else NAMES_OF_QUERIES
    for number in range(every_layer.n_layers):
        is_dense = number < args.n_dense_layers
        rest = dense.NAMES_OF_FEED_FORWARD if is_dense else NAMES_OF_MIXTURE
        names |= dense.of_layer(number, attention | NAMES_OF_LATENTS | rest)
    for number in mtp.layers_ahead(args):
        names |= dense.of_layer(number, NAMES_OF_PREDICTIONS)
    return names


def hf_ignored(args: Args) -> str:
    """Return a pattern of the layers that predict further tokens than the model does, and of the
    copies of embedding and output projection in those that it has."""
    behind = args.n_layers + args.mtp_depth
    further = "|".join(map(str, range(behind, behind + MOST_PREDICTIONS)))
    copies = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
    return rf"model\.layers\.({further})\..*|{copies}|" + dense.hf_ignored(args)


def hf_config(args: Args) -> dict[str, Any]:
    scaling = dense.hf_scaling("yarn", args.rope_scaling)
    if scaling:
        scaling["type"] = "yarn"
    return (
        dense.hf_fields(args, FIELDS, scaling)
        | FIXED
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": args.n_dense_layers,
            "num_key_value_heads": args.n_heads,
            "q_lora_rank": args.q_rank or None,
            "n_shared_experts": args.n_shared_experts,
            "aux_loss_alpha": args.balance_loss,
            "seq_aux": True,
            "num_nextn_predict_layers": args.mtp_depth,
        }
    )


YARN = dense.YARN | {"mscale": None, "mscale_all_dim": None}


def check_latents(config: dict[str, Any], heads: int) -> None:
    """Raise ValueError for heads that share keys and values."""
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise ValueError(
            f"num_key_value_heads is {config['num_key_value_heads']!r}: every one of the {heads} "
            "heads has separate keys and values"
        )


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have DeepseekV3Config's defaults."""
    if config.get("quantization_config"):
        raise ValueError(
            "the weights are quantised (quantization_config): convert them to bfloat16 first"
        )
    rope = dense.hf_rope(config)
    dense.check_rope(rope, {"default": (), "yarn": tuple(YARN)})
    dense.check_full_attention(config)
    numbers = dense.numbers_of(config, FIELDS)
    check_latents(config, numbers["n_heads"])
    has_rank = config.get("q_lora_rank", 1536)
    return Args(
        **numbers,
        n_dense_layers=min(int(config.get("first_k_dense_replace", 3)), numbers["n_layers"]),
        q_rank=dense.whole_number(config, "q_lora_rank", 1536) if has_rank else 0,
        n_shared_experts=int(config.get("n_shared_experts", 1)),
        balance_loss=float(config.get("aux_loss_alpha", 0.0)),
        rope_theta=dense.real_number(rope, "rope_theta"),
        rope_scaling=dense.yarn_from_hf(rope, YARN) if rope["rope_type"] == "yarn" else None,
        tied_embeddings=dense.is_tied(config),
        mtp_depth=int(config.get("num_nextn_predict_layers", 1) or 0),
    )


FORMATS = Formats(
    Args=Args,
    hf_types=("deepseek_v3",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=hf_ignored,
)
