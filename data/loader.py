"""Tokens to batches: batch = f(seed, step), so any rank of any mesh computes its own rows and a resume needs no replay.

Window j of a corpus is tokens[j*T : j*T + T + 1]: T inputs, T labels, each token a label once per epoch. Position
p = step * global_batch_size + row is window permutation(p mod windows) of epoch p // windows, a keyed permutation per
(seed, epoch): every window comes once per epoch, in an order that is computed and never stored, at any step, on any
number of ranks and workers.

The permutation is a Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that holds the
windows, walked until it lands on a window (Black and Rogaway, 2002), with splitmix64 (Steele, Lea and Flood, 2014) as
its round function. Four rounds measure like a true shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset

from configs.schema import Data, InputError
from data.prepare import Tokens

ROUNDS = 4
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's step: 2^64 / the golden ratio, odd
MASK64 = 2**64 - 1


def permute(index: np.ndarray, epoch: np.ndarray, size: int, seed: int) -> np.ndarray:
    """int64 [n]: where each `index` (int64 [n], in [0, size)) goes in the order of its `epoch` (int64 [n]). A bijection
    of [0, size) for each (seed, epoch)."""
    key = _mix(_mix(np.full(1, seed, np.uint64) + np.uint64(GOLDEN_GAMMA)) + epoch.astype(np.uint64))  # [n]
    keys = [_mix(key + np.uint64(GOLDEN_GAMMA * (i + 1) & MASK64)) for i in range(ROUNDS)]  # ROUNDS x [n]
    out = _feistel(index.astype(np.uint64), keys, size)
    outside = np.flatnonzero(out >= size)
    while len(outside):  # the walk returns to its start, which is inside, so it ends; 4 * size at most are on its way
        out[outside] = _feistel(out[outside], [k[outside] for k in keys], size)
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, keys: list[np.ndarray], size: int) -> np.ndarray:
    """A bijection of [0, 4^half), the smallest such range that holds `size`; uint64 [n] in and out."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function, uint64 [n] in and out: every bit depends on every bit. Arrays wrap modulo 2^64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Batches(Dataset):
    """`batches[step]`: this rank's rows of the global batch of any step, the first as fast as the millionth.

    Rank r of n holds the contiguous rows [r*G/n, (r+1)*G/n), as micro-batches of `local_batch_size`: the ranks' rows,
    one after another, are the one-rank batch, order included.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> None:
        """`tokens`: `Prepared.train` or `.validation`. InputError: the split has less than one window, or ranks and
        micro-batches do not divide the global batch."""
        self.samples = (len(tokens.tokens) - 1) // seq_len  # windows per epoch
        if self.samples < 1:
            raise InputError(f"training.seq_len = {seq_len} needs {seq_len + 1} tokens for one sequence, but the "
                             f"{tokens.split} split of the corpus has {len(tokens.tokens)}: shorten it, give more text "
                             "(data.source), or hold out another share (data.validation_fraction)")
        if global_batch_size % (dp_size * local_batch_size):
            raise InputError(f"training.global_batch_size = {global_batch_size} is not a multiple of {dp_size} "
                             f"data-parallel ranks x {local_batch_size} sequences (training.local_batch_size)")
        self.tokens = tokens
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.rows = global_batch_size // dp_size
        self.first_row = dp_rank * self.rows
        self.shape = (self.rows // local_batch_size, local_batch_size, seq_len)  # [A, b, T]
        self.seed = seed

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """tokens, labels: int64 [A, b, T], A the accumulation steps; sample: int64 [A*b], the windows' numbers."""
        position = step * self.global_batch_size + self.first_row + np.arange(self.rows, dtype=np.int64)  # [A*b]
        epoch, sample = np.divmod(position, self.samples)
        sample = permute(sample, epoch, self.samples, self.seed)
        corpus = np.asarray(self.tokens.tokens)  # a plain view: slices of a memmap object are slow
        window = np.empty((self.rows, self.seq_len + 1), np.int64)
        for row, start in zip(window, (sample * self.seq_len).tolist(), strict=True):
            row[:] = corpus[start : start + self.seq_len + 1]
        return {
            "tokens": torch.from_numpy(window[:, :-1].copy()).view(self.shape),
            "labels": torch.from_numpy(window[:, 1:].copy()).view(self.shape),
            "sample": torch.from_numpy(sample),
        }

    def __len__(self) -> int:
        """Endless, as epochs follow each other; PyTorch's loaders want a number."""
        return 2**62


def loader(
    batches: Batches, start_step: int, steps: int, cfg: Data, pin_memory: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of steps `start_step` .. `steps - 1`, the same for any number of workers.

    workers = 0 reads in this process, without torchdata: on two cores, from the page cache, 64 x 256 tokens take 0.2 ms
    against 2 ms from two StatefulDataLoader workers, as a batch must cross between processes; the first one 0.7 ms
    against 8 ms. Workers pay where the file system is slow: they read ahead. One that dies or takes more than
    `cfg.timeout_seconds` is a RuntimeError here. No loader state is saved or needed: a resume starts at its step."""
    order = range(start_step, steps)
    if cfg.workers == 0:
        return (_pinned(batches[step]) if pin_memory else batches[step] for step in order)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(
        StatefulDataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            sampler=order,
            num_workers=cfg.workers,
            prefetch_factor=cfg.prefetch,
            timeout=cfg.timeout_seconds,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # from which it draws seeds for the workers: the global one stays as it was
        )
    )


def _pinned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
