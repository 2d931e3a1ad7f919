"""Curves over steps as one SVG file, for a README or a paper: it needs no page and no script."""

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import InputError
from tools import outbound
from tools.report import numbers
from tools.report.charts import PANELS, PIXELS, Axis, Panel, value_axis
from tools.report.run import LoadedRun, Points
from tools.report.thin import Series, thin
from tools.svg import RULE, Picture

WIDTH, HEIGHT = 760, 280
LEFT, TOP, RIGHT, BOTTOM = 64, 16, 240, 44  # margins; the names of the curves are on the right
LINE_HEIGHT = 18
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a")
DASHES = {"loss": "none", "validation_loss": "6 4"}  # the metrics that are drawn
TITLES = {panel.key: panel.title for panel in PANELS}
LOG = Panel("", "", "", "log")  # for numbers of many sizes


class PlottedCurve(NamedTuple):
    name: str
    color: str
    dashes: str  # as SVG's stroke-dasharray
    series: Series


def curve(name: str, color: str, dashes: str, values: dict[int, float]) -> PlottedCurve:
    """values: by step."""
    steps = np.array(sorted(values), np.int64)
    points = Points(steps, np.array([values[step] for step in steps.tolist()], np.float64))
    return PlottedCurve(name, color, dashes, thin(points, PIXELS))


def draw(runs: list[LoadedRun]) -> str:
    """Return the SVG of the training and validation loss of all runs, in nats per token."""
    curves = [
        PlottedCurve(
            f"{run.name}: {TITLES[key].lower()}", color, dashes, thin(run.metrics[key], PIXELS)
        )
        for run, color in zip(runs, cycle(COLORS), strict=False)
        for key, dashes in DASHES.items()
        if key in run.metrics
    ]
    names = ", ".join(run.name for run in runs)
    return plot(f"Loss of {names}", "nats per token", curves, PANELS[0])


def plot(title: str, unit: str, curves: list[PlottedCurve], panel: Panel) -> str:
    """Return the SVG of curves over steps. title: also for those who cannot see it; unit: of the
    values; panel: which says how the vertical axis is scaled."""
    drawn = [one.series for one in curves]
    last_steps = [int(series.steps[-1]) for series in drawn if len(series.steps)]
    across = Axis(0.0, float(max([*last_steps, 1])))
    axis = value_axis(panel, drawn) if drawn else Axis(0.0, 1.0)
    picture = Picture(WIDTH, HEIGHT, title, f"{unit[0].upper()}{unit[1:]} over steps.")
    frame = Frame(picture, across, axis, (WIDTH, HEIGHT, RIGHT))
    frame.draw("step", unit)
    if not curves:
        picture.text(*frame.middle, title, "s", "middle")
    for row, (name, color, dashes, series) in enumerate(curves):
        shown = np.isfinite(series.mean) & ((series.mean > 0) | (not axis.log))
        points = frame.places(zip(series.steps[shown], series.mean[shown], strict=True))
        if len(points) == 1:  # a line through it would have no length
            picture.circle(*points[0], 3, color)
        else:
            picture.curve(points, color, 2, dashes)
        _name(picture, row, name, color, dashes, series)
    return picture.svg()


def write(path: Path, picture: str) -> None:
    """Write a picture to a file. Raises InputError."""
    if path.suffix != ".svg":
        raise InputError(f"--picture={path} must end in .svg")
    outbound.write("--picture", path, picture)


class Frame:
    """The axes of a picture. size: its width and height, and the margin on the right."""

    def __init__(
        self, picture: Picture, across: Axis, up: Axis, size: tuple[float, float, float]
    ) -> None:
        self.picture, self.across, self.up = picture, across, up
        width, height, right = size
        self.right, self.bottom = width - right, height - BOTTOM
        self.middle = (LEFT + self.right) / 2, (TOP + self.bottom) / 2

    def x(self, value: float) -> float:
        return LEFT + self.across.share(value) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - self.up.share(value) * (self.bottom - TOP)

    def places(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def draw(self, across: str, up: str) -> None:
        """Draw the lines, the numbers and the titles of both axes."""
        for value, label in self.up.ticks:
            y = self.y(value)
            self.picture.line(LEFT, y, self.right, y, RULE)
            self.picture.text(LEFT - 8, y + 4, label, "s", "end")
        for value, label in self.across.ticks:
            self.picture.text(self.x(value), self.bottom + 18, label, "s", "middle")
        x, y = self.middle
        self.picture.text(x, self.bottom + BOTTOM - 8, across, "s", "middle")
        self.picture.text(14, y, up, "s", "middle", -90)


def _name(picture: Picture, row: int, name: str, color: str, dashes: str, series: Series) -> None:
    """Draw a curve's row of the legend, with its last value."""
    x = WIDTH - RIGHT + 14
    y = TOP + 12 + 2 * row * LINE_HEIGHT
    last = "not finite" if series.last is None else numbers.short(series.last[1])
    picture.line(x, y - 4, x + 24, y - 4, color, 2, dashes)
    picture.text(x + 30, y, name, "s")
    picture.text(x + 30, y + LINE_HEIGHT - 3, last, "s")
