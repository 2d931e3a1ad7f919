"""Llama's weights as they are published: Hugging Face's LlamaForCausalLM, and Meta's params.json and
consolidated.*.pth (model.py in meta-llama/llama and meta-llama/llama3)."""

from typing import Any

import torch
from torch import Tensor

from models.family import Formats, MetaFormats
from models.formats import dense
from models.formats.dense import real_number, whole_number
from models.llama import Args

HF_FIXED = dense.HF_FIXED | {"mlp_bias": False}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


def hf_config(args: Args) -> dict[str, Any]:
    if args.dim % args.n_heads:
        raise ValueError(
            f"transformers refuses a Llama whose dim ({args.dim}) is no multiple of n_heads "
            f"({args.n_heads})"
        )
    scaling = dense.hf_scaling("llama3", args.rope_scaling)
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    return names | dense.hf_fields(args, scaling=scaling)


def args_from_hf(config: dict[str, Any]) -> Args:
    """Read config.json; missing keys have LlamaConfig's defaults."""
    numbers = dense.numbers_from_hf(config, head_dim=None, kv_heads=0, context=2048)
    rope = dense.hf_rope(config)
    dense.check_rope(rope, {"default": (), "llama3": (*LLAMA3, dense.ORIGINAL)})
    dense.check_full_attention(config)
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = {key: real_number(rope, key) for key in LLAMA3}
        original = whole_number(rope, dense.ORIGINAL, numbers["max_seq_len"])
        scaling["original_max_seq_len"] = original
    return Args(**numbers, rope_scaling=scaling)


# Meta's files ------------------------------------------------------------------------------------


def args_from_meta(params: dict[str, Any], weights: dict[str, Tensor], files: int) -> Args:
    """Return the Args of Meta's params.json. It does not say how long the contexts were, nor the
    factor by which the rotary frequencies are stretched, so these are the published models'.
    Source: their config.json on the hub."""
    dim = whole_number(params, "dim")
    heads = whole_number(params, "n_heads")
    theta = real_number(params, "rope_theta", 10000.0)
    rows = params.get("vocab_size", -1)
    embedding = weights["tok_embeddings.weight"]
    output = weights.get("output.weight")
    tied = output is None or (
        torch.equal(embedding[:1], output[:1]) and torch.equal(embedding, output)
    )
    scaling = None
    context = 4096 if theta == 10000.0 else 8192  # Llama 2, Llama 3
    # Llama 3.1 and 3.3; of 3.2 there are 1B and 3B, which are tied
    if params.get("use_scaled_rope"):
        context = 131072
        scaling = {
            "factor": 32.0 if tied else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        }
    hidden_dim_of_a_file = weights["layers.0.feed_forward.w1.weight"].shape[0]
    numbers = dense.check_heads(
        {
            "dim": dim,
            "n_layers": whole_number(params, "n_layers", most=dense.MOST_LAYERS),
            "n_heads": heads,
            "n_kv_heads": whole_number(params, "n_kv_heads", heads),
            "head_dim": dim // heads,
            "hidden_dim": hidden_dim_of_a_file * files,
            "vocab_size": embedding.shape[0] if rows == -1 else whole_number(params, "vocab_size"),
            "rope_theta": theta,
            "norm_eps": real_number(params, "norm_eps"),
            "max_seq_len": context,
            "tied_embeddings": tied,
        }
    )
    return Args(**numbers, rope_scaling=scaling)


def meta_ignored(args: Args) -> set[str]:
    return {"rope.freqs"} | ({"output.weight"} if args.tied_embeddings else set())


def from_meta(name: str, weight: Tensor, args: Args) -> Tensor:
    """Meta's rotary positions turn the pair (2i, 2i + 1) of a head, ours and Hugging Face's (i, i +
    E/2): the rows of wq and wk [heads * E, D] are reordered within each head."""
    heads = {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2])
    return half_rotation(weight, heads) if heads else weight


def half_rotation(weight: Tensor, heads: int) -> Tensor:
    """weight [heads * E, D]"""
    pairs = weight.view(heads, -1, 2, weight.shape[1])  # [heads, E/2, 2, D]
    return pairs.transpose(1, 2).reshape(weight.shape)


FORMATS = Formats(
    Args=Args,
    hf_types=("llama",),
    hf_fixed=HF_FIXED,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    hf_names=dense.hf_names,
    hf_ignored=dense.hf_ignored,
    meta=MetaFormats(args_from_meta, meta_ignored, from_meta),
)
