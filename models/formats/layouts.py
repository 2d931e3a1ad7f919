"""Tensors of theirs that are not tensors of ours: several parameters in one, transposed, or in
MXFP4. `models/family.py::TensorLayout` says what a layout has; `checkpoint/hf.py` reads and writes by it.

Shapes:  X experts   R = n rows of theirs   C columns   G = C / 32 groups of columns
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ReadSlice = Callable[[str, tuple[slice, ...]], Tensor]  # (name of theirs, box) -> this box of it


@dataclass(frozen=True)
class Interleaved:
    """One of n parameters of ours that take turns in the last dimension of one tensor of theirs.
    That tensor has the last two dimensions the other way round, if `transposed`.

    Of three tensors [X, R, C], transposed, theirs is [X, C, 3 R]; the second of ours has its columns
    1, 4, 7, ... A slice of ours is read with the columns that interleave it.
    """

    name: str  # of their tensor
    transposed: bool = False
    turn: int = 0
    n: int = 1

    types = ("F32", "BF16", "F16")

    def files(self, shape: Sequence[int]) -> dict[str, list[int]]:
        """Their tensors and the shapes of these. shape: that of ours."""
        *others, last = _exchanged(shape) if self.transposed else shape
        return {self.name: [*others, last * self.n]}

    def read(self, box: tuple[slice, ...], read_slice: ReadSlice) -> Tensor:
        """Read this box of our parameter."""
        *others, last = _exchanged(box) if self.transposed else box
        whole = slice(last.start * self.n, last.stop * self.n)
        part = read_slice(self.name, (*others, whole))[..., self.turn :: self.n]
        return (part.mT if self.transposed else part).contiguous()

    def join(self, parameters: list[Tensor]) -> Tensor:
        """Their tensor, from all n parameters of ours in order."""
        parts = [x.mT if self.transposed else x for x in parameters]
        return torch.stack(parts, -1).flatten(-2)


@dataclass(frozen=True)
class Grouped:
    """One of several parameters of ours whose rows take turns in one tensor of theirs: that is
    `groups` groups of rows, and in each group stand rows of every parameter, one after the other.

    Of queries and keys of two heads, of 3 rows each, theirs has rows of query 0, key 0, query 1,
    key 1. With one group theirs is all of ours, concatenated.
    """

    name: str  # of their tensor
    groups: int
    rows: tuple[int, ...]  # that each parameter has in a group, in order
    turn: int  # which of them is ours
    # theirs has a dimension of 1 behind the rows, as a convolution's weight
    has_middle: bool = False

    types = ("F32", "BF16", "F16")

    def files(self, shape: Sequence[int]) -> dict[str, list[int]]:
        """Their tensor and its shape. shape: that of ours."""
        middle = [1] if self.has_middle else []
        return {self.name: [self.groups * sum(self.rows), *middle, *shape[1:]]}

    def places(self) -> Tensor:
        """Return which rows of theirs are ours, in order: int64 [our rows]."""
        numbers = torch.arange(self.groups * sum(self.rows)).view(self.groups, -1)
        before = sum(self.rows[: self.turn])
        return numbers[:, before : before + self.rows[self.turn]].flatten()

    def read(self, box: tuple[slice, ...], read_slice: ReadSlice) -> Tensor:
        """Read this box of our parameter, from the groups that have rows of it."""
        rows, *others = box
        own = self.rows[self.turn]
        group = sum(self.rows)
        first = rows.start // own
        last = math.ceil(rows.stop / own)
        middle = [slice(0, 1)] if self.has_middle else []
        part = read_slice(self.name, (slice(first * group, last * group), *middle, *others))
        part = part.squeeze(1) if self.has_middle else part
        before = sum(self.rows[: self.turn])
        in_groups = part.unflatten(0, (last - first, group))[:, before : before + own]
        start = rows.start - first * own
        return in_groups.flatten(0, 1)[start : start + rows.stop - rows.start].contiguous()

    def join(self, parameters: list[Tensor]) -> Tensor:
        """Their tensor, from all parameters of ours in order."""
        in_groups = [x.unflatten(0, (self.groups, -1)) for x in parameters]
        whole = torch.cat(in_groups, 1).flatten(0, 1)
        return whole.unsqueeze(1) if self.has_middle else whole


@dataclass(frozen=True)
class WithOnes:
    """A parameter of ours that has further dimensions of 1 in theirs."""

    name: str  # of their tensor
    before: int  # so many in front of ours
    behind: int

    types = ("F32", "BF16", "F16")

    def files(self, shape: Sequence[int]) -> dict[str, list[int]]:
        """Their tensor and its shape. shape: that of ours."""
        return {self.name: [*[1] * self.before, *shape, *[1] * self.behind]}

    def read(self, box: tuple[slice, ...], read_slice: ReadSlice) -> Tensor:
        """Read this box of our parameter."""
        one = slice(0, 1)
        part = read_slice(self.name, (*[one] * self.before, *box, *[one] * self.behind))
        return part.reshape([side.stop - side.start for side in box]).contiguous()

    def join(self, parameters: list[Tensor]) -> Tensor:
        """Their tensor, from ours."""
        (own,) = parameters
        return own.reshape(self.files(own.shape)[self.name])


@dataclass(frozen=True)
class Mxfp4:
    """One of n parameters of ours [X, R, C] that take turns in the rows of a tensor in MXFP4, which
    is two: blocks uint8 [X, n R, G, 16], scales uint8 [X, n R, G]. It can be read only."""

    name: str  # of their tensor, which has _blocks and _scales behind it
    turn: int = 0
    n: int = 1

    types = ("U8",)

    def files(self, shape: Sequence[int]) -> dict[str, list[int]]:
        experts, rows, columns = shape
        groups = math.ceil(columns / GROUP)
        scales = [experts, rows * self.n, groups]
        return {f"{self.name}_blocks": [*scales, GROUP // 2], f"{self.name}_scales": scales}

    def read(self, box: tuple[slice, ...], read_slice: ReadSlice) -> Tensor:
        """Read this box of our parameter, float32, expert by expert: dequantising takes memory."""
        experts, rows, columns = box
        whole = slice(rows.start * self.n, rows.stop * self.n)
        groups = slice(columns.start // GROUP, math.ceil(columns.stop / GROUP))
        blocks = read_slice(f"{self.name}_blocks", (experts, whole, groups, slice(0, 16)))
        scales = read_slice(f"{self.name}_scales", (experts, whole, groups))
        first = columns.start - groups.start * GROUP
        within = slice(first, first + columns.stop - columns.start)
        sizes = [part.stop - part.start for part in box]
        values = torch.empty(sizes)
        for i in range(sizes[0]):
            of_rows = blocks[i, self.turn :: self.n], scales[i, self.turn :: self.n]
            values[i] = dequantise(*of_rows)[:, within]
        return values


# OCP Microscaling Formats (MX) 1.0, table 5 and section 5.3.3: the positive values of E2M1 by their
# three bits; the fourth is the sign. 32 values share a scale of E8M0, a power of 2 (section 5.4.1).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
BIAS = 127  # of the exponent
NAN = 255  # the only scale that is no number


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise MXFP4: blocks uint8 [..., G, 16], two values in each byte, the first in its lower
    half; scales uint8 [..., G] -> float32 [..., G * 32]. The values are exact, in bfloat16 too."""
    negative = tuple(-value for value in E2M1)
    table = torch.tensor(E2M1 + negative, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)  # [..., G, 16, 2]
    values = table[pairs.flatten(-2).int()]  # [..., G, 32]
    # in float64, where 2^-127 is no subnormal number
    factors = torch.exp2(scales.double() - BIAS).float()
    factors = factors.masked_fill(scales == NAN, math.nan)
    return (values * factors[..., None]).flatten(-2)


def _exchanged(dimensions: Sequence) -> tuple:
    *others, rows, columns = dimensions
    return *others, columns, rows
