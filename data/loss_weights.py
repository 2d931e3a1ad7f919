"""Gives each row of a batch the `loss_weight` of its source in `[[data.mixture]]`.

What a weight means is defined in training/counted.py. The order of the data does not depend on them.
"""

from __future__ import annotations

import torch

from configs.schema import Config


def of_sources(cfg: Config) -> torch.Tensor | None:
    """Return the weight of each source, float64 [sources]; None where all are 1."""
    weights = [row.loss_weight for row in cfg.data.mixture]
    if all(weight == 1 for weight in weights):
        return None
    return torch.tensor(weights, dtype=torch.float64)


def record(cfg: Config) -> dict:
    """Return the part of data.json about weights: {source: weight} where that is not 1."""
    weights = {row.name: row.loss_weight for row in cfg.data.mixture if row.loss_weight != 1}
    return {"loss_weights": weights} if weights else {}


def add(batch: dict[str, torch.Tensor], weights: torch.Tensor | None) -> None:
    """Add loss_weights to a batch, in place: float64 [A*b], of its rows; nothing without weights."""
    if weights is not None:
        batch["loss_weights"] = weights[batch["source"]]
