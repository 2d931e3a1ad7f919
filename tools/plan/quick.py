"""Operators on fake tensors at a fifth of FakeTensorMode's price.

FakeTensorMode keeps the results of operators in a cache. To compute the keys took a third of a plan's
time. Most operators are views, whose meta kernel is cheaper than that, or work element by element.
"""

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")

# FakeTensorMode does nothing special for these: they keep the device, their shape depends on no
# value. Their meta kernel is in C++.
SHAPES = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.mm.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view_as.default,
}
# Of floating-point tensors that are equal in shape and type they make another such tensor. Their meta
# kernels are in Python.
ELEMENTWISE = {
    aten.add.Tensor,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.sub.Tensor,
}
# They change their arguments and return nothing. Their many tensors make the largest keys.
IN_PLACE = {aten._fused_adam_.default, aten._fused_adamw_.default}


def run(
    func, mode: FakeTensorMode | None, args: tuple, kwargs: dict, tensors: list[torch.Tensor]
) -> object:
    """Run the operator. mode: the one below; None: there is none, tensors are real. tensors: those
    among the arguments."""
    if mode is None or not all(type(tensor) is FakeTensor for tensor in tensors):
        return func(*args, **kwargs)
    if func in IN_PLACE:
        return None
    if func in ELEMENTWISE and not kwargs and have_equal_layout(tensors):
        first = tensors[0]
        with in_kernel_invocation_manager(mode):
            out = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=META)
        return FakeTensor(mode, out, CPU)
    if func not in SHAPES or "device" in kwargs:
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return FakeTensor(mode, out, CPU)
    return [FakeTensor(mode, part, CPU) for part in out]


class Shards:
    """List of a parameter's shards for torch.distributed.fsdp, one for each of thousands of ranks.
    Only the first and that of this rank are made."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self.tensor = tensor
        self.dim = dim
        self.rows = -(-tensor.shape[dim] // count)

    def __getitem__(self, number: int) -> torch.Tensor:
        size = self.tensor.shape[self.dim]
        begin = min(number * self.rows, size)
        if begin == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(self.rows, size - begin))


def have_equal_layout(tensors: list[torch.Tensor]) -> bool:
    """Return True if they have one shape and one floating-point dtype, with their numbers in that
    order."""
    first = tensors[0]
    if not first.is_floating_point():
        return False
    for tensor in tensors:
        same = tensor.shape == first.shape and tensor.dtype == first.dtype
        if not same or not tensor.is_contiguous():
            return False
    return True
