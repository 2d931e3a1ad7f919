"""How a rank writes and reads its part of a checkpoint (`verify.py` describes the files).

Every rank works out from the meshes of the live tensors which parts it writes: a `Plan`, made once
and used as long as names, shapes and placements stay. torch.distributed.checkpoint (DCP) drives
this (`protocol.py`), with planners of ours that need no other rank. Its own planners plan all parts
of all ranks on rank 0, at every save, and gather there what was written: 33 s of processor time at
128 ranks of a 70B model, and more with each rank. Their cached plans (`enable_plan_caching` of
DefaultSavePlanner) save the first half of that only.

DCP's FileSystemWriter is not used: its `.metadata` is a pickle, its items are torch.save archives
whose CRC32 nobody checks, and an error in one of its writer threads is lost (pytorch#191391). Each
of our files is also a valid safetensors file that any tool opens.
"""

import heapq
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint import layout, verify
from checkpoint.layout import Box
from checkpoint.verify import Shard

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# names of tensors that have one row per rank; each rank has its own row, of shape [1, n]
GENERATOR = "rng."
# Of a tensor that several ranks hold, smaller parts than this (bytes) are written by the first of
# them. To spread them would save no time, and would make each rank open many files in order to read
# them.
SMALL = 1 << 16


class NotFinite(ArithmeticError):
    """The state has values that are not finite. No run could go on from it, so none of it is
    published."""


# --------------------------------------------------------------------------------------------------
# who writes what


def cuts(tensor: DTensor) -> list[tuple[int, int]]:
    """(tensor dimension, mesh dimension) of each cut, in the order in which the cuts are made.

    If FSDP shards what tensor parallelism has already cut, FSDP's placement is a `_StridedShard`,
    whose cut comes second although its mesh dimension comes first. Raises ValueError for a
    placement that is no shard and no replica.
    """
    placements = list(enumerate(tensor.placements))
    if not all(p.is_replicate() or hasattr(p, "dim") for _, p in placements):
        raise ValueError(f"a tensor with the placements {tensor.placements} cannot be saved")
    sharded = [
        (p.dim, d, isinstance(p, _StridedShard)) for d, p in placements if not p.is_replicate()
    ]
    return [(dim, d) for dim, d, strided in sorted(sharded, key=lambda cut: cut[2])]


def box_of(name: str, tensor: Tensor) -> Box:
    """The box of the whole tensor that this rank holds."""
    if name.startswith(GENERATOR):
        return [dist.get_rank(), 0], list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return [0] * tensor.ndim, list(tensor.shape)
    mesh, order = tensor.device_mesh, cuts(tensor)
    split = [[dim, mesh.size(d), 1] for dim, d in order]
    return layout.box_at(list(tensor.shape), split, [mesh.get_local_rank(d) for _, d in order])


def strides(mesh: DeviceMesh) -> tuple[int, list[int]]:
    """The first rank of a mesh, and how many ranks further on the next one is along each dimension."""
    ranks = mesh.mesh
    first = int(ranks.flatten()[0])
    steps = [
        int(ranks.select(d, min(1, n - 1)).flatten()[0]) - first for d, n in enumerate(ranks.shape)
    ]
    expected = torch.tensor(first)
    for d, (n, step) in enumerate(zip(ranks.shape, steps, strict=True)):
        expected = expected + (torch.arange(n) * step).view(
            [n if i == d else 1 for i in range(ranks.ndim)]
        )
    if not torch.equal(expected, ranks.to(expected)):
        raise ValueError(f"a mesh whose ranks are not evenly spaced cannot be saved: {ranks}")
    return first, steps


def describe(live: Mapping[str, Tensor], ranks: int, holders: range) -> dict[str, dict]:
    """The rows of these tensors in the manifest (`layout.py`). All ranks that hold a tensor get the
    same row for it, because it follows from its name, its shape and its mesh.

    ranks: of the whole run. holders: the ranks that hold the tensors that are no DTensors, this one
    among them. A tensor that several ranks hold is written by the one that has the fewest bytes of
    such tensors so far.
    """
    rows: dict[str, dict] = {}
    known: dict[int, tuple[int, list[int]]] = {}  # id of a mesh -> its strides
    # replicas of a kind -> a heap of (bytes, distance from the first)
    loads: dict[tuple, list[tuple[int, int]]] = {}
    for name, tensor in live.items():
        shape, dtype = list(tensor.shape), CODES[tensor.dtype]
        if name.startswith(GENERATOR):
            rows[name] = {
                "dtype": dtype,
                "shape": [ranks, shape[1]],
                "first": 0,
                "split": [[0, ranks, 1]],
            }
            continue
        first, split, replicas = holders.start, [], [(len(holders), 1)]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            first, steps = known.setdefault(id(mesh), known.get(id(mesh)) or strides(mesh))
            split = [[dim, mesh.size(d), steps[d]] for dim, d in cuts(tensor) if mesh.size(d) > 1]
            whole = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
            replicas = [(mesh.size(d), steps[d]) for d in whole if mesh.size(d) > 1]
        size = verify.nbytes(dtype, shape) // math.prod(pieces for _, pieces, _ in split)
        if size >= SMALL and replicas:
            load = loads.setdefault(
                (first, *replicas), [(0, distance) for distance in distances(replicas)]
            )
            least, distance = load[0]
            heapq.heapreplace(load, (least + size, distance))
            first += distance
        rows[name] = {"dtype": dtype, "shape": shape, "first": first, "split": split}
    return rows


def distances(replicas: list[tuple[int, int]]) -> list[int]:
    """How far each replica is from the first one, in ranks, in rising order. replicas: (how many,
    stride) by mesh dimension."""
    found = [0]
    for count, stride in replicas:
        found = [distance + i * stride for distance in found for i in range(count)]
    return sorted(found)


def share_rows(rows: dict[str, dict], group: dist.ProcessGroup) -> dict[str, dict]:
    """The rows of all ranks of `group`; every rank calls it. Ranks of another pipeline stage hold
    other tensors.

    It costs one number of each rank if all have the same rows. If not, the first rank of each kind
    sends its rows to all. Where two kinds have a name in common (tied weights of two stages), the
    lower rank's row counts. Raises ValueError if their shapes differ.
    """
    mine = int.from_bytes(
        bytes.fromhex(verify.digest(json.dumps(rows).encode())), "big", signed=True
    )
    kinds = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather(list(kinds), torch.tensor([mine]), group)
    first_of_kind: dict[int, int] = {}
    for rank, kind in enumerate(kinds.flatten().tolist()):
        first_of_kind.setdefault(kind, rank)
    if len(first_of_kind) == 1:
        return rows
    shared: dict[str, dict] = {}
    for rank in first_of_kind.values():
        sent = [rows if rank == dist.get_rank(group) else None]
        dist.broadcast_object_list(sent, group=group, group_src=rank)
        for name, row in sent[0].items():
            other = shared.setdefault(name, row)
            if (other["shape"], other["dtype"]) != (row["shape"], row["dtype"]):
                raise ValueError(
                    f"ranks disagree on {name}: {other['dtype']} {other['shape']}, {row['dtype']} "
                    f"{row['shape']}"
                )
    return shared


@dataclass(frozen=True)
class Plan:
    """What one rank writes. It holds for all states with the same names, shapes, types and
    placements."""

    rows: dict[str, dict]  # all tensors of the checkpoint, as the manifest describes them
    rank: int
    boxes: dict[str, Box]  # the parts that this rank writes, in the order of its file

    @staticmethod
    def make(live: Mapping[str, Tensor], rows: dict[str, dict], rank: int) -> "Plan":
        """rows: of all tensors of all ranks. Raises ValueError if this rank holds another shard
        than its row says."""
        boxes = {name: box for name in live if (box := layout.box_of_rank(rows[name], rank))}
        for name, (_, shape) in boxes.items():
            if shape != list(local(live[name]).shape):
                raise ValueError(
                    f"{name}: a shard of shape {list(local(live[name]).shape)}, {shape} expected"
                )
        # Largest elements first: every part is then aligned to its element size, as in safetensors.
        order = sorted(
            boxes, key=lambda name: (-verify.SIZES[rows[name]["dtype"]], rows[name]["dtype"])
        )
        return Plan(rows, rank, {name: boxes[name] for name in order})

    @cached_property
    def table(self) -> verify.Rows:
        """The rows as `verify.write_manifest` takes them at each save."""
        return verify.Rows(self.rows)

    @cached_property
    def head(self) -> bytes:
        """The head of this rank's file, with a 0 for each digit of a hash."""
        digits = 16 * sum(-(-self.bytes_of(name) // verify.BLOCK) for name in self.boxes)
        table: dict[str, dict] = {verify.METADATA: {"format": "pt", "hashes": "0" * digits}}
        end = 0
        for name, box in self.boxes.items():
            start, end = end, end + self.bytes_of(name)
            row = {"dtype": self.rows[name]["dtype"], "shape": box[1], "data_offsets": [start, end]}
            table[verify.part_name(name, box)] = row
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Of all parts that this rank writes, without the head."""
        return sum(map(self.bytes_of, self.boxes))

    def bytes_of(self, name: str) -> int:
        return verify.nbytes(self.rows[name]["dtype"], self.boxes[name][1])


def kind_of(live: Mapping[str, Tensor]) -> list[tuple]:
    """What a plan depends on: two states with equal kinds can share one."""
    return [
        (name, t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None)
        for name, t in live.items()
    ]


# --------------------------------------------------------------------------------------------------
# writing


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, outside of any graph; the same memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # to_local is then no operation of its own
            tensor = tensor.to_local()
    return tensor.detach()


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises NotFinite, naming the tensor. Only where a norm is not finite, which may be an
    overflow, is each value looked at."""
    for name, tensor in tensors.items():
        if (
            tensor.is_floating_point()
            and not torch.linalg.vector_norm(tensor).isfinite()
            and not tensor.isfinite().all()
        ):
            raise NotFinite(f"{name} has values that are not finite")


class OneByOne:
    """The parts that a rank writes, each copied to host memory when it is written and then
    forgotten."""

    def __init__(self, live: Mapping[str, Tensor]):
        self.live = live

    def bytes_of(self, name: str) -> memoryview:
        tensor = local(self.live[name]).cpu()
        check_finite({name: tensor})
        return as_bytes(tensor)

    def spans(self, plan: Plan) -> Iterator[tuple[memoryview, list[memoryview]]]:
        for name in plan.boxes:
            data = self.bytes_of(name)
            yield data, blocks(data)


class Staged:
    """Host memory for a copy of the parts that a rank writes: one block, in the order of the rank's
    file.

    A thread that hashes and writes a checkpoint needs Python's lock before and after each call, and
    training needs it for each operation. So all that is done at every save is one call for many
    tensors, not some calls for each.

    pin: pin the block, so that a GPU copies into it without waiting. CUDA then rounds its size up
    to a power of two.
    """

    def __init__(self, plan: Plan, pin: bool):
        # Touched here and not in the first save, because fresh pages cost several times the copy
        # itself.
        self.block = torch.zeros(plan.nbytes, dtype=torch.uint8, pin_memory=pin)
        self.tensors: dict[str, Tensor] = {}  # views of the block, by name
        self.floating: list[Tensor] = []  # views of it too, one for all parts of a type
        # the whole block, and what has a hash of its own
        self.data, self.hashed = as_bytes(self.block), []
        end = 0
        for code, names in itertools.groupby(plan.boxes, lambda name: plan.rows[name]["dtype"]):
            first = end
            for name in names:
                start, end = end, end + plan.bytes_of(name)
                self.tensors[name] = (
                    self.block[start:end].view(DTYPES[code]).view(plan.boxes[name][1])
                )
                self.hashed += blocks(self.data[start:end])
            if DTYPES[code].is_floating_point:
                self.floating.append(self.block[first:end].view(DTYPES[code]))

    def check_finite(self) -> None:
        """Raises NotFinite, naming the tensor."""
        if not all(torch.linalg.vector_norm(values).isfinite() for values in self.floating):
            check_finite(self.tensors)

    def spans(self, plan: Plan) -> Iterator[tuple[memoryview, list[memoryview]]]:
        yield self.data, self.hashed


def blocks(data: memoryview) -> list[memoryview]:
    """The pieces of one part that have a hash each."""
    return [data[i : i + verify.BLOCK] for i in range(0, len(data), verify.BLOCK)]


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; the same memory if it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def write(folder: Path, plan: Plan, parts: OneByOne | Staged) -> list:
    """Write this rank's file into `folder` and sync it. Returns its row in the manifest's `files`.

    parts: what its parts hold: spans of bytes in the order of the file, each with its blocks. The
    hashes of the blocks are known last, but as many digits are kept free for them at the start.
    """
    hashes: list[str] = []
    with open(folder / verify.file_name(plan.rank), "xb") as stream:
        stream.write(plan.head)
        for data, hashed in parts.spans(plan):
            stream.write(data)
            hashes += map(verify.digest, hashed)  # a loop in C: Python runs for no single block
        size = stream.tell()
        head = plan.head.replace(b"0" * 16 * len(hashes), "".join(hashes).encode(), 1)
        stream.seek(0)
        stream.write(head)
        stream.flush()
        os.fsync(stream.fileno())
    return [size, verify.digest(head)]


# --------------------------------------------------------------------------------------------------
# reading


def read(
    folder: Path,
    manifest: dict,
    boxes: Mapping[str, Box],
    into: Mapping[str, Tensor],
    check: bool = True,
) -> None:
    """Fill the tensors of `into` with these boxes of a checkpoint's tensors. Opens the files that
    hold them, and no other. With `check`, every block that is read is verified. Raises Damaged or
    OSError.
    """
    wanted: dict[int, list[tuple[str, Box]]] = {}
    for name, box in boxes.items():
        for rank, part_box in verify.parts_in(manifest, name, box):
            wanted.setdefault(rank, []).append((name, part_box))
    for rank, parts in wanted.items():
        with Shard(folder, manifest, rank, check) as shard:
            found = [(shard.find(name, part_box), name, part_box) for name, part_box in parts]
            for part, name, part_box in sorted(found, key=lambda row: row[0]["start"]):
                box = boxes[name]
                shared = layout.overlap(part_box, box)
                target = into[name]
                if shared[1] != box[1]:
                    target = target[_slices(shared, box[0])]
                whole = shared[1] == list(part_box[1]) and target.dtype == DTYPES[part["dtype"]]
                # straight into its place: no second copy in memory
                if whole and target.is_contiguous():
                    verify.read_blocks(
                        shard.stream, shard.label(name), part, 0, as_bytes(target), check
                    )
                else:
                    target.copy_(
                        _read_part(shard, name, part, _relative(shared, part_box[0]), check)
                    )


def _relative(box: Box, origin: list[int]) -> Box:
    return [start - zero for start, zero in zip(box[0], origin, strict=True)], box[1]


def _slices(box: Box, origin: list[int]) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length) for start, length in zip(*_relative(box, origin), strict=True)
    )


def _read_part(shard: Shard, name: str, part: dict, box: Box, check: bool) -> Tensor:
    """This box of a part. Its rows are read in whole blocks and then cut to the box."""
    shape, dtype = part["shape"], DTYPES[part["dtype"]]
    size = verify.nbytes(part["dtype"], shape)
    row_bytes = size // shape[0] if shape else size
    first_row, rows = (box[0][0], box[1][0]) if shape else (0, 1)
    first_block = first_row * row_bytes // verify.BLOCK
    begin = first_block * verify.BLOCK
    end = min(-(-(first_row + rows) * row_bytes // verify.BLOCK) * verify.BLOCK, size)
    buffer = torch.empty(end - begin, dtype=torch.uint8)
    verify.read_blocks(
        shard.stream, shard.label(name), part, first_block, memoryview(buffer.numpy()), check
    )
    cut = buffer[first_row * row_bytes - begin : (first_row + rows) * row_bytes - begin].view(dtype)
    if not shape:
        return cut[0]
    cut = cut.view(rows, *shape[1:])
    for dim in range(1, len(shape)):
        cut = cut.narrow(dim, box[0][dim], box[1][dim])
    return cut
