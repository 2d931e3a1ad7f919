"""Find the size and the tokens that reach the least loss for so many dollars, by a ladder's law.

The FLOPs of a run are 6 N D; a dollar buys as many of them as in a plan, so the prices hold for models
that train as fast as the planned one.
"""

from dataclasses import dataclass

from configs.schema import InputError
from tools.ladder.law import Fit, Law

STEPS = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the front, as multiples of the budget


@dataclass(frozen=True)
class Best:
    """The run that reaches the least loss, in nats per token, for so many dollars."""

    usd: float
    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


def best_size(law: Law, flops: float) -> float:
    """Return the N for which L(N, flops / 6 N) is least: there the slopes of both terms are equal
    (Hoffmann et al., arXiv:2203.15556, equation 4). Raises InputError for a law that has none."""
    size = law.size * law.n_scale**law.a
    data = law.data * law.d_scale**law.b
    if size <= 0 or data <= 0:
        raise InputError(
            f"by the law {law.words()} either size or tokens bring nothing, so no size is the best: "
            "train the ladder with more rungs or other --ratio"
        )
    power = law.a * size / (law.b * data) * (flops / 6) ** law.b
    return float(power ** (1 / (law.a + law.b)))


def front(found: Fit, flops_per_usd: float, usd: float) -> list[Best]:
    """Return the best runs around a budget, the cheapest first. Raises what `best_size` raises."""
    rows = []
    for step in STEPS:
        flops = step * usd * flops_per_usd
        parameters = best_size(found.law, flops)
        tokens = flops / (6 * parameters)
        rows.append(Best(step * usd, parameters, tokens, *found.predict(parameters, tokens)))
    return rows


def words(rows: list[Best], largest: float) -> list[str]:
    """Return the lines of a plan. largest: the weights of the ladder's largest model."""
    lines = [
        "",
        f"{'dollars':>14}{'weights':>12}{'tokens':>12}{'per weight':>12}{'loss':>9}   90% band"
        "          times the ladder's largest",
    ]
    for row in rows:
        lines.append(
            f"{row.usd:>14,.4g}{row.parameters:>12.3g}{row.tokens:>12.3g}"
            f"{row.tokens / row.parameters:>12.1f}{row.loss:>9.4f}   {row.low:.4f} to {row.high:.4f}"
            f"  {row.parameters / largest:.3g}"
        )
    return lines
