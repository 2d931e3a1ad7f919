"""Llama 2, 3, 3.1 and 3.2 as single-device code: it knows torch, and nothing of meshes.

The model is written for whole tensors, from the layers in `models/layers.py`. Tensor parallelism, sharding and checkpointing
are applied to it from outside (`parallelisms/`), driven by the tables at the end of this file.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers import Decoder, rope_frequencies, rope_tables


@dataclass(frozen=True)
class Args:
    """The numbers that define one Llama; a row of FLAVORS, with the overrides of the [model] table laid on top."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict | None
    norm_eps: float
    max_seq_len: int
    tied_embeddings: bool


def scaled_frequencies(frequencies: Tensor, scaling: dict) -> Tensor:
    """The rotary frequencies [E/2], radians per position, stretched as Llama 3.1 does for longer contexts.

    Wavelengths longer than the original context / low_freq_factor are stretched by the whole factor, those shorter than the
    original context / high_freq_factor not at all, and in between linearly. Source: arXiv:2407.21783, and `apply_scaling` in
    Meta's model.py.
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


# ---------------------------------------------------------------------------------------------------------------------
# What others must know about this model, as plain tables. FLAVORS must stay a literal: configs/check.py reads it
# without importing torch, so that a mistake in a config is reported at once.

# Sources: Llama 3 paper (arXiv:2407.21783) table 3 for 8B, 70B, 405B; config.json of meta-llama/Llama-3.1-8B, -70B, -405B
# and meta-llama/Llama-3.2-1B, -3B on the Hugging Face hub for the rest. `debug` is ours, sized for two CPU cores; it has
# 4 key/value heads so that tensor parallelism up to 4 can be tried on a laptop.
FLAVORS = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 704,
              "vocab_size": 4096, "rope_theta": 10000.0, "rope_scaling": None, "norm_eps": 1e-5,
              "max_seq_len": 8192, "tied_embeddings": False},
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64, "hidden_dim": 8192,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": True,
           "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 8192,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": True,
           "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336,
           "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
           "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 28672,
            "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 53248,
             "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5, "max_seq_len": 131072, "tied_embeddings": False,
             "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}},
}


def build(args: dict, layers: range | None = None) -> Llama:
    """The model of these numbers (a FLAVORS row with overrides), on whatever device is the default: `meta` in train.py.
    layers: the blocks of one stage of a pipeline; None: all of them."""
    return Llama(Args(**args), layers)


def initial_values(args: dict) -> list[tuple[str, str, float]]:
    """Rows (pattern of the parameter's name, kind, standard deviation); the first that matches counts.

    Normal values of deviation 0.02, and projections back into the residual stream scaled by 1/sqrt(2 * n_layers) so
    that its variance does not grow with depth (GPT-2; Radford et al. 2019, section 2.3).
    """
    residual = 0.02 / math.sqrt(2 * args["n_layers"])
    return [
        ("*norm.weight", "ones", 0.0),
        ("*.wo.weight", "normal", residual),
        ("*.w2.weight", "normal", residual),
        ("*", "normal", 0.02),
    ]


# Optimizer groups: (pattern, weight decay applies). Decaying a norm's gain towards 0 would shrink the signal itself.
DECAY = [("*norm.weight", False), ("*", True)]

# What tensor parallelism does to each module; the styles are defined in parallelisms/tp.py. `*` is a layer's number.
TP_PLAN = {
    "tok_embeddings": "vocab_embedding",  # rows of the vocabulary split; output: this rank's slice of the sequence
    "layers.*.attention_norm": "sequence",  # works on this rank's slice of the sequence
    "layers.*.attention": "gather_sequence",  # its input: the whole sequence
    "layers.*.attention.wq": "columns",  # heads split
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",  # sums over heads; output: a slice of the sequence again
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "columns",  # hidden units split
    "layers.*.feed_forward.w3": "columns",
    "layers.*.feed_forward.w2": "rows",
    "norm": "sequence",
    "output": "vocab_weight",  # rows of the vocabulary split; the loss in training/loss.py works on its share of the logits
}

# Names in Hugging Face's LlamaForCausalLM; layouts are the same. A tied model has no `output.weight`.
HF_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
