"""Draw pieces of an SVG, as text: boxes, labels, an axis, a legend.

A drawing is WIDTH units wide, and the page scales it. Labels are escaped.
"""

import math
from html import escape

WIDTH = 1100
LEFT = 90  # of it for the labels of an axis or of rows


def image(height: float, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{height:.0f}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, label: str, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'class="{kind}">{escape(label)}</text>'
    )


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    label: str = "",
    stroke: str = "none",
) -> str:
    title = f"<title>{escape(label)}</title>" if label else ""
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}"'
    return f'<rect {box} fill="{color}" stroke="{stroke}">{title}</rect>'


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`: five or so."""
    rough = max(top, 1e-9) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    count = int(top / step * (1 + 1e-9)) + 1
    return [round(i * step, 9) for i in range(count)]


def key(rows: list[tuple[str, str]]) -> str:
    parts = []
    x = LEFT
    y = 14
    for label, color in rows:
        width = 30 + 7 * len(label)
        if x + width > WIDTH:
            x = LEFT
            y += 20
        parts += [rect(x, y - 10, 12, 12, color), text(x + 17, y, label)]
        x += width
    return image(y + 10, parts)
