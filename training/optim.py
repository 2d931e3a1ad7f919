"""The optimizer with its decay groups, the learning-rate schedules, and gradient clipping over the
whole mesh."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs import stages
from configs.schema import Config, Optimizer
from parallelisms.boxes import shard_of
from parallelisms.mesh import Mesh
from training import averages
from training.optimizers import OPTIMIZERS, with_dtype
from training.rates import options_of_group, rates_of


def build_optimizer(
    model: nn.Module,
    decay_rows: list[tuple[str, bool]],
    cfg: Optimizer,
    matrix_rows: Sequence[tuple[str, bool]] = (),
    mesh: Mesh | None = None,
    scales: Mapping[str, Any] = {},
) -> torch.optim.Optimizer:
    """Build the optimizer over the model's own (sharded) parameters: call it after
    `parallelisms.parallelize`, never before, or it would update tensors that the model no longer
    uses. Parameters that require no gradient are left out.

    decay_rows: (pattern of a parameter's name, weight decay applies); the first that matches
    counts. matrix_rows: in the same form, whether it is a hidden matrix. mesh: None for a model
    that is not sharded. scales: of parameters by name (models/transfer.py).
    """
    kind = OPTIMIZERS[cfg.kind]
    cfg = with_dtype(cfg, model)
    # One fused kernel updates many parameters, if they are on one mesh.
    groups: dict[tuple, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        decays = first_match(decay_rows, name)
        is_matrix = kind.matrices is not kind.others and first_match(matrix_rows, name)
        rule = kind.matrices if is_matrix else kind.others
        place = param.device_mesh if isinstance(param, DTensor) else None
        rates = rates_of(cfg, rule, name, param.shape, scales.get(name))
        key = (not decays, rule.name, place, rates)
        if key not in groups:
            groups[key] = {"params": [], **options_of_group(rule, cfg, decays, rates)}
        groups[key]["params"].append((name, param))
    # those that decay come first
    in_order = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    return kind.build(in_order, cfg, mesh)


def first_match(rows: Sequence[tuple[str, bool]], name: str) -> bool:
    """Return the value of the first row whose pattern matches. Raises ValueError if none does."""
    for pattern, value in rows:
        if fnmatchcase(name, pattern):
            return value
    raise ValueError(f"no row of {list(rows)} matches the parameter {name}")


# Schedules after the warmup: kind -> how much of the way from the peak down to min_ratio is done at
# progress p (0..1 after the warmup). tail: the share of that progress over which wsd decays.
DECAYED: dict[str, Callable[[float, float], float]] = {
    "constant": lambda p, tail: 0.0,
    "linear": lambda p, tail: p,
    # Loshchilov and Hutter, arXiv:1608.03983
    "cosine": lambda p, tail: 0.5 * (1 - math.cos(math.pi * p)),
    "wsd": lambda p, tail: max(0.0, 1 - (1 - p) / tail),  # MiniCPM, arXiv:2404.06395
}


def learning_rate(step: int, cfg: Config) -> float:
    """Return the learning rate of optimizer step `step` (0-based) of the run: a pure function, so a
    resumed run needs no state. cfg: of the step's stage, whose schedule may begin in mid-run.

    Warmup gives step s of a schedule the rate peak * (s + 1) / warmup_steps, so that no step is
    wasted at 0. The last step has exactly peak * min_ratio, except under `constant`.
    """
    steps = stages.schedule_steps(cfg)
    schedule = cfg.lr_schedule
    peak = cfg.optimizer.lr
    warmup = schedule.warmup_steps or 0
    done = step - steps.start
    if done < warmup:
        return peak * (done + 1) / warmup
    after = len(steps) - warmup
    progress = (done - warmup + 1) / after
    tail = schedule.decay_fraction * len(steps) / after
    decayed = DECAYED[schedule.kind](progress, tail)
    return peak * (1 - (1 - schedule.min_ratio) * decayed)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups. lr: of the run; a group has `lr_scale` times as much."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def step_if(fine: Tensor, optimizer: Any) -> None:
    """Call optimizer.step() where `fine` (bool, a scalar) is true; else weights and state stay as
    they are, bit by bit.

    No host-device sync: fused AdamW and Muon read `found_inf` on the device, as torch.amp.GradScaler
    makes them skip a step. SGD has no fused kernel for DTensors, and offloaded weights are on the
    CPU: there the host reads `fine`.
    """
    weight = optimizer.param_groups[0]["params"][0]
    reads_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    if reads_found_inf and weight.device == fine.device:
        optimizer.found_inf = (~fine).float()
        optimizer.step()
        del optimizer.found_inf
    elif fine.item():
        optimizer.step()
    averages.update(optimizer, fine)


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[nn.Parameter],
    max_norm: float,
    sum_over_stages: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most max_norm (0: leave them). Returns
    the norm before scaling, a float32 scalar.

    sum_over_stages: sums a scalar over the ranks of a pipeline, each of which has other parameters
    (Mesh.sum_over_pp).

    The norm is that of the whole, unsharded gradient (Pascanu et al., arXiv:1211.5063, for the
    clipping itself). It is exact to a few 1e-8, so that every mesh reports the same norm and scales
    by the same factor. There is no host-device sync. Raises ValueError for a gradient that is still
    to be summed over ranks.
    """
    grads = [p.grad for p in params if p.grad is not None]
    local = list(map(shard_of, grads))
    # (mesh, its dimensions that split the tensor) -> this rank's shards
    split: dict[tuple, list[Tensor]] = {}
    for grad, shard in zip(grads, local):
        split.setdefault(parts_of(grad), []).append(shard)
    total = torch.zeros((), dtype=torch.float64, device=local[0].device if local else None)
    for (mesh, dims), shards in split.items():
        squares = _sum_of_squares(shards)
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    norm = sum_over_stages(total).sqrt().to(local[0].dtype if local else torch.float32)
    if max_norm > 0 and local:
        # The formula of torch.nn.utils.clip_grads_with_norm_, whose arithmetic would mix Tensor and
        # DTensor.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, factor)
    return norm


def parts_of(tensor: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the tensor's mesh, and the dimensions of it that split the tensor: (None, ()) for a
    plain one."""
    if not isinstance(tensor, DTensor):
        return None, ()
    return tensor.device_mesh, split_over(tensor)


def split_over(grad: DTensor) -> tuple[int, ...]:
    """Return the dimensions of the tensor's mesh, by number, whose ranks hold different parts of a
    gradient."""
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient is not summed over the ranks yet: {grad.placements} on {grad.device_mesh}"
        )
    sizes = grad.device_mesh.shape
    return tuple(
        d
        for d, placement in enumerate(grad.placements)
        if not placement.is_replicate() and sizes[d] > 1
    )


ROW = 8192  # elements whose squares a CPU adds up in float32, one after another


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sum the squares of all elements, a float64 scalar.

    A GPU has one kernel for many tensors, which adds up in blocks. On a CPU `torch._foreach_norm`
    and `vector_norm` add the squares of a whole tensor into a few float32 numbers: 7e-4 too little
    at 16 M elements. So there the norms are of short rows, and float64 adds up the rows. That is
    nearly as fast, and needs no memory, unlike `(x * x).sum()`.
    """
    if tensors[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(tensors))
    else:
        norms_of_rows = []
        for tensor in tensors:
            flat = tensor.flatten()
            if len(flat) >= ROW:
                rows = flat.unfold(0, ROW, ROW)  # all whole ones
                norms_of_rows.append(torch.linalg.vector_norm(rows, dim=1))
            if len(flat) < ROW or len(flat) % ROW:
                rest = flat[len(flat) // ROW * ROW :]
                norms_of_rows.append(torch.linalg.vector_norm(rest, dim=0, keepdim=True))
        norms = torch.cat(norms_of_rows)
    return torch.linalg.vector_norm(norms, dtype=torch.float64).square()
