"""AdamW that clips while it updates (`compile.optimizer`): one compiled pass over each weight, its gradient and its
averages.

Clipping multiplies every gradient by the same number, and the update reads it again: 8 bytes for
each weight that the pass does not move. That is 4% of a step of 8B's layers on one H100
(lab/bench/results/device-h100.txt). The arithmetic is that of fused AdamW in float32, the
multiplication included; sums are rounded in other places. Gradients keep their size: what a hook
reads of them is not clipped.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from configs.schema import Compile, InputError


def check(cfg: Compile, device: torch.device) -> bool:
    """Return whether a run asks for this. Raises InputError where its weights are not on a GPU."""
    if not cfg.optimizer:
        return False
    if device.type != "cuda":
        raise InputError(
            f"compile.optimizer = true is for a GPU, and this run is on a {device.type}: set it to "
            "false"
        )
    return True


def scaling(optimizer: torch.optim.Optimizer) -> Callable[[list[Tensor], Tensor], None]:
    """Return the function that scales gradients for this optimizer: at once, or in its update."""
    if isinstance(optimizer, OnePassAdamW):
        return optimizer.scale_later
    return torch._foreach_mul_


class OnePassAdamW(torch.optim.AdamW):
    """Fused AdamW, until `scale_later` gives it a factor for the next step.

    Where `found_inf` is not 0 a step changes nothing, bit by bit.
    """

    def __init__(self, *args, backend: str, **options) -> None:
        super().__init__(*args, **options, fused=True)
        self.update_weight = torch.compile(update_weight, backend=backend, dynamic=True)
        self.factor: Tensor | None = None

    def scale_later(self, _: list[Tensor], factor: Tensor) -> None:
        """Multiply the gradients of the next step by this scalar."""
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        factor = self.factor
        self.factor = None
        if factor is None:
            return super().step()
        found_inf = getattr(self, "found_inf", None)
        counts = torch.ones_like(factor) if found_inf is None else 1 - found_inf
        for group in self.param_groups:
            with_gradient = [param for param in group["params"] if param.grad is not None]
            for param in with_gradient:
                state = self.state_of(param)
                state["step"] += counts
            if not with_gradient:
                continue
            # all of a group have taken as many steps
            numbers = numbers_of(group, state["step"].double(), factor, counts)
            for param in with_gradient:
                state = self.state_of(param)
                written = (param, state["exp_avg"], state["exp_avg_sq"])
                self.update_weight(
                    numbers, param.grad.reshape(-1), *(x.detach().view(-1) for x in written)
                )
        return None

    def state_of(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


OnePassAdamW.__name__ = "AdamW"  # as checkpoints name it: the state is AdamW's


def numbers_of(group: dict, step: Tensor, factor: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return the scalars of a pass, as tensors on the device. A Python number would be compiled in
    as a constant, or be copied with a host-device sync. step: float64."""
    beta1, beta2 = group["betas"]
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    numbers = {
        "factor": factor,
        "counts": counts > 0,
        "rate": group["lr"] / correction1,
        "correction": correction2.sqrt(),
        "keep": step.new_full((), 1 - group["lr"] * group["weight_decay"]),
        "new1": step.new_full((), 1 - beta1),
        "old2": step.new_full((), beta2),
        "new2": step.new_full((), 1 - beta2),
        "eps": step.new_full((), group["eps"]),
    }
    return {name: x.float() if x.is_floating_point() else x for name, x in numbers.items()}


def update_weight(
    numbers: dict[str, Tensor], grad: Tensor, weight: Tensor, average: Tensor, squares: Tensor
) -> None:
    """Update rows of numbers in place by AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm
    2)."""
    counts = numbers["counts"]
    grad = grad * numbers["factor"]
    new_average = average + (grad - average) * numbers["new1"]
    new_squares = squares * numbers["old2"] + grad * grad * numbers["new2"]
    size = new_squares.sqrt() / numbers["correction"] + numbers["eps"]
    new_weight = weight * numbers["keep"] - numbers["rate"] * new_average / size
    weight.copy_(torch.where(counts, new_weight, weight))
    average.copy_(torch.where(counts, new_average, average))
    squares.copy_(torch.where(counts, new_squares, squares))
