"""A rank's plan, writer and reader (`storage.py`) as torch.distributed.checkpoint (DCP) drives
them.

DCP lets all ranks begin together and tells all of them of an error of any. With its usual
collectives it does so by objects that rank 0 gathers from every rank and sends back: at 16,384
ranks that takes 2 s of rank 0 at every save, even if the objects are empty. So DCP is told to leave
the ranks to themselves (`use_collectives=False`, `no_dist=True`). Each rank plans, writes and reads
its own part, and then sends rank 0 two numbers; `agree` tells all ranks of an error.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoint import storage, verify
from checkpoint.lease import Lost
from checkpoint.storage import NotFinite, OneByOne, Plan, Staged
from checkpoint.verify import Damaged
from configs.schema import InputError


class OwnParts(SavePlanner):
    """Plans what this rank writes, without any other rank.

    prepare: makes or reuses the plan, and gives the bytes of its parts. The state is not handed to
    DCP, which would look at each tensor in Python.
    """

    def __init__(self, prepare: Callable[[], tuple[Plan, OneByOne | Staged]]):
        self.prepare = prepare
        # of `prepare`; every rank must take part in FileWriter.finish
        self.error: BaseException | None = None

    def set_up_planner(
        self, state_dict: dict, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        try:
            self.plan, self.parts = self.prepare()
        except BaseException as error:
            self.error = error
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> memoryview:
        raise TypeError(f"{write_item.index.fqn}: DCP is told of no tensor")


class FileWriter(dcp.StorageWriter):
    """Writes this rank's file into `folder`. When all ranks of `group` have done so,
    `publish(files)` on rank 0 makes the folder a checkpoint; `files` is the list of the manifest.
    `dcp.save` raises the error of any rank, also that of `publish`, on all ranks (`agree`)."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, publish: Callable[[list], None]):
        self.folder, self.group, self.publish = folder, group, publish
        self.error: BaseException | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: OwnParts) -> Future[list[WriteResult]]:
        results, self.error = [], planner.error
        if not self.error:
            try:
                self.folder.mkdir(exist_ok=True)
                size, header_hash = storage.write(self.folder, planner.plan, planner.parts)
                results = [
                    WriteResult(
                        MetadataIndex(verify.file_name(planner.plan.rank)), size, header_hash
                    )
                ]
            except BaseException as error:  # any error: the other ranks must not wait for this one
                self.error = error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = gather_files(results[0], self.group)
        if files and all(size >= 0 for size, _ in files):
            try:
                self.publish(files)
            except BaseException as error:
                self.error = error
        agree(self.error, self.group)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def gather_files(results: list[WriteResult], group: dist.ProcessGroup) -> list[list] | None:
    """The size of each rank's file and the hash of its header, on rank 0; size -1 for a rank
    without a result."""
    size, header_hash = (
        (results[0].size_in_bytes, results[0].storage_data) if results else (-1, "0" * 16)
    )
    row = torch.tensor([size, int.from_bytes(bytes.fromhex(header_hash), "big", signed=True)])
    ranks, coordinator = dist.get_world_size(group), dist.get_rank(group) == 0
    rows = torch.empty(ranks, 2, dtype=torch.int64)
    dist.gather(row, list(rows) if coordinator else None, group=group, group_dst=0)
    return (
        [[size, value.to_bytes(8, "big", signed=True).hex()] for size, value in rows.tolist()]
        if coordinator
        else None
    )


# Errors that one rank raises and all of them then raise as they are. The first ones win if ranks
# fail for different reasons; an error of another kind becomes a RuntimeError.
KINDS = (NotFinite, Lost, InputError, Damaged)


def agree(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise the error of one rank, if any has one, on all ranks of `group`: every rank calls it.
    Without a group, raise this process's own."""
    if group is None:
        if error is not None:
            raise error
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind = next((i for i, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS))
    none = (len(KINDS) + 1) * size
    worst = torch.tensor(none if error is None else kind * size + rank)
    dist.all_reduce(worst, dist.ReduceOp.MIN, group)
    if int(worst) == none:
        return
    kind, rank = divmod(int(worst), size)
    text = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(text, group=group, group_src=rank)
    raise (*KINDS, RuntimeError)[kind](f"rank {rank}: {text[0]}") from error


def on_every_rank(group: dist.ProcessGroup | None, fn: Callable, *args: object) -> Any:
    """Call fn(*args), and return its result if no rank's call has raised anything. Raises as
    `agree` does."""
    result, error = None, None
    try:
        result = fn(*args)
    except Exception as failure:  # any error: the other ranks must not wait for this one
        error = failure
    agree(error, group)
    return result


class OwnBoxes(LoadPlanner):
    """Plans what this rank reads: for each tensor its own box, into a buffer, so that nothing live
    changes before every rank has read and verified all of its part."""

    def __init__(self, wanted: Mapping[str, Tensor], buffers: Mapping[str, Tensor]):
        self.wanted, self.buffers = wanted, buffers

    def set_up_planner(
        self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        self.boxes = {name: storage.box_of(name, tensor) for name, tensor in self.wanted.items()}
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError(f"{read_item.dest_index.fqn}: a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.buffers[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class FileReader(dcp.StorageReader):
    """Reads this rank's boxes out of a checkpoint whose manifest has been checked
    (`verify.read_manifest`). With `check`, every block is verified as it is read. Raises
    Damaged."""

    def __init__(self, folder: Path, manifest: dict, check: bool = True):
        self.folder, self.manifest, self.check = folder, manifest, check

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: OwnBoxes) -> Future[None]:
        try:
            storage.read(self.folder, self.manifest, planner.boxes, planner.buffers, self.check)
        except OSError as error:
            raise Damaged(f"{error.filename or self.folder}: {error.strerror or error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def load(reader: FileReader, planner: OwnBoxes, group: dist.ProcessGroup | None) -> None:
    """Fill the planner's buffers on every rank of `group`, or in this process alone. Raises the
    error of any rank on all."""
    error: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failed:
        ((error, _),) = failed.failures.values()
    agree(error, group)
