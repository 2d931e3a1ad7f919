"""Shares a batch among ranks that do not divide it, as in a round of run.fault_tolerant
(configs/rounds.py): each has the same number of microbatches, and some end in rows of padding.

Such a row has no token that counts (models and losses leave padding out), so the numbers of a step
are those of the rows that there are.
"""

import torch

Batch = dict[str, torch.Tensor]


def share(rows: int, rank: int, ranks: int, local: int) -> tuple[int, int, int]:
    """Return the first of this rank's rows, their number, and how many of padding follow, so that it
    has whole microbatches of `local` rows, and as many as every other rank."""
    first = rank * rows // ranks
    own = (rank + 1) * rows // ranks - first
    return first, own, microbatches(rows, ranks, local) * local - own


def microbatches(rows: int, ranks: int, local: int) -> int:
    """Return how many each rank has."""
    return -(-rows // (ranks * local))


def pad(batch: Batch, padding: int, local: int, seq_len: int, ignore: int) -> Batch:
    """Add rows of padding to a batch of microbatches of one row, and cut it into microbatches of
    `local` rows. batch: as data/loader.py::Batches makes it; ignore: the label of a row of padding."""
    rows = batch["source"].shape[0]
    batch.setdefault("length", torch.full((rows,), seq_len))
    padded = {}
    for name, x in batch.items():
        fill = ignore if name.startswith("labels") else 0
        padded[name] = _pad(x, padding, local, fill)
    return padded


def _pad(x: torch.Tensor, padding: int, local: int, fill: int) -> torch.Tensor:
    is_of_tokens = x.dim() > 1  # [A, 1, ...]; else [A]
    x = x.flatten(0, 1) if is_of_tokens else x
    x = torch.cat((x, x.new_full((padding, *x.shape[1:]), fill)))
    return x.unflatten(0, (-1, local)) if is_of_tokens else x
