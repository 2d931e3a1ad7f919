"""Average the weights over the steps (`optimizer.average_decay`): an exponential moving average
(Polyak and Juditsky, 1992), which validates better than the weights while the learning rate is high.

It is state of the optimizer, `optimizer.<parameter>.average`: sharded, saved and loaded on any mesh as
AdamW's moments are. It begins with 0, so it is divided by the sum of the shares that all weights so far
have in it, `average_share`: 1 - decay^steps with one decay, as Adam corrects its moments (Kingma and Ba,
arXiv:1412.6980, section 3), and right too for a run that goes on with another decay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallelisms.boxes import shard_of


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
                state["average_share"] = torch.zeros((), dtype=torch.float64)
            share = (1 - decay) * counts.to(param.device, param.dtype)
            shard_of(state["average"]).lerp_(shard_of(param.data), share)
            of_all = state["average_share"]
            of_all += (1 - decay) * counts.to(of_all.device, of_all.dtype) * (1 - of_all)


def corrected(average: Tensor, share: float) -> Tensor:
    """Return the average of the weights so far. share: theirs in `average`, more than 0."""
    return average / share


@contextmanager
def in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the averages in the place of the weights, inside of the context. This rank's shards exist
    twice meanwhile. No save may be copying them (CheckpointManager.wait_for_copy)."""
    weights: list[tuple[nn.Parameter, Tensor]] = []
    with torch.no_grad():
        for param, state in _averages(optimizer):
            weights.append((param, shard_of(param.data).clone()))
            average = shard_of(state["average"])
            shard_of(param.data).copy_(corrected(average, float(state["average_share"])))
    try:
        yield
    finally:
        with torch.no_grad():
            for param, weight in weights:
                shard_of(param.data).copy_(weight)


def _averages(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield parameters that have an average, with the state of each."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state[param].get("average_share", 0) > 0:
                yield param, optimizer.state[param]
