"""Auxiliary terms as a run logs them: each by its name, as a mean over tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

from models.terms import AuxiliaryTerms
from parallelisms.mesh import Mesh
from training import experts


class TermLog:
    """Adds up what the steps report (models/terms.py::AuxiliaryTerms) until it is logged. Terms of
    experts are left to training/experts.py."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # of all ranks, in one order; a stage of a pipeline has some of them
        self.names: list[str] | None = None
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.sums: dict[str, Tensor | float] = {}  # name -> float64 sum of this rank's part

    def add(self, terms: AuxiliaryTerms, skipped: bool) -> None:
        """Add the terms of a step, unless it was skipped. No host-device sync.
        Raises ValueError for a term that the ranks could not sum."""
        for name, value, divisor in named(terms):
            if self.names is not None and name not in self.names:
                raise ValueError(
                    f"the auxiliary term {name} was not reported in the first step: report it in "
                    "every step, as 0 where it does not apply"
                )
            so_far = self.sums.get(name, 0.0)
            self.sums[name] = so_far if skipped else so_far + value.double() / divisor
        self.steps += not skipped

    def line(self) -> dict[str, float]:
        """Return the terms, as means over the tokens of each and over the steps since the last
        line, and reset them. Called by all ranks, and all get the same."""
        if self.names is None:
            of_ranks = self.mesh.gather(list(self.sums))
            self.names = sorted({name for names in of_ranks for name in names})
        values: dict[str, float] = {}
        if self.names and self.steps:
            table = torch.zeros(len(self.names), dtype=torch.float64, device=self.mesh.device)
            for i, name in enumerate(self.names):
                table[i] = self.sums.get(name, 0.0)
            sums = self.mesh.sum_over_ranks(table).tolist()
            means = [total / self.steps for total in sums]
            values = dict(zip(self.names, means, strict=True))
        self.reset()
        return values


def named(terms: AuxiliaryTerms) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the scalars under the names of their metrics, and the divisor of each. Raises
    ValueError for anything else."""
    for term, of_layers in terms.sums.items():
        if term in experts.TERMS:
            continue
        for layer, value in of_layers.items():
            name = term if layer is None else f"{term}/layer-{layer}"
            if value.numel() != 1:
                raise ValueError(
                    f"the auxiliary term {name} has the shape {list(value.shape)}: report a scalar, "
                    "the sum over the tokens"
                )
            yield name, value, terms.divisors[term]
