"""Styles of tensor parallelism whose modules work on plain tensors: for multi-head latent attention
(models/deepseek_v3.py) and mixtures of experts. Llama and dense Qwen3 use none of them."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F


class SequenceSlice(ParallelStyle):
    """Gives the module this rank's slice of the sequence as a plain tensor. What it returns is a
    slice again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def unwrap(_: nn.Module, inputs: tuple) -> tuple:
            return _plain(inputs[0]), *inputs[1:]

        module.register_forward_pre_hook(unwrap)
        return module


class GatherPlain(ParallelStyle):
    """All-gathers the first input over the sequence, as a plain tensor. Every rank uses it for heads
    of its own, so backward reduce-scatters its gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            part = DTensor.from_local(inputs[0], device_mesh, [Shard(1)])
            whole = part.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class PlainLinear(ParallelStyle):
    """A linear layer whose input and output are plain tensors.

    Shard(0): the layer's rows are split. Its input is whole, and the gradient of that is this
    rank's part of a sum. Replicate(): the layer works on this rank's slice of the sequence. Its
    weight is whole on every rank, and the gradient of that is the sum over the ranks, which FSDP
    takes once per reduction.
    """

    def __init__(self, placement: Shard | Replicate):
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight_for_forward = _weight_for_forward(module, device_mesh, self.placement)

        def forward(x: Tensor) -> Tensor:
            return F.linear(_plain(x), weight_for_forward())

        module.forward = forward
        return module


class RouterOfSlice(ParallelStyle):
    """Lets a router (models/moe.py) work on this rank's slice of the sequence, as PlainLinear with
    Replicate()."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.weight_for_forward = _weight_for_forward(module, device_mesh, Replicate())
        return module


def _weight_for_forward(
    module: nn.Module, device_mesh: DeviceMesh, placement: Shard | Replicate
) -> Callable[[], Tensor]:
    """Distributes the weight of the module. Returns a function that returns this rank's part of it."""
    weight = distribute_tensor(module.weight, device_mesh, [placement], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))
    gradient = [Partial()] if placement.is_replicate() else [placement]
    return lambda: module.weight.to_local(grad_placements=gradient)


def _plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
