"""How much the tokens of a rank's batch count: padding not at all, a label by the `loss_weight` of its
source.

The loss of a step is sum(w_i * ce_i) / sum(w_i) over all labels i of the global batch that count,
where w_i is the weight of the label's source: the weighted mean of
`torch.nn.functional.cross_entropy(..., weight=w)`, with weights of sources in place of classes. Both
sums are over all ranks and microbatches, so the loss does not depend on how the batch is split, and
a factor in all weights changes nothing. z-loss and the losses of multi-token prediction are weighted
in the same way. What blocks report (models/terms.py), such as the balance of experts, is not: it is
a mean over the tokens that are routed, without their labels' weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallelisms.mesh import Mesh
from training.loss import IGNORE


def real_tokens(batch: dict[str, Tensor], mesh: Mesh) -> Tensor | None:
    """Return which of this rank's tokens are no padding, bool [A, b, t]; None where no window has
    any."""
    if "length" not in batch:
        return None
    length = batch["length"].to(mesh.device, non_blocking=True)
    of_windows = length.view(*batch["tokens"].shape[:2], 1)  # [A, b, 1]
    ranges = mesh.token_ranges(batch["tokens"].shape[-1] * mesh.cp)
    places = [torch.arange(p.start, p.stop, device=mesh.device) for p in ranges]
    return torch.cat(places) < of_windows


def loss_weights(batch: dict[str, Tensor], device: torch.device) -> Tensor | None:
    """Return the weights of this rank's labels, float64 [A, b, t]; None where all are 1."""
    if "loss_weights" not in batch:
        return None
    of_rows = batch["loss_weights"].to(device, non_blocking=True)  # [A*b]
    shape = batch["labels"].shape
    return of_rows.view(*shape[:2], 1).expand(shape)


def weighted(loss: Callable[..., Tensor], weights: Tensor | None, a: int) -> Callable[..., Tensor]:
    """Return the loss function of microbatch a. loss: `linear_cross_entropy` of training/loss.py;
    weights: of `loss_weights`."""
    return loss if weights is None else partial(loss, weights=weights[a].flatten())


def count(microbatches: Any) -> Tensor:
    """Count what a step divides by, [2]: the labels that count, times their weights, and the tokens
    that are no padding. int64; float64 with weights. microbatches: a
    training/microbatches.py::Microbatches."""
    counts = microbatches.labels != IGNORE  # [A, b, t]
    labels = counts.sum()
    if microbatches.loss_weights is not None:
        labels = (counts * microbatches.loss_weights).sum()
    tokens = labels.new_full((), counts.numel())
    if microbatches.real is not None:
        tokens = microbatches.real.sum()
    return torch.stack((labels, tokens))
