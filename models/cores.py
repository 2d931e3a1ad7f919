"""Find the attention cores of a model (models/layers.py::AttentionCore)."""

from typing import Any

from torch import nn

from models.kernels.ruled_attention import AttentionSpec


def cores_in(module: nn.Module) -> list[Any]:
    """Return the attention cores of a module, in order: modules with a spec. One that another core
    has replaced is a part of that, and is left out."""
    found: list[Any] = []
    for child in module.children():
        if isinstance(getattr(child, "spec", None), AttentionSpec):
            found.append(child)
        else:
            found += cores_in(child)
    return found
