"""Open a mesh once in a process, also where a run builds its model several times (its stages)."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def open_once(open_mesh: Callable) -> Callable:
    """Decorate `open_mesh`: it returns the mesh of the last call where the process group and the
    arguments are those of that call.

    DTensor keeps what it has planned by the shape of a mesh, with the mesh of its first call. A
    second mesh of that shape would so be used together with the first, and a mesh whose groups are
    closed would still be asked for them.
    """
    opened: dict[tuple, Any] = {}

    @functools.wraps(open_mesh)
    def open_or_find(run: Any, *sizes: Any) -> Any:
        asked = (run.device, *sizes)
        mesh = opened.get((dist.group.WORLD, asked))
        if mesh is not None:
            mesh.set_timeout(run.init_timeout_seconds)
            return mesh
        mesh = open_mesh(run, *sizes)
        opened.clear()
        opened[dist.group.WORLD, asked] = mesh
        return mesh

    return open_or_find
