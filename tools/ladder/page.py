"""A ladder as one self-contained HTML page: what was measured, the law, how it predicts runs that it
has not seen, and the curves."""

from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path

import numpy as np

from configs.words import aligned
from tools import svg
from tools.ladder.forecast import fitted, held_out
from tools.ladder.law import Fit
from tools.ladder.runs import Measured, read_record
from tools.report.charts import Axis
from tools.report.picture import COLORS, LEFT, Frame

PAGE = "ladder.html"
WIDTH, HEIGHT, RIGHT = 720, 340, 28
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:780px;margin:2em auto;padding:0 1em}
figure{margin:1em 0 2em}svg{max-width:100%;height:auto;background:#fff;border-radius:6px}
svg text{font:12px system-ui,sans-serif;fill:#1f2328}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
"""
Rows = list[tuple[str, ...]]


def write(out: Path) -> str:
    """Write the page of a ladder, and return what a terminal shows. Raises InputError."""
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
    body += f"<p>L(N, D) = {escape(found.law.words())}, in nats per token. "
    body += "N: weights that a token is multiplied with. D: tokens.</p>"
    body += _sizes(found, done) + _curves(done)
    for head, rows in tables:
        if rows:
            body += _table(head, rows)
    return svg.page("Ladder", STYLE, body)


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
    frame = _frame(Axis(min(sizes), max(sizes), log=True), min(losses), max(losses), "weights")
    named = []
    for color, (ratio, runs) in zip(cycle(COLORS), groups.items(), strict=False):
        line = np.geomspace(min(sizes), max(sizes), 60)
        law = found.law(line, line * ratio)
        frame.picture.curve(frame.places(zip(line, law, strict=True)), color, 1.5)
        for run in runs:
            x, y = frame.x(run.parameters), frame.y(run.loss)
            frame.picture.circle(x, y, 4, color, f"{run.name}: {run.loss:.4f}")
        named.append((f"{ratio:g} tokens per weight", color))
    return _figure(frame, named)


def _curves(done: Sequence[Measured]) -> str:
    """Draw the validation losses of all runs over the share of the run."""
    lows = [float(run.curve.min()) for run in done]
    highs = [float(np.interp(0.1, run.fractions, run.curve)) for run in done]
    frame = _frame(Axis(0.0, 1.0), min(lows), max(highs), "share of the run")
    sizes = sorted({run.parameters for run in done})
    colors = dict(zip(sizes, cycle(COLORS), strict=False))
    for run in done:
        points = zip(run.fractions, run.curve, strict=True)
        shown = frame.places((x, y) for x, y in points if y <= max(highs))
        frame.picture.curve(shown, colors[run.parameters], 1.5)
    return _figure(frame, [(f"{size:,} weights", color) for size, color in colors.items()])


def _frame(across: Axis, low: float, high: float, title: str) -> Frame:
    """Return the axes of a picture of losses from `low` to `high`, drawn. title: of the axis across."""
    margin = 0.05 * (high - low) or 0.1
    picture = svg.Picture(WIDTH, HEIGHT)
    frame = Frame(picture, across, Axis(low - margin, high + margin), (WIDTH, HEIGHT, RIGHT))
    frame.draw(title, "validation loss, nats per token")
    return frame


def _figure(frame: Frame, named: list[tuple[str, str]]) -> str:
    return f"<figure>{frame.picture.svg()}{svg.legend(named, WIDTH, LEFT)}</figure>"
