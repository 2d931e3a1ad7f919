"""The loss of runs as one SVG file, for a README or a paper: it needs no page and no script."""

from html import escape
from itertools import cycle

import numpy as np

from tools.report import numbers
from tools.report.charts import PANELS, PIXELS, Axis, value_axis
from tools.report.run import LoadedRun
from tools.report.thin import Series, thin

WIDTH, HEIGHT = 760, 280
LEFT, TOP, RIGHT, BOTTOM = 64, 16, 240, 44  # margins; the names of the curves are on the right
LINE_HEIGHT = 18
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a")
INK, RULE, PAPER = "#1f2328", "#d0d7de", "#ffffff"
DASHES = {"loss": "none", "validation_loss": "6 4"}  # the metrics that are drawn
TITLES = {panel.key: panel.title for panel in PANELS}


def draw(runs: list[LoadedRun]) -> str:
    """Return the SVG of the training and validation loss of all runs, in nats per token."""
    curves = [
        (f"{run.name}: {TITLES[key].lower()}", color, DASHES[key], thin(run.metrics[key], PIXELS))
        for run, color in zip(runs, cycle(COLORS), strict=False)
        for key in DASHES
        if key in run.metrics
    ]
    across = Axis(0.0, max([run.last_step for run in runs] + [1]))
    axis = value_axis(PANELS[0], [series for *_, series in curves]) if curves else Axis(0.0, 1.0)
    parts = [_grid(across, axis)]
    for row, (name, color, dashes, series) in enumerate(curves):
        parts.append(_curve(series, color, dashes, across, axis))
        parts.append(_name(row, name, color, dashes, series))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="system-ui,\'Segoe UI\',Helvetica,Arial,sans-serif" font-size="12"'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>'
    lines = [f'{head} role="img" {font}>', paper, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _grid(across: Axis, axis: Axis) -> str:
    """Return the lines, the numbers and the titles of both axes."""
    parts = []
    for value, label in axis.ticks:
        y = _y(axis.share(value))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{RULE}"/>')
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
    for value, label in across.ticks:
        parts.append(_text(_x(across.share(value)), HEIGHT - BOTTOM + 18, label, "middle"))
    parts.append(_text(_x(0.5), HEIGHT - 8, "step", "middle"))
    middle = _y(0.5)
    turn = f' transform="rotate(-90 14 {middle:.1f})"'
    parts.append(_text(14, middle, "nats per token", "middle", turn))
    return "\n".join(parts)


def _curve(series: Series, color: str, dashes: str, across: Axis, axis: Axis) -> str:
    shown = np.isfinite(series.mean) & ((series.mean > 0) | (not axis.log))
    points = [
        f"{_x(across.share(step)):.1f},{_y(axis.share(value)):.1f}"
        for step, value in zip(series.steps[shown], series.mean[shown], strict=True)
    ]
    if len(points) == 1:  # a line through it would have no length
        x, y = points[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
    style = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
    return f'<polyline points="{" ".join(points)}" fill="none" {style}/>'


def _name(row: int, name: str, color: str, dashes: str, series: Series) -> str:
    """Return a curve's row of the legend, with its last value."""
    x = WIDTH - RIGHT + 14
    y = TOP + 12 + 2 * row * LINE_HEIGHT
    last = "not finite" if series.last is None else numbers.short(series.last[1])
    style = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"'
    sample = f'<path d="M{x} {y - 4}h24" {style}/>'
    return sample + _text(x + 30, y, name) + _text(x + 30, y + LINE_HEIGHT - 3, last)


def _text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{INK}"{more}>{escape(words)}</text>'
