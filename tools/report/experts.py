"""A map of the experts' load: a row per layer, a column per expert, of each run's newest record."""

import bisect
from html import escape

from tools.report.run import LoadedRun
from tools.svg import path, stretched

# Classes of load (over the mean of the layer) and their upper ends. Below the first an expert is
# idle, as in training/experts.py::IDLE.
LEVELS = (
    (0.1, "below 0.1 (idle)"),
    (0.5, "0.1 to 0.5"),
    (0.8, "0.5 to 0.8"),
    (1.25, "0.8 to 1.25"),
    (2.0, "1.25 to 2"),
    (4.0, "2 to 4"),
    (float("inf"), "4 and more"),
)
MOST_CELLS = 20_000  # of all runs together: about 15 bytes each


def section(runs: list[LoadedRun]) -> str:
    """Return the section as HTML; "" if no run has experts."""
    shown = [(number, run) for number, run in enumerate(runs) if run.experts]
    if not shown:
        return ""
    maps = "".join(_map(number, run, MOST_CELLS // len(shown)) for number, run in shown)
    legend = "".join(
        f"<li><i class=l{level}></i>{label}</li>" for level, (_, label) in enumerate(LEVELS)
    )
    return (
        "<section><h2>Expert load by layer</h2><p class=note>Tokens of each expert over the mean "
        f"of its layer.</p><ul class=legend>{legend}</ul><div class=grid2>{maps}</div></section>"
    )


def level_of(load: float) -> int:
    ends = [end for end, _ in LEVELS[:-1]]
    return bisect.bisect_right(ends, load)


def _map(number: int, run: LoadedRun, most_cells: int) -> str:
    record = run.experts[-1]
    loads = {layer: _loads(counts) for layer, counts in record["counts"].items()}
    experts = max(map(len, loads.values()), default=0)
    if not experts:
        return ""
    busiest = {layer: max(load) for layer, load in loads.items()}
    worst_first = sorted(busiest, key=busiest.get, reverse=True)
    layers = sorted(worst_first[: max(1, most_cells // experts)])
    paths = [""] * len(LEVELS)
    for row, layer in enumerate(layers):
        for first, count, level in _runs_of([level_of(load) for load in loads[layer]]):
            paths[level] += f"M{first} {row}h{count}v1h-{count}z"
    cells = "".join(path(f"l{level}", squares) for level, squares in enumerate(paths) if squares)
    drawing = stretched(experts, len(layers), cells, " shape-rendering=crispEdges")
    labels = "".join(
        f'<span class=y style="top:{100 * (row + 0.5) / len(layers):.1f}%">{layer}</span>'
        for row, layer in enumerate(layers)
        if row % -(-len(layers) // 12) == 0
    )
    every = -(-experts // 8)
    labels += "".join(
        f'<span class=x style="left:{100 * (expert + 0.5) / experts:.1f}%">{expert}</span>'
        for expert in range(0, experts, every)
    )
    note = f"steps {record['step'] - record['steps'] + 1:,} to {record['step']:,}"
    if len(layers) < len(loads):
        note += f"; the {len(layers)} least balanced of {len(loads)} layers"
    height = max(5, min(24, 1.1 * len(layers)))
    return (
        f'<figure class="panel run r{number}"><figcaption><h3><i></i>{escape(run.name)}</h3> '
        f"<small>{note}</small></figcaption>"
        f'<div class="plot map" style="height:{height:.1f}rem">'
        f"{drawing}{labels}</div>"
        "<p class=note>Rows: layers. Columns: experts.</p></figure>"
    )


def _loads(counts: list[int]) -> list[float]:
    mean = sum(counts) / len(counts) if counts else 0
    return [count / mean if mean else 0.0 for count in counts]


def _runs_of(levels: list[int]) -> list[tuple[int, int, int]]:
    """Group adjacent columns of the same level: (first column, how many, level)."""
    found: list[tuple[int, int, int]] = []
    for column, level in enumerate(levels):
        if found and found[-1][2] == level:
            first, count, _ = found[-1]
            found[-1] = (first, count + 1, level)
        else:
            found.append((column, 1, level))
    return found
