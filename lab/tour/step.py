"""Draws the time line of a step on each rank: its phases, and its collectives by kind and group."""

from collections.abc import Iterable

from lab.tour.run import Seen
from lab.tour.watch import PhaseSpan, SeenCollective
from tools.svg import INK, Picture

COLORS = ("#8fd0c8", "#f4d06f", "#cdb8e6", "#f2b6a8")  # of the groups
LETTERS = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR"}
PHASE = "#eaeef2"
COMPUTE = "#b6c0cb"
LEFT = 82
TOP = 62
COLUMN = 30  # width of a collective
LANE = 36  # height of a rank
BOX = 25
LEGEND = 308  # its width
LABELS = 152  # room for the names of modules below the lanes
NARROWEST = 3  # columns of a phase without collectives


def draw(seen: list[Seen]) -> str:
    """Draw the step. All ranks must have called the same collectives in the same order."""
    stretches = [[part for part in rank.stretches if is_drawn(part)] for rank in seen]
    if len({order_of(parts) for parts in stretches}) > 1:
        raise ValueError("the ranks did not call the same collectives")
    phases = [part.phase for part in stretches[0]]
    half = phases.index("backward")
    first = [parts[:half] for parts in stretches]
    second = [parts[half:] for parts in stretches]
    legend_x = LEFT + columns_of(first[0]) * COLUMN + 60
    width = max(legend_x + LEGEND, LEFT + columns_of(second[0]) * COLUMN + 38)
    band = len(seen) * LANE + LABELS + 50
    title = "One step on each rank, from left to right"
    words = "The collectives of a real step, in their order."
    picture = Picture(width, TOP + 2 * band, title, words)
    picture.text(24, 36, title, "t")
    colors = colors_of(stretches[0])
    draw_band(picture, TOP, first, colors)
    draw_legend(picture, legend_x, TOP + 44, colors)
    draw_band(picture, TOP + band, second, colors)
    return picture.svg()


def is_drawn(part: PhaseSpan) -> bool:
    """Forward comes back for a moment after the loss, which is inside it."""
    return bool(part.collectives) or part.phase in ("clip", "optimizer", "loss")


def order_of(parts: Iterable[PhaseSpan]) -> tuple:
    """Return the part of a call that must be the same on all ranks."""
    return tuple(
        (part.phase, one.kind, one.dimension) for part in parts for one in part.collectives
    )


def columns_of(parts: Iterable[PhaseSpan]) -> int:
    return sum(map(columns_in, parts))


def columns_in(part: PhaseSpan) -> int:
    return max(len(part.collectives), NARROWEST if part.phase else 1)


def colors_of(parts: Iterable[PhaseSpan]) -> dict[str, str]:
    """Dimension of the mesh -> the colour of its groups; that of all ranks comes last."""
    dimensions = {one.dimension for part in parts for one in part.collectives}
    in_order = sorted(dimensions - {"all"}) + sorted(dimensions & {"all"})
    return dict(zip(in_order, COLORS, strict=False))


def draw_legend(picture: Picture, x: float, y: float, colors: dict[str, str]) -> None:
    for dimension, color in colors.items():
        picture.rect(x, y - 13, BOX, 18, color, INK, radius=4)
        words = "all ranks" if dimension == "all" else f"within a group of {dimension}"
        picture.text(x + 36, y, words)
        y += 26
    for kind, letters in LETTERS.items():
        picture.text(x + BOX / 2, y, letters, "b", "middle")
        picture.text(x + 36, y, kind)
        y += 22
    picture.rect(x, y - 9, BOX, 10, COMPUTE)
    picture.text(x + 36, y, "computes (widths mean nothing)")
    picture.text(x, y + 26, "One box, or boxes and a line: one group.")


def draw_band(
    picture: Picture, y: float, stretches: list[list[PhaseSpan]], colors: dict[str, str]
) -> None:
    """Draw a part of the step. stretches: by rank."""
    lanes = y + 30
    columns = columns_of(stretches[0])
    for rank in range(len(stretches)):
        middle = middle_of(lanes, rank)
        picture.text(24, middle + 5, f"rank {rank}", "b")
        picture.rect(LEFT, middle - 5, columns * COLUMN, 10, COMPUTE)
    x = LEFT
    for number, part in enumerate(stretches[0]):
        draw_phase(picture, x, y, part)
        for i in range(len(part.collectives)):
            by_rank = [parts[number].collectives[i] for parts in stretches]
            draw_collective(picture, x + i * COLUMN, lanes, by_rank, colors)
        x += columns_in(part) * COLUMN


def draw_phase(picture: Picture, x: float, y: float, part: PhaseSpan) -> None:
    if part.phase:
        width = columns_in(part) * COLUMN
        picture.rect(x + 1, y, width - 2, 22, PHASE, radius=3)
        picture.text(x + width / 2, y + 16, part.phase, "b", "middle")


def draw_collective(
    picture: Picture,
    x: float,
    lanes: float,
    by_rank: list[SeenCollective],
    colors: dict[str, str],
) -> None:
    """by_rank: the same collective, as each rank called it."""
    groups = list(dict.fromkeys(one.ranks for one in by_rank))
    for number, ranks in enumerate(groups):
        side = x + COLUMN * (number + 1) / (len(groups) + 1)
        top = middle_of(lanes, ranks[0])
        bottom = middle_of(lanes, ranks[-1])
        picture.line(side, top, side, bottom, INK, 1.5)
    color = colors[by_rank[0].dimension]
    letters = LETTERS[by_rank[0].kind]
    for ranks in groups:
        for top, bottom in boxes_of(lanes, ranks):
            left = x + (COLUMN - BOX) / 2
            picture.rect(left, top, BOX, bottom - top, color, INK, radius=4)
            picture.text(x + COLUMN / 2, (top + bottom) / 2 + 5, letters, "b", "middle")
    label_x = x + COLUMN / 2 + 4
    label_y = lanes + len(by_rank) * LANE + 14
    picture.text(label_x, label_y, by_rank[0].module, "s", "end", turn=-60)


def boxes_of(lanes: float, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return upper and lower ends: one box over adjacent ranks, otherwise a box for each."""
    together = ranks[-1] - ranks[0] == len(ranks) - 1
    firsts = ranks[:1] if together else ranks
    lasts = ranks[-1:] if together else ranks
    tops = [middle_of(lanes, rank) - BOX / 2 for rank in firsts]
    bottoms = [middle_of(lanes, rank) + BOX / 2 for rank in lasts]
    return list(zip(tops, bottoms, strict=True))


def middle_of(lanes: float, rank: int) -> float:
    return lanes + (rank + 0.5) * LANE
