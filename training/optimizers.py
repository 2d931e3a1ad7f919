"""The table of optimizers: how each is built, what it keeps of each parameter, and which parameters
it updates.

All who need to know an optimizer read this table: training/optim.py builds it; checkpoints, the plan
and the summary of a run take its state from here; training/optimizer_check.py compares the table
with what a step really leaves. A new optimizer is a row here, and a name in
`configs/schema.py::Optimizer.kind`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.cpu import bfloat16_is_fast

import torch
from torch import nn

from configs.schema import Optimizer
from parallelisms.mesh import Mesh
from training.kept import LIKE, SCALAR, SHARE, Kept
from training.matrices import MatrixOptimizer
from training.muon import Muon
from training.normuon import ROW_AVERAGES, NorMuon
from training.soap import SOAP, kept_by_soap

Group = dict[str, Any]  # of torch.optim: "params", and the options that they share


@dataclass(frozen=True)
class Rule:
    """The update rule of a parameter group."""

    name: str  # in a group's "rule"; of an optimizer with one rule, the name of its class
    state: Callable[[Group], dict[str, Kept]]  # key -> what is kept of each parameter
    # of a group, besides lr and weight_decay
    options: Callable[[Optimizer], Group] = lambda cfg: {}
    # Whether one kernel updates all elements of a group, each by itself. Then the plan of a deep
    # model may follow from that of a shallow one: the work grows with the elements alone.
    is_one_kernel: bool = False
    # Whether it updates by orthogonalised matrices, whose spectral norm is near 1.
    orthogonalises: bool = False


def with_dtype(cfg: Optimizer, model: nn.Module) -> Optimizer:
    """Resolve ns_dtype = "auto" for a model on its device."""
    if cfg.ns_dtype != "auto":
        return cfg
    on_gpu = any(param.device.type == "cuda" for param in model.parameters())
    chosen = "bfloat16" if on_gpu or bfloat16_is_fast() else "float32"
    return cfg.model_copy(update={"ns_dtype": chosen})


@dataclass(frozen=True)
class Kind:
    """A value of `optimizer.kind`."""

    build: Callable[[list[Group], Optimizer, Mesh | None], torch.optim.Optimizer]
    matrices: Rule  # of the hidden matrices, by the family's table MATRICES
    others: Rule  # of all other parameters

    @property
    def rules(self) -> tuple[Rule, Rule]:
        return self.matrices, self.others


# decay of the average of each row's mean square (arXiv:2510.05491)
NORMUON_BETA2 = 0.95
# of the authors' code (arXiv:2409.11321): the longest side of a matrix that has a factor, and the steps
# between two decompositions of the factors
SOAP_MAX_DIM = 10_000
SOAP_FREQUENCY = 10


def kept_by_adamw(group: Group) -> dict[str, Kept]:
    return {"exp_avg": LIKE, "exp_avg_sq": LIKE, "step": SCALAR}


def kept_by_sgd(group: Group) -> dict[str, Kept]:
    return {"momentum_buffer": LIKE} if group["momentum"] else {}


def adamw_options(cfg: Optimizer) -> Group:
    return {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps}


def build_adamw(groups: list[Group], cfg: Optimizer, mesh: Mesh | None) -> torch.optim.Optimizer:
    # fused: also on a CPU, where it measures several times faster than the default loop
    return torch.optim.AdamW(groups, **adamw_options(cfg), fused=True)


def build_sgd(groups: list[Group], cfg: Optimizer, mesh: Mesh | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum or 0.0)


def muon_options(cfg: Optimizer) -> Group:
    return {
        # Jordan's
        "momentum": 0.95 if cfg.momentum is None else cfg.momentum,
        "ns_dtype": cfg.ns_dtype,
        "adjust_lr_fn": cfg.adjust_lr_fn,
    }


def build_with_adamw(
    rule: type[MatrixOptimizer], groups: list[Group], cfg: Optimizer, mesh: Mesh | None
) -> torch.optim.Optimizer:
    return rule(groups, adamw_options(cfg), mesh.group_of_stage() if mesh is not None else None)


def kept_by_normuon(group: Group) -> dict[str, Kept]:
    return {"momentum_buffer": LIKE, "second_momentum_buffer": ROW_AVERAGES}


def normuon_options(cfg: Optimizer) -> Group:
    return muon_options(cfg) | {"beta2": NORMUON_BETA2}


def soap_options(cfg: Optimizer) -> Group:
    shared = {"betas": cfg.betas, "eps": cfg.eps}
    return shared | {"frequency": SOAP_FREQUENCY, "max_dim": SOAP_MAX_DIM}


ADAMW = Rule("AdamW", kept_by_adamw, is_one_kernel=True)
SGD = Rule("SGD", kept_by_sgd)
MUON = Rule("Muon", lambda group: {"momentum_buffer": LIKE}, muon_options, orthogonalises=True)
NORMUON = Rule("NorMuon", kept_by_normuon, normuon_options, orthogonalises=True)
SOAP_RULE = Rule("SOAP", kept_by_soap, soap_options)

OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(build_adamw, ADAMW, ADAMW),
    "sgd": Kind(build_sgd, SGD, SGD),
    "muon": Kind(partial(build_with_adamw, Muon), MUON, ADAMW),
    "normuon": Kind(partial(build_with_adamw, NorMuon), NORMUON, ADAMW),
    "soap": Kind(partial(build_with_adamw, SOAP), SOAP_RULE, ADAMW),
}


def rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    """Return the rule of a group of this optimizer. Raises KeyError if it has no row in the
    table."""
    name = group.get("rule", type(optimizer).__name__)
    for kind in OPTIMIZERS.values():
        for rule in kind.rules:
            if rule.name == name:
                return rule
    raise KeyError(f"the optimizer {name} has no row in training/optimizers.py")


def kept_of(rule: Rule, group: Group) -> dict[str, Kept]:
    """Return what is kept of each parameter of a group: by its rule, and the average of its weights
    (training/averages.py)."""
    if not group.get("average_decay"):
        return rule.state(group)
    return rule.state(group) | {"average": LIKE, "average_share": SHARE}


def sizes_kept(
    optimizer: torch.optim.Optimizer, group: Group, param: nn.Parameter
) -> list[tuple[int, int]]:
    """Return the bytes of this rank's part and of the whole, for each tensor of the optimizer's
    state of a parameter that is no scalar."""
    sizes = []
    for kept in kept_of(rule_of(optimizer, group), group).values():
        shapes = kept.shapes(param)
        if shapes is not None and shapes[1]:
            width = (kept.dtype or param.dtype).itemsize
            here, whole = map(math.prod, shapes)
            sizes.append((width * here, width * whole))
    return sizes


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the optimizer state that its first step would give it. A run then has
    all its memory from the start, and a checkpoint of step 0 has the same names as any other.

    A step with zero gradients, as `get_optimizer_state_dict` does it, would leave AdamW's `step` at
    1 (pytorch#164929). Raises KeyError for an optimizer without a row in the table.
    """
    for group in optimizer.param_groups:
        forms = kept_of(rule_of(optimizer, group), group)
        for param in group["params"] if forms else ():
            state = optimizer.state[param]
            # a fused optimizer reads a scalar on its parameter's device, the others on the CPU
            device = torch.device("cpu")
            if group.get("fused") or group.get("capturable"):
                device = param.device
            for key, kept in forms.items():
                zeros = kept.zeros(param, device) if key not in state else None
                if zeros is not None:
                    state[key] = zeros
