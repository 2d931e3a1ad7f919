"""Whole runs of a pipeline, and what can go wrong in one. That it computes what one process computes: tests/test_parallel.py."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import train
from parallelisms import pp
from tests.ranks import run_ranks, step_timeout
from tests.runs import MESHES, ends, killed, run, said, samples, series, tiny_run, trained

MORE = (
    "--model.n_layers=4 --model.tied_embeddings=true --checkpoint.interval=2 --validation.interval=4 --validation.steps=3 "
    "--data.validation_fraction=0.2 --debug.sample_tokens=8"
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


@pytest.mark.cap(200)
def test_a_run_that_is_killed_on_one_depth_after_another_is_the_run_on_one_process(oracle, options, tmp_path):
    """No sample is repeated or skipped. Loss, norm and validation are equal up to rounding; the sample at the end is equal."""
    legs = ["pp2", "one", "pp2xfsdp2", "pp2xtp2", "pp4"]
    more = {"pp2": "--parallelism.pipeline_schedule=zbv", "pp2xfsdp2": "--parallelism.pipeline_schedule=interleaved_1f1b",
            "pp2xtp2": "--debug.replay_interval=2 --run.device=cpu", "pp4": "--debug.check_collectives=true"}  # fmt: skip
    want, began = samples(oracle, 1), []
    for mesh in legs:
        ranks, extra, dp_size = MESHES[mesh]
        extra = [*extra, *more.get(mesh, "").split()]
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


def troubled(options: list[str], folder: Path, kind: str) -> tuple[int, str]:
    """A run of two stages, the second of which has trouble in step 3."""
    real, calls = train.linear_cross_entropy, []

    def loss(*args, **more):
        calls.append(1)
        if len(calls) == 9:  # of four micro-batches a step
            if kind == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("the loss of the second stage is broken")
        return real(*args, **more)

    train.linear_cross_entropy = loss
    return run([o for o in options if "validation" not in o], folder)


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_a_stage_that_fails_or_hangs_ends_the_others_which_name_it(kind, options, tmp_path):
    codes = ends(2, tmp_path / "ranks", troubled, [*options, *MESHES["pp2"][1], step_timeout(4)], tmp_path, kind, seconds=40)
    assert codes[0] not in (0, None) and (codes[1] is None) == (kind == "hangs"), codes
    stacks = {rank: (tmp_path / "logs" / f"rank-0000{rank}.stacks").read_text() for rank in range(1 if kind == "hangs" else 2)}
    if kind == "fails":
        assert "rank 0 of the pipeline did not receive the gradient of stage 1" in stacks[0], stacks[0]
        assert "from rank 1, which has failed or hangs" in stacks[0]
        assert "the loss of the second stage is broken" in stacks[1]


def slow_stage(options: list[str], folder: Path, kind: str) -> tuple[int, str]:
    """A run whose second stage of two is slow in forward or in backward."""
    real = pp.Step.forward if kind == "forward" else pp.Step.backward

    def slow(self, *args):
        time.sleep(0.1 * self.model.mesh.pp_rank)
        real(self, *args)

    setattr(pp.Step, kind, slow)
    return run(options, folder)


def test_a_slow_stage_is_named_with_the_half_of_the_step_in_which_it_is_slow(options, tmp_path):
    few = ["--training.steps=3", "--metrics.straggler_interval=3", "--validation.interval=0", "--debug.sample_tokens=0"]
    for kind in "forward", "backward":
        (folder := tmp_path / kind).mkdir()
        assert run_ranks(2, slow_stage, [*options, *few, *MESHES["pp2"][1]], folder, kind) == [(0, "")] * 2
        late = re.findall(r"rank (\d) is late: the others wait ([\d.]+) s per step for its (\w+)", said(folder))
        slowest = max(late, key=lambda line: float(line[1]))
        assert (slowest[0], slowest[2]) == ("1", kind) and float(slowest[1]) > 0.2, late
