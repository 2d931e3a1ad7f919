"""Move a step's data between host and device: build the model's arguments for each microbatch, in
training and validation, and copy results back without a sync."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from models.terms import AuxiliaryTerms
from parallelisms.mesh import Mesh
from training.counted import loss_weights, real_tokens, weighted
from training.further import Further
from training.z_loss import ZLoss


class Inputs(NamedTuple):
    """The arguments of a model's forward, for one microbatch."""

    tokens: Tensor  # int64 [b, t]
    positions: Tensor  # int64 [t], or [b, t] with data.mask_documents
    loss_head: Callable[[Tensor, Tensor], Tensor]  # (hidden states, output weight) -> summed loss
    documents: Any  # what attention must keep apart; None without data.mask_documents
    terms: AuxiliaryTerms | None  # None in validation
    # bool [b, t], of this rank's slice between blocks: no padding; None: there is none anywhere
    real: Tensor | None


class Microbatches:
    """A rank's batch on its device: `model(*microbatches(a))` is the summed loss of microbatch a.

    tokens, labels: int64 [A, b, t], A microbatches of b sequences; t: this rank's tokens of a
    sequence of length T, all of them without context parallelism. losses: float32 [A, b, t], the
    loss of each token whose microbatch the model has seen; 0 where a label does not count.
    terms: as in `Inputs`; z_loss: None in validation, or without it.
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
        self.model: Any = model
        self.device = mesh.device
        self.loss = loss
        self.chunk_tokens = chunk_tokens
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
        self.real = real_tokens(batch, mesh)
        self.loss_weights = loss_weights(batch, mesh.device)
        # of tensor parallelism, whose ranks split the sequence between blocks
        self.slices = mesh.tp
        self.slice = mesh.device_mesh.get_local_rank("tp") if mesh.tp > 1 else 0
        self.terms: AuxiliaryTerms | None = None
        self.z_loss: ZLoss | None = None
        self.further: Further | None = None  # of multi-token prediction

    def __len__(self) -> int:
        return len(self.tokens)

    def __call__(self, a: int) -> Inputs:
        loss = weighted(self.loss, self.loss_weights, a)

        def loss_head(h: Tensor, weight: Tensor, **more: float) -> Tensor:
            """Return the loss of the hidden states; the model calls it inside its forward, where
            FSDP has gathered `weight`. more: the `cap` of a model that has one."""
            with record_function("loss"):
                return loss(
                    h,
                    weight,
                    self.labels[a],
                    self.chunk_tokens,
                    each=self.losses[a],
                    z_loss=self.z_loss,
                    **more,
                )

        head = loss_head if self.further is None else self.further.head(a, loss_head)
        positions = self.positions
        documents = None
        real = None
        if self.real is not None:
            real = self.real[a].chunk(self.slices, -1)[self.slice]
        if self.within_documents is not None:
            positions = positions[a]
            documents = self.model.documents(self.within_documents[a], self.device)
        return Inputs(self.tokens[a], positions, head, documents, self.terms, real)


def raise_flags(raised: Tensor, flags: Iterable[bool]) -> None:
    """Set raised [i] to 1 where flag i is true, without a host-device sync."""
    for i, flag in enumerate(flags):
        if flag:
            # `raised[i] = 1.0` would copy the number from the host: a host-device sync
            raised[i].fill_(1.0)


def to_host_async(x: Tensor) -> Callable[[], list[float]]:
    """Begin to copy the numbers of x [n] to the host; the result returns them.

    A plain read of x is a host-device sync: it waits for everything that is queued on the GPU, and
    leaves the GPU idle. Here the copy into pinned memory is queued at once, followed by an event.
    The result waits for that event alone, while the GPU computes what was queued later."""
    on_host = x.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def numbers() -> list[float]:
        if copied:
            copied.synchronize()
        return on_host.tolist()

    return numbers
