"""LoRA: low-rank adapters added to frozen weights (Hu et al., arXiv:2106.09685).

A linear layer with the frozen weight W [out, in] computes y = x W^T + (alpha / rank) (x A^T) B^T. Only
A [rank, in] and B [out, rank] are trained. B begins with 0, so a run begins with the model that it
adapts. The adapters of a layer `wq` are its parameters `wq.lora_a` and `wq.lora_b`; those of experts,
whose weights stand in one parameter `w1`, are `w1_lora_a` [X, rank, in] and `w1_lora_b` [X, out, rank].

As all of models/ this is single-device code. parallelisms/lora.py says how a mesh splits adapters.

Shapes:  M rows of all experts   X experts
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.family import Family
from models.kernels.grouped_product import AdaptedWeight
from models.moe import Experts

# Of the experts' parameters, those that may have adapters, in the order of `Experts.weights`.
OF_EXPERTS = ("w1", "w2", "w3")


def is_adapter(name: str) -> bool:
    """Return True if this is the name of an adapter's parameter."""
    return name.endswith(("lora_a", "lora_b"))


def scale_of(lora: Any) -> float:
    """lora: a configs/schema.py::Lora."""
    return lora.alpha / lora.rank


def add(model: nn.Module, lora: Any) -> None:
    """Give adapters to the layers of the blocks that lora.targets names, in place. The model may be
    on `meta`, and may be a stage of a pipeline. lora: a configs/schema.py::Lora."""
    for module in model.layers.modules():
        if isinstance(module, Experts):
            add_to_experts(module, lora)
    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.targets:
            add_to_linear(module, lora)


def new_adapter(like: Tensor, *shape: int) -> nn.Parameter:
    """Allocate an uninitialised adapter on the device of a weight and in its dtype, which is
    float32 before any cast."""
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


class LowRank(nn.Module):
    """Low-rank product that a linear layer's adapters add to its output. It has no parameters:
    tensor parallelism puts another module in its place (parallelisms/lora.py), and their names
    stay."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute x [..., in], a [rank, in], b [out, rank] -> scale (x a^T) b^T [..., out]. The
        narrow tensor is scaled, which is less work than to scale the result."""
        return F.linear(self.scale * F.linear(x, a), b)


class AdaptedLinear(nn.Linear):
    """A linear layer with adapters of its weight."""

    low_rank: nn.Module
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.low_rank(input, self.lora_a, self.lora_b)


def add_to_linear(linear: nn.Linear, lora: Any) -> None:
    """Make a linear layer an `AdaptedLinear`, in place: its hooks, which may be those of tensor
    parallelism, and the name of its weight stay."""
    linear.lora_a = new_adapter(linear.weight, lora.rank, linear.in_features)
    linear.lora_b = new_adapter(linear.weight, linear.out_features, lora.rank)
    linear.low_rank = LowRank(scale_of(lora))
    linear.__class__ = adapted_class(AdaptedLinear, type(linear))


@cache
def adapted_class(adapted: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the modules of class `base` that have adapters, as FSDP2 makes a class of
    each that it shards. adapted: that of plain ones."""
    if issubclass(adapted, base):
        return adapted
    return type(f"Adapted{base.__name__}", (adapted, base), {})


class AdaptedExperts(Experts):
    """Experts with adapters of their weights."""

    adapted: list[str]  # the names of these weights
    scale: float

    def weights(self) -> list[Any]:
        weights: list[Any] = super().weights()
        for name in self.adapted:
            place = OF_EXPERTS.index(name)
            a, b = self.parts(getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b"))
            weights[place] = AdaptedWeight(weights[place], a, b, self.scale)
        return weights


def add_to_experts(experts: Experts, lora: Any) -> None:
    """Make experts `AdaptedExperts`, in place."""
    experts.adapted = [name for name in OF_EXPERTS if name in lora.targets]
    experts.scale = scale_of(lora)
    for name in experts.adapted:
        weight = getattr(experts, name)
        count, out_features, in_features = weight.shape
        a = new_adapter(weight, count, lora.rank, in_features)
        b = new_adapter(weight, count, out_features, lora.rank)
        experts.register_parameter(f"{name}_lora_a", a)
        experts.register_parameter(f"{name}_lora_b", b)
    experts.__class__ = adapted_class(AdaptedExperts, type(experts))


# What a family says of a model with adapters ------------------------------------------------------


@dataclass(frozen=True)
class AdaptedPlace:
    """A weight that has adapters. name: of the parameter A; experts: how many, 0 for a linear
    layer."""

    name: str
    in_features: int
    out_features: int
    experts: int

    def parameters(self, rank: int, experts: int) -> int:
        """Count the parameters of A and B, for this many of the experts."""
        numbers = rank * (self.in_features + self.out_features)
        return numbers * experts if self.experts else numbers


def places(build: Callable[[Any], nn.Module], args: Any, lora: Any) -> list[AdaptedPlace]:
    """Return every weight of the model that has adapters. build: that of its family."""
    with torch.device("meta"):
        model = build(args)
    add(model, lora)
    found = []
    for name, a in model.named_parameters():
        if not name.endswith("lora_a"):
            continue
        b = model.get_parameter(name[:-1] + "b")
        experts = len(a) if a.ndim == 3 else 0
        found.append(AdaptedPlace(name, a.shape[-1], b.shape[-2], experts))
    return found


def adapted(family: Family, lora: Any) -> Family:
    """Return the family with what changes where only adapters are trained; lora.rank = 0: the
    family.

    The FLOPs of a frozen weight that is multiplied are 4 per token and not 6
    (models/arithmetic.py): 2 in forward, 2 for the gradient of its input, and none for its own.
    Adapters have 6. So it is the family's count, less 2 N, plus 6 n, where n are the numbers of the
    adapters that work on a token. (The first block needs no gradient of its input, which is not
    left out.)
    """
    if not lora.rank:
        return family

    def of_adapters(args: Any) -> int:
        experts = getattr(args, "n_experts", 0)
        found = places(family.build, args, lora)
        return sum(place.parameters(lora.rank, experts) for place in found)

    def flops_per_token(args: Any, seq_len: int) -> float:
        experts_of_a_token = getattr(args, "experts_per_token", 0)
        found = places(family.build, args, lora)
        working = sum(place.parameters(lora.rank, experts_of_a_token) for place in found)
        # without a key there is no attention: 6 N
        of_weights = family.flops_per_token(args, 0)
        return family.flops_per_token(args, seq_len) - of_weights / 3 + 6.0 * working

    def initial_values(args: Any) -> list[tuple[str, str, float]]:
        """Return how weights are drawn: A is normal, with the deviation 1 / sqrt(3 in) that the
        authors' code has too (there it is uniform); B is 0."""
        rows = {"*lora_b": ("zeros", 0.0)}
        for place in places(family.build, args, lora):
            words = ["*" if word.isdigit() else word for word in place.name.split(".")]
            pattern = ".".join(words)
            rows[pattern] = ("normal", 1 / math.sqrt(3 * place.in_features))
        return [(pattern, *row) for pattern, row in rows.items()] + family.initial_values(args)

    def describe(args: Any) -> str:
        return (
            f"{family.describe(args)}; {of_adapters(args):,} of the parameters are trained, adapters "
            f"of rank {lora.rank} of {', '.join(lora.targets)}; {family.parameters(args):,} are frozen"
        )

    return replace(
        family,
        initial_values=initial_values,
        trained_parameters=of_adapters,
        flops_per_token=flops_per_token,
        describe=describe,
    )
