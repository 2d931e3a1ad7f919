"""The page: everything in one file, which opens without a server or a network."""

import json
from datetime import datetime, timezone
from html import escape
from pathlib import Path

from tools import svg
from tools.report import charts, experts, tables, timeline
from tools.report.run import LoadedRun

HERE = Path(__file__).resolve().parent
FEWEST_STEPS = 5  # of the axis of steps, so that its labels are whole numbers
MOST_NAMES = 4  # of more runs, a chart shows the colors only
# The first eight of a palette that colour-blind readers can tell apart, for a light and a dark
# page: Okabe and Ito (2008), "Color universal design"; lightened or darkened for contrast.
COLORS = (
    ("#0b6fb8", "#56b4f5"),
    ("#cf5200", "#ff9148"),
    ("#00855f", "#2fcfa0"),
    ("#b0458a", "#ec9ac8"),
    ("#9a6b00", "#edb73c"),
    ("#5a4fcf", "#a79bff"),
    ("#a8201a", "#ff7d75"),
    ("#4d5761", "#b4bec8"),
)


def build(runs: list[LoadedRun]) -> str:
    names = [run.name for run in runs]
    known, others = charts.panels_of(runs)
    count = sum(points is not None for _, table in known + others for points in table)
    fitting = charts.MOST_BUCKETS // max(1, count)  # for each series
    buckets = max(charts.FEWEST_BUCKETS, min(charts.PIXELS, fitting))
    last_step = max(run.last_step for run in runs)
    across = charts.Axis(0.0, float(max(FEWEST_STEPS, last_step)))
    panels: dict[str, dict] = {}
    first = _charts(known, names, across, buckets, panels)
    more = _charts(others, names, across, buckets, panels)
    body = tables.summary(runs)
    if first:
        body += f"<section><h2>Curves <small>over steps</small></h2><div class=grid2>{first}</div></section>"
    else:
        body += "<section><p class=note>No metrics are logged yet.</p></section>"
    body += experts.section(runs) + timeline.section(runs) + timeline.goodput_section(runs)
    body += tables.samples(runs)
    if more:
        body += f"<section><h2>Also logged</h2><div class=grid2>{more}</div></section>"
    body += tables.configuration(runs)
    data = {"runs": names, "lastStep": across.high, "panels": panels}
    return _document(names, body, data)


def _charts(chosen: list, names: list[str], across: charts.Axis, buckets: int, data: dict) -> str:
    """Return these charts as HTML; their numbers are added to `data`."""
    html = ""
    for panel_and_points in chosen:
        figure, carried = charts.chart(panel_and_points, names, across, buckets)
        data[panel_and_points[0].key] = carried
        html += figure
    return html


def _document(names: list[str], body: str, data: dict) -> str:
    # "</script>" in a name must not end the element
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = (HERE / "page.css").read_text(encoding="utf-8") + _run_colors(len(names))
    script = (HERE / "page.js").read_text(encoding="utf-8")
    chips = "".join(
        f'<button type=button class="r{i}" data-run={i} aria-pressed=true><i></i>{escape(name)}'
        "</button>"
        for i, name in enumerate(names)
    )
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    whole = (
        f"<header><div class=inner><h1>Plumbline</h1>"
        f"<div class=chips>{chips}</div><span id=step></span></div></header>"
        f"<main>{body}</main>"
        f"<footer>Written {now} by <code>python -m tools.report</code>.</footer>"
        f"<script type=application/json id=data>{numbers}</script><script>{script}</script>"
    )
    return svg.page(", ".join(names), style, whole, " class=many" * (len(names) > MOST_NAMES))


def _run_colors(count: int) -> str:
    """Return the CSS of each run. Beyond eight, lines are dashed and squares hollow."""
    light = dark = rules = ""
    for run in range(count):
        one, other = COLORS[run % len(COLORS)]
        light += f".r{run}{{--c:{one}}}"
        dark += f".r{run}{{--c:{other}}}"
        rules += f"body.off{run} .run.r{run}{{display:none}}"
        if run >= len(COLORS):
            rules += f".r{run} .line{{stroke-dasharray:{2 + run // len(COLORS) * 3} 3}}"
            rules += f".r{run} i{{background:none;box-shadow:inset 0 0 0 2px var(--c)}}"
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}{rules}"
