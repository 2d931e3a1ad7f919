"""A traced training step as data: the memory that comes and goes, the operators and the
collectives, block by block.

`trace.py` records it, `repeat.py` extends it to more layers, `estimate.py` gives it a time,
`report.py` and `page.py` show it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

GIB = 2**30

# Phases that belong to blocks. A pipeline may split the backward (parallelisms/schedules.py).
IN_BLOCKS = ("forward", "backward", "backward_input", "backward_weight")

OUTSIDE = {  # the other phases -> their printed name
    "start": "before the first forward",
    "clip": "clipping",
    "optimizer": "the optimizer",
}

KINDS = {  # of memory, in the order in which a report lists them -> their printed name
    "parameters": "parameters (float32 shards)",
    "frozen weights": "frozen weights (shards)",
    "optimizer state": "optimizer state",
    "gradients": "gradients (shards)",
    "whole gradients": "gradients not yet reduced",
    "working weights": "gathered weights, in forward's type",
    "collective buffers": "collective buffers",
    "activations": "activations",
    "logits and loss": "logits and loss",
    "backward's temporaries": "backward's temporaries",
    "gathered keys and values": "gathered keys and values, and their gradients",
    "temporaries": "forward's temporaries",
    "batch": "batch",
    "other": "other",
}


class Where(NamedTuple):
    """Stretch of the step. Blocks are numbered from 0; -1 is everything before the first block,
    `Step.layers` everything after the last."""

    micro: int  # number of the microbatch; -1 before the first
    phase: str  # build (before the step), start, one of IN_BLOCKS, clip, optimizer
    block: int


@dataclass(slots=True)
class Memory:
    """Memory of one storage. Some kinds follow from its lifetime, which is known only after the
    step."""

    size: int  # bytes
    born: Where
    kind: str = ""
    order: int = 0  # number among the storages born in the same stretch
    died: Where | None = None
    shape: tuple[int, ...] = ()  # of the first tensor in it


@dataclass(slots=True)
class Op:
    """Costs of one operator."""

    name: str
    matmul_flops: int = 0
    attention_flops: int = 0
    # what kernels do beyond half of these, where a window leaves no triangle of a causal mask
    attention_unmasked: int = 0
    attention_rows: int = 0  # queries of every head, times attention's matmuls
    head_width: int = 0  # numbers of a query
    recomputed: int = 0  # those of the FLOPs above that are recomputation or padding
    groups: int = 0  # weights of a grouped GEMM (models/kernels/grouped_product.py)
    rows: int = 0  # of a grouped GEMM
    operands: int = 0  # bytes of a matmul's inputs and outputs
    traffic: int = 0  # bytes read and written, for memory-bound operators
    fused: int = 0  # what is left of `traffic` when neighbouring operators are compiled into one
    kind: str = ""  # of collective; "" for any other operator
    dimension: str = ""  # of the mesh, for a collective
    message: int = 0  # bytes of a collective
    # bytes that a collective outside the blocks carries for each MoE layer
    bytes_per_moe_layer: int = 0
    background: bool = False  # a collective on FSDP's stream, which overlaps with compute
    # of a reduce-scatter that sends a sum of GEMMs in backward: bytes of their weights
    summed_weights: int = 0
    wait: bool = False  # FSDP's copy-out, which waits for its all-gather
    # of an exchange of experts, and of the "wait" for it: which of its stretch, from 1
    flight: int = 0
    reads: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    writes: dict[int, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)  # storages, also of a matmul

    @property
    def attended_flops(self) -> float:
        """Return the FLOPs that attention's kernel computes: a causal mask leaves half."""
        return self.attention_flops / 2 + self.attention_unmasked


@dataclass
class Stretch:
    """Consecutive events of one place in the step."""

    where: Where
    # ("+", storage), ("-", storage) or Op, in the order in which they happened; a storage is a
    # number
    rows: list


@dataclass
class Parameters:
    """Totals of one block, or (block -1) of everything outside the blocks. The first two are of
    what is trained."""

    elements: int = 0
    local_bytes: int = 0
    gathered: int = 0  # elements on a rank while FSDP has the block unsharded
    frozen: int = 0  # elements of frozen weights under adapters


def fsdp_dimension(groups: dict[str, list[int]]) -> str:
    """Return the name of the group that FSDP shards over. With context parallelism it is dp_shard
    and cp as one."""
    return "dp_shard_cp" if "dp_shard_cp" in groups else "dp_shard"


STAGE = "stage"  # the ranks that have the same layers, as a dimension of collectives


def ranks_of_stage(groups: dict[str, list[int]]) -> list[int]:
    """Return the ranks of STAGE: the mesh numbers them one after another."""
    size = 1
    for dim in "dp_replicate", "dp_shard", "cp", "tp":
        size *= len(groups.get(dim, [0]))
    first = min(groups.get("dp_replicate", [0]))
    return list(range(first, first + size))


class Curve:
    """Memory over a step, for classes that know `before`, the bytes by kind before the step, and
    `curve`: (place, kind, bytes more or less) in order."""

    def peak(self, before: dict[str, int] | None = None) -> tuple[int, Where, dict[str, int]]:
        """Return the most bytes that live at one time, where in the step that is, and those bytes
        by kind. before: in the place of what lives before the step."""
        live = self.before() if before is None else dict(before)
        total = highest = sum(live.values())
        place = Where(-1, "start", -1)
        at_peak = dict(live)
        for where, kind, change in self.curve():
            live[kind] = live.get(kind, 0) + change
            total += change
            if total > highest:
                highest = total
                place = where
                at_peak = dict(live)
        return highest, place, {kind: size for kind, size in at_peak.items() if size}

    def highest_by_kind(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Return the most bytes of each kind that live at one time. The times may differ between
        kinds."""
        live = self.before() if before is None else dict(before)
        highest = dict(live)
        for _, kind, change in self.curve():
            live[kind] = live.get(kind, 0) + change
            highest[kind] = max(highest.get(kind, 0), live[kind])
        return highest


@dataclass
class Step(Curve):
    """Step of one rank, whole. `memory` also holds what existed before it, whose birth is in the
    phase "build"."""

    stretches: list[Stretch]
    memory: dict[int, Memory]
    layers: int
    microbatches: int  # that were traced; the middle one of three represents `repeats`
    # mesh dimension -> ranks of this rank's group; with context parallelism also FSDP's
    groups: dict[str, list[int]]
    parameters: dict[int, Parameters]  # by block
    repeats: int = 1
    moe_layers: int = 0  # in this rank's part of the model

    def times(self, where: Where) -> int:
        """Return how often a stretch happens in the real step."""
        return self.repeats if where.micro == 1 and where.phase in IN_BLOCKS else 1

    def ops(self) -> Iterator[tuple[Where, int, Op]]:
        """Yield every operator, with its place and how often it happens."""
        for stretch in self.stretches:
            times = self.times(stretch.where)
            for row in stretch.rows:
                if isinstance(row, Op):
                    yield stretch.where, times, row

    def before(self) -> dict[str, int]:
        """Return the bytes by kind that live before the step: weights and optimizer state."""
        sizes: dict[str, int] = {}
        for memory in self.memory.values():
            if memory.born.phase == "build":
                sizes[memory.kind] = sizes.get(memory.kind, 0) + memory.size
        return sizes

    def curve(self) -> Iterator[tuple[Where, str, int]]:
        """(place, kind, bytes more or less) of every birth and every death, in order."""
        for stretch in self.stretches:
            for row in stretch.rows:
                if not isinstance(row, Op):
                    event, number = row
                    memory = self.memory[number]
                    change = memory.size if event == "+" else -memory.size
                    yield stretch.where, memory.kind, change

    def of(self, stretches: list[Stretch]) -> "Step":
        """Return a part of the step by itself."""
        return replace(self, stretches=stretches, repeats=1)

    def change(self) -> dict[str, int]:
        """Return the bytes by kind that live more or less after the step than before."""
        total: dict[str, int] = {}
        for _, kind, size in self.curve():
            total[kind] = total.get(kind, 0) + size
        return total

    def flops(self) -> tuple[int, int]:
        """FLOPs of the rank: the needed ones, and those of recomputation."""
        counted = recomputed = 0
        for _, times, op in self.ops():
            counted += times * (op.matmul_flops + op.attention_flops - op.recomputed)
            recomputed += times * op.recomputed
        return counted, recomputed

    def place(self, where: Where) -> str:
        """Name the place in the step for the report."""
        if where.phase not in IN_BLOCKS:
            return OUTSIDE[where.phase]
        block = f"block {where.block + 1} of {self.layers}"
        if not 0 <= where.block < self.layers:
            block = "the embedding" if where.block < 0 else "the output and loss"
        micro = ""
        if self.microbatches > 1:
            micro = ", a middle microbatch"
            if where.micro == self.microbatches - 1:
                micro = ", last microbatch"
            elif where.micro == 0:
                micro = ", first microbatch"
        return f"{where.phase} of {block}{micro}"


def keep_what_backward_reads(step: Step) -> None:
    """Let the other activations of blocks end with their block. Selective checkpointing keeps what its
    policy names; compiled, only what of it backward reads."""
    read = read_in_backward(step)
    ended: dict[Where, list[int]] = {}
    for number, memory in step.memory.items():
        born = memory.born
        died = memory.died
        in_block = born.phase == "forward" and 0 <= born.block < step.layers
        if not in_block or memory.kind or died is None or died.phase not in IN_BLOCKS[1:]:
            continue
        if number not in read:
            memory.died = born
            ended.setdefault(born, []).append(number)
    dead = {number for numbers in ended.values() for number in numbers}
    for stretch in step.stretches:
        rows = [
            row
            for row in stretch.rows
            if isinstance(row, Op) or row[0] == "+" or row[1] not in dead
        ]
        stretch.rows = rows + [("-", number) for number in ended.get(stretch.where, [])]


def read_in_backward(step: Step) -> set[int]:
    """Return the storages that backward reads to compute something that is read in turn.
    Recomputation without a compiler also repeats what nothing needs."""
    needed = {number for number, memory in step.memory.items() if memory.died is None}
    read: set[int] = set()
    for stretch in reversed(step.stretches):
        in_backward = stretch.where.phase in IN_BLOCKS[1:]
        for row in reversed(stretch.rows):
            if not isinstance(row, Op):
                continue
            made = row.writes.keys() - row.inputs
            if in_backward and made and not made & needed and row.writes.keys() == made:
                continue
            needed |= row.inputs
            if in_backward:
                read |= row.inputs
    return read


def fuse(step: Step) -> None:
    """Find what a compiler saves: a run of memory-bound operators moves only the run's inputs and
    outputs.

    A run ends at a matmul, a collective, one of FSDP's copies and the end of the block. Sets
    `Op.fused`, then drops the record of what each operator read and wrote.
    """
    for stretch in step.stretches:
        run: list[Op] = []
        deaths = {
            row[1]: i
            for i, row in enumerate(stretch.rows)
            if not isinstance(row, Op) and row[0] == "-"
        }
        for i, row in enumerate(stretch.rows):
            if not isinstance(row, Op):
                continue
            if row.traffic and not row.name.startswith(("fsdp", "aten._foreach")):
                run.append(row)
            else:
                row.fused = row.traffic
                _end_run(run, i, deaths)
        _end_run(run, len(stretch.rows), deaths)
    for _, _, op in step.ops():
        op.reads = op.writes = op.inputs = None


def _end_run(run: list[Op], end: int, deaths: dict[int, int]) -> None:
    """Give the last operator of `run`, which ends before row `end`, the whole run's traffic; and
    empty it."""
    entered: dict[int, int] = {}
    written: dict[int, int] = {}
    for op in run:
        for storage, size in op.reads.items():
            if storage not in written:
                entered[storage] = max(size, entered.get(storage, 0))
        written |= op.writes
    if run:
        left = (size for storage, size in written.items() if deaths.get(storage, math.inf) > end)
        run[-1].fused = sum(entered.values()) + sum(left)
    run.clear()
