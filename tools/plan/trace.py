"""One training step seen operator by operator: every storage that is made and freed, every matmul,
every collective.

`trace_step` runs the same `train.build` and `train.train_step` as a run does, on PyTorch's fake
process group with fake tensors: shapes and lifetimes without memory and without time, for one rank
of any world. `Trace` keeps the accounts. It also accounts real steps on real ranks, and the tests
compare the two.
"""

import gc
import logging
import math
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.check import tokens_ahead
from configs.schema import Config, InputError
from models.delta_net import GatedDeltaCore
from models.kernels import (
    delta_rule,
    grouped_product,  # noqa: F401  registers the operators that are counted
    ruled_attention,
)
from models.kernels.cpu import causal_attention, document_attention
from models.kernels.document_attention import Saved, VarlenMetadata
from parallelisms import cp, ep_dispatch, ep_hosts, fsdp_details, pp
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from reliability.collectives import group_of
from tools.plan import quick
from tools.plan.routing import BALANCED, Routing
from tools.plan.step import (
    IN_BLOCKS,
    STAGE,
    Memory,
    Op,
    Parameters,
    Step,
    Stretch,
    Where,
    fuse,
    keep_what_backward_reads,
)
from training import init
from training.further import AHEAD
from training.optimizers import materialise

# labels in train.train_step; the loss is inside forward
PHASES = ("forward", "loss", "backward", "clip", "optimizer")
# label of an action in parallelisms/pp.py::PipelineStep.play
ACTION = re.compile(r"(\w+) of stage \d+, microbatch (\d+)")
aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional
DEVICE_OF = torch.ops.prim.device.default  # looks up the device of a fake tensor

COLLECTIVES = {
    c10d._allgather_base_.default: "all-gather",
    c10d._reduce_scatter_base_.default: "reduce-scatter",
    c10d.allreduce_.default: "all-reduce",
    c10d.alltoall_base_.default: "all-to-all",
    c10d.send.default: "send",
    c10d.recv_.default: "receive",
    functional.all_gather_into_tensor.default: "all-gather",
    functional.all_gather_into_tensor_out.default: "all-gather",
    functional.reduce_scatter_tensor.default: "reduce-scatter",
    functional.all_reduce.default: "all-reduce",
    functional.all_reduce_.default: "all-reduce",
    functional.all_to_all_single.default: "all-to-all",
}
# an unknown operator of these that moves data is an error
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
EXCHANGES = ("ep", ep_hosts.PEERS, ep_hosts.HOST)  # dimensions of dispatch and combine
MOVES_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}


# their last two arguments are the operands
MATMULS = {
    aten.mm.default,
    aten.mm.out,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
}
# operators whose result is a sum, or is one in another order
SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.cat.default, aten.clone.default}


def has_no_vector(left: torch.Tensor, right: torch.Tensor) -> bool:
    """A matrix-vector product, such as that of an expert's output with its routing weight, is
    memory-bound and involves no weight of the model, so its FLOPs do not count."""
    return min(*left.shape[-2:], right.shape[-1]) > 1


def whole_flops(q: torch.Tensor, k: torch.Tensor, causal: bool = True) -> tuple[int, int]:
    """Count the FLOPs of one of attention's matmuls, of q [b, H, T, E] with k [b, K, M, E]. PaLM's
    convention counts a causal matmul whole, although half of its results are masked. A matmul
    without a mask is therefore counted twice. The second number is as `ruled_flops` has it."""
    b, h, t, e = q.shape
    return 2 * b * h * t * k.shape[-2] * e * (1 if causal else 2), 0


def ruled_flops(
    q: torch.Tensor,
    starts: torch.Tensor | None,
    key_starts: torch.Tensor | None,
    longest: int = 0,
    longest_keys: int = 0,
    window: int = 0,
    *_,
) -> tuple[int, int]:
    """Count the same for the pieces of models/kernels/document_attention.py::piece_attention and
    models/kernels/ruled_attention.py::attend, whose arguments these are; q [n, H, E]. The t queries
    of a piece are the last of its m tokens, so a causal mask leaves t (m - t / 2) results of each
    head, and twice as many are counted. With a window, every query counts as many keys as that has.
    The second number is what kernels do beyond half of the first: a query sees its whole window,
    unless it is among the first of a sequence."""
    n, heads, width = q.shape
    of_one = 2 * heads * width
    with unset_fake_temporarily():  # tables are real
        if starts is None or key_starts is None:
            queries = torch.full((n // longest,), longest, dtype=torch.float64)
            keys = queries
            window = 0 if window >= longest else window
        else:
            queries = starts.diff().double()
            keys = key_starts.diff().double()
        if not window:
            return of_one * int((queries * (2 * keys - queries)).sum()), 0
        before = keys - queries  # keys before a piece's first query
        # queries that see less than a window, and the keys that they miss
        few = (window - 1 - before).clamp(min=0).minimum(queries)
        missing = few * (window - before) - few * (few + 1) / 2
        counted = of_one * int((queries * window).sum())
        done = counted - of_one * int(missing.sum())
        return counted, done - counted // 2


# Attention operator -> its arguments to the FLOPs of one of its matmuls, and what kernels do beyond
# half of these. A backward has the gradient before q.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda q, k, v, dropout=0.0, causal=False, *_: whole_flops(q, k, causal)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda grad, q, k, v, out, lse, dropout, causal: whole_flops(q, k, causal)
    ),
    # models/kernels/cpu/causal_attention.py
    torch.ops.plumbline.causal_attention_backward.default: lambda grad, q, k, *_: whole_flops(q, k),
    aten._flash_attention_forward.default: lambda q, k, v, *starts: ruled_flops(q, *starts[:2]),
    aten._flash_attention_backward.default: (
        lambda grad, q, k, v, out, lse, *starts: ruled_flops(q, *starts[:2])
    ),
    # models/kernels/ruled_attention.py
    torch.ops.plumbline.ruled_attention.default: lambda q, k, v, sinks, *rule: ruled_flops(
        q, *rule
    ),
    torch.ops.plumbline.ruled_attention_backward.default: (
        lambda grad, q, k, v, out, lse, sinks, *rule: ruled_flops(q, *rule)
    ),
}


# Grouped GEMMs (models/kernels/grouped_product.py). The arguments of each are the rows and the
# weights, or two matrices with equal numbers of rows; then the rows of each group.
GROUPED_FORWARD = torch.ops.plumbline.grouped_product.default
GROUPED = {
    GROUPED_FORWARD,
    torch.ops.plumbline.grouped_product_backward_rows.default,
    torch.ops.plumbline.grouped_product_backward_weight.default,
}


# Gated delta rule (models/kernels/delta_rule.py) -> position of the keys, its forwards in units of
# matmuls, and of the recurrence. Backward computes a span again, and differentiates it.
DELTA_RULE_FORWARD = torch.ops.plumbline.delta_rule.default
DELTA_RULE = {
    DELTA_RULE_FORWARD: (1, 1, 1),
    torch.ops.plumbline.delta_rule_backward.default: (3, 3, 2),
}


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results. PyTorch's pytree finds the same,
    but took a tenth of the time of a plan."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found = []
    for part in tree:
        if part is not None:
            found += tensors_in(part)
    return found


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def patch(stack: ExitStack, *rows: tuple[object, str, object]) -> None:
    """Replace attributes, (owner, name, value), until the stack is closed."""
    for owner, name, value in rows:
        stack.enter_context(mock.patch.object(owner, name, value))


class Trace(TorchDispatchMode):
    """Records what runs under it. The operators still run.

    The phases of the step are the `record_function` labels of `train.train_step`, which a dispatch
    mode sees as operators. Hooks on the blocks tell which block it is (`watch`).
    """

    def __init__(self, fake: FakeTensorMode | None = None, drops_unread: bool = False) -> None:
        """fake: the mode below this one; None where tensors are real. drops_unread: blocks keep as if
        they were compiled, with selective checkpointing."""
        super().__init__()
        self.fake = fake
        self.drops_unread = drops_unread
        self.where = Where(-1, "build", -1)
        self.stretches: list[Stretch] = []
        self.memory: dict[int, Memory] = {}
        self.numbers: dict[int, int] = {}  # address of a living storage -> its number
        self.alive: dict[int, weakref.ref] = {}  # number -> the storage, whose end is reported
        self.births: dict[Where, int] = {}  # place -> order of the last birth there
        self.counter = count()
        self.labels: list[str] = []  # labels that are open now, of any code
        self.phases: set[str] = set()  # labels that have been seen
        self.job: train.Job | None = None  # whose step is followed
        # phase of the running backward: in a pipeline it may be half of one
        self.backward = "backward"
        self.propagating = 0  # DTensor is finding shapes, so many calls deep
        self.dimensions: dict[str, str] = {}  # name of a process group -> mesh dimension
        # names of the groups of context and of expert parallelism
        self.context_group = self.experts_group = ""
        self.inside_context = False  # an operator of context parallelism runs
        # width of attention's values, where they are padded to the width of the keys; 0: they are
        # not padded
        self.value_width = 0
        self.moe_layers = 0  # in this rank's part of the model
        # storage -> bytes of the second operand of each GEMM whose sum it holds
        self.terms: dict[int, list[int]] = {}
        self.flights: dict[int, int] = {}  # storage that an exchange fills -> its Op.flight
        self.patches = ExitStack()

    # Memory.
    def rows(self) -> list:
        """Return the events of the present stretch."""
        if not self.stretches or self.stretches[-1].where != self.where:
            self.stretches.append(Stretch(self.where, []))
        return self.stretches[-1].rows

    def add(self, storage: torch.UntypedStorage) -> int:
        """Return a new number for a storage, whose end is then reported."""
        address = storage._cdata
        number = self.numbers[address] = next(self.counter)
        self.alive[number] = weakref.ref(storage, lambda _: self.add_death(address, number))
        return number

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage. A storage that was not seen before is born now."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.numbers:
            return self.numbers[storage._cdata]
        number = self.add(storage)
        self.add_birth(number, storage.nbytes())
        self.memory[number].shape = tuple(tensor.shape)
        return number

    def add_birth(self, number: int, size: int) -> None:
        order = self.births.get(self.where, -1) + 1
        self.births[self.where] = order
        kind = "logits and loss" if "loss" in self.labels else ""
        self.memory[number] = Memory(size, self.where, kind, order)
        self.rows().append(("+", number))

    def add_from_before(self, tensor: torch.Tensor) -> None:
        """Count memory that existed before the step and that no operator of the step has made."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            number = self.add(storage)
            self.memory[number] = Memory(storage.nbytes(), Where(-1, "build", -1), "batch")

    def add_death(self, address: int, number: int) -> None:
        if self.numbers.get(address) == number:
            del self.numbers[address]
            self.alive.pop(number, None)
            self.memory[number].died = self.where
            self.rows().append(("-", number))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP frees and reallocates the memory of unsharded weights by resizing their storage: it
        dies and is born again."""
        previous = self.numbers.get(storage._cdata)
        if previous is not None:
            if self.memory[previous].size == size:
                return
            self.add_death(storage._cdata, previous)
        number = self.add(storage)
        self.add_birth(number, size)
        self.memory[number].kind = "working weights"

    def tag(self, tensors: object, kind: str) -> None:
        for tensor in tensors_in(tensors):
            self.memory[self.number(shard_of(tensor))].kind = kind

    # Operators.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's wrapper, which turns the compiler off in a mode, costs time at every operator.
        What is traced is never compiled."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            # More than half of all calls, and they neither compute nor allocate. A kernel that is
            # being run reports another device.
            asked = args[0]
            return func(asked) if asked.fake_mode.in_kernel_invocation else asked.fake_device
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch brings it back with plain tensors
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self.label(func, args)
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if self.propagating:
            return func(*args, **kwargs)
        if args and isinstance(args[0], FakeTensor):
            if func is functional.wait_tensor.default:
                self.end_flight(args[0])
                return args[0]
            if func is aten._local_scalar_dense.default:
                return 1.0  # a loss, a gradient norm, and that they are finite
        if func in cp.INSIDE:
            return self.look_inside(func, args)
        in_backward = torch._C._current_graph_task_id() != -1
        inputs = tensors_in((args, kwargs))
        out = quick.run(func, self.fake, args, kwargs, inputs)
        self.account(func, args, kwargs, out, in_backward, inputs)
        return out

    def look_inside(self, func, args: tuple) -> object:
        """Run what an operator of context parallelism does, so that its collectives and kernels are
        seen."""
        # tables of where the pieces of sequences are: made before, and shared by all blocks
        for table in args:
            if isinstance(table, torch.Tensor) and table.dtype == torch.int32:
                self.add_from_before(table)
        first = next(self.counter)
        super().__enter__()  # a mode is off while it handles an operator
        self.inside_context = True
        try:
            return cp.INSIDE[func](*args)
        finally:
            super().__exit__(None, None, None)
            self.inside_context = False
            for number in range(first + 1, next(self.counter)):
                if (memory := self.memory[number]).died:
                    memory.kind = "gathered keys and values"

    def account(
        self,
        func,
        args: tuple,
        kwargs: dict,
        out: object,
        in_backward: bool,
        inputs: list[torch.Tensor],
    ) -> None:
        source = None
        if func.is_view:
            source = args[0]
        elif func is aten.copy_.default:
            source = args[1]
        if isinstance(source, torch.Tensor) and source.untyped_storage()._cdata not in self.numbers:
            # memory that no operator made: gloo's reduce-scatter works on its own clone
            return
        if func is functional._wrap_tensor_autograd.default:
            return  # AsyncCollectiveTensor: a wrapper, which has no memory
        known = {self.number(t) for t in inputs}
        made = [t for t in tensors_in(out) if self.number(t) not in known]
        if func in COLLECTIVES:
            op = self.collective(func, args, [*inputs, *made])
            op.inputs = known
            terms = self.terms_of(known)
            if op.kind == "reduce-scatter" and len(terms) > 1:
                op.summed_weights = sum(terms)
            if not op.background:
                self.terms.clear()
            self.rows().append(op)
            if op.kind == "all-to-all" and op.dimension in EXCHANGES:
                op.flight = len(self.rows())
                self.flights[self.numbers[out.untyped_storage()._cdata]] = op.flight
            return
        _, name = func._schema.name.split("::")
        if func.namespace in COLLECTIVE_NAMESPACES and name not in MOVES_NOTHING:
            raise NotImplementedError(f"tools/plan/trace.py does not know the collective {func}")
        if func.namespace == "fsdp":
            self.tag_fsdp(func, args, kwargs)
        if made or func._schema.is_mutable:  # otherwise it is a view
            op = self.computation(func, args, kwargs, inputs, made)
            op.inputs = known
            if in_backward:
                self.note_terms(func, args, known, out)
            # In backward, only recomputation records a graph, or runs the forward of attention or
            # of a grouped GEMM.
            forward = func in (GROUPED_FORWARD, DELTA_RULE_FORWARD)
            forward = forward or (func in ATTENTION and "backward" not in op.name)
            if in_backward and (torch.is_grad_enabled() or forward):
                op.recomputed = op.matmul_flops + op.attention_flops
            if op.matmul_flops or op.attention_flops or "empty" not in op.name:
                self.rows().append(op)

    def terms_of(self, storages: set[int]) -> list[int]:
        return [size for number in storages for size in self.terms.get(number, [])]

    def note_terms(self, func, args: tuple, known: set[int], out: object) -> None:
        """Remember what a sum of GEMMs is made of."""
        if func in MATMULS:
            terms = [nbytes(args[-1])]
        elif func in SUMS:
            terms = self.terms_of(known)
        else:
            return
        for tensor in tensors_in(out):
            self.terms[self.number(tensor)] = terms

    def collective(self, func, args: tuple, tensors: list[torch.Tensor]) -> Op:
        """tensors: the arguments and the result. The larger side is what NCCL's tests call a
        collective's size."""
        kind = COLLECTIVES[func]
        message = max(tensors, key=nbytes)
        op = Op(str(func), kind=kind, message=nbytes(message))
        group = group_of(args).group_name
        in_blocks = self.where.phase in IN_BLOCKS and "loss" not in self.labels
        op.dimension = self.dimension(group)
        # Mesh dimensions with the same ranks share a group, so the operator must tell them apart:
        # FSDP's collectives are c10d's, and outside of attention only MoE layers call all-to-all.
        if in_blocks and func.namespace == "_c10d_functional":
            all_to_all = kind == "all-to-all" and not self.inside_context
            if all_to_all and group == self.experts_group:
                op.dimension = "ep"
            elif group == self.context_group:
                op.dimension = "cp"
        # the all-reduce of the loss blocks
        op.background = func.namespace == "c10d" and in_blocks and op.message > 8
        if kind == "all-to-all" and self.where.phase == "optimizer":
            op.dimension = STAGE  # parallelisms/gather_matrices.py
        shape = message.shape
        if len(shape) > 1 and shape[0] == self.moe_layers:
            if not 0 <= self.where.block < len(self.job.model.layers):
                op.bytes_per_moe_layer = op.message // self.moe_layers
        return op

    def end_flight(self, rows: torch.Tensor) -> None:
        """End the flight of a collective that the code waits for. That matters for those of
        EXCHANGES, which continue while something else is computed."""
        number = self.numbers.get(rows.untyped_storage()._cdata)
        if flight := self.flights.pop(number, 0):
            self.rows().append(Op("wait", flight=flight))

    def computation(
        self, func, args: tuple, kwargs: dict, inputs: list[torch.Tensor], made: list[torch.Tensor]
    ) -> Op:
        op = Op(str(func))
        op.wait = func.namespace == "fsdp" and "split_with_sizes_copy" in op.name
        if func in ATTENTION:
            # Backward makes five matmuls. The first repeats the scores, which flash attention does
            # not keep.
            is_backward = "backward" in op.name
            needed, recomputed = (4, 1) if is_backward else (2, 0)
            one, unmasked = ATTENTION[func](*args)
            q = args[1 if is_backward else 0]
            width = q.shape[-1]
            padded = width - (self.value_width or width)
            # half of the matmuls involve the values
            padding = needed * (one // width) * padded // 2
            op.attention_flops = (needed + recomputed) * one
            op.recomputed = recomputed * one + padding
            op.head_width = width
            op.attention_rows = (needed + recomputed) * math.prod(q.shape[:-1])
            op.attention_unmasked = (needed + recomputed) * unmasked
        elif func in MATMULS and has_no_vector(*args[-2:]):
            left, right = args[-2:]
            op.matmul_flops = 2 * math.prod(left.shape) * right.shape[-1]
            op.operands = sum(map(nbytes, [left, right, *made]))
        elif func in GROUPED:
            rows, other, counts = args
            width = rows.shape[1] * other.shape[1]
            if other.ndim == 3:  # the weights of the groups
                width = other[0].numel()
            op.groups = len(counts)
            op.rows = len(rows)
            op.operands = sum(map(nbytes, [*inputs, *made]))
            op.matmul_flops = 2 * len(rows) * width
        elif func in DELTA_RULE:
            place, forwards, needed = DELTA_RULE[func]
            k, v = args[place : place + 2]
            one = delta_rule.chunked_flops(
                v.shape[0] * v.shape[1], v.shape[2], k.shape[3], v.shape[3]
            )
            op.matmul_flops = forwards * one
            # what chunks compute beyond the recurrence, too
            of_recurrence = 2 * GatedDeltaCore.products * v.numel() * k.shape[3]
            op.recomputed = max(0, forwards * one - needed * of_recurrence)
            op.operands = sum(map(nbytes, [*inputs, *made]))
        elif "empty" not in op.name:
            written = {id(t) for t in tensors_in(self.mutated(func, args, kwargs))}
            only_written = {id(t) for t in tensors_in(kwargs.get("out"))}
            op.reads = self.moved(t for t in inputs if id(t) not in only_written)
            op.writes = self.moved(made + [t for t in inputs if id(t) in written])
            op.traffic = sum(op.reads.values()) + sum(op.writes.values())
        return op

    def moved(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Return moved bytes by storage. What several views of a storage share is moved once."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            number = self.number(tensor)
            size = sizes.get(number, 0) + nbytes(tensor)
            sizes[number] = min(size, self.memory[number].size)
        return sizes

    @staticmethod
    def mutated(func, args: tuple, kwargs: dict) -> list:
        """Return the arguments that an operator writes to."""
        values = [*zip(func._schema.arguments, args)]
        values += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        return [value for a, value in values if a.alias_info is not None and a.alias_info.is_write]

    def tag_fsdp(self, func, args: tuple, kwargs: dict) -> None:
        name = func._schema.name
        if name == "fsdp::all_gather_copy_in":
            self.tag(args[1], "collective buffers")
            # Weights that are kept in forward's type are gathered from where they lie.
            self.tag([t for t in args[0] if not self.is_state(t)], "collective buffers")
        elif name == "fsdp::split_with_sizes_copy":
            self.tag(kwargs["out"], "working weights")
        elif name == "fsdp::chunk_cat":
            self.tag(args[0], "whole gradients")
            self.tag(kwargs["out"], "collective buffers")

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor lives between steps."""
        return self.memory[self.number(shard_of(tensor))].born.phase == "build"

    def dimension(self, group_name: str) -> str:
        if group_name not in self.dimensions:
            self.dimensions[group_name] = f"group {len(self.dimensions)}"
        return self.dimensions[group_name]

    def __enter__(self) -> "Trace":
        """Patch three functions of PyTorch whose effect no operator shows."""
        trace = self
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached
        make_room = FSDPParam.init_all_gather_outputs

        def watched_resize(storage, size):
            out = resize(storage, size)
            trace.resized(storage, size)
            return out

        # called in the first step; on one rank no operator of FSDP fills the buffer
        def watched_room(param, *how, **more):
            make_room(param, *how, **more)
            trace.tag(param.all_gather_outputs, "working weights")

        # shapes are found by operators on fake tensors, no memory of the step
        def unwatched_propagation(propagator, schema):
            trace.propagating += 1
            try:
                return propagate(propagator, schema)
            finally:
                trace.propagating -= 1

        patch(
            self.patches,
            (torch.UntypedStorage, "resize_", watched_resize),
            (FSDPParam, "init_all_gather_outputs", watched_room),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", unwatched_propagation),
        )
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.patches.close()

    # The place in the step.
    def label(self, func, args: tuple) -> None:
        """Note that a `record_function` begins or ends. Those of `train.train_step`, and in a
        pipeline the actions of its schedule, are the phases. Others do not matter."""
        if "enter" not in func._schema.name:
            self.labels.pop()
            return
        phase = args[0]
        self.labels.append(phase)
        self.phases.add(phase)
        if self.job is None:
            return
        if action := ACTION.fullmatch(phase):
            phase = action[1]
            self.backward = action[1]
            block = -1 if phase == "forward" else self.where.block
            self.where = Where(int(action[2]), phase, block)
        elif any(ACTION.fullmatch(label) for label in self.labels):
            return  # the labels inside an action say nothing more
        elif phase == "forward":
            self.where = Where(self.where.micro + 1, "forward", -1)
        elif phase == "backward":
            self.where = self.where._replace(phase="backward")
        elif phase == "clip":
            self.where = self.where._replace(phase="clip", block=-1)
            self.tag(
                [p.grad for p in self.job.model.parameters() if p.grad is not None], "gradients"
            )
        elif phase == "optimizer":
            self.where = self.where._replace(phase="optimizer", block=-1)

    def watch(self, job: train.Job) -> None:
        """Follow the step of this job: its phases by their labels, its blocks by hooks on them."""
        self.job = job
        mesh = job.mesh
        layers = list(job.model.layers.values())
        self.dimensions[dist.group.WORLD.group_name] = "all ranks"
        if mesh.experts_mesh:
            # a dimension below with the same ranks overwrites the name
            for dim in "dp_replicate", "edp", "ep":
                self.dimensions[mesh.experts_mesh.get_group(dim).group_name] = dim
            self.experts_group = mesh.experts_mesh.get_group("ep").group_name
        for dim, group in groups_of(mesh).items():
            if dim not in ("edp", "ep"):
                self.dimensions[group.group_name] = dim
        self.value_width = getattr(job.args, "value_dim", 0)
        self.moe_layers = sum(len(stage.mixtures()) for stage in pp.stages_of(job.model))
        self.context_group = mesh.device_mesh.get_group("cp").group_name
        if mesh.to_lower is not None:
            self.dimensions[mesh.to_lower.group_name] = "pp"

        def move_to(phase: str, block: int):
            def hook(*_):
                self.where = self.where._replace(phase=phase or self.backward, block=block)

            return hook

        def backward_begins_at(block: int):  # when the gradient of this tensor is complete
            def hook(_, inputs, outputs=None):
                tensor = inputs[0]
                if outputs is not None:
                    tensor = outputs[0] if isinstance(outputs, tuple) else outputs
                if tensor.requires_grad:
                    tensor.register_hook(move_to("", block))

            return hook

        layers[0].register_forward_pre_hook(backward_begins_at(-1), prepend=True)
        for i, block in enumerate(layers):
            block.register_forward_pre_hook(move_to("forward", i), prepend=True)
            # before FSDP's hook, which unshards for backward
            block.register_forward_hook(backward_begins_at(i), prepend=True)
        layers[-1].register_forward_hook(move_to("forward", len(layers)))

    @staticmethod
    def block_of(name: str, job: train.Job) -> int:
        """Return the block that a parameter belongs to, from 0 in this rank's part of the model;
        -1: none."""
        layer = re.match(r"layers\.(\d+)\.", name)
        return list(job.model.layers).index(layer[1]) if layer else -1

    # Before and after the step.
    def settle(self, job: train.Job) -> None:
        """Call before the step: marks all that exists now as parameters and optimizer state, and
        drops the record of how it was made."""
        gc.collect()
        # Stage by stage, because the copy of a tied weight is no parameter of the whole pipeline.
        stages = pp.stages_of(job.model)
        kinds = []
        for stage in stages:
            for name, p in stage.named_parameters():
                is_frozen = is_frozen_weight(p, job)
                kinds.append((name, p, "frozen weights" if is_frozen else "parameters"))
        names = {id(p): name for name, p, _ in kinds}
        for p, state in job.optimizer.state.items():
            kinds += [(names[id(p)], t, "optimizer state") for t in state.values()]
        # parallelisms/master_weights.py::keep_master_weights
        for stage in stages:
            copies = getattr(stage, "working_copies", {})
            kinds += [(names[id(p)], copy, "working weights") for p, copy in copies.items()]
        self.stretches = []
        self.births = {}
        alive = set(self.numbers.values())
        self.memory = {number: memory for number, memory in self.memory.items() if number in alive}
        for memory in self.memory.values():
            memory.born = Where(-1, "build", -1)
            memory.kind = memory.kind or "other"
        for name, tensor, kind in kinds:
            self.where = Where(-1, "build", self.block_of(name, job))
            self.tag(tensor, kind)
            self.memory[self.number(shard_of(tensor))].born = self.where
        self.stretches = []
        self.births = {}
        self.where = Where(-1, "start", -1)

    def step(self, job: train.Job) -> Step:
        """Return the trace since `settle`, with the kind of every storage. Raises InputError where
        a phase has no label."""
        has_loss = any(stage.last for stage in pp.stages_of(job.model))
        expected = [phase for phase in PHASES if has_loss or phase != "loss"]
        missing = [phase for phase in expected if phase not in self.phases]
        if missing:
            raise InputError(
                f"train.train_step has no record_function({missing[0]!r}): the planner finds the "
                "phases of a step "
                f"by the labels {', '.join(PHASES)}; put them around the code that they name"
            )
        self.alive.clear()  # what dies with the job is no part of the step
        parameters: dict[int, Parameters] = {}
        for name, p in job.model.named_parameters():
            block = parameters.setdefault(self.block_of(name, job), Parameters())
            if p.requires_grad or is_frozen_weight(p, job):
                block.gathered += p.numel() // shared_for_good(p)
            if not p.requires_grad:
                # else it is a router's bias, which no optimizer moves
                if is_frozen_weight(p, job):
                    block.frozen += p.numel()
                continue
            block.elements += p.numel()
            block.local_bytes += nbytes(shard_of(p))
        groups = {}
        for dim, group in groups_of(job.mesh).items():
            groups[dim] = dist.get_process_group_ranks(group)
        microbatches = max(s.where.micro for s in self.stretches) + 1
        step = Step(
            self.stretches,
            self.memory,
            len(job.model.layers),
            microbatches,
            groups,
            parameters,
            moe_layers=self.moe_layers,
        )
        if self.drops_unread:
            keep_what_backward_reads(step)
        for memory in self.memory.values():
            memory.kind = memory.kind or kind_by_life(memory)
        fuse(step)
        return step


def is_frozen_weight(param: nn.Parameter, job: train.Job) -> bool:
    """Return whether a parameter is a weight that is not trained. A router's bias is none: no
    optimizer moves it, and its module does."""
    is_known = job.cfg.lora.rank > 0 or isinstance(param, DTensor) or param.ndim > 1
    return is_known and not param.requires_grad


def groups_of(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """Return by mesh dimension: this rank's groups; FSDP's, which is over two dimensions where
    there is context parallelism; and those of expert parallelism."""
    dims = mesh.device_mesh.mesh_dim_names
    groups = {dim: mesh.device_mesh.get_group(dim) for dim in dims}
    if mesh.experts_mesh:
        groups |= {dim: mesh.experts_mesh.get_group(dim) for dim in ("edp", "ep")}
    for dim in ep_hosts.PEERS, ep_hosts.HOST:
        if dim in mesh.more_groups:
            groups[dim] = mesh.more_groups[dim]
    sharded = mesh.fsdp_mesh.mesh_dim_names[-1]
    if sharded not in dims:
        groups[sharded] = mesh.fsdp_mesh.get_group(sharded)
    return groups


def shared_for_good(p: nn.Parameter) -> int:
    """Return the number of ranks over which a weight stays sharded while FSDP has it unsharded:
    those of tensor and expert parallelism."""
    if not isinstance(p, DTensor):
        return 1
    ranks = 1
    dims = zip(p.device_mesh.mesh_dim_names, p.device_mesh.shape, p.placements)
    for name, size, placement in dims:
        if name in ("tp", "ep") and not placement.is_replicate():
            ranks *= size
    return ranks


def kind_by_life(memory: Memory) -> str:
    """Return the kind of an untagged storage, by when it is born and when it dies."""
    born = memory.born
    died = memory.died
    if born.phase == "start":
        return "batch"
    kept = died is None or died.phase != "forward" or died.micro != born.micro
    if born.phase == "forward" and kept:
        return "activations"
    return "backward's temporaries" if memory.born.phase in IN_BLOCKS[1:] else "temporaries"


# A simulated run.
def slices_of_real(starts: torch.Tensor) -> list[slice]:
    """Return the slices that models/kernels/document_attention.py reads from a table of pieces. The
    table is real, where all other tensors are fake."""
    with unset_fake_temporarily():
        return _slices(starts)


_slices = document_attention.slices


def attention_on_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute on fake tensors as models/kernels/causal_attention.py does on CUDA, not as on CPUs."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def pieces_on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: VarlenMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as models/kernels/document_attention.py::piece_attention does on CUDA."""
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *pieces, 0.0, True, False)
    return out, lse.t().contiguous()


def pieces_backward_on_gpu(
    grad: torch.Tensor, saved: Saved, pieces: VarlenMetadata
) -> tuple[torch.Tensor, ...]:
    """Compute as its backward does on CUDA."""
    random_state = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
    *tensors, lse = saved
    lse = lse.t().contiguous()
    return aten._flash_attention_backward(grad, *tensors, lse, *pieces, 0.0, True, *random_state)


def rms_norm_on_gpu(*args) -> torch.Tensor:
    """Dispatch RMSNorm as CUDA does: to one fused operator that saves its input and one number per
    row. CPU tensors would take PyTorch's composite, which saves several float32 copies."""
    return aten._fused_rms_norm(*args)[0]


ON_GPU = (
    (F, "rms_norm", rms_norm_on_gpu),
    (causal_attention, "causal_attention", attention_on_gpu),
    (ruled_attention, "piece_attention", pieces_on_gpu),
    (ruled_attention, "piece_attention_backward", pieces_backward_on_gpu),
)


@contextmanager
def pretend(world_size: int, per_host: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a simulated world: PyTorch's fake process group, and torchrun's
    environment. PyTorch's warnings about such a mesh are silenced, for example that its groups have
    no time limit.
    """
    names = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
    }
    environment = {name: str(value) for name, value in names.items()}
    log = logging.getLogger("torch.distributed")
    with (
        mock.patch.dict(os.environ, environment),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        level = log.level
        log.setLevel(logging.ERROR)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            log.setLevel(level)
            # what DTensor has found for a mesh names its groups, which are gone; the next mesh may
            # be equal
            _clear_sharding_prop_cache()


def changed(cfg: Config, **tables: dict[str, Any]) -> Config:
    """Return the configuration with other values of some options."""
    new = {name: getattr(cfg, name).model_copy(update=table) for name, table in tables.items()}
    return cfg.model_copy(update=new)


def tracing(cfg: Config) -> Config:
    """Return the configuration as it is traced: on CPU tensors, uncompiled and unrecorded, every
    sequence one document, matmuls in the weights' dtype."""
    return changed(
        cfg,
        run={"device": "cpu", "deterministic": False},
        compile={"enabled": False, "cuda_graphs": False},
        data={"mask_documents": False},
        training={"float8": "none", "attention": "auto", "delta_rule": "auto"},
        parallelism={"async_tensor_parallel": False},
        metrics={"noise_scale_interval": 0},
    )


def batch_of(job: train.Job, microbatches: int) -> dict[str, torch.Tensor]:
    """Return a rank's batch: tokens and labels, int64 [microbatches, b, tokens of this rank in each
    sequence]."""
    t = job.cfg.training
    shape = (microbatches, t.local_batch_size, t.seq_len // job.mesh.cp)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
    depth = tokens_ahead(job.cfg.model)
    if depth:
        ahead = (*shape[:2], depth, shape[2])
        batch |= {name: torch.zeros(ahead, dtype=torch.int64) for name in AHEAD}
    return batch


def prepare(job: train.Job) -> None:
    """Bring the job to its state after a first step, without taking one: FSDP's buffers padded, or
    on one rank the weights copied to the type of forward; and the optimizer's state there."""
    for stage in pp.stages_of(job.model):
        if isinstance(stage, FSDPModule):
            stage._get_fsdp_state()._lazy_init()
        else:
            for hook in stage._forward_pre_hooks.values():
                hook(stage, ())
    materialise(job.optimizer)


@contextmanager
def fake_job(
    cfg: Config, world_size: int, per_host: int, rank: int, routing: Routing
) -> Iterator[tuple[train.Job, FakeTensorMode]]:
    """Build a rank's job of a simulated world, by `train.build`, with weights that have a shape and no
    memory, and the mode that makes such tensors. cfg: as `tracing` returns it."""
    with pretend(world_size, per_host, rank), ExitStack() as stack:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        to_empty = nn.Module.to_empty

        # the mesh and FSDP read real tensors; only memory is made up
        def fake_to_empty(module, **how):
            with fake:
                return to_empty(module, **how)

        patch(
            stack,
            (nn.Module, "to_empty", fake_to_empty),
            (init, "fill", lambda *_: None),
            (_fsdp_param, "_chunk_with_empty", quick.Shards),
            (document_attention, "slices", slices_of_real),
            (Mesh, "timeout", lambda _: timedelta(0)),  # the fake group has none
            # a stage that is traced alone has its gathers where they are needed
            # (tools/plan/pipeline.py::first_forwards)
            (fsdp_details, "gather_ahead", lambda _: None),
        )
        job = train.build(cfg)
        if job.mesh.ep > 1:
            tokens = cfg.training.local_batch_size * cfg.training.seq_len
            tokens //= job.mesh.cp * job.mesh.tp * cfg.parallelism.expert_chunks
            rows = tokens * job.args.experts_per_token
            sizes = routing.all_to_all_splits(rows, job.mesh.ep)
            patch(stack, (ep_dispatch, "rows_per_rank", lambda *_: sizes))
        if ep_hosts.PEERS in job.mesh.more_groups:
            hosts = job.mesh.ep // per_host
            by_host = routing.hosts_and_ranks(tokens, job.args, hosts, per_host)
            patch(stack, (ep_hosts, "on_the_host", lambda *_: by_host))
        yield job, fake


def trace_step(
    cfg: Config,
    world_size: int,
    per_host: int,
    on_gpu: bool,
    most: int = 3,
    rank: int = 0,
    routing: Routing = BALANCED,
) -> Step:
    """Trace the step of a rank with all its layers, but with at most `most` microbatches: the
    first, the last and one in between. With expert parallelism it is the rank that gets the most
    rows."""
    drops_unread = cfg.compile.enabled and cfg.activation_checkpoint.mode == "selective"
    cfg = tracing(cfg)
    with ExitStack() as stack:
        job, fake = stack.enter_context(fake_job(cfg, world_size, per_host, rank, routing))
        trace = Trace(fake, drops_unread)
        stack.enter_context(fake)
        if on_gpu:
            patch(stack, *ON_GPU)
        stack.enter_context(trace)
        prepare(job)
        microbatches = cfg.training.microbatches(job.mesh.dp_size)
        batch = batch_of(job, min(most, microbatches))
        return run_step(trace, job, batch, microbatches)


def run_step(
    trace: Trace, job: train.Job, batch: dict[str, torch.Tensor], microbatches: int
) -> Step:
    """Trace one step of a job that has taken one already; `batch` may stand for a longer one of
    `microbatches`."""
    trace.tag(list(batch.values()), "batch")
    trace.settle(job)
    trace.watch(job)
    gc.disable()  # as a run does: memory must not depend on when the collector runs
    try:
        train.train_step(job, batch)
    finally:
        gc.enable()
    step = trace.step(job)
    traced = len(batch["tokens"])
    if microbatches > traced:
        step.repeats = microbatches - 2
        for memory in step.memory.values():
            if memory.kind == "batch" and memory.shape == batch["tokens"].shape:
                memory.size = memory.size // traced * microbatches
    return step
