"""AdamW's averages in bfloat16: their rounding keeps the mean, and is the same on every mesh and
after a resume."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import train
from checkpoint import state
from configs.load import load_config
from configs.schema import InputError, Optimizer
from models import MODELS
from tests import checkpoints, parity
from tests.checkpoints import do_steps
from tests.parity import FLOAT64
from tests.ranks import run_ranks
from tests.runs import whole
from tests.steps import apart, assert_same_step, real_step
from tools.plan.repeat import traced
from training import narrow_adamw
from training.metrics import state_of_training
from training.narrow_adamw import rounded
from training.optim import build_optimizer, step_if
from training.optimizer_check import wrong_rows

NARROW = "--optimizer.moment_dtype=bfloat16"
ALL = [("*", True)]

# ----------------------------------------------------------------------------------- rounding


def test_rounding_keeps_the_mean():
    """Over all values of its 16 random bits, exactly; it goes to the two nearest bfloat16 alone, and
    leaves what is one."""
    bits = torch.arange(1 << 16) - (1 << 40)  # higher bits do not matter
    for number in (1.0, 1 + 2**-20, 1.3, -0.7, 3e-20, -6.02e23):
        x = torch.tensor(number).expand(len(bits))
        seen = rounded(x, bits).double()
        assert torch.equal(seen.bfloat16().double(), seen)
        assert seen.mean() == x[0].double()
        is_one = x[0].bfloat16() == x[0]
        assert len(seen.unique()) == (1 if is_one else 2)
    assert torch.equal(rounded(torch.zeros(3), bits[-3:]), torch.zeros(3))


def mean_square_after(steps: int, beta2: float) -> float:
    """Return the mean of 4,096 averages of squares that were 1, after gradients have become 0.1."""
    model = nn.Linear(64, 64, bias=False)
    cfg = Optimizer(moment_dtype="bfloat16", betas=(0.9, beta2))
    optimizer = build_optimizer(model, ALL, cfg)
    model.weight.grad = torch.zeros(64, 64)
    optimizer.step()
    kept = optimizer.state[model.weight]
    kept["exp_avg_sq"].fill_(1.0)
    model.weight.grad.fill_(0.1)
    for _ in range(steps):
        optimizer.step()
    return kept["exp_avg_sq"].float().mean().item()


def to_nearest(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round without chance, as `narrow_adamw.rounded` does not."""
    return x


def test_the_average_of_squares_follows_gradients_that_shrink(monkeypatch):
    expected = 0.01 + 0.99 * 0.999**1000
    assert mean_square_after(1000, 0.999) == pytest.approx(expected, rel=0.01)
    monkeypatch.setattr(narrow_adamw, "rounded", to_nearest)
    assert mean_square_after(1000, 0.999) == 1.0, "the control: the nearest bfloat16 stalls"


def test_a_step_differs_from_float32s_by_rounding_alone():
    """The first step bit by bit: what it adds up is rounded for storage alone."""
    weights = {}
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = nn.Linear(33, 65)
        optimizer = build_optimizer(model, ALL, Optimizer(moment_dtype=dtype, lr=0.1))
        assert not wrong_rows(optimizer)
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.randn(param.shape)
            optimizer.step()
            weights.setdefault(dtype, []).append(model.weight.detach().clone())
    first, second = zip(*weights.values(), strict=True)
    assert torch.equal(*first)
    far = (second[0] - second[1]).abs().max()
    assert 0 < far < 0.1 * 2**-6


def test_a_step_that_does_not_count_changes_nothing():
    model = nn.Linear(5, 7)
    optimizer = build_optimizer(model, ALL, Optimizer(moment_dtype="bfloat16"))
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    step_if(torch.tensor(True), optimizer)

    def everything() -> list[torch.Tensor]:
        kept = [t for param in model.parameters() for t in optimizer.state[param].values()]
        return [t.detach().clone() for t in (*model.parameters(), *kept)]

    before = everything()
    model.weight.grad[0, 0] = math.nan
    step_if(torch.tensor(False), optimizer)
    assert len(before) == 2 + 6
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))


# ---------------------------------------------------------------------------------- checkpoints


def config(*more: str):
    """In float64, because fused AdamW rounds otherwise at the end of a shard."""
    run = [*checkpoints.MODEL, FLOAT64, "--optimizer.lr=0.01", *more]
    return load_config(run, parity.world().size, parity.world().local_size)


def saved_or_resumed(folder: Path, kind: str, *more: str) -> dict[str, np.ndarray] | str:
    """Two steps, saved, and two more; where there is a checkpoint, these two alone. The state at the
    end, or why it was refused."""
    job = train.build(config(f"--optimizer.moment_dtype={kind}", *more))
    manager = checkpoints.open_manager(job, folder)
    try:
        progress = manager.load(job.model, job.optimizer)
    except InputError as error:
        return str(error)
    if progress is None:
        do_steps(job, 2)
        manager.save(2, job.model, job.optimizer, {"step": 2})
    do_steps(job, 2)
    manager.close()
    live = state.tensors(job.model, job.optimizer)
    return {n: whole(t).double().numpy() for n, t in live.items() if not n.startswith("rng.")}


def forgetful(folder: Path, kind: str) -> dict[str, np.ndarray] | str:
    """Other random bits after a resume, as of a generator that is not saved."""
    real = narrow_adamw.key_of
    narrow_adamw.key_of = lambda name: real(name + "'")
    return saved_or_resumed(folder, kind)


@pytest.mark.slow
def test_a_resumed_run_goes_on_bitwise_on_any_mesh(tmp_path):
    """Gradients are the same on every mesh, so the averages are, too, bit by bit."""
    folder = tmp_path / "c"
    expected = run_ranks(2, saved_or_resumed, folder, "bfloat16")[0]
    averages = [name for name in expected if ".exp_avg" in name]
    assert averages and any(expected[name].any() for name in averages)
    tp = "--parallelism.tensor_parallel=2"
    seen = {
        "the same": run_ranks(2, saved_or_resumed, folder, "bfloat16")[0],
        "one": run_ranks(1, saved_or_resumed, folder, "bfloat16")[0],
        "tp2": run_ranks(2, saved_or_resumed, folder, "bfloat16", tp)[0],
    }
    for mesh, found in seen.items():
        assert expected.keys() == found.keys()
        exact = expected if mesh == "the same" else averages
        assert not [n for n in exact if not np.array_equal(expected[n], found[n])], mesh
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)
    control = run_ranks(1, forgetful, folder, "bfloat16")[0]
    assert any(not np.array_equal(expected[name], control[name]) for name in averages)


def test_a_checkpoint_of_other_averages_is_refused_by_the_options_name(tmp_path):
    run_ranks(1, saved_or_resumed, tmp_path, "bfloat16")
    said = run_ranks(1, saved_or_resumed, tmp_path, "float32")[0]
    assert "exp_avg has type BF16 there and" in said
    assert "here (optimizer.moment_dtype)" in said


# ----------------------------------------------------------------------------- what is counted

PLANNED = "--model.n_layers=2 --training.seq_len=128 --training.global_batch_size=4".split()
PLANNED += ["--training.param_dtype=bfloat16", "--training.local_batch_size=2"]


def planned(*more: str):
    return load_config([*PLANNED, *more], 2, 2)


def really(*more: str) -> tuple:
    torch.set_num_threads(1)
    return real_step(planned(*more))


@pytest.mark.slow
@pytest.mark.cap(200)
def test_the_plan_has_the_memory_of_a_real_step():
    outcomes = run_ranks(2, really, NARROW)
    narrow = apart(traced, planned(NARROW), 2, 2, False)
    assert_same_step(narrow, outcomes)
    wide = apart(traced, planned(), 2, 2, False)
    kept = [step.before()["optimizer state"] for step in (wide, narrow)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=1e-3)


def test_the_summary_counts_bytes():
    family = MODELS["llama"]
    model = family.build(family.Args(**family.numbers.flavors["debug"]))
    for dtype, size in (("float32", 16), ("bfloat16", 12)):
        optimizer = build_optimizer(model, ALL, Optimizer(moment_dtype=dtype))
        shown, _, of_a_number = state_of_training(optimizer)
        assert (shown, of_a_number) == ("2", size)
