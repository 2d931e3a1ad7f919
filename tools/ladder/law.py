"""Fit L(N, D) = E + A / N^a + B / D^b to measured losses: Hoffmann et al., arXiv:2203.15556,
approach 3. N: weights that a token is multiplied with; D: tokens; L: nats per token.

They minimise a Huber loss of log L. The same is minimised here, with the relative error in the place
of the difference of logarithms, which it equals to first order. For given exponents the law is
linear in E, A and B, so the exponents are searched on grids that shrink, and the rest is solved:
the result depends on no start. Besiroglu et al., arXiv:2404.10102, show what a search that ends
early, and bands that are too narrow, did to the published fit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HUBER = 1e-3  # relative error from which it counts linearly: Hoffmann et al., appendix D.3
ITERATIONS = 20  # of iteratively reweighted least squares
EXPONENTS = (0.02, 1.5)  # of both: published fits are between 0.2 and 0.7
COARSE = 24  # points of the first grid, a side
FINE = 7  # points of each later one
REFINEMENTS = 3
DRAWS = 200  # of the bootstrap
BAND = (0.05, 0.95)  # quantiles
TERMS = ((0, 1, 2), (1, 2), (0, 1), (0, 2))  # tried in this order: of E, A, B, those above zero
PARAMETERS = 5


@dataclass(frozen=True)
class Law:
    """L(N, D) = entropy + A (N / n_scale)^-a + B (D / d_scale)^-b."""

    entropy: float
    size: float
    data: float
    a: float
    b: float
    n_scale: float
    d_scale: float

    def __call__(self, n: Array | float, d: Array | float) -> Array:
        """Return losses [P] in nats per token, float64."""
        of_size = self.size * (np.asarray(n) / self.n_scale) ** -self.a
        of_data = self.data * (np.asarray(d) / self.d_scale) ** -self.b
        return self.entropy + of_size + of_data

    def words(self) -> str:
        """Return the law as it is published: with N and D in units of one."""
        size = self.size * self.n_scale**self.a
        data = self.data * self.d_scale**self.b
        return f"{self.entropy:.4f} + {size:.4g} / N^{self.a:.4f} + {data:.4g} / D^{self.b:.4f}"


@dataclass(frozen=True)
class Fit:
    """The law of these losses, and those of `DRAWS` samples of its residuals."""

    law: Law
    draws: list[Law]
    residuals: Array  # [P] relative
    seed: int = 0

    def predict(self, n: float, d: float) -> tuple[float, float, float]:
        """Return (loss, low, high): the band holds a new run with 90%, if the law holds there."""
        random = np.random.default_rng(self.seed)
        noise = random.choice(self.residuals, len(self.draws)) * _inflation(len(self.residuals))
        drawn = np.array([float(law(n, d)) for law in self.draws]) * (1 + noise)
        low, high = np.quantile(drawn, BAND)
        return float(self.law(n, d)), float(low), float(high)


def fit(n: Array, d: Array, losses: Array, seed: int = 0) -> Fit:
    """Fit the law to `losses` [P] of models of `n` [P] weights trained on `d` [P] tokens. Raises
    ValueError where these cannot tell its terms apart."""
    check(n, d)
    grid = np.geomspace(*EXPONENTS, COARSE)
    law = _search(n, d, losses, grid, grid)
    expected = law(n, d)
    residuals = losses / expected - 1
    random = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        drawn = random.choice(residuals, len(losses)) * _inflation(len(losses))
        near = np.geomspace(0.5, 2, FINE)
        draws.append(_search(n, d, expected * (1 + drawn), law.a * near, law.b * near))
    return Fit(law, draws, residuals, seed)


def check(n: Array, d: Array) -> None:
    """Raise ValueError where sizes or lengths are too few, or where D follows from N."""
    if len(n) <= PARAMETERS or len(set(n)) < 3:
        raise ValueError(
            f"the law has {PARAMETERS} numbers: {len(n)} runs of {len(set(n))} sizes do not give "
            "them; at least 6 runs of 3 sizes do"
        )
    ratios = np.log(d / n)
    if np.ptp(ratios) < np.log(1.5):
        raise ValueError(
            "all runs have the same tokens per parameter, which cannot tell what more parameters do "
            "from what more tokens do: give several --ratio"
        )


def _inflation(count: int) -> float:
    """Correct residuals of a fit for the numbers that were fitted."""
    return float(np.sqrt(count / max(1, count - PARAMETERS)))


def _search(n: Array, d: Array, losses: Array, a_grid: Array, b_grid: Array) -> Law:
    """Return the best law on this grid of exponents, refined."""
    n_scale = float(np.exp(np.log(n).mean()))
    d_scale = float(np.exp(np.log(d).mean()))
    n, d = n / n_scale, d / d_scale
    for _ in range(REFINEMENTS + 1):
        a, b = (side.ravel() for side in np.meshgrid(a_grid, b_grid))
        solved, cost = _solve(n, d, losses, a, b)
        best = int(cost.argmin())
        entropy, size, data = solved[best].tolist()
        law = Law(entropy, size, data, float(a[best]), float(b[best]), n_scale, d_scale)
        a_grid, b_grid = _around(a_grid, law.a), _around(b_grid, law.b)
    return law


def _around(grid: Array, best: float) -> Array:
    """Return a finer grid, between the points before and after the best one."""
    step = grid[1] / grid[0]
    low, high = max(EXPONENTS[0], best / step), min(EXPONENTS[1], best * step)
    return np.geomspace(low, high, FINE)


def _solve(n: Array, d: Array, losses: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Solve for E, A, B >= 0 for each pair of exponents [G]: [G, 3], and the Huber losses [G]."""
    ones = np.ones((len(a), len(n)))
    terms = np.stack([ones, n ** -a[:, None], d ** -b[:, None]], axis=-1) / losses[:, None]
    best, least = np.zeros((len(a), 3)), np.full(len(a), np.inf)
    for used in TERMS:
        left = np.flatnonzero(np.isinf(least))  # the best of these has a number below zero so far
        numbers = _weighted(terms[left][..., used])
        relative = (terms[left][..., used] @ numbers[..., None])[..., 0] - 1
        cost = np.where((numbers >= 0).all(axis=-1), _huber(relative), np.inf)
        best[left] = 0
        best[left[:, None], list(used)] = numbers
        least[left] = cost
    return best, least


def _weighted(terms: Array) -> Array:
    """Solve terms [G, P, K] @ numbers [G, K] = 1 by iteratively reweighted least squares."""
    weights = np.ones(terms.shape[:2])
    ridge = 1e-12 * np.eye(terms.shape[-1])
    for _ in range(ITERATIONS):
        weighted = terms * weights[..., None]
        normal = np.swapaxes(terms, 1, 2) @ weighted + ridge
        numbers = np.linalg.solve(normal, weighted.sum(axis=1)[..., None])[..., 0]
        relative = np.abs((terms @ numbers[..., None])[..., 0] - 1)
        weights = HUBER / np.maximum(relative, HUBER)
    return numbers


def _huber(relative: Array) -> Array:
    """Return the sum over runs [G] of the Huber loss of relative errors [G, P]."""
    size = np.abs(relative)
    return np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum(axis=-1)
