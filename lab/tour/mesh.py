"""Draws the mesh: which rows, which positions and which parts of some weights each rank has."""

from lab.tour.run import Seen
from lab.tour.shards import OwnedShard
from tools.svg import INK, PAPER, RULE, Picture

COLORS = ("#9ecae9", "#ffc37f", "#a8dba0", "#dcb3e0", "#f4a6a0", "#c5c9cf", "#f0dd85", "#9fdcd3")
WIDTH = 960
LEFT = 116
TOP = 104
CARD_WIDTH = 402
CARD_HEIGHT = 130
GAP = 16
CELL = 20
COLUMN = 184  # for a weight
TALL = 132  # a weight with more rows than columns
SQUARE = 96
NARROW = 64  # a vector


def draw(seen: list[Seen]) -> str:
    sizes = [f"{name} {size}" for name, (_, size) in seen[0].mesh.items()]
    title = f"What each of {len(seen)} ranks holds: {' x '.join(sizes)}"
    rows = 1 + max(row for row, _ in map(place, seen))
    weights_top = TOP + rows * (CARD_HEIGHT + GAP) + 28
    picture = Picture(WIDTH, weights_top + 276, title, "Rows, positions and shards of a real run.")
    picture.text(24, 36, title, "t")
    legend = (
        "A colour is a rank. It reads whole rows; between blocks it keeps the coloured positions."
    )
    picture.text(24, 59, legend)
    numbers = row_numbers(seen)
    for rank in seen:
        draw_rank(picture, rank, numbers)
    picture.text(24, weights_top, "Where the elements of a weight are stored", "b")
    for column in range(len(seen[0].shards)):
        shards = [rank.shards[column] for rank in seen]
        draw_weight(picture, 24 + column * COLUMN, weights_top + 28, shards, list(seen[0].mesh))
    return picture.svg()


def place(rank: Seen) -> tuple[int, int]:
    """Return the row and the column of the mesh in which the rank is drawn."""
    coordinates = [coordinate for coordinate, _ in rank.mesh.values()]
    row, column = [*coordinates, 0][:2]
    return row, column


def row_numbers(seen: list[Seen]) -> dict[str, int]:
    """Return the number of each row in the batch: the ranks' rows one after another are the batch."""
    rows = dict.fromkeys(row for rank in seen for row in rank.rows)
    return {row: number for number, row in enumerate(rows)}


def draw_rank(picture: Picture, rank: Seen, numbers: dict[str, int]) -> None:
    row, column = place(rank)
    x = LEFT + column * (CARD_WIDTH + GAP)
    y = TOP + row * (CARD_HEIGHT + GAP)
    names = list(rank.mesh)
    if column == 0:
        picture.text(24, y + CARD_HEIGHT / 2, f"{names[0]} {row}", "b")
    if row == 0 and len(names) > 1:
        picture.text(x + CARD_WIDTH / 2, y - 10, f"{names[1]} {column}", "b", "middle")
    picture.rect(x, y, CARD_WIDTH, CARD_HEIGHT, PAPER, RULE)
    picture.rect(x, y, CARD_WIDTH, 28, COLORS[rank.rank])
    picture.text(x + 10, y + 19, f"rank {rank.rank}", "b")
    holds = f"stores {rank.held:,} of {rank.total:,} parameters"
    picture.text(x + CARD_WIDTH - 10, y + 19, holds, "", "end")
    for line, text in enumerate(rank.rows):
        row_y = y + 42 + line * 28
        picture.text(x + 10, row_y + 15, f"row {numbers[text]}")
        draw_row(picture, x + 66, row_y, text, rank)
    kept = f"keeps positions {rank.positions.start} to {rank.positions.stop - 1} of each row"
    picture.text(x + 10, y + CARD_HEIGHT - 12, kept)


def draw_row(picture: Picture, x: float, y: float, text: str, rank: Seen) -> None:
    xs = [x + i * CELL for i in range(len(text))]
    kept = [xs[i] for i in rank.positions]
    others = [one for one in xs if one not in kept]
    picture.cells(others, y, CELL, PAPER)
    picture.cells(kept, y, CELL, COLORS[rank.rank])
    for one, letter in zip(xs, text.replace(" ", "\u00b7"), strict=True):
        picture.text(one + CELL / 2, y + 15, letter, "m", "middle")


def draw_weight(
    picture: Picture, x: float, y: float, shards: list[OwnedShard], dimensions: list[str]
) -> None:
    """shards: of one weight, by rank."""
    weight = shards[0]
    picture.text(x, y, weight.name.removesuffix(".weight"), "m s")
    rows, columns = [*weight.shape, 1][:2]
    height = TALL if rows > columns else SQUARE
    width = SQUARE if len(weight.shape) > 1 else NARROW
    for part, owners in owners_of(shards).items():
        top, left, bottom, right = part
        part_y = y + 14 + top * height / rows
        part_x = x + 30 + left * width / columns
        part_height = (bottom - top) * height / rows
        part_width = (right - left) * width / columns
        draw_part(picture, part_x, part_y, part_width, part_height, owners)
        if left == 0:
            picture.text(x + 24, part_y + 11, str(top), "s f", "end")
    stored = [end - first for first, end in zip(weight.first, weight.end, strict=True)]
    picture.text(x, y + TALL + 36, f"{weight.shape}", "b")
    picture.text(x, y + TALL + 54, f"a rank stores {stored}", "s")
    for line, (dimension, cut) in enumerate(zip(dimensions, weight.cuts, strict=True)):
        picture.text(x, y + TALL + 71 + 17 * line, f"{dimension}: {cut}", "s")


def owners_of(shards: list[OwnedShard]) -> dict[tuple[int, ...], list[int]]:
    """Return, for each part of a weight (first row, first column, and those behind the last), the
    ranks that store it."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        first = [*shard.first, 0][:2]  # a vector is a matrix of one column
        end = [*shard.end, 1][:2]
        owners.setdefault((*first, *end), []).append(rank)
    return owners


def draw_part(
    picture: Picture, x: float, y: float, width: float, height: float, owners: list[int]
) -> None:
    """Draw a part. One that several ranks store has the colours of all."""
    for i, rank in enumerate(owners):
        own_width = width / len(owners)
        picture.rect(x + i * own_width, y, own_width, height, COLORS[rank])
    picture.rect(x, y, width, height, "none", INK)
    names = " and ".join(map(str, owners))
    picture.text(x + width / 2, y + height / 2 + 4, names, "", "middle")
