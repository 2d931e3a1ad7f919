"""Draw the charts over steps: one per metric, all runs in each.

A chart is an SVG that stretches to any width, with labels in HTML around it, so text has the same
size on a phone. `data` holds the numbers that page.js shows under the cursor.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from itertools import chain

import numpy as np

from configs.words import plural
from tools.report import numbers
from tools.report.run import LoadedRun, Points, joined
from tools.report.thin import Series, thin
from tools.svg import path, stretched

PIXELS = 480  # buckets of a long series: about the pixels of a chart on a laptop
MOST_BUCKETS = 18_000  # of all series of a page together: about 70 bytes each
FEWEST_BUCKETS = 30
SCALE = 1000  # the size of an SVG's own coordinates
DOTS = 12  # a series of so few points shows each of them
LARGEST = 1e280  # values above it, or below its inverse, are drawn at the edge of a chart
SAME = 1e-9  # relative: what differs by less is one value to an axis
LOG_FROM = 50  # "auto": logarithmic if the largest value is so many times the smallest


@dataclass(frozen=True)
class Panel:
    key: str
    title: str
    unit: str
    scale: str = "auto"  # "linear", "zero" (linear from 0), "log", or "auto" (linear or log)
    percent: bool = False


PANELS = (
    Panel("loss", "Training loss", "nats per token"),
    Panel("validation_loss", "Validation loss", "nats per token"),
    Panel("validation_bits_per_byte", "Validation", "bits per byte"),
    Panel("grad_norm", "Gradient norm", "before clipping", "log"),
    Panel("lr", "Learning rate", "", "log"),
    Panel("tokens_per_second", "Throughput", "tokens/s", "zero"),
    Panel("mfu", "MFU", "model FLOP/s of the peak", "zero", True),
    Panel("tflops_per_device", "Model FLOP/s", "TFLOP/s per device", "zero"),
    Panel("memory_gib", "Memory", "GiB, peak of rank 0", "zero"),
    Panel("data_wait", "Waiting for data", "of the time", "zero", True),
    Panel("goodput", "Goodput so far", "productive share", "zero", True),
    Panel("z_loss", "z-loss", "nats per token, with its factor", "zero"),
    Panel("expert_load", "Expert load", "busiest expert over the mean, worst layer", "zero"),
    Panel("copy_seconds", "Copies in the memory of hosts", "seconds of each", "zero"),
)
# Shown elsewhere on the page, or the inverse of a chart that is shown.
# Of the groups of a task, MMLU's 57 subjects say, tools.evaluate has the scores.
HIDDEN = re.compile(
    r"seconds/.*|step_seconds|tokens_seen|evaluation/.*/(truncated|chance)|evaluation/[^/]+/[^/]+/.*"
)
LAYER = re.compile(r"(.+)/layer-\d+")
ERROR = "_stderr"  # as training/scores.py ends the key of a standard error
CHANCE = "chance"  # as it ends the key of the accuracy of a guess
BY_LAYER = "/layer"  # ends the key of the metrics of all layers, put together


EVALUATION = "evaluation/"  # begins the key of a task's score

# A chart, and the points of every run (None: the run has none).
Chosen = tuple[Panel, list[Points | None]]


def panels_of(runs: list[LoadedRun]) -> tuple[list[Chosen], list[Chosen]]:
    """Return the charts of PANELS that any run has numbers for, and those of all other metrics."""
    tables = [_fold_layers(_with_errors(run.metrics)) for run in runs]
    keys = dict.fromkeys(chain(*tables))
    known = [panel for panel in PANELS if panel.key in keys]
    unknown = keys.keys() - {panel.key for panel in known}
    others = [
        _unknown_panel(key, tables) for key in keys if key in unknown and not HIDDEN.fullmatch(key)
    ]

    def with_points(panels: list[Panel]) -> list[Chosen]:
        return [(panel, [table.get(panel.key) for table in tables]) for panel in panels]

    return with_points(known), with_points(others)


def _unknown_panel(key: str, tables: list[dict[str, Points]]) -> Panel:
    if key.startswith(EVALUATION):
        task, _, score = key.removeprefix(EVALUATION).rpartition("/")
        unit = f"{score}, ± standard error"
        levels = [level for table in tables if (level := chance_of(key, table))]
        return Panel(key, f"Evaluation: {task}", ", ".join([unit, *levels[:1]]), "linear")
    name = key.removesuffix(BY_LAYER)
    title = name.replace("_", " ").capitalize()
    return Panel(key, title, "mean and range of all layers" if name != key else "")


def chance_of(key: str, metrics: dict[str, Points]) -> str:
    """Say what accuracy a guess would have, for an accuracy; else nothing."""
    task, _, score = key.rpartition("/")
    level = metrics.get(f"{task}/{CHANCE}")
    if level is None or not score.startswith("acc"):
        return ""
    return f"chance {numbers.short(float(level.values[-1]))}"


def _with_errors(metrics: dict[str, Points]) -> dict[str, Points]:
    """Draw standard errors as bands of their metrics, one up and one down."""
    table = dict(metrics)
    for key, errors in metrics.items():
        of = key.removesuffix(ERROR)
        if of == key or of not in metrics:
            continue
        del table[key]
        values = metrics[of]
        error_at = dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True))
        each = np.array([error_at.get(step, 0.0) for step in values.steps.tolist()])
        bounds = [Points(values.steps, values.values + sign * each) for sign in (-1, 1)]
        table[of] = joined(bounds)
    return table


def _fold_layers(metrics: dict[str, Points]) -> dict[str, Points]:
    """Combine the metrics of single layers: their mean becomes a line, their range a band."""
    groups: dict[str, list[Points]] = defaultdict(list)
    for key, points in metrics.items():
        layer = LAYER.fullmatch(key)
        groups[layer[1] + BY_LAYER if layer else key].append(points)
    return {key: joined(group) for key, group in groups.items()}


@dataclass(frozen=True)
class Axis:
    """Maps values to 0 (bottom or left) ... SCALE."""

    low: float
    high: float
    log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        low, high = self.low, self.high
        if self.log:
            low, high = math.log10(low), math.log10(high)
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log10(values)
        distance = np.clip(values, low, high) - low
        return distance / (high - low) * SCALE

    def share(self, value: float) -> float:
        return float(self.place(np.array([value]))[0]) / SCALE

    @property
    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            return numbers.log_ticks(self.low, self.high)
        return numbers.ticks(self.low, self.high)


def value_axis(panel: Panel, drawn: list[Series]) -> Axis:
    """Return the vertical axis for all series of a chart."""
    lows = np.concatenate([series.low for series in drawn])
    highs = np.concatenate([series.high for series in drawn])
    if not len(lows):
        return Axis(0.0, 1.0)
    low = float(np.clip(lows.min(), -LARGEST, LARGEST))
    high = float(np.clip(highs.max(), -LARGEST, LARGEST))
    positive = lows[(lows > 1 / LARGEST) & (lows < LARGEST)]
    least = float(positive.min()) if len(positive) else 0.0
    if least and high > least * (1 + SAME):
        wide = panel.scale == "auto" and low > 0 and high / low >= LOG_FROM
        if wide or panel.scale == "log":
            margin = 10 ** (0.04 * (math.log10(high) - math.log10(least)))
            return Axis(least / margin, high * margin, log=True)
    if panel.scale == "zero" and low >= 0:
        return Axis(0.0, high * 1.05 if high > 1 / LARGEST else 1.0)
    size = max(abs(low), abs(high))
    margin = 0.08 * (high - low)
    if high - low <= SAME * size:  # one value: drawn in the middle
        margin = 0.1 * size
    margin = max(margin, 1 / LARGEST) if size > 1 / LARGEST else 1.0
    return Axis(low - margin, high + margin)


def chart(chosen: Chosen, names: list[str], across: Axis, buckets: int) -> tuple[str, dict]:
    """(HTML of one chart, what page.js needs of it). across: the axis of steps."""
    panel, points = chosen
    drawn = {run: thin(one, buckets) for run, one in enumerate(points) if one is not None}
    axis = value_axis(panel, list(drawn.values()))
    if panel.percent:
        axis_labels = numbers.ticks(100 * axis.low, 100 * axis.high)
        labels = [(value / 100, f"{text}%") for value, text in axis_labels]
    else:
        labels = axis.ticks
    grid = "".join(f"M0 {_y(axis.share(value))}H{SCALE}" for value, _ in labels)
    lines = "".join(_drawing(run, series, across, axis) for run, series in drawn.items())
    rows = "".join(_reading(run, series, names[run], panel) for run, series in drawn.items())
    drawing = stretched(SCALE, SCALE, path("grid", grid) + lines)
    unit = ", ".join(filter(None, (panel.unit, "log scale" if axis.log else "")))
    notes = "".join(
        f"<p class=note>{escape(note)}</p>"
        for run, series in drawn.items()
        for note in _notes(series, names[run] if len(names) > 1 else "", axis)
    )
    html = (
        f'<figure class=panel data-panel="{escape(panel.key)}">'
        f"<figcaption><h3>{escape(panel.title)}</h3> <small>{escape(unit)}</small></figcaption>"
        f"<ul class=readout>{rows}</ul>"
        f"<div class=plot>{drawing}{y_labels(labels, axis)}{x_labels(across)}"
        "<div class=cursor hidden></div></div>"
        f"{notes}</figure>"
    )
    carried = [_numbers(run, series) for run, series in drawn.items()]
    return html, {"percent": panel.percent, "series": carried}


def _y(share: float) -> int:
    return round(SCALE - share * SCALE)


def y_labels(labels: list[tuple[float, str]], axis: Axis) -> str:
    return "".join(
        f'<span class=y style="top:{100 - 100 * axis.share(value):.1f}%">{text}</span>'
        for value, text in labels
    )


def x_labels(across: Axis) -> str:
    return "".join(
        f'<span class=x style="left:{100 * across.share(value):.1f}%">{text}</span>'
        for value, text in across.ticks
    )


def _drawing(run: int, series: Series, across: Axis, axis: Axis) -> str:
    """Draw the band, the line and, where there are few, the dots of one run."""
    shown = np.isfinite(series.mean) & ((series.mean > 0) | (not axis.log))
    x = _whole(across.place(series.steps[shown]))
    line = _corners(x, axis, series.mean[shown])
    parts = []
    if series.spread:
        top = _corners(x, axis, series.high[shown])
        bottom = _corners(x, axis, np.maximum(series.low[shown], axis.low))
        parts.append(path("band", f"{_path(top + bottom[::-1])}Z"))
    parts.append(path("line", _path(line)))
    if len(line) <= DOTS:
        dots = "".join(f"M{at} {value}h0" for at, value in line)
        parts.append(path("dots", dots))
    if len(series.not_finite):
        places = sorted(set(_whole(across.place(series.not_finite))))
        bars = "".join(f"M{at} {SCALE}v-80" for at in places)
        parts.append(path("bad", bars))
    return f'<g class="run r{run}">{"".join(parts)}</g>'


def _whole(places: np.ndarray) -> list[int]:
    return np.rint(places).astype(int).tolist()


def _corners(x: list[int], axis: Axis, values: np.ndarray) -> list[tuple[int, int]]:
    """Convert corners to SVG, whose y counts from the top."""
    y = _whole(SCALE - axis.place(values))
    return list(zip(x, y, strict=True))


def _path(corners: list[tuple[int, int]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in corners) if corners else ""


def _reading(run: int, series: Series, name: str, panel: Panel) -> str:
    """Return the run's name and its last value, which page.js replaces under a pointer."""
    shown = numbers.percent if panel.percent else numbers.short
    value = "not finite" if series.last is None else shown(series.last[1])
    return f'<li class="run r{run}"><i></i><span>{escape(name)}</span> <b>{value}</b></li>'


def _notes(series: Series, name: str, axis: Axis) -> list[str]:
    """Return the notes that a reader needs to interpret the picture."""
    prefix = f"{name}: " if name else ""
    notes = []
    if count := len(series.not_finite):
        values = plural(count, "value is", "values are")
        first = f"{int(series.not_finite[0]):,}"
        where = f"at step {first}" if count == 1 else f"the first at step {first}"
        notes.append(f"{prefix}{count:,} {values} not finite, {where} (red marks).")
    if axis.log and (hidden := int((series.mean <= 0).sum())):
        points = plural(hidden, "point")
        notes.append(f"{prefix}{hidden:,} {points} at or below 0: no place on a log scale.")
    if series.width > 1:
        notes.append(f"{prefix}mean (line) and range (band) of every {series.width:,} steps.")
    return [note[0].upper() + note[1:] if not prefix else note for note in notes]


def _numbers(run: int, series: Series) -> dict:
    """Return the numbers for page.js and programs: 7 digits, as float32; 5 of a thinned series."""
    digits = 7 if series.width == 1 else 5
    lines = {"mean": series.mean}
    if series.spread:
        lines |= {"low": series.low, "high": series.high}
    return {
        "run": run,
        "width": series.width,
        "steps": series.steps.tolist(),
        **{name: _rounded(values, digits) for name, values in lines.items()},
        "notFinite": series.not_finite[:100].tolist(),
    }


def _rounded(values: np.ndarray, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
