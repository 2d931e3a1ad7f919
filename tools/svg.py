"""Draw a picture as SVG text: boxes, lines and words; and put pictures into a page of HTML. Equal calls
give equal bytes.

All pictures of reports, plans and documents are made here. It is ours because documents keep these
files, so they must not change with a library's version, and because a bar that names itself under
the pointer, in a page that loads nothing, is one line of text.
"""

import math
from collections.abc import Sequence
from html import escape

INK = "#1f2328"
FAINT = "#59636e"
RULE = "#d0d7de"
PAPER = "#ffffff"
SANS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
STYLE = (
    f"text{{font:13px {SANS};fill:{INK}}}"
    f".m{{font-family:{MONO}}}.s{{font-size:12px}}.f{{fill:{FAINT}}}.b{{font-weight:600}}"
    ".t{font-size:18px;font-weight:600}"
)
# The browser itself refuses to load anything from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
Points = Sequence[tuple[float, float]]


class Picture:
    """Picture whose lengths are in pixels, from the upper left corner. Classes of words: m
    monospaced, s small, f faint, b bold, t title."""

    def __init__(self, width: float, height: float, title: str = "", text: str = "") -> None:
        """title and text: for those who cannot see it. With a title it is a separate file, with
        fonts and an opaque background, so that it can be read on a light page and on a dark one;
        without, it is a part of a page and takes its style."""
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        self.head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        self.parts: list[str] = []
        if title:
            self.head += f"<title>{escape(title, quote=False)}</title>\n<desc>{escape(text, quote=False)}</desc>\n"
            self.head += f"<style>{STYLE}</style>\n"
            self.rect((0.5, 0.5, width - 1, height - 1), PAPER, RULE, radius=8)

    def rect(
        self,
        box: tuple[float, float, float, float],
        fill: str,
        stroke: str = "none",
        radius: float = 0,
        tip: str = "",
    ) -> None:
        """box: x, y, width and height; tip: shown when the pointer is on it."""
        x, y, width, height = box
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self.add("rect", f'{place} fill="{fill}" stroke="{stroke}"', tip)

    def add(self, element: str, attributes: str, tip: str = "") -> None:
        end = f"><title>{escape(tip, quote=False)}</title></{element}>" if tip else "/>"
        self.parts.append(f"<{element} {attributes}{end}")

    def circle(self, x: float, y: float, radius: float, fill: str, tip: str = "") -> None:
        self.add("circle", f'cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}"', tip)

    def area(self, points: Points, fill: str, tip: str = "") -> None:
        self.add("polygon", f'points="{corners(points)}" fill="{fill}"', tip)

    def curve(self, points: Points, stroke: str, width: float = 1, dashes: str = "none") -> None:
        style = f'fill="none" stroke="{stroke}" stroke-width="{width:g}"'
        self.add("polyline", f'points="{corners(points)}" {style} stroke-dasharray="{dashes}"')

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        stroke: str,
        width: float = 1,
        dashes: str = "",
    ) -> None:
        style = f'stroke="{stroke}" stroke-width="{width:g}"'
        style += f' stroke-dasharray="{dashes}"' if dashes else ""
        self.add("path", f'd="M{x:g} {y:g}L{to_x:g} {to_y:g}" {style}')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        style: str = "",
        anchor: str = "start",
        turn: float = 0,
    ) -> None:
        """turn: degrees clockwise around the anchor."""
        options = f' class="{style}"' if style else ""
        options += f' text-anchor="{anchor}"' if anchor != "start" else ""
        options += f' transform="rotate({turn:g} {x:g} {y:g})"' if turn else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{options}>{escape(words, quote=False)}</text>')

    def svg(self) -> str:
        return self.head + "\n".join(self.parts) + "\n</svg>\n"


def stretched(width: float, height: float, inside: str, attributes: str = "") -> str:
    """Return a picture that is stretched to the shape of its box in a page of HTML. inside: paths
    whose classes the page's style has; words stand in HTML around it, so that they keep their size."""
    box = f'viewBox="0 0 {width:g} {height:g}" preserveAspectRatio=none'
    return f"<svg {box}{attributes} aria-hidden=true>{inside}</svg>"


def path(css: str, d: str) -> str:
    """Return a path of a stretched picture. css: its class; d: its commands."""
    return f'<path class={css} d="{d}"/>'


def corners(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def page(title: str, style: str, body: str, attributes: str = "") -> str:
    """Return a page of HTML in one file, which loads nothing. attributes: of its body."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name=color-scheme content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body{attributes}>{body}</body></html>\n"
    )


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`: five or so."""
    rough = max(top, 1e-9) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    count = int(top / step * (1 + 1e-9)) + 1
    return [round(i * step, 9) for i in range(count)]


def legend(rows: list[tuple[str, str]], width: float, left: float) -> str:
    """Return a picture of boxes in their colors with their labels, in as many lines as they need."""
    places = []
    x = left
    y = 14
    for label, _ in rows:
        if x + 30 + 7 * len(label) > width:
            x = left
            y += 20
        places.append((x, y))
        x += 30 + 7 * len(label)
    picture = Picture(width, y + 10)
    for (label, color), (x, y) in zip(rows, places, strict=True):
        picture.rect((x, y - 10, 12, 12), color)
        picture.text(x + 17, y, label)
    return picture.svg()
