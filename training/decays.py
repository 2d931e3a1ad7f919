"""Initial values of layers with a decaying state (models/delta_net.py): uniform numbers, bent.

In float64, rounded to float32: a logarithm whose last digit differs between devices still gives the
same bits. Ranges: Mamba-2 (Dao and Gu, arXiv:2405.21060), its reference code; those of A as in
transformers' qwen3_next.
"""

import math

import torch
from torch import Tensor

RATES = (0.01, 16.0)  # A: how fast a head forgets
STEPS = (0.001, 0.1)  # softplus(dt_bias): the step of a token whose projection is 0


def uniform(bits: Tensor) -> Tensor:
    """Return numbers between 0 and 1, without these, of 64 random bits each: float64."""
    return ((bits >> 40).bitwise_and_((1 << 24) - 1).double() + 0.5) / (1 << 24)


def decay_rates(bits: Tensor) -> Tensor:
    """Return logarithms of rates that are uniform in RATES."""
    low, high = RATES
    return (low + (high - low) * uniform(bits)).log().float()


def time_steps(bits: Tensor) -> Tensor:
    """Return the biases whose softplus is log-uniform in STEPS."""
    low, high = map(math.log, STEPS)
    step = (low + (high - low) * uniform(bits)).exp()
    return (step + torch.log(-torch.expm1(-step))).float()


KINDS = {"decay_rates": decay_rates, "time_steps": time_steps}
