"""Draws how the tokens of one mixture of experts are routed: router, dispatch, grouped GEMM and
combine."""

from lab.tour.run import Seen
from tools.svg import INK, PAPER, RULE, Picture

COLORS = ("#6fa8d6", "#a9d3f2", "#e8903f", "#f7c888", "#7cc474", "#bfe5b8", "#c58fcb", "#e5c8ea")
AREA_COLOR = "#f6f8fa"
WIDTH = 960
TOP = 132
AREA = 244  # height of a rank
GAP = 14  # between two ranks
ROW = 9  # height of a row
TOKEN = 27  # from one token to the next
CHIP = 22  # a token
STACK = 22  # width of a stack of rows
EXPERT = 146  # width of an expert
# From left to right: the tokens, their rows, the experts, the rows again, the tokens again.
TOKENS_X = 92
ROWS_X = 246
EXPERTS_X = 418
BACK_X = 708
SUMS_X = 866

Ends = dict[tuple[int, int], float]  # (rank, expert) -> where that rank's rows for it begin


def draw(seen: list[Seen]) -> str:
    local = len(seen[0].routes.gemms[0])
    counts = [counts_of(rank, local * len(seen)) for rank in seen]
    title = f"A layer of {local * len(seen)} experts on {len(seen)} ranks: where its tokens go"
    height = TOP + len(seen) * (AREA + GAP) + 74
    picture = Picture(WIDTH, height, title, "The routes of a real forward.")
    picture.text(24, 36, title, "t")
    legend = "A colour is an expert. A row is one token on its way to one of its experts, and back."
    picture.text(24, 60, legend)
    for rank in seen:
        draw_area(picture, rank.rank)
    draw_headings(picture, seen[0])
    leave = ends_of_stacks(counts)
    arrive = ends_of_experts(counts, local)
    for rank in seen:
        draw_bands(picture, rank.rank, counts[rank.rank], leave, arrive)
    for rank in seen:
        draw_tokens(picture, rank, leave)
        draw_experts(picture, rank, arrive)
    draw_splits(picture, height - 62, seen)
    return picture.svg()


def counts_of(rank: Seen, experts: int) -> list[int]:
    """Return the rows of this rank for each expert, by the choices of its router."""
    chosen = [expert for token in rank.routes.chosen for expert in token]
    return [chosen.count(expert) for expert in range(experts)]


def top_of(rank: int) -> float:
    return TOP + rank * (AREA + GAP)


def ends_of_stacks(counts: list[list[int]]) -> Ends:
    """Return the ends of the stacks of rows, which are sorted by expert on the rank of their
    tokens."""
    ends = {}
    for rank, of_rank in enumerate(counts):
        y = top_of(rank) + (AREA - sum(of_rank) * ROW) / 2
        for expert, count in enumerate(of_rank):
            ends[rank, expert] = y
            y += count * ROW
    return ends


def ends_of_experts(counts: list[list[int]], local: int) -> Ends:
    """Return the ends of the rows of experts, which are sorted by source rank on the rank of an
    expert."""
    ends = {}
    for owner in range(len(counts)):
        experts = range(owner * local, (owner + 1) * local)
        rows = sum(of_rank[expert] for of_rank in counts for expert in experts)
        y = top_of(owner) + (AREA - rows * ROW - GAP * (local - 1)) / 2
        for expert in experts:
            for rank, of_rank in enumerate(counts):
                ends[rank, expert] = y
                y += of_rank[expert] * ROW
            y += GAP
    return ends


def draw_area(picture: Picture, rank: int) -> None:
    picture.rect(16, top_of(rank), WIDTH - 32, AREA, AREA_COLOR, RULE, radius=6)
    picture.text(28, top_of(rank) + 24, f"rank {rank}", "b")


def draw_headings(picture: Picture, rank: Seen) -> None:
    per_token = len(rank.routes.chosen[0])
    headings = (
        (TOKENS_X + CHIP, "tokens; the router", f"chooses {per_token} experts each"),
        (ROWS_X + STACK / 2, "rows", "by expert"),
        ((ROWS_X + STACK + EXPERTS_X) / 2, "dispatch:", "all-to-all"),
        (EXPERTS_X + EXPERT / 2, "grouped GEMM,", "each expert its rows"),
        ((EXPERTS_X + EXPERT + BACK_X) / 2, "combine:", "all-to-all"),
        (BACK_X + STACK / 2, "rows", "by expert"),
        (SUMS_X + CHIP / 2, "weighted", "sum per token"),
    )
    for x, first, second in headings:
        picture.text(x, 98, first, "b", "middle")
        picture.text(x, 116, second, "b", "middle")


def draw_bands(picture: Picture, rank: int, counts: list[int], leave: Ends, arrive: Ends) -> None:
    for expert, count in enumerate(counts):
        height = count * ROW
        color = COLORS[expert]
        own = leave[rank, expert]
        other = arrive[rank, expert]
        picture.band(ROWS_X + STACK, EXPERTS_X, own, other, height, color)
        picture.band(EXPERTS_X + EXPERT, BACK_X, other, own, height, color)
        for i in range(count):
            picture.rect(ROWS_X, own + i * ROW, STACK, ROW, color, INK)
            picture.rect(BACK_X, own + i * ROW, STACK, ROW, color, INK)


def draw_tokens(picture: Picture, rank: Seen, leave: Ends) -> None:
    letters = "".join(rank.rows).replace(" ", "\u00b7")
    first = top_of(rank.rank) + (AREA - (len(letters) - 1) * TOKEN) / 2
    drawn = dict.fromkeys((expert for _, expert in leave), 0)  # rows of each expert
    for number, experts in enumerate(rank.routes.chosen):
        y = first + number * TOKEN
        draw_token(picture, TOKENS_X, y, letters[number])
        draw_token(picture, SUMS_X, y, letters[number])
        for i, expert in enumerate(experts):
            row_y = leave[rank.rank, expert] + (drawn[expert] + 0.5) * ROW
            drawn[expert] += 1
            draw_choice(picture, TOKENS_X + CHIP + 6 + 20 * i, y, expert)
            picture.line(TOKENS_X + CHIP + 48, y, ROWS_X, row_y, COLORS[expert], 2)
            picture.line(BACK_X + STACK, row_y, SUMS_X, y, COLORS[expert], 2)


def draw_token(picture: Picture, x: float, y: float, letter: str) -> None:
    picture.rect(x, y - CHIP / 2, CHIP, CHIP, PAPER, INK, radius=3)
    picture.text(x + CHIP / 2, y + 5, letter, "m", "middle")


def draw_choice(picture: Picture, x: float, y: float, expert: int) -> None:
    picture.rect(x, y - 8, 17, 17, COLORS[expert], INK, radius=3)
    picture.text(x + 8.5, y + 5, f"{expert}", "s", "middle")


def draw_experts(picture: Picture, rank: Seen, arrive: Ends) -> None:
    rows = rank.routes.gemms[0]
    for i, count in enumerate(rows):
        expert = rank.rank * len(rows) + i
        y = arrive[0, expert]
        picture.rect(EXPERTS_X, y, EXPERT, count * ROW, COLORS[expert], INK)
        words = f"expert {expert}: {count} rows"
        picture.text(EXPERTS_X + EXPERT / 2, y + count * ROW / 2 + 5, words, "b", "middle")


def draw_splits(picture: Picture, y: float, seen: list[Seen]) -> None:
    """Draw the sizes that were given to the all-to-alls; the first one carries only the counts."""
    dispatch = [rank.routes.all_to_alls[1] for rank in seen]
    combine = [rank.routes.all_to_alls[2] for rank in seen]
    draw_sent(picture, y + 14, "dispatch, rows sent:", dispatch)
    draw_sent(picture, y + 38, "combine, rows sent:", combine)


def draw_sent(picture: Picture, y: float, name: str, sent: list[list[int]]) -> None:
    """sent: rows by sender and receiver."""
    picture.text(28, y, name, "b")
    x = 190
    for rank, counts in enumerate(sent):
        for other, count in enumerate(counts):
            picture.text(x, y, f"rank {rank} to rank {other}: {count}")
            x += 180
