"""The table of optimizers: how each is built, what it keeps of each parameter, and which parameters
it updates.

All who need to know an optimizer read this table: training/optim.py builds it; checkpoints, the plan
and the summary of a run take its state from here; parallelisms/contract.py compares the table with
what a step really leaves. A new optimizer is a row here, and a name in
`configs/schema.py::Optimizer.kind`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Optimizer
from parallelisms.mesh import Mesh
from training import narrow_adamw
from training.muon import Muon

Group = dict[str, Any]  # of torch.optim: "params", and the options that they share


@dataclass(frozen=True)
class Kept:
    """A tensor that an optimizer keeps of a parameter: 0 before the first step."""

    like_parameter: bool  # it has the parameter's shape, and is sharded as it is; else a scalar
    dtype: torch.dtype | None = None  # None: the parameter's

    def zeros(self, param: nn.Parameter, device: torch.device) -> Tensor:
        """device: of a scalar."""
        dtype = self.dtype or param.dtype
        if self.like_parameter:
            return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        return torch.zeros((), dtype=dtype, device=device)


LIKE = Kept(like_parameter=True)
NARROW = Kept(like_parameter=True, dtype=torch.bfloat16)
SCALAR = Kept(like_parameter=False, dtype=torch.float32)


@dataclass(frozen=True)
class Rule:
    """The update rule of a parameter group."""

    name: str  # in a group's "rule"; of an optimizer with one rule, the name of its class
    state: Callable[[Group], dict[str, Kept]]  # key -> what is kept of each parameter
    # of a group, besides lr and weight_decay
    options: Callable[[Optimizer], Group] = lambda cfg: {}
    lr_scale: Callable[[Optimizer], float] = lambda cfg: 1.0  # times the run's learning rate
    # Whether one kernel updates all elements of a group, each by itself. Then the plan of a deep
    # model may follow from that of a shallow one: the work grows with the elements alone.
    is_one_kernel: bool = False


@dataclass(frozen=True)
class Kind:
    """A value of `optimizer.kind`."""

    build: Callable[[list[Group], Optimizer, Mesh | None], torch.optim.Optimizer]
    matrices: Rule  # of the hidden matrices, by the family's table MATRICES
    others: Rule  # of all other parameters

    @property
    def rules(self) -> tuple[Rule, Rule]:
        return self.matrices, self.others


def kept_by_adamw(group: Group) -> dict[str, Kept]:
    average = NARROW if group.get("moment_dtype") == "bfloat16" else LIKE
    state = {"exp_avg": average, "exp_avg_sq": average, "step": SCALAR}
    return state | ({"max_exp_avg_sq": LIKE} if group.get("amsgrad") else {})


def kept_by_sgd(group: Group) -> dict[str, Kept]:
    return {"momentum_buffer": LIKE} if group["momentum"] else {}


def adamw_options(cfg: Optimizer) -> Group:
    return {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps}


def moments_of_adamw(cfg: Optimizer) -> Group:
    """Return the options of a group that a checkpoint records, where they differ from the
    default."""
    return {} if cfg.moment_dtype == "float32" else {"moment_dtype": cfg.moment_dtype}


def build_adamw(groups: list[Group], cfg: Optimizer, mesh: Mesh | None) -> torch.optim.Optimizer:
    if cfg.moment_dtype == "bfloat16":
        return narrow_adamw.AdamW(groups, **adamw_options(cfg), fused=True)
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


def build_muon(groups: list[Group], cfg: Optimizer, mesh: Mesh | None) -> torch.optim.Optimizer:
    return Muon(groups, adamw_options(cfg), mesh.group_of_stage() if mesh is not None else None)


ADAMW = Rule("AdamW", kept_by_adamw, moments_of_adamw, is_one_kernel=True)
SGD = Rule("SGD", kept_by_sgd)
MUON = Rule("Muon", lambda group: {"momentum_buffer": LIKE}, muon_options)

OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(build_adamw, ADAMW, ADAMW),
    "sgd": Kind(build_sgd, SGD, SGD),
    "muon": Kind(build_muon, MUON, replace(ADAMW, lr_scale=lambda cfg: cfg.adamw_lr_scale)),
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


def sizes_like_parameter(optimizer: torch.optim.Optimizer, group: Group) -> list[int]:
    """Return the bytes per element of each optimizer-state tensor that has the parameter's size."""
    sizes = []
    for kept in rule_of(optimizer, group).state(group).values():
        if kept.like_parameter:
            sizes.append((kept.dtype or group["params"][0].dtype).itemsize)
    return sizes


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the optimizer state that its first step would give it. A run then has
    all its memory from the start, and a checkpoint of step 0 has the same names as any other.

    A step with zero gradients, as `get_optimizer_state_dict` does it, would leave AdamW's `step` at
    1 (pytorch#164929). Raises KeyError for an optimizer without a row in the table.
    """
    for group in optimizer.param_groups:
        forms = rule_of(optimizer, group).state(group)
        for param in group["params"] if forms else ():
            state = optimizer.state[param]
            # a fused optimizer reads a scalar on its parameter's device, the others on the CPU
            device = torch.device("cpu")
            if group.get("fused") or group.get("capturable"):
                device = param.device
            for key, kept in forms.items():
                if key not in state:
                    state[key] = kept.zeros(param, device)


def kept_after_a_step(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Kept]:
    """Find the state that the optimizer really keeps of a parameter, by a step of a copy of the
    optimizer on a 2 x 2 weight."""
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros_like(weight)
    # copy.copy would leave out what a class adds to torch.optim.Optimizer
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer))
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    probe.state = defaultdict(dict)
    probe.param_groups = [group | {"params": [weight]}]
    probe.step()
    kept = {}
    for key, value in probe.state[weight].items():
        if isinstance(value, Tensor):
            same_type = value.dtype == weight.dtype
            like = value.shape == weight.shape
            kept[key] = Kept(like, None if like and same_type else value.dtype)
    return kept


def wrong_rows(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describe in sentences where the table and the optimizer differ: a checkpoint, a resumed run
    or a plan would miss what the table does not have."""
    problems = {}
    for group in optimizer.param_groups:
        try:
            rule = rule_of(optimizer, group)
        except KeyError as error:
            problems[str(error)] = error.args[0]
            continue
        listed = rule.state(group)
        found = kept_after_a_step(optimizer, group)
        if listed != found:
            problems[rule.name] = (
                f"the optimizer {rule.name} keeps {_named(found)} of each parameter, and its row "
                f"in training/optimizers.py has {_named(listed)}: correct the row"
            )
    return list(problems.values())


def _named(state: dict[str, Kept]) -> str:
    words = []
    for key, kept in sorted(state.items()):
        form = "like the parameter" if kept.like_parameter else "a scalar"
        dtype = "" if kept.dtype is None else f", {str(kept.dtype).removeprefix('torch.')}"
        words.append(f"{key} ({form}{dtype})")
    return ", ".join(words) or "nothing"
