"""Planned over published speeds as a picture: one point a run, both axes logarithmic."""

import math
from itertools import cycle
from typing import NamedTuple

from tools.svg import Picture

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

    def at(published: float, planned: float) -> tuple[float, float]:
        return EDGE + along(published), SIZE - EDGE - along(planned)

    picture = Picture(SIZE, SIZE, "Planned over published tokens/s", "One point a run.")
    ends = 10.0**low, 10.0**high
    lower = [at(speed, speed * (1 - BAND)) for speed in ends]
    upper = [at(speed, speed * (1 + BAND)) for speed in reversed(ends)]
    picture.area(lower + upper, "#eee")
    picture.curve([at(speed, speed) for speed in ends], "#999")
    for power in range(low, high + 1):
        x, y = at(10.0**power, 10.0**power)
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        picture.text(x, SIZE - EDGE + 18, label, "s", "middle")
        picture.text(EDGE - 6, y + 4, label, "s", "end")
    picture.text(SIZE // 2, SIZE - 12, "published tokens/s per GPU", "s", "middle")
    picture.text(12, 20, "planned; the band is 20% wide each way", "s")
    colors = dict(zip(kinds, cycle(COLORS)))
    for point in points:
        title = f"{point.name}: {point.planned / point.published - 1:+.0%}"
        picture.circle(*at(point.published, point.planned), 4, colors[point.kind] + "b3", title)
    for i, (kind, color) in enumerate(colors.items()):
        picture.circle(EDGE + 12, 40 + 18 * i, 4, color)
        picture.text(EDGE + 22, 44 + 18 * i, kind, "s")
    return picture.svg()
