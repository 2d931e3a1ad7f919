"""Average the weights over the steps (`optimizer.average_decay`): an exponential moving average
(Polyak and Juditsky, 1992), which validates better than the weights while the learning rate is high.

It is state of the optimizer, `optimizer.<parameter>.average`: sharded, saved and loaded on any mesh as
AdamW's moments are. It begins with 0, so divided by 1 - decay^steps it is the average of the weights so
far, as Adam corrects its moments (Kingma and Ba, arXiv:1412.6980, section 3).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from training.muon import local


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, counts: Tensor) -> None:
    """Add the weights after a step to their averages, where the optimizer keeps any. counts: bool, a
    scalar; False: the step changed no weight, and changes no average."""
    for group in optimizer.param_groups:
        decay = group.get("average_decay", 0.0)
        for param in group["params"] if decay else ():
            if param.grad is None:
                continue
            state = optimizer.state[param]
            if "average" not in state:
                state["average"] = torch.zeros_like(param)
                state["average_steps"] = torch.zeros((), dtype=torch.float32)
            share = (1 - decay) * counts.to(param.device, param.dtype)
            local(state["average"]).lerp_(local(param.data), share)
            state["average_steps"] += counts.to(state["average_steps"].device)


def corrected(average: Tensor, steps: float, decay: float) -> Tensor:
    """Return the average of the weights so far. steps: how many are in it, at least one."""
    return average / (1 - decay**steps)


@contextmanager
def in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the averages in the place of the weights, inside of the context. This rank's shards exist
    twice meanwhile."""
    weights: list[tuple[nn.Parameter, Tensor]] = []
    with torch.no_grad():
        for param, state, decay in _averages(optimizer):
            weights.append((param, local(param.data).clone()))
            average = local(state["average"])
            local(param.data).copy_(corrected(average, float(state["average_steps"]), decay))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, weight in weights:
                local(param.data).copy_(weight)


def _averages(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[nn.Parameter, dict[str, Any], float]]:
    """Yield parameters that have an average, with the state of each and the decay."""
    for group in optimizer.param_groups:
        decay = group.get("average_decay", 0.0)
        for param in group["params"] if decay else ():
            if optimizer.state[param].get("average_steps", 0) > 0:
                yield param, optimizer.state[param], decay
