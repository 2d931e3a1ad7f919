"""Find the cores of a model: the modules without parameters in which tokens see each other.

There are three kinds: attention (models/layers.py::AttentionCore), a state and a convolution
(models/recurrent.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.kernels.document_attention import Documents
from models.kernels.ruled_attention import AttentionSpec

ATTENTION, STATE, CONVOLUTION = "attention", "state", "convolution"


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a core; None of a module that is none."""
    if isinstance(getattr(module, "spec", None), AttentionSpec):
        return ATTENTION
    kind = getattr(module, "kind", None)
    return kind if kind in (STATE, CONVOLUTION) else None


def cores_in(module: nn.Module) -> list[Any]:
    """Return the cores of a module, in order. One that another core has replaced is a part of that,
    and is left out."""
    found: list[Any] = []
    for child in module.children():
        if kind_of(child) is None:
            found += cores_in(child)
        else:
            found.append(child)
    return found


def of_kind(cores: Sequence[Any], *kinds: str) -> list[Any]:
    """Return those cores that are of one of these kinds."""
    return [core for core in cores if kind_of(core) in kinds]


def attention_in(module: nn.Module) -> list[Any]:
    """Return the attention cores of a module, in order."""
    return of_kind(cores_in(module), ATTENTION)


def documents_of(cores: Sequence[Any], positions: Tensor, device: torch.device) -> Any:
    """Return the `documents` of a forward of all these cores. positions: of the tokens of whole
    sequences within their documents, int64 [B, T] on the CPU.

    It is what attention takes (`AttentionCore.documents`). Where there are cores of other kinds it
    has the positions too, int64 [B, T] on the device, as `documents.within`. Raises TypeError for an
    attention whose own class of documents has no such field."""
    attention = of_kind(cores, ATTENTION)
    if attention:
        documents = attention[0].documents(attention, positions, device)
    else:
        documents = Documents.of(positions, device)
    if len(attention) == len(cores):
        return documents
    fields = dataclasses.fields(documents) if dataclasses.is_dataclass(documents) else ()
    if "within" not in {field.name for field in fields}:
        core, made = type(attention[0]).__qualname__, type(documents).__qualname__
        raise TypeError(
            f"{core}.documents returns {made}, where states and convolutions find no positions: make it a "
            "dataclass with a field `within: Tensor | None = None`"
        )
    if device.type == "cuda":
        positions = positions.pin_memory()  # a copy from pageable memory would wait for the GPU
    within = positions.to(device, non_blocking=True)
    return dataclasses.replace(documents, within=within)
