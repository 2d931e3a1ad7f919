"""A plan as one self-contained HTML page: memory over a step, the time line of compute and
collectives, and the mesh on its hosts.

The drawings are inline SVG. The page loads nothing from anywhere.
"""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from parallelisms import ep_hosts
from tools.plan.plan import Plan
from tools.plan.report import model_name
from tools.plan.stages import LEFT, WIDTH, stages
from tools.plan.step import GIB, IN_BLOCKS, KINDS
from tools.plan.typeset import typeset
from tools.svg import Picture, legend, ticks

COLORS = {  # by kind of memory, from the bottom up: all kinds of tools/plan/step.py::KINDS
    "parameters": "#264653",
    "frozen weights": "#7a8b99",
    "optimizer state": "#2a6f7f",
    "gradients": "#2a9d8f",
    "whole gradients": "#74c69d",
    "working weights": "#577590",
    "gathered keys and values": "#9c6ade",
    "collective buffers": "#90a4c4",
    "activations": "#e9c46a",
    "logits and loss": "#e76f51",
    "backward's temporaries": "#f4a261",
    "temporaries": "#f6d7a7",
    "batch": "#999999",
    "other": "#cccccc",
}
STREAMS = {
    "compute": "#264653",
    "all-gather": "#2a9d8f",
    "reduce-scatter": "#e76f51",
    "all-reduce": "#e9c46a",
    "all-to-all": "#9c6ade",
}
POINTS = 700

Bar = tuple[float, float, str]  # start and end in seconds, place in the step

# The drawings stay on light paper where the page is dark: their colors are chosen for it.
STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,sans-serif;max-width:1140px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
svg{display:block;width:100%;height:auto;background:#fff}
text{font:12px system-ui,sans-serif;fill:#222}text.dim{fill:#666}
figcaption{color:#555;margin:.3em 0 2em}figure{margin:0}
table{border-collapse:collapse;font-size:13px;margin:1em 0}
td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#16181c}
figcaption{color:#aaa}}
"""


def page(plan: Plan, report: str) -> str:
    """Build the page as HTML: the report, and below it the figures."""
    title = title_of(plan)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{typeset(report)}{figures_of(plan)}</body></html>\n"
    )


def title_of(plan: Plan) -> str:
    return f"{model_name(plan.cfg)} on {plan.inputs.gpus:,} x {plan.inputs.device.name}"


def figures_of(plan: Plan) -> str:
    """Return the drawings of a plan with their captions, as HTML."""
    rank = plan.step.number if plan.pipeline else 0
    figures = (
        (
            "Memory over a step",
            memory(plan),
            f"Live bytes of rank {rank} in the order of the operators, one after the other; of "
            "more "
            "than three microbatches the first, one and the last. The dashed line is what the "
            "device leaves to live bytes under "
            "the stated margin.",
        ),
        (
            "Who works when",
            stages(plan),
            "A row for each rank of the pipeline, from the first forward to the last backward, on "
            "the device's numbers. Where a row is empty, the rank waits for another. Of a rank "
            "with several stages, later ones are "
            "paler. Of many microbatches the beginning, some in the middle and the end are drawn. "
            "Point at a bar to see its stage, microbatch and times.",
        )
        if plan.pipeline
        else (
            "Compute and communication",
            timeline(plan),
            "The traced step on the device's numbers: communication is exposed where the row of "
            "compute is empty.",
        ),
        (
            "The mesh on its hosts",
            hosts(plan),
            "Rank 0 and the groups that it talks to. A tensor-parallel group stays inside a host.",
        ),
    )
    parts = []
    for heading, drawing, caption in figures:
        words = f"<figcaption>{caption}</figcaption>"
        parts.append(f"<h2>{heading}</h2><figure>{drawing}{words}</figure>")
    return "".join(parts)


class Samples(NamedTuple):
    """Samples of the memory curve, as the page draws it."""

    # (event, bytes by kind): the fullest moment of each of POINTS equal parts of the step
    points: list[tuple[int, dict[str, int]]]
    phases: list[tuple[int, str]]  # (event, phase) where each phase begins
    events: int


def _samples(plan: Plan) -> Samples:
    changes = list(plan.step.curve())
    live = plan.step.before()
    points = []
    phases = []
    last_phase = None
    last_part = -1
    fullest = 0
    for i, (where, kind, change) in enumerate(changes):
        phase = (where.micro, where.phase)
        if phase != last_phase and where.phase in (*IN_BLOCKS, "clip", "optimizer"):
            last_phase = phase
            phases.append((i, where.phase))
        live[kind] = live.get(kind, 0) + change
        total = sum(live.values())
        part = i * POINTS // len(changes)
        if part != last_part:
            points.append((i, dict(live)))
            last_part = part
            fullest = total
        elif total > fullest:
            points[-1] = (i, dict(live))
            fullest = total
    return Samples(points, phases, len(changes))


def memory(plan: Plan) -> str:
    """Stacked areas."""
    samples, phases, events = _samples(plan)
    room = plan.inputs.device.memory_gib * GIB
    usable = plan.usable
    top = 1.08 * max(plan.live, min(usable, 3 * plan.live))
    height = 380
    bottom = 340

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * i / max(events - 1, 1)

    def y(size: float) -> float:
        return bottom - (bottom - 20) * size / top

    picture = Picture(WIDTH, height)
    floor = [0.0] * len(samples)
    for kind, color in COLORS.items():
        heights = [s.get(kind, 0) for _, s in samples]
        if not any(heights):
            continue
        roof = [a + b for a, b in zip(floor, heights)]
        points = [(x(i), y(v)) for (i, _), v in zip(samples, roof)]
        points += [(x(i), y(v)) for (i, _), v in reversed(list(zip(samples, floor)))]
        picture.area(points, color, KINDS[kind])
        floor = roof
    unit, per = ("GiB", GIB) if top >= GIB else ("MiB", 2**20)
    for value in ticks(top / per):
        at = y(value * per)
        picture.line(LEFT - 4, at, LEFT, at, "#777")
        picture.text(LEFT - 8, at + 4, f"{value:g} {unit}", "dim", "end")
    if usable < top:
        picture.line(LEFT, y(usable), WIDTH - 10, y(usable), "#c00", dashes="6 4")
        picture.text(LEFT + 6, y(usable) - 5, f"{usable / GIB:.1f} GiB of {room / GIB:.1f}")
    ends = [begin for begin, _ in phases[1:]] + [events]
    for (begin, phase), end in zip(phases, ends):
        if x(end) - x(begin) > 45:
            middle = (x(begin) + x(end)) / 2
            picture.text(middle, bottom + 16, phase, "dim", "middle")
        if x(end) - x(begin) < 3:  # many microbatches: their lines would cover the curve
            continue
        picture.line(x(begin), 20, x(begin), bottom + 6, "#0002")
    seen = {kind for _, sizes in samples for kind, size in sizes.items() if size}
    rows = [(KINDS[kind], color) for kind, color in COLORS.items() if kind in seen]
    return picture.svg() + legend(rows, WIDTH, LEFT)


def _merged(bars: list[Bar], gap: float) -> Iterator[Bar]:
    """Bars less than `gap` seconds apart as one, which would touch in the drawing: there may be
    thousands of collectives."""
    current = None
    for start, end, label in sorted(bars):
        if current and start - current[1] < gap:
            current = (current[0], max(end, current[1]), current[2])
        else:
            if current:
                yield current
            current = (start, end, label)
    if current:
        yield current


def _timeline(plan: Plan, begin: float, end: float) -> str:
    """Draw a row for computing and one for each kind of collective on each mesh dimension, from
    `begin` to `end` seconds."""
    rows: dict[str, list[Bar]] = {"compute": []}
    for stream, start, stop, where in plan.time.bars:
        if stop > start:
            bars = rows.setdefault(stream, [])
            if stop > begin and start < end:
                bars.append((max(start, begin), min(stop, end), where))
    order = ["compute", *sorted(rows.keys() - {"compute"})]
    rows = {stream: rows[stream] for stream in order if rows[stream]}
    scale = (WIDTH - 200) / max(end - begin, 1e-9)
    unit, per = ("s", 1.0) if end - begin > 2 else ("ms", 1e3)
    bottom = 10 + 28 * len(rows)
    picture = Picture(WIDTH, bottom + 26)
    for i, (stream, bars) in enumerate(rows.items()):
        y = 10 + 28 * i
        picture.text(170, y + 14, stream, anchor="end")
        for start, stop, where in _merged(bars, 0.3 / scale):
            label = f"{where}: {1e3 * start:.2f} to {1e3 * stop:.2f} ms"
            x = 180 + (start - begin) * scale
            color = STREAMS[stream.split()[-1]]
            picture.rect((x, y, max(0.4, (stop - start) * scale), 20), color, tip=label)
    for value in ticks((end - begin) * per):
        x = 180 + value / per * scale
        anchor = "middle" if x < WIDTH - 40 else "end"
        picture.line(x, 6, x, bottom + 4, "#0002")
        picture.text(x, bottom + 18, f"{value:g} {unit}", "dim", anchor)
    return picture.svg()


def timeline(plan: Plan) -> str:
    """Draw the whole traced step, then two blocks forward and two backward of its last microbatch."""
    bars = plan.time.bars
    micro = plan.step.microbatches - 1
    block = plan.step.layers // 2
    end_of_step = max((end for _, _, end, _ in bars), default=1.0)
    figures = [_timeline(plan, 0.0, end_of_step)]
    for phase, blocks in ("forward", (block, block + 1)), ("backward", (block + 1, block)):
        places = {f"{phase} {b}, {micro}" for b in blocks}
        times = []
        for stream, start, stop, where in bars:
            if stream == "compute" and where in places:
                times += [start, stop]
        if times:
            figures += [
                f"<p>Blocks {blocks[0] + 1} and {blocks[1] + 1}, {phase}</p>",
                _timeline(plan, min(times), max(times)),
            ]
    return "".join(figures)


def hosts(plan: Plan, shown: int = 32) -> str:
    """Hosts as boxes of devices; rank 0's groups in color. Of many hosts the first."""
    of_rank_0 = plan.ranks[0].groups
    groups = {dim: set(ranks) for dim, ranks in of_rank_0.items() if len(ranks) > 1}
    groups.pop("dp_shard_cp", None)  # of its two dimensions each is shown
    colors = {
        "tp": "#e76f51",
        "cp": "#9c6ade",
        "dp_shard": "#2a9d8f",
        "dp_replicate": "#e9c46a",
        "pp": "#577590",
        "ep": "#f4a261",
        ep_hosts.PEERS: "#bc4749",
        ep_hosts.HOST: "#f7c59f",
        "edp": "#90a4c4",
    }
    per_host = plan.inputs.per_host
    count = plan.inputs.gpus // per_host
    across = 8 if count > 4 else max(1, count)
    columns = per_host if per_host <= 4 else -(-per_host // 2)
    cell = min(26.0, ((WIDTH - 20) / across - 22) / columns - 4)
    lines = -(-per_host // columns)
    width = columns * (cell + 4) + 14
    height = lines * (cell + 4) + 34
    bottom = 6 + -(-min(count, shown) // across) * (height + 8)
    picture = Picture(WIDTH, bottom + 26)
    for h in range(min(count, shown)):
        left = 10 + (h % across) * (width + 8)
        top = 6 + (h // across) * (height + 8)
        picture.rect((left, top, width, height), "#f6f6f6", "#ccc")
        picture.text(left + 6, top + 15, f"host {h}", "dim")
        for g in range(per_host):
            rank = h * per_host + g
            dims = [dim for dim, ranks in groups.items() if rank in ranks]
            color = "#264653"
            if rank:
                color = next((color for dim, color in colors.items() if dim in dims), "#ddd")
            x = left + 8 + (g % columns) * (cell + 4)
            y = top + 22 + (g // columns) * (cell + 4)
            label = f"rank {rank}"
            if dims:
                label += f": with rank 0 in {', '.join(dims)}"
            picture.rect((x, y, cell, cell), color, tip=label)
    if count > shown:
        picture.text(10, bottom + 14, f"and {count - shown:,} more hosts like these", "dim")
    rows = [
        ("rank 0", "#264653"),
        *((f"its {dim} group of {len(ranks)}", colors[dim]) for dim, ranks in groups.items()),
        ("others", "#ddd"),
    ]
    return picture.svg() + legend(rows, WIDTH, LEFT)
