"""Adds the tokens and labels further on to a batch, for multi-token prediction (models/mtp.py).

They are cut out of whole windows, as the other labels are, before ranks share a sequence: so every
mesh has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data import packing
from data.masking import at

Batch = dict[str, torch.Tensor]


def add(
    batch: Batch,
    tokens: np.ndarray,
    begins: np.ndarray | None,
    token_ranges: Sequence[range],
    depth: int,
    ignore: int,
) -> None:
    """Add tokens_ahead and labels_ahead, int64 [A, b, depth, t], in place: the tokens k = 1 ...
    `depth` places after each, and the token after each of these. A label is `ignore` behind the end
    of the window, and where a document begins on the way to it. tokens int64 [A*b, T + 1], begins:
    as data/loader.py::as_batch gets them."""
    missing = ((0, 0), (0, depth))  # columns behind the window
    behind = np.pad(tokens, missing)
    ends = np.zeros(tokens.shape, bool) if begins is None else begins
    ends = np.pad(ends, missing, constant_values=True)
    crossed = at(token_ranges, ends, shift=1)  # [A*b, t], on the way to the label
    found: dict[str, list[np.ndarray]] = {"tokens_ahead": [], "labels_ahead": []}
    for k in range(1, depth + 1):
        crossed = crossed | at(token_ranges, ends, shift=k + 1)
        label = at(token_ranges, behind, shift=k + 1)
        found["tokens_ahead"].append(at(token_ranges, behind, shift=k))
        found["labels_ahead"].append(np.where(crossed, ignore, label))
    for name, of_depths in found.items():
        array = np.stack(of_depths, 1)  # [A*b, depth, t]
        shape = (*batch["labels"].shape[:2], *array.shape[1:])
        batch[name] = torch.from_numpy(array).view(shape)


def mask_non_answers(
    batch: Batch, ignore: int, token_ranges: Sequence[range], *windows: Any
) -> None:
    """Mask the labels further on as data/packing.py::mask_non_answers masks the others."""
    if "labels_ahead" not in batch:
        return
    labels = batch["labels_ahead"].flatten(0, 1).numpy()  # [A*b, depth, t]
    for k in range(labels.shape[1]):
        places = [range(part.start + k + 1, part.stop + k + 1) for part in token_ranges]
        packing.mask_non_answers(labels[:, k], ignore, places, *windows)
