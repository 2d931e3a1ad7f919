"""The time line of a pipeline. Of many microbatches it shows the beginning, one period of the
steady state and the end, on one scale.

What is drawn is drawn at the times of the plan. What is left out is counted, not guessed: the steady
state need not repeat to the microsecond, and `period` says whether it does.
"""

from collections.abc import Iterator
from typing import NamedTuple

from configs.words import plural
from parallelisms.schedules import FORWARD, Action, Timeline
from tools.plan.plan import Plan
from tools.plan.report import time_text
from tools.plan.svg import LEFT, WIDTH, image, key, rect, text, ticks

COLORS_OF_ACTIONS = {  # by kind (parallelisms/schedules.py)
    "forward": "#2a9d8f",
    "backward": "#e76f51",
    "backward_input": "#f4a261",
    "backward_weight": "#e9c46a",
}
ROW = 22  # units of the drawing for a rank
NARROWEST = 6  # units of the drawing that a bar should have, on average
GAP = 44  # units of the drawing between two windows
APART = 60  # units between the labels of the axis
MOST_SHOWN = 0.5  # of the step: breaks that leave out less are not worth it
SAME = 1e-3  # of a period: by how much times may differ that count as equal


class Window(NamedTuple):
    """Part of the step that is drawn."""

    name: str
    begin: float  # seconds
    end: float


class Bar(NamedTuple):
    """Action as drawn: it may begin before its window, or end after it."""

    action: Action
    begin: float  # seconds
    end: float
    x: float
    width: float


def period(played: Timeline, microbatches: int) -> tuple[int, bool, float, float]:
    """Return the fewest microbatches after which the middle of the step repeats, rank by rank and
    action by action; whether it does so in time too; begin and end, in seconds. If it does not, as
    many microbatches as there are ranks."""
    times = {}
    for actions in played:
        for action, begin, end in actions:
            times[action] = begin, end
    middle = microbatches // 2
    begin, _ = times[Action(FORWARD, 0, middle)]
    for count in range(1, microbatches // 4):
        end, _ = times[Action(FORWARD, 0, middle + count)]
        if repeats(times, count, begin, end):
            return count, True, begin, end
    count = min(len(played), microbatches // 4)
    end, _ = times[Action(FORWARD, 0, middle + count)]
    return count, False, begin, end


def repeats(times: dict[Action, tuple[float, float]], count: int, begin: float, end: float) -> bool:
    """Return True if all that happens from `begin` to `end` happens again `end - begin` seconds
    later with microbatches `count` higher."""
    length = end - begin
    for action, (start, stop) in times.items():
        if stop <= begin or start >= end:
            continue
        later = times.get(action._replace(microbatch=action.microbatch + count))
        if later is None:
            return False
        if max(abs(later[0] - start - length), abs(later[1] - stop - length)) > SAME * length:
            return False
    return True


def windows(played: Timeline, microbatches: int) -> list[Window]:
    """Return the windows of the step to draw: all of it where that is readable. Else the beginning,
    until every stage has done everything once; a period in the middle; and the end, from the first
    forward of the last microbatch."""
    entries = [entry for actions in played for entry in actions]
    finish = max(end for _, _, end in entries)
    whole = [Window("", 0.0, finish)]
    longest = max(len(actions) for actions in played)
    if longest * NARROWEST <= WIDTH - LEFT or microbatches < 8:
        return whole
    filled = max(end for action, _, end in entries if action.microbatch == 0)
    drained = min(begin for action, begin, _ in entries if action.microbatch == microbatches - 1)
    count, exact, begin, end = period(played, microbatches)
    seconds = filled + end - begin + finish - drained
    if not filled < begin < end < drained or seconds > MOST_SHOWN * finish:
        return whole
    name = "one period" if exact else "the middle, which does not repeat exactly"
    several = f"{count} microbatch{'es' * (count > 1)}"
    return [
        Window("the beginning", 0.0, filled),
        Window(f"{name}: {several} in {time_text(end - begin)}", begin, end),
        Window("the end", drained, finish),
    ]


def inside(actions: list[tuple[Action, float, float]], window: Window) -> Iterator[tuple]:
    """Return the entries of a rank that the window shows, at least in part."""
    for entry in actions:
        _, begin, end = entry
        if begin < window.end and end > window.begin:
            yield entry


class Sheet:
    """Windows next to each other on one scale."""

    def __init__(self, played: Timeline, microbatches: int) -> None:
        self.played = played
        self.microbatches = microbatches
        self.windows = windows(played, microbatches)
        gaps = GAP * (len(self.windows) - 1)
        seconds = sum(window.end - window.begin for window in self.windows)
        self.scale = (WIDTH - LEFT - 10 - gaps) / seconds
        self.unit, self.per = ("s", 1.0) if self.windows[-1].end > 2 else ("ms", 1e3)
        self.lefts = []
        x = float(LEFT)
        for window in self.windows:
            self.lefts.append(x)
            x += (window.end - window.begin) * self.scale + GAP
        self.top = 6 if len(self.windows) == 1 else 44
        self.bottom = self.top + ROW * len(played)

    def right(self, number: int) -> float:
        window = self.windows[number]
        return self.lefts[number] + (window.end - window.begin) * self.scale

    def bars(self, rank: int) -> Iterator[Bar]:
        """Return the bars of a rank, window after window. A bar ends where its window does."""
        for left, window in zip(self.lefts, self.windows):
            for action, begin, end in inside(self.played[rank], window):
                x = left + (max(begin, window.begin) - window.begin) * self.scale
                width = (min(end, window.end) - max(begin, window.begin)) * self.scale
                yield Bar(action, begin, end, x, width)

    def left_out(self) -> list[int]:
        """Return the number of microbatches between two windows of which nothing is drawn."""
        if len(self.windows) == 1:
            return []
        shown = []
        for window in self.windows:
            numbers = set()
            for actions in self.played:
                numbers |= {action.microbatch for action, _, _ in inside(actions, window)}
            shown.append(numbers)
        _, in_the_middle, _ = shown
        hidden = set(range(self.microbatches)).difference(*shown)
        before = sum(number < max(in_the_middle) for number in hidden)
        return [before, len(hidden) - before]

    def axis(self) -> list[str]:
        """Round numbers of seconds, of all windows the same step. None is so near to another one
        that their labels touch."""
        total = sum(window.end - window.begin for window in self.windows)
        step = ticks(total * self.per)[1] / self.per
        parts = []
        last = -APART
        for left, window in zip(self.lefts, self.windows):
            number = -int(-window.begin // step)
            while number * step <= window.end:
                x = left + (number * step - window.begin) * self.scale
                anchor = "middle" if x < WIDTH - 40 else "end"
                parts.append(line(x, self.top - 2, self.bottom + 2))
                if x - last >= APART:
                    value = f"{round(number * step * self.per, 9):g} {self.unit}"
                    parts.append(text(x, self.bottom + 16, value, anchor, "dim"))
                    last = x
                number += 1
        return parts

    def breaks(self) -> list[str]:
        """Return the names of the windows, and what is left out between them."""
        if len(self.windows) == 1:
            return []
        first, middle, last = self.windows
        center = (self.lefts[1] + self.right(1)) / 2
        parts = [
            text(LEFT, 14, first.name),
            text(center, 14, middle.name, "middle"),
            text(WIDTH - 10, 14, last.name, "end"),
        ]
        anchors = ((self.lefts[1] - 8, "end"), (self.right(1) + 8, "start"))
        for number, (count, (x, anchor)) in enumerate(zip(self.left_out(), anchors)):
            words = f"{count} {plural(count, 'microbatch', 'microbatches')} left out"
            parts.append(text(x, 32, words, anchor, "dim"))
            parts += torn(self.right(number), self.lefts[number + 1], self.top, self.bottom)
        return parts


def line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="#0002"/>'


def torn(left: float, right: float, top: float, bottom: float) -> list[str]:
    """Draw a break: a grey band with the two edges of torn paper."""
    parts = [rect(left + 4, top - 4, right - left - 8, bottom - top + 4, "#eee")]
    for edge in left + 4, right - 4:
        points = []
        y = top - 4
        side = 3
        while y <= bottom:
            points.append(f"{edge + side:.1f},{y:.1f}")
            side = -side
            y += 6
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#777"/>')
    return parts


def stages(plan: Plan) -> str:
    """Draw the time line of a pipeline: a row for each rank, a bar for each action of its schedule."""
    pipeline = plan.pipeline
    sheet = Sheet(pipeline.played, plan.microbatches)
    parts = []
    for rank in pipeline.ranks:
        y = sheet.top + ROW * rank.number
        parts.append(text(LEFT - 8, y + 13, f"rank {rank.number}", "end"))
        own = sorted(rank.stages)
        for action, begin, end, x, width in sheet.bars(rank.number):
            words = (
                f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}: "
                f"{begin * sheet.per:.3f} to {end * sheet.per:.3f} {sheet.unit}"
            )
            color = COLORS_OF_ACTIONS[action.kind]
            if len(own) > 1:  # later stages are paler
                opacity = 255 - 150 * own.index(action.stage) // (len(own) - 1)
                color += f"{opacity:02x}"
            parts.append(rect(x, y, width, ROW - 4, color, words, "#fff"))
    kinds = {action.kind for actions in pipeline.played for action, _, _ in actions}
    rows = []
    for kind, color in COLORS_OF_ACTIONS.items():
        if kind in kinds:
            rows.append((kind.replace("_", " of the "), color))
    return image(sheet.bottom + 24, parts + sheet.breaks() + sheet.axis()) + key(rows)
