"""Watches the collectives of a run: `Checked` compares them between ranks before they run, `twice` computes a gradient
twice and compares what this rank put into them.

gloo and NCCL match collectives by their order alone. If the ranks call one with different types, or with different
shapes of equal size, or if one rank leaves a call out, both return wrong sums in silence, or hang (measured:
docs/reliability.md).
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from parallelisms import cp
from parallelisms.mesh import Mesh
from reliability.health import odd_ones

NAMESPACES = ("c10d", "_c10d_functional")
# Operators of these namespaces that are not watched: they move nothing, or only two ranks take part.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "recv_any_source_")
TO_OR_FROM_ONE = ("gather_", "scatter_")  # the other ranks call these without the list
IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")  # the others of c10d take the result first
HERE, TORCH = Path(__file__).resolve().parent.parent, Path(torch.__file__).parent
IN_BETWEEN = (
    "_ops.py", "_compile.py", "eval_frame.py", "c10d_logger.py", "distributed_c10d.py", "_functional_collectives.py",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """A context manager that calls `see` with each collective of this thread before it runs. Put it around forward and
    backward: a backward runs under it too. The thread that writes checkpoints is not watched, and has its own group."""

    def see(self, name: str, func: Callable, args: tuple) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch calls this again with plain tensors
        if func in cp.INSIDE:
            with self:
                return cp.INSIDE[func](*args)
        if func.namespace in NAMESPACES and (name := func._schema.name.partition("::")[2]) not in SILENT:
            self.see(name, func, args)
        return func(*args, **(kwargs or {}))


class Drift(RuntimeError):
    """The ranks of a group do not run the same collective."""


class Checked(Watch):
    """Raises Drift on every rank of a group, before a collective runs, if the ranks do not call the same one: the same
    operation, types, shapes, kind of reduction and calling line. (Without the line, a rank that leaves one call out
    would go unnoticed if its next call is of the same kind.)

    Each collective costs one more: an all-gather of WIDTH bytes of text over the CPU, on the same group.
    """

    WIDTH = 512

    def see(self, name: str, func: Callable, args: tuple) -> None:
        group = group_of(args)
        if group.size() == 1:
            return
        description = self.describe(name, args)
        text = (hashlib.sha256(description.encode()).hexdigest()[:16] + description).encode()[: self.WIDTH]
        row = torch.zeros(self.WIDTH, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(group.size())]
        try:
            group.allgather([rows], [row]).wait()
        except RuntimeError as error:
            raise Drift(f"a rank of {_named(group)} did not come to {description}: {error}") from error
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        if odd := odd_ones(texts):
            ranks = dist.get_process_group_ranks(group)
            usual = [i for i in range(len(texts)) if i not in odd]
            lines = [f"rank {ranks[i]}: {texts[i][16:]}" for i in odd[:8]]
            lines += [f"ranks {', '.join(str(ranks[i]) for i in usual[:8])}: {texts[usual[0]][16:]}"] if usual else []
            raise Drift(f"the ranks of {_named(group)} do not run the same collective:\n  " + "\n  ".join(lines))

    @staticmethod
    def describe(name: str, args: tuple) -> str:
        tensors = () if name in TO_OR_FROM_ONE else [t for t in tree_iter(args) if isinstance(t, Tensor)]
        shapes = " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        kind, caller = _call()
        return f"{name} {shapes}{kind} at {caller}"


def group_of(args: tuple) -> dist.ProcessGroup:
    """The group among the arguments of a collective's operator."""
    for arg in reversed(args):  # functional ones name it last, after the kind of reduction
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue  # the kind of reduction is a ScriptObject too
        if isinstance(arg, str):
            return _resolve_process_group(arg)
    raise NotImplementedError(f"a collective without a group: {args}")


def _named(group: dist.ProcessGroup) -> str:
    return f"group {group.group_desc} (ranks {dist.get_process_group_ranks(group)})"


def _call() -> tuple[str, str]:
    """The kind of reduction, if the caller gave one, and the calling lines: the innermost of torch and the two
    innermost of this repository. There may be fewer: on a GPU backward runs in a thread of its own, which begins with a
    hook of FSDP."""
    kind, of_torch, ours, frame = "", [], [], sys._getframe(1)
    while frame and len(ours) < 2:
        path = Path(frame.f_code.co_filename)
        line = f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if path.name == "distributed_c10d.py" and "op" in frame.f_locals:
            kind = f" {frame.f_locals['op']}".replace("RedOpType.", "")
        elif path.is_relative_to(TORCH):
            if not of_torch and not ours and path.name not in IN_BETWEEN:
                of_torch.append(line)
        elif path.is_relative_to(HERE) and path != Path(__file__):
            ours.append(line)
        frame = frame.f_back
    return kind, ", of ".join(of_torch + ours)


class Remembered(Watch):
    """Hashes of what this rank puts into each collective, in order, and then of whatever `add` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[Tensor] = []

    def see(self, name: str, func: Callable, args: tuple) -> None:
        inplace = func.namespace != "c10d" or name in IN_PLACE
        self.add(args[0 if inplace else 1])

    def add(self, tensors: Any) -> None:
        """Hash each tensor by the exclusive or of its elements' bits, which changes with every single flipped bit."""
        self.hashes += [torch.hash_tensor(t.detach()) for t in tree_iter(tensors) if isinstance(t, Tensor) and t.numel()]


def twice(gradients: Callable[[], Any], optimizer: torch.optim.Optimizer, mesh: Mesh) -> tuple[Any, list[int]]:
    """Call gradients() twice with the same weights, batch and random numbers. Returns what the second call returned,
    and the ranks that computed something else the second time, bit for bit; the list is the same on all ranks.

    After the reduction a wrong gradient is on every rank. So what each rank puts *into* every collective is compared:
    the rank that differs from itself at the earliest collective computes wrong, and those that differ later have
    received its result. The stages of a pipeline run different collectives, so there all that differ are returned.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    passes = []
    for is_second in (False, True):
        with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else [], enabled=not is_second):
            with Remembered() as remembered:
                result = gradients()
            remembered.add([w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad for w in weights])
        passes.append(torch.stack([value.to(mesh.device).view(torch.int64) for value in remembered.hashes]).tolist())
        if not is_second:
            optimizer.zero_grad(set_to_none=True)
    first, second = passes
    first_difference = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    everyone = mesh.gather((first_difference, len(first))) if mesh.any_rank(first_difference < len(first)) else []
    earliest = min((first_difference for first_difference, _ in everyone), default=0)
    if mesh.pp > 1:
        return result, [rank for rank, (first_difference, calls) in enumerate(everyone) if first_difference < calls]
    return result, [rank for rank, (first_difference, _) in enumerate(everyone) if first_difference == earliest]
