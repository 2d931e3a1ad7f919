"""What a model takes for one micro-batch, put together in one place for training and for validation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function


class Feed:
    """A rank's batch on its device: `model(*feed(a))` is the summed loss of micro-batch a.

    tokens, labels: int64 [A, b, T], A micro-batches.
    losses: float32 [A, b, T], the loss of each token whose micro-batch the model has seen; 0 where a label does not count.
    """

    def __init__(
        self, model: nn.Module, batch: dict[str, Tensor], device: torch.device, loss: Callable[..., Tensor], chunk_tokens: int
    ) -> None:
        """batch: as data/loader.py makes it; loss: `linear_cross_entropy` of training/loss.py, with its `chunk_tokens`."""
        self.model, self.device, self.loss, self.chunk_tokens = model, device, loss, chunk_tokens
        self.tokens = batch["tokens"].to(device, non_blocking=True)
        self.labels = batch["labels"].to(device, non_blocking=True)
        self.losses = torch.empty(self.labels.shape, device=device)
        self.positions = torch.arange(self.tokens.shape[-1], device=device)  # [T], the same for every sequence
        self.within_documents = batch.get("positions")  # int64 [A, b, T] on the CPU; with data.mask_documents only

    def __len__(self) -> int:
        return len(self.tokens)

    def __call__(self, a: int) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor], Any]:
        """What the model takes: tokens [b, T], positions [T] or [b, T], the head, and the documents to keep apart."""

        def head(h: Tensor, weight: Tensor) -> Tensor:
            """The model calls it inside its forward, where FSDP has gathered `weight`."""
            with record_function("loss"):
                return self.loss(h, weight, self.labels[a], self.chunk_tokens, each=self.losses[a])

        if self.within_documents is None:
            return self.tokens[a], self.positions, head, None
        documents = self.model.documents(self.within_documents[a], self.device)
        return self.tokens[a], self.within_documents[a].to(self.device, non_blocking=True), head, documents
