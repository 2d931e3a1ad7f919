"""A ladder as one self-contained HTML page: what was measured, the law, how it predicts runs that it
has not seen, and the curves."""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from configs.words import aligned
from tools.ladder.forecast import fitted, held_out
from tools.ladder.law import Fit
from tools.ladder.runs import Measured, read_record
from tools.svg import RULE, Picture, legend, ticks

PAGE = "ladder.html"
WIDTH, HEIGHT = 720, 340
LEFT, TOP, RIGHT, BOTTOM = 64, 16, 28, 44
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a")
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:780px;margin:2em auto;padding:0 1em}
figure{margin:1em 0 2em}svg{max-width:100%;height:auto;background:#fff;border-radius:6px}
svg text{font:12px system-ui,sans-serif;fill:#1f2328}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
"""
Rows = list[tuple[str, ...]]


def write(out: Path) -> str:
    """Write the page of a ladder that is done, and return what a terminal shows. Raises
    InputError."""
    done, found = fitted(out)
    unseen: Rows = [
        (
            run.name,
            f"{run.loss:.4f}",
            f"{loss:.4f}",
            f"{run.loss / loss - 1:+.2%}",
            _inside(run, low, high),
        )
        for run, loss, low, high in held_out(done)
    ]
    rows: Rows = [
        (
            run.name,
            f"{run.parameters:,}",
            f"{run.tokens:,}",
            f"{run.loss:.4f}",
            f"{float(found.law(run.parameters, run.tokens)):.4f}",
            f"{residual:+.2%}",
        )
        for run, residual in zip(done, found.residuals, strict=True)
    ]
    tables: list[tuple[tuple[str, ...], Rows]] = [
        (("run", "weights", "tokens", "loss", "law", "off"), rows),
        (("largest model, not in the fit", "loss", "forecast", "off", "in the band"), unseen),
    ]
    path = out / PAGE
    path.write_text(_document(out, found, done, tables), encoding="utf-8")
    lines = [f"L = {found.law.words()}"]
    for head, body in tables:
        if body:
            lines += ["", *aligned((head, *body), right=range(len(head)))]
    if not unseen:
        lines.append("the largest model is not forecast from the rest: that takes 4 rungs")
    return "\n".join([*lines, "", f"{path}: the page"])


def _inside(run: Measured, low: float, high: float) -> str:
    return "yes" if low <= run.loss <= high else f"no: {low:.4f} to {high:.4f}"


def _document(
    out: Path, found: Fit, done: Sequence[Measured], tables: list[tuple[tuple[str, ...], Rows]]
) -> str:
    source = " ".join(read_record(out)["arguments"])
    body = f"<h1>Ladder of {escape(source)}</h1>"
    body += (
        f"<p>L(N, D) = {escape(found.law.words())}, in nats per token. N: weights that a token is "
    )
    body += "multiplied with. D: tokens.</p>"
    body += _sizes(found, done) + _curves(done)
    for head, rows in tables:
        if rows:
            body += _table(head, rows)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>Ladder</title><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _table(head: tuple[str, ...], rows: Rows) -> str:
    cells = "".join(f"<th>{escape(cell)}" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<div class=wide><table><tr>{cells}{body}</table></div>"


def _sizes(found: Fit, done: Sequence[Measured]) -> str:
    """Draw losses over weights, with the law of each number of tokens per weight."""
    groups: dict[float, list[Measured]] = {}
    for run in done:
        groups.setdefault(float(f"{run.tokens / run.parameters:.2g}"), []).append(run)
    sizes = [float(run.parameters) for run in done]
    losses = [run.loss for run in done]
    plot = Plot((min(sizes), max(sizes)), (min(losses), max(losses)), log=True)
    plot.axes("weights", "validation loss, nats per token")
    named = []
    for color, (ratio, runs) in zip(_cycled(len(groups)), groups.items(), strict=True):
        line = np.geomspace(min(sizes), max(sizes), 60)
        law = found.law(line, line * ratio)
        plot.curve(list(zip(line, law, strict=True)), color)
        for run in runs:
            plot.point(run.parameters, run.loss, color, f"{run.name}: {run.loss:.4f}")
        named.append((f"{ratio:g} tokens per weight", color))
    return f"<figure>{plot.picture.svg()}{legend(named, WIDTH, LEFT)}</figure>"


def _curves(done: Sequence[Measured]) -> str:
    """Draw the validation losses of all runs over the share of the run."""
    lows = [float(run.curve.min()) for run in done]
    highs = [float(np.interp(0.1, run.fractions, run.curve)) for run in done]
    plot = Plot((0.0, 1.0), (min(lows), max(highs)))
    plot.axes("share of the run", "validation loss, nats per token")
    sizes = sorted({run.parameters for run in done})
    colors = dict(zip(sizes, _cycled(len(sizes)), strict=True))
    for run in done:
        points = zip(run.fractions, run.curve, strict=True)
        plot.curve([(x, y) for x, y in points if y <= max(highs)], colors[run.parameters])
    named = [(f"{size:,} weights", color) for size, color in colors.items()]
    return f"<figure>{plot.picture.svg()}{legend(named, WIDTH, LEFT)}</figure>"


def _cycled(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


class Plot:
    """One plot: x linear or logarithmic, y linear."""

    def __init__(
        self,
        across: tuple[float, float],
        up: tuple[float, float],
        log: bool = False,
        title: str = "",
    ) -> None:
        """title: of a picture in its own file."""
        self.scale: Callable[[float], float] = math.log10 if log else float
        self.across = self.scale(across[0]), self.scale(across[1])
        margin = 0.05 * (up[1] - up[0]) or 0.1
        self.up = up[0] - margin, up[1] + margin
        self.log = log
        self.picture = Picture(WIDTH, HEIGHT, title)

    def x(self, value: float) -> float:
        low, high = self.across
        return LEFT + (self.scale(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.up
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, across: str, up: str) -> None:
        low, high = self.up
        for above in ticks(high - low):
            y = self.y(low + above)
            self.picture.line(LEFT, y, WIDTH - RIGHT, y, RULE)
            self.picture.text(LEFT - 8, y + 4, f"{low + above:.3g}", "s", "end")
        for value in self._marks():
            self.picture.text(self.x(value), HEIGHT - BOTTOM + 18, f"{value:,.3g}", "s", "middle")
        self.picture.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, across, "s", "middle")
        self.picture.text(14, (TOP + HEIGHT - BOTTOM) / 2, up, "s", "middle", -90)

    def _marks(self) -> list[float]:
        low, high = self.across
        if not self.log:
            return [low + above for above in ticks(high - low)]
        return [10 ** (low + (high - low) * i / 4) for i in range(5)]

    def curve(
        self, points: Sequence[tuple[float, float]], color: str, dashes: str = "none"
    ) -> None:
        self.picture.curve([(self.x(x), self.y(y)) for x, y in points], color, 1.5, dashes)

    def point(self, x: float, y: float, color: str, tip: str) -> None:
        self.picture.circle(self.x(x), self.y(y), 4, color, tip)
