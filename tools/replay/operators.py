"""Note the results of every operator and every collective of one step on one rank, while the step
is computed again. tools/replay/locate.py finds the first of them that is wrong.

In one process, three numbers of each operator's inputs and outputs are noted, in forward, backward
and optimizer. On a mesh, outputs are noted by token, in forward and backward of the requested
modules, for comparison with one process. Of a collective, three numbers of each sent and received
part are noted, so that it can be checked against its definition.

Shapes:  b sequences of a microbatch   t this rank's tokens of a sequence
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from parallelisms import cp, pp
from reliability.collectives import NAMESPACES, group_of
from tools.parity.trajectory import Notes, is_recomputing, plain_name
from training import digests

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = Path("tools/replay"), Path("tools/parity")  # lines of these explain nothing
# Their results are uninitialised memory.
WITHOUT_VALUES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "resize_")


class Summary(NamedTuple):
    """Three numbers of a tensor."""

    shape: tuple[int, ...]
    norm: float  # of what is finite
    digest: float  # as in training/digests.py, by the place in memory order
    strange: float  # the digest of where it is not finite


class TensorForm(NamedTuple):
    """Positions of the arguments of a collective's operator."""

    sent: int
    got: int | None  # None: the result
    kind: str  # a row of tools/replay/locate.py::DEFINITIONS
    sent_sizes: int | None = None  # how many rows go to each rank
    got_sizes: int | None = None


FORMS = {
    "allreduce_": TensorForm(0, 0, "reduce"),
    "_allgather_base_": TensorForm(1, 0, "gather"),
    "_reduce_scatter_base_": TensorForm(1, 0, "reduce_scatter"),
    "alltoall_base_": TensorForm(1, 0, "exchange", 4, 3),
    "all_reduce": TensorForm(0, None, "reduce"),
    "all_gather_into_tensor": TensorForm(0, None, "gather"),
    "reduce_scatter_tensor": TensorForm(0, None, "reduce_scatter"),
    "all_to_all_single": TensorForm(0, None, "exchange", 2, 1),
}


@dataclass(frozen=True)
class Operation:
    name: str  # as aten.mm
    module: str
    line: str  # of this repository; of a backward, that of its forward
    constants: tuple[str, ...]  # the arguments that are no tensors
    inputs: list[Summary]
    outputs: list[Summary]


@dataclass(frozen=True)
class CheckedCollective:
    name: str
    module: str
    line: str
    number: int  # in the order of this rank
    ranks: tuple[int, ...]  # of its group
    kind: str
    reduction: str  # as sum; "" of what reduces nothing
    eps: float  # of its type: the largest relative rounding of one sum
    sent: list[Summary]  # by the rank that gets it, or one for all
    got: list[Summary]  # by the rank that has sent it, or one


@dataclass
class OperatorNotes:
    """Notes of one rank. A key is phase, module, operator, line, and the count of this line within
    one call of the module."""

    operations: list[Operation] = field(default_factory=list)
    collectives: list[CheckedCollective] = field(default_factory=list)
    # Key -> the output in each microbatch, [b, t or fewer, ...]; of a backward as one rank has it
    by_token: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    # Key -> the sum over microbatches, of what in backward has no tokens: a weight's gradient
    summed: dict[str, np.ndarray] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # all of them, in order -> their line
    unreduced: list[str] = field(default_factory=list)  # modules whose gradient stayed on its rank
    ranks_of_loss: int = 1  # a gradient on a rank is so many times its part of the mean over ranks


@cache
def factors_of(length: int) -> Tensor:
    return digests.factors(torch.arange(length), "")


def summary(x: Tensor) -> Summary:
    flat = x.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    values = flat.double()
    factors = factors_of(1 << len(values).bit_length())[: len(values)]
    strange = 0.0
    if not math.isfinite(values.sum()):
        is_finite = values.isfinite()
        strange = factors.dot((~is_finite).double()).item()
        values = values.where(is_finite, 0.0)
    digest = factors.dot(values).item()
    return Summary(tuple(x.shape), math.sqrt(values.dot(values)), digest, strange)


def parts(x: Tensor, count: int, sizes: list[int] | None = None) -> list[Summary]:
    """Cut x along its first dimension, evenly or into these sizes."""
    cut = x.split(list(sizes)) if sizes else x.reshape(-1).split(max(1, -(-x.numel() // count)))
    found = [summary(part) for part in cut]
    nothing = summary(x.new_empty(0))
    return found + [nothing] * (count - len(found))


def tensors_of(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def outputs_of(func: Any, args: tuple, result: Any) -> list[Tensor]:
    """Return the tensors that an operator has computed: its result, or the arguments that it writes
    to. [] of a view."""
    if func.overloadpacket.__name__ in WITHOUT_VALUES:
        return []
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    if any(not alias.is_write for alias in aliases):
        return []
    found = tensors_of(result)
    if not func._schema.returns:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tensors_of(value)
    return found


class Operators(TorchDispatchMode):
    """Notes every operator while it is on. seen: the notes of the step; scope: the module whose
    operators are noted by token, with all inside of it; None: all operators are noted in order."""

    def __init__(self, job: Any, seen: Notes, scope: str | None) -> None:
        super().__init__()
        self.notes = OperatorNotes()
        self.scope = scope
        self.model = job.model
        self.in_order = scope is None
        self.summed_over_tokens = job.mesh.tp == 1
        self.notes.ranks_of_loss = job.mesh.fsdp_mesh.size()  # train.py::gradients
        self.sequences = seen.samples.shape[1]
        # of weights: what has such a shape in backward is a gradient of one
        self.shapes = {tuple(param.shape) for param in job.model.parameters()}
        # modules whose rows are sorted by expert
        mixtures = [mixture for stage in pp.stages_of(job.model) for mixture in mixtures_of(stage)]
        sorting = {id(module) for mixture in mixtures for module in (mixture, mixture.experts)}
        self.by_expert = {plain_name(n) for n, m in job.model.named_modules() if id(m) in sorting}
        self.lengths = sorted({len(seen.positions), len(seen.positions) // job.mesh.tp})[::-1]
        self.stack: list[str] = []  # the modules that compute, innermost last
        self.calls: Counter[str] = Counter()  # forwards of each module so far
        # (phase, module, operator, line, microbatch) -> how many there were
        self.seen_of: Counter[tuple] = Counter()
        # the number of a node of autograd -> module, its microbatch, line
        self.made: dict[int, tuple[str, int, str]] = {}
        self.reduced: set[str] = set()  # modules whose gradient FSDP has reduced

    def hooks(self) -> list[Any]:
        handles = []
        for name, module in self.model.named_modules():
            name = plain_name(name)
            handles.append(module.register_forward_pre_hook(self.entering(name)))
            handles.append(module.register_forward_hook(self.leaving(), always_call=True))
        return handles

    def entering(self, name: str) -> Callable:
        def enter(module: nn.Module, inputs: Any) -> None:
            self.stack.append(name)
            if not is_recomputing():
                self.calls[name] += 1

        return enter

    def leaving(self) -> Callable:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.stack.pop()

        return leave

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch calls this again with plain tensors
        if func in cp.INSIDE:
            with self:
                return cp.INSIDE[func](*args)
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace in NAMESPACES:
            return self.collective(name, func, args)
        before = []
        if self.in_order:
            before = [summary(x) for x in tensors_of(args)]
        result = func(*args, **(kwargs or {}))
        outputs = outputs_of(func, args, result)
        # DTensor finds out shapes by tensors without values
        if outputs and not any(isinstance(x, FakeTensor) for x in outputs):
            self.note(f"{func.namespace}.{name}", args, before, outputs)
        return result

    def place(self) -> tuple[str, str, int, str]:
        """Return phase, module, microbatch and line of the operator that runs."""
        line = line_of(sys._getframe(2))
        module = self.stack[-1] if self.stack else ""
        if not is_recomputing():
            microbatch = self.calls[module] - 1
            number = torch._C._autograd._get_sequence_nr() - 1
            self.made.setdefault(number, (module, microbatch, line))
            return "forward", module, microbatch, line
        if self.stack:
            return "recomputed", module, 0, line
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        return "backward", *self.made.get(number, ("", 0, line))

    def note(self, name: str, args: tuple, before: list[Summary], outputs: list[Tensor]) -> None:
        phase, module, microbatch, line = self.place()
        if self.in_order:
            constants = []
            for value in tree_iter(args):
                if not isinstance(value, (Tensor, torch.device, torch.dtype)):
                    constants.append(str(value))
            after = [summary(x) for x in outputs]
            self.notes.operations.append(
                Operation(name, module, line, tuple(constants), before, after)
            )
            return
        inside = f"{module}.".startswith(f"{self.scope}.") or not self.scope
        if phase == "recomputed" or not inside or not module:
            return
        # by line, since DTensor inserts its own operators between ours
        place = phase, module, name, line
        count = self.seen_of[(*place, microbatch)]
        self.seen_of[(*place, microbatch)] += 1
        for i, x in enumerate(outputs):
            key = "\t".join((*place, f"{count}.{i}"))
            self.notes.keys.setdefault(key, line)
            self.note_values(key, phase == "backward", args, x)

    def note_values(self, key: str, is_backward: bool, args: tuple, x: Tensor) -> None:
        scale = 1 / self.notes.ranks_of_loss if is_backward else 1.0
        is_sum = is_backward and is_sum_over_tokens(args)
        layout = None if is_sum else self.tokens_first(x, key.split("\t")[1])
        if layout is not None and x.is_floating_point():
            finite = layout.double().where(layout.isinf().logical_not(), 0.0)
            self.notes.by_token[key].append(finite.numpy() * scale)
        elif is_backward and self.summed_over_tokens and tuple(x.shape) in self.shapes:
            value = x.detach().double().numpy() * scale
            self.notes.summed[key] = self.notes.summed.get(key, 0) + value

    def tokens_first(self, x: Tensor, module: str) -> Tensor | None:
        """[b, t or fewer, ...]; None of a tensor that is not by token."""
        b = self.sequences
        for t in self.lengths:
            if x.ndim >= 2 and x.shape[:2] == (b, t):
                return x
            if x.ndim == 4 and x.shape[0] == b and x.shape[2] == t:  # heads before tokens
                return x.transpose(1, 2)
            if x.ndim >= 2 and len(x) == b * t and module not in self.by_expert:
                return x.reshape(b, t, *x.shape[1:])
        return None

    def collective(self, name: str, func: Any, args: tuple) -> Any:
        form = FORMS.get(name)
        if form is None:
            return func(*args)
        phase, module, _, line = self.place()
        group = group_of(args)
        size = group.size()
        kind, reduction = form.kind, reduction_of(args) if "reduce" in form.kind else ""
        sent = tensors_of(args[form.sent])[0]
        cuts_sent = size if form.kind in ("reduce_scatter", "exchange") else 1
        sizes = args[form.sent_sizes] if form.sent_sizes is not None else None
        before = parts(sent, cuts_sent, sizes)
        result = func(*args)
        finish(result)
        got = result if form.got is None else tensors_of(args[form.got])[0]
        cuts_got = size if form.kind in ("gather", "exchange") else 1
        sizes = args[form.got_sizes] if form.got_sizes is not None else None
        eps = torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
        fsdp = of_fsdp(sys._getframe(1))
        if fsdp is not None:
            module = fsdp
            if "reduce" in kind:
                self.reduced.add(module)
        self.notes.collectives.append(
            CheckedCollective(
                f"{func.namespace}.{name}",
                module,
                line,
                len(self.notes.collectives),
                tuple(dist.get_process_group_ranks(group)),
                kind,
                reduction,
                eps,
                before,
                parts(got, cuts_got, sizes),
            )
        )
        return result

    def unreduced(self) -> list[str]:
        """Return the modules that FSDP shards or replicates and whose gradient no collective has
        reduced."""
        found = []
        for stage in pp.stages_of(self.model):
            for module in stage.modules():
                if not isinstance(module, FSDPModule):
                    continue
                state = module._get_fsdp_state()
                # torch 2.13, 2.11
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                for group in filter(None, groups):
                    trained = any(p.sharded_param.requires_grad for p in group.fsdp_params)
                    name = group._module_fqn or ""
                    if trained and group.mesh_info.mesh.size() > 1 and name not in self.reduced:
                        found.append(name)
        return found


def mixtures_of(stage: Any) -> list[nn.Module]:
    return list(stage.mixtures().values())


def is_sum_over_tokens(args: tuple) -> bool:
    """Return True for a weight's gradient: a product in backward whose first factor is transposed."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and first.ndim == 2 and first.stride(0) < first.stride(1)


def finish(result: Any) -> None:
    """Wait for what a collective's operator has returned: a tensor, or works among other things."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    for work in tree_iter(result):
        if isinstance(work, torch.ScriptObject):
            dist.Work.unbox(work).wait()


def reduction_of(args: tuple) -> str:
    """Return the reduction, such as sum; for c10d's operators, whose argument is opaque, as the
    caller has named it."""
    for value in args:
        if isinstance(value, str) and value in ("sum", "avg", "max", "min", "product"):
            return value
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if Path(frame.f_code.co_filename).name == "distributed_c10d.py" and "op" in frame.f_locals:
            return str(frame.f_locals["op"]).rpartition(".")[2].lower()
        frame = frame.f_back
    return "sum"


def of_fsdp(frame: FrameType | None) -> str | None:
    """Return the module whose weights FSDP gathers here, or whose gradient it reduces; None if the
    caller is not FSDP."""
    while frame:
        caller = frame.f_locals.get("self")
        if type(caller).__name__ == "FSDPParamGroup":
            return caller._module_fqn or ""
        frame = frame.f_back
    return None


def line_of(frame: FrameType | None) -> str:
    """Return the innermost calling line of this repository, excluding the tools that note it."""
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            inside = path.relative_to(ROOT)
            if inside.parent not in OURS and ".venv" not in inside.parts:
                return f"{inside}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@contextmanager
def noting(job: Any, seen: Any, scope: str | None) -> Iterator[None]:
    """Note the operators of the step that is made meanwhile, in seen.operators. scope: as of
    `Operators`."""
    mode = Operators(job, seen, scope)
    handles = mode.hooks()
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()
    notes = mode.notes
    notes.unreduced = mode.unreduced()
    notes.by_token = dict(notes.by_token)
    seen.operators = notes
