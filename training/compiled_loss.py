"""The passes of training/loss.py over a piece's logits, compiled (`compile.enabled`).

You can skip this file. PyTorch's operators read and write each float32 logit eleven times. Compiled
passes read the logits as the GEMM left them, three times, and write their gradient once: with
bfloat16 8 bytes per logit instead of 44, and no float32 copy of a piece.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from configs.schema import Compile
from models.kernels import precision
from training.loss import LossPasses


def compiled_loss(loss: Callable[..., Tensor], cfg: Compile) -> Callable[..., Tensor]:
    """`loss` with compiled passes, if blocks are compiled."""
    return partial(loss, passes=compiled(cfg.backend)) if cfg.enabled else loss


@cache
def compiled(backend: str) -> LossPasses:
    """The last piece is shorter, so each pass is compiled for any length after the first two."""
    largest, sums, gradient = (
        torch.compile(one, backend=backend, fullgraph=True)
        for one in (largest_logit, sum_exponentials, replace_by_gradient)
    )
    return LossPasses(False, largest, sums, gradient)


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
    is_label = (columns == row) & is_local[:, None]
    return logits.copy_(probs - is_label.to(probs.dtype))
