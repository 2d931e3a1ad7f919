"""What a report shows of the copies in the memory of hosts (checkpoint/copies.py): where the state
of each start came from, and which copies there were."""

import statistics
from datetime import datetime
from html import escape

from checkpoint.copies import PLACES, place_of
from configs.words import number_of, plural
from reliability.goodput import Past
from tools.report import numbers
from tools.report.run import LoadedRun

MOST_ROWS = 200  # of the table, for each run
MOST_NAMED = 8  # hosts


def state_from(start: Past) -> str:
    """Return where a start had its state from."""
    if loaded := start.about.get("loaded"):
        return PLACES[place_of(loaded)]
    if start.about.get("origin"):
        return "other weights"
    if not start.steps or start.steps[0]["step"]:  # unknown: earlier versions did not record it
        return "–"
    return "new"


def is_made(line: dict) -> bool:
    return "bytes" in line


def made(run: LoadedRun) -> list[float]:
    """Return the times at which copies were made, in seconds since 1970."""
    return [line["time"] for line in run.copies if is_made(line)]


def fact(run: LoadedRun) -> str:
    failed = sum("failed" in line for line in run.copies)
    used = sum(line.get("source") == "memory" for line in run.copies)
    said = f"{len(made(run)):,} made, {failed:,} failed"
    return f"{said}; {number_of(used, 'start')} from them"


def table(runs: list[LoadedRun]) -> str:
    """Return a table of the copies of each start; "" if no run has any."""
    rows = ""
    for number, run in enumerate(runs):
        for start, lines in by_start(run)[-MOST_ROWS:]:
            rows += _row(number, run.name, start, lines)
    if not rows:
        return ""
    return (
        "<section><h2>Copies in the memory of hosts</h2><div class=wide><table class=starts><thead><tr>"
        "<th>run<th>start<th>copies<th>seconds, median<th>size<th>what the start found, and what "
        f"failed</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def by_start(run: LoadedRun) -> list[tuple[str, list[dict]]]:
    """Return the lines of each start that has any, oldest first, with its number: the last start
    that had begun at the time of its first line ("–" where that is not known)."""
    began = [
        (datetime.fromisoformat(start.about["began"]).timestamp(), start.number)
        for start in run.starts
        if "began" in start.about
    ]
    groups: list[list[dict]] = []
    for line in run.copies:
        if "source" in line or not groups:
            groups.append([])
        groups[-1].append(line)
    found = []
    for lines in groups:
        before = [number for time, number in began if time <= lines[0]["time"]]
        found.append((str(before[-1]) if before else "–", lines))
    return found


def _row(number: int, name: str, start: str, lines: list[dict]) -> str:
    copies = [line for line in lines if is_made(line)]
    median = size = "–"
    if copies:
        median = f"{statistics.median(line['seconds'] for line in copies):.2f}"
        size = megabytes(copies[-1]["bytes"])
    sentences = []
    for line in lines:
        if "source" in line:
            sentences += found(line)
        elif "failed" in line:
            sentences.append(f"step {line['step']:,} was not copied: {line['failed']}")
    words = "<br>".join(escape(sentence) for sentence in sentences)
    return (
        f'<tr class="run r{number}"><td><i></i>{escape(name)}'
        f'<td data-label="start">{start}<td data-label="copies">{len(copies):,}'
        f'<td data-label="seconds">{median}<td data-label="size">{size}'
        f"<td class=words>{words or '–'}</tr>"
    )


def found(line: dict) -> list[str]:
    """Say what a start found: its state's source, the copies of hosts, what was sent or unused."""
    said = "no copy and no checkpoint could be used: the run began anew"
    if line["source"] == "new":
        said = "a new run"
    elif line["source"] in PLACES:
        where = PLACES[line["source"]]
        said = f"went on from step {line['step']:,} ({where}), in {line['seconds']:.2f} s"
    sentences = [said]
    for name, counts in line["held"].items():
        sentences.append(f"{name}: {held(counts)}")
    if line.get("sent"):
        pairs = [f"{source} to {target}" for source, target, *_ in line["sent"]]
        more = f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
        size = megabytes(sum(row[-1] for row in line["sent"]))
        sentences.append(f"sent {size}: host {', '.join(pairs[:MOST_NAMED])}{more}")
    return sentences + [f"not used: {sentence}" for sentence in line["unused"]]


def held(counts: list[int]) -> str:
    """Say on which hosts a copy was. counts: of its files, by host."""
    without = [host for host, count in enumerate(counts) if not count]
    said = f"files on {len(counts) - len(without):,} of {number_of(len(counts), 'host')}"
    if without:
        named = ", ".join(map(str, without[:MOST_NAMED]))
        said += f", none on {plural(len(without), 'host')} {named}"
        said += ", ..." if len(without) > MOST_NAMED else ""
    return said


def megabytes(count: float) -> str:
    return f"{numbers.short(count / 1e6)} MB"
