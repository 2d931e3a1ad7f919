"""Ranks that drift apart, and a device that computes wrong: found before a sum is wrong, and
named."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from parallelisms.mesh import Mesh
from reliability import collectives
from reliability.guard import Diverged
from tests.ranks import run_ranks, step_timeout
from tests.runs import MESHES, run, series, tiny_run

TWO, BAD = MESHES["fsdp2"][1], 5  # the step in which something goes wrong
CHECKED = "--debug.check_collectives=true"


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("run")
    made = [
        *tiny_run(place),
        "--training.steps=8",
        "--training.local_batch_size=1",
        step_timeout(10),
        "--run.device=cpu",
    ]
    (place / "first").mkdir()
    assert run_ranks(2, run, [*made, *TWO], place / "first") == [(0, "")] * 2
    return made


def first(options: list[str]) -> dict[int, float]:
    cache = next(o for o in options if o.startswith("--data.cache=")).partition("=")[2]
    return series(Path(cache).parent / "first")


# What one rank does instead of a sum over ranks. Call 2 k - 1 is the count of tokens of step k,
# int64 []; call 2 k is the loss with the flags, float64 [4].


def other_type(real, mesh, x):
    """float64 has as many bytes."""
    return real(mesh, x.double()).long()


def left_out(real, mesh, x):
    return x


FAULTS = {other_type: 2 * BAD - 1, left_out: 2 * BAD}  # what, and the number of the call


def drifted(options: list[str], folder: Path, fault) -> str:
    """Return the end of a run in which rank 1 drifts once in that way."""
    calls = []

    def faulty(real):
        def sum_over(mesh, x):
            calls.append(1)
            return (
                fault(real, mesh, x)
                if mesh.rank == 1 and len(calls) == FAULTS[fault]
                else real(mesh, x)
            )

        return sum_over

    Mesh.sum_over_tokens, Mesh.sum_over_ranks = (
        faulty(Mesh.sum_over_tokens),
        faulty(Mesh.sum_over_ranks),
    )
    try:
        return f"exit code {run(options, folder)[0]}"
    except (RuntimeError, collectives.Drift) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_with_a_different_collective_is_named_before_a_sum_is_wrong(
    fault, options, tmp_path
):
    """Both of two ranks are named, each with its next collective and its line."""
    for end in run_ranks(2, drifted, [*options, *TWO, CHECKED], tmp_path, fault):
        assert end.startswith(
            "Drift: the ranks of group default_pg (ranks [0, 1]) do not run the same collective:"
        ), end
        zero, one = end.splitlines()[1:]
        assert zero.startswith("  rank 0: ") and one.startswith("  rank 1: ")
        assert (
            "sum_over_" in zero
            and ("clip_grad_norm" if fault is left_out else fault.__name__) in one
        ), end
    assert max(series(tmp_path)) == BAD - 1 and not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_negative_control_without_the_check_the_sum_is_silently_wrong(options, tmp_path):
    """The negative control."""
    assert run_ranks(2, drifted, [*options, *TWO], tmp_path, other_type) == ["exit code 0"] * 2
    assert (
        series(tmp_path).keys() == first(options).keys()
        and series(tmp_path)[BAD] != first(options)[BAD]
    )


@pytest.mark.slow
def test_a_healthy_run_names_no_outlier(options, tmp_path):
    given = [*options, *MESHES["tp2"][1], CHECKED, "--debug.replay_interval=2"]
    given += ["--training.stop_after=3"]
    assert run_ranks(2, run, given, tmp_path) == [(0, "")] * 2
    seen, want = series(tmp_path), first(options)
    assert len(seen) == 3 and all(abs(seen[s] / want[s] - 1) <= 1e-5 for s in seen)


def crossed() -> str:
    """Every rank is in two groups; rank 1 takes the first for the second."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for dim in "a", "b":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), mesh.get_group(dim))
    with collectives.Checked():
        try:
            for dim in ("a", "a") if dist.get_rank() == 1 else ("a", "b"):
                dist.all_reduce(torch.ones(3), group=mesh.get_group(dim))
        except collectives.Drift as error:
            return str(error)


@pytest.mark.slow
def test_a_collective_on_the_wrong_group_ends_with_the_waiting_lines():
    said = run_ranks(4, crossed)
    waits = "did not come to allreduce_ float32[3] SUM at test_collectives.py"
    assert (
        f"mesh_b (ranks [0, 1]) {waits}" in said[0] and f"mesh_a (ranks [1, 3]) {waits}" in said[1]
    ), said


def four(folder: str) -> str:
    """Rank 2 of four leaves one out; the next one differs in nothing but the line that calls it."""
    with collectives.Checked():
        dist.all_reduce(torch.ones(3))
        try:
            if dist.get_rank() != 2:
                dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(3))
        except collectives.Drift as error:
            return str(error)


def test_the_outlier_is_the_rank_that_differs_from_the_majority(tmp_path):
    for said in run_ranks(4, four, ""):
        _, odd, others = said.splitlines()
        assert odd.startswith("  rank 2: allreduce_ float32[3] SUM at test_collectives.py:"), said
        assert others.startswith(
            "  ranks 0, 1, 3: allreduce_ float32[3] SUM at test_collectives.py:"
        ), said
        line_of = {
            words: int(words.partition("test_collectives.py:")[2].split()[0])
            for words in (odd, others)
        }
        assert line_of[odd] == line_of[others] + 1


# The gradient, computed twice


def flipped(options: list[str], folder: Path) -> str:
    """A bit of one number in the gradient of rank 1 flips: in the first computation of step BAD,
    which is also the first step in which two are compared."""
    real, calls = train.linear_cross_entropy, []

    def loss(hidden, *args, **kwargs):
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == (BAD - 1) * 4 + 1:  # of 4 microbatches a step

            def flip(gradient):
                gradient = gradient.clone()
                mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                mine.view(torch.int32).view(-1)[7] ^= 1 << 26  # 256 times as large, or as small
                return gradient

            hidden.register_hook(flip)
        return real(hidden, *args, **kwargs)

    train.linear_cross_entropy = loss
    try:
        return f"exit code {run(options, folder)[0]}"
    except Diverged as error:
        return str(error)


def test_a_rank_whose_recomputed_gradient_differs_is_named(options, tmp_path):
    given = [*options, *TWO, f"--debug.replay_interval={BAD}"]
    for end in run_ranks(2, flipped, given, tmp_path):
        assert end.startswith(
            f"step {BAD}: recomputing the gradient gave a different result on rank 1:"
        ), end
    assert not list(tmp_path.glob("checkpoints/step-*")) and max(series(tmp_path)) == BAD - 1


@pytest.mark.slow
def test_negative_control_without_the_replay_a_flipped_bit_reaches_all_ranks(options, tmp_path):
    """The negative control; and a healthy run with it is bitwise the same, and says nothing."""
    assert run_ranks(2, flipped, [*options, *TWO], tmp_path) == ["exit code 0"] * 2
    assert series(tmp_path) != first(options)
    (tmp_path / "well").mkdir()
    assert (
        run_ranks(2, run, [*options, *TWO, "--debug.replay_interval=1"], tmp_path / "well")
        == [(0, "")] * 2
    )
    assert series(tmp_path / "well") == first(options)
