"""AdamW whose two averages are kept in bfloat16: 4 bytes less for each number that is trained.

The arithmetic is that of fused AdamW in the weight's type: a piece of both averages is widened,
updated by the fused kernel, and rounded for storage alone.

To the nearest bfloat16 the average of squares would stall. A step lowers it by at most 1 - beta2 of
itself, and half a unit in the last place is 2^-9 to 2^-8 of it: above beta2 = 0.9981 it grows and
never shrinks (lab/bench/results/moments.txt). So rounding is stochastic: up with the probability
that keeps the mean. The random bits are a hash of the parameter's name, the step and
the element's index in the whole tensor. They are the same on every mesh, need no generator, and go
on after a resume.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from parallelisms.boxes import shard_of
from training.init import CHUNK, global_indices, hash64

AVERAGES = ("exp_avg", "exp_avg_sq")
# elements that are widened at a time: in a CPU's cache, or enough to fill a GPU
PIECE = {"cpu": CHUNK, "cuda": 1 << 24}


class AdamW(torch.optim.AdamW):
    """Its name is that of a checkpoint's optimizer: the state has AdamW's names.

    A group has `param_names`, by which `build_optimizer` gives parameters to torch.optim. Where
    `found_inf` is not 0 a step changes nothing, bit by bit: what is a bfloat16 already stays.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"]):
                if param.grad is not None:
                    self.update(name, param, group, found_inf)

    def update(
        self, name: str, param: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for key in AVERAGES:
                state[key] = torch.zeros_like(param, dtype=torch.bfloat16)
        step = state["step"]
        step += 1 if found_inf is None else 1 - found_inf
        key = hash64(step.long(), key_of(name))
        piece = PIECE.get(param.device.type, CHUNK)
        rows = [shard_of(t) for t in (param, param.grad, *(state[k] for k in AVERAGES))]
        first = 0
        for part, index in global_indices(param, piece):
            weight, gradient, *narrow = (t[first : first + len(part)] for t in rows)
            first += len(part)
            if not part.numel():
                continue
            wide = [average.to(weight.dtype) for average in narrow]
            torch._fused_adamw_(
                [weight],
                [gradient],
                *([average] for average in wide),
                [],
                [step],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            bits = hash64(index, key).view(part.shape)
            for shift, average, into in zip((48, 32), wide, narrow, strict=True):
                into.copy_(rounded(average, bits >> shift))


def key_of(name: str) -> int:
    digest = hashlib.sha256(f"moments:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # an int64


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Round to float32 values that bfloat16 holds exactly: each x, up (away from 0) or down, in the
    mean x. bits: int64; their lowest 16 are the random ones."""
    pattern = x.float().view(torch.int32)
    pattern = pattern + bits.bitwise_and_(0xFFFF).to(torch.int32)
    return pattern.bitwise_and_(-0x10000).view(torch.float32)
