"""Gather whole matrices of sharded weights, for an optimizer whose update is a function of the
whole matrix (training/muon.py).

Every matrix is computed once, by one rank. The matrices are assigned to the ranks by cost, the
largest first, each to the rank that has the least to do among those that hold a part of it. An
all-to-all sends the parts to their owner, and a second one sends the results back to every rank
that holds a part. Weights of experts are stacks of matrices: the experts that are whole on one rank
are computed there and sent nowhere.

With replicas (HSDP, DDP) a matrix is gathered inside the replica of its owner, and the result goes
to all replicas. So they share the work too, and stay bitwise equal.

Shapes:  X matrices in a stack, 1 for a weight that is a matrix   R rows   C columns
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.boxes import every_box

# A rank gathers so many elements at a time, or one matrix if that is larger: 128 MiB in bfloat16.
ROUND_ELEMENTS = 1 << 26

Range = tuple[int, int]
Box = tuple[Range, Range, Range]  # begin and end along X, R and C


def stacked(tensor: Tensor) -> Tensor:
    """Return a matrix as a stack of one: [R, C] -> [1, R, C]."""
    return tensor if tensor.ndim == 3 else tensor[None]


def size_of(box: Box) -> int:
    size = 1
    for begin, end in box:
        size *= max(0, end - begin)
    return size


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Return the slices of a box in a tensor that begins at `origin`."""
    return tuple(slice(b - o, e - o) for (b, e), (o, _) in zip(box, origin, strict=True))


class Task(NamedTuple):
    """One matrix, or some consecutive ones of a stack, with the ranks that send, compute and
    receive it. Ranks are global."""

    weight: int  # its position in the list of weights
    experts: Range
    owner: int  # computes it
    senders: dict[int, Box]  # these boxes together are the whole, each element once
    receivers: dict[int, Box]  # what every rank holds of it


@dataclass
class Layout:
    """The part of a weight that each rank holds."""

    shape: tuple[int, int, int]
    boxes: dict[int, Box]  # global rank -> its part; a rank with an empty part is not there
    coordinates: dict[int, tuple[int, ...]]  # of the ranks in the weight's mesh
    replicated: tuple[int, ...] = ()  # mesh dimensions whose ranks hold the same part

    def replica(self, rank: int) -> tuple[int, ...]:
        return tuple(self.coordinates[rank][dim] for dim in self.replicated)


def layout_of(weight: Tensor, this_rank: int) -> Layout:
    """Return the layout of a weight. Raises ValueError for a weight that is neither a matrix nor a
    stack of matrices, or whose placement is no shard and no replica."""
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"a weight of shape {list(weight.shape)} is no matrix and no stack of them"
        )
    shape = tuple(weight.shape) if weight.ndim == 3 else (1, *weight.shape)
    if not isinstance(weight, DTensor):
        whole = tuple((0, length) for length in shape)
        return Layout(shape, {this_rank: whole}, {this_rank: ()})
    ranks = weight.device_mesh.mesh
    boxes: dict[int, Box] = {}
    coordinates = {}
    for coordinate, box in every_box(weight):
        rank = int(ranks[coordinate])
        coordinates[rank] = coordinate
        of_stack = ranges(box)
        if size_of(of_stack):
            boxes[rank] = of_stack
    kinds = enumerate(weight.placements)
    replicated = tuple(mesh_dim for mesh_dim, kind in kinds if kind.is_replicate())
    return Layout(shape, boxes, coordinates, replicated)


def ranges(box: tuple[list[int], list[int]]) -> Box:
    """Return a box of a matrix or of a stack of matrices as ranges of a stack."""
    of_dims = [(start, start + length) for start, length in zip(*box, strict=True)]
    return tuple(of_dims) if len(of_dims) == 3 else ((0, 1), *of_dims)


def clipped(box: Box, experts: Range) -> Box:
    """Return the part of a box that belongs to these matrices of the stack."""
    (begin, end), *rest = box
    return ((max(begin, experts[0]), min(end, experts[1])), *rest)


def deal(layouts: Sequence[Layout], cost: Callable[[int, int], float]) -> list[Task]:
    """Assign every matrix of these weights to an owner; the same list on all ranks.

    cost: of a matrix with so many rows and columns.
    """
    tasks: list[Task] = []
    shared: list[tuple[float, int, Range, dict[int, Box]]] = []
    loads: dict[int, float] = {}
    for number, layout in enumerate(layouts):
        each = cost(*layout.shape[1:])
        for experts, holders in held_together(layout):
            if len(holders) == 1:
                ((rank, _),) = holders.items()
                loads[rank] = loads.get(rank, 0.0) + each * (experts[1] - experts[0])
                tasks.append(Task(number, experts, rank, holders, holders))
                continue
            for expert in range(*experts):
                one = (expert, expert + 1)
                parts = {rank: clipped(box, one) for rank, box in holders.items()}
                shared.append((each, number, one, parts))
    shared.sort(key=lambda row: -row[0])
    for each, number, experts, holders in shared:
        owner = min(holders, key=lambda rank: (loads.get(rank, 0.0), rank))
        loads[owner] = loads.get(owner, 0.0) + each
        layout = layouts[number]
        replica = layout.replica(owner)
        senders = {r: box for r, box in holders.items() if layout.replica(r) == replica}
        tasks.append(Task(number, experts, owner, senders, holders))
    return tasks


def held_together(layout: Layout) -> Iterator[tuple[Range, dict[int, Box]]]:
    """Yield runs of matrices that the same ranks hold, with the part that each of these holds."""
    edges = sorted({edge for box in layout.boxes.values() for edge in box[0]})
    for experts in zip(edges, edges[1:], strict=False):
        holders = {}
        for rank, box in layout.boxes.items():
            part = clipped(box, experts)
            if size_of(part):
                holders[rank] = part
        yield experts, holders


def rounds_of(tasks: Sequence[Task], layouts: Sequence[Layout]) -> list[dict[int, list[Task]]]:
    """Group the tasks that need collectives, by owner, in rounds: in each an owner gathers at most
    ROUND_ELEMENTS, or one matrix."""
    rounds: list[dict[int, list[Task]]] = []
    reached: dict[int, tuple[int, int]] = {}  # owner -> its last round, elements in it
    for task in tasks:
        if len(task.receivers) == 1:
            continue
        shape = layouts[task.weight].shape
        size = shape[1] * shape[2]
        number, filled = reached.get(task.owner, (0, 0))
        if filled and filled + size > ROUND_ELEMENTS:
            number, filled = number + 1, 0
        reached[task.owner] = number, filled + size
        while len(rounds) <= number:
            rounds.append({})
        rounds[number].setdefault(task.owner, []).append(task)
    return rounds


class MatrixPart(NamedTuple):
    """A box of a weight in a buffer that is sent to or received from a rank."""

    weight: int
    box: Box


@dataclass
class Round:
    """This rank's share of a round."""

    # of each rank of the group, in its order
    gives: list[list[MatrixPart]] = field(default_factory=list)
    gets: list[list[MatrixPart]] = field(default_factory=list)
    gives_back: list[list[MatrixPart]] = field(default_factory=list)
    gets_back: list[list[MatrixPart]] = field(default_factory=list)
    # weight -> the matrices of it that this rank computes, in order
    own: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, by_owner: dict[int, list[Task]], ranks: list[int], me: int) -> "Round":
        mine = by_owner.get(me, [])
        here = cls()
        for task in mine:
            here.own.setdefault(task.weight, []).append(task.experts[0])
        for rank in ranks:
            theirs = by_owner.get(rank, [])
            here.gives.append(
                [MatrixPart(t.weight, t.senders[me]) for t in theirs if me in t.senders]
            )
            here.gets.append(
                [MatrixPart(t.weight, t.senders[rank]) for t in mine if rank in t.senders]
            )
            here.gives_back.append(
                [MatrixPart(t.weight, t.receivers[rank]) for t in mine if rank in t.receivers]
            )
            here.gets_back.append(
                [MatrixPart(t.weight, t.receivers[me]) for t in theirs if me in t.receivers]
            )
        return here


@dataclass
class AllToAll:
    """An all-to-all that has begun."""

    sent: Tensor  # kept until it is over
    received: Tensor
    parts: list[MatrixPart]  # in `received`, one after another
    work: Any

    def wait(self) -> Iterator[tuple[MatrixPart, Tensor]]:
        """Wait, and yield each part with its values, flat."""
        self.work.wait()
        sizes = [size_of(part.box) for part in self.parts]
        yield from zip(self.parts, self.received.split(sizes), strict=True)


class GatheredMatrices:
    """Applies a function to the whole matrices of sharded tensors."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        cost: Callable[[int, int], float],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """weights: all that `apply` gets tensors for; the same on every rank of `group`, which has
        all ranks that hold a part of them. None, if no weight is shared. cost: of a matrix with so
        many rows and columns."""
        self.group = group
        self.me = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_process_group_ranks(group) if group is not None else [self.me]
        known: dict[tuple, Layout] = {}
        self.layouts = []
        for weight in weights:
            key = (
                weight.shape,
                getattr(weight, "device_mesh", 0),
                getattr(weight, "placements", 0),
            )
            if key not in known:
                known[key] = layout_of(weight, self.me)
            self.layouts.append(known[key])
        tasks = deal(self.layouts, cost)
        self.tasks = tasks
        self.alone = [t for t in tasks if t.owner == self.me and len(t.receivers) == 1]
        by_round = rounds_of(tasks, self.layouts)
        if by_round and group is None:
            raise ValueError("matrices are sharded over ranks, and there is no group of these")
        self.rounds = [Round.of(by_owner, self.ranks, self.me) for by_owner in by_round]

    def apply(self, shards: list[Tensor], compute: Callable[[Tensor], Tensor]) -> None:
        """Gather whole matrices from these shards of one dtype, apply `compute`, and write the result's
        shards in place. compute: [X, R, C] -> [X, R, C], each matrix separately.

        The next round is gathered while this one is computed.
        """
        shards = [stacked(shard) for shard in shards]
        coming = self.gather(0, shards) if self.rounds else None
        for task in self.alone:
            self.compute_alone(task, shards[task.weight], compute)
        going_back: AllToAll | None = None
        for number, round_ in enumerate(self.rounds):
            assert coming is not None
            wholes = self.assemble(round_, coming, shards)
            if number + 1 < len(self.rounds):
                coming = self.gather(number + 1, shards)
            results = {weight: compute(whole) for weight, whole in wholes.items()}
            del wholes
            if going_back:
                self.put(going_back, shards)
            going_back = self.give_back(round_, results, shards)
        if going_back:
            self.put(going_back, shards)

    def compute_alone(self, task: Task, shard: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Compute a few matrices at a time, which bounds the memory of `compute`."""
        begin = task.experts[0] - self.layouts[task.weight].boxes[self.me][0][0]
        end = begin + task.experts[1] - task.experts[0]
        at_once = max(1, ROUND_ELEMENTS // shard[0].numel())
        for first in range(begin, end, at_once):
            matrices = shard[first : min(first + at_once, end)]
            matrices.copy_(compute(matrices))

    def part_of(self, shard: Tensor, part: MatrixPart) -> Tensor:
        """Return a view of this rank's shard."""
        return shard[slices(part.box, self.layouts[part.weight].boxes[self.me])]

    def gather(self, number: int, shards: list[Tensor]) -> AllToAll:
        """Start to receive this rank's matrices of a round, and to send parts of those of
        others."""
        here = self.rounds[number]
        leaving = [[self.part_of(shards[p.weight], p) for p in parts] for parts in here.gives]
        return self.exchange(leaving, here.gets, shards[0])

    def exchange(
        self, leaving: list[list[Tensor]], coming: list[list[MatrixPart]], like: Tensor
    ) -> AllToAll:
        flat = [tensor.reshape(-1) for tensors in leaving for tensor in tensors]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        to_each = [sum(tensor.numel() for tensor in tensors) for tensors in leaving]
        from_each = [sum(size_of(part.box) for part in parts) for parts in coming]
        received = like.new_empty(sum(from_each))
        work = dist.all_to_all_single(
            received, sent, from_each, to_each, group=self.group, async_op=True
        )
        parts = [part for of_rank in coming for part in of_rank]
        return AllToAll(sent, received, parts, work)

    def assemble(self, here: Round, coming: AllToAll, shards: list[Tensor]) -> dict[int, Tensor]:
        """Return weight -> its matrices that this rank computes, [X, R, C]."""
        wholes = {}
        for weight, numbers in here.own.items():
            shape = self.layouts[weight].shape
            wholes[weight] = shards[weight].new_empty(len(numbers), *shape[1:])
        for part, values in coming.wait():
            place = self.place_of(here, part)
            wholes[part.weight][place].copy_(values.view_as(wholes[part.weight][place]))
        return wholes

    def place_of(self, here: Round, part: MatrixPart) -> tuple[int | slice, ...]:
        """Return the index of a part among the matrices of its weight that this rank computes."""
        (expert, _), rows, columns = part.box
        number = here.own[part.weight].index(expert)
        return number, slice(*rows), slice(*columns)

    def give_back(self, here: Round, results: dict[int, Tensor], shards: list[Tensor]) -> AllToAll:
        leaving = []
        for parts in here.gives_back:
            leaving.append([results[p.weight][self.place_of(here, p)] for p in parts])
        return self.exchange(leaving, here.gets_back, shards[0])

    def put(self, coming: AllToAll, shards: list[Tensor]) -> None:
        for part, values in coming.wait():
            target = self.part_of(shards[part.weight], part)
            target.copy_(values.view_as(target))
