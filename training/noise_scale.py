"""The gradient noise scale (McCandlish et al., arXiv:1812.06162, appendix A.1): about the batch beyond
which more data in a step helps little (`metrics.noise_scale_interval`).

From the gradients of a small and of a large batch, of b and B tokens:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)      S = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

Both have no bias, and B_simple = S / |G|^2, in tokens. A ratio of noisy numbers has, so it is that of
two averages over the last measurements. A resumed run begins new averages.

The small batch is every fourth window of the step's batch, by its number: so it is the same on every
mesh. Its gradient is computed by one more forward and backward pass over the whole batch, in which
the labels of other windows do not count. In this pass no weight changes. Terms of the loss that are
no sums over labels, such as a mixture's balance loss, stay those of the whole batch.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training.further import AHEAD
from training.loss import IGNORE
from training.optim import clip_grad_norm

WINDOWS = 4  # one of so many is in the small batch
KEPT = 0.9  # of the averages at each measurement: about the last ten count
LABELS = ("labels", *(name for name in AHEAD if name.startswith("labels")))


def estimates(small: float, large: float, b: float, B: float) -> tuple[float, float]:
    """Return |G|^2 and S. small, large: squared norms of the gradients of b and of B tokens."""
    square = (B * large - b * small) / (B - b)
    trace = (small - large) / (1 / b - 1 / B)
    return square, trace


def small_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch in which the labels of one window of WINDOWS count."""
    left_out = batch["window"] % WINDOWS != 0  # [A*b]
    masked = {}
    for name in LABELS:
        if name in batch:
            labels = batch[name]  # [A, b, t] or [A, b, depth, t]
            of_window = left_out.view(*labels.shape[:2], *[1] * (labels.ndim - 2))
            masked[name] = labels.masked_fill(of_window, IGNORE)
    return batch | masked


class NoiseScale:
    """Computes gradients as `compute` does. Every `interval` steps it measures the squared norm of
    the small batch's gradient before that, unless the step is computed twice
    (debug.replay_interval), which does not call this."""

    def __init__(self, compute: Callable, interval: int) -> None:
        self.compute = compute
        self.interval = interval
        self.done = 0  # steps of the run
        self.small: tuple[float, float, float] | None = None  # squared norm, b and B
        self.square = 0.0
        self.trace = 0.0

    def __call__(
        self, gradients: Callable, job: Any, batch: dict[str, Tensor], flags: Callable
    ) -> Any:
        if (self.done + 1) % self.interval == 0:
            self.measure(gradients, job, batch)
        return self.compute(gradients, job, batch, flags)

    def measure(self, gradients: Callable, job: Any, batch: dict[str, Tensor]) -> None:
        small = small_batch(batch)
        counts = [(each["labels"] != IGNORE).sum() for each in (small, batch)]
        counted = job.mesh.sum_over_tokens(torch.stack(counts).to(job.mesh.device))
        b, B = counted.tolist()
        if not 0 < b < B:  # no window of this step is in the small batch, or all are
            return
        devices = [job.mesh.device] if job.mesh.device.type == "cuda" else []
        # the step draws the random numbers that it would draw without this
        with torch.random.fork_rng(devices):
            gradients(job, small)
        norm = clip_grad_norm(job.model.parameters(), 0.0, job.mesh.sum_over_pp)
        job.optimizer.zero_grad(set_to_none=True)
        self.small = float(norm) ** 2, b, B

    def metrics(self, grad_norm: float, skipped: bool) -> dict[str, float]:
        """Return the estimates after a step; {} where nothing was measured. grad_norm: of the whole
        batch."""
        self.done += 1
        measured, self.small = self.small, None
        if measured is None or skipped:
            return {}
        small, b, B = measured
        square, trace = estimates(small, grad_norm**2, b, B)
        if not math.isfinite(square + trace):
            return {}
        self.square = KEPT * self.square + (1 - KEPT) * square
        self.trace = KEPT * self.trace + (1 - KEPT) * trace
        found = {"noise/gradient_square": square, "noise/trace": trace}
        if self.square > 0 and self.trace > 0:
            found["noise/scale_tokens"] = self.trace / self.square
        return found
