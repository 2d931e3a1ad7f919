"""Two numbers of every gradient that a run records (training/digests.py): the same on every mesh,
right, and sensitive to any change of a gradient."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from configs.load import load_config
from tests.parity import EXPERTS, LORA_DENSE, begin_adapters, gathered, options_of_a_family
from tests.ranks import run_ranks
from tests.runs import ADAMW, CONTEXT_MESHES, EXPERT_MESHES, MESHES, killed_at, run, tiny_run
from tools.parity import in_memory
from training import digests

BATCH = 24
MORE = "--training.max_norm=0.01 --lr_schedule.warmup_steps=0".split()  # clipping is in force
KINDS = {
    "dense": ADAMW,
    "adapters": [*ADAMW, *LORA_DENSE],
    "experts": [*ADAMW, *EXPERTS["deepseek_v3"]],
}
Numbers = dict[str, list[float]]


def digests_of(kind: str, options: list[str], dp_size: int) -> tuple[Numbers, Numbers]:
    """Return the numbers of the first step; and those of the gradients that this rank has gathered
    whole, after clipping."""
    chosen = [*KINDS[kind], *MORE, *options]
    base = options_of_a_family(chosen)
    rows = BATCH // dp_size // 6
    cfg = load_config([*base, f"--training.local_batch_size={rows}", *chosen], None, None)
    job = train.build(cfg)
    if cfg.lora.rank:
        begin_adapters(job.model)
    clipped: dict[str, np.ndarray] = {}

    def keep(*_: object) -> None:
        trained = {n: p for n, p in job.model.named_parameters() if p.requires_grad}
        clipped.update(gathered(job.mesh, {n: p.grad for n, p in trained.items()}))

    job.optimizer.register_step_pre_hook(keep)
    ids = np.random.default_rng(0).integers(0, 263, 4000).astype(np.uint16)
    result = train.train_step(job, in_memory.batches(cfg, job.mesh, ids)[0], digest=True)
    numbers = digests.of_all_stages(result.gradient_digests, job.mesh)
    whole = {n: digests.of_tensor(n, torch.from_numpy(x)) for n, x in clipped.items()}
    return numbers, digests.numbers(whole)


def on(kind: str, mesh: str) -> list[tuple[Numbers, Numbers]]:
    ranks, options, dp_size = (MESHES | CONTEXT_MESHES | EXPERT_MESHES)[mesh]
    return run_ranks(ranks, digests_of, kind, options, dp_size)


def apart(got: Numbers, want: Numbers) -> dict[str, float]:
    """Parameter -> the larger difference of its two numbers, as a part of the norm."""
    assert got.keys() == want.keys()
    return {name: np.abs(np.subtract(got[name], want[name])).max() / want[name][0] for name in want}


@pytest.fixture(scope="module")
def plain() -> dict[str, Numbers]:
    return {kind: on(kind, "one")[0][0] for kind in KINDS}


@pytest.mark.parametrize(
    "kind, mesh",
    [
        ("dense", "fsdp3"),
        pytest.param("adapters", "tp2", marks=pytest.mark.slow),
        pytest.param("experts", "ep2xcp2", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_has_the_same_numbers(kind: str, mesh: str, plain: dict[str, Numbers]) -> None:
    want = plain[kind]
    of_ranks = on(kind, mesh)
    for numbers, clipped in of_ranks:
        assert numbers == of_ranks[0][0]  # every rank can write them
        errors = apart(numbers, want)
        assert max(errors.values()) < 1e-5, errors
        # what is clipped is smaller by one factor, and is otherwise the same
        for name, pair in clipped.items():
            factor = pair[0] / numbers[name][0]
            assert factor < 0.5 and abs(pair[1] - factor * numbers[name][1]) <= 1e-5 * pair[0]


def test_the_numbers_are_those_of_the_definition() -> None:
    """Element by element, in Python's own sums."""
    x = torch.randn(3, 5, 7)
    index = [digests.factors(torch.arange(n), f"a {d}").tolist() for d, n in enumerate(x.shape)]
    squares = digest = 0.0
    for i, j, k in np.ndindex(3, 5, 7):
        squares += float(x[i, j, k]) ** 2
        digest += float(x[i, j, k]) * index[0][i] * index[1][j] * index[2][k]
    norm, other = digests.numbers({"a": digests.of_tensor("a", x)})["a"]
    assert norm == pytest.approx(squares**0.5, rel=1e-12)
    assert other == pytest.approx(digest, abs=1e-12 * norm)
    every = np.abs(sum(index, []))
    assert every.min() >= 0.5 and every.max() < 1.5 and len(set(every)) == 15


def test_a_digest_in_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 9)
    whole = digests.of_tensor("a", x)
    monkeypatch.setattr(digests, "CHUNK", 20)
    assert torch.allclose(digests.of_tensor("a", x), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[[1, 0, *range(2, 40)]],  # two rows, whose norm is the same
        lambda x: -x,
        lambda x: x.where(torch.arange(1200).view(40, 30) != 77, -x),  # one sign
    ],
)
def test_the_digest_moves_where_the_norm_does_not(change) -> None:
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    (norm, digest), (other_norm, other) = digests.numbers(
        {"a": digests.of_tensor("a", x), "b": digests.of_tensor("a", change(x))}
    ).values()
    assert norm == pytest.approx(other_norm, rel=1e-6)
    assert abs(digest - other) > 1e-3 * norm


def test_a_run_writes_them_and_nothing_without_the_option(tmp_path: Path) -> None:
    """At the steps of the interval, also those that a killed run makes again; every other number of
    the run is the same in every bit."""
    given = [*tiny_run(tmp_path), "--training.steps=6", "--checkpoint.interval=2"]
    on_steps = [*given, "--metrics.gradient_interval=2"]
    killed_at(5, on_steps, tmp_path / "on")
    for name, options in ("on", on_steps), ("off", given):
        assert run_ranks(1, run, options, tmp_path / name) == [(0, "")]
    lines = (tmp_path / "on" / digests.FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]
    assert not (tmp_path / "off" / digests.FILE).exists()
    numbers = digests.recorded(tmp_path / "on")
    metrics = {name: rows(tmp_path / name) for name in ("on", "off")}
    for step, of_step in numbers.items():
        norm = sum(pair[0] ** 2 for pair in of_step.values()) ** 0.5
        assert norm == pytest.approx(metrics["off"][step]["grad_norm"], rel=1e-6)
        assert metrics["on"][step]["loss"] == metrics["off"][step]["loss"]


def rows(folder: Path) -> dict[int, dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    line = {"step": 3, "gradients": {"a": ["nan", "-inf"], "b": [1.5, -0.25]}}
    (tmp_path / digests.FILE).write_text(json.dumps(line) + "\n" + '{"step": 4, "gradi')
    read = digests.recorded(tmp_path)
    assert list(read) == [3] and read[3]["b"] == [1.5, -0.25]
    assert np.isnan(read[3]["a"][0]) and read[3]["a"][1] == -np.inf
