"""Forecast the final loss and the curve of a run from a ladder.

The curve: reducible losses (less the law's E) over the share of the run that is done, relative to
the last one, nearly coincide for runs of one recipe with different sizes (Qiu et al.,
arXiv:2507.02119). Those of the ladder's largest models give the shape, all of them its band.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs import stages
from configs.schema import Config, InputError
from tools.ladder.law import Array, Fit, fit
from tools.ladder.rungs import parameters_of, tokens_of
from tools.ladder.runs import Measured, measured, table
from training.forecast import Forecast, Row

LARGEST = 2  # sizes whose curves give the shape
FIRST = 0.1  # share of a run from which its curve is forecast: before it the warm-up rules
POINTS = 19  # of the curve


def held_out(done: Sequence[Measured]) -> list[tuple[Measured, float, float, float]]:
    """Fit without the largest model, and return its runs with (loss, low, high) of that fit. Empty
    where the rest is too little for a fit."""
    largest = max(run.parameters for run in done)
    rest = [run for run in done if run.parameters < largest]
    try:
        found = fit(*table(rest))
    except ValueError:
        return []
    runs = [run for run in done if run.parameters == largest]
    return [(run, *found.predict(run.parameters, run.tokens)) for run in runs]


def fitted(out: Path) -> tuple[list[Measured], Fit]:
    """Raises InputError where runs of the ladder are missing, or too few."""
    done, missing = measured(out)
    if missing:
        raise InputError(
            f"{out}: {len(missing)} of {len(done) + len(missing)} runs are not done "
            f"({', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}): start the ladder again"
        )
    try:
        return done, fit(*table(done))
    except ValueError as error:
        raise InputError(f"{out}: {error}") from None


def forecast(cfg: Config, out: Path) -> Forecast:
    """Forecast the run of this configuration from the ladder in `out`. Raises InputError."""
    stages.refuse(cfg, "the forecast of a ladder")
    done, found = fitted(out)
    size, tokens = parameters_of(cfg), tokens_of(cfg)
    loss, low, high = found.predict(size, tokens)
    return Forecast(
        size,
        tokens,
        loss,
        low,
        high,
        curve_of(done, found, (loss, low, high)),
        found.law.words(),
        len(done),
        size / max(run.parameters for run in done),
        tokens / max(run.tokens for run in done),
        str(out),
    )


def curve_of(done: Sequence[Measured], found: Fit, final: tuple[float, float, float]) -> list[Row]:
    """Return the curve of a run that ends at `final` (loss, low, high)."""
    shares = np.linspace(FIRST, 1, POINTS)
    sizes = sorted({run.parameters for run in done})[-LARGEST:]
    everything = np.stack([_shape(run, shares, found.law.entropy) for run in done])
    large = np.array([run.parameters in sizes for run in done])
    middle = np.median(everything[large], axis=0)
    spread = 2 * np.sqrt(((everything[large] - middle) ** 2).mean(axis=0))
    entropy = found.law.entropy
    loss, low, high = (value - entropy for value in final)
    rows = np.stack(
        [
            shares,
            entropy + loss * middle,
            entropy + low * (middle - spread),
            entropy + high * (middle + spread),
        ]
    )
    return [tuple(row) for row in rows.T.tolist()]


def _shape(run: Measured, shares: Array, entropy: float) -> Array:
    """Return the reducible losses of a run relative to its last, at these shares of it."""
    reducible = (run.curve - entropy) / (run.loss - entropy)
    return np.interp(shares, run.fractions, reducible)


def words(found: Forecast) -> list[str]:
    """Return the lines of a plan about the forecast."""
    return [
        f"forecast             {found.loss:.4f} nats per token on held-out text, 90% band "
        f"{found.low:.4f} to {found.high:.4f}",
        f"  by the ladder      {found.ladder}: {found.runs} runs, L = {found.law}",
        f"  it reaches         {found.larger:.3g} times its largest model, {found.longer:.3g} times "
        "its longest run",
    ]
