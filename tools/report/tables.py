"""Write the tables of a report: a summary of each run, and how their configurations differ."""

import json
from collections.abc import Callable
from functools import partial
from html import escape

import numpy as np

from tools import compare_runs
from tools.report import charts, copies, numbers
from tools.report.run import LoadedRun, Points
from tools.report.timeline import ENDS, heads, how_it_ended

CODE = "code "  # compare_runs.explanations has a row for every source file that differs
LONGEST = 120  # characters of a value in the table


def summary(runs: list[LoadedRun]) -> str:
    """Return a table with a column per run and a row per fact that at least one run has."""
    facts = [_facts(run) for run in runs]
    rows = ""
    for name in dict.fromkeys(name for table in facts for name in table):
        cells = "".join(
            f'<td class="run r{i}">{table.get(name, "–")}' for i, table in enumerate(facts)
        )
        rows += f"<tr><th scope=row>{name}{cells}"
    return (
        f"<section><div class=wide><table class=facts><thead><tr><th>{heads(runs)}</thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _facts(run: LoadedRun) -> dict[str, str]:
    kind, mark, text = ENDS[how_it_ended(run.starts[-1], newest=True)]
    if kind == "open":
        text = "running, or killed"
    goal = run.options.get("training", {}).get("steps")
    model = run.options.get("model", {})
    failed = sum(row["how"] == "failed" for row in run.account.interruptions)
    facts = {"status": f"<b class={kind}>{mark}</b> {text}"}
    if model.get("family"):
        facts["model"] = escape(f"{model['family']} {model.get('flavor', '')}")
    if devices := _devices(run):
        facts["devices"] = escape(devices)
    facts["steps"] = f"{run.last_step:,}" + (f" of {goal:,}" if isinstance(goal, int) else "")
    for key, label, summarise in (
        ("tokens_seen", "tokens", partial(_summary, np.max)),
        ("loss", "last loss", _last),
        ("validation_loss", "best validation loss", _best),
        ("validation_bits_per_byte", "best bits per byte", _best),
        ("tokens_per_second", "tokens/s, median", partial(_summary, np.median)),
        ("mfu", "MFU, median", partial(_summary, np.median, show=numbers.percent)),
        ("memory_gib", "peak memory, GiB", partial(_summary, np.max)),
    ):
        if key in run.metrics:
            facts[label] = summarise(run.metrics[key])
    facts |= _scores(run)
    facts["goodput"] = numbers.percent(run.account.goodput)
    if run.copies:
        facts["copies in memory"] = copies.fact(run)
    facts["starts"] = f"{len(run.starts):,}, {failed:,} failed"
    return facts


def _scores(run: LoadedRun) -> dict[str, str]:
    """Return the last score of each task, with its standard error."""
    facts = {}
    for key, points in run.metrics.items():
        task, _, score = key.removeprefix(charts.EVALUATION).rpartition("/")
        if not key.startswith(charts.EVALUATION) or score not in ("acc", "bits_per_byte"):
            continue
        if charts.HIDDEN.fullmatch(key):
            continue
        error = run.metrics.get(key + charts.ERROR)
        margin = f" ± {_last(error)}" if error else ""
        level = charts.chance_of(key, run.metrics)
        facts[f"{escape(task)}, {score}"] = (
            _last(points) + margin + (f" ({level})" if level else "")
        )
    return facts


def _devices(run: LoadedRun) -> str:
    """Return the devices of the newest start that recorded them, as "8 x NVIDIA H100 80GB HBM3"."""
    recorded = (compare_runs.devices(start.about) for start in reversed(run.starts))
    counts = next(filter(None, recorded), {})
    return ", ".join(f"{count} × {device}" for device, count in counts.items())


def _finite(points: Points) -> Points:
    finite = np.isfinite(points.values)
    return Points(points.steps[finite], points.values[finite])


def _last(points: Points) -> str:
    return numbers.short(float(points.values[np.argmax(points.steps)]))


def _summary(reduce: Callable, points: Points, show: Callable = numbers.short) -> str:
    values = _finite(points).values
    return show(float(reduce(values))) if len(values) else "–"


def _best(points: Points) -> str:
    points = _finite(points)
    if not len(points.values):
        return "–"
    at = int(np.argmin(points.values))
    value = numbers.short(float(points.values[at]))
    return f"{value} <small>step {int(points.steps[at]):,}</small>"


def differences(runs: list[LoadedRun]) -> tuple[dict[str, list], dict[str, list]]:
    """Return option -> its values where runs differ, and the same of code, versions and devices."""
    options: dict[str, list] = {}
    surroundings: dict[str, list] = {}
    for number, run in enumerate(runs[1:], 1):
        found = compare_runs.explanations(runs[0].folder, run.folder)
        for into, differing in zip((options, surroundings), found, strict=True):
            for key, (first, value) in differing.items():
                into.setdefault(key, [first] * len(runs))[number] = value
    return options, surroundings


def configuration(runs: list[LoadedRun]) -> str:
    """Return the differences as a table, and each whole configuration folded away."""
    options, surroundings = differences(runs)
    code = sorted(key for key in surroundings if key.startswith(CODE) and key.endswith(".py"))
    parts = []
    if len(runs) > 1:
        parts.append(_difference_table("option", options, runs))
        rest = {key: values for key, values in surroundings.items() if key not in code}
        if rest:
            parts.append(_difference_table("surroundings", rest, runs))
        if code:
            files = ", ".join(key.removeprefix(CODE) for key in code)
            parts.append(f"<p class=note>Source files that differ: {escape(files)}.</p>")
    parts += [
        f'<details class="run r{i}"><summary><i></i>{escape(run.name)}: config.toml</summary>'
        f"<pre>{escape(run.config or 'There is no config.toml.')}</pre></details>"
        for i, run in enumerate(runs)
    ]
    return f"<section><h2>Configuration</h2>{''.join(parts)}</section>"


def _difference_table(title: str, rows: dict[str, list], runs: list[LoadedRun]) -> str:
    if not rows:
        return f"<p class=note>Every {title} is the same.</p>"
    body = ""
    for key, values in rows.items():
        cells = "".join(
            f'<td class="run r{i}"><code>{escape(_shown(value))}</code>'
            for i, value in enumerate(values)
        )
        body += f"<tr><th scope=row><code>{escape(key)}</code>{cells}"
    return (
        f"<div class=wide><table class=facts><thead><tr><th>{title}{heads(runs)}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _shown(value: object) -> str:
    if value is None:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def samples(runs: list[LoadedRun]) -> str:
    shown = [(i, run) for i, run in enumerate(runs) if run.sample]
    if not shown:
        return ""
    texts = "".join(
        f'<figure class="panel run r{i}"><figcaption><h3><i></i>{escape(run.name)}</h3>'
        f"</figcaption><pre>{escape(run.sample)}</pre></figure>"
        for i, run in shown
    )
    return (
        "<section><h2>Samples</h2><p class=note>From the final weights "
        f"(debug.sample_tokens).</p><div class=grid2>{texts}</div></section>"
    )
