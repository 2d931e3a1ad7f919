"""Set the text of a plan as HTML: paragraphs, tables and lists for what the console shows with
spaces."""

import re
from collections.abc import Iterator
from html import escape

GAP = re.compile(r" {2,}")  # between two columns of the text


def typeset(report: str) -> str:
    """Return the HTML of a text whose blocks are a line and the indented lines below it."""
    return "".join(set_block(block) for block in blocks(report))


def blocks(report: str) -> Iterator[list[str]]:
    block: list[str] = []
    for line in filter(None, report.splitlines()):
        if block and not line.startswith(" "):
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def set_block(lines: list[str]) -> str:
    """Set a line with a label as a paragraph, a line with columns as a table's head, and a line with
    others below as the heading of a list."""
    head, *rows = (GAP.split(line.strip()) for line in lines)
    table = [row for row in rows if len(row) > 1]
    notes = [escape(row[0]) for row in rows if len(row) == 1]
    if table:
        return set_table(head, table) + paragraphs(notes)
    if notes and len(head) == 1:
        return f"<h3>{escape(head[0])}</h3><ul>{''.join(f'<li>{note}</li>' for note in notes)}</ul>"
    first, *words = map(escape, head)
    sentence = f"<b>{first}</b> {' '.join(words)}" if words else first
    return paragraphs([sentence, *notes])


def set_table(head: list[str], rows: list[list[str]]) -> str:
    width = max(map(len, [head, *rows]))
    lines = [set_row("th", head, width)]
    lines += [set_row("td", row, width) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def set_row(tag: str, cells: list[str], width: int) -> str:
    padded = cells + [""] * (width - len(cells))
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in padded) + "</tr>"


def paragraphs(sentences: list[str]) -> str:
    return "".join(f"<p>{sentence}</p>" for sentence in sentences)
