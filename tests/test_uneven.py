"""Ranks that do not divide a batch train as one process does (data/uneven.py)."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runs import as_typed, run, series, tiny_run

OPTIONS = (
    "--training.param_dtype=float64 --training.global_batch_size=10 --training.steps=8 "
    "--training.max_norm=0.2 --checkpoint.interval=0 --data.mask_documents=true"
).split()
EXPERTS = (
    "--model.family=qwen3 --model.flavor=debug_moe --model.n_experts=4 --model.experts_per_token=2 "
    "--model.expert_dim=12 --model.balance_loss=0.01"
).split()
THREE = "data_parallel_replicate=3"
# name: (ranks, options of the mesh, rows of a microbatch, of the model)
RUNS = {
    "experts": (3, [THREE], 2, EXPERTS),
    "pipeline": (2, ["pipeline_parallel=2"], 4, []),
    "context": (4, ["data_parallel_shard=2", "context_parallel=2"], 3, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_do_not_divide_the_batch_equal_one(name: str, tmp_path: Path) -> None:
    ranks, mesh, rows, model = RUNS[name]
    one = as_typed([*tiny_run(tmp_path), *OPTIONS, *model, "--training.local_batch_size=1"])
    more = [f"--parallelism.{degree}" for degree in mesh]
    more += ["--run.fault_tolerant=true", f"--training.local_batch_size={rows}"]
    for folder, count, options in ("one", 1, []), ("some", ranks, more):
        (tmp_path / folder).mkdir()
        given = as_typed([*one, *options])
        assert run_ranks(count, run, given, tmp_path / folder) == [(0, "")] * count
    for key in "loss", "grad_norm":
        expected = series(tmp_path / "one", key)
        assert series(tmp_path / "some", key) == pytest.approx(expected, rel=1e-12)
