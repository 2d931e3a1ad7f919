"""Context parallelism of states and convolutions (models/recurrent.py).

Tokens act on a state by an affine map, S -> A S + b. Each rank computes the map of its tokens, all
gather the maps, and each applies those of the tokens before its own to 0: that is the state from
which its own tokens run. What is sent does not depend on the length of a sequence. A convolution
needs the last W - 1 inputs before its tokens, and all gather these.

A rank's tokens are one or two parts of the sequence (`parallelisms/mesh.py::Mesh.token_ranges`), and
each part has a separate map and tail. Backward sums the gradients of what was gathered.

Shapes:  P parts of a sequence, all ranks'   B sequences   t a rank's tokens of each   l of a part
         H heads   E rows of a state   V its columns   C channels   W taps
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol

from models.cores import STATE
from models.recurrent import ConvolutionCore, StateCore
from parallelisms.cores import CoreOfRanks
from parallelisms.mesh import Mesh


def shared(core: StateCore | ConvolutionCore, mesh: Mesh) -> nn.Module:
    """Return the module that replaces this core."""
    return (SharedState if core.kind == STATE else SharedConvolution)(core, mesh)


class GatherParts(torch.autograd.Function):
    """Stacks the tensors of all ranks of a group. Each rank uses them for other tokens, so the gradient
    of a rank's tensor is a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        everyone = funcol.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)
        )
        return everyone.unflatten(0, (-1, len(x)))  # [ranks, ...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        joined = grad.flatten(0, 1).contiguous()
        size, name = ctx.group.size(), ctx.group.group_name
        own = torch.ops._c10d_functional.reduce_scatter_tensor(joined, "sum", size, name)
        return funcol.wait_tensor(own), None


class PartsOfRanks(CoreOfRanks):
    """A core of which every rank computes its own parts of a sequence."""

    def __init__(self, core: Any, mesh: Mesh):
        super().__init__(core)
        self.group = mesh.device_mesh.get_group("cp")
        self.numbers = mesh.parts

    def parts(self, x: Tensor) -> list[Tensor]:
        """Cut this rank's tokens, [B, t, ...] -> [B, l, ...] each."""
        return list(x.chunk(len(self.numbers), 1))

    def within(self, documents: Any, length: int) -> list[Tensor | None]:
        """Return the positions of each part's tokens in their documents, int64 [B, l]; None without
        documents. length: of a part."""
        if documents is None:
            return [None] * len(self.numbers)
        return [documents.within[:, n * length : (n + 1) * length] for n in self.numbers]

    def gather(self, own: list[Tensor]) -> Tensor:
        """Return what all ranks have of their parts, [P, ...], in the order of the sequence."""
        everyone = GatherParts.apply(torch.stack(own), self.group)  # [ranks, parts of a rank, ...]
        if len(own) == 1:
            return everyone[:, 0]
        # rank r has parts r and P - 1 - r
        return torch.cat((everyone[:, 0], everyone[:, 1].flip(0)))


class SharedState(PartsOfRanks):
    """A state that goes from rank to rank."""

    def forward(self, *inputs: Tensor, documents: Any = None) -> Tensor:
        """Compute `models/recurrent.py::StateCore.forward` for this rank's tokens."""
        parts = list(zip(*map(self.parts, inputs), strict=True))
        starts = []
        for positions in self.within(documents, parts[0][0].shape[1]):
            starts.append(None if positions is None else positions == 0)
        maps, moves, reads = [], [], []
        for part, first in zip(parts, starts, strict=True):
            a, b, read = self.core.begin(*part, first=first)
            reads.append(read)
            moves.append(a.unsqueeze(-1) if a.dim() == 3 else a)
            maps.append(torch.cat((moves[-1], b), -1))
        a, b = self.gather(maps).tensor_split((moves[0].shape[-1],), -1)
        before = states_before(a, b)
        outputs = []
        for number, read in zip(self.numbers, reads, strict=True):
            outputs.append(read(before[number]))
        return torch.cat(outputs, 1)


def states_before(a: Tensor, b: Tensor) -> Tensor:
    """Return the state before each part, [P, B, H, E, V]. a [P, B, H, E, E], or of diagonal maps [P, B,
    H, E, 1]; b [P, B, H, E, V]. Every rank computes all of them, so that backward of all ranks comes
    to the same collective."""
    is_diagonal = a.shape[-1] == 1
    state = torch.zeros_like(b[0])
    states = [state]
    for number in range(len(b) - 1):
        moved = a[number] * state if is_diagonal else a[number] @ state
        state = moved + b[number]
        states.append(state)
    return torch.stack(states)


class SharedConvolution(PartsOfRanks):
    """A convolution that gets the inputs before its part from the ranks that have them."""

    def forward(self, x: Tensor, weight: Tensor, documents: Any = None) -> Tensor:
        """Compute `models/recurrent.py::ConvolutionCore.forward` for this rank's tokens."""
        reach = weight.shape[1] - 1  # tokens before a part that it needs
        if not reach:
            return self.core.run(x, weight)
        parts = self.parts(x)
        length = parts[0].shape[1]
        within = self.within(documents, length)
        kept = min(reach, length)
        tails = self.gather([part[:, length - kept :] for part in parts])  # [P, B, kept, C]
        # [B, reach + P kept, C]: a part shorter than `reach` needs the tails of several
        joined = nn.functional.pad(tails.transpose(0, 1).flatten(1, 2), (0, 0, reach, 0))
        outputs = []
        for number, part, positions in zip(self.numbers, parts, within, strict=True):
            before = joined[:, number * kept : number * kept + reach]
            outputs.append(self.core.run(part, weight, positions, before))
        return torch.cat(outputs, 1)
