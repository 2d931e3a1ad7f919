"""Two plans side by side, as text and as a page: what they need, what they cost, and where the time
of their steps differs."""

from collections.abc import Callable
from html import escape

from configs.schema import Config, InputError
from tools.plan.plan import Plan
from tools.plan.report import size_text, time_text
from tools.plan.step import KINDS

Row = tuple[str, str, str, str]  # what, of A, of B, what B has more
REST = "waiting for other stages, and rest"


def changes(first: Config, second: Config) -> list[tuple[str, str, str]]:
    """Return the options that differ: name, value in the first, value in the second. Raises
    InputError for none."""
    found = []
    for table, options in vars(first).items():
        others = getattr(second, table).model_dump()
        for name, value in options.model_dump().items():
            if value != others[name]:
                found.append((f"{table}.{name}", str(value), str(others[name])))
    if not found:
        raise InputError("--compare changes no option: name a TOML file or an option that differs")
    return found


def parts_of_step(plan: Plan) -> dict[str, float]:
    """Split the seconds of a step into parts that add up to the step."""
    t = plan.time
    parts = {
        "matmuls": t.matmul,
        "attention": t.attention,
        "memory-bound operators": t.memory_bound,
    }
    for (dim, kind), line in t.lines.items():
        parts[f"exposed {dim} {kind}"] = line.exposed
    parts[REST] = max(0.0, t.seconds - sum(parts.values()))  # 0 but for rounding, or waiting
    return parts


def differences(first: Plan, second: Plan) -> list[tuple[str, float, float]]:
    """Return the parts of the steps, the largest difference first: name, seconds of both."""
    a = parts_of_step(first)
    b = parts_of_step(second)
    rows = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in a | b]
    return sorted(rows, key=how_different, reverse=True)


def how_different(row: tuple[str, float, float]) -> float:
    _, first, second = row
    return abs(second - first)


def row(name: str, first: float, second: float, words: Callable[[float], str]) -> Row:
    """words: gives the text of a number."""
    size = words(abs(second - first))
    sign = "+" if second > first else "-"
    difference = "=" if size == words(0.0) else sign + size
    return name, words(first), words(second), difference


def number(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.1%}"


def dollars(value: float) -> str:
    return f"${value:,.0f}"


def hours(plan: Plan) -> float:
    """Count the GPU-hours of the run, without interruptions."""
    return plan.inputs.gpus * plan.steps * plan.time.seconds / 3600


def blocks(first: Plan, second: Plan) -> dict[str, list[Row]]:
    """Title -> rows."""
    plans = (first, second)
    gpus = first.inputs.gpus
    speeds = [plan.tokens_per_second for plan in plans]
    bubbles = [plan.pipeline.bubble if plan.pipeline else 0.0 for plan in plans]
    hours_of = [hours(plan) for plan in plans]
    fits = ["fits" if plan.fits else "DOES NOT FIT" for plan in plans]
    overview = [
        row("step", *(plan.time.seconds for plan in plans), time_text),
        row("tokens/s", *speeds, number),
        row("tokens/s per GPU", *(speed / gpus for speed in speeds), number),
        row("MFU", *(plan.mfu for plan in plans), share),
        row("bubble of the pipeline", *bubbles, share),
        row("memory needed of a GPU", *(plan.needed for plan in plans), size_text),
        (f"  of {first.inputs.device.memory_gib:.1f} GiB", *fits, ""),
        row("GPU-hours, uninterrupted", *hours_of, number),
    ]
    if price := first.inputs.usd_per_gpu_hour:
        overview.append(row("cost, uninterrupted", *(h * price for h in hours_of), dollars))
    times = [row(*one, time_text) for one in differences(first, second) if max(one[1:]) > 1e-9]
    at_peak = [plan.peak[2] for plan in plans]
    kinds = []
    for kind, name in KINDS.items():
        sizes = [sizes.get(kind, 0) for sizes in at_peak]
        if any(sizes):
            kinds.append(row(name, *sizes, size_text))
    messages = []
    for dim, kind in sorted(first.time.lines.keys() | second.time.lines.keys()):
        lines = [plan.time.lines.get((dim, kind)) for plan in plans]
        exposed = [line.exposed if line else 0.0 for line in lines]
        hidden = [max(0.0, line.seconds - line.exposed) if line else 0.0 for line in lines]
        if any(line and line.seconds for line in lines):
            messages.append(row(f"{dim} {kind}, exposed", *exposed, time_text))
            messages.append(row(f"{dim} {kind}, hidden", *hidden, time_text))
    return {
        "Overview": overview,
        "Where the step's time differs, most first": times,
        "Memory at the peak of the fullest rank": kinds,
        "Communication of a step": messages,
    }


def options(first: Plan, second: Plan) -> list[Row]:
    return [(name, a, b, "") for name, a, b in changes(first.cfg, second.cfg)]


def every_block(first: Plan, second: Plan) -> dict[str, list[Row]]:
    return {"Options that differ": options(first, second)} | blocks(first, second)


def table(first: Plan, second: Plan) -> str:
    """Format the comparison as text."""
    lines = []
    for title, rows in every_block(first, second).items():
        lines.append(f"{title:44}{'A':>18}{'B':>18}{'B - A':>16}")
        for name, a, b, difference in rows:
            lines.append(f"  {name:42}{a:>18}{b:>18}{difference:>16}".rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()


def section(first: Plan, second: Plan) -> str:
    """Format the comparison as HTML."""
    parts = []
    for title, rows in every_block(first, second).items():
        heads = "".join(f"<th>{head}</th>" for head in (title, "A", "B", "B - A"))
        lines = []
        for cells in rows:
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        parts.append(f"<table><tr>{heads}</tr>{''.join(lines)}</table>")
    return "".join(parts)
