"""Find the options of a parameter's group: the optimizer's, times the factors of the parameter. These
come from the transfer of the learning rate (models/transfer.py) and from `optimizer.lr_multipliers`."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from configs.schema import Optimizer
from training.muon import LR_FACTORS
from training.optimizers import Group, Rule


class RateFactors(NamedTuple):
    """Factors of the options of a parameter."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def rates_of(
    cfg: Optimizer, rule: Rule, name: str, shape: Sequence[int], scale: Any = None
) -> RateFactors:
    """Return the factors of a parameter's options. shape: of the whole parameter; scale: its
    models/transfer.py::Scale, or None."""
    rates = RateFactors() if scale is None else transferred(scale, rule, cfg, shape)
    for pattern, factor in cfg.lr_multipliers:
        if fnmatchcase(name, pattern):
            return rates._replace(lr=rates.lr * factor)
    return rates


def transferred(scale: Any, rule: Rule, cfg: Optimizer, shape: Sequence[int]) -> RateFactors:
    """Return the factors that keep a learning rate right over width and depth: of AdamW, table 3 of
    Yang et al., arXiv:2203.03466. The decay of a step, lr * weight_decay, stays as it is."""
    lr = scale.factor
    if rule.orthogonalises:
        lr *= of_spectral_norm(scale, cfg, shape)
    else:
        lr /= scale.inputs
    return RateFactors(lr=lr, decay=1 / lr, eps=scale.epsilon / scale.factor)


def of_spectral_norm(scale: Any, cfg: Optimizer, shape: Sequence[int]) -> float:
    """Return the factor of Muon's learning rate that lets the spectral norm of an update grow as
    sqrt(outputs / columns) (Yang, Simon and Bernstein, arXiv:2310.17813), behind scale.factor, which
    may have accounted for the columns already: a projection to a latent of constant rank."""
    rows, columns = shape[-2:]
    lr_factor = LR_FACTORS[cfg.adjust_lr_fn]
    at_base = lr_factor(rows / scale.outputs, columns / scale.columns)
    wanted = math.sqrt(scale.outputs * scale.columns) / scale.inputs
    return wanted * at_base / lr_factor(rows, columns)


def options_of_group(rule: Rule, cfg: Optimizer, decays: bool, rates: RateFactors) -> Group:
    """Return the options of a group of parameters."""
    options = {
        "rule": rule.name,
        "lr": cfg.lr * rates.lr,
        "lr_scale": rates.lr,
        "weight_decay": cfg.weight_decay * rates.decay if decays else 0.0,
        **rule.options(cfg),
    }
    if cfg.average_decay:
        options["average_decay"] = cfg.average_decay
    if rates.eps != 1 and not rule.orthogonalises:
        options["eps"] = cfg.eps * rates.eps
    return options
