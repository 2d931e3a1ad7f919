"""Initial values as a pure function of (seed, parameter name, global index): bitwise the same on
every mesh.

A rank computes the values of its shard and nothing else, from the global index of each of its
elements. So neither the mesh, nor uneven shards, nor the order in which parameters are visited can
change a bit. There is no generator state, no communication and no full tensor: of 405B parameters
on 1,024 ranks, each rank computes its 400 million values.

Only integer arithmetic, a table look-up and one float32 multiply-add per element are used. These
are exact or correctly rounded on every device. A logarithm or a cosine is not: it differs between
vector widths, devices and versions. (torch's own random functions were not an option: DTensor's
give every rank of a CPU mesh the same numbers, and `trunc_normal_` changed between torch 2.11 and
2.13.)
"""

import hashlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs import splitmix
from configs.schema import InputError
from parallelisms.boxes import box_of
from training import decays

# the quantile function is tabulated on 2^14 cells and linear inside one: max error 2e-5 deviations
CELL_BITS = 14
# deviations; values beyond are not drawn (truncated normal, as Llama's and GPT's initialisers do)
CUTOFF = 3.0
CONSTANTS = {"ones": 1.0, "zeros": 0.0}
CHUNK = 1 << 18  # elements at a time: the 64-bit temporaries stay in the processor's cache


def _signed(x: int) -> int:
    """Return the 64-bit pattern of x as the int64 that torch wants."""
    return x - (1 << 64) if x >= 1 << 63 else x


GAMMA, MIX1, MIX2 = map(_signed, (splitmix.GAMMA, *splitmix.FACTORS))


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """Compute x ^= x >>> bits in place; torch's >> keeps the sign of int64, so the sign's copies
    are masked away."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash64(index: Tensor, key: int) -> Tensor:
    """Apply Splitmix64 to `key + index * GAMMA`: int64 of the shape of `index`, all 64 bits well
    mixed. Works in place."""
    x = index.mul_(GAMMA).add_(key)
    first, second, third = splitmix.SHIFTS
    x = _shift_xor(x, first).mul_(MIX1)
    x = _shift_xor(x, second).mul_(MIX2)
    return _shift_xor(x, third)


@cache
def _quantiles() -> tuple[Tensor, Tensor]:
    """Tabulate the quantile function of the normal distribution, cut at +-CUTOFF and scaled to a
    standard deviation of 1. Returns two float32 [2^CELL_BITS]: its value at the start of each cell,
    and the step to the cell's end."""
    n = 1 << CELL_BITS
    normal = NormalDist()
    low = normal.cdf(-CUTOFF)
    high = normal.cdf(CUTOFF)
    # Variance of the truncated normal (Johnson, Kotz, Balakrishnan: Continuous univariate
    # distributions, 13.10.1).
    variance = 1 - 2 * CUTOFF * normal.pdf(CUTOFF) / (high - low)
    quantiles = []
    for i in range(n + 1):
        probability = low + (high - low) * i / n
        quantiles.append(normal.inv_cdf(probability))
    edges = torch.tensor(quantiles, dtype=torch.float64) / variance**0.5
    steps = edges.diff()
    return edges[:-1].float(), steps.float()


def normal_values(index: Tensor, key: int, std: float) -> Tensor:
    """Return float32 values of deviation `std` for these global indices (int64, overwritten): a
    function of (key, index)."""
    start, step = (t.to(index.device) for t in _quantiles())
    bits = hash64(index, key)
    cell = (bits >> (64 - CELL_BITS)).bitwise_and_((1 << CELL_BITS) - 1)
    # 24 further bits, which a float32 holds exactly: how far into the cell, 0 to 1
    low_bits = (bits >> 16).bitwise_and_((1 << 24) - 1)
    within = low_bits.float().mul_(2.0**-24)
    return start[cell].add_(within.mul_(step[cell])).mul_(std)


def global_ids(param: Tensor) -> list[Tensor]:
    """Return the global indices of this rank's shard in each dimension: int64 [local size]."""
    local = param.to_local() if isinstance(param, DTensor) else param
    ids = []
    for start, length in zip(*box_of(param), strict=True):
        ids.append(torch.arange(start, start + length, device=local.device))
    return ids


def global_indices(param: Tensor, chunk: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of this rank's shard of a (sharded or plain) tensor, views of it, each with the global
    indices of its elements: int64 [rows, elements of a row], in the contiguous whole tensor."""
    local = param.to_local() if isinstance(param, DTensor) else param
    ids = global_ids(param)
    strides = [1]
    for n in reversed(param.shape[1:]):
        strides.insert(0, strides[0] * n)  # of the contiguous global tensor
    # offsets within one row of dimension 0
    inside = torch.zeros(1, dtype=torch.int64, device=local.device)
    for dim in range(1, param.ndim):
        offsets = ids[dim] * strides[dim]
        inside = (inside[:, None] + offsets).flatten()
    rows_at_a_time = max(1, chunk // max(1, len(inside)))
    for part, rows in zip(local.split(rows_at_a_time), ids[0].split(rows_at_a_time), strict=True):
        yield part, rows[:, None] * strides[0] + inside


@torch.no_grad()
def fill(param: Tensor, name: str, kind: str, std: float, seed: int) -> None:
    """Write the initial values of one (sharded or plain) parameter in place."""
    local = param.to_local() if isinstance(param, DTensor) else param
    if kind in CONSTANTS:
        local.fill_(CONSTANTS[kind])
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = _signed(int.from_bytes(digest[:8], "little"))
    for part, index in global_indices(param):
        if kind in decays.KINDS:
            values = decays.KINDS[kind](hash64(index, key))
        else:
            values = normal_values(index, key, std)
        part.copy_(values.view(part.shape))


Rows = list[tuple[str, str, float]]  # (pattern of a name, kind, standard deviation)


def initialise(model: nn.Module, rows: Rows, seed: int) -> None:
    """Fill every parameter as the first row (pattern, kind, std) says whose pattern its name
    matches.

    `model` is materialised (`to_empty`) and may be sharded in any way. Raises InputError for a
    parameter that no row matches, and for a buffer: no run may train on uninitialised memory.
    """
    for name, _ in model.named_buffers():
        raise InputError(
            f"the model's buffer {name} has no value once the model is sharded: make it a parameter "
            "with a row of Family.initial_values (requires_grad=False), or compute it in forward"
        )
    for name, param in model.named_parameters():
        for pattern, kind, std in rows:
            if fnmatchcase(name, pattern):
                fill(param, name, kind, std, seed)
                break
        else:
            raise InputError(f"no row of Family.initial_values matches the parameter {name}")
