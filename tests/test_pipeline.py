"""Whole runs of a pipeline, and what can go wrong in one. That it computes what one process computes: tests/test_parallel.py."""

import os
import signal
from pathlib import Path

import pytest

import train
from tests.ranks import run_ranks
from tests.runs import MESHES, ends, run, samples, series, tiny_run

MORE = (
    "--model.n_layers=4 --model.tied_embeddings=true --checkpoint.interval=2 --validation.interval=4 --validation.steps=3 "
    "--data.validation_fraction=0.2 --debug.sample_tokens=8 --debug.check_collectives=false"
).split()


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return [*tiny_run(tmp_path_factory.mktemp("run")), *MORE]


@pytest.fixture(scope="module")
def oracle(options, tmp_path_factory) -> Path:
    """The run that nobody interrupts, on one process."""
    folder = tmp_path_factory.mktemp("oracle")
    assert run_ranks(1, run, options, folder) == [(0, "")]
    return folder


def killed(options: list[str], folder: Path, calls: int) -> tuple[int, str]:
    """A run whose last rank dies of kill -9 as its step number `calls` begins."""
    real, steps = train.train_step, []

    def with_kill(job, batch, *rest):
        steps.append(1)
        if len(steps) == calls and job.mesh.rank == job.mesh.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(job, batch, *rest)

    train.train_step = with_kill
    return run(options, folder)


def said(folder: Path) -> str:
    return (folder / "logs" / "rank-00000.log").read_text()


def trained(folder: Path, dp_size: int) -> tuple[int, list[list[int]]]:
    """The step after which the newest start of this run went on, and the samples of each step since. Removes the notes."""
    first = said(folder).split("resumed after step ")[1:]
    rows = samples(folder, dp_size)
    for path in folder.glob("samples-*"):
        path.unlink()
    return int(first[-1].split()[0]) if first else 0, rows


@pytest.mark.cap(200)
def test_a_run_that_is_killed_on_one_depth_after_another_is_the_run_on_one_process(oracle, options, tmp_path):
    """No sample is repeated or skipped. Loss, norm and validation are equal up to rounding; the sample at the end is equal."""
    legs = ["pp2", "one", "pp2xfsdp2", "pp2xtp2", "pp4"]
    schedules = {"pp2": "zbv", "pp2xfsdp2": "interleaved_1f1b"}
    want, began = samples(oracle, 1), []
    for mesh in legs:
        ranks, extra, dp_size = MESHES[mesh]
        extra = [*extra, f"--parallelism.pipeline_schedule={schedules.get(mesh, '1f1b')}"]
        if mesh == legs[-1]:
            assert run_ranks(ranks, run, [*options, *extra], tmp_path) == [(0, "")] * ranks
        else:
            codes = ends(ranks, tmp_path / f"ranks-{mesh}", killed, [*options, *extra], tmp_path, 5)
            assert codes[-1] == -signal.SIGKILL and 0 not in codes, codes
        start, rows = trained(tmp_path, dp_size)
        assert rows == want[start : start + len(rows)], mesh
        began.append(start)
    assert began == sorted(set(began)), f"a start has not gone on where the one before it had saved: {began}"
    for key in "loss", "grad_norm", "validation_loss":
        here, there = series(tmp_path, key), series(oracle, key)
        assert here.keys() == there.keys() and max(abs(here[s] / there[s] - 1) for s in there) <= 1e-5, key
    texts = [said(folder).split("a sample from the final weights:")[1].split("tensorboard")[0] for folder in (tmp_path, oracle)]
    assert texts[0] == texts[1]
