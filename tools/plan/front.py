"""The Pareto front of a search: the plans that no other one beats in both tokens/s and memory."""

from collections.abc import Iterable
from html import escape

from tools.plan.choices import GATHER_AGAIN, Candidate, Choice
from tools.plan.step import GIB
from tools.plan.svg import LEFT, WIDTH, image, rect, text, ticks

HEIGHT = 330
BOTTOM = 280


def front(rows: Iterable[Candidate]) -> list[Candidate]:
    """Return the Pareto front: rows for which no other is as fast or faster with as much memory or
    less, the one with least memory first. Of equal rows only one is kept."""
    found: list[Candidate] = []
    for row in sorted(rows, key=by_memory_then_speed):
        if not found or row.tokens_per_second > found[-1].tokens_per_second:
            found.append(row)
    return found


def by_memory_then_speed(row: Candidate) -> tuple:
    return row.needed, -row.tokens_per_second, row.choice


def is_beaten(most_tokens: float, least_bytes: float, rows: list[Candidate]) -> bool:
    """Return True if some row is as good as a plan of at most so many tokens/s and at least so many
    bytes."""
    return any(row.tokens_per_second >= most_tokens and row.needed <= least_bytes for row in rows)


def options_of(choice: Choice) -> str:
    """Format the choice as options of the command line."""
    given = {
        "parallelism.tensor_parallel": choice.tensor_parallel,
        "parallelism.data_parallel_replicate": choice.replicas,
        "parallelism.data_parallel_shard": -1,
        "parallelism.context_parallel": choice.context_parallel,
        "parallelism.context_parallel_method": choice.method,
        "parallelism.expert_parallel": choice.expert_parallel,
        "parallelism.pipeline_parallel": choice.pipeline_parallel,
        "parallelism.pipeline_schedule": choice.schedule,
        "parallelism.pipeline_stages_per_rank": choice.stages_per_rank,
        "parallelism.pipeline_layers": "[]",
        "parallelism.accumulate_gradients": choice.accumulate,
        "activation_checkpoint.mode": choice.checkpointing,
        "activation_checkpoint.gather_again": str(choice.mode == GATHER_AGAIN).lower(),
        "training.local_batch_size": choice.local_batch_size,
    }
    return " ".join(f"--{name}={value}" for name, value in given.items())


def plot(rows: list[Candidate], best: list[Candidate]) -> str:
    """Draw tokens/s over memory: the front numbered, all others light."""
    right = 1.08 * max(row.needed for row in rows) / GIB
    top = 1.12 * max(row.tokens_per_second for row in rows)

    def x(row: Candidate) -> float:
        return LEFT + (WIDTH - LEFT - 20) * row.needed / GIB / right

    def y(row: Candidate) -> float:
        return BOTTOM - (BOTTOM - 10) * row.tokens_per_second / top

    parts = []
    for value in ticks(top):
        at = BOTTOM - (BOTTOM - 10) * value / top
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#0002"/>')
        parts.append(text(LEFT - 8, at + 4, f"{value:,.10g}", "end", "dim"))
    for value in ticks(right):
        at = LEFT + (WIDTH - LEFT - 20) * value / right
        parts.append(text(at, BOTTOM + 18, f"{value:g} GiB", "middle", "dim"))
    parts.append(text(WIDTH - 20, BOTTOM + 38, "memory of a GPU", "end"))
    parts.append(text(LEFT + 6, 14, "tokens/s"))
    for row in rows:
        if row not in best:
            parts.append(rect(x(row) - 3, y(row) - 3, 6, 6, "#cfcfcf", f"beaten: {row.choice}"))
    steps = [f"{x(row):.1f},{y(row):.1f}" for row in best]
    parts.append(f'<polyline points="{" ".join(steps)}" fill="none" stroke="#2a9d8f"/>')
    last_x = last_y = -100.0
    for number, row in enumerate(best, 1):
        parts.append(rect(x(row) - 4, y(row) - 4, 8, 8, "#264653", f"{number}: {row.choice}"))
        apart = x(row) - last_x > 16 or last_y - y(row) > 14
        if apart:  # those between have their number in the table
            parts.append(text(x(row) - 4, y(row) - 9, str(number), "end"))
            last_x = x(row)
            last_y = y(row)
    return image(HEIGHT, parts)


def section(rows: list[Candidate], gpus: int, said: str) -> str:
    """Format the front as HTML: a drawing and a table with options that can be copied. rows:
    choices that were traced and fit. said: what the front covers."""
    best = front(rows)
    lines = []
    for number, row in enumerate(best, 1):
        cells = (
            str(number),
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / gpus:,.0f}",
            f"{row.needed / GIB:.1f}",
        )
        cells = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr>{cells}<td><code>{escape(options_of(row.choice))}</code></td></tr>")
    titles = ("plan", "tokens/s", "per GPU", "GiB of a GPU", "options")
    heads = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f"<h2>Speed against memory</h2><figure>{plot(rows, best)}<figcaption>Dark: no other plan "
        f"is faster with as much memory or less. Light: beaten. {escape(said)}</figcaption></figure>"
        f"<table><tr>{heads}</tr>{''.join(lines)}</table>"
    )
