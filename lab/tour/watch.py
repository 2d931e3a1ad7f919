"""Record one real step of one rank: its collectives in order, and how experts get their rows.

Everything is read from PyTorch: operators pass a dispatch mode, the phases of a step are labels of
`record_function`, and hooks tell which module computes.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reliability.collectives import group_of

ROOT = Path(__file__).resolve().parent.parent.parent
PHASES = ("forward", "loss", "backward", "clip", "optimizer")
KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_to_all_single": "all-to-all",
}
FSDP_LABEL = re.compile(r"FSDP::(all_gather|post_backward_\w+)(?: \((.*?)\))?")
MODULES_DEEP = 3  # layers.0.attention is watched, layers.0.attention.wq is not


@dataclass(frozen=True)
class SeenCollective:
    kind: str  # a value of KINDS
    dimension: str  # of the mesh, or "all"
    ranks: tuple[int, ...]  # of the group
    module: str  # whose weights or activations travel; of what no module does, the calling function


@dataclass(frozen=True)
class PhaseSpan:
    """Part of a step in one phase. Between phases the name is empty."""

    phase: str
    collectives: list[SeenCollective] = field(default_factory=list)


@dataclass(frozen=True)
class Routes:
    """Routes of one mixture of experts in a forward on one rank."""

    chosen: list[list[int]] = field(default_factory=list)  # the experts of each token
    all_to_alls: list[list[int]] = field(default_factory=list)  # rows sent to each rank
    gemms: list[list[int]] = field(default_factory=list)  # rows of each of this rank's experts


class StepWatch(TorchDispatchMode):
    """Context manager around a step. On a CPU backward runs in this thread, so it is seen too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stretches = [PhaseSpan("")]
        self.routes = Routes()
        self.labels: list[str] = []
        self.module = ""  # the one that was entered last
        self.groups = named_groups(model)
        watch_modules(model, self)

    def __torch_dispatch__(
        self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # their own dispatch comes back here with plain tensors
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.namespace == "profiler":
            self.note_label(name, args)
        if name in KINDS:
            self.note_collective(KINDS[name], args)
        if self.phase() == "forward":
            self.note_routes(name, args, out)
        return out

    def phase(self) -> str:
        """Return the innermost label that is a phase."""
        phases = [label for label in self.labels if label in PHASES]
        return phases[-1] if phases else ""

    def note_label(self, name: str, args: tuple) -> None:
        if "enter" in name:
            self.labels.append(args[0])
        else:
            self.labels.pop()
        if self.phase() != self.stretches[-1].phase:
            self.stretches.append(PhaseSpan(self.phase()))

    def note_collective(self, kind: str, args: tuple) -> None:
        group = group_of(args)
        dimension = self.groups[group.group_name]
        ranks = tuple(dist.get_process_group_ranks(group))
        collective = SeenCollective(kind, dimension, ranks, self.subject())
        self.stretches[-1].collectives.append(collective)

    def subject(self) -> str:
        if self.phase() not in ("forward", "loss", "backward"):
            return calling_function()
        found = [FSDP_LABEL.match(label) for label in self.labels]
        of_fsdp = [match for match in found if match]
        if not of_fsdp:
            return self.module
        work, module = of_fsdp[-1].groups()
        content = "weights" if work == "all_gather" else "gradients"
        return f"{module or 'root'}: {content}"

    def note_routes(self, name: str, args: tuple, out: Any) -> None:
        routes = self.routes
        if name == "aten::topk":
            routes.chosen.extend(out[1].tolist())
        elif name == "_c10d_functional::all_to_all_single":
            routes.all_to_alls.append(list(args[2]))
        elif name.startswith("plumbline::grouped"):
            routes.gemms.append(args[2].tolist())


def named_groups(model: nn.Module) -> dict[str, str]:
    """Name of a process group -> its dimension of the mesh, for all groups that share weights."""
    names = {dist.group.WORLD.group_name: "all"}
    for param in model.parameters():
        mesh = param.device_mesh
        for dimension in mesh.mesh_dim_names:
            names[mesh.get_group(dimension).group_name] = dimension
    return names


def watch_modules(model: nn.Module, watch: StepWatch) -> None:
    """Tell `watch` which module forward enters, and to which one backward comes back."""
    for name, module in model.named_modules():
        if name and name.count(".") < MODULES_DEEP:
            watch_module(name, module, watch)


def watch_module(name: str, module: nn.Module, watch: StepWatch) -> None:
    def enter(*_: Any) -> None:
        watch.module = name

    def leave(_: nn.Module, __: tuple, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(enter)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


def calling_function() -> str:
    """Return the innermost function of this repository, without those of this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or not of_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_name


def of_ours(path: str) -> bool:
    return ROOT in Path(path).parents and ".venv" not in path
