"""Say a number of things in a message, and set a table in columns."""

from collections.abc import Collection, Sequence


def plural(number: int, thing: str, many: str = "") -> str:
    """Return the noun that goes with a number. many: the plural of one that does not take an s."""
    return thing if number == 1 else many or f"{thing}s"


def number_of(number: int, thing: str, many: str = "") -> str:
    """Return a number and its noun: 1 file, 2,000 files."""
    return f"{number:,} {plural(number, thing, many)}"


def a_kind(value: object) -> str:
    """Return the type of a value with its article: a list, an int."""
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a table's lines, with its columns two spaces apart. right: columns of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
