"""Exact resume: a run that was stopped and started again equals the uninterrupted run.

On the same mesh bitwise, with a model that draws random numbers; on another to rounding, the same
samples in the same order. One function compares; mistakes that resumes have made elsewhere are put
back, and it must find each.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F

import data.loader
import train
from checkpoint import state
from configs.dropped import DROPPED
from configs.schema import Config
from tests.checkpoints import mesh_options
from tests.ranks import run_ranks
from tests.runs import run, samples, series, stopped_at, tiny_run

STOPPED, STEPS = 4, 12  # the step that a stopped run has saved, and the last one: 8 are compared


def differences(want: Path, got: Path, tolerance: float) -> dict[str, int]:
    """Compare the steps after STOPPED of two runs: what differs -> the first step where it does.

    tolerance: of the losses, absolute, and of the gradient norms, relative; 0 is bitwise, as floats
    are written so that they read back exactly. Samples and learning rates are always compared
    exactly.
    """
    a, b = (
        {key: series(folder, key) for key in ("loss", "grad_norm", "lr")} for folder in (want, got)
    )
    for key, folder in (("samples", want), ("samples", got)):
        rows = samples(folder, len(list(folder.glob("samples-*"))))
        (a if folder == want else b)[key] = dict(
            zip(range(STEPS, 0, -1), reversed(rows), strict=False)
        )
    steps = range(STOPPED + 1, STEPS + 1)
    # a lost optimizer shows at the second
    assert len(steps) >= 5 and all(set(steps) <= b[key].keys() for key in b)
    mismatching_ranks = {
        "loss": lambda step: abs(a["loss"][step] - b["loss"][step]) > tolerance,
        "grad_norm": lambda step: abs(a["grad_norm"][step] / b["grad_norm"][step] - 1) > tolerance,
        "lr": lambda step: a["lr"][step] != b["lr"][step],
        "samples": lambda step: a["samples"][step] != b["samples"][step],
    }
    first = {
        key: next((step for step in steps if differs(step)), None)
        for key, differs in mismatching_ranks.items()
    }
    return {key: step for key, step in first.items() if step}


def start(folder: Path, options: list[str], changes: list[Callable], stop: int | None) -> int:
    """Do a run on this rank with these changes to the code; return its exit code."""
    for change in changes:
        change()
    return stopped_at(stop, options, folder) if stop else run(options, folder)[0]


def dropout() -> None:
    """The model draws random numbers, each rank its own."""
    build = train.build

    def build_noisy(cfg):
        job = build(cfg)
        for layer in job.model.layers.values():
            layer.feed_forward.register_forward_hook(
                lambda module, inputs, output: F.dropout(output, 0.1)
            )
        return job

    train.build = build_noisy


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable:
    """make(mesh, stop, *changes): the folder of such a run, which is made once; stop: when it gets
    SIGTERM, if ever."""
    place = tmp_path_factory.mktemp("runs")
    options = [*tiny_run(place), f"--training.steps={STEPS}", "--checkpoint.interval=2"]

    @functools.cache
    def make(mesh: str, stop: int | None, *changes: Callable) -> Path:
        folder = place / f"{mesh}-{stop}-{'-'.join(change.__name__ for change in changes)}"
        folder.mkdir()
        n, extra = mesh_options(mesh, *options)
        assert run_ranks(n, start, folder, extra, changes, stop) == [75 if stop else 0] * n
        return folder

    make.options = options
    return make


def resumed(
    made: Callable,
    source: Path,
    place: Path,
    mesh: str,
    *changes: Callable,
    more: tuple[str, ...] = (),
) -> Path:
    """Return the folder of a run that goes on from the checkpoints of `source`, on this mesh, to
    the end."""
    shutil.copytree(source / "checkpoints", place / "checkpoints")
    n, options = mesh_options(mesh, *made.options, *more)
    assert run_ranks(n, start, place, options, changes, None) == [0] * n
    assert (
        f"resumed after step {STOPPED} of {STEPS}"
        in (place / "logs" / "rank-00000.log").read_text()
    )
    return place


def test_resumed_on_the_same_mesh_every_later_step_is_bitwise_equal(made, tmp_path):
    """With dropout: the generators of each rank are part of a checkpoint. And with workers, which are
    ahead of the step."""
    stopped, whole = made("2x1", STOPPED, dropout), made("2x1", None, dropout)
    again = resumed(made, stopped, tmp_path, "2x1", dropout, more=("--data.workers=2",))
    assert differences(whole, again, 0.0) == {}


def test_resumed_on_another_mesh_the_loss_is_equal_and_no_sample_is_lost(made, tmp_path):
    """tests/test_any_mesh.py has many."""
    again = resumed(made, made("2x1", STOPPED), tmp_path, "1x2")
    assert differences(made("2x1", None), again, 1e-5) == {}


# Mistakes put back


def optimizer_dropped() -> None:
    put_back = state.put_back
    state.put_back = lambda loaded, live: put_back(
        loaded, {name: tensor for name, tensor in live.items() if not name.startswith("optimizer.")}
    )


def data_shifted() -> None:
    loader = data.loader.loader
    data.loader.loader = lambda batches, start, steps, *rest, **how: loader(
        batches, start + 1, steps + 1, *rest, **how
    )


def learning_rate_ahead() -> None:
    learning_rate = train.learning_rate
    train.learning_rate = lambda step, *rest: learning_rate(step + 1, *rest)


def generators_not_restored() -> None:
    put_back = state.put_back
    state.put_back = lambda loaded, live: put_back(
        loaded, {name: tensor for name, tensor in live.items() if not name.startswith("rng.")}
    )


BUGS = {  # mistake: what must be seen of it, and in which step after the resume at first
    optimizer_dropped: ("loss", 2),  # and not before: the first forward has the right weights
    data_shifted: ("samples", 1),
    learning_rate_ahead: ("lr", 1),
    generators_not_restored: ("loss", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_negative_control_every_resume_mistake_is_seen(bug, made, tmp_path):
    stopped, whole = made("2x1", STOPPED, dropout), made("2x1", None, dropout)
    (tmp_path / "again").mkdir()
    again = resumed(made, stopped, tmp_path / "again", "2x1", dropout, bug)
    found, (key, after) = differences(whole, again, 1e-5), BUGS[bug]
    assert found[key] == STOPPED + after and "loss" in found and "grad_norm" in found, found


# An earlier version's run


def of_an_earlier_version(options: list[str], folder: Path, others: dict[str, object]) -> int:
    """Do two steps of a run whose files have the options of earlier versions, with these values or
    with those that hold now."""
    dump = train.dump

    def with_old_options(cfg: Config) -> str:
        text = dump(cfg)
        for name, old in DROPPED.items():
            table, _, key = name.partition(".")
            value = json.dumps(others.get(name, old.holds))
            text = text.replace(f"[{table}]\n", f"[{table}]\n{key} = {value}\n")
        return text

    train.dump = with_old_options
    return stopped_at(2, options, folder)


def test_a_run_of_an_earlier_version_resumes_from_its_own_configuration(tmp_path):
    given, folder = [*tiny_run(tmp_path), "--training.steps=4"], tmp_path / "run"
    folder.mkdir()
    assert run_ranks(1, of_an_earlier_version, given, folder, {}) == [75]
    assert "\nload_path_content = " in (folder / "config.toml").read_text()
    assert run_ranks(1, run, [str(folder / "config.toml")], folder) == [(0, "")]
    assert list(series(folder)) == [1, 2, 3, 4]
    log = (folder / "logs" / "rank-00000.log").read_text()
    assert "changed since" not in log and "no longer an option" not in log


def test_old_options_with_other_values_are_answered_at_a_resume(tmp_path):
    """The numbers would be others with the one, so the file that sets it is refused, and a file
    without it is told; with the other they are the same."""
    given, folder = [*tiny_run(tmp_path), "--training.steps=4"], tmp_path / "run"
    folder.mkdir()
    others = {"optimizer.nesterov": False, "metrics.straggler_interval": 7}
    assert run_ranks(1, of_an_earlier_version, given, folder, others) == [75]
    code, said = run_ranks(1, run, [str(folder / "config.toml")], folder)[0]
    assert code == 2 and "optimizer.nesterov = false: no longer an option" in said
    given += ["--metrics.straggler_interval=7"]
    assert run_ranks(1, run, given, folder) == [(0, "")]
    log = (folder / "logs" / "rank-00000.log").read_text()
    assert "changed since the checkpoint of step 2: optimizer.nesterov false -> true" in log
    assert log.count("metrics.straggler_interval = 7 is ignored") == 1
