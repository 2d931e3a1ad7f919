"""Validation loss: the token-weighted mean over held-out sequences, the same number on every mesh."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from parallelisms.mesh import Mesh
from training.loss import IGNORE, linear_cross_entropy


@torch.no_grad()
def validation_loss(model: nn.Module, mesh: Mesh, batches: Iterable[dict], chunk_tokens: int) -> float:
    """Mean cross-entropy in nats per token over all ranks' `batches` (dicts as data/loader.py makes them)."""
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss, tokens
    for batch in batches:
        for tokens, labels in zip(batch["tokens"].to(mesh.device), batch["labels"].to(mesh.device)):  # micro-batches [b, T]
            total[0] += model(tokens, partial(linear_cross_entropy, labels=labels, chunk_tokens=chunk_tokens))
            total[1] += (labels != IGNORE).sum()
    mesh.sum_over_dp(total)
    return (total[0] / total[1]).item()
