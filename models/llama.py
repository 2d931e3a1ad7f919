"""Llama 2, 3, 3.1, 3.2 and 3.3 as single-device code: it knows torch, and nothing of meshes.

The model is written for whole tensors, from the layers in `models/layers.py`. Tensor parallelism,
sharding and checkpointing are applied to it from outside (`parallelisms/`). `models/family.py` says
what a family is; `models/formats/llama.py` reads and writes its published weights.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models import arithmetic, layers
from models.family import Family
from models.flavors.llama import NUMBERS
from models.layers import Decoder, rope_frequencies, rope_tables


@dataclass(frozen=True)
class Args(layers.Args):
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
    low_factor = scaling["low_freq_factor"]
    high_factor = scaling["high_freq_factor"]
    longest = original / low_factor
    shortest = original / high_factor
    stretched = frequencies / scaling["factor"]
    smooth = (original / wavelength - low_factor) / (high_factor - low_factor)
    between = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    long_or_short = torch.where(wavelength > longest, stretched, frequencies)
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, between, long_or_short)


class Llama(Decoder):
    """The decoder of `models/layers.py` unchanged, with Llama 3.1's rotary frequencies."""

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = rope_frequencies(self.args.head_dim, self.args.rope_theta, positions.device)
        if self.args.rope_scaling is not None:
            frequencies = scaled_frequencies(frequencies, self.args.rope_scaling)
        return rope_tables(frequencies, positions)


FAMILY = Family(
    name="llama",
    numbers=NUMBERS,
    Args=Args,
    build=Llama,
    initial_values=layers.initial_values,
    decay=layers.DECAY,
    tp_plan=layers.tp_plan,
    flops_per_token=arithmetic.flops_per_token,
)
