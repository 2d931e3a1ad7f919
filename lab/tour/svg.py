"""Draw a picture as SVG text: rectangles, lines and words on an opaque background, so that it can
be read on a light page and on a dark one. Equal calls give equal bytes."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

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


class Picture:
    """Lengths are in pixels, from the upper left corner. Classes of words: m monospaced, s small, f
    faint, b bold, t title."""

    def __init__(self, width: int, height: int, title: str, text: str) -> None:
        """title and text: for those who cannot see it."""
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n'
            f"<title>{escape(title)}</title>\n<desc>{escape(text)}</desc>\n"
            f"<style>{STYLE}</style>\n"
        )
        self.parts: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, PAPER, RULE, radius=8)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = "none",
        radius: float = 0,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def cells(self, xs: Sequence[float], y: float, size: float, fill: str) -> None:
        """Draw a row of squares."""
        square = f"h{size:g}v{size:g}h{-size:g}z"
        squares = "".join(f"M{x:g} {y:g}{square}" for x in xs)
        self.parts.append(f'<path d="{squares}" fill="{fill}" stroke="{RULE}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str, width: float) -> None:
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def band(
        self, left: float, right: float, left_y: float, right_y: float, height: float, fill: str
    ) -> None:
        """Draw a ribbon of this height from one side to the other."""
        middle = (left + right) / 2
        upper = f"M{left:g} {left_y:g}C{middle:g} {left_y:g} {middle:g} {right_y:g} "
        upper += f"{right:g} {right_y:g}"
        back_y = right_y + height
        end_y = left_y + height
        lower = f"v{height:g}C{middle:g} {back_y:g} {middle:g} {end_y:g} {left:g} {end_y:g}z"
        self.parts.append(f'<path d="{upper}{lower}" fill="{fill}" fill-opacity=".55"/>')

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
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{options}>{escape(words)}</text>')

    def svg(self) -> str:
        return self.head + "\n".join(self.parts) + "\n</svg>\n"
