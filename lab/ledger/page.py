"""Write the table of docs/ledger.md: means, bands and what is significant."""

from __future__ import annotations

import math
import statistics
import textwrap

from lab.ledger.row import ROOT, LedgerRow

PAGE = ROOT / "docs" / "ledger.md"
MARK = "<!-- written by python -m lab.ledger -->\n"
# Student's t at 97.5% for 1 to 9 degrees of freedom (any table; NIST handbook, 1.3.6.7.2).
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# The same at 99%, for a one-sided test.
T_99 = (31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821)


def band(losses: list[float]) -> float:
    """Return the half-width of the 95% confidence interval of a mean; nan for a single number."""
    if len(losses) < 2:
        return math.nan
    return T[min(len(losses) - 1, len(T)) - 1] * standard_error(losses)


def standard_error(losses: list[float]) -> float:
    """Return the standard error of a mean."""
    return statistics.stdev(losses) / math.sqrt(len(losses))


def difference(a: list[float], b: list[float], paired: bool) -> tuple[float, float]:
    """Return mean(b) - mean(a) and the half-width of its 95% interval. paired: number i of both is of
    the same seed; otherwise both variances are added, with the degrees of freedom of the smaller
    sample, which is wider than Welch's."""
    if paired:
        change = [y - x for x, y in zip(a, b, strict=True)]
        return statistics.fmean(change), band(change)
    error = math.hypot(standard_error(a), standard_error(b))
    freedom = min(len(a), len(b), len(T) + 1) - 1
    return statistics.fmean(b) - statistics.fmean(a), T[freedom - 1] * error


def reaches(losses: list[float], target: float) -> bool:
    """Return whether the mean loss is below `target` with p < 0.01, by a one-sided t-test over
    seeds: the rule of the records of KellerJordan/modded-nanogpt (README, 2025)."""
    least = T_99[min(len(losses) - 1, len(T_99)) - 1] * standard_error(losses)
    return target - statistics.fmean(losses) > least


def significance(row: LedgerRow) -> list[str]:
    """Return a clause for each arm after the first: by how much it differs from the first."""
    losses = all_losses(row)
    first, *others = losses
    said = []
    for arm in others:
        paired = not {first, arm} & row.measured.keys()
        change, width = difference(losses[first], losses[arm], paired)
        means = "significant" if abs(change) > width else "not significant"
        said.append(f"{arm} - {first}: {change:+.4f} ± {width:.4f}, {means}")
    return said


def conclusions(row: LedgerRow) -> str:
    """Return the sentence of what is significant: differences, or who reaches the row's target."""
    losses = all_losses(row)
    if row.target:
        arms = [arm for arm, found in losses.items() if reaches(found, row.target)]
        return f"Below {row.target} with p < 0.01: {'; '.join(arms) or 'none'}."
    return "; ".join(significance(row)) + "." if len(losses) > 1 else ""


def all_losses(row: LedgerRow) -> dict[str, list[float]]:
    """Return the losses of every arm with at least two seeds, those of others first."""
    ours = row.results.get("losses", {})
    return {arm: x for arm, x in {**row.measured, **ours}.items() if len(x) > 1}


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section(row: LedgerRow) -> str:
    """Return the part of the page about one row."""
    lines = [f"## {row.title} (`{row.name}`)", "", wrapped(row.question), ""]
    if row.rival:
        lines += [wrapped(f"Published: {row.rival['number']} ({row.rival['source']})."), ""]
    losses = all_losses(row)
    if not row.results:
        lines += [wrapped(f"**Not run yet.** {row.verdict}"), ""]
        return "\n".join(lines)
    means = (
        f"`{arm}` {statistics.fmean(found):.4f} ± {band(found):.4f}"
        for arm, found in losses.items()
    )
    counts = sorted(set(row.results["tokens"].values()))
    tokens = " to ".join(f"{count:,}" for count in (counts[0], *counts[1:][-1:]))
    lines += [wrapped(f"Validation loss after {tokens} tokens: {'; '.join(means)}."), ""]
    lines += [wrapped(f"{conclusions(row)} {row.verdict.strip()}"), ""]
    return "\n".join(lines)


def write(rows: list[LedgerRow]) -> None:
    """Replace the generated part of the page, if it differs."""
    before = PAGE.read_text(encoding="utf-8")
    after = before.split(MARK)[0] + MARK + "\n" + "\n".join(map(section, rows))
    if after != before:
        PAGE.write_text(after, encoding="utf-8")
