"""One training step seen operator by operator: every byte that comes to life and dies, every product, every collective.

`traced` runs the *same* `train.build` and `train.train_step` as a run does, on PyTorch's fake process
group with fake tensors: shapes and lifetimes without memory and without time, for rank 0 of any world. `Trace` is the
accountant; it also accounts real steps on real ranks, and the tests compare the two.

A large model is traced with few layers. Its step is then put together from theirs (`with_layers`): a middle block's events are
repeated, each reference to a block's memory shifted with it. That is exact where neighbouring middle blocks do the same
thing, which is compared, event by event; where they do not, all layers are traced.
"""

import gc
import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import train
from configs import check
from configs.schema import Config, InputError
from models.kernels import causal_attention
from parallelisms import mesh as meshes
from training import init
from reliability.collectives import group_of

PHASES = ("forward", "loss", "backward", "clip", "optimizer")  # labels of train.train_step; the loss is within forward
c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
# operator -> kind of collective, where its message is (the larger side: what NCCL's tests call the size of a collective)
COLLECTIVES = {
    c10d._allgather_base_.default: ("all-gather", lambda args, out: args[0]),
    c10d._reduce_scatter_base_.default: ("reduce-scatter", lambda args, out: args[1]),
    c10d.allreduce_.default: ("all-reduce", lambda args, out: args[0][0]),
    functional.all_gather_into_tensor.default: ("all-gather", lambda args, out: out),
    functional.all_gather_into_tensor_out.default: ("all-gather", lambda args, out: out),
    functional.reduce_scatter_tensor.default: ("reduce-scatter", lambda args, out: args[0]),
    functional.all_reduce.default: ("all-reduce", lambda args, out: args[0]),
    functional.all_reduce_.default: ("all-reduce", lambda args, out: args[0]),
}
UNKNOWN_COLLECTIVES = ("c10d", "_c10d_functional")  # anything else of these that moves data must not go unnoticed
HARMLESS = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}
aten = torch.ops.aten


def _scores(q: torch.Tensor, k: torch.Tensor) -> int:
    """FLOPs of one of attention's products, T x E x T for every head; not halved for being causal."""
    b, h, t, e = q.shape
    return 2 * b * h * t * k.shape[-2] * e


# Backward makes five of these products; the first is the scores once more, which flash attention does not keep.
ATTENTION = {  # operator -> (position of q, products, products that are recomputation)
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 4, 1),
    torch.ops.plumbline.causal_attention_backward.default: (1, 4, 1),  # models/kernels/causal_attention.py
}


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    return 2 * math.prod(a.shape) * b.shape[-1]


PRODUCTS = {aten.mm.default: 0, aten.mm.out: 0, aten.bmm.default: 0, aten.addmm.default: 1}  # -> position of the left factor


class Where(NamedTuple):
    """A stretch of the step. Blocks are numbered from 0; -1 is what comes before them, `layers` what comes after."""

    micro: int  # micro-batch; -1: before the first
    phase: str  # build, start, forward, backward, clip, optimizer
    block: int


@dataclass(slots=True)
class Memory:
    """One storage. Kinds that follow from what is done with it are found when the step is over."""

    size: int
    born: Where
    kind: str = ""
    order: int = 0  # number among the storages born in the same stretch
    died: Where | None = None


@dataclass(slots=True)
class Op:
    """What one operator costs. `wait`: the copy out of a gathered buffer, which waits for its all-gather."""

    name: str
    product_flops: int = 0
    attention_flops: int = 0
    attention_rows: int = 0  # queries, of every head, times products
    again: int = 0  # FLOPs among these that repeat what was computed before: recomputation
    traffic: int = 0  # bytes read and written, for operators that are bound by that
    fused: int = 0  # what is left of `traffic` when neighbouring operators are compiled into one
    kind: str = ""  # of collective
    dimension: str = ""  # of the mesh
    message: int = 0  # bytes
    background: bool = False  # beside computation: FSDP's collectives
    wait: bool = False
    reads: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    writes: dict[int, int] = field(default_factory=dict)


@dataclass
class Stretch:
    where: Where
    rows: list  # ("+", storage), ("-", storage) or Op, in the order they happened; a storage is a number


@dataclass
class Parameters:
    """Of one block, or (-1) of all that is in no block."""

    tensors: int = 0
    elements: int = 0
    local_bytes: int = 0


@dataclass
class Step:
    """A whole step of one rank. What existed before it is in `memory` too: its birth is in the phase "build"."""

    stretches: list[Stretch]
    memory: dict[int, Memory]
    layers: int
    micro_batches: int  # traced; the middle one of three stands for `repeats`
    groups: dict[str, list[int]]  # mesh dimension -> ranks of this rank's group
    parameters: dict[int, Parameters]
    repeats: int = 1

    def times(self, where: Where) -> int:
        """How often a stretch happens in the real step."""
        return self.repeats if where.micro == 1 and where.phase in ("forward", "backward") else 1

    def ops(self) -> Iterator[tuple[Where, int, Op]]:
        """Every operator, with how often it happens."""
        for stretch in self.stretches:
            times = self.times(stretch.where)
            for row in stretch.rows:
                if isinstance(row, Op):
                    yield stretch.where, times, row

    def before(self) -> dict[str, int]:
        """Bytes by kind that live before the step: weights, optimizer state."""
        return totals(m for m in self.memory.values() if m.born.phase == "build")

    def curve(self) -> Iterator[tuple[Where, str, int]]:
        """(where, kind, bytes more or less), birth by birth and death by death."""
        for stretch in self.stretches:
            for row in stretch.rows:
                if not isinstance(row, Op):
                    memory = self.memory[row[1]]
                    yield stretch.where, memory.kind, memory.size if row[0] == "+" else -memory.size

    def peak(self) -> tuple[int, Where, dict[str, int]]:
        """The most bytes that live at a time, where in the step, and what they are."""
        live = self.before()
        now = most = sum(live.values())
        at, shown = Where(-1, "start", -1), dict(live)
        for where, kind, change in self.curve():
            live[kind] = live.get(kind, 0) + change
            now += change
            if now > most:
                most, at, shown = now, where, dict(live)
        return most, at, {kind: size for kind, size in shown.items() if size}


def totals(memories: Iterable[Memory]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for memory in memories:
        sums[memory.kind] = sums.get(memory.kind, 0) + memory.size
    return sums


class Trace(TorchDispatchMode):
    """Accounts what runs under it; `watch` tells it where in the step that is. The operators still run."""

    def __init__(self) -> None:
        super().__init__()
        self.where = Where(-1, "build", -1)
        self.stretches: list[Stretch] = []
        self.memory: dict[int, Memory] = {}
        self.numbers: dict[int, int] = {}  # address of a living storage -> its number
        self.watched: dict[int, weakref.ref] = {}
        self.born: dict[Where, int] = {}
        self.counter = count()
        self.labels: list[str] = []  # `record_function`s that are open, of anyone
        self.phases: set[str] = set()  # labels that have been seen
        self.job: train.Job | None = None  # whose step is followed; see `watch`
        self.propagating = 0
        self.dimensions: dict[str, str] = {}  # name of a process group -> mesh dimension
        self.stack = ExitStack()

    # Memory.
    def rows(self) -> list:
        if not self.stretches or self.stretches[-1].where != self.where:
            self.stretches.append(Stretch(self.where, []))
        return self.stretches[-1].rows

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; one that was not seen before is born now."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.numbers:
            return self.numbers[address]
        number = self.numbers[address] = next(self.counter)
        self.watched[number] = weakref.ref(storage, lambda _: self.die(address, number))
        self.come_to_life(number, storage.nbytes())
        return number

    def come_to_life(self, number: int, size: int) -> None:
        order = self.born[self.where] = self.born.get(self.where, -1) + 1
        self.memory[number] = Memory(size, self.where, "logits and loss" if "loss" in self.labels else "", order)
        self.rows().append(("+", number))

    def die(self, address: int, number: int) -> None:
        if self.numbers.get(address) == number:
            del self.numbers[address]
            self.watched.pop(number, None)
            self.memory[number].died = self.where
            self.rows().append(("-", number))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP frees and takes back the memory of gathered weights by resizing their storage: it dies and is born again."""
        address, number = storage._cdata, next(self.counter)
        if address in self.numbers:
            old = self.numbers[address]
            if self.memory[old].size == size:
                return
            self.die(address, old)
        self.numbers[address] = number
        self.watched[number] = weakref.ref(storage, lambda _: self.die(address, number))
        self.come_to_life(number, size)
        self.memory[number].kind = "working weights"

    def tag(self, tensors: object, kind: str) -> None:
        for tensor in tree_iter(tensors):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.memory[self.number(local)].kind = kind

    # Operators.
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # their own dispatch brings it back with plain tensors
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self.label(func, args)
        if self.propagating or func.namespace == "profiler":
            return func(*args, **kwargs)
        if args and isinstance(args[0], FakeTensor):
            if func is functional.wait_tensor.default:
                return args[0]
            if func is aten._local_scalar_dense.default:
                return 1.0  # a loss, a gradient norm, and that they are fine
        backward = torch._C._current_graph_task_id() != -1
        out = func(*args, **kwargs)
        self.account(func, args, kwargs, out, backward)
        return out

    def account(self, func, args, kwargs, out, backward: bool) -> None:
        source = args[0] if func.is_view else args[1] if func is aten.copy_.default else None
        if isinstance(source, torch.Tensor) and source.untyped_storage()._cdata not in self.numbers:
            return  # memory that no operator made: gloo's reduce-scatter works on a clone of its own
        if func is functional._wrap_tensor_autograd.default:
            return  # AsyncCollectiveTensor: a wrapper, which has no memory
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        known = {self.number(t) for t in inputs}
        made = [t for t in outputs if self.number(t) not in known]
        op = Op(str(func))
        if func in COLLECTIVES:
            op.kind, message = COLLECTIVES[func]
            tensor = message(args, out)
            op.message = tensor.numel() * tensor.element_size()
            op.dimension = self.dimension(group_of(args).group_name)
            op.background = func.namespace == "c10d" and self.where.phase in ("forward", "backward") and "loss" not in self.labels
            op.background &= op.message > 8  # the sum of the loss is waited for
            self.rows().append(op)
            return
        if func.namespace in UNKNOWN_COLLECTIVES and func._schema.name.split("::")[1] not in HARMLESS:
            raise NotImplementedError(f"tools/plan/trace.py does not know the collective {func}")
        if func.namespace == "fsdp":
            self.tag_fsdp(func, args, kwargs)
            op.wait = "split_with_sizes_copy" in op.name
        mutable = func._schema.is_mutable
        if not made and not mutable:
            return  # a view
        if func in ATTENTION:
            at, products, again = ATTENTION[func]
            one = _scores(args[at], args[at + 1])
            op.attention_flops, op.again = (products + again) * one, again * one
            op.attention_rows = (products + again) * math.prod(args[at].shape[:3])
        elif func in PRODUCTS:
            at = PRODUCTS[func]
            op.product_flops = _product(args[at], args[at + 1])
        elif "empty" not in op.name:
            written = [id(t) for t in tree_iter(self.mutated(func, args, kwargs)) if isinstance(t, torch.Tensor)]
            only_written = {id(t) for t in tree_iter(kwargs.get("out"))}
            op.reads = self.moved(t for t in inputs if id(t) not in only_written)
            op.writes = self.moved(made + [t for t in inputs if id(t) in written])
            op.traffic = sum(op.reads.values()) + sum(op.writes.values())
        else:
            return
        if backward and torch.is_grad_enabled():  # of all backward only recomputation records a graph
            op.again = op.product_flops + op.attention_flops
        self.rows().append(op)

    def moved(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Bytes by storage; what several views of it share is moved once."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            number = self.number(tensor)
            size = sizes.get(number, 0) + tensor.numel() * tensor.element_size()
            sizes[number] = min(size, self.memory[number].size)
        return sizes

    @staticmethod
    def mutated(func, args, kwargs) -> list:
        """The arguments that an operator writes to."""
        rows = zip(func._schema.arguments, args)
        rows = [*rows, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]
        return [value for a, value in rows if a.alias_info is not None and a.alias_info.is_write]

    def tag_fsdp(self, func, args, kwargs) -> None:
        name = func._schema.name
        if name == "fsdp::all_gather_copy_in":
            self.tag(args[1], "collective buffers")
            self.tag(args[0], "collective buffers")
        elif name == "fsdp::split_with_sizes_copy":
            self.tag(kwargs["out"], "working weights")
        elif name == "fsdp::chunk_cat":
            self.tag(args[0], "whole gradients")
            self.tag(kwargs["out"], "collective buffers")

    def dimension(self, name: str) -> str:
        if name not in self.dimensions:
            self.dimensions[name] = f"group {len(self.dimensions)}"
        return self.dimensions[name]

    def __enter__(self) -> "Trace":
        original, non_cached = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
        make_room = FSDPParam.init_all_gather_outputs
        trace = self

        def resize_(storage, size):
            out = original(storage, size)
            trace.resized(storage, size)
            return out

        def init_all_gather_outputs(param, *how):  # in the first step; on one rank no operator of FSDP's fills them
            make_room(param, *how)
            trace.tag(param.all_gather_outputs, "working weights")

        def propagate(self, schema):  # DTensor finds shapes by running operators on fake tensors: no memory of the step
            trace.propagating += 1
            try:
                return non_cached(self, schema)
            finally:
                trace.propagating -= 1

        self.stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        self.stack.enter_context(mock.patch.object(FSDPParam, "init_all_gather_outputs", init_all_gather_outputs))
        self.stack.enter_context(mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate))
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.stack.close()

    # Where in the step.
    def label(self, func, args: tuple) -> None:
        """A `record_function` is entered or left: the phases of `train.train_step` are labels, and others do not matter."""
        if "enter" not in func._schema.name:
            self.labels.pop()
            return
        self.labels.append(args[0])
        self.phases.add(args[0])
        if self.job is None:
            return
        if args[0] == "forward":
            self.where = Where(self.where.micro + 1, "forward", -1)
        elif args[0] == "backward":
            self.where = self.where._replace(phase="backward")
        elif args[0] == "clip":
            self.where = self.where._replace(phase="clip", block=-1)
            self.tag([p.grad for p in self.job.model.parameters() if p.grad is not None], "gradients")
        elif args[0] == "optimizer":
            self.where = self.where._replace(phase="optimizer", block=-1)

    def watch(self, job: train.Job) -> None:
        """Follow this job's step: its phases by their labels, and through the blocks of forward and backward."""
        self.job = job
        mesh, layers = job.mesh, list(job.model.layers.values())
        for dim in mesh.device_mesh.mesh_dim_names:
            self.dimensions[mesh.device_mesh.get_group(dim).group_name] = dim

        def at(phase: str, block: int):
            def move(*_):
                self.where = self.where._replace(phase=phase, block=block)

            return move

        def backward_begins_at(block: int):  # when the gradient of this tensor is whole
            def hook(_, inputs, outputs=None):
                tensor = inputs[0] if outputs is None else outputs
                if tensor.requires_grad:
                    tensor.register_hook(at("backward", block))

            return hook

        layers[0].register_forward_pre_hook(backward_begins_at(-1), prepend=True)
        for i, block in enumerate(layers):
            block.register_forward_pre_hook(at("forward", i), prepend=True)
            block.register_forward_hook(backward_begins_at(i), prepend=True)  # before FSDP's, which gathers for backward
        layers[-1].register_forward_hook(at("forward", len(layers)))

    def settle(self, job: train.Job) -> None:
        """Call before the step: what exists now is parameters and optimizer state; forget how it came to be."""
        gc.collect()
        kinds = [(name, p, "parameters") for name, p in job.model.named_parameters()]
        names = {id(p): name for name, p, _ in kinds}
        for p, state in job.optimizer.state.items():
            kinds += [(names[id(p)], t, "optimizer state") for t in state.values()]
        for path, module in job.model.named_modules():  # parallelisms/dp.py::keep_masters
            copies = [vars(module).get(name) for name, _ in module.named_parameters(recurse=False)]
            kinds += [(f"{path}.", copy, "working weights") for copy in copies if copy is not None]
        self.stretches, self.born = [], {}
        alive = set(self.numbers.values())
        self.memory = {number: memory for number, memory in self.memory.items() if number in alive}
        for memory in self.memory.values():
            memory.born, memory.kind = Where(-1, "build", -1), memory.kind or "other"
        for name, tensor, kind in kinds:
            self.where = Where(-1, "build", block_of(name))
            self.tag(tensor, kind)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.memory[self.number(local)].born = self.where
        self.stretches, self.born = [], {}
        self.where = Where(-1, "start", -1)

    def step(self, job: train.Job) -> Step:
        """What was traced since `settle`, with every storage's kind known."""
        self.watched.clear()  # what dies with the job is no part of the step
        for memory in self.memory.values():
            if memory.kind:
                continue
            kept = memory.died is None or memory.died.phase != "forward" or memory.died.micro != memory.born.micro
            if memory.born.phase == "start":
                memory.kind = "batch"
            elif memory.born.phase == "forward" and kept:
                memory.kind = "activations"
            elif memory.born.phase == "backward":
                memory.kind = "backward's temporaries"
            else:
                memory.kind = "temporaries"
        parameters: dict[int, Parameters] = {}
        for name, p in job.model.named_parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            of = parameters.setdefault(block_of(name), Parameters())
            of.tensors, of.elements = of.tensors + 1, of.elements + p.numel()
            of.local_bytes += local.numel() * local.element_size()
        mesh = job.mesh.device_mesh
        groups = {dim: dist.get_process_group_ranks(mesh.get_group(dim)) for dim in mesh.mesh_dim_names}
        micro = max(s.where.micro for s in self.stretches) + 1
        step = Step(self.stretches, self.memory, len(job.model.layers), micro, groups, parameters)
        fuse(step)
        return step


def block_of(name: str) -> int:
    """The block that a parameter belongs to; -1: none."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return int(layer[1]) if layer else -1


def fuse(step: Step) -> None:
    """Find what a compiler saves: of a run of operators bound by memory only what enters and what leaves is moved.

    A run ends at a product, a collective, one of FSDP's copies and the end of the block. Sets `Op.fused` and forgets what
    each operator read and wrote.
    """
    for stretch in step.stretches:
        run: list[Op] = []
        ends = {row[1]: i for i, row in enumerate(stretch.rows) if not isinstance(row, Op) and row[0] == "-"}

        def close(now: int) -> None:
            entered: dict[int, int] = {}
            left: dict[int, int] = {}
            for op in run:
                for number, size in op.reads.items():
                    if number not in left:
                        entered[number] = max(size, entered.get(number, 0))
                left |= op.writes
            if run:
                run[-1].fused = sum(entered.values()) + sum(size for n, size in left.items() if ends.get(n, math.inf) > now)
            run.clear()

        for i, row in enumerate(stretch.rows):
            if isinstance(row, Op):
                if row.traffic and not row.name.startswith(("fsdp", "aten._foreach")):
                    run.append(row)
                else:
                    row.fused = row.traffic
                    close(i)
        close(len(stretch.rows))
    for _, _, op in step.ops():
        op.reads = op.writes = None

def attention_on_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What models/kernels/causal_attention.py does on CUDA, instead of its way on CPUs."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class AsOnGPU(TorchFunctionMode):
    """Sends RMSNorm where CUDA sends it, to one fused operator that keeps its input and one number per row; CPU tensors
    would take PyTorch's composite, which keeps several float32 copies."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.rms_norm:
            return aten._fused_rms_norm(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def pretend(world_size: int, per_host: int) -> Iterator[None]:
    """This process as rank 0 of a world that does not exist: PyTorch's fake process group, and torchrun's environment."""
    names = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": per_host}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            with mock.patch.object(meshes.Mesh, "set_timeout", lambda *_: None):  # groups that never wait have none
                yield
        finally:
            dist.destroy_process_group()


def tracing(cfg: Config) -> Config:
    """The configuration as it is traced: on CPU tensors, uncompiled, every document attended whole, products as wide as weights."""
    return cfg.model_copy(update={
        "run": cfg.run.model_copy(update={"device": "cpu", "deterministic": False}),
        "compile": cfg.compile.model_copy(update={"enabled": False}),
        "data": cfg.data.model_copy(update={"mask_documents": False}),
        "training": cfg.training.model_copy(update={"float8": "none", "attention": "auto"}),
        "parallelism": cfg.parallelism.model_copy(update={"async_tensor_parallel": False}),
    })  # fmt: skip


def batch_of(job: train.Job, micro_batches: int) -> dict[str, torch.Tensor]:
    t = job.cfg.training
    shape = (micro_batches, t.local_batch_size, t.seq_len)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}


def prepare(job: train.Job) -> None:
    """Bring the job to the state after a first step, without taking one: FSDP's buffers padded, or on one rank the weights
    copied to the type of forward; the optimizer's state there."""
    if isinstance(job.model, FSDPModule):
        job.model._get_fsdp_state()._lazy_init()
    else:
        for hook in job.model._forward_pre_hooks.values():
            hook(job.model, ())
    for p in job.model.parameters():
        p.grad = torch.zeros_like(p)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)


def trace_step(cfg: Config, world_size: int, per_host: int, on_gpu: bool, most: int = 3) -> Step:
    """The step of rank 0 with all its layers, but with at most three micro-batches: first, last and one in between."""
    cfg = tracing(cfg)
    with pretend(world_size, per_host), ExitStack() as stack:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        trace = Trace()
        to_empty = nn.Module.to_empty

        def fake_to_empty(module, **how):  # the mesh and FSDP read real tensors; only memory is made up
            with fake:
                return to_empty(module, **how)

        stack.enter_context(mock.patch.object(nn.Module, "to_empty", fake_to_empty))
        stack.enter_context(mock.patch.object(init, "fill", lambda *_: None))
        job = train.build(cfg)
        stack.enter_context(fake)
        if on_gpu:
            stack.enter_context(AsOnGPU())
            stack.enter_context(mock.patch.object(causal_attention._CPUAttention, "apply", attention_on_gpu))
        stack.enter_context(trace)
        prepare(job)
        micro_batches = accumulation(cfg, job.mesh.dp_size)
        batch = batch_of(job, min(most, micro_batches))
        return run_step(trace, job, batch, micro_batches)


def run_step(trace: Trace, job: train.Job, batch: dict[str, torch.Tensor], micro_batches: int) -> Step:
    """Trace one step of a job that has taken one already; `batch` may stand for a longer one of `micro_batches`."""
    trace.tag(list(batch.values()), "batch")
    trace.settle(job)
    trace.watch(job)
    gc.disable()  # as a run does: memory must not depend on when the collector runs
    try:
        train.train_step(job, batch)
    finally:
        gc.enable()
    if missing := [phase for phase in PHASES if phase not in trace.phases]:
        raise InputError(f"train.train_step has no record_function({missing[0]!r}): the planner finds the phases of a step by "
                         f"the labels {', '.join(PHASES)}; put them around the code that they name")  # fmt: skip
    step = trace.step(job)
    traced, t = len(batch["tokens"]), job.cfg.training
    if micro_batches > traced:
        step.repeats = micro_batches - 2
        for memory in step.memory.values():
            if memory.kind == "batch" and memory.size >= traced * t.local_batch_size * t.seq_len:
                memory.size = memory.size // traced * micro_batches
    return step


def accumulation(cfg: Config, dp_size: int) -> int:
    """Micro-batches of a step."""
    return cfg.training.global_batch_size // (cfg.training.local_batch_size * dp_size)


def traced(cfg: Config, world_size: int, per_host: int, on_gpu: bool) -> Step:
    """The step of rank 0, which has the largest shards. Put together from a few layers where that is exact."""
    layers = check.architecture(cfg.model)["n_layers"]
    period = cfg.activation_checkpoint.every_n if cfg.activation_checkpoint.mode == "every_n" else 1
    # Blocks at either end that may differ: FSDP gathers ahead, and the last ones stay gathered.
    edge = 1 + cfg.parallelism.prefetch + cfg.parallelism.keep_gathered
    few = 2 * edge + 2 * period
    few += (layers - few) % period
    data_parallel = world_size > cfg.parallelism.tensor_parallel  # without FSDP clipping has collectives for each norm
    if few < layers and data_parallel:
        model = cfg.model.model_copy(update={"n_layers": few})
        small = trace_step(cfg.model_copy(update={"model": model}), world_size, per_host, on_gpu)
        step = with_layers(small, layers, edge, period)
        if step is not None:
            return step
    return trace_step(cfg, world_size, per_host, on_gpu)


def with_layers(step: Step, layers: int, edge: int, period: int) -> Step | None:
    """The step of the same model with `layers` blocks, from one with fewer: blocks `edge` ... `edge + period - 1` repeated.

    None where that would not be exact: where those blocks and the next `period` ones do not do the same, event by event.
    """
    copies, rest = divmod(layers - step.layers, period)
    stretches = {stretch.where: stretch for stretch in step.stretches}
    if rest or copies < 0 or len(stretches) < len(step.stretches):
        return None
    unit, after = range(edge, edge + period), edge + period
    for where, stretch in stretches.items():
        if where.block in unit and where.phase in ("forward", "backward"):
            other = stretches.get(where._replace(block=where.block + period))
            if other is None or _relative(stretch, step) != _relative(other, step):
                return None

    memory: dict[int, Memory] = {}
    number: dict[tuple[int, int], int] = {}  # (storage as traced, copy) -> storage
    by_birth = {(m.born, m.order): n for n, m in step.memory.items() if m.born.phase != "build"}
    more = copies * period

    def moved(where: Where, copy: int = 0) -> Where:
        block = where.block
        if where.phase in ("build", "forward", "backward") and block >= 0:
            block += copy * period if block in unit else more if block >= after else 0
        return where._replace(block=block)

    for n, m in step.memory.items():
        for copy in range(copies + 1 if m.born.block in unit else 1):
            number[n, copy] = len(memory)
            memory[len(memory)] = replace(m, born=moved(m.born, copy), died=m.died and moved(m.died, copy))

    def storages(n: int, where: Where, copy: int) -> list[int]:
        """What storage n is for a stretch that stands for another block."""
        born, order = step.memory[n].born, step.memory[n].order
        if not 0 <= born.block < step.layers or born.phase == "build":
            return [number[n, 0]]
        if not 0 <= where.block < step.layers or where.phase not in ("forward", "backward"):
            return [number[n, c] for c in range(copies + 1 if born.block in unit else 1)]
        block = moved(where, copy).block + born.block - where.block  # in the new step; back to the one that was traced:
        again = min(max(0, (block - edge) // period), copies) if block >= edge else 0
        traced = block - again * period
        return [number[by_birth[born._replace(block=traced), order], again if traced in unit else 0]]

    def copy_of(stretch: Stretch, copy: int) -> Stretch:
        rows = []
        for row in stretch.rows:
            rows += [row] if isinstance(row, Op) else [(row[0], n) for n in storages(row[1], stretch.where, copy)]
        return Stretch(moved(stretch.where, copy), rows)

    made: list[Stretch] = []
    for stretch in step.stretches:
        where = stretch.where
        if where.phase in ("forward", "backward") and where.block in unit:
            ascending = where.phase == "forward"
            if where.block == (unit[-1] if ascending else unit[0]):  # the last of the unit to happen: all copies of it
                order = range(copies + 1) if ascending else range(copies, -1, -1)
                blocks = unit if ascending else reversed(unit)
                pieces = [stretches[where._replace(block=block)] for block in blocks]
                made += [copy_of(piece, copy) for copy in order for piece in pieces]
        else:
            made.append(copy_of(stretch, 0))

    parameters = {moved(Where(-1, "build", b), c).block: p for b, p in step.parameters.items() for c in range(copies + 1)}
    whole = Step(made, memory, layers, step.micro_batches, step.groups, parameters, step.repeats)
    _scale(whole, step)
    return whole


def _relative(stretch: Stretch, step: Step) -> list:
    """What happens in a block, with blocks numbered from this one."""
    rows = []
    for row in stretch.rows:
        if isinstance(row, Op):
            rows.append(row)
            continue
        m = step.memory[row[1]]
        inside = 0 <= m.born.block < step.layers
        born = m.born._replace(block=m.born.block - stretch.where.block) if inside else m.born
        rows.append((row[0], m.size, m.kind, born, inside, m.order))
    return rows


def _scale(step: Step, few: Step) -> None:
    """Clipping and the optimizer work on all parameters in one go: their traffic grows with the number of elements, the
    message that completes the norms with the number of tensors."""
    elements, tensors = (
        [sum(getattr(p, name) for p in s.parameters.values()) for s in (few, step)] for name in ("local_bytes", "tensors")
    )
    for stretch in step.stretches:
        if stretch.where.phase in ("clip", "optimizer"):
            for i, row in enumerate(stretch.rows):
                if isinstance(row, Op) and row.traffic:
                    traffic = row.traffic * elements[1] // elements[0]
                    stretch.rows[i] = replace(row, traffic=traffic, fused=traffic)
                elif isinstance(row, Op) and row.message == 4 * tensors[0]:
                    stretch.rows[i] = replace(row, message=4 * tensors[1])
