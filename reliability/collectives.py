"""What the ranks say to each other, watched: compared before it is said, or remembered and said again.

gloo and NCCL match collectives by their order alone. Where ranks come with another type, another shape of as many bytes, or
one of them leaves one out, both return wrong sums in silence, or hang (docs/reliability.md has what was measured).
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

from parallelisms.mesh import Mesh
from reliability.health import odd_ones

NAMESPACES = ("c10d", "_c10d_functional")
# Those of them that move nothing, and those between two ranks only.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "recv_any_source_")
TO_OR_FROM_ONE = ("gather_", "scatter_")  # whose other ranks come without the list
IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")  # the others of c10d have their result first
HERE, TORCH = Path(__file__).resolve().parent.parent, Path(torch.__file__).parent
IN_BETWEEN = (
    "_ops.py", "_compile.py", "eval_frame.py", "c10d_logger.py", "distributed_c10d.py", "_functional_collectives.py",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """A context: `see` is called with each collective of this thread before it runs. Around forward and backward, which
    run under it too; not around a thread that writes checkpoints, whose collectives have a group of their own."""

    def see(self, name: str, func: Callable, args: tuple) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch brings it back with plain tensors
        if func.namespace in NAMESPACES and (name := func._schema.name.partition("::")[2]) not in SILENT:
            self.see(name, func, args)
        return func(*args, **(kwargs or {}))


class Drift(RuntimeError):
    """The ranks of a group do not run the same collective."""


class Checked(Watch):
    """Raises Drift on every rank of a group, before the collective runs, when theirs are not the same: operation, types,
    shapes, kind of reduction, and the line that called it. (The line finds a collective that one rank has left out and whose
    next one is of the same kind.)

    Each costs one more: an all-gather of WIDTH bytes of text over the CPU, on the same group.
    """

    WIDTH = 512

    def see(self, name: str, func: Callable, args: tuple) -> None:
        group = group_of(args)
        if group.size() == 1:
            return
        mine = self.words(name, args)
        text = (hashlib.sha256(mine.encode()).hexdigest()[:16] + mine).encode()[: self.WIDTH]
        row = torch.zeros(self.WIDTH, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(group.size())]
        try:
            group.allgather([rows], [row]).wait()
        except RuntimeError as error:
            raise Drift(f"a rank of {_named(group)} did not come to {mine}: {error}") from error
        said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        if odd := odd_ones(said):
            ranks = dist.get_process_group_ranks(group)
            usual = [i for i in range(len(said)) if i not in odd]
            lines = [f"rank {ranks[i]}: {said[i][16:]}" for i in odd[:8]]
            lines += [f"ranks {', '.join(str(ranks[i]) for i in usual[:8])}: {said[usual[0]][16:]}"] if usual else []
            raise Drift(f"the ranks of {_named(group)} do not run the same collective:\n  " + "\n  ".join(lines))

    @staticmethod
    def words(name: str, args: tuple) -> str:
        tensors = () if name in TO_OR_FROM_ONE else [t for t in tree_iter(args) if isinstance(t, Tensor)]
        shapes = " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        kind, where = _call()
        return f"{name} {shapes}{kind} at {where}"


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
    """The kind of reduction, where the caller gave one; and who called: the innermost line of torch and the two innermost of
    ours, as far as there are any (on a GPU backward runs in a thread of its own, and begins with a hook of FSDP's)."""
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
    """Hashes of all that this rank says: what it puts into each collective, in order, and then whatever `add` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[Tensor] = []

    def see(self, name: str, func: Callable, args: tuple) -> None:
        inplace = func.namespace != "c10d" or name in IN_PLACE
        self.add(args[0 if inplace else 1])

    def add(self, tensors: Any) -> None:
        """exclusive or of all bits of each: a single flipped one always shows."""
        self.hashes += [torch.hash_tensor(t.detach()) for t in tree_iter(tensors) if isinstance(t, Tensor) and t.numel()]


def twice(gradients: Callable[[], Any], optimizer: torch.optim.Optimizer, mesh: Mesh) -> tuple[Any, list[int]]:
    """gradients() computed twice from the same weights, batch and random numbers: what it returned the second time, and the
    ranks of which the two are not bitwise the same, alike on all ranks.

    One wrong gradient is in everybody's weights after the reduction. So compared is what each rank puts into every
    collective: the first to part from itself is the rank that computes wrong, those after it have only heard of it.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    passes = []
    for again in (False, True):
        with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else [], enabled=not again):
            with Remembered() as one:
                result = gradients()
            one.add([w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad for w in weights])
        passes.append(torch.stack([value.to(mesh.device).view(torch.int64) for value in one.hashes]).tolist())
        if not again:
            optimizer.zero_grad(set_to_none=True)
    first, second = passes
    parts = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    everyone = mesh.gather((parts, len(first))) if mesh.any_rank(parts < len(first)) else []
    earliest = min((parts for parts, _ in everyone), default=0)
    return result, [rank for rank, (parts, _) in enumerate(everyone) if parts == earliest]
