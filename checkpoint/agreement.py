"""Let the ranks of a checkpoint agree: on the error of any of them, and on what each has written.

Each rank plans, writes and reads its own part. It then sends rank 0 two numbers (`gather_files`),
and one all-reduce tells all ranks whether any has failed (`agree`). DCP's collectives
(`dcp.save`, `dcp.load`) send pickled objects through rank 0 instead. At 16,384 ranks that takes 2 s
of rank 0 at every save, even if the objects are empty.
"""

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.lease import Lost
from checkpoint.storage import NotFinite
from checkpoint.verify import Damaged
from configs.schema import InputError

# Errors that one rank raises and all of them then raise as they are. The first ones win if ranks
# fail for different reasons; an error of another kind becomes a RuntimeError.
KINDS = (NotFinite, Lost, InputError, Damaged)
NO_FILE = [-1, "0" * 16]  # the row of a rank that has failed to write


def gather_files(file: list, group: dist.ProcessGroup) -> list[list]:
    """Return, on rank 0, the rows of all ranks' files in the manifest: each file's size and the
    hash of its header. An empty list on the other ranks. A rank that has written nothing gives
    NO_FILE."""
    size, header_hash = file
    # int64, two per rank: 16 bytes
    row = torch.tensor([size, int.from_bytes(bytes.fromhex(header_hash), "big", signed=True)])
    if dist.get_rank(group) != 0:
        dist.gather(row, None, group=group, group_dst=0)
        return []
    rows = torch.empty(dist.get_world_size(group), 2, dtype=torch.int64)
    dist.gather(row, list(rows), group=group, group_dst=0)
    files = []
    for size, number in rows.tolist():
        header_hash = number.to_bytes(8, "big", signed=True).hex()
        files.append([size, header_hash])
    return files


def gather_objects(mine: object, group: dist.ProcessGroup | None) -> list:
    """Return this object of every rank of the group (None: of all ranks)."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


def agree(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise the error of one rank, if any has one, on all ranks of `group`: every rank calls it.
    Without a group, raise this process's own."""
    if group is None:
        if error is not None:
            raise error
        return
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    no_error = (len(KINDS) + 1) * size
    # the lowest number wins: the kind of error counts first, then the rank
    worst = torch.tensor(no_error if error is None else _kind_of(error) * size + rank)
    dist.all_reduce(worst, dist.ReduceOp.MIN, group)
    if int(worst) == no_error:
        return
    kind, rank = divmod(int(worst), size)
    text = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(text, group=group, group_src=rank)
    raise common((*KINDS, RuntimeError)[kind](f"rank {rank}: {text[0]}")) from error


def common(error: Exception) -> Exception:
    """Mark an error that all ranks raise: one of them is enough to say it (reliability/exit.py)."""
    error.is_common = True  # type: ignore[attr-defined]
    return error


def _kind_of(error: BaseException) -> int:
    for i, kind in enumerate(KINDS):
        if isinstance(error, kind):
            return i
    return len(KINDS)


def on_every_rank(group: dist.ProcessGroup | None, fn: Callable, *args: object) -> Any:
    """Call fn(*args), and return its result if no rank's call has raised anything. Raises as
    `agree` does."""
    result = None
    error: BaseException | None = None
    try:
        result = fn(*args)
    except BaseException as failure:  # any error: the other ranks must not wait for this one
        error = failure
    agree(error, group)
    return result


def on_rank_0(group: dist.ProcessGroup | None, fn: Callable, *args: object) -> Any:
    """Call fn(*args) on rank 0 of the group (None: of all ranks). Every rank returns its result, or
    raises the exception that it raised."""
    result: Any = None
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            result = fn(*args)
        except (InputError, Damaged) as failure:
            error = failure
        # any error: the other ranks must not wait for an answer that never comes
        except Exception:
            error = RuntimeError(traceback.format_exc())
    answer = [result, error]
    dist.broadcast_object_list(answer, src=0, group=group)
    result, error = answer
    if error is not None:
        raise common(error)
    return result
