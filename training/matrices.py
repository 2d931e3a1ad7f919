"""An optimizer with one rule for the hidden matrices of a model, and AdamW for all other
parameters, so that a run has one optimizer (training/muon.py, training/soap.py)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class MatrixOptimizer(torch.optim.Optimizer):
    """The rule of a class for the groups whose "rule" is its RULE, fused AdamW for the others.

    Where `found_inf` (float32, a scalar on the weights' device) is set and not 0, a step changes
    nothing, bit by bit, without a host-device sync. This is the protocol between
    torch.amp.GradScaler and fused optimizers (training/optim.py::step_if).
    """

    RULE = ""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """adamw: options of AdamW. group: the ranks that hold parts of these weights."""
        super().__init__(groups, {})
        self.adamw: torch.optim.AdamW | None = None
        of_adamw = [g for g in self.param_groups if g["rule"] != self.RULE]
        if of_adamw:
            self.adamw = torch.optim.AdamW(of_adamw, **adamw, fused=True)
        self.group = group
        # step() reads found_inf
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        found_inf = getattr(self, "found_inf", None)
        of_rule = [g for g in self.param_groups if g["rule"] == self.RULE]
        if self.adamw is not None:
            self.adamw.param_groups = [g for g in self.param_groups if g["rule"] != self.RULE]
            self.adamw.state = self.state
            if found_inf is not None:
                self.adamw.found_inf = found_inf
            self.adamw.step()
            if found_inf is not None:
                del self.adamw.found_inf
        # torch.optim, too, leaves out weights without a gradient
        rows = [(p, g) for g in of_rule for p in g["params"] if p.grad is not None]
        if rows:
            skip = None if found_inf is None else found_inf != 0
            self.update_matrices([p for p, _ in rows], [g for _, g in rows], skip)

    def update_matrices(
        self, weights: list[nn.Parameter], groups: list[dict], skip: Tensor | None
    ) -> None:
        """Update these weights, each with its group. skip: bool, a scalar; whether nothing must
        change."""
        raise NotImplementedError
