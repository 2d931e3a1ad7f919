"""Cores of mixers that keep a state instead of keys and values: linear attention, state-space layers, and
short convolutions. docs/forking.md has the contract in a page.

A core has no parameters, so that another module can take its place: where ranks share a sequence
(parallelisms/cp_state.py) and where earlier tokens are kept (training/sample.py). A mixer may have
several cores, of any kinds. None of them keeps anything between two forwards.

Shapes:  B batch   T sequence   H heads   E rows of a state   V its columns   C channels   W taps
         (under tensor parallelism H and C are this rank's share)
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.precision import wide_type


class StateCore(nn.Module):
    """A recurrence whose tokens change a state S [B, H, E, V] by an affine map, S -> A S + b, with A and b
    of the token alone. A subclass writes `run`; a layer trains, on every mesh, and samples with it.

    Its inputs are of tokens, [B, T, ...] each, and it gets nothing else: what is of a head, such as a
    bias of its decay, the mixer adds before.
    """

    kind: ClassVar[str] = "state"
    # A class that overrides `forward` sets it too (parallelisms/cores.py).
    supports_spec: ClassVar[bool] = True
    # Multiply-adds of a token with each number of the state, as a recurrence: one writes, one reads.
    # What a chunked form computes more is not counted. A family counts as many as weights.
    products: ClassVar[int] = 2

    def run(
        self, *inputs: Tensor, first: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what these tokens read, [B, T, H, V], and the state after them, [B, H, E, V] of the
        wide type (models/kernels/precision.py). first: bool [B, T], tokens before which the state is
        0, None: none of them. state: before these tokens; None: 0."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `run`")

    def summary(self, *inputs: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the map of all these tokens, of the wide type: A, [B, H, E, E], or [B, H, E] if it is
        diagonal, and b [B, H, E, V]. By default from `run` on the columns of the identity, V at a
        time; a core that knows its products computes them in less."""
        _, b = self.run(*inputs, first=first)
        E, V = b.shape[-2:]
        identity = torch.eye(E, dtype=b.dtype, device=b.device)
        columns = []
        for some in identity.split(V, 1):
            padded = F.pad(some, (0, V - some.shape[1])).expand_as(b)
            _, after = self.run(*inputs, first=first, state=padded)
            columns.append((after - b)[..., : some.shape[1]])
        return torch.cat(columns, -1), b

    def begin(
        self, *inputs: Tensor, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return A and b of `summary`, and a function of the state before these tokens that returns what
        they read. By default `run` computes everything again; a core may share work between both."""

        def read(state: Tensor) -> Tensor:
            return self.run(*inputs, first=first, state=state)[0]

        return *self.summary(*inputs, first=first), read

    def forward(self, *inputs: Tensor, documents: Any = None) -> Tensor:
        """Return what the tokens of whole sequences read, [B, T, H, V]. documents: as a model's forward
        gets them; None: a row is one."""
        first = None if documents is None else documents.within == 0
        return self.run(*inputs, first=first)[0]


class ConvolutionCore(nn.Module):
    """A causal convolution of each channel by itself over its last W tokens, this one included."""

    kind: ClassVar[str] = "convolution"
    # A class that overrides `forward` sets it too (parallelisms/cores.py).
    supports_spec: ClassVar[bool] = True

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        within: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        """x [B, T, C], weight [C, W], whose last tap is that of the token itself -> [B, T, C]. within:
        positions of the tokens in their documents, int64 [B, T]: what is before a document counts as
        0. before: the inputs before these tokens, [B, W - 1, C]; None: 0.

        A sum of products in one order, so that any cut of a sequence gives the same bits."""
        T = x.shape[1]
        W = weight.shape[1]
        padded = F.pad(x, (0, 0, W - 1, 0)) if before is None else torch.cat((before, x), 1)
        out = x * weight[:, W - 1]
        for back in range(1, W):
            begin = W - 1 - back
            earlier = padded[:, begin : begin + T]  # [B, T, C]: the inputs so many tokens before
            if within is not None:
                earlier = earlier.masked_fill((within < back)[..., None], 0)
            out = out + earlier * weight[:, begin]
        return out

    def forward(self, x: Tensor, weight: Tensor, documents: Any = None) -> Tensor:
        """Convolve whole sequences x [B, T, C] with weight [C, W]; documents: as a model's forward gets
        them; None: a row is one."""
        return self.run(x, weight, None if documents is None else documents.within)


def state_of_zeros(of: Tensor, *shape: int) -> Tensor:
    """Return a state before the first token, of the wide type of an input and on its device."""
    return of.new_zeros(shape, dtype=wide_type(of.dtype))
