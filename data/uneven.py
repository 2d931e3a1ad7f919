"""Shares a batch among ranks that do not divide it, as in a round of run.fault_tolerant
(configs/rounds.py): each has the same number of microbatches, and some end in rows of padding.

Such a row has no token that counts (models and losses leave padding out), so the numbers of a step
are those of the rows that there are.
"""

from typing import NamedTuple

import torch

from data.order import Order

Batch = dict[str, torch.Tensor]


class RowsOfRank(NamedTuple):
    """The rows of a rank."""

    first: int  # its first
    count: int
    local: int  # rows of a microbatch, into which they are cut; 1 before some are padded
    padded: int  # rows of a microbatch after that; 0 where no rank has padding
    padding: int  # rows of it that follow


def share(order: Order, rank: int, ranks: int, local: int) -> RowsOfRank:
    """Share the rows of a batch so that each rank has as many whole microbatches as every other."""
    rows = order.last.global_batch_size
    first = rank * rows // ranks
    count = (rank + 1) * rows // ranks - first
    microbatches = -(-rows // (ranks * local))
    if rows == microbatches * ranks * local:
        return RowsOfRank(first, count, local, 0, 0)
    return RowsOfRank(first, count, 1, local, microbatches * local - count)


def pad(batch: Batch, share: RowsOfRank, seq_len: int, ignore: int) -> Batch:
    """Return a batch with this rank's rows of padding, cut into microbatches again; itself where no
    rank has any. batch: as data/loader.py::Batches makes it; ignore: the label of such a row."""
    if not share.padded:
        return batch
    rows = batch["source"].shape[0]
    batch.setdefault("length", torch.full((rows,), seq_len))
    padded = {}
    for name, x in batch.items():
        fill = ignore if name.startswith("labels") else 0
        padded[name] = _pad(x, share, fill)
    return padded


def _pad(x: torch.Tensor, share: RowsOfRank, fill: int) -> torch.Tensor:
    is_of_tokens = x.dim() > 1  # [A, 1, ...]; else [A]
    x = x.flatten(0, 1) if is_of_tokens else x
    x = torch.cat((x, x.new_full((share.padding, *x.shape[1:]), fill)))
    return x.unflatten(0, (-1, share.padded)) if is_of_tokens else x
