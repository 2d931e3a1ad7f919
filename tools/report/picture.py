"""The loss of runs as one SVG file, for a README or a paper: it needs no page and no script."""

from itertools import cycle

import numpy as np

from tools.report import numbers
from tools.report.charts import PANELS, PIXELS, Axis, value_axis
from tools.report.run import LoadedRun
from tools.report.thin import Series, thin
from tools.svg import RULE, Picture

WIDTH, HEIGHT = 760, 280
LEFT, TOP, RIGHT, BOTTOM = 64, 16, 240, 44  # margins; the names of the curves are on the right
LINE_HEIGHT = 18
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a")
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
    names = ", ".join(run.name for run in runs)
    picture = Picture(WIDTH, HEIGHT, f"Loss of {names}", "Nats per token over steps.")
    _grid(picture, across, axis)
    for row, (name, color, dashes, series) in enumerate(curves):
        shown = np.isfinite(series.mean) & ((series.mean > 0) | (not axis.log))
        points = [
            (_x(across.share(step)), _y(axis.share(value)))
            for step, value in zip(series.steps[shown], series.mean[shown], strict=True)
        ]
        if len(points) == 1:  # a line through it would have no length
            picture.circle(*points[0], 3, color)
        else:
            picture.curve(points, color, 2, dashes)
        _name(picture, row, name, color, dashes, series)
    return picture.svg()


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _grid(picture: Picture, across: Axis, axis: Axis) -> None:
    """Draw the lines, the numbers and the titles of both axes."""
    for value, label in axis.ticks:
        y = _y(axis.share(value))
        picture.line(LEFT, y, WIDTH - RIGHT, y, RULE, 1)
        picture.text(LEFT - 8, y + 4, label, "s", "end")
    for value, label in across.ticks:
        picture.text(_x(across.share(value)), HEIGHT - BOTTOM + 18, label, "s", "middle")
    picture.text(_x(0.5), HEIGHT - 8, "step", "s", "middle")
    picture.text(14, _y(0.5), "nats per token", "s", "middle", -90)


def _name(picture: Picture, row: int, name: str, color: str, dashes: str, series: Series) -> None:
    """Draw a curve's row of the legend, with its last value."""
    x = WIDTH - RIGHT + 14
    y = TOP + 12 + 2 * row * LINE_HEIGHT
    last = "not finite" if series.last is None else numbers.short(series.last[1])
    picture.line(x, y - 4, x + 24, y - 4, color, 2, dashes)
    picture.text(x + 30, y, name, "s")
    picture.text(x + 30, y + LINE_HEIGHT - 3, last, "s")
