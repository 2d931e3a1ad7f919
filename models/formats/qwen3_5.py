"""Hugging Face's files of Qwen3.5 without experts: Qwen3_5ForCausalLM, and the text model in those of
Qwen3_5ForConditionalGeneration, which sees images too. What is written is the text model."""

from collections.abc import Container
from typing import Any

from models.family import Formats, TensorLayout
from models.formats import dense, gemma3, qwen3_next
from models.formats.layouts import Grouped
from models.qwen3_5 import Args
from models.qwen3_next import has_attention

HF_FIXED = dense.HF_FIXED | {
    "attn_output_gate": True,
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
}
OTHERS = r"(model\.visual|mtp)\..*"  # what sees images, and what predicts a further token

_DELTA_NET = "model.layers.*.linear_attn"
NAMES_OF_DELTA_NET = qwen3_next.NAMES_OF_DELTA_NET | {
    # three projections are one tensor there, as are three convolutions
    "layers.*.attention.wq.weight": f"{_DELTA_NET}.in_proj_qkv.weight",
    "layers.*.attention.wk.weight": f"{_DELTA_NET}.in_proj_qkv.weight",
    "layers.*.attention.wv.weight": f"{_DELTA_NET}.in_proj_qkv.weight",
    "layers.*.attention.wz.weight": f"{_DELTA_NET}.in_proj_z.weight",
    "layers.*.attention.wb.weight": f"{_DELTA_NET}.in_proj_b.weight",
    "layers.*.attention.wa.weight": f"{_DELTA_NET}.in_proj_a.weight",
}
NAMES_OF_ALL = {
    ours: theirs for ours, theirs in dense.HF_NAMES.items() if ".attention." not in ours
}
ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def hf_names(args: Args) -> dict[str, str]:
    names = dense.hf_names(args, NAMES_OF_ALL)
    for number in range(args.n_layers):
        attends = has_attention(args, number)
        table = qwen3_next.NAMES_OF_ATTENTION if attends else NAMES_OF_DELTA_NET
        for ours, theirs in table.items():
            names[ours.replace("*", str(number))] = theirs.replace("*", str(number))
    return names


def hf_layouts(args: Args, there: Container[str]) -> dict[str, TensorLayout]:
    """Return the layouts of the tensors that join several of ours: q_proj as in Qwen3-Next; of a gated
    delta net, queries, then keys, then values."""
    keys = args.delta_key_heads * args.delta_key_dim
    rows = (keys, keys, args.delta_value_heads * args.delta_value_dim)
    turns = {"wq.weight": 0, "wk.weight": 1, "wv.weight": 2, "conv_q": 0, "conv_k": 1, "conv_v": 2}
    layouts: dict[str, TensorLayout] = {}
    for ours, theirs in hf_names(args).items():
        tensor = theirs.split(".")[-2]
        part = ours.split(".attention.")[-1]
        if tensor == "q_proj":
            of_each = (args.head_dim, args.head_dim)
            layouts[ours] = Grouped(theirs, args.n_heads, of_each, int(part == "wg.weight"))
        elif tensor in ("in_proj_qkv", "conv1d"):
            layouts[ours] = Grouped(theirs, 1, rows, turns[part], has_middle=tensor == "conv1d")
    return layouts


def hf_ignored(args: Args) -> str:
    return f"{dense.hf_ignored(args)}|{OTHERS}"


def hf_config(args: Args) -> dict[str, Any]:
    """Return the fields of config.json."""
    fields = dense.hf_fields(args)
    share = args.rope_dim / args.head_dim
    return fields | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": args.attention_interval,
        "layer_types": qwen3_next.layer_types(args.n_layers, args.attention_interval),
        "partial_rotary_factor": share,
        "linear_num_key_heads": args.delta_key_heads,
        "linear_num_value_heads": args.delta_value_heads,
        "linear_key_head_dim": args.delta_key_dim,
        "linear_value_head_dim": args.delta_value_dim,
        "linear_conv_kernel_dim": args.conv_width,
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": share},
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Qwen3_5TextConfig's defaults. Of text, the three parts of a
    rotary position are the same."""
    whole = dense.whole_number
    n_layers = whole(config, "num_hidden_layers", 32, most=1000)
    rope = {"partial_rotary_factor": 0.25} | dense.hf_rope(config)
    dense.check_rope(rope, {"default": ROPE})
    numbers = dense.check_heads(
        {
            "n_heads": whole(config, "num_attention_heads", 16),
            "n_kv_heads": whole(config, "num_key_value_heads", 4),
            "head_dim": whole(config, "head_dim", 256),
        }
    )
    return Args(
        **numbers,
        **qwen3_next.delta_net_from_hf(config),
        dim=whole(config, "hidden_size", 4096),
        n_layers=n_layers,
        attention_interval=qwen3_next.interval_from_hf(config, n_layers),
        rope_dim=qwen3_next.rope_dim_from_hf(rope, numbers["head_dim"]),
        hidden_dim=whole(config, "intermediate_size", 12288),
        vocab_size=whole(config, "vocab_size", 248320),
        rope_theta=dense.real_number(rope, "rope_theta"),
        norm_eps=dense.real_number(config, "rms_norm_eps", 1e-6),
        max_seq_len=whole(config, "max_position_embeddings", 32768),
        tied_embeddings=dense.is_tied(config),
    )


FORMATS = Formats(
    Args=Args,
    hf_types=("qwen3_5_text", "qwen3_5"),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=hf_names,
    hf_ignored=hf_ignored,
    hf_layouts=hf_layouts,
    hf_nested=("qwen3_5",),
    hf_stems=gemma3.HF_STEMS,
)
