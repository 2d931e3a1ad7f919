"""Hugging Face's files of DeepSeek-V3: DeepseekV3ForCausalLM."""

from dataclasses import replace
from typing import Any

from models import mtp
from models.deepseek_v3 import Args
from models.family import Formats
from models.formats import dense

MOST_PREDICTIONS = 8  # layers that predict further tokens
HF_FIXED = dense.HF_FIXED | {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}

HF_NAMES = (
    {ours: theirs for ours, theirs in dense.HF_NAMES.items() if ".attention.w" not in ours}
    | {
        "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
        "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
        # q_proj without q_rank
        "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
        "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
        "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
        "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
        "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    }
    | dense.HF_NAMES_OF_MIXTURES
    | {
        "layers.*.feed_forward.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        **{
            f"layers.*.feed_forward.shared_experts.{ours}.weight": (
                f"model.layers.*.mlp.shared_experts.{theirs}_proj.weight"
            )
            for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
        },
    }
)


HF_NAMES_OF_PREDICTIONS = {  # of a layer that predicts a further token
    "token_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "w_pair.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}


def hf_names(args: Args) -> dict[str, str]:
    names = {}
    for number in mtp.layers_ahead(args):
        for ours, theirs in HF_NAMES_OF_PREDICTIONS.items():
            names[f"layers.{number}.{ours}"] = f"model.layers.{number}.{theirs}"
    every_layer = replace(args, n_layers=args.n_layers + args.mtp_depth)
    for ours, theirs in dense.hf_names(every_layer, HF_NAMES).items():
        layer = int(ours.split(".")[1]) if ours.startswith("layers.") else None
        is_dense = layer is not None and layer < args.n_dense_layers
        if ".feed_forward." in ours and (ours.split(".")[3] in ("w1", "w2", "w3")) != is_dense:
            continue
        if not args.q_rank and (".wq_a." in ours or ".attention.q_norm." in ours):
            continue
        names[ours] = theirs if args.q_rank else theirs.replace("q_b_proj", "q_proj")
    return names


def hf_ignored(args: Args) -> str:
    """Return a pattern of the layers that predict further tokens than the model does, and of the
    copies of embedding and output projection in those that it has."""
    behind = args.n_layers + args.mtp_depth
    further = "|".join(map(str, range(behind, behind + MOST_PREDICTIONS)))
    copies = r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
    return rf"model\.layers\.({further})\..*|{copies}|" + dense.hf_ignored(args)


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json. transformers 5 reads `rope_parameters`; the hub's file and
    everything older have `rope_theta` and `rope_scaling`."""
    yarn_numbers = None
    if args.rope_scaling:
        renamed = {"original_max_seq_len": "original_max_position_embeddings"}
        yarn_numbers = {"rope_type": "yarn", "type": "yarn"} | {
            renamed.get(k, k): v for k, v in args.rope_scaling.items()
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "first_k_dense_replace": args.n_dense_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_rank or None,
        "kv_lora_rank": args.kv_rank,
        "qk_nope_head_dim": args.nope_dim,
        "qk_rope_head_dim": args.rope_dim,
        "v_head_dim": args.value_dim,
        "intermediate_size": args.hidden_dim,
        "n_routed_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_dim,
        "n_shared_experts": args.n_shared_experts,
        "n_group": args.expert_groups,
        "topk_group": args.groups_per_token,
        "routed_scaling_factor": args.routed_scale,
        "aux_loss_alpha": args.balance_loss,
        "seq_aux": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": args.mtp_depth,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta}
        | (yarn_numbers or {}),
        "rope_theta": args.rope_theta,
        "rope_scaling": yarn_numbers,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


YARN = {
    "factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    # number of config.json -> its default in transformers; None: it must be there
    "mscale_all_dim": None,
}


def latents_from_hf(config: dict[str, Any], default_heads: int) -> dict[str, int]:
    """Return the heads of latent attention and their widths. Raises ValueError for heads that share
    keys and values."""
    whole = dense.whole_number
    heads = whole(config, "num_attention_heads", default_heads)
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise ValueError(
            f"num_key_value_heads is {config['num_key_value_heads']!r}: every one of the {heads} "
            "heads has separate keys and values"
        )
    return {
        "n_heads": heads,
        "kv_rank": whole(config, "kv_lora_rank", 512),
        "nope_dim": whole(config, "qk_nope_head_dim", 128),
        "rope_dim": whole(config, "qk_rope_head_dim", 64),
        "value_dim": whole(config, "v_head_dim", 128),
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have DeepseekV3Config's defaults."""
    whole = dense.whole_number
    if config.get("quantization_config"):
        raise ValueError(
            "the weights are quantised (quantization_config): convert them to bfloat16 first"
        )
    rope = dense.hf_rope(config)
    scaling = None
    dense.check_rope(rope, {"default": (), "yarn": tuple(YARN)})
    dense.check_full_attention(config)
    if rope["rope_type"] == "yarn":
        numbers = {key: dense.real_number(rope, key, default) for key, default in YARN.items()}
        numbers["original_max_seq_len"] = numbers.pop("original_max_position_embeddings")
        scaling = numbers
    n_layers = whole(config, "num_hidden_layers", 61, most=1000)
    return Args(
        **latents_from_hf(config, 128),
        dim=whole(config, "hidden_size", 7168),
        n_layers=n_layers,
        n_dense_layers=min(int(config.get("first_k_dense_replace", 3)), n_layers),
        q_rank=whole(config, "q_lora_rank", 1536) if config.get("q_lora_rank", 1536) else 0,
        hidden_dim=whole(config, "intermediate_size", 18432),
        n_experts=whole(config, "n_routed_experts", 256),
        experts_per_token=whole(config, "num_experts_per_tok", 8),
        expert_dim=whole(config, "moe_intermediate_size", 2048),
        n_shared_experts=int(config.get("n_shared_experts", 1)),
        expert_groups=whole(config, "n_group", 8),
        groups_per_token=whole(config, "topk_group", 4),
        routed_scale=dense.real_number(config, "routed_scaling_factor", 2.5),
        balance_loss=float(config.get("aux_loss_alpha", 0.0)),
        vocab_size=whole(config, "vocab_size", 129280),
        rope_theta=dense.real_number(rope, "rope_theta"),
        rope_scaling=scaling,
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-6),
        max_seq_len=whole(config, "max_position_embeddings", 4096),
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
