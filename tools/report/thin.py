"""Makes a long series as short as a chart is wide, and hides no spike.

Steps are put into buckets of equal width. A bucket keeps its mean, which becomes the line, and its
smallest and largest value, which become a band around the line.
"""

from dataclasses import dataclass

import numpy as np

from tools.report.run import Points


@dataclass(frozen=True)
class Series:
    """A metric as a chart draws it. Arrays are [B]: a point per step, or per bucket of steps."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    width: int  # steps per point: 1 if every logged step has its own
    last: tuple[int, float] | None  # the last finite value; of several at that step their mean
    not_finite: np.ndarray  # steps whose value is NaN or infinite

    @property
    def spread(self) -> bool:
        """Return True if a point stands for several values."""
        return bool((self.low < self.high).any())


def thin(points: Points, buckets: int) -> Series:
    """Thin to at most 2 x buckets points. Steps that fit into these are kept one by one."""
    order = np.argsort(points.steps, kind="stable")
    steps = points.steps[order]
    values = points.values[order]
    finite = np.isfinite(values)
    not_finite = np.unique(steps[~finite])
    steps = steps[finite]
    values = values[finite]
    if not len(steps):
        return Series(steps, values, values, values, 1, None, not_finite)
    width = 1
    at = steps
    if len(_begins(at)) > 2 * buckets:
        span = int(steps[-1] - steps[0]) + 1
        width = -(-span // buckets)
        at = (steps - steps[0]) // width
    begins = _begins(at)
    counts = np.diff(begins, append=len(at))
    low = np.minimum.reduceat(values, begins)
    high = np.maximum.reduceat(values, begins)
    mean = np.add.reduceat(values / np.repeat(counts, counts), begins)
    mean = np.clip(mean, low, high)  # rounding must not leave the band
    middle = np.add.reduceat(steps / np.repeat(counts, counts), begins)
    middle = np.rint(middle).astype(np.int64)
    last = values[steps == steps[-1]]
    last_mean = np.clip((last / len(last)).sum(), last.min(), last.max())
    last_point = (int(steps[-1]), float(last_mean))
    return Series(middle, mean, low, high, width, last_point, not_finite)


def _begins(ascending: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(ascending, prepend=ascending[0] - 1))
