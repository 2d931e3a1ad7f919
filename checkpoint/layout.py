"""Compute which part of a tensor is in which rank's file of a checkpoint: by a rule that any
process can apply, not from a list that grows with ranks.  A row describes a tensor: `{"dtype":
"F32", "shape": [8, 6], "first": 4, "split": [[0, 2, 1], [1, 3, 2]]}`. Each entry `[dim, pieces,
stride]` of `split` cuts what the entries before it have left, along one dimension, in pieces as
torch.chunk makes them: all are equally long but the last ones, which may be shorter or empty. Piece
i of an entry is `i * stride` ranks further on, counted from rank `first`. So the part of this
tensor that is cut into pieces 1 and 2 is in the file of rank 4 + 1 * 1 + 2 * 2 = 9.

A DeviceMesh numbers its ranks in this way, so one row describes a tensor on any mesh, or on a part
of one. Ranks of different pipeline stages have different `first`. Where several ranks hold the same
shard, `first` chooses which of them writes it.

This file imports no torch. For a box see configs/boxes.py.
"""

import math
from collections.abc import Iterator

from configs.boxes import Box, Split, box_at, piece

MOST = 1 << 48  # elements, ranks or offsets
DIMS = 64  # of a tensor, and cuts of it by dimensions of a mesh


def box_of_rank(row: dict, rank: int) -> Box | None:
    """Return the part of a tensor that this rank's file holds. None if there is none, or if it is
    empty."""
    ahead = rank - row["first"]
    taken = []
    reached = 0
    for _, pieces, stride in row["split"]:
        i = ahead // stride % pieces
        taken.append(i)
        reached += i * stride
    if reached != ahead:
        return None
    box = box_at(row["shape"], row["split"], taken)
    return box if all(box[1]) else None


def parts_in(row: dict, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield the rank and the box of every part of a tensor that overlaps `box`, in time
    proportional to the number of such parts."""
    if all(box[1]):
        shape = row["shape"]
        whole = ([0] * len(shape), shape)
        yield from _parts_in(row["split"], row["first"], whole, box)


def _parts_in(split: Split, rank: int, left: Box, wanted: Box) -> Iterator[tuple[int, Box]]:
    """Yield the parts of one branch. left: what the entries before `split` have left of the tensor,
    on `rank` and after."""
    if not split:
        yield rank, left
        return
    dim, pieces, stride = split[0]
    begin = left[0][dim]
    length = left[1][dim]
    end = begin + length
    wanted_begin = wanted[0][dim]
    wanted_end = wanted_begin + wanted[1][dim]
    size = -(-length // pieces)
    first = max(wanted_begin - begin, 0) // size
    last = (min(wanted_end, end) - begin - 1) // size
    for i in range(first, last + 1):
        offset = list(left[0])
        shape = list(left[1])
        start, shape[dim] = piece(length, pieces, i)
        offset[dim] += start
        yield from _parts_in(split[1:], rank + i * stride, (offset, shape), wanted)


def check(name: str, row: dict, ranks: int) -> None:
    """Raise ValueError, KeyError or TypeError unless a row makes sense in a checkpoint of so many
    files."""
    shape = row["shape"]
    last = row["first"]
    if not is_counts(shape) or not is_counts([last]):
        raise ValueError(f"{name}: shape {shape}, first {last}")
    if len(shape) > DIMS or len(row["split"]) > DIMS:
        raise ValueError(f"{name}: {len(shape)} dimensions, {len(row['split'])} splits")
    for entry in row["split"]:
        dim, pieces, stride = entry
        if not is_counts(entry) or dim >= len(shape) or pieces < 1 or stride < 1:
            raise ValueError(f"{name}: split {entry}")
        last += (pieces - 1) * stride
    if math.prod(shape) and last >= ranks:
        raise ValueError(f"{name}: rank {last} of {ranks}")


def is_counts(values: object) -> bool:
    """Return whether this is a list of whole numbers, none negative and none too large to be a
    count."""
    return isinstance(values, list) and all(type(n) is int and 0 <= n < MOST for n in values)
