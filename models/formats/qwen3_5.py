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
NAMES_OF_ALL = dense.NAMES_OF_ALL | dense.NAMES_OF_FEED_FORWARD
FIELDS = (
    dense.with_defaults(
        dim=4096,
        n_layers=32,
        n_heads=16,
        n_kv_heads=4,
        head_dim=256,
        hidden_dim=12288,
        vocab_size=248320,
        norm_eps=1e-6,
        max_seq_len=32768,
    )
    | qwen3_next.FIELDS_OF_DELTA_NET
)
ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def hf_names(args: Args) -> dict[str, str]:
    names = dense.hf_names(args, NAMES_OF_ALL)
    for number in range(args.n_layers):
        attends = has_attention(args, number)
        table = qwen3_next.NAMES_OF_ATTENTION if attends else NAMES_OF_DELTA_NET
        names |= dense.of_layer(number, table)
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
    return qwen3_next.hybrid_fields(args, FIELDS) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
    }


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have Qwen3_5TextConfig's defaults. Of text, the three parts of a
    rotary position are the same."""
    rope = {"partial_rotary_factor": 0.25} | dense.hf_rope(config)
    dense.check_rope(rope, {"default": ROPE})
    return Args(
        **qwen3_next.hybrid_numbers(config, FIELDS, rope), tied_embeddings=dense.is_tied(config)
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
