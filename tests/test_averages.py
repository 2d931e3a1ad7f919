"""The average of the weights: its formula, steps that do not count, another decay in mid-run, its
validation, a resume on another mesh, and the checkpoint that is made of it."""

import contextlib
import copy
import json
import threading
from pathlib import Path

import pytest
import torch

import train
from checkpoint import hf, storage, verify
from configs.schema import Optimizer
from tests.ranks import run_ranks
from tests.runs import as_typed, run, tiny_run
from tools import convert
from training import averages, validate
from training.optim import build_optimizer, step_if
from training.optimizers import OPTIMIZERS, materialise

DECAY = 0.8


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_the_weighted_mean_of_the_weights(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    cfg = Optimizer(kind=kind, lr=0.1, average_decay=DECAY, ns_dtype="float64")
    optimizer = build_optimizer(model, [("*", True)], cfg, [("*", True)])
    materialise(optimizer)
    weights, shares = [], []
    for step in range(6):
        decay = DECAY if step < 4 else 0.99  # a run that goes on with another
        for group in optimizer.param_groups:
            group["average_decay"] = decay
        model.weight.grad = torch.randn_like(model.weight)
        before = model.weight.detach().clone()
        counts = torch.tensor(step != 2)
        state = copy.deepcopy(optimizer.state[model.weight])
        step_if(counts, optimizer)
        if counts:
            weights.append(model.weight.detach().clone())
            shares = [decay * share for share in shares] + [1 - decay]
        else:
            assert torch.equal(model.weight, before)
            for key, value in optimizer.state[model.weight].items():
                assert torch.equal(value, state[key]), key
    want = sum(share * weight for share, weight in zip(shares, weights, strict=True)) / sum(shares)
    with averages.in_place(optimizer):
        torch.testing.assert_close(model.weight.detach(), want, rtol=1e-12, atol=0)
    assert torch.equal(model.weight, weights[-1])


def average_of(folder: Path) -> tuple[dict, dict, dict]:
    """Return the weights, their averages and the shares of the newest checkpoint, by name."""
    path = verify.newest(folder)
    manifest = verify.read_manifest(path)
    names = list(manifest["tensors"])
    whole = dict(zip(names, hf.read_whole(path, manifest, names), strict=True))
    weights = {n.removeprefix("model."): t for n, t in whole.items() if n.startswith("model.")}
    ours = {n.removeprefix("optimizer."): t for n, t in whole.items() if n.startswith("optimizer.")}
    sums = {n: ours[f"{n}.average"] for n in weights}
    return weights, sums, {n: ours[f"{n}.average_share"] for n in weights}


def trained(ranks: int, folder: Path, options: list[str]) -> None:
    for code, errors in run_ranks(ranks, run, as_typed(options), folder):
        assert code == 0, errors


@pytest.mark.slow
def test_a_run_validates_it_resumes_it_elsewhere_and_becomes_it(tmp_path):
    """One process, and one that goes on as two ranks of tensor parallelism."""
    options = [
        *tiny_run(tmp_path),
        f"--optimizer.average_decay={DECAY}",
        "--data.validation_fraction=0.2",
        "--validation.interval=4",
        "--validation.steps=1",
        "--checkpoint.interval=4",
        "--training.steps=8",
        "--training.param_dtype=float64",
    ]
    trained(1, tmp_path / "whole", options)
    trained(1, tmp_path / "parted", [*options, "--training.stop_after=4"])
    trained(2, tmp_path / "parted", [*options, "--parallelism.tensor_parallel=2"])
    weights, sums, shares = average_of(tmp_path / "whole")
    others, sums_of_others, _ = average_of(tmp_path / "parted")
    for name, weight in weights.items():
        assert shares[name].item() == pytest.approx(1 - DECAY**8, rel=1e-12)
        torch.testing.assert_close(others[name], weight, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sums_of_others[name], sums[name], rtol=1e-9, atol=1e-12)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if "average/validation_loss" in line]
    assert len(rows) == 2
    assert all(row["average/validation_loss"] != row["validation_loss"] for row in rows)

    made = tmp_path / "made"
    assert convert.main(["average", str(tmp_path / "whole"), str(made)]) == 0
    path = verify.newest(made)
    manifest = verify.read_manifest(path)
    read = hf.read_whole(path, manifest, [f"model.{name}" for name in weights])
    for name, tensor in zip(weights, read, strict=True):
        want = sums[name] / (1 - DECAY**8)
        torch.testing.assert_close(tensor, want.to(tensor.dtype), rtol=1e-12, atol=0)
    trained(
        1, tmp_path / "next", [*options, "--training.steps=3", f"--checkpoint.load_path={made}"]
    )


def scored_after_the_save(options: list[str], folder: Path) -> tuple[int, str]:
    """Run with a stop in the last validation, which then comes while the last save is written: its
    first tensor waits for the averages to be in the place of the weights, in vain."""
    swapped, written = threading.Event(), threading.Event()
    in_place, write = averages.in_place, storage.OneByOne.bytes_of

    def validated(self, step):
        self.left_out.append(validate.run_validation)
        return True

    @contextlib.contextmanager
    def noticed(optimizer):
        with in_place(optimizer):
            swapped.set()
            written.wait(10)
            yield

    def slow(self, name):
        if not written.is_set():
            swapped.wait(0.5)
        data = write(self, name)
        written.set()
        return data

    train.Session.validate = validated
    averages.in_place = noticed
    storage.OneByOne.bytes_of = slow
    return run(options, folder)


def test_a_save_that_is_being_written_has_the_weights(tmp_path):
    """The last scores come after the last save has begun: it must not get the averages."""
    options = [*tiny_run(tmp_path), f"--optimizer.average_decay={DECAY}", "--training.steps=3"]
    options += ["--data.validation_fraction=0.2", "--validation.interval=4", "--validation.steps=1"]
    options += ["--checkpoint.async_save=false"]
    trained(1, tmp_path / "run", options)
    assert run_ranks(1, scored_after_the_save, as_typed(options), tmp_path / "stopped") == [(0, "")]
    weights, _, _ = average_of(tmp_path / "run")
    others, _, _ = average_of(tmp_path / "stopped")
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name


@pytest.mark.slow
def test_the_averages_of_adapters_are_adapters(tmp_path):
    """They keep the base that they belong to, and are merged with it."""
    options = [*tiny_run(tmp_path), "--training.steps=3"]
    base, tuned, made = (tmp_path / name for name in ("base", "tuned", "made"))
    trained(1, base, options)
    adapters = [f"--checkpoint.load_path={base}", "--lora.rank=2", '--lora.targets=["wq"]']
    trained(1, tuned, [*options, *adapters, f"--optimizer.average_decay={DECAY}"])
    assert convert.main(["average", str(tuned), str(made)]) == 0
    facts = verify.read_manifest(verify.newest(made))["facts"]
    assert facts["base"] == verify.read_manifest(verify.newest(tuned))["facts"]["base"]
    assert convert.main(["lora-merge", str(made), str(tmp_path / "merged")]) == 0


def test_a_run_without_averages_is_refused(tmp_path, capsys):
    trained(1, tmp_path / "run", [*tiny_run(tmp_path), "--training.steps=3"])
    assert convert.main(["average", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "train with optimizer.average_decay" in capsys.readouterr().err
