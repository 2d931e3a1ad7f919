"""Compute the softmax, loss and gradient of a piece's logits between the GEMMs of training/loss.py,
by PyTorch's operators or compiled (`compile.enabled`).

PyTorch's operators read and write each float32 logit eleven times. Compiled passes read the logits
as the GEMM left them, three times, and write their gradient once: with bfloat16 8 bytes per logit
instead of 44, and no float32 copy of a piece.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import Compile
from models.kernels import precision


class LossPasses(NamedTuple):
    """Three passes over a piece's logits [C, V], between the GEMMs. The second argument of
    each is a buffer [C, V] of their wide type, or the logits themselves if they have that type.
    top, scale, and what the first two return: wide [C]; row int64 [C, 1], is_local bool [C]; for
    `gradient` it may be wide: the weights of labels, by which it multiplies their one_hot.

    largest(logits, wide) -> each token's largest logit. sums(logits, wide, top, row, is_local) ->
    its sum of exp(logit - top), and label's logit - top, 0 where this rank does not hold it.
    gradient(logits, wide, top, scale, row, is_local) -> exp(logit - top) * scale - one_hot(label),
    in the place of the logits.
    """

    use_wide: bool  # otherwise they get the logits for a buffer
    largest: Callable[..., Tensor]
    sums: Callable[..., tuple[Tensor, Tensor]]
    gradient: Callable[..., Tensor]
    backend: str = ""  # that has compiled them


def _largest(logits, wide):
    if wide is not logits:
        wide.copy_(logits)
    return wide.amax(dim=1)


def _sums(logits, wide, top, row, is_local):
    wide.sub_(top[:, None])
    at_label = wide.gather(1, row).squeeze(1).where(is_local, 0)
    return wide.exp_().sum(dim=1), at_label


def _gradient(logits, wide, top, scale, row, is_local):
    wide.mul_(scale[:, None])
    wide.scatter_add_(1, row, -is_local.to(wide.dtype)[:, None])
    return wide if wide is logits else logits.copy_(wide)


EAGER = LossPasses(True, _largest, _sums, _gradient)


def compiled_loss(loss: Callable[..., Tensor], cfg: Compile) -> Callable[..., Tensor]:
    """Return `loss` with compiled passes, if blocks are compiled."""
    return partial(loss, passes=compiled(cfg.backend)) if cfg.enabled else loss


@cache
def compiled(backend: str) -> LossPasses:
    """Compile a pass. The last piece is shorter, so each pass is compiled for any length after the
    first two."""
    largest, sums, gradient = (
        torch.compile(one, backend=backend, fullgraph=True)
        for one in (largest_logit, sum_exponentials, replace_by_gradient)
    )
    return LossPasses(False, largest, sums, gradient, backend)


def largest_logit(logits: Tensor, _: Tensor) -> Tensor:
    return precision.wide(logits.amax(dim=1))


def sum_exponentials(
    logits: Tensor, _: Tensor, top: Tensor, row: Tensor, is_local: Tensor
) -> tuple[Tensor, Tensor]:
    below_top = precision.wide(logits) - top[:, None]
    at_label = below_top.gather(1, row).squeeze(1).where(is_local, 0)
    return below_top.exp().sum(dim=1), at_label


def replace_by_gradient(
    logits: Tensor, _: Tensor, top: Tensor, scale: Tensor, row: Tensor, is_local: Tensor
) -> Tensor:
    probs = (precision.wide(logits) - top[:, None]).exp() * scale[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_label = (columns == row) * is_local[:, None]
    return logits.copy_(probs - is_label.to(probs.dtype))


@cache
def capped(passes: LossPasses, cap: float) -> LossPasses:
    """Return passes over logits with a soft cap, cap * tanh(logit / cap), which the first one puts in
    their place; compiled where `passes` are."""

    def largest(logits: Tensor, wide: Tensor) -> Tensor:
        return largest_logit(logits.div_(cap).tanh_().mul_(cap), wide)

    def gradient(logits: Tensor, *more: Tensor) -> Tensor:
        slope = 1 - (precision.wide(logits) / cap).square()
        return replace_by_gradient(logits, *more).mul_(slope)

    if not passes.backend:
        return LossPasses(False, largest, sum_exponentials, gradient)
    compiled_largest, compiled_gradient = (
        torch.compile(one, backend=passes.backend, fullgraph=True) for one in (largest, gradient)
    )
    return passes._replace(largest=compiled_largest, gradient=compiled_gradient)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b. total [V, D], a [V, C], b [C, D]; total may have a wider type.

    Then NVIDIA's GEMM adds in that type by itself, and nothing is rounded before: 0.75 of the time
    of a GEMM and an addition for pieces of 2,048 tokens on an H200 (docs/performance.md).
    """
    if total.dtype != a.dtype and total.device.type == "cuda" and torch.version.cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def plain_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the reference for `linear_cross_entropy` from whole logits [B, T, V], for tests and
    benchmarks."""
    return F.cross_entropy(
        precision.wide(logits.flatten(0, 1)), labels.flatten(), ignore_index=-100, reduction="sum"
    )
