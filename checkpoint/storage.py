"""Our file format under torch.distributed.checkpoint (DCP). DCP's planner decides which rank writes and reads what, and
its storage interfaces call this file. The files hold raw tensors, with a hash per block (`verify.py` describes them).

DCP's own FileSystemWriter is not used: its `.metadata` is a pickle, its items are torch.save archives whose CRC32
nobody checks, and an error in one of its writer threads is lost (pytorch#191391). It also costs twice as much. For 1.5
GB, in seconds of processor time and on the clock, best of six on two busy cores:

    save with hashes   0.40 and 0.77   (raw write + fsync 0.40 and 0.89; `dcp.save` 0.83 and 1.57)
    load and verify    0.48 and 0.31   (`dcp.load`, which verifies nothing, 0.85 and 0.82)

Each shard is also a valid safetensors file that any tool opens.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoint import verify

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class StagedSave(DefaultSavePlanner):
    """Plans with the shapes and placements of the live tensors, and writes their staged copies.

    staged: name -> this rank's shard; copy: fills these. DCP calls it in its first common step, so that all ranks learn
    of an error in it.
    """

    def __init__(self, staged: dict[str, Tensor], copy: Callable[[], object] = lambda: None):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged, self.copy = staged, copy

    def create_local_plan(self) -> SavePlan:
        self.copy()
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.staged[index.fqn]


class StagedLoad(DefaultLoadPlanner):
    """Plans with the live tensors but fills buffers, so that nothing live changes before every rank has read and
    verified all of its part."""

    def __init__(self, buffers: dict[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.buffers = buffers

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.buffers[index.fqn]


class NotFinite(ArithmeticError):
    """The state has values that are not finite. No run could go on from it, so none of it is published."""


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite. The sum tells at the speed of memory; only if it overflows is each value looked
    at."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


class ShardWriter(StorageWriter):
    """Writes this rank's parts into one new file of `folder`, if they are finite. On the coordinator, `publish(tensors,
    files)` then makes the folder a checkpoint. `dcp.save` raises an exception of any rank, also of `publish`, on all
    ranks."""

    def __init__(self, folder: Path, rank: int, ranks: int, publish: Callable[[dict, dict], None]):
        self.folder, self.file, self.ranks, self.publish = folder, f"rank-{rank:05d}.safetensors", ranks, publish

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self.folder.mkdir(exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) != self.ranks:  # once the process group is closed, `dcp.save` takes each rank for the only one
            raise RuntimeError(f"{len(plans)} of {self.ranks} ranks take part in this save")
        self.planned = sum(len(plan.items) for plan in plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # Largest elements first: every part is then aligned to its element size, as in safetensors.
        items = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)
        head, starts = _header(items)
        file = {"name": self.file, "size": 0, "header": len(head), "header_hash": verify.digest(head)}
        results = []
        with open(self.folder / self.file, "xb") as stream:
            stream.write(head)
            for item, start in zip(items, starts, strict=True):
                tensor = planner.resolve_data(item)
                if tensor.dtype.is_floating_point and not finite(tensor):
                    raise NotFinite(f"{item.index.fqn} has values that are not finite")
                data, hashes = _bytes(tensor), []
                for i in range(0, len(data), verify.BLOCK):
                    block = data[i : i + verify.BLOCK]
                    hashes.append(verify.digest(block))
                    stream.write(block)
                results.append(WriteResult(item.index, len(data), (file, start, hashes)))
            file["size"] = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Build the manifest's tables, on the coordinator. A part that was planned but not written is an error."""
        written = {r.index: r.storage_data for rank in results for r in rank}
        if len(written) != self.planned:
            raise RuntimeError(f"{self.planned} parts of tensors were planned, {len(written)} written")
        files, tensors = {}, {}
        for name, md in metadata.state_dict_metadata.items():
            parts = []
            for chunk in md.chunks:
                file, start, hashes = written[MetadataIndex(name, chunk.offsets)]
                files[file["name"]] = {key: value for key, value in file.items() if key != "name"}
                parts.append({
                    "offset": list(chunk.offsets), "shape": list(chunk.sizes),
                    "file": file["name"], "start": start, "hashes": hashes,
                })  # fmt: skip
            tensors[name] = {"dtype": CODES[md.properties.dtype], "shape": list(md.size), "parts": parts}
        self.publish(tensors, files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """The head of a safetensors file, and where each item's bytes start in the file."""
    table, starts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for item in items:
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        ranges = ",".join(f"{o}:{o + n}" for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        starts.append(end)
        end += math.prod(chunk.sizes) * dtype.itemsize
        row = {"dtype": CODES[dtype], "shape": list(chunk.sizes), "data_offsets": [starts[-1], end]}
        table[f"{item.index.fqn}[{ranges}]"] = row
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts]


class PlanReader(StorageReader):
    """The methods that DCP asks of a reader which takes the planner's plan as it is. A subclass adds `read_metadata`,
    which says what there is, and `read_data`, which reads it."""

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class ShardReader(PlanReader):
    """Reads what a plan asks for out of a checkpoint whose manifest has been checked (`verify.read_manifest`).

    With `check`, every block is verified as it is read. Raises verify.Damaged, which `dcp.load` raises on all ranks.
    """

    def __init__(self, folder: Path, manifest: dict, check: bool = True):
        self.folder, self.tensors, self.check = folder, manifest["tensors"], check
        self.parts = {
            (name, tuple(part["offset"])): part for name, tensor in self.tensors.items() for part in tensor["parts"]
        }

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return Metadata({
            name: TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[tensor["dtype"]]),
                torch.Size(tensor["shape"]),
                [ChunkStorageMetadata(torch.Size(p["offset"]), torch.Size(p["shape"])) for p in tensor["parts"]],
            )
            for name, tensor in self.tensors.items()
        })  # fmt: skip

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[tuple[int, ReadItem, dict]]] = {}
        for item in plan.items:
            part = self.parts[item.storage_index.fqn, tuple(item.storage_index.offset)]
            per_file.setdefault(part["file"], []).append((part["start"], item, part))
        for name, items in per_file.items():
            with verify.open_regular(self.folder / name) as stream:
                for _, item, part in sorted(items, key=lambda row: row[0]):
                    target = planner.resolve_tensor(item)
                    target.copy_(self._read(stream, item, part))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: object, item: ReadItem, part: dict) -> Tensor:
        """The box of a part that `item` asks for. Its rows are read in whole blocks and then cut to the box."""
        name, shape = item.storage_index.fqn, part["shape"]
        dtype, size = DTYPES[self.tensors[name]["dtype"]], verify.nbytes(self.tensors[name], part)
        row_bytes = size // shape[0] if shape else size
        first_row, rows = (item.storage_offsets[0], item.lengths[0]) if shape else (0, 1)
        first_block = first_row * row_bytes // verify.BLOCK
        begin = first_block * verify.BLOCK
        end = min(-(-(first_row + rows) * row_bytes // verify.BLOCK) * verify.BLOCK, size)
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        verify.read_blocks(stream, name, part, first_block, memoryview(buffer.numpy()), self.check)
        box = buffer[first_row * row_bytes - begin : (first_row + rows) * row_bytes - begin].view(dtype)
        if not shape:
            return box[0]
        box = box.view(rows, *shape[1:])
        for dim in range(1, len(shape)):
            box = box.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return box


