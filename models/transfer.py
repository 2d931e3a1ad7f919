"""Transfer a learning rate over width and depth (`model.width_base`, `model.depth_base`): found on a
small model, it is near the best one of a large model too.

Width: the maximal update parametrisation (Yang et al., arXiv:2203.03466, table 3). Depth: CompleteP
(Dey et al., arXiv:2505.01618, table 1, alpha = 1), whose weight decay and epsilon count for both. In
that form some weights are multiplied by a factor in forward. Here the factor is part of the weight:
AdamW and Muon are indifferent to the size of a gradient, so a weight with f times the initial
deviation and f times the learning rate computes what a weight behind a factor f computes. The model
is that of its family, and so are its exports.

Everything is relative to the base: a model of that width and depth trains bit by bit as without these
options. Heads have the same width everywhere, so attention's 1 / sqrt(head_dim) needs no factor. Ranks
of latent projections (q_rank, kv_rank) are taken as constant.
"""

import math
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from models.family import Family
from models.moe import Experts


@dataclass(frozen=True)
class Scale:
    """Numbers of a parameter relative to the base. inputs, outputs: how many times as many it has,
    1 where they do not grow, where `factor` has accounted for them, and for a vector; factor: of its
    product in forward; epsilon: of AdamW, behind that factor; columns: how many times as many inputs
    it has in any case. training/rates.py has the learning rates that follow."""

    inputs: float
    outputs: float
    factor: float
    epsilon: float
    columns: float

    @property
    def deviation(self) -> float:
        """Return the factor of the initial deviation."""
        return self.factor / math.sqrt(self.inputs)


def adapted(family: Family, args: Any, cfg: Any) -> Family:
    """Return the family of a model with these numbers, with the scales of its parameters and initial
    values that follow them; without a base: the family. cfg: a configs/schema.py::Model."""
    if not (cfg.width_base or cfg.depth_base):
        return family
    base = {}
    if cfg.width_base:
        base["dim"] = cfg.width_base
    if cfg.depth_base:
        base["n_layers"] = cfg.depth_base
    scales = scales_of(family, args, cfg)
    rows = family.initial_values(replace(args, **base))
    scaled = [scaled_row(name, scale, rows) for name, scale in scales.items()]
    return replace(family, initial_values=lambda _: scaled, scales=scales)


def scaled_row(
    name: str, scale: Scale, rows: list[tuple[str, str, float]]
) -> tuple[str, str, float]:
    """Return the row of one parameter. rows: of the base. Raises ValueError if none matches."""
    for pattern, kind, deviation in rows:
        if fnmatchcase(name, pattern):
            return name, kind, deviation * scale.deviation
    raise ValueError(f"no row of initial_values() matches the parameter {name}")


def scales_of(family: Family, args: Any, cfg: Any) -> dict[str, Scale]:
    """Return the scale of every parameter of a model, by name. Which of its axes grow is seen in a
    model that is twice as wide."""
    width = args.dim / cfg.width_base if cfg.width_base else 1.0
    depth = args.n_layers / cfg.depth_base if cfg.depth_base else 1.0
    with torch.device("meta"):
        model = family.build(args)
        wider = family.build(widened(family, args, 2))
    stacked = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for own, _ in module.named_parameters(recurse=False)
    }
    embeddings = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    scales = {}
    for name, param in model.named_parameters():
        grown = [a != b for a, b in zip(param.shape, wider.get_parameter(name).shape, strict=True)]
        axes = grown[1:] if name in stacked else grown
        outputs, inputs = axes[-2:] if len(axes) > 1 else (False, False)
        if name in embeddings:  # [V, D]: it has an input for each row
            outputs, inputs = inputs, outputs
        scales[name] = scale_of(
            width if inputs else 1.0,
            width if outputs else 1.0,
            ends_branch=any(fnmatchcase(name, end) for end in family.numbers.branch_ends),
            depth=depth if name.startswith("layers.") else 1.0,
            width=width,
            multiplied=width**0.5
            if name in embeddings and family.numbers.scales_embedding
            else 1.0,
        )
    return scales


def widened(family: Family, args: Any, growth: int) -> Any:
    """Return the numbers of a model that is so many times as wide: it has more heads, as wide."""
    have = {field.name for field in fields(args)}
    widths = [name for name in family.numbers.widths if name in have]
    return replace(args, **{name: growth * getattr(args, name) for name in widths})


def scale_of(
    inputs: float,
    outputs: float,
    ends_branch: bool,
    depth: float,
    width: float,
    multiplied: float = 1.0,
) -> Scale:
    """Return the scale of a parameter. ends_branch: whether its product is added to the residual
    stream; depth: how many times as many blocks there are, 1 for what is in none; width: how many
    times as wide the model is; multiplied: by how many times as much forward multiplies its product,
    which must not grow."""
    columns = inputs
    factor = (1 / depth if ends_branch else 1.0) / multiplied
    if inputs != 1 and outputs == 1:  # logits, of words or experts: a deviation 1 / inputs
        factor /= inputs
        inputs = 1.0
    return Scale(inputs, outputs, factor, 1 / (width * depth), columns)
