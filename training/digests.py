"""Two numbers of every parameter's gradient, the same on every mesh: its 2-norm, and its digest.

The digest is the sum of all elements, each times a fixed pseudo-random factor of the parameter's name
and the element's global index. It is about as large as the norm, and it moves with every element that
changes its value or its place. Both are added up in float64 from the shards, before clipping. So they
differ between meshes by the rounding of the gradients alone.

A run writes them to `gradients.jsonl` (metrics.gradient_interval), and tools/replay compares them.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import InputError
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from training import init
from training.lines import whole_lines
from training.optim import parts_of

FILE = "gradients.jsonl"
CHUNK = 1 << 18  # elements at a time that become float64
Digests = dict[str, Tensor]  # parameter -> float64 [2]: sum of the squares, and the digest


def factors(index: Tensor, key: str) -> Tensor:
    """Return float64 factors of the shape of `index` (int64, overwritten): 0.5 to 1.5, or minus
    that."""
    number = hashlib.sha256(key.encode()).digest()
    bits = init.hash64(index, int.from_bytes(number[:8], "little", signed=True))
    size = (bits & ((1 << 52) - 1)).double().mul_(2.0**-52).add_(0.5)
    return torch.where(bits < 0, -size, size)


def of_tensor(name: str, tensor: Tensor) -> Tensor:
    """Digest this rank's shard of a parameter or of its gradient: float64 [2]. An element's factor
    is the product of one factor for each of its indices: so it costs a matrix times a vector."""
    local = shard_of(tensor)
    sums = torch.zeros(2, dtype=torch.float64, device=local.device)
    if not local.numel():
        return sums
    of_row = sums.new_ones(1)
    of_column = sums.new_ones(1)
    for dim, index in enumerate(init.global_ids(tensor)):
        of_row = (of_row[:, None] * of_column).flatten()
        of_column = factors(index, f"{name} {dim}")
    rows = local.reshape(len(of_row), len(of_column))
    at_a_time = max(1, CHUNK // len(of_column))
    for part, factor in zip(rows.split(at_a_time), of_row.split(at_a_time), strict=True):
        values = part.double()
        flat = values.flatten()
        sums += torch.stack((flat.dot(flat), factor.dot(values @ of_column)))
    return sums


@torch.no_grad()
def of_gradients(parameters: Iterable[tuple[str, nn.Parameter]], device: torch.device) -> Digests:
    """Compute the digest of every trained parameter on this rank, summed over the ranks that hold
    its shards. A parameter without a gradient has 0. Called by all ranks; there is no host-device
    sync."""
    # (mesh, its dimensions that split the tensor) -> the parameters
    split: dict[tuple, Digests] = {}
    for name, param in parameters:
        if not param.requires_grad:
            continue
        gradient = param.grad
        if gradient is None:
            own = torch.zeros(2, dtype=torch.float64)
        else:
            own = of_tensor(name, gradient)
        parts = parts_of(param if gradient is None else gradient)
        split.setdefault(parts, {})[name] = own.to(device, non_blocking=True)
    result: Digests = {}
    for (mesh, dims), digests in split.items():
        table = torch.stack(list(digests.values()))
        for dim in dims:
            dist.all_reduce(table, group=mesh.get_group(dim))
        result |= dict(zip(digests, table, strict=True))
    return result


def numbers(digests: Digests) -> dict[str, list[float]]:
    """Parameter -> its norm and its digest. This is a host-device sync."""
    if not digests:
        return {}
    table = torch.stack(list(digests.values())).cpu()
    table[:, 0].sqrt_()
    return dict(zip(digests, table.tolist(), strict=True))


def of_all_stages(digests: Digests, mesh: Mesh) -> dict[str, list[float]]:
    """Collect the digests of the whole model: each rank of a pipeline has other parameters. Called
    by all ranks."""
    own = numbers(digests)
    if mesh.pp == 1:
        return own
    stages: list[Any] = [None] * mesh.pp
    dist.all_gather_object(stages, own, group=mesh.device_mesh.get_group("pp"))
    every: dict[str, list[float]] = {}
    for stage in stages:
        every |= stage
    return every


def recorded(folder: Path) -> dict[int, dict[str, list[float]]]:
    """Read a run's `gradients.jsonl`, by step: the last record, where a step was trained again. {}
    without that file. Raises InputError."""
    path = folder / FILE
    if not path.exists():
        return {}
    steps: dict[int, dict[str, list[float]]] = {}
    try:
        for row in whole_lines(path):
            of_step = {}
            for name, pair in row["gradients"].items():
                norm, digest = map(float, pair)
                of_step[name] = [norm, digest]
            steps[row["step"]] = of_step
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a record of gradients: {error}") from None
    return steps
