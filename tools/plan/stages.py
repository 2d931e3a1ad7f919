"""The time line of a pipeline, a row for each rank. Of many microbatches it shows the beginning, a
part of the middle and the end, each with the times of the plan."""

from typing import NamedTuple

from parallelisms.schedules import FORWARD, Action, Timeline
from tools.plan.plan import Plan
from tools.svg import Picture, legend, ticks

WIDTH = 1100  # units of a drawing, which the page scales
LEFT = 90  # of it for the labels of an axis or of rows
COLORS_OF_ACTIONS = {  # by kind (parallelisms/schedules.py)
    "forward": "#2a9d8f",
    "backward": "#e76f51",
    "backward_input": "#f4a261",
    "backward_weight": "#e9c46a",
}
ROW = 22  # units of the drawing for a rank
NARROWEST = 6  # units of the drawing that a bar should have, on average


class Window(NamedTuple):
    """Part of the step that is drawn."""

    name: str
    begin: float  # seconds
    end: float


def windows(played: Timeline, microbatches: int) -> list[Window]:
    """Return the parts of the step to draw: all of it where that is readable. Else the beginning,
    until every stage has done everything once; as many microbatches in the middle as there are
    ranks; and the end, from the first forward of the last microbatch."""
    entries = [entry for actions in played for entry in actions]
    finish = max(end for _, _, end in entries)
    longest = max(len(actions) for actions in played)
    if longest * NARROWEST <= WIDTH - LEFT or microbatches < 8:
        return [Window("", 0.0, finish)]
    begins = {action: begin for action, begin, _ in entries}
    filled = max(end for action, _, end in entries if action.microbatch == 0)
    drained = min(begin for action, begin, _ in entries if action.microbatch == microbatches - 1)
    middle = microbatches // 2
    few = min(len(played), microbatches // 4)
    begin = begins[Action(FORWARD, 0, middle)]
    end = begins[Action(FORWARD, 0, middle + few)]
    return [
        Window("The beginning", 0.0, filled),
        Window(f"The middle: {few} of {microbatches} microbatches", begin, end),
        Window("The end", drained, finish),
    ]


def draw(plan: Plan, window: Window) -> str:
    """Draw a row for each rank, and a bar for each action of its schedule in the window."""
    scale = (WIDTH - LEFT - 10) / (window.end - window.begin)
    unit, per = ("s", 1.0) if window.end > 2 else ("ms", 1e3)
    bottom = 6 + ROW * len(plan.pipeline.ranks)
    picture = Picture(WIDTH, bottom + 24)

    def x(seconds: float) -> float:
        return LEFT + (min(max(seconds, window.begin), window.end) - window.begin) * scale

    for rank in plan.pipeline.ranks:
        y = 6 + ROW * rank.number
        picture.text(LEFT - 8, y + 13, f"rank {rank.number}", anchor="end")
        own = sorted(rank.stages)
        for action, begin, end in plan.pipeline.played[rank.number]:
            if begin >= window.end or end <= window.begin:
                continue
            words = (
                f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}: "
                f"{begin * per:.3f} to {end * per:.3f} {unit}"
            )
            color = COLORS_OF_ACTIONS[action.kind]
            if len(own) > 1:  # later stages are paler
                opacity = 255 - 150 * own.index(action.stage) // (len(own) - 1)
                color += f"{opacity:02x}"
            picture.rect((x(begin), y, x(end) - x(begin), ROW - 4), color, "#fff", tip=words)
    axis(picture, window, x, bottom, (unit, per))
    return picture.svg()


def axis(picture: Picture, window: Window, x, bottom: float, unit: tuple[str, float]) -> None:
    """Draw round numbers of seconds, or of a thousandth of them. x: seconds -> place."""
    name, per = unit
    step = ticks((window.end - window.begin) * per)[1]
    number = -int(-window.begin * per // step)
    while number * step <= window.end * per:
        place = x(number * step / per)
        anchor = "middle" if place < WIDTH - 40 else "end"
        picture.line(place, 4, place, bottom + 2, "#0002")
        picture.text(place, bottom + 16, f"{number * step:.9g} {name}", "dim", anchor)
        number += 1


def stages(plan: Plan) -> str:
    """Return the drawings of the windows with their names, as HTML."""
    parts = []
    for window in windows(plan.pipeline.played, plan.microbatches):
        name = f"<p>{window.name}</p>" if window.name else ""
        parts.append(name + draw(plan, window))
    kinds = {action.kind for actions in plan.pipeline.played for action, _, _ in actions}
    rows = [
        (kind.replace("_", " of the "), color)
        for kind, color in COLORS_OF_ACTIONS.items()
        if kind in kinds
    ]
    return "".join(parts) + legend(rows, WIDTH, LEFT)
