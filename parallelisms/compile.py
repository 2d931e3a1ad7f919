"""torch.compile, one block at a time: identical blocks compile once, and FSDP's hooks stay outside
the graph."""

from typing import Any

import torch
from torch import nn

from configs.schema import Compile


def apply(model: nn.Module, cfg: Compile) -> nn.Module:
    """Compile the forward of every block of `model.layers`, in place. With fullgraph a graph break
    is an error, not a slow run."""
    if not cfg.enabled:
        return model
    blocks: Any = model.layers
    for block in blocks.values():
        block.forward = torch.compile(block.forward, backend=cfg.backend, fullgraph=True)
    return model
