"""Auxiliary terms: numbers that the forwards of a step report in addition to the loss, by name.

A block reports by returning `h, {"name": Term(value, weight)}` in place of h. A term with a weight
is also trained on. Examples: the balance loss of a mixture of experts (models/moe.py), the z-loss
(training/loss.py).

`AuxiliaryTerms` is called outside of blocks alone, by the decoder and by the loss. So what is
compiled has no side effect, and a forward that activation checkpointing recomputes reports nothing.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


class Term(NamedTuple):
    """A number that a block reports for one microbatch."""

    # A scalar: the sum over the tokens that this rank has. All ranks' values are added. So ranks of
    # tensor parallelism report parts of their sum: of their slices of the sequence, or of their
    # heads. Of a DTensor the placement says what a rank has. Padding is left out where the block
    # knows it.
    value: Tensor
    weight: float = 0.0  # factor in the loss, which is a mean over tokens; 0: only logged
    # The mean over a tp group's ranks is meant, not the sum: of a plain value that each of them has
    # of the whole sequence, or that is a mean over its own heads.
    average_over_tp: bool = False


def part_of(term: Term, tp: int) -> Tensor:
    """Return what this rank adds to the sum over all ranks, a plain scalar. Of the value of a
    DTensor that n ranks have whole, that is 1/n. tp: ranks of a tp group."""
    value = term.value
    if not isinstance(value, DTensor):
        return value / tp if term.average_over_tp else value
    copies = 1
    gradient: list[Placement] = []
    for size, kind in zip(value.device_mesh.shape, value.placements, strict=True):
        copies *= size if kind.is_replicate() else 1
        gradient.append(Partial() if kind.is_replicate() else Replicate())
    return value.to_local(grad_placements=gradient) / copies


class AuxiliaryTerms:
    """The terms of one step, summed over this rank's microbatches. Given to the forwards that train,
    and to no other."""

    def __init__(
        self, scale: Tensor, tokens: Tensor, labels: Tensor | None = None, tp: int = 1
    ) -> None:
        """scale: the gradient of a token's term of weight 1, a scalar; tokens: of the global batch,
        without padding. What blocks report is divided by them. labels: how many of them count in
        the loss, by which is divided what the loss reports; None: all. tp: ranks of tensor
        parallelism."""
        self.scale = scale
        self.tp = tp
        self.tokens = tokens
        self.labels = tokens if labels is None else labels
        # name -> by how many tokens its sum is divided
        self.divisors: dict[str, Tensor] = {}
        # name -> number of the layer (None: of the whole model) -> the sum
        self.sums: dict[str, dict[int | None, Tensor]] = defaultdict(dict)

    def copied(self) -> "AuxiliaryTerms":
        """Return clones of the sums, so that later computation does not change them."""
        other = AuxiliaryTerms(self.scale, self.tokens, self.labels, self.tp)
        other.divisors = {name: divisor.clone() for name, divisor in self.divisors.items()}
        for name, of_layers in self.sums.items():
            other.sums[name] = {layer: value.clone() for layer, value in of_layers.items()}
        return other

    def add(self, h: Tensor, terms: dict[str, Term], layer: int | None = None) -> Tensor:
        """Report terms of one microbatch. Returns h, whose backward also adds their gradient: so no
        stage of a pipeline has to hand them to the next one."""
        for name, term in terms.items():
            value = part_of(term, self.tp)
            self.report(name, value, layer, self.tokens)
            if term.weight:
                h = InjectGradient.apply(h, value, self.scale, term.weight)
        return h

    def add_loss(self, loss: Tensor, name: str, value: Tensor, weight: float) -> Tensor:
        """Report a further loss of one microbatch, and train on it. value: the sum over this rank's
        labels, equal on the ranks of tensor parallelism; it is divided by the labels that count, as
        the loss is. Returns `loss`, whose backward also adds the gradient."""
        self.report(name, value / self.tp)
        scale = self.scale * self.tokens / self.labels
        return InjectGradient.apply(loss, value, scale, weight)

    def report(
        self, name: str, value: Tensor, layer: int | None = None, divisor: Tensor | None = None
    ) -> None:
        """Report a term without a gradient, or one whose gradient the caller adds. divisor: how many
        tokens of the global batch it was summed over; None: those whose label counts."""
        self.divisors[name] = self.labels if divisor is None else divisor
        of_layers = self.sums[name]
        value = value.detach()
        of_layers[layer] = of_layers[layer] + value if layer in of_layers else value


class InjectGradient(torch.autograd.Function):
    """The identity of h. Backward also gives `value` the gradient scale times weight, as if weight
    times value had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, value: Tensor, scale: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.weight = weight
        ctx.dtype = value.dtype
        # unlike h.view_as(h), it is no view: FSDP warns of views that leave a stage of a pipeline
        return h.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return grad, (scale * ctx.weight).to(ctx.dtype), None, None
