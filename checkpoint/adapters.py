"""Checkpoints of a run that trains adapters (models/lora.py), and their base: the frozen weights.

A checkpoint holds the adapters and their optimizer state alone. The base is read at every start,
from `checkpoint.load_hf` or `checkpoint.load_path`. The manifest records where it came from, and a
hash of its values. Adapters belong to these values, so a run does not resume with another base.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import hf, verify
from checkpoint.storage import CODES, DTYPES
from configs.schema import InputError
from models.lora import is_adapter
from reliability.objects import Key, location
from training import init

logger = logging.getLogger("plumbline")


def read(folder: Path | Key) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint, unsharded, by the names of their parameters
    ("layers.0.attention.wq.lora_a"). folder: a checkpoint, or a run's folder: its newest one.
    Raises InputError for one without adapters, and for a damaged one."""
    path = verify.newest(location(folder))
    with verify.refuse_damage(path):
        manifest = verify.read_manifest(path)
        names = [name for name in manifest["tensors"] if name.startswith("model.")]
        if not names or not all(map(is_adapter, names)):
            raise InputError(f"{path} holds no adapters: its run has no [lora] rank")
        tensors = hf.read_whole(path, manifest, names)
        return {name.removeprefix("model."): tensor for name, tensor in zip(names, tensors)}


# The base -----------------------------------------------------------------------------------------


def load_base(job: Any, families: Mapping[str, Any], checkpoints: Any) -> None:
    """Fill the frozen weights of a train.Job, and record in every manifest which they are. Called
    by all ranks, before `checkpoints`, a checkpoint/manager.py::CheckpointManager, loads anything.

    families: what Hugging Face's files are of each family, by name. Raises InputError.
    """
    cfg = job.cfg
    base = hf.base_of(job.model)
    if cfg.checkpoint.load_hf:
        family = cfg.model.family
        folder = hf.load(
            Path(cfg.checkpoint.load_hf), job.model, families, family, job.args, checkpoints.group
        )
    else:
        folder = checkpoints.load_base(base)
    checkpoints.origin = folder
    dtype = next(iter(base.values())).dtype
    checkpoints.facts["base"] = {
        "folder": folder,
        "dtype": CODES[dtype],
        "hash": hash_of(base, job.mesh, checkpoints.group),
    }


def check_whole(path: Path, manifest: dict) -> None:
    """Raise InputError for a checkpoint of adapters, where a whole model is wanted."""
    if "base" in manifest["facts"]:
        raise InputError(
            f"checkpoint.load_path: {path} holds adapters of the weights of "
            f"{manifest['facts']['base']['folder']}, and no model: merge the two "
            "(`python -m tools.convert lora-merge`), or name that folder"
        )


def in_stored_types(live: Mapping[str, Tensor], manifest: dict) -> dict[str, Tensor]:
    """Return the live tensors on `meta`, in the types that a checkpoint has them in, if these are
    types of floating point: a base in bfloat16 may be read from float32."""
    wanted = {}
    for name, tensor in live.items():
        row = manifest["tensors"].get(name, {})
        stored = DTYPES.get(row.get("dtype"), tensor.dtype)
        dtype = stored if stored.is_floating_point else tensor.dtype
        wanted[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return wanted


def other_base(saved: dict, here: dict) -> list[str]:
    """Return sentences that say why adapters of a checkpoint do not fit this run. Both arguments:
    the facts of a manifest."""
    if "base" not in saved and "base" not in here:
        return []
    if "base" not in saved:
        return ["it holds a whole model, and this run trains adapters ([lora])"]
    there = saved["base"]
    if "base" not in here:
        return [
            f"it holds adapters of the weights of {there['folder']}, and this run has no [lora]"
        ]
    own = here["base"]
    if own["hash"] == there["hash"]:
        return []
    return [
        f"its adapters were trained on the weights of {there['folder']} ({there['dtype']}, hash "
        f"{there['hash']}), and those of {own['folder']} ({own['dtype']}, hash {own['hash']}) are "
        "others"
    ]


def hash_of(tensors: Mapping[str, Tensor], mesh: Any, group: dist.ProcessGroup | None) -> str:
    """Hash the values of these tensors, as 16 digits: the same on every mesh, and for the same
    values in another type. All ranks of `group` call it; None: this process has all of each.

    It is the sum over all elements of their bits, as a float32, times a pseudo-random number of the
    element's name and global index, modulo 2^64. So each rank adds up its own shards, and an
    all-reduce of one number does the rest. Like the hashes of a checkpoint it finds accidents, not
    forgeries.
    """
    total = torch.zeros((), dtype=torch.int64)
    for name, tensor in tensors.items():
        if group is not None and not counts_here(tensor, mesh):
            continue
        digest = hashlib.sha256(name.encode()).digest()
        key = int.from_bytes(digest[:8], "little", signed=True)
        for part, index in init.global_indices(tensor.detach()):
            bits = part.float().flatten().view(torch.int32).to(torch.int64)
            factors = init.hash64(index.flatten(), key)
            total += bits.mul_(factors).sum().cpu()
    if group is not None:
        dist.all_reduce(total, group=group)
    return f"{int(total) % 2**64:016x}"


def counts_here(tensor: Tensor, mesh: Any) -> bool:
    """Return whether this rank is the first of those that hold the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        ranks_of_a_stage = mesh.size // mesh.pp
        return mesh.rank % ranks_of_a_stage == 0
    where = tensor.device_mesh.get_coordinate()
    placements = zip(tensor.placements, where, strict=True)
    return all(i == 0 for placement, i in placements if placement.is_replicate())
