"""Note what every module of a model returns, and name the first one that returns something else.

Shapes:  B rows   T tokens of a row
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.moe import Experts

MODEL = ""  # its name among its modules
Part = Any  # an index of a tensor, as numpy.s_ makes it


class Moved(NamedTuple):
    """The first module, in the order in which they end, whose output differs."""

    module: str
    by: float  # relative to its largest number

    def __str__(self) -> str:
        return f"{self.module or 'the model'} (by {self.by:.1e})"


class Outputs:
    """Outputs by the name of their module, in the order in which they end: float64 [B, T, ...]. The
    second call of a module in a forward has `#2` behind its name."""

    def __init__(self, rows: int, length: int, limit: float):
        """limit: of relative differences (`Tiny.limit`)."""
        self.rows = rows
        self.length = length
        self.limit = limit
        self.by_name: dict[str, Tensor] = {}

    def add(self, module: str, output: Any) -> None:
        """Note what has a number for each token."""
        parts = [self.by_token(part) for part in tensors_in(output)]
        parts = [part for part in parts if part is not None]
        if not parts:
            return
        name = module
        call = 2
        while name in self.by_name:
            name = f"{module}#{call}"
            call += 1
        self.by_name[name] = torch.cat([part.flatten(2) for part in parts], -1)

    def by_token(self, x: Tensor) -> Tensor | None:
        """Return x as [B, T, features]; None if it has no number for each token."""
        if x.ndim >= 2 and x.shape[:2] == (self.rows, self.length):
            shaped = x.unsqueeze(-1)
        elif x.ndim >= 1 and x.shape[0] == self.rows * self.length:
            shaped = x.unsqueeze(-1).unflatten(0, (self.rows, self.length))
        else:
            return None
        return shaped.detach().to(torch.float64, copy=True)

    def first_moved(
        self, other: "Outputs", part: Part = ..., of_other: Part | None = None, limit: float = 0.0
    ) -> Moved | None:
        """Return the first module of which this part of the output, an index of [B, T, features],
        differs from that part of the other output; None where that of the model does not differ. So
        a module whose results only a term sees, as those of multi-token prediction, may see later
        tokens."""
        if of_other is None:
            of_other = part
        first: Moved | None = None
        for name, output in self.by_name.items():
            theirs = other.by_name.get(name)
            if theirs is None or theirs.shape[-1] != output.shape[-1]:
                continue
            by = distance(output[part], theirs[of_other])
            is_moved = not by <= max(limit, self.limit)
            if is_moved and first is None:
                first = Moved(name, by)
            if name == MODEL and not is_moved:
                return None
        return first


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinite for other shapes, and
    not a number where one is none."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    largest = float(one.abs().max())
    return float((one - other).abs().max()) / (largest or 1.0)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output that may be one, or a tuple of some."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors_in(part)


@contextmanager
def noting(model: nn.Module, rows: int, length: int, limit: float) -> Iterator[Outputs]:
    """Note the outputs of the forwards that are made inside of the context. Those of experts are
    left out: their rows are sorted by expert, and belong to no token."""
    seen = Outputs(rows, length, limit)

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        seen.add(name, output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, Experts):
                hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield seen
