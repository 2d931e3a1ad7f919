"""Write and read one rank's part of a checkpoint (`verify.py` describes the files).

**To save**, every rank computes from the meshes of the live tensors which parts it writes: a
`SavePlan`, made once and used as long as names, shapes and placements stay. It needs no other rank.
torch.distributed.checkpoint (DCP) plans all parts of all ranks on rank 0, at every save, and
gathers there what was written: 33 s of processor time at 128 ranks of a 70B model, and more with
each rank. Its cached plans (`enable_plan_caching` of DefaultSavePlanner) save the first half of
that only. It also computes wrong boxes (torch 2.13, `compute_local_shape_and_global_offset`) where
FSDP cuts a shard of tensor parallelism into uneven pieces: 7 rows on 3 x 2 ranks, for example.

DCP's FileSystemWriter is not used: its `.metadata` is a pickle, its items are torch.save archives
whose CRC32 is never checked, and an error in one of its writer threads is lost (pytorch#191391).
Each of our files is also a valid safetensors file that any tool opens.

**To load** on any mesh, DCP plans the resharding (`plan_reads`): from the chunks that were saved
and the box that this rank holds now, it computes which region of each chunk goes where. It is given
only the chunks that overlap the box, so the plan does not grow with the ranks that saved.
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from checkpoint import layout, verify
from checkpoint.verify import Shard
from configs.boxes import Box
from parallelisms import boxes
from reliability.objects import Key

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
    """The state has values that are not finite. No run could resume from it, so it is not
    published."""


# --------------------------------------------------------------------------------------------------
# who writes what


def box_of(name: str, tensor: Tensor) -> Box:
    """Return the box of the whole tensor that this rank holds: of a generator its own row."""
    if name.startswith(GENERATOR):
        return [dist.get_rank(), 0], list(tensor.shape)
    return boxes.box_of(tensor)


def strides(mesh: DeviceMesh) -> tuple[int, list[int]]:
    """Return the first rank of a mesh, and how many ranks further on the next one is along each
    dimension. Raises ValueError if the ranks are not evenly spaced."""
    ranks = mesh.mesh
    first = int(ranks.flatten()[0])
    steps = []
    expected = torch.tensor(first)
    for dim, size in enumerate(ranks.shape):
        second = ranks.select(dim, min(1, size - 1)).flatten()[0]
        step = int(second) - first
        steps.append(step)
        along_dim = [1] * ranks.ndim
        along_dim[dim] = size
        expected = expected + (torch.arange(size) * step).view(along_dim)
    if not torch.equal(expected, ranks.to(expected)):
        raise ValueError(f"a mesh whose ranks are not evenly spaced cannot be saved: {ranks}")
    return first, steps


def describe(live: Mapping[str, Tensor], ranks: int, holders: range) -> dict[str, dict]:
    """Return the rows of these tensors in the manifest (`layout.py`). All ranks that hold a tensor
    get the same row for it, because it follows from its name, its shape and its mesh.

    ranks: of the whole run. holders: the ranks that hold the tensors that are no DTensors, this one
    among them. A tensor that several ranks hold is written by the one that has the fewest bytes of
    such tensors so far.
    """
    rows: dict[str, dict] = {}
    known: dict[int, tuple[int, list[int]]] = {}  # id of a mesh -> its strides
    # replicas of a kind -> a heap of (bytes, distance from the first)
    loads: dict[tuple, list[tuple[int, int]]] = {}
    for name, tensor in live.items():
        shape = list(tensor.shape)
        dtype = CODES[tensor.dtype]
        if name.startswith(GENERATOR):
            split = [[0, ranks, 1]]
            rows[name] = {"dtype": dtype, "shape": [ranks, shape[1]], "first": 0, "split": split}
            continue
        first = holders.start
        split = []
        replicas = [(len(holders), 1)]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if id(mesh) not in known:
                known[id(mesh)] = strides(mesh)
            first, steps = known[id(mesh)]
            for dim, mesh_dim in boxes.cuts(tensor):
                if mesh.size(mesh_dim) > 1:
                    split.append([dim, mesh.size(mesh_dim), steps[mesh_dim]])
            replicas = _replicas(tensor, steps)
        pieces = math.prod(count for _, count, _ in split)
        size = verify.nbytes(dtype, shape) // pieces
        if size >= SMALL and replicas:
            kind = (first, *replicas)
            if kind not in loads:
                loads[kind] = [(0, distance) for distance in distances(replicas)]
            load, distance = loads[kind][0]
            heapq.heapreplace(loads[kind], (load + size, distance))
            first += distance
        rows[name] = {"dtype": dtype, "shape": shape, "first": first, "split": split}
    return rows


def _replicas(tensor: DTensor, steps: list[int]) -> list[tuple[int, int]]:
    """Return (how many, stride in ranks) of each mesh dimension along which ranks hold the same
    shard."""
    mesh = tensor.device_mesh
    found = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() and mesh.size(mesh_dim) > 1:
            found.append((mesh.size(mesh_dim), steps[mesh_dim]))
    return found


def distances(replicas: list[tuple[int, int]]) -> list[int]:
    """Return how far each replica is from the first one, in ranks, in rising order. replicas: (how
    many, stride) by mesh dimension."""
    found = [0]
    for count, stride in replicas:
        found = [distance + i * stride for distance in found for i in range(count)]
    return sorted(found)


def of_every_rank(number: int, group: dist.ProcessGroup) -> list[int]:
    """Return this number, of 64 bits, of every rank of `group`, in 8 bytes from each."""
    numbers = torch.empty(dist.get_world_size(group), 1, dtype=torch.int64)
    dist.all_gather(list(numbers), torch.tensor([number]), group)
    return numbers.flatten().tolist()


def share_rows(rows: dict[str, dict], group: dist.ProcessGroup) -> dict[str, dict]:
    """Return the rows of all ranks of `group`; every rank calls it. Ranks of another pipeline stage
    hold other tensors.

    It costs one number of each rank if all have the same rows. If not, the first rank of each kind
    sends its rows to all. Where two kinds have a name in common (tied weights of two stages), the
    lower rank's row counts. Raises ValueError if their shapes differ.
    """
    digits = verify.digest(json.dumps(rows).encode())
    mine = int.from_bytes(bytes.fromhex(digits), "big", signed=True)
    first_of_kind: dict[int, int] = {}
    for rank, kind in enumerate(of_every_rank(mine, group)):
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
class SavePlan:
    """The parts that one rank writes. A plan is valid for all states with the same names, shapes,
    types and placements."""

    rows: dict[str, dict]  # all tensors of the checkpoint, as the manifest describes them
    rank: int
    boxes: dict[str, Box]  # the parts that this rank writes, in the order of its file

    @staticmethod
    def make(live: Mapping[str, Tensor], rows: dict[str, dict], rank: int) -> "SavePlan":
        """Make the plan of a rank. rows: of all tensors of all ranks. Raises ValueError if this
        rank holds another shard than its row says."""
        boxes: dict[str, Box] = {}
        for name, tensor in live.items():
            box = layout.box_of_rank(rows[name], rank)
            if box is None:
                continue
            shape = list(local(tensor).shape)
            if shape != box[1]:
                raise ValueError(f"{name}: a shard of shape {shape}, {box[1]} expected")
            boxes[name] = box

        def by_size(name: str) -> tuple[int, str]:
            dtype = rows[name]["dtype"]
            return -verify.SIZES[dtype], dtype

        # Largest elements first: every part is then aligned to its element size, as in safetensors.
        return SavePlan(rows, rank, {name: boxes[name] for name in sorted(boxes, key=by_size)})

    @cached_property
    def table(self) -> verify.Rows:
        """Return the rows as `verify.write_manifest` takes them at each save."""
        return verify.Rows(self.rows)

    @cached_property
    def head(self) -> bytes:
        """Return the head of this rank's file, with a 0 for each digit of a hash."""
        hashes = sum(-(-self.bytes_of(name) // verify.BLOCK) for name in self.boxes)
        table: dict[str, dict] = {verify.METADATA: {"format": "pt", "hashes": "0" * 16 * hashes}}
        start = 0
        for name, box in self.boxes.items():
            end = start + self.bytes_of(name)
            dtype = self.rows[name]["dtype"]
            row = {"dtype": dtype, "shape": box[1], "data_offsets": [start, end]}
            table[verify.part_name(name, box)] = row
            start = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts that this rank writes, without the head."""
        return sum(map(self.bytes_of, self.boxes))

    def bytes_of(self, name: str) -> int:
        return verify.nbytes(self.rows[name]["dtype"], self.boxes[name][1])


def kind_of(live: Mapping[str, Tensor]) -> list[tuple]:
    """Return all that a plan depends on: two states with equal kinds can share one."""
    kind = []
    for name, tensor in live.items():
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        kind.append((name, tensor.shape, tensor.dtype, placements))
    return kind


# --------------------------------------------------------------------------------------------------
# writing


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, outside of any graph; the same memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # to_local then records no autograd operation
            tensor = tensor.to_local()
    return tensor.detach()


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise NotFinite, naming the tensor. Only where a norm is not finite, which may be an
    overflow, is each value looked at."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or torch.linalg.vector_norm(tensor).isfinite():
            continue
        if not tensor.isfinite().all():
            raise NotFinite(f"{name} has values that are not finite")


class OneByOne:
    """Parts that a rank writes, each copied to host memory when it is written and then
    forgotten."""

    def __init__(self, live: Mapping[str, Tensor]):
        self.live = live

    def bytes_of(self, name: str) -> memoryview:
        tensor = local(self.live[name]).cpu()
        check_finite({name: tensor})
        return as_bytes(tensor)

    def spans(self, plan: SavePlan) -> Iterator[tuple[memoryview, list[memoryview]]]:
        for name in plan.boxes:
            data = self.bytes_of(name)
            yield data, blocks(data)


class Staged:
    """Host memory for a copy of the parts that a rank writes: one block, in the order of the rank's
    file.

    A thread that hashes and writes a checkpoint needs the GIL before and after each call, and
    training needs it for each operation. So a save makes one call for many tensors, not several for
    each.

    pin: pin the block, so that a GPU copies into it without waiting. CUDA then rounds its size up
    to a power of two.
    """

    def __init__(self, plan: SavePlan, pin: bool):
        # Touched here and not in the first save, because fresh pages cost several times the copy
        # itself.
        self.block = torch.zeros(plan.nbytes, dtype=torch.uint8, pin_memory=pin)
        self.data = as_bytes(self.block)
        self.tensors: dict[str, Tensor] = {}  # views of the block, by name
        self.floating: list[Tensor] = []  # views of it too, one for all parts of a type
        self.hashed: list[memoryview] = []  # its blocks, which have a hash each
        start = 0
        for code, names in itertools.groupby(plan.boxes, lambda name: plan.rows[name]["dtype"]):
            dtype = DTYPES[code]
            first = start
            for name in names:
                end = start + plan.bytes_of(name)
                part = self.block[start:end].view(dtype)
                self.tensors[name] = part.view(plan.boxes[name][1])
                self.hashed += blocks(self.data[start:end])
                start = end
            if dtype.is_floating_point:
                self.floating.append(self.block[first:start].view(dtype))

    def check_finite(self) -> None:
        """Raise NotFinite, naming the tensor."""
        if not all(torch.linalg.vector_norm(values).isfinite() for values in self.floating):
            check_finite(self.tensors)

    def spans(self, plan: SavePlan) -> Iterator[tuple[memoryview, list[memoryview]]]:
        yield self.data, self.hashed


def blocks(data: memoryview) -> list[memoryview]:
    """Split the bytes of one part into blocks that have a hash each."""
    return [data[i : i + verify.BLOCK] for i in range(0, len(data), verify.BLOCK)]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory; the same memory if it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def head_with(plan: SavePlan, hashes: list[str]) -> bytes:
    """Return the head of this rank's file, with the hashes of its blocks."""
    zeros = b"0" * 16 * len(hashes)
    return plan.head.replace(zeros, "".join(hashes).encode(), 1)


def write(folder: Path, plan: SavePlan, parts: OneByOne | Staged) -> list:
    """Write this rank's file into `folder` and sync it. Returns its row in the manifest's `files`.

    parts: the content of its parts: spans of bytes in the order of the file, each with its blocks.
    The blocks' hashes are known last; the header at the start reserves their digits.
    """
    hashes: list[str] = []
    with open(folder / verify.file_name(plan.rank), "xb") as stream:
        stream.write(plan.head)
        for data, hashed in parts.spans(plan):
            stream.write(data)
            hashes += map(verify.digest, hashed)  # a loop in C: Python runs for no single block
        size = stream.tell()
        head = head_with(plan, hashes)
        stream.seek(0)
        stream.write(head)
        stream.flush()
        os.fsync(stream.fileno())
    return [size, verify.digest(head)]


# --------------------------------------------------------------------------------------------------
# reading


# the box of a stored part, and DCP's item: which region of the part goes where in the wanted box
Read = tuple[Box, ReadItem]


def plan_reads(manifest: dict, boxes: Mapping[str, Box]) -> dict[int, list[Read]]:
    """Plan the reads from each rank's file that fill these boxes, by rank.

    `layout.parts_in` finds the parts that overlap a box without a list of all parts. DCP's
    resharding does the rest.
    """
    plan: dict[int, list[Read]] = {}
    for name, box in boxes.items():
        row = manifest["tensors"][name]
        parts = list(layout.parts_in(row, box))
        saved = TensorStorageMetadata(
            TensorProperties(DTYPES[row["dtype"]]),
            torch.Size(row["shape"]),
            [_chunk(part_box) for _, part_box in parts],
        )
        for item in create_read_items_for_chunk_list(name, saved, [_chunk(box)]):
            rank, part_box = parts[item.storage_index.index]
            plan.setdefault(rank, []).append((part_box, item))
    return plan


def _chunk(box: Box) -> ChunkStorageMetadata:
    offset, shape = box
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))


def read(
    folder: Path | Key,
    manifest: dict,
    boxes: Mapping[str, Box],
    into: Mapping[str, Tensor],
) -> None:
    """Fill the tensors of `into` with these boxes of a checkpoint's tensors. Opens the files that
    hold them, and no other. Every block that is read is verified. Raises Damaged or OSError.
    """
    for rank, reads in plan_reads(manifest, boxes).items():
        with Shard(folder, manifest, rank) as shard:
            located = [(shard.find(item.dest_index.fqn, box), item) for box, item in reads]
            # in the order of the file
            for part, item in sorted(located, key=lambda one: one[0]["start"]):
                _read_item(shard, part, item, into[item.dest_index.fqn])


def _read_item(shard: Shard, part: dict, item: ReadItem, into: Tensor) -> None:
    """Fill the region of `into` that a read item names."""
    name = item.dest_index.fqn
    target = into
    for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        target = target.narrow(dim, start, length)
    whole_part = list(item.lengths) == part["shape"] and target.dtype == DTYPES[part["dtype"]]
    if whole_part and target.is_contiguous():
        # straight into its place: no second copy in memory
        label = shard.label(name)
        verify.read_blocks(shard.stream, label, part, 0, as_bytes(target))
    else:
        region = (list(item.storage_offsets), list(item.lengths))
        target.copy_(_read_part(shard, name, part, region))


def _read_part(shard: Shard, name: str, part: dict, box: Box) -> Tensor:
    """Read this box of a part. Its rows are read in whole blocks and then cut to the box."""
    shape = part["shape"]
    size = verify.nbytes(part["dtype"], shape)
    first_row = 0
    rows = 1
    row_bytes = size
    if shape:
        first_row = box[0][0]
        rows = box[1][0]
        row_bytes = size // shape[0]
    begin = first_row * row_bytes
    end = begin + rows * row_bytes
    first_block = begin // verify.BLOCK
    read_from = first_block * verify.BLOCK
    read_to = min(-(-end // verify.BLOCK) * verify.BLOCK, size)
    buffer = torch.empty(read_to - read_from, dtype=torch.uint8)
    into = memoryview(buffer.numpy())
    verify.read_blocks(shard.stream, shard.label(name), part, first_block, into)
    cut = buffer[begin - read_from : end - read_from].view(DTYPES[part["dtype"]])
    if not shape:
        return cut[0]
    cut = cut.view(rows, *shape[1:])
    for dim in range(1, len(shape)):
        cut = cut.narrow(dim, box[0][dim], box[1][dim])
    return cut
