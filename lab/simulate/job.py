"""Run train.main on a rank of `python -m lab.simulate`, noting events that only a GPU shows."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import train
from lab.simulate.kernels import RECORD
from parallelisms.mesh import Mesh


def in_steps(train_step: Callable) -> Callable:
    """Run the same, and record host-device syncs inside as those of a training step."""

    def step(*args: Any, **kwargs: Any) -> Any:
        RECORD.in_step = True
        try:
            return train_step(*args, **kwargs)
        finally:
            RECORD.in_step = False

    return step


def groups_of(mesh: Mesh) -> dict[str, str]:
    """Return the world ranks of this rank's groups, as in "0 2" -> the dimension of the mesh."""
    names = {}
    meshes = [mesh.device_mesh, mesh.fsdp_mesh]
    if mesh.experts_mesh:
        meshes.append(mesh.experts_mesh)
    for device_mesh in meshes:
        for dimension, name in enumerate(device_mesh.mesh_dim_names):
            ranks = dist.get_process_group_ranks(device_mesh.get_group(dimension))
            if len(ranks) > 1:
                names.setdefault(" ".join(map(str, ranks)), name)
    for name, group in mesh.more_groups.items():
        names.setdefault(" ".join(map(str, dist.get_process_group_ranks(group))), name)
    return names


def train_here(argv: list[str]) -> dict:
    """train.main(argv) on this rank: its exit code, the groups of its mesh, and the most bytes that
    its GPU held."""
    noted: dict[str, Any] = {"groups": {}}
    build = train.build

    def building(cfg: Any) -> train.Job:
        job = build(cfg)
        noted["groups"] = groups_of(job.mesh)
        return job

    train.build = building
    train.train_step = in_steps(train.train_step)
    noted["code"] = train.main(argv)
    noted["peak"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return noted
