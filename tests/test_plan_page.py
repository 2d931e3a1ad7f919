"""The planner's page: what its drawings show is what the plan says."""

import re

import pytest

from configs.load import load_config
from configs.schema import SCHEDULES
from parallelisms import schedules
from parallelisms.schedules import BACKWARD, FORWARD, Timeline
from tools.plan.device import load_device
from tools.plan.plan import PlanInputs, make_plan
from tools.plan.steady import Sheet, inside, period, stages, windows

MANY = 256  # microbatches
PIPELINE = [
    "--model.n_layers=8",
    "--training.seq_len=64",
    "--training.global_batch_size=96",
    "--training.local_batch_size=1",
    "--training.param_dtype=bfloat16",
    "--parallelism.pipeline_parallel=4",
    "--parallelism.pipeline_schedule=zbv",
]


def played(schedule: str, ranks: int, microbatches: int, head: float = 1.3) -> Timeline:
    """A schedule whose last stage is slower, with messages that take time."""
    placement = schedules.placement(schedule, ranks)
    last = len(placement) - 1

    def seconds(action: schedules.Action) -> float:
        of_stage = head if action.stage == last else 1.0
        return of_stage * (2.1 if action.kind == BACKWARD else 1.0)

    table = schedules.table(schedule, ranks, 0, microbatches)
    return schedules.timeline(table, placement, seconds, lambda *_: 0.02)


def faults(sheet: Sheet, plan: Timeline) -> list[str]:
    """Where the drawing is not the plan: a bar with other times or in another place, an action of a
    window that is missing, microbatches that are neither drawn nor counted as left out."""
    found = []
    drawn = set()
    for rank, actions in enumerate(plan):
        times = {action: (begin, end) for action, begin, end in actions}
        bars = list(sheet.bars(rank))
        drawn |= {bar.action.microbatch for bar in bars}
        for bar in bars:
            if times.get(bar.action) != (bar.begin, bar.end):
                found.append(f"other times: {bar}")
        expected = []
        for left, window in zip(sheet.lefts, sheet.windows):
            for action, (begin, end) in times.items():
                first = max(begin, window.begin)
                last = min(end, window.end)
                if first < last:
                    x = left + (first - window.begin) * sheet.scale
                    expected.append((action, x, (last - first) * sheet.scale))
        if [(bar.action, bar.x, bar.width) for bar in bars] != expected:
            found.append(f"rank {rank} is not drawn as planned")
    if len(drawn) + sum(sheet.left_out()) != sheet.microbatches:
        found.append("microbatches are lost")
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", (2, 8))
def test_of_many_microbatches_the_beginning_a_period_and_the_end_are_drawn(schedule, ranks):
    plan = played(schedule, ranks, MANY)
    sheet = Sheet(plan, MANY)
    assert not faults(sheet, plan)
    beginning, middle, end = sheet.windows
    assert beginning.begin == 0 and end.end == max(actions[-1][2] for actions in plan)
    before, after = sheet.left_out()
    assert before > MANY / 4 and after > MANY / 4
    # bars are wide enough to be seen: a few hundred of the drawing's 1,000 units
    assert all(len(list(sheet.bars(rank))) <= 170 for rank in range(ranks))
    # the beginning and the end show everything that is ever done
    kinds = {(action.kind, action.stage) for actions in plan for action, _, _ in actions}
    for window in beginning, end:
        seen = [entry[0] for actions in plan for entry in inside(actions, window)]
        splits = {(a.kind, a.stage) for a in seen}
        assert splits == kinds or schedule == "dualpipe_v", window
    assert beginning.end < middle.begin < middle.end < end.begin


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_period_repeats_in_the_middle(schedule):
    """All that a rank does in it is done again after it, with the next microbatches."""
    plan = played(schedule, 4, MANY)
    count, exact, begin, end = period(plan, MANY)
    assert exact
    for actions in plan:
        times = {action: (start, stop) for action, start, stop in actions}
        for action, (start, stop) in times.items():
            if begin < stop and start < end:
                later = times[action._replace(microbatch=action.microbatch + count)]
                assert later == pytest.approx((start + end - begin, stop + end - begin), abs=0.02)


def test_what_does_not_repeat_is_not_called_a_period():
    plan = played("1f1b", 4, MANY)
    late = [[(a, b * (1 + b / 1e4), e * (1 + e / 1e4)) for a, b, e in actions] for actions in plan]
    _, exact, _, _ = period(late, MANY)
    assert not exact
    assert "does not repeat" in windows(late, MANY)[1].name
    assert not faults(Sheet(late, MANY), late)


def test_few_microbatches_are_drawn_whole():
    for schedule in SCHEDULES:
        plan = played(schedule, 4, 16)
        sheet = Sheet(plan, 16)
        assert len(sheet.windows) == 1 and not faults(sheet, plan)
        assert not sheet.left_out()
        assert sum(len(list(sheet.bars(rank))) for rank in range(4)) == sum(map(len, plan))


def test_negative_control_a_drawing_of_another_plan_is_found():
    plan = played("zbv", 4, MANY)
    assert faults(Sheet(played("zbv", 4, MANY, head=1.31), MANY), plan)
    sheet = Sheet(plan, MANY)
    sheet.bars = lambda rank: list(Sheet.bars(sheet, rank))[1:]
    assert faults(sheet, plan)


def test_the_page_draws_the_actions_of_the_plan():
    device = load_device("h100").model_copy(update={"peak_tflops": 0.01})
    plan = make_plan(load_config(PIPELINE, 4, 4), PlanInputs(4, 4, device))
    drawing = stages(plan)
    known = set()
    for actions in plan.pipeline.played:
        for action, begin, end in actions:
            words = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
            known.add(f"{words}: {begin * 1e3:.3f} to {end * 1e3:.3f} ms")
            known.add(f"{words}: {begin:.3f} to {end:.3f} s")
    said = re.findall(r"<title>(.*?)</title>", drawing)
    assert 100 < len(said) < len(known) / 4 and set(said) <= known
    left_out = [int(n) for n in re.findall(r">(\d+) microbatch(?:es)? left out<", drawing)]
    drawn = {int(n) for n in re.findall(r"microbatch (\d+):", drawing)}
    assert len(left_out) == 2 and sum(left_out) + len(drawn) == 96
    assert f"{FORWARD} of stage 0, microbatch 0:" in drawing
