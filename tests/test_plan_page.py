"""The planner's page: what its drawings show is what the plan says."""

import re

import pytest

from configs.load import load_config
from configs.schema import SCHEDULES
from parallelisms import schedules
from parallelisms.schedules import BACKWARD, FORWARD, Timeline
from tools.plan import compare, front
from tools.plan.__main__ import main
from tools.plan.choices import Candidate, Choice
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
    """Return a schedule whose last stage is slower, with messages that take time."""
    placement = schedules.placement(schedule, ranks)
    last = len(placement) - 1

    def seconds(action: schedules.Action) -> float:
        of_stage = head if action.stage == last else 1.0
        return of_stage * (2.1 if action.kind == BACKWARD else 1.0)

    table = schedules.table(schedule, ranks, 0, microbatches)
    return schedules.timeline(table, placement, seconds, lambda *_: 0.02)


def faults(sheet: Sheet, plan: Timeline) -> list[str]:
    """List where the drawing differs from the plan: a bar with other times or in another place, an
    action of a window that is missing, microbatches that are neither drawn nor counted as left out."""
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


@pytest.mark.slow
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


SMALL = ["--training.seq_len=64", "--model.n_layers=2", "--training.global_batch_size=4"]


@pytest.fixture(scope="module")
def two_plans():
    inputs = PlanInputs(4, 2, load_device("h100").model_copy(update={"peak_tflops": 0.1}))
    options = [*SMALL, "--training.param_dtype=bfloat16"]
    pipeline = ["--parallelism.pipeline_parallel=2", "--training.local_batch_size=1"]
    first = make_plan(load_config(options, 4, 2), inputs)
    return first, make_plan(load_config([*options, *pipeline], 4, 2), inputs)


def test_two_plans_are_compared_in_what_their_steps_go_into(two_plans):
    for plan in two_plans:
        parts = compare.parts_of_step(plan)
        assert sum(parts.values()) == pytest.approx(plan.time.seconds)
    differences = compare.differences(*two_plans)
    sizes = [abs(b - a) for _, a, b in differences]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    total = sum(b - a for _, a, b in differences)
    assert total == pytest.approx(two_plans[1].time.seconds - two_plans[0].time.seconds)
    said = compare.table(*two_plans)
    assert re.search(r"parallelism.pipeline_parallel +1 +2\n", said)
    assert re.search(r"bubble of the pipeline +0.0% +\d+.\d% +\+", said)
    assert "dp_shard all-gather, hidden" in said and "tokens/s per GPU" in said
    backwards = compare.table(*reversed(two_plans))
    assert re.search(r"bubble of the pipeline +\d+.\d% +0.0% +-", backwards)


def test_a_comparison_of_a_plan_with_itself_shows_no_difference(two_plans):
    plan, _ = two_plans
    assert all(row[3] in ("", "=") for rows in compare.blocks(plan, plan).values() for row in rows)


@pytest.mark.parametrize(
    "options, words",
    (
        (["--compare", "--run.seed=42"], "changes no option"),
        (["--compare", "nowhere.toml"], "nowhere.toml"),
        (["--compare", "a.toml", "--compare", "b.toml"], "takes one file"),
        (["--compare", "--run.sed=1"], "sed"),
        (["--compare", "--parallelism.tensor_parallel=3"], "tensor_parallel"),
        (["--compare", "--run.seed=1", "--search"], "leave --search out"),
    ),
)
def test_a_mistake_in_a_comparison_is_a_sentence(options, words, capsys):
    assert main([*SMALL, "--run.seed=42", "--gpus", "4", *options]) == 2
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err and not said.out


def candidate(tokens: float, needed: float) -> Candidate:
    choice = Choice(1, 1, "full", int(tokens * 1000 + needed), "whole")
    return Candidate(choice, 1, needed * 2**30, True, 1.0, tokens, 0.5, 0.0)


def test_the_front_is_drawn_with_its_options():
    rows = [candidate(*one) for one in ((5, 50), (3, 20), (2, 30), (4, 50), (1, 10))]
    best = front.front(rows)
    assert [(row.tokens_per_second, row.needed // 2**30) for row in best] == [
        (1, 10),
        (3, 20),
        (5, 50),
    ]
    drawing = front.plot(rows, best)
    assert drawing.count("beaten: ") == 2 and drawing.count("#264653") == 3
    html = front.section(rows, 8, "said")
    assert html.count("<code>--parallelism.tensor_parallel=1 ") == 3
