"""Exact resume: a run that was stopped and started again equals the uninterrupted run.

On the same mesh bitwise, with a model that draws random numbers; on another to rounding, the same
samples in the same order. One function compares; mistakes that resumes have made elsewhere are put
back, and it must find each.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F

import data.loader
import train
from checkpoint import state
from checkpoint.manager import CheckpointManager
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


@pytest.mark.parametrize(
    ("mesh", "workers"),
    [
        ("2x1", 0),
        ("2x1", 2),
        pytest.param("2x2", 0, marks=pytest.mark.torture),
    ],
)
def test_resumed_on_the_same_mesh_every_later_step_is_bitwise_equal(mesh, workers, made, tmp_path):
    """With dropout: the generators of each rank are part of a checkpoint."""
    stopped, whole = made(mesh, STOPPED, dropout), made(mesh, None, dropout)
    again = resumed(made, stopped, tmp_path, mesh, dropout, more=(f"--data.workers={workers}",))
    assert differences(whole, again, 0.0) == {}


FAST = [("2x2", "4x1"), ("1x1", "2x2")]


def check_pair(made: Callable, source: str, target: str, place: Path) -> None:
    place.mkdir()
    again = resumed(made, made(source, STOPPED), place, target)
    assert differences(made("1x1", None), again, 1e-5) == {}, f"{source} -> {target}"


@pytest.mark.parametrize(
    ("source", "target"), [FAST[0], pytest.param(*FAST[1], marks=pytest.mark.slow)]
)
def test_resumed_on_another_mesh_the_loss_is_equal_and_no_sample_is_lost(
    source, target, made, tmp_path
):
    check_pair(made, source, target, tmp_path / "again")


# Mistakes put back


def optimizer_dropped() -> None:
    read = CheckpointManager._read
    CheckpointManager._read = lambda self, path, manifest, live, content, **how: read(
        self, path, manifest, live, "model", **how
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


def older_shard() -> None:
    """The mistake is in the files; see below."""


BUGS = {  # mistake: what must be seen of it, and in which step after the resume at first
    optimizer_dropped: ("loss", 2),  # and not before: the first forward has the right weights
    data_shifted: ("samples", 1),
    learning_rate_ahead: ("lr", 1),
    generators_not_restored: ("loss", 1),
    older_shard: ("loss", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_negative_control_every_resume_mistake_is_seen(bug, made, tmp_path):
    stopped, whole = made("2x1", STOPPED, dropout), made("2x1", None, dropout)
    more = ()
    if bug is older_shard:
        stopped = Path(shutil.copytree(stopped, tmp_path / "mixed"))
        newest, older = (
            stopped / "checkpoints" / f"step-{step:08d}" for step in (STOPPED, STOPPED - 2)
        )
        shutil.copy(older / "rank-00001.safetensors", newest)
        # with it the shard is refused: tests/test_checkpoint.py
        more = ("--checkpoint.verify_on_load=false",)
    (tmp_path / "again").mkdir()
    again = resumed(made, stopped, tmp_path / "again", "2x1", dropout, bug, more=more)
    found, (key, after) = differences(whole, again, 1e-5), BUGS[bug]
    assert found[key] == STOPPED + after and "loss" in found and "grad_norm" in found, found
