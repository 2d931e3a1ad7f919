"""The planner's page: what its drawings show is what the plan says."""

import re
from html import unescape

import pytest

from configs.load import load_config
from parallelisms.schedules import FORWARD, Action, Timeline
from tools.plan.device import load_device
from tools.plan.page import page
from tools.plan.plan import PlanInputs, make_plan
from tools.plan.report import report
from tools.plan.stages import Window, stages, windows

PIPELINE = [
    "--model.n_layers=8",
    "--training.seq_len=64",
    "--training.global_batch_size=96",
    "--training.local_batch_size=1",
    "--training.param_dtype=bfloat16",
    "--parallelism.pipeline_parallel=4",
    "--parallelism.pipeline_schedule=zbv",
]


def drawn_in(plan: Timeline, window: Window) -> list[tuple[Action, float]]:
    """Return the actions that a window shows, at least in part, and when they begin."""
    entries = [entry for actions in plan for entry in actions]
    return [(a, begin) for a, begin, end in entries if begin < window.end and end > window.begin]


def test_the_page_draws_the_actions_of_the_plan():
    device = load_device("h100").model_copy(update={"peak_tflops": 0.01})
    plan = make_plan(load_config(PIPELINE, 4, 4), PlanInputs(4, 4, device))
    timeline = plan.pipeline.played
    shown = windows(timeline, 96)
    expected = []
    for window in shown:
        for action, begin in drawn_in(timeline, window):
            words = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
            expected.append(
                f"{words}: {begin:.3f}" if window.end > 2 else f"{words}: {begin * 1e3:.3f}"
            )
    drawing = stages(plan)
    said = [words.split(" to ")[0] for words in re.findall(r"<title>(.*?)</title>", drawing)]
    assert len(shown) == 3 and len(said) > 100 and sorted(said) == sorted(expected)
    assert f"{FORWARD} of stage 0, microbatch 0:" in drawing


SMALL = ["--training.seq_len=64", "--model.n_layers=2", "--training.global_batch_size=4"]


@pytest.fixture(scope="module")
def two_plans():
    inputs = PlanInputs(4, 2, load_device("h100").model_copy(update={"peak_tflops": 0.1}))
    options = [*SMALL, "--training.param_dtype=bfloat16"]
    pipeline = ["--parallelism.pipeline_parallel=2", "--training.local_batch_size=1"]
    first = make_plan(load_config(options, 4, 2), inputs)
    return first, make_plan(load_config([*options, *pipeline], 4, 2), inputs)


def test_the_page_sets_every_word_of_the_report_in_tables_and_paragraphs(two_plans):
    for plan in two_plans:
        said = report(plan)
        html = page(plan, said)
        shown = html[html.index("</h1>") : html.index("<h2>")]
        words = unescape(re.sub("<[^>]*>", " ", shown)).split()
        assert words == said.split() and "<pre" not in html
        titles = re.findall("<table><tr><th>(.*?)</th>", shown)
        expected = ["Memory of", "Communication of a step"]
        expected[:0] = ["Pipeline"] if plan.pipeline else []
        assert len(titles) == len(expected)
        assert all(title.startswith(begin) for title, begin in zip(titles, expected))
        assert re.search(r"<td>live at the peak</td><td>[\d.]+ \w+</td>", shown)
        assert "<b>Time of a step</b>" in shown
