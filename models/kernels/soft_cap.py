"""Bound logits by a soft cap (Gemma 2, arXiv:2408.00118, section 2)."""

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), or x for a cap of 0."""
    return cap * (x / cap).tanh() if cap else x
