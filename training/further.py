"""The losses of multi-token prediction (models/mtp.py), from what data/further.py adds to a batch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from configs.schema import Training
from models.mtp import LossAhead, LossHead
from training.counted import loss_weights, weighted

AHEAD = ("tokens_ahead", "labels_ahead")  # of a batch, int64 [A, b, K, t]


class Further:
    """The tokens and labels further on of a rank's batch, on its device."""

    def __init__(
        self,
        batch: dict[str, Tensor],
        device: torch.device,
        loss: Callable[..., Tensor],
        cfg: Training,
    ) -> None:
        """loss: as training/microbatches.py::Microbatches takes it."""
        self.tokens, self.labels = (batch[name].to(device, non_blocking=True) for name in AHEAD)
        self.loss = loss
        self.loss_weights = loss_weights(batch, device)
        self.chunk_tokens = cfg.loss_chunk_tokens
        self.weight = cfg.mtp_weight

    def head(self, a: int, loss_head: LossHead) -> LossAhead:
        """Return the loss head of microbatch a that also has the further losses."""
        loss = weighted(self.loss, self.loss_weights, a)
        further = [partial(self.loss_of, loss, labels) for labels in self.labels[a].unbind(1)]
        return LossAhead(loss_head, further, self.tokens[a], self.weight)

    def loss_of(
        self, loss: Callable[..., Tensor], labels: Tensor, h: Tensor, weight: Tensor
    ) -> Tensor:
        """Return the `loss` of hidden states that predict these labels, int64 [b, t]."""
        with record_function("loss"):
            return loss(h, weight, labels, self.chunk_tokens)


def open_further(
    batch: dict[str, Tensor], device: torch.device, loss: Callable[..., Tensor], cfg: Training
) -> Further | None:
    """Return what multi-token prediction needs of a batch; None without it."""
    return Further(batch, device, loss, cfg) if AHEAD[0] in batch else None
