"""Choose the number of positions for a model without a recorded training length: the positions that
it is made for, as far as this machine has memory for them."""

from typing import Any

import torch
from torch import nn

from checkpoint import state

LEAST = 1024  # positions, which every machine that holds the weights is taken to have memory for


def within_memory(model: nn.Module, args: Any) -> tuple[int, str]:
    """Return the positions that a model is made for, or as many as half of the free memory holds,
    and why so many.

    model: with its weights loaded, in float32. args: of its family.
    """
    free = _free_bytes(model)
    whole = args.max_seq_len
    if free is None or whole * bytes_per_position(args) <= free / 2:
        return whole, "all of the model's positions"
    held = int(free / 2 / bytes_per_position(args))
    count = min(whole, max(LEAST, held // LEAST * LEAST))
    return count, f"of the model's {whole:,}: {free / 2**30:.1f} GiB of memory are free"


def bytes_per_position(args: Any) -> int:
    """Return what one position takes in a forward pass without gradients, in float32: keys and
    values of every layer at their widest, and what a block holds at once."""
    hidden = getattr(args, "hidden_dim", 0)
    experts = getattr(args, "experts_per_token", 0) * getattr(args, "expert_dim", 0)
    kept = 2 * args.n_layers * args.dim
    at_once = 16 * args.dim + 4 * max(hidden, experts)
    return 4 * (kept + at_once)


def _free_bytes(model: nn.Module) -> int | None:
    """Return the free bytes of the device that the model will compute on; None where unknown."""
    if not torch.cuda.is_available():
        return state.free_host_memory()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return max(0, torch.cuda.mem_get_info()[0] - weights)
