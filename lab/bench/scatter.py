"""Planned over published speeds as a picture: one point a run, both axes logarithmic."""

import math
from html import escape
from typing import NamedTuple

SIZE = 560  # of the picture, in pixels, each way
EDGE = 56  # of it, for the numbers of the axes
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2")
BAND = 0.2  # error that the grey band has at its edges


class Point(NamedTuple):
    name: str
    kind: str
    published: float
    planned: float


def scatter(points: list[Point], kinds: tuple[str, ...]) -> str:
    """Draw the picture as SVG. kinds: of points, each with its own color."""
    speeds = [speed for point in points for speed in (point.published, point.planned)]
    low = math.floor(math.log10(min(speeds)))
    high = math.ceil(math.log10(max(speeds)))
    length = SIZE - 2 * EDGE

    def along(speed: float) -> float:
        """Pixels from the origin of an axis."""
        return length * (math.log10(speed) - low) / max(1, high - low)

    def at(published: float, planned: float) -> str:
        return f"{EDGE + along(published):.1f},{SIZE - EDGE - along(planned):.1f}"

    first = 10.0**low
    last = 10.0**high
    corners = [
        at(first, first * (1 - BAND)),
        at(last, last * (1 - BAND)),
        at(last, last * (1 + BAND)),
        at(first, first * (1 + BAND)),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE}" height="{SIZE}" fill="white"/>',
        f'<polygon points="{" ".join(corners)}" fill="#eee"/>',
        f'<polyline points="{at(first, first)} {at(last, last)}" stroke="#999"/>',
    ]
    for power in range(low, high + 1):
        place = along(10.0**power)
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        across = EDGE + place
        up = SIZE - EDGE - place
        lines.append(
            f'<text x="{across:.1f}" y="{SIZE - EDGE + 18}" text-anchor="middle">{label}</text>'
        )
        lines.append(f'<text x="{EDGE - 6}" y="{up + 4:.1f}" text-anchor="end">{label}</text>')
    lines.append(
        f'<text x="{SIZE // 2}" y="{SIZE - 12}" text-anchor="middle">published tokens/s per GPU</text>'
    )
    lines.append('<text x="12" y="20">planned; the band is 20% wide each way</text>')
    for point in points:
        x, y = at(point.published, point.planned).split(",")
        color = COLORS[kinds.index(point.kind) % len(COLORS)]
        title = f"{point.name}: {point.planned / point.published - 1:+.0%}"
        lines.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{color}" fill-opacity="0.7">'
            f"<title>{escape(title)}</title></circle>"
        )
    for i, kind in enumerate(kinds):
        y = 44 + 18 * i
        lines.append(
            f'<circle cx="{EDGE + 12}" cy="{y - 4}" r="4" fill="{COLORS[i % len(COLORS)]}"/>'
        )
        lines.append(f'<text x="{EDGE + 22}" y="{y}">{escape(kind)}</text>')
    return "\n".join([*lines, "</svg>", ""])
