"""Check what a family says of its model against the model itself, built once on `meta`: without
memory or values, and before anything is sharded."""

from collections.abc import Sequence
from typing import Any

import torch

from configs.schema import Config
from models import lora
from parallelisms import cores, freezing, tp_check
from parallelisms.mesh import Mesh


def check(family: Any, args: Any, mesh: Mesh, cfg: Config, stages: Sequence[range]) -> None:
    """Raise InputError for a pattern of `training.freeze` or `optimizer.lr_multipliers`, a count of
    FLOPs or a plan of tensor parallelism that does not fit the model.

    family: a `models/family.py::Family`; args: its `Args`. stages: of the pipeline, the layers of
    each.
    """
    with torch.device("meta"):
        model = family.build(args)
    cores.check_flops(model, family.flops_per_token, cfg.training.seq_len)
    freezing.check(model, cfg.training.freeze, stages)
    untrained = {name for name, param in model.named_parameters() if not param.requires_grad}
    untrained.update(freezing.frozen(model, cfg.training.freeze))
    freezing.thaw(model)  # as it will be when it is sharded
    if mesh.tp > 1:
        tp_check.check(family.tp_plan(args), model, mesh.tp_mesh)
    if cfg.lora.rank:
        lora.add(model, cfg.lora)
        untrained = {name for name, _ in model.named_parameters() if not lora.is_adapter(name)}
    patterns = [pattern for pattern, _ in cfg.optimizer.lr_multipliers]
    freezing.check_multipliers(model, "optimizer.lr_multipliers", patterns, untrained)
