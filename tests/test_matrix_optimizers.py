"""Optimizers that treat a weight as a matrix: the formulas of their papers in plain loops, each mesh
against one process in float64, and a resume on another mesh."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import train
from configs.load import load_config
from configs.schema import Optimizer
from parallelisms.boxes import shard_of
from tests import parity
from tests.checkpoints import saved_state
from tests.parity import EXPERTS
from tests.ranks import run_ranks
from tests.runs import ADAMW, EXPERT_MESHES, MESHES, as_typed, run, tiny_run
from tests.steps import apart
from tools.plan.repeat import traced
from training import normuon, optimizers, soap
from training.muon import orthogonalised
from training.optim import build_optimizer, step_if
from training.optimizers import materialise

ALL = [("*", True)]
SHAPES = [(6, 10), (10, 6), (3, 6, 9)]
LR, DECAY = 0.03, 0.2
NORMUON = ["--optimizer.kind=normuon", "--optimizer.ns_dtype=float64"]
SOAP = ["--optimizer.kind=soap"]
KINDS = {"normuon": NORMUON, "soap": SOAP}
# An eigenvector of a small gap amplifies rounding.
LIMITS = {"normuon": parity.EXACT, "soap": 1e-6}


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
        self.weights = nn.ParameterList(map(nn.Parameter, shapes))


def trained(kind: str, gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return weights after a step with each of these gradients."""
    model = Matrices()
    cfg = Optimizer(kind=kind, lr=LR, weight_decay=DECAY, ns_dtype="float64")
    optimizer = build_optimizer(model, ALL, cfg, ALL)
    for step in gradients:
        for weight, gradient in zip(model.weights, step, strict=True):
            weight.grad = gradient.clone()
        step_if(torch.tensor(True), optimizer)
    return [weight.detach() for weight in model.weights]


def random_gradients(steps: int) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]


# ------------------------------------------------------------------------------------ formulas


def with_normuon(weight: Tensor, gradients: list[Tensor], beta2: float) -> Tensor:
    """Update a matrix by algorithm 1 of arXiv:2510.05491, row by row, where the norm stays what it
    is before the rows are divided; with Muon's Nesterov momentum and its factor of the rate."""
    rows, columns = weight.shape
    momentum = torch.zeros_like(weight)
    averages = [0.0] * rows
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        (o,) = orthogonalised((0.05 * gradient + 0.95 * momentum)[None])
        divided = torch.empty_like(o)
        for row in range(rows):
            mean = sum(x.item() ** 2 for x in o[row]) / columns
            averages[row] = beta2 * averages[row] + (1 - beta2) * mean
            divided[row] = o[row] / (averages[row] ** 0.5 + 1e-10)
        update = divided * o.norm() / divided.norm()
        factor = 0.2 * max(rows, columns) ** 0.5
        weight = (1 - LR * DECAY) * weight - LR * factor * update
    return weight


@pytest.mark.parametrize("beta2", [0.95, 0.5])
def test_normuon_is_the_paper_s(beta2, monkeypatch):
    monkeypatch.setattr(optimizers, "NORMUON_BETA2", beta2)
    gradients = random_gradients(4)
    seen = trained("normuon", gradients)
    for number, found in enumerate(seen):
        weight = Matrices().weights[number].detach()
        of_weight = [step[number] for step in gradients]
        if weight.ndim == 2:
            expected = with_normuon(weight, of_weight, beta2)
        else:  # a stack of experts: each by itself
            each = [with_normuon(w, [g[x] for g in of_weight], beta2) for x, w in enumerate(weight)]
            expected = torch.stack(each)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(seen[0], trained("muon", gradients)[0], rtol=1e-3)


def with_soap(weight: Tensor, gradients: list[Tensor], frequency: int, max_dim: int) -> Tensor:
    """Update a matrix by algorithm 3 of arXiv:2409.11321 as its authors' code orders it: the first
    gradient makes the bases, a basis changes after the update, and the second moment is sorted with
    it."""
    beta1, beta2, epsilon = 0.9, 0.95, 1e-8
    average, squares = torch.zeros_like(weight), torch.zeros_like(weight)
    factors = [torch.zeros(size, size, dtype=weight.dtype) for size in weight.shape]
    bases: list[Tensor] = []
    for step, gradient in enumerate(gradients):
        if step:
            left, right = bases
            average = beta1 * average + (1 - beta1) * gradient
            squares = beta2 * squares + (1 - beta2) * (left.T @ gradient @ right) ** 2
            corrected = left.T @ average @ right / (1 - beta1**step)
            root = ((squares / (1 - beta2**step)) ** 0.5) + epsilon / (1 - beta2**step) ** 0.5
            weight = (1 - LR * DECAY) * weight - LR * left @ (corrected / root) @ right.T
        products = [gradient @ gradient.T, gradient.T @ gradient]
        for factor, product in zip(factors, products, strict=True):
            factor.mul_(beta2).add_((1 - beta2) * product)
        if step == 0:
            bases = [first_basis(factor, max_dim) for factor in factors]
        elif step % frequency == 0:
            for axis, factor in enumerate(factors):
                if len(factor) <= max_dim:
                    vectors = bases[axis]
                    order = (vectors.T @ factor @ vectors).diagonal().argsort(descending=True)
                    squares = squares.index_select(axis, order)
                    ridge = soap.RIDGE * factor.diagonal().mean() * torch.eye(len(factor))
                    bases[axis] = torch.linalg.qr((factor + ridge) @ vectors[:, order]).Q
    return weight


def first_basis(factor: Tensor, max_dim: int) -> Tensor:
    size = len(factor)
    if size > max_dim:
        return torch.eye(size, dtype=factor.dtype)
    ridge = torch.linspace(soap.RIDGE, 0, size, dtype=factor.dtype) * factor.diagonal().mean()
    return torch.linalg.eigh(factor + ridge.diag()).eigenvectors.flip(1)


@pytest.mark.parametrize("frequency, max_dim", [(2, 10000), (1, 8)])
def test_soap_is_the_paper_s(frequency, max_dim, monkeypatch):
    monkeypatch.setattr(optimizers, "SOAP_MAX_DIM", max_dim)
    monkeypatch.setattr(optimizers, "SOAP_FREQUENCY", frequency)
    gradients = random_gradients(6)
    seen = trained("soap", gradients)
    for number, found in enumerate(seen):
        weight = Matrices().weights[number].detach()
        of_weight = [step[number] for step in gradients]
        if weight.ndim == 2:
            expected = with_soap(weight, of_weight, frequency, max_dim)
        else:
            each = [
                with_soap(w, [g[x] for g in of_weight], frequency, max_dim)
                for x, w in enumerate(weight)
            ]
            expected = torch.stack(each)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------------------------------ any mesh

FEW_EXPERTS = [*EXPERTS["qwen3 experts"], "--model.n_experts=2", "--model.experts_per_token=1"]
RUNS = {  # name: (mesh, further options)
    "tp2": ("tp2", []),  # columns of wo and w2 are split
    "fsdp2xtp2": ("fsdp2xtp2", []),
    "hsdp2x2": ("hsdp2x2", []),
    "pp2": ("pp2", []),
    "ep2xfsdp2": ("ep2xfsdp2", [*FEW_EXPERTS, "--model.expert_dim=12"]),  # rows of experts
    "experts on tp2": ("experts on tp2", EXPERTS["qwen3 experts"]),
}
FAST = "tp2"


def often(fn: Callable, *args: Any) -> Any:
    """Run fn(*args) in a process whose SOAP decomposes its factors at every step."""
    optimizers.SOAP_FREQUENCY = 1
    return fn(*args)


@cache
def oracle_of(options: tuple[str, ...]) -> dict:
    return run_ranks(1, often, parity.clear_trajectories, [list(options)])[0][0]


def problems_on(kind: str, name: str, fn=parity.trajectory) -> list[str]:
    mesh, more = RUNS[name]
    ranks, of_mesh, dp_size = (MESHES | EXPERT_MESHES)[mesh]
    of_model = [*ADAMW, *KINDS[kind], parity.FLOAT64, *more]
    of_numbers = [o for o in of_mesh if o.startswith(parity.CHANGE_THE_MODEL)]
    oracle = oracle_of((*of_model, *of_numbers))
    options = [*of_model, *of_mesh, parity.seed_of(oracle)]
    results = run_ranks(ranks, often, fn, options, dp_size)
    return parity.compare(name, parity.whole_model(results), oracle, LIMITS[kind])


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in RUNS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_updates_as_one_process(kind, name):
    assert not problems_on(kind, name)


def with_parts_for_the_whole(run: list[str], dp_size: int) -> dict:
    """Take the sums of a rank's parts for those of whole rows and matrices."""
    normuon.sum_over_parts = lambda weights, sums, axis: None
    return parity.trajectory(run, dp_size)


@pytest.mark.slow
def test_negative_control_of_the_comparison():
    problems = problems_on("normuon", FAST, with_parts_for_the_whole)
    assert any("weights of layers" in problem for problem in problems), problems


# ---------------------------------------------------------------------------- checkpoints, plan


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_on_another_mesh(kind, tmp_path):
    """Begun by two ranks that shard, and gone on with by two that split."""
    options = [
        *tiny_run(tmp_path),
        *KINDS[kind],
        "--training.steps=8",
        "--checkpoint.interval=4",
        parity.FLOAT64,
    ]
    legs = [
        (1, "whole", []),
        (2, "parted", ["--training.stop_after=4"]),
        (2, "parted", ["--parallelism.tensor_parallel=2"]),
    ]
    for ranks, name, more in legs:
        done = run_ranks(ranks, often, run, as_typed([*options, *more]), tmp_path / name)
        assert all(code in (0, 75) for code, _ in done), done
    whole, parted = saved_state(tmp_path / "whole"), saved_state(tmp_path / "parted")
    assert whole.keys() == parted.keys()
    for name, value in whole.items():
        if name.endswith((".left", ".right")):  # a vector of the null space may be another
            continue
        torch.testing.assert_close(parted[name], value, rtol=1e-6, atol=1e-8, msg=name)


def planned(options: list[str]) -> int:
    """Return the plan's bytes of the optimizer's state on rank 0 of two."""
    return traced(load_config(options, 2, 2), 2, 2, on_gpu=True).before()["optimizer state"]


def kept(options: list[str]) -> int:
    """Return the bytes that this rank really keeps."""
    job = train.build(load_config(options, 2, 2))
    materialise(job.optimizer)
    tensors = [t for of_weight in job.optimizer.state.values() for t in of_weight.values()]
    return sum(shard_of(t).numel() * t.element_size() for t in tensors)


@pytest.mark.cap(200)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_state(kind):
    options = [*parity.OPTIONS, *KINDS[kind], "--training.local_batch_size=12"]
    options = [*options, "--model.n_layers=2"]
    assert apart(planned, options) == run_ranks(2, kept, options)[0]
