"""Compare the table of optimizers with what a step of the running optimizer leaves, before step 1
(parallelisms/contract.py). A checkpoint, a resumed run or a plan would miss what the table does not
have, and no checkpoint with another shape could be loaded.

The optimizer steps on small weights that are made for this: of every number of dimensions that its
parameters have, wide and tall. So a shape that is only right for a square matrix is seen, and a state that is
only right where it begins empty. A rule whose elements depend on each other is also tried on shards:
there a sum over one rank's rows would be taken for that of the whole.
"""

import math
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.boxes import cuts
from training.init import fill
from training.kept import Shape, from_part
from training.optimizers import Group, Rule, materialise, rule_of

# number of dimensions -> shapes of the weights that are tried
PROBES: dict[int, list[Shape]] = {
    0: [()],
    1: [(5,)],
    2: [(2, 3), (3, 2)],
    3: [(2, 3, 5), (2, 5, 3)],
}
STEPS = 2  # some optimizers skip their first update
CLOSE = 1e-2  # of the largest update: rounding on shards, not another formula


class StateForm(NamedTuple):
    shape: Shape
    dtype: torch.dtype


def wrong_rows(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describe in sentences where the table and the optimizer differ. All ranks that share
    parameters call it together."""
    problems: dict[str, str] = {}
    for group in optimizer.param_groups:
        try:
            rule = rule_of(optimizer, group)
        except KeyError as error:
            problems[str(error)] = error.args[0]
            continue
        for problem in _wrong_row(optimizer, group, rule):
            problems.setdefault(rule.name, problem)
    return list(problems.values())


def _wrong_row(optimizer: torch.optim.Optimizer, group: Group, rule: Rule) -> list[str]:
    """Return the first problem with the row of a group, if there is one."""
    for ndim in sorted({param.ndim for param in group["params"]}):
        for shape in PROBES.get(ndim, []):
            weight = nn.Parameter(torch.zeros(shape))
            probe = _copy(optimizer, group, weight)
            numbers = _numbers(probe)
            _step(probe, weight)
            found = kept_forms(probe, weight)
            listed = listed_forms(rule, group, weight)
            if listed != found:
                return [
                    f"the optimizer {rule.name} keeps {_named(found, shape)} of a weight "
                    f"{list(shape)}, and its row in training/optimizers.py has "
                    f"{_named(listed, shape)}: correct the row"
                ]
            if not _begins_with_zeros(optimizer, group, weight):
                return [
                    f"the optimizer {rule.name} does not begin with a state of zeros, as every run "
                    "does, so that a checkpoint of step 0 has all names: where its step finds no "
                    "state it begins with other values; let it fill them in at the step that it "
                    "counts as the first"
                ]
            for name, value in _numbers(probe).items():
                if numbers.get(name) != value:
                    return [
                        f"a step of the optimizer {rule.name} changes its {name}, which no "
                        "checkpoint has: keep it in self.state of each weight, and in the row of "
                        "training/optimizers.py"
                    ]
    if not rule.is_one_kernel and isinstance(group["params"][0], DTensor):
        return _wrong_on_shards(optimizer, group, rule)
    return []


def kept_forms(probe: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, StateForm]:
    """Find the state that the optimizer really keeps of a weight, after a step that began with none."""
    kept = {}
    for key, value in probe.state[weight].items():
        if isinstance(value, Tensor):
            kept[key] = StateForm(tuple(value.shape), value.dtype)
    return kept


def listed_forms(rule: Rule, group: Group, weight: nn.Parameter) -> dict[str, StateForm]:
    """Return what the table has of such a weight."""
    forms = {}
    for key, kept in rule.state(group).items():
        shape = kept.shape(tuple(weight.shape))
        if shape is not None:
            forms[key] = StateForm(tuple(shape), kept.dtype or weight.dtype)
    return forms


def _numbers(probe: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers of the optimizer and of its group, by the words that code has for them."""
    of_all = dict(vars(probe))
    of_all |= {f'group["{name}"]': value for name, value in probe.param_groups[0].items()}
    return {name: value for name, value in of_all.items() if isinstance(value, int | float)}


def _copy(
    optimizer: torch.optim.Optimizer, group: Group, weight: nn.Parameter
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that has this one weight, and no state."""
    # copy.copy would leave out what a class adds to torch.optim.Optimizer
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer))
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    probe.state = defaultdict(dict)
    probe.param_groups = [group | {"params": [weight]}]
    return probe


@torch.no_grad()
def _step(probe: torch.optim.Optimizer, weight: nn.Parameter, steps: int = 1) -> Tensor:
    """Make steps from 0 with random gradients, the same on every mesh, and return the weight."""
    weight.zero_()
    for number in range(steps):
        weight.grad = torch.zeros_like(weight)
        if weight.ndim:
            fill(weight.grad, f"gradient {number}", "normal", 1.0, 0)
        probe.step()
    return weight.detach()


def _begins_with_zeros(
    optimizer: torch.optim.Optimizer, group: Group, weight: nn.Parameter
) -> bool:
    """Return whether the optimizer computes the same from the table's zeros as from no state."""
    empty = _step(_copy(optimizer, group, weight), weight, STEPS).clone()
    from_zeros = _copy(optimizer, group, weight)
    materialise(from_zeros)
    return torch.equal(empty, _step(from_zeros, weight, STEPS))


def _wrong_on_shards(optimizer: torch.optim.Optimizer, group: Group, rule: Rule) -> list[str]:
    """Compare steps on shards with steps on the whole weight."""
    placed = {(p.ndim, p.device_mesh, p.placements): p for p in group["params"]}
    for param in placed.values():
        whole_shape = [2 + axis for axis in range(param.ndim)]
        here = list(whole_shape)
        for axis, mesh_dim in cuts(param):
            whole_shape[axis] *= param.device_mesh.size(mesh_dim)
        zeros = torch.zeros(here, device=param.device)
        sharded = nn.Parameter(
            from_part(tuple(whole_shape), zeros, param.device_mesh, param.placements)
        )
        probe = _copy(optimizer, group, sharded)
        materialise(probe)
        before = {key: _place(value) for key, value in probe.state[sharded].items()}
        place = f"a weight {whole_shape} with the placements {param.placements}"
        try:
            found = _step(probe, sharded, STEPS).full_tensor()
        except RuntimeError as error:
            return [
                f"the optimizer {rule.name} cannot step on {place} ({str(error).splitlines()[0]}): "
                "what its row in training/optimizers.py says is whole meets parts of the gradient; "
                "compute it from grad.full_tensor(), or give the row `axes`"
            ]
        for key, value in probe.state[sharded].items():
            if key in before and before[key] != _place(value):
                return [
                    f"the optimizer {rule.name} replaces its {key} of {place} by a tensor that is "
                    "sharded otherwise: write the new values into the tensor that is there"
                ]
            if not isinstance(value, DTensor) and not _is_same(value, param):
                return [
                    f"the optimizer {rule.name} keeps another {key} on each rank of {place}, and "
                    "its row in training/optimizers.py says that it is whole: compute it from the "
                    "whole gradient (grad.full_tensor()), or give the row `axes`"
                ]
        weight = nn.Parameter(torch.zeros(whole_shape, device=param.device))
        expected = _step(_copy(optimizer, group, weight), weight, STEPS)
        if (found - expected).abs().max() > CLOSE * expected.abs().max():
            return [
                f"the optimizer {rule.name} updates {place} otherwise than the whole weight on "
                "one process: compute what needs more than one element from the whole gradient"
            ]
    return []


def _place(value: Tensor) -> tuple:
    return tuple(value.shape), value.dtype, getattr(value, "placements", None)


def _is_same(value: Tensor, param: DTensor) -> bool:
    """Return whether a plain tensor is the same on all ranks of the parameter's mesh."""
    if not math.prod(value.shape):
        return True
    extremes = torch.stack((value.double(), -value.double())).to(param.device)
    for dim in range(param.device_mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=param.device_mesh.get_group(dim))
    highest, lowest = extremes
    return torch.equal(highest, -lowest)


def _named(state: dict[str, StateForm], weight: Shape) -> str:
    words = []
    for key, form in sorted(state.items()):
        shape = str(list(form.shape))
        if form.shape == weight:
            shape = "like the parameter"
        elif form.shape == ():
            shape = "a scalar"
        is_usual = form.shape != () and form.dtype == torch.float32
        dtype = "" if is_usual else f", {str(form.dtype).removeprefix('torch.')}"
        words.append(f"{key} ({shape}{dtype})")
    return ", ".join(words) or "nothing"
