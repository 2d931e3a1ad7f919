"""What sampling keeps of states and convolutions (models/recurrent.py): the state after each text, and
its last inputs. Texts of one length run together, over their own tokens alone: what pads the others
never touches a state.

Shapes:  B texts   T positions of a forward   H heads   E rows of a state   V its columns
         C channels   W taps
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.cores import STATE


def cached(core: Any) -> "CachedCore":
    """Return the module that replaces this core while a text is sampled."""
    return (CachedState if core.kind == STATE else CachedConvolution)(core)


class CachedCore(nn.Module):
    """A core that goes on after the tokens of the forwards before. `lengths` are the new tokens of each
    text, the first ones of a row."""

    supports_spec = True

    def __init__(self, core: Any):
        super().__init__()
        self.core = core
        self.kind = core.kind
        self.lengths: Sequence[int] = ()
        self.kept: Tensor | None = None  # [B, ...]
        self.last: tuple[Tensor, tuple[Tensor, ...]] | None = None  # kept before, and the inputs

    def groups(self) -> Iterator[tuple[list[int], int]]:
        """Yield the rows that have each length, and the length."""
        for length in sorted(set(self.lengths)):
            yield [row for row, own in enumerate(self.lengths) if own == length], length

    def keep(self, rows: list[int], new: Tensor) -> None:
        """Keep `new`, [len(rows), ...], of these rows. What was kept before is left as it was."""
        if len(rows) == len(self.lengths):
            self.kept = new
            return
        if self.kept is None:
            kept = new.new_zeros(len(self.lengths), *new.shape[1:])
        else:
            kept = self.kept.clone()
        kept[rows] = new
        self.kept = kept

    def note(self, *inputs: Tensor) -> None:
        """Note what the forward that begins goes on from, and its few inputs."""
        self.last = None if self.kept is None else (self.kept, inputs)

    def keep_first(self, lengths: Sequence[int]) -> None:
        """Keep what the last forward would have left of so many of its tokens, the first ones of each
        row."""
        assert self.last is not None, "the first forward is not taken back"
        self.kept, inputs = self.last
        self.lengths = lengths
        self(*inputs)


class CachedState(CachedCore):
    """A state that goes on from the one that is kept, [B, H, E, V]."""

    def forward(self, *inputs: Tensor, documents: None = None) -> Tensor:
        """Compute `models/recurrent.py::StateCore.forward` for new tokens; 0 for what is padding."""
        self.note(*inputs)
        before, outputs = self.kept, {}
        for rows, length in self.groups():
            part = [x[rows, :length] for x in inputs]
            state = None if before is None else before[rows]
            out, after = self.core.run(*part, state=state)
            self.keep(rows, after)
            outputs[tuple(rows)] = out
        return padded(outputs, inputs[0].shape[:2])


class CachedConvolution(CachedCore):
    """A convolution after the inputs that are kept, [B, W - 1, C]."""

    def forward(self, x: Tensor, weight: Tensor, documents: None = None) -> Tensor:
        """Compute `models/recurrent.py::ConvolutionCore.forward` for new tokens."""
        self.note(x, weight)
        kept, outputs = self.kept, {}
        if kept is None:
            kept = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2])
        for rows, length in self.groups():
            before, new = kept[rows], x[rows, :length]
            outputs[tuple(rows)] = self.core.run(new, weight, before=before)
            self.keep(rows, torch.cat((before, new), 1)[:, length:])
        return padded(outputs, x.shape[:2])


def padded(outputs: dict[tuple[int, ...], Tensor], shape: torch.Size) -> Tensor:
    """Return one tensor [B, T, ...] of the outputs of its rows, 0 behind their ends."""
    some = next(iter(outputs.values()))
    whole = some.new_zeros(*shape, *some.shape[2:])
    for rows, out in outputs.items():
        whole[list(rows), : out.shape[1]] = out
    return whole
