"""What an optimizer keeps of a parameter, on any mesh: the shape, the type and the placement of its
state. The table of optimizers (training/optimizers.py) says it for each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from parallelisms.boxes import shard_of

Shape = tuple[int, ...]


def as_parameter(shape: Shape) -> Shape:
    return shape


def scalar(shape: Shape) -> Shape:
    return ()


def from_part(
    whole: Shape, part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return the DTensor of a whole shape of which this rank has this part: ranks may have parts of
    different sizes."""
    return DTensor.from_local(
        part,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(whole),
        stride=torch.empty(whole, device="meta").stride(),
    )


@dataclass(frozen=True)
class Kept:
    """A tensor that an optimizer keeps of a parameter: 0 before the first step."""

    # of the parameter's whole shape -> its own; None: nothing is kept of such a parameter
    shape: Callable[[Shape], Shape | None]
    dtype: torch.dtype | None = None  # None: the parameter's
    # For each of its axes the axis of the parameter that is as long, and with which it is sharded;
    # None: that axis is whole on every rank. Empty: all of it is. Of a stack of matrices it may have
    # the stack's axis in front, which is not among these. One like the parameter is sharded as that
    # is.
    axes: tuple[int | None, ...] = ()

    @property
    def like_parameter(self) -> bool:
        return self.shape is as_parameter

    def shapes(self, param: Tensor) -> tuple[Shape, Shape] | None:
        """Return the shape of this rank's part, and of the whole; None where there is none. Raises
        ValueError for an axis that is not as long as the one with which it is sharded."""
        whole = self.shape(tuple(param.shape))
        if whole is None:
            return None
        here = list(whole)
        for axis, follows in enumerate(self.axes_of(param.ndim, len(whole))):
            if follows is None:
                continue
            if whole[axis] != param.shape[follows]:
                raise ValueError(
                    f"axis {axis} of {list(whole)} cannot be sharded as axis {follows} of "
                    f"{list(param.shape)}"
                )
            here[axis] = shard_of(param).shape[follows]
        return tuple(here), whole

    def axes_of(self, of_parameter: int, dims: int) -> tuple[int | None, ...]:
        """Return `axes` for a parameter with so many dimensions, and itself with `dims`."""
        if self.like_parameter:
            return tuple(range(of_parameter))
        if self.axes and dims > len(self.axes):
            return 0, *(axis if axis is None else axis + 1 for axis in self.axes)
        return self.axes

    def zeros(self, param: nn.Parameter, device: torch.device) -> Tensor | None:
        """device: of a scalar."""
        dtype = self.dtype or param.dtype
        if self.like_parameter:
            return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        shapes = self.shapes(param)
        if shapes is None:
            return None
        here, whole = shapes
        zeros = torch.zeros(here, dtype=dtype, device=param.device if whole else device)
        if not self.axes or not isinstance(param, DTensor):
            return zeros
        axes = self.axes_of(param.ndim, len(whole))
        placements = [placed_as(placement, axes) for placement in param.placements]
        return from_part(whole, zeros, param.device_mesh, placements)


def placed_as(of_parameter: Placement, axes: tuple[int | None, ...]) -> Placement:
    """Return how a tensor with these axes is placed along a dimension of the mesh."""
    dim = getattr(of_parameter, "dim", None)
    if dim is None or dim not in axes:
        return Replicate()
    axis = axes.index(dim)
    if isinstance(of_parameter, _StridedShard):
        return _StridedShard(axis, split_factor=of_parameter.split_factor)
    return Shard(axis)


LIKE = Kept(as_parameter)
SCALAR = Kept(scalar, torch.float32)
SHARE = Kept(scalar, torch.float64)
