"""The gradient noise scale: its formula, the gradient of a part of the batch, the same numbers on
every mesh, and a run that is otherwise the same."""

import pytest
import torch

import train
from configs.load import load_config
from tests import parity
from tests.ranks import run_ranks
from tests.runs import CONTEXT_MESHES, EXPERT_MESHES, MESHES, as_typed, lines_of, run, tiny_run
from tools.parity import in_memory
from training import noise_scale
from training.optim import clip_grad_norm

EACH = "--metrics.noise_scale_interval=1"


def test_the_estimates_have_no_bias():
    """Of random gradients with a known mean and variance, for each example."""
    torch.manual_seed(0)
    mean, deviation = torch.randn(500, dtype=torch.float64), 3.0
    each = mean + deviation * torch.randn(400, 64, 500, dtype=torch.float64)  # 400 batches of 64
    found = []
    for batch in each:
        small, large = (batch[:n].mean(0).square().sum().item() for n in (16, 64))
        found.append(noise_scale.estimates(small, large, 16, 64))
    square, trace = torch.tensor(found).mean(0).tolist()
    assert square == pytest.approx(mean.square().sum().item(), rel=0.02)
    assert trace == pytest.approx(500 * deviation**2, rel=0.02)


def batches_of(job: train.Job) -> list[dict]:
    tokens = torch.randint(parity.VOCAB, (4000,), generator=torch.Generator().manual_seed(0))
    return in_memory.batches(job.cfg, job.mesh, tokens.numpy().astype("uint16"))


def measured(options: list[str], rows: int) -> list[dict[str, float]]:
    """Return the metrics of two steps on this mesh."""
    world = parity.world()
    local = f"--training.local_batch_size={rows}"
    cfg = load_config([*parity.OPTIONS, local, EACH, *options], world.size, world.local_size)
    job = train.build(cfg)
    batches = batches_of(job)
    found = []
    for step in range(2):
        result = train.train_step(job, batches[step])
        small = job.compute.small
        found.append(job.compute.metrics(result.grad_norm, result.skipped))
        found[-1] |= {"norm": result.grad_norm, "small": small[0], "b": small[1], "B": small[2]}
    return found


def of_rows(options: list[str]) -> list[float]:
    """Return the squared norm of the gradient of the small batch's windows, without others, and the
    labels that count in it."""
    cfg = load_config(
        [*parity.OPTIONS, f"--training.local_batch_size={parity.BATCH}", *options], 1, 1
    )
    job = train.build(cfg)
    batch = batches_of(job)[0]
    chosen = batch["window"] % 4 == 0
    rows = {"tokens": batch["tokens"][:, chosen], "labels": batch["labels"][:, chosen]}
    train.gradients(job, rows)
    norm = clip_grad_norm(job.model.parameters(), 0.0)
    return [norm.item() ** 2, (rows["labels"] != -100).sum().item()]


def test_the_small_batch_is_a_part_of_the_windows():
    (first, _) = run_ranks(1, measured, [parity.FLOAT64], parity.BATCH)[0]
    small, b = run_ranks(1, of_rows, [parity.FLOAT64])[0]
    assert first["small"] == pytest.approx(small, rel=1e-12)
    assert first["b"] == b < first["B"] == parity.BATCH * parity.SEQ
    square, trace = noise_scale.estimates(small, first["norm"] ** 2, b, first["B"])
    assert first["noise/trace"] == pytest.approx(trace, rel=1e-12)
    assert first["noise/gradient_square"] == pytest.approx(square, rel=1e-12)


def test_a_step_that_is_computed_twice_reports_no_earlier_measurement():
    """With debug.replay_interval such a step does not call the object that measures."""
    meter = noise_scale.NoiseScale(lambda *_: None, 2)
    meter.small = 1.0, 1, 4
    assert meter.metrics(0.5, False)
    assert meter.metrics(0.5, False) == {}


ALL_MESHES = MESHES | CONTEXT_MESHES | EXPERT_MESHES
FAST = "fsdp2"
QWEN = parity.EXPERTS["qwen3 experts"]


@pytest.mark.parametrize(
    "name, more",
    [
        (FAST, []),
        *(
            pytest.param(name, more, marks=pytest.mark.slow)
            for name, more in [("fsdp2xtp2", []), ("pp2", []), ("cp2", []), ("ep2xfsdp2", QWEN)]
        ),
    ],
)
def test_every_mesh_measures_the_same(name, more):
    ranks, of_mesh, dp_size = ALL_MESHES[name]
    options = [parity.FLOAT64, *more]
    alone = run_ranks(1, measured, options, parity.BATCH)[0]
    rows = parity.BATCH // dp_size // (2 if "pp" in name else 1)
    seen = run_ranks(ranks, measured, [*options, *of_mesh], rows)
    for found in seen:
        for step, expected in zip(found, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-10)


def test_a_run_logs_it_and_is_otherwise_the_same(tmp_path):
    options = [*tiny_run(tmp_path), "--training.steps=6", "--metrics.interval=3"]
    for name, more in ("without", []), ("with", ["--metrics.noise_scale_interval=2"]):
        done = run_ranks(1, run, as_typed([*options, *more]), tmp_path / name)
        assert done == [(0, "")], done
    without, measuring = lines_of(tmp_path / "without"), lines_of(tmp_path / "with")
    assert [row["loss"] for row in measuring] == [row["loss"] for row in without]
    assert not any(key.startswith("noise/") for row in without for key in row)
    assert all("noise/trace" in row for row in measuring[1:])
