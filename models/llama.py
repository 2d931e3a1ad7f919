"""Llama 2, 3, 3.1, 3.2 and 3.3 as single-device code: it knows torch, and nothing of meshes.

The model is written for whole tensors, from the layers in `models/layers.py`. Tensor parallelism,
sharding and checkpointing are applied to it from outside (`parallelisms/`). What others must know
about it stands below: `models/family.py` explains it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models import dense
from models.dense import (  # noqa: F401  what holds for every dense decoder
    DECAY,
    OPTIONS,
    QUERY_WIDTH,
    RULES,
    describe,
    flops_per_token,
    hf_ignored,
    hf_names,
    initial_values,
    largest_product,
    parameters,
    real_number,
    tp_plan,
    whole_number,
)
from models.layers import Decoder, rope_frequencies, rope_tables


@dataclass(frozen=True)
class Args(dense.Args):
    """The numbers that define one Llama."""

    # factor, low_freq_factor, high_freq_factor, original_max_seq_len; None before Llama 3.1
    rope_scaling: dict | None


def scaled_frequencies(frequencies: Tensor, scaling: dict) -> Tensor:
    """The rotary frequencies [E/2], radians per position, stretched as Llama 3.1 does for longer
    contexts.

    Wavelengths longer than the original context / low_freq_factor are stretched by the whole
    factor, those shorter than the original context / high_freq_factor not at all, and in between
    linearly. Source: arXiv:2407.21783, and `apply_scaling` in Meta's model.py.
    """
    wavelength = 2 * math.pi / frequencies
    original = scaling["original_max_seq_len"]
    low, high = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    smooth = original / wavelength - scaling["low_freq_factor"]
    smooth = smooth / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    between = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    stretched = torch.where(wavelength > low, frequencies / scaling["factor"], frequencies)
    return torch.where((wavelength >= high) & (wavelength <= low), between, stretched)


class Llama(Decoder):
    """The decoder of `models/layers.py` as it stands there, with Llama 3.1's rotary frequencies."""

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = rope_frequencies(self.args.head_dim, self.args.rope_theta, positions.device)
        if self.args.rope_scaling is not None:
            frequencies = scaled_frequencies(frequencies, self.args.rope_scaling)
        return rope_tables(frequencies, positions)


# Sources: Llama 3 paper (arXiv:2407.21783) table 3 for 8B, 70B, 405B; config.json of
# meta-llama/Llama-3.1-8B, -70B, -405B and meta-llama/Llama-3.2-1B, -3B on the Hugging Face hub for
# the rest. `debug` is ours, sized for two CPU cores; it has 4 key/value heads so that tensor
# parallelism up to 4 can be tried on a laptop.
FLAVORS = {
    "debug": {
        "dim": 256,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 32,
        "hidden_dim": 704,
        "vocab_size": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "norm_eps": 1e-5,
        "max_seq_len": 8192,
        "tied_embeddings": False,
    },
    "1B": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 64,
        "hidden_dim": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": True,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "3B": {
        "dim": 3072,
        "n_layers": 28,
        "n_heads": 24,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 8192,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": True,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "8B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 14336,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "70B": {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 28672,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    "405B": {
        "dim": 16384,
        "n_layers": 126,
        "n_heads": 128,
        "n_kv_heads": 8,
        "head_dim": 128,
        "hidden_dim": 53248,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "norm_eps": 1e-5,
        "max_seq_len": 131072,
        "tied_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
}


def build(args: Args, layers: range | None = None) -> Llama:
    return Llama(args, layers)


# A new `dim` or `n_heads` without a `head_dim` makes a fraction of it where the two do not fit,
# which the rule refuses.
FOLLOWS = {
    "head_dim": (
        ("dim", "n_heads"),
        lambda m: m["dim"] / m["n_heads"] if m["dim"] % m["n_heads"] else m["dim"] // m["n_heads"],
    )
}

RULES = RULES | {
    "export_hf": (
        lambda c: c.checkpoint.export_hf and c.model.dim % c.model.n_heads != 0,
        "{checkpoint.export_hf}, but transformers refuses a Llama whose {model.dim} is not a "
        "multiple of "
        "{model.n_heads}: change one of them, or remove export_hf",
    ),
}


def small(dim: int) -> Args:
    sizes = {
        "dim": dim,
        "n_layers": 4,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": dim // 2,
        "hidden_dim": dim,
        "vocab_size": 16,
    }
    return Args(**FLAVORS["debug"] | sizes)


# Hugging Face: LlamaForCausalLM -------------------------------------------------------------------

HF_TYPES = ("llama",)
HF_FIXED = dense.HF_FIXED | {"mlp_bias": False, "partial_rotary_factor": 1.0}


def hf_config(args: Args) -> dict[str, Any]:
    if args.dim % args.n_heads:
        raise ValueError(
            f"transformers refuses a Llama whose dim ({args.dim}) is no multiple of n_heads "
            f"({args.n_heads})"
        )
    scaling = None
    if args.rope_scaling:
        scaling = {"rope_type": "llama3"} | args.rope_scaling
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    return names | dense.hf_fields(args, scaling)


def args_from_hf(config: dict[str, Any]) -> Args:
    """What config.json does not say has LlamaConfig's default."""
    numbers = dense.numbers_from_hf(config, head_dim=None, kv_heads=0, context=2048)
    rope, scaling = dense.hf_rope(config), None
    if rope["rope_type"] == "llama3":
        scaling = {
            key: real_number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")
        }
        scaling["original_max_seq_len"] = whole_number(
            rope, "original_max_position_embeddings", numbers["max_seq_len"]
        )
    elif rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        kind = rope["rope_type"]
        raise ValueError(
            f"rotary positions of type {kind!r} ({rope}) are not supported, only default and llama3"
        )
    return Args(**numbers, rope_scaling=scaling)


# Meta's files: params.json and consolidated.*.pth (model.py in meta-llama/llama and
# meta-llama/llama3)


def args_from_meta(params: dict[str, Any], weights: dict[str, Tensor], files: int) -> Args:
    """params.json does not say how long the contexts were, nor the factor by which the rotary
    frequencies are stretched, so these are the published models'. Source: their config.json on the
    hub."""
    dim, heads = whole_number(params, "dim"), whole_number(params, "n_heads")
    theta = real_number(params, "rope_theta", 10000.0)
    rows = params.get("vocab_size", -1)
    embedding, output = weights["tok_embeddings.weight"], weights.get("output.weight")
    tied = output is None or (
        torch.equal(embedding[:1], output[:1]) and torch.equal(embedding, output)
    )
    scaling, context = None, 4096 if theta == 10000.0 else 8192  # Llama 2, Llama 3
    # Llama 3.1 and 3.3; of 3.2 there are 1B and 3B, which are tied
    if params.get("use_scaled_rope"):
        context = 131072
        scaling = {
            "factor": 32.0 if tied else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        }
    numbers = dense.check_heads(
        {
            "dim": dim,
            "n_layers": whole_number(params, "n_layers", most=1000),
            "n_heads": heads,
            "n_kv_heads": whole_number(params, "n_kv_heads", heads),
            "head_dim": dim // heads,
            "hidden_dim": weights["layers.0.feed_forward.w1.weight"].shape[0] * files,
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
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
