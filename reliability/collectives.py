"""Watches the collectives and messages of a run.

`Checked` compares collectives between ranks before they run. `CheckedLink` compares the messages of
a pipeline. `twice` computes a gradient twice and compares the inputs of this rank's collectives.

gloo and NCCL match collectives by their order alone. If the ranks call one with different types, or
with different shapes of equal size, or if one rank leaves a call out, both return wrong sums in
silence, or hang (measured: docs/reliability.md).
"""

import hashlib
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
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
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from parallelisms.p2p_warmup import warm_up_p2p
from reliability.health import outliers
from reliability.position_file import TORCH, own

NAMESPACES = ("c10d", "_c10d_functional")
# Operators of these namespaces that are not watched: they move nothing, or are messages, which
# CheckedLink compares.
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "recv_any_source_")
TO_OR_FROM_ONE = ("gather_", "scatter_")  # the other ranks call these without the list
# Of parallelisms/gather_matrices.py: each rank sends and gets a different length.
UNEVEN = "alltoall_base_"
# the others of c10d take the result first
IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")
IN_BETWEEN = (
    "_ops.py",
    "_compile.py",
    "eval_frame.py",
    "c10d_logger.py",
    "distributed_c10d.py",
    "_functional_collectives.py",
)


class Watch(TorchDispatchMode):
    """A context manager that calls `see` with each collective of this thread before it runs. Put it
    around forward and backward: a backward runs under it too. The thread that writes checkpoints is
    not watched, and has its own group."""

    def see(self, name: str, func: Callable, args: tuple) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch calls this again with plain tensors
        if func in cp.INSIDE:
            with self:
                return cp.INSIDE[func](*args)
        if (
            func.namespace in NAMESPACES
            and (name := func._schema.name.partition("::")[2]) not in SILENT
        ):
            self.see(name, func, args)
        return func(*args, **(kwargs or {}))


# of a text as a tensor: its bytes, and those of them that tell longer texts apart
WIDTH, HASH = 512, 16


def packed(text: str) -> Tensor:
    """Encode a text as uint8 [WIDTH], which other ranks compare: its hash, then as much of it as
    there is room for."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    content = (digest[:HASH] + text).encode()[:WIDTH]
    row = torch.zeros(WIDTH, dtype=torch.uint8)
    row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return row


def unpacked(row: Tensor) -> str:
    """Decode the hash and the text."""
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def _type_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Drift(Exception):
    """The ranks of a group do not run the same collective, or a rank gets a message that it does
    not expect."""


class Checked(Watch):
    """Raises Drift on every rank of a group, before a collective runs, if the ranks do not call the
    same one: the same operation, types, shapes, kind of reduction and calling line. (Without the
    line, a rank that leaves one call out would go unnoticed if its next call is of the same kind.)

    Each collective costs one more: an all-gather of WIDTH bytes of text over the CPU, on the same
    group.
    """

    def see(self, name: str, func: Callable, args: tuple) -> None:
        group = group_of(args)
        if group.size() == 1:
            return
        description = self.describe(name, args)
        row = packed(description)
        rows = [torch.empty_like(row) for _ in range(group.size())]
        try:
            group.allgather([rows], [row]).wait()
        except RuntimeError as error:
            raise Drift(
                f"a rank of {_named(group)} did not come to {description}: {error}"
            ) from error
        texts = [unpacked(row) for row in rows]
        odd = outliers(texts)
        if odd:
            ranks = dist.get_process_group_ranks(group)
            lines = [f"rank {ranks[i]}: {texts[i][HASH:]}" for i in odd[:8]]
            majority = [i for i in range(len(texts)) if i not in odd]
            if majority:
                names = ", ".join(str(ranks[i]) for i in majority[:8])
                lines.append(f"ranks {names}: {texts[majority[0]][HASH:]}")
            raise Drift(
                f"the ranks of {_named(group)} do not run the same collective:\n  "
                + "\n  ".join(lines)
            )

    @staticmethod
    def describe(name: str, args: tuple) -> str:
        tensors = []
        if name not in (*TO_OR_FROM_ONE, UNEVEN):
            tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)]
        kind, caller = _call()
        return f"{name} {' '.join(map(_type_and_shape, tensors))}{kind} at {caller}"


class CheckedLink:
    """Starts messages as parallelisms/pp.py::Link does, and sends a label before each: its name,
    type and shape.

    The receiver compares the label with what it expects, and receives the message only if they
    agree. Otherwise it raises Drift. Without this, a rank that is at a different action of the
    schedule would receive wrong numbers in silence, or all would wait. A label is WIDTH bytes of
    text, which travel over the CPU. A message is received when it is needed, so none arrives while
    its receiver computes.
    """

    def __init__(self, link: Any, mesh: Mesh) -> None:
        """link: what sends and receives. All ranks of a pipeline call this together."""
        self.link, self.mesh = link, mesh
        # by sender, in the order in which it sends them
        self.awaited: dict[int, deque[AwaitedMessage]] = {}
        # On GPUs these ranks have sent each other nothing over the CPU so far.
        warm_up_p2p(mesh, torch.device("cpu"), mesh.timeout())

    def send(self, name: str, tensor: Tensor, rank: int) -> "LabelledMessage":
        label = packed(f"{name}, {_type_and_shape(tensor)}")
        return LabelledMessage(
            [self.link.send(name, label, rank), self.link.send(name, tensor, rank)]
        )

    def receive(self, name: str, tensor: Tensor, rank: int) -> "AwaitedMessage":
        message = AwaitedMessage(self, name, tensor, rank)
        self.awaited.setdefault(rank, deque()).append(message)
        return message


class LabelledMessage:
    """A label and a message that are being sent. Like a dist.Work."""

    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self, *limit: timedelta) -> None:
        for work in self.works:
            work.wait(*limit)


class AwaitedMessage:
    """A message that a rank will receive when it waits for it, or for one that comes later. Like a
    dist.Work."""

    def __init__(self, link: CheckedLink, name: str, tensor: Tensor, sender: int) -> None:
        self.link, self.name, self.tensor, self.sender = link, name, tensor, sender
        self.work: dist.Work | None = None

    def start(self) -> None:
        """Receive the label, and start to receive the message. Raises Drift if the label is not the
        expected one."""
        label, mesh = packed(""), self.link.mesh
        self.link.link.receive(self.name, label, self.sender).wait(mesh.timeout())
        expected = f"{self.name}, {_type_and_shape(self.tensor)}"
        if not torch.equal(label, packed(expected)):
            raise Drift(
                f"rank {mesh.pp_rank} of the pipeline expects {expected}, but rank {self.sender} "
                "sends "
                f"{unpacked(label)[HASH:]}: the two are at different actions, or differ in code "
                "or configuration"
            )
        self.work = self.link.link.receive(self.name, self.tensor, self.sender)

    def wait(self, *limit: timedelta) -> None:
        while self.work is None:
            self.link.awaited[self.sender].popleft().start()
        self.work.wait(*limit)


def checked(
    model: torch.nn.Module, mesh: Mesh, enabled: bool = True
) -> AbstractContextManager[Watch | None]:
    """Let all messages of a pipeline be compared from now on, and collectives within the returned
    context manager. Not `enabled` (debug.check_collectives): nothing is compared."""
    if not enabled:
        return nullcontext()
    if mesh.pp > 1:
        model.link = CheckedLink(model.link, mesh)
    return Checked()


def group_of(args: tuple) -> dist.ProcessGroup:
    """Return the group among the arguments of a collective's operator."""
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
    """Return the kind of reduction, if the caller gave one, and the calling lines: the innermost of
    torch and the two innermost of this repository. There may be fewer: on a GPU backward runs in a
    separate thread, which begins with a hook of FSDP."""
    kind = ""
    of_torch = []
    ours = []
    frame = sys._getframe(1)
    while frame and len(ours) < 2:
        path = Path(frame.f_code.co_filename)
        line = f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if path.name == "distributed_c10d.py" and "op" in frame.f_locals:
            kind = f" {frame.f_locals['op']}".replace("RedOpType.", "")
        elif path.is_relative_to(TORCH):
            if not of_torch and not ours and path.name not in IN_BETWEEN:
                of_torch.append(line)
        elif own(str(path)) and path != Path(__file__):
            ours.append(line)
        frame = frame.f_back
    return kind, ", of ".join(of_torch + ours)


class Remembered(Watch):
    """Hashes of the inputs of this rank's collectives, in order, and then of the arguments of
    `add`."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[Tensor] = []

    def see(self, name: str, func: Callable, args: tuple) -> None:
        inplace = func.namespace != "c10d" or name in IN_PLACE
        self.add(args[0 if inplace else 1])

    def add(self, tensors: Any) -> None:
        """Hash each tensor by the exclusive or of its elements' bits, which changes with every
        single flipped bit."""
        self.hashes += [
            torch.hash_tensor(t.detach())
            for t in tree_iter(tensors)
            if isinstance(t, Tensor) and t.numel()
        ]


def twice(
    gradients: Callable[[], Any], optimizer: torch.optim.Optimizer, mesh: Mesh
) -> tuple[Any, list[int]]:
    """Call gradients() twice with the same weights, batch and random numbers. Returns what the
    second call returned, and the ranks that computed something else the second time, bit for bit;
    the list is the same on all ranks.

    After the reduction a wrong gradient is on every rank. So what each rank puts *into* every
    collective is compared: the rank that differs from itself at the earliest collective computes
    wrong, and those that differ later have received its result. The stages of a pipeline run
    different collectives, so there all that differ are returned.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    # the second pass goes on from the random state that the first one had
    with torch.random.fork_rng(devices):
        first, _ = _hashes_of(gradients, weights, mesh)
    optimizer.zero_grad(set_to_none=True)
    second, result = _hashes_of(gradients, weights, mesh)
    calls = len(first)
    pairs = zip(first, second, strict=True)
    differences = [i for i, (one, other) in enumerate(pairs) if one != other]
    own = differences[0] if differences else calls
    if not mesh.any_rank(bool(differences)):
        return result, []
    everyone = mesh.gather((own, calls))
    if mesh.pp > 1:
        return result, [rank for rank, (at, calls) in enumerate(everyone) if at < calls]
    earliest = min(at for at, _ in everyone)
    return result, [rank for rank, (at, _) in enumerate(everyone) if at == earliest]


def _hashes_of(
    gradients: Callable[[], Any], weights: list[Tensor], mesh: Mesh
) -> tuple[list[int], Any]:
    """Call gradients(). Returns the hashes of what this rank put into each collective, then of its
    gradients; and what the call returned."""
    with Remembered() as remembered:
        result = gradients()
    for weight in weights:
        grad = weight.grad
        remembered.add(shard_of(grad))
    hashes = [value.to(mesh.device).view(torch.int64) for value in remembered.hashes]
    return torch.stack(hashes).tolist(), result
