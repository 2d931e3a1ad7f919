"""When each run started, trained, failed and waited, and where its seconds went."""

from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from reliability.goodput import KINDS, ORDERLY, Past
from tools.report import copies, numbers
from tools.report.charts import Axis, x_labels
from tools.report.run import LoadedRun
from tools.svg import path, stretched

# How a start ended: class of its mark, the mark, and its explanation.
ENDS = {
    "done": ("ok", "✓", "done"),
    "stopped": ("stop", "■", "stopped on request"),
    "given up": ("fail", "✕", "given up"),
    "failed": ("fail", "✕", "failed"),
    "refused": ("stop", "○", "refused its input"),
    "open": ("open", "▸", "no end recorded"),
}
GAPS = {"failed": "detecting", "given up": "paused", "stopped": "paused", "done": "paused"}
MOST_ROWS = 200  # of the table of starts, for each run
LONGEST_REASON = 400  # characters


@dataclass(frozen=True)
class Span:
    """Span of one start, in seconds since 1970."""

    start: Past
    begin: float
    trains: float  # its first step was done
    end: float  # its last sign of life
    how: str  # a key of ENDS


def spans(starts: list[Past]) -> list[Span]:
    """Return the starts that recorded a time, oldest first."""
    found = []
    for start in starts:
        times = [line["time"] for line in start.lines]
        times += [
            datetime.fromisoformat(text).timestamp()
            for text in (start.about.get("began"), start.ended.get("ended"))
            if text
        ]
        if not times:
            continue
        begin, end = min(times), max(times)
        trained = any(line["productive"] > 0 for line in start.lines)
        starting = start.lines[-1]["starting"] if trained else end - begin
        newest = start is starts[-1]
        found.append(
            Span(start, begin, min(begin + starting, end), end, how_it_ended(start, newest))
        )
    return found


def how_it_ended(start: Past, newest: bool) -> str:
    """newest: a start without an end may still be running; an earlier one was killed."""
    code = start.ended.get("exit_code")
    if start.did_nothing and code == 2:
        return "refused"
    if code is None:
        return "open" if newest else "failed"
    return {0: "done", 75: "stopped", 76: "given up"}.get(code, "failed")


def section(runs: list[LoadedRun]) -> str:
    """Return the time line, the bars of goodput, and the tables of both."""
    lanes = [spans(run.starts) for run in runs]
    lengths = [lane[-1].end - lane[0].begin for lane in lanes if lane]
    longest = max([*lengths, 1.0])
    unit, name = next(
        (unit, name)
        for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
        if longest >= 3 * unit or unit == 1
    )
    across = Axis(0.0, longest / unit)
    labels = x_labels(across)
    drawn = "".join(_lane(i, run, lanes[i], longest) for i, run in enumerate(runs))
    keys = (
        "<li><i class=starting></i>starting</li><li><i class=training></i>training</li>"
        "<li><i class=detecting></i>failure to next start</li>"
        "<li><i class=paused></i>paused</li>"
    )
    keys += "".join(
        f"<li><b class={kind}>{mark}</b> {text}</li>" for kind, mark, text in ENDS.values()
    ).replace("<li><b class=fail>✕</b> given up</li>", "")
    below = "; below, copies in the memory of hosts" if any(run.copies for run in runs) else ""
    return (
        "<section><h2>Starts and failures</h2>"
        f"<figure class=panel><ul class=legend>{keys}</ul>{drawn}"
        f"<div class=axis>{labels}</div><p class=note>{name.capitalize()} since each run's first "
        f"start. Small ticks: checkpoints{below}.</p></figure>"
        f"{starts_table(runs, lanes)}</section>{copies.table(runs)}"
    )


def _lane(number: int, run: LoadedRun, lane: list[Span], longest: float) -> str:
    parts = []
    for i, span in enumerate(lane):
        after = lane[i + 1].begin if i + 1 < len(lane) else None
        parts.append(_bar("starting", lane[0].begin, span.begin, span.trains, longest))
        parts.append(_bar("training", lane[0].begin, span.trains, span.end, longest))
        if after is not None:
            gap = GAPS.get(span.how, "paused")
            parts.append(_bar(gap, lane[0].begin, span.end, after, longest))
    saved = [time for span in lane for time in _saves(span.start)]
    for times in (saved, copies.made(run) if lane else []):
        places = sorted({round(1000 * (time - lane[0].begin) / longest) for time in times})
        ticks = "".join(f"M{place} 0v1" for place in places)
        parts.append(stretched(1000, 1, path("saves", ticks)))
    for span in lane:
        kind, mark, text = ENDS[span.how]
        place = 100 * (span.end - lane[0].begin) / longest
        title = f"start {span.start.number}: {text}. {span.start.ended.get('reason', '')}"[:300]
        parts.append(
            f'<b class="mark {kind}" style="left:{place:.2f}%" title="{escape(title)}">{mark}</b>'
        )
    began = _utc(lane[0].begin) if lane else "no start left a time"
    return (
        f'<div class="run r{number}"><p class=lane-name><i></i>{escape(run.name)} '
        f"<small>from {began}</small></p><div class=lane>{''.join(parts)}</div></div>"
    )


def _bar(kind: str, origin: float, begin: float, end: float, longest: float) -> str:
    if end <= begin:
        return ""
    left, width = 100 * (begin - origin) / longest, 100 * (end - begin) / longest
    return f'<span class={kind} style="left:{left:.2f}%;width:{width:.2f}%"></span>'


def _saves(start: Past) -> list[float]:
    return [
        line["time"]
        for before, line in zip(start.lines, start.lines[1:], strict=False)
        if line["saves"] > before["saves"]
    ]


def _utc(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def starts_table(runs: list[LoadedRun], lanes: list[list[Span]]) -> str:
    rows, left_out = "", 0
    for number, (run, lane) in enumerate(zip(runs, lanes, strict=True)):
        redone = {row["start"]: row["redone"] for row in run.account.interruptions}
        left_out += max(0, len(lane) - MOST_ROWS)
        for span in lane[-MOST_ROWS:]:
            rows += _row(number, run.name, span, redone.get(span.start.number, 0))
    note = f"<p class=note>{left_out:,} earlier starts are left out.</p>" if left_out else ""
    return (
        "<div class=wide><table class=starts><thead><tr><th>run<th>start<th>began<th>state from<th>lasted<th>steps"
        f"<th>redone<th>how it ended</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _row(number: int, name: str, span: Span, redone: int) -> str:
    kind, mark, text = ENDS[span.how]
    steps = span.start.steps
    reached = f"{steps[0]['step']:,} to {steps[-1]['step']:,}" if steps else "none"
    code = span.start.ended.get("exit_code")
    reason = span.start.ended.get("reason", "").partition("\n")[0]
    if span.how == "failed" and code is None:
        reason = "killed, without an exit code"
    elif span.how == "open":
        reason = f"running, or killed; last sign of life {_utc(span.end)}"
    if code not in (None, *ORDERLY):
        reason = f"exit code {code}: {reason}"
    said = reason if reason.startswith(text) else f"{text}: {reason}".removesuffix(": ")
    if len(said) > LONGEST_REASON:
        said = said[: LONGEST_REASON - 3] + "..."
    return (
        f'<tr class="run r{number}"><td><i></i>{escape(name)}'
        f'<td data-label="start">{span.start.number}<td>{_utc(span.begin)}'
        f'<td data-label="state from">{copies.state_from(span.start)}'
        f'<td data-label="lasted">{numbers.duration(span.end - span.begin)}'
        f'<td data-label="steps">{reached}<td data-label="redone">{redone:,}'
        f"<td class=words><b class={kind}>{mark}</b> {escape(said)}</tr>"
    )


def heads(runs: list[LoadedRun]) -> str:
    return "".join(f'<th class="run r{i}"><i></i>{escape(run.name)}' for i, run in enumerate(runs))


def goodput_section(runs: list[LoadedRun]) -> str:
    """Return a bar of shares per run, and the seconds by kind."""
    kinds = [kind for kind in KINDS if any(run.account.seconds[kind] > 0 for run in runs)]
    bars = "".join(_share_bar(number, run) for number, run in enumerate(runs))
    rows = ""
    for kind in kinds:
        cells = "".join(f'<td class="run r{i}">{_seconds(run, kind)}' for i, run in enumerate(runs))
        title, _, more = KINDS[kind].partition(":")
        rows += (
            f"<tr><th scope=row><i class=k-{kind}></i>{title.strip()}<small>{more}</small>{cells}"
        )
    return (
        f"<section><h2>Goodput</h2><figure class=panel>{bars}</figure>"
        f'<div class=wide><table class="facts kinds"><thead><tr><th>seconds{heads(runs)}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _share_bar(number: int, run: LoadedRun) -> str:
    counted = run.account.total - run.account.seconds["paused"]
    parts = "".join(
        f'<span class=k-{kind} style="width:{100 * seconds / counted:.2f}%" '
        f'title="{kind}: {numbers.duration(seconds)}"></span>'
        for kind, seconds in run.account.seconds.items()
        if kind != "paused" and seconds > 0 and counted > 0
    )
    return (
        f'<div class="run r{number}"><p class=lane-name><i></i>{escape(run.name)} '
        f"<small>{numbers.percent(run.account.goodput)} of {numbers.duration(counted)}</small></p>"
        f"<div class=shares>{parts}</div></div>"
    )


def _seconds(run: LoadedRun, kind: str) -> str:
    seconds = run.account.seconds[kind]
    counted = run.account.total - run.account.seconds["paused"]
    if kind == "paused" or not counted or not seconds:
        return numbers.duration(seconds) if seconds else "–"
    return f"{numbers.duration(seconds)} <small>{numbers.percent(seconds / counted)}</small>"
