"""Keyed permutations of [0, size): the order of an epoch, computed index by index and never stored.

The permutation is a Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits
that holds the size. An index that leaves [0, size) goes through the network again until it is back
inside (cycle walking: Black and Rogaway, 2002). The round function is splitmix64 (Steele, Lea and
Flood, 2014). Four rounds measure like a true shuffle.
"""

from __future__ import annotations

import numpy as np

from configs import splitmix

ROUNDS = 4
# 1 to ROUNDS steps of splitmix64
GAMMAS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(splitmix.GAMMA)
SHIFTS = np.array(splitmix.SHIFTS, np.uint64)
FACTORS = np.array(splitmix.FACTORS, np.uint64)
ONE = np.uint64(1)

Ints = int | np.ndarray


def permute(index: np.ndarray, epoch: Ints, size: Ints, seed: Ints) -> np.ndarray:
    """Return where each `index` (int64 [n], in [0, size)) goes in the order of its epoch, int64
    [n]. It is a bijection of [0, size) for each (seed, epoch). epoch, size (at most 2^53) and seed:
    one for all indices, or int64 [n]."""
    return _walk(index, _round_keys(epoch, seed), size)


def unpermute(index: np.ndarray, epoch: Ints, size: Ints, seed: Ints) -> np.ndarray:
    """Invert `permute`: the same network with its keys reversed and its halves swapped."""
    return _walk(index, _round_keys(epoch, seed)[::-1], size, swap=True)


def _round_keys(epoch: Ints, seed: Ints) -> np.ndarray:
    """Derive the keys of the rounds, uint64 [ROUNDS, n or 1]."""
    seeds = np.atleast_1d(seed).astype(np.uint64)
    epochs = np.atleast_1d(epoch).astype(np.uint64)
    key = _mix(_mix(seeds + GAMMAS[0]) + epochs)
    return _mix(key + GAMMAS[:, None])


def _walk(index: np.ndarray, keys: np.ndarray, size: Ints, swap: bool = False) -> np.ndarray:
    """Apply the network until every number is inside [0, size) again; int64 [n] in and out."""
    size = np.broadcast_to(size, index.shape).astype(np.uint64)
    bits = np.frexp(size.astype(np.float64) - 1)[1]  # int.bit_length of size - 1
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)  # bits of a half
    keys = np.broadcast_to(keys, (ROUNDS, len(index)))
    out = _feistel(index.astype(np.uint64), keys, half, swap)
    outside = np.flatnonzero(out >= size)
    # the walk would return to its start, which is inside, so it ends: after 4 * size steps at most
    while len(outside):
        moved = _feistel(out[outside], keys[:, outside], half[outside], swap)
        out[outside] = moved
        outside = outside[moved >= size[outside]]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, keys: np.ndarray, half: np.ndarray, swap: bool) -> np.ndarray:
    """Apply a bijection of [0, 4^half) to each x; uint64 [n] in and out. swap: swap the halves,
    before and after."""
    mask = (ONE << half) - ONE
    left = x >> half
    right = x & mask
    if swap:
        left, right = right, left
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    if swap:
        left, right = right, left
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's output function, uint64 in and out: every bit depends on every bit. Arrays
    wrap modulo 2^64."""
    x = x ^ x >> SHIFTS[0]
    x *= FACTORS[0]
    x ^= x >> SHIFTS[1]
    x *= FACTORS[1]
    x ^= x >> SHIFTS[2]
    return x
