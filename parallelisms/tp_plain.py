"""Styles of tensor parallelism that PyTorch lacks. All but `GatherSequence` leave plain tensors:
embeddings, multi-head latent attention (models/latent_attention.py), mixtures of experts, norms over all
heads (models/olmo2.py), attention sinks (models/gpt_oss.py)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from models.kernels.precision import wide as as_wide
from models.local import local
from parallelisms.boxes import box_of


class SequenceSlice(ParallelStyle):
    """Gives the module this rank's slice of the sequence as a plain tensor. What it returns is a
    slice again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def unwrap(_: nn.Module, inputs: tuple) -> tuple:
            return _plain(inputs[0]), *inputs[1:]

        module.register_forward_pre_hook(unwrap)
        return module


class GatherSequence(ParallelStyle):
    """All-gathers the first input, which is split over the sequence. The other inputs (rotary
    tables, documents) are whole already. The result stays a DTensor, so that three projections
    share one all-gather, and the sum of their gradients is one reduce-scatter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [Shard(1)])
            return x.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class GatherPlain(ParallelStyle):
    """All-gathers the first input over the sequence, as a plain tensor. Every rank uses it for
    other heads, so backward reduce-scatters its gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple) -> tuple:
            part = DTensor.from_local(inputs[0], device_mesh, [Shard(1)])
            whole = part.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()]), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class SplitEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows of the vocabulary. It looks up the tokens whose
    rows it has, of the whole sequence, and all ranks' results are reduce-scattered over the sequence.

    The gradient of a rank's rows comes from the gathered gradient of the output. PyTorch's
    RowwiseParallel computes on every rank a gradient of the whole vocabulary from its slice, and
    reduce-scatters that (torch 2.13): 9 GiB in bfloat16 for 256,000 rows of width 18,432.

    The reduce-scatter is synchronous. torch 2.13 unwraps an asynchronous result without its gradient
    when the block that gets it is compiled: the embedding would silently not be trained.
    """

    def __init__(self, whole: nn.Embedding, mesh: DeviceMesh):
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self.weight = part_of(whole.weight, mesh, Shard(0))
        self.mesh = mesh
        (self.first, _), _ = box_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Look up tokens: x int64 [B, T] -> [B, this rank's slice of T, D]."""
        weight = local(self.weight)
        own = x - self.first  # [B, T]
        is_own = (own >= 0) & (own < len(weight))
        embedded = F.embedding(own.where(is_own, 0), weight)  # [B, T, D]
        part = DTensor.from_local(embedded * is_own[..., None], self.mesh, [Partial()])
        return part.redistribute(placements=[Shard(1)], async_op=False).to_local()


class VocabEmbedding(ParallelStyle):
    """Splits the vocabulary rows of an embedding."""

    replaces = nn.Embedding
    instead = "change what it returns in the model's `embed(tokens)`"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return SplitEmbedding(module, device_mesh)


class VocabWeight(ParallelStyle):
    """Splits the vocabulary rows of a weight, and leaves the arithmetic to the code that uses it
    (training/loss.py)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_parameter("weight", part_of(module.weight, device_mesh, Shard(0)))
        return module


class PlainLinear(nn.Linear):
    """A linear layer whose input and output are plain tensors.

    Shard(0): the layer's rows are split. Its input is whole, and the gradient of that is this
    rank's part of a sum. Replicate(): the layer works on this rank's slice of the sequence, or on
    all of it for this rank's heads. Its weight is whole on every rank, and the gradient of that is
    the sum over the ranks, which FSDP takes once per reduction.
    """

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, placement: Shard | Replicate):
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        self.weight = part_of(whole.weight, mesh, placement)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply: input [..., in_features] -> [..., this rank's of out_features]."""
        return F.linear(_plain(input), local(self.weight))


class LinearOfPart(ParallelStyle):
    """Puts a `PlainLinear` in the place of a linear layer."""

    replaces = nn.Linear
    instead = "do what it does in the module around it"

    def __init__(self, placement: Shard | Replicate):
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.bias is not None:
            raise ValueError("this style has no bias, and the layer has one: use another style")
        return PlainLinear(module, device_mesh, self.placement)


class RouterOfSlice(ParallelStyle):
    """Lets a router (models/moe.py) work on this rank's slice of the sequence, as `PlainLinear` with
    Replicate(): its weight, and a bias if that is trained."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            if parameter.requires_grad:
                module.register_parameter(name, part_of(parameter, device_mesh, Replicate()))
        return module


class SplitRMSNorm(nn.RMSNorm):
    """An RMSNorm over all columns of a projection whose columns the ranks share, float [B, T, columns
    of this rank] in and out (OLMo 2's QK-norm, models/olmo2.py).

    The sum of squares of a token goes over all columns, so it is all-reduced: one float32 per token
    in forward, and its gradient in backward. A rank has the gains of its columns. It sees the
    whole sequence, so their gradient is whole too.
    """

    def __init__(self, whole: nn.RMSNorm, mesh: DeviceMesh):
        super().__init__(whole.normalized_shape, eps=whole.eps, device="meta")
        self.columns = whole.weight.numel()  # of all ranks
        self.weight = part_of(whole.weight, mesh, Shard(0))
        self.group = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        wide = as_wide(x)
        own_squares = wide.square().sum(-1, keepdim=True)  # [B, T, 1]
        mean_square = SumOverRanks.apply(own_squares, self.group) / self.columns
        normalised = wide * torch.rsqrt(mean_square + self.eps)
        return (normalised * local(self.weight)).type_as(x)


class NormOfColumns(ParallelStyle):
    """Puts a `SplitRMSNorm` in the place of a norm."""

    replaces = nn.RMSNorm
    instead = "normalise each head by itself, with the style heads"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return SplitRMSNorm(module, device_mesh)


class SumOverRanks(torch.autograd.Function):
    """Sums a tensor over the ranks of a group. Each rank uses it for other columns, so its
    gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.wait_tensor(funcol.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class OwnParameters(ParallelStyle):
    """Splits the parameters of the module itself, not those inside it, as their first axis is split
    over heads or columns; or, with Replicate(), lets them work on this rank's slice of the sequence.
    forward reads them by `models/local.py::local`."""

    def __init__(self, placement: Shard | Replicate):
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, part_of(parameter, device_mesh, self.placement))
        return module


class GatherSequenceSplitOwn(GatherSequence):
    """`GatherSequence` for a module that has a parameter for each head or column, such as attention
    sinks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = OwnParameters(Shard(0))
        return own._apply(super()._apply(module, device_mesh), device_mesh)


def part_of(
    parameter: nn.Parameter, device_mesh: DeviceMesh, placement: Shard | Replicate
) -> nn.Parameter:
    """Return this rank's part of a parameter, a DTensor (models/local.py::local unwraps it)."""
    part = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _plain(x: Tensor) -> Tensor:
    """Return what this rank has. The gradient of a whole tensor is this rank's part of a sum."""
    if not isinstance(x, DTensor):
        return x
    gradient = [Partial() if kind.is_replicate() else kind for kind in x.placements]
    return x.to_local(grad_placements=gradient)
