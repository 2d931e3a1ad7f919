"""Say how far two computations of the same numbers are apart, and how much of that rounding explains:
for tools.parity, tools.replay and tools.compare_runs."""

import argparse
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Limits:
    """Relative differences that rounding explains."""

    values: float  # at equal weights
    state: float  # of what has gone through an optimizer


# Type that a step is computed in -> its limits. In float64, and in float32 at equal weights, right
# meshes were measured (tests/parity.py). Adam enlarges rounding where gradients are near 0. In
# bfloat16 gradients of small weights differ by 2e-2 from mesh to mesh: two computations are better
# compared in float64.
LIMITS = {
    "float64": Limits(1e-12, 1e-11),
    "float32": Limits(1e-5, 1e-3),
    "bfloat16": Limits(5e-2, 5e-2),
    "auto": Limits(5e-2, 5e-2),  # bfloat16 on one machine, and float32 on another
}
# metric by which a step is judged -> its name in a sentence
JUDGED = {"loss": "loss", "grad_norm": "norm of the gradient"}


def relative(a: np.ndarray | float, b: np.ndarray | float) -> float:
    """Return the distance of two numbers, or arrays of one shape, relative to the larger 2-norm: 0
    only if all are bitwise equal, NaN included; infinite where numbers are missing, or differ and
    are not finite."""
    a = np.asarray(a)
    b = np.asarray(b)
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    apart = (a - b).astype(np.float64)
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    largest = max(np.abs(a).max(), np.abs(b).max())
    if not (np.isfinite(apart).all() and math.isfinite(largest)):
        return math.inf
    size = max(np.linalg.norm(a / largest), np.linalg.norm(b / largest))
    return float(np.linalg.norm(apart / largest) / size)


def parse_tolerance(text: str) -> float:
    """Read a command's --tolerance."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("it must be a number, not negative")
    return number
