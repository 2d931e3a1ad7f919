"""What a model takes for one microbatch, put together in one place for training and for
validation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from parallelisms.mesh import Mesh


class Feed:
    """A rank's batch on its device: `model(*feed(a))` is the summed loss of microbatch a.

    tokens, labels: int64 [A, b, t], A microbatches; t: this rank's tokens of a sequence of length
    T, all without context parallelism. losses: float32 [A, b, t], the loss of each token whose
    microbatch the model has seen; 0 where a label does not count.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        mesh: Mesh,
        loss: Callable[..., Tensor],
        chunk_tokens: int,
    ) -> None:
        """batch: as data/loader.py makes it; loss: `linear_cross_entropy` of training/loss.py, with
        its `chunk_tokens`."""
        self.model, self.device, self.loss, self.chunk_tokens = (
            model,
            mesh.device,
            loss,
            chunk_tokens,
        )
        self.tokens = batch["tokens"].to(mesh.device, non_blocking=True)
        self.labels = batch["labels"].to(mesh.device, non_blocking=True)
        self.losses = torch.empty(self.labels.shape, device=mesh.device)
        token_ranges = mesh.token_ranges(self.tokens.shape[-1] * mesh.cp)
        # int64 [A, b, T] on the CPU; with data.mask_documents only
        self.within_documents = batch.get("positions")
        if self.within_documents is None:
            own = [torch.arange(p.start, p.stop, device=mesh.device) for p in token_ranges]
        else:
            # Copied as the loader has pinned it. A part that is made here would be in pageable
            # memory, and the host would wait for its copy.
            whole = self.within_documents.to(mesh.device, non_blocking=True)
            own = [whole[..., p.start : p.stop] for p in token_ranges]
        self.positions = torch.cat(own, -1)  # [t], of every sequence, or [A, b, t]
        # what a model with experts tells, a models/moe.py::RouterStatistics, in training
        self.router_statistics: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __call__(
        self, a: int
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor], Any, Any]:
        """What the model takes: tokens [b, t], positions [t] or [b, t], the head, the documents to
        keep apart, and where to tell about experts."""

        def loss_head(h: Tensor, weight: Tensor) -> Tensor:
            """The model calls it inside its forward, where FSDP has gathered `weight`."""
            with record_function("loss"):
                return self.loss(h, weight, self.labels[a], self.chunk_tokens, each=self.losses[a])

        if self.within_documents is None:
            return self.tokens[a], self.positions, loss_head, None, self.router_statistics
        documents = self.model.documents(self.within_documents[a], self.device)
        return self.tokens[a], self.positions[a], loss_head, documents, self.router_statistics
