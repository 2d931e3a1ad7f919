"""Auxiliary terms: a number that a block or the loss reports in addition to the loss is trained on
and logged with the same value on every mesh, however the forward is run."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models.terms
import train
from configs.load import load_config
from models import layers
from models.terms import AuxiliaryTerms, InjectGradient, Term, part_of
from tests import parity
from tests.parity import DEEPSEEK, DOCUMENTS, EQUAL, TWO_MICROBATCHES
from tests.ranks import run_ranks
from tests.runs import ADAMW, CONTEXT_MESHES, MESHES, run, tiny_run
from training.experts import ExpertLoad
from training.loss import linear_cross_entropy
from training.loss_passes import plain_cross_entropy
from training.terms import TermLog
from training.z_loss import ZLoss

# Large enough to matter in a model of random weights: dropping either term changes the norm.
Z_LOSS = 0.01
ACTIVATIONS = 10.0
ON = [*ADAMW, f"--training.z_loss={Z_LOSS}"]
PLAIN_FORWARD = layers.Block.forward
FULL = "--activation_checkpoint.mode=full"
NAMES = ["activation_square/layer-0", "activation_square/layer-1", "activation_square/layer-2"]


def measured(block: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Term]]:
    """A block's forward that keeps its activations small: all that a new term takes."""
    h = PLAIN_FORWARD(block, *inputs)
    squares = h.float().square().mean(-1)  # [B, T]
    return h, {"activation_square": Term(squares.sum(), weight=ACTIVATIONS)}


def seen_of(options: list[str], dp_size: int, change: Callable | None = None) -> dict:
    """Two steps of this rank as tests/parity.py sees them, and what was logged of their terms. All
    blocks report; `change` puts a mistake in."""
    layers.Block.forward = measured
    if change:
        change()
    real, logs = train.train_step, []

    def noting(job: train.Job, batch: dict[str, Tensor]) -> train.StepResult:
        if not logs:
            has_experts = bool(getattr(job.args, "n_experts", 0))
            logs.append(TermLog(job.mesh))
            logs.append(ExpertLoad(job.mesh, job.args) if has_experts else None)
            logs.append(job.model)
        result = real(job, batch)
        logs[0].add(result.terms, result.skipped)
        if logs[1]:
            logs[1].add(result.terms)
        return result

    train.train_step = noting
    seen = parity.trajectory([*options, "--training.steps=2"], dp_size)
    log, load, model = logs
    seen["terms"] = log.line()
    if load:
        seen["terms"] |= load.report(2, model)[0]
    return seen


def one_process(options: list[str]) -> dict:
    return run_ranks(1, seen_of, options, 1)[0]


@pytest.fixture(scope="module")
def oracle() -> dict:
    return one_process(ON)


def on_mesh(mesh: str, options: list[str], change: Callable | None = None) -> dict:
    """Join the findings of all ranks; each must have logged the same."""
    ranks, more, dp_size = (MESHES | CONTEXT_MESHES)[mesh]
    results = run_ranks(ranks, seen_of, [*options, *more], dp_size, change)
    assert all(result["terms"] == results[0]["terms"] for result in results)
    grad = {name: x for result in results for name, x in result["grad"].items()}
    return results[0] | {"grad": grad}


def differences(seen: dict, oracle: dict, limit: float = EQUAL) -> list[str]:
    """List differences above rounding: of the first step the loss, the norm and gradients, of both
    the loss and the terms."""
    pairs = {"norm": (seen["norm"][0], oracle["norm"][0])}
    for step, losses in enumerate(zip(seen["loss"], oracle["loss"], strict=True)):
        pairs[f"loss {step}"] = losses
    assert seen["terms"].keys() == oracle["terms"].keys()
    for name, value in oracle["terms"].items():
        pairs[name] = seen["terms"][name], value
    errors = {name: abs(one - other) / (abs(other) or 1) for name, (one, other) in pairs.items()}
    assert seen["grad"].keys() == oracle["grad"].keys()
    for name, want in oracle["grad"].items():
        errors[f"gradient of {name}"] = np.linalg.norm(seen["grad"][name] - want) / np.linalg.norm(
            want
        )
    return [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= limit]


# ------------------------------------------------------------------------------------- the numbers


def against_autograd() -> None:
    """A step on one process, and autograd on whole logits."""
    layers.Block.forward = measured
    base = [*parity.OPTIONS, *ON, "--training.local_batch_size=6", "--training.max_norm=0"]
    job = train.build(load_config(base))
    model = job.model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, parity.VOCAB, (4, 6, parity.SEQ + 1), generator=generator)
    batch = {"tokens": tokens[..., :-1].contiguous(), "labels": tokens[..., 1:].contiguous()}
    batch["labels"][:, 0, 5:] = -100
    counts = batch["labels"] != -100

    inputs = batch["tokens"].flatten(0, 1), torch.arange(parity.SEQ)
    squares = []
    for block in model.layers.values():
        block.register_forward_hook(lambda *call: squares.append(call[-1][1]["activation_square"]))
    logits = model(*inputs)
    of_blocks = torch.stack([term.value for term in squares]).sum()
    every = counts.numel()  # terms of blocks are means over all tokens
    squares.clear()
    cross_entropy = plain_cross_entropy(logits, batch["labels"].flatten(0, 1))
    log_z = logits.logsumexp(-1)[counts.flatten(0, 1)]
    z_loss = Z_LOSS * log_z.square().sum()
    total = (cross_entropy + z_loss) / counts.sum() + ACTIVATIONS * of_blocks / every
    weights = dict(model.named_parameters())
    want = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    step = train.gradients(job, batch)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=0)
    close(step.loss, (cross_entropy / counts.sum()).detach())
    norm = torch.stack([weight.grad.norm() for weight in weights.values()]).norm()
    close(norm, torch.stack([gradient.norm() for gradient in want.values()]).norm())
    for name, weight in weights.items():
        assert (weight.grad - want[name]).norm() < 1e-5 * want[name].norm(), name
    log = TermLog(job.mesh)
    log.add(step.terms, skipped=False)
    logged = log.line()
    assert sorted(logged) == [*NAMES, "z_loss"]
    close(torch.tensor(logged["z_loss"]).float(), (z_loss / counts.sum()).detach())
    of_layers = sum(logged[name] for name in NAMES)
    close(torch.tensor(of_layers).float(), (of_blocks / every).detach())


def test_a_step_trains_on_terms_as_autograd_does():
    """The loss is the cross-entropy alone, the gradient is that of all, and the terms are means."""
    run_ranks(1, against_autograd)


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_the_z_loss_of_pieces_is_that_of_whole_logits(chunk):
    torch.manual_seed(0)
    h, w = torch.randn(3, 37, 24, requires_grad=True), torch.randn(1009, 24, requires_grad=True)
    labels = torch.randint(0, 1009, (3, 37))
    labels[0, 5:19] = -100
    one = torch.ones(())
    reported = AuxiliaryTerms(one, one)
    loss = linear_cross_entropy(h, w, labels, chunk, z_loss=ZLoss(Z_LOSS, reported))
    grads = torch.autograd.grad(loss, (h, w))
    logits = h @ w.t()
    want = plain_cross_entropy(logits, labels)
    z_loss = Z_LOSS * logits.logsumexp(-1)[labels != -100].square().sum()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(reported.sums["z_loss"][None].float(), z_loss.detach())
    want_grads = torch.autograd.grad(want + z_loss, (h, w))
    for got, expected in zip(grads, want_grads, strict=True):
        assert (got - expected).norm() / expected.norm() < 1e-6


# -------------------------------------------------------------------------------------- the meshes

EACH_TIME = [TWO_MICROBATCHES, "--parallelism.accumulate_gradients=sharded"]


@pytest.mark.parametrize(
    "mesh, more",
    [
        ("fsdp2", EACH_TIME),
        *(
            pytest.param(mesh, more, marks=pytest.mark.slow)
            for mesh, more in (
                ("tp2", [FULL]),
                ("pp2", [TWO_MICROBATCHES, "--activation_checkpoint.mode=selective"]),
                ("cp2", []),
            )
        ),
    ],
    ids=["fsdp2", "tp2", "pp2", "cp2"],
)
def test_terms_on_a_mesh_are_those_of_one_process(mesh, more, oracle):
    """In a pipeline the stages report terms of different names."""
    assert sorted(oracle["terms"]) == [*NAMES, "z_loss"]
    assert not differences(on_mesh(mesh, [*ON, *more]), oracle)


@pytest.mark.slow
def test_terms_of_a_split_backward():
    numbers = [*ON, "--model.n_layers=5", DOCUMENTS]
    more = ["--parallelism.pipeline_schedule=zbv", FULL]
    assert not differences(on_mesh("pp2", [*numbers, *more]), one_process(numbers))


@pytest.mark.slow
def test_a_stage_without_experts_and_one_with_them_report_together():
    """The first layer of DeepSeek is dense, and is a separate stage here."""
    numbers = [*DEEPSEEK, *ON, "--run.seed=1"]
    stages = ["--parallelism.pipeline_layers=[1,2]", TWO_MICROBATCHES, FULL]
    seen = on_mesh("pp2", [*numbers, *stages])
    assert {"router_entropy/layer-2", "balance_loss/layer-1", "z_loss", NAMES[0]} < set(
        seen["terms"]
    )
    assert not differences(seen, one_process(numbers))


def reporting_attention(block: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Term]]:
    """A block's forward that reports what a rank of tensor parallelism has in three ways: a part as
    a DTensor, the whole as a DTensor, and a mean over its own heads."""
    noted = {}
    attend = layers.Attention.forward

    def attention(module: nn.Module, x: Tensor, *rest: Tensor) -> Tensor:
        heads = module.wq(x)
        noted["gathered"] = Term(x.square().mean(-1).sum(), ACTIVATIONS)
        noted["heads"] = Term(heads.square().mean(-1).sum(), ACTIVATIONS, average_over_tp=True)
        return attend(module, x, *rest)

    layers.Attention.forward = attention
    h = PLAIN_FORWARD(block, *inputs)
    layers.Attention.forward = attend
    noted["normed"] = Term(block.attention_norm(h).abs().mean(-1).sum(), ACTIVATIONS)
    return h, noted


def report_attention() -> None:
    layers.Block.forward = reporting_attention


def report_attention_as_parts() -> None:
    """The mistake: what each rank has of all heads is added."""
    report_attention()
    models.terms.part_of = lambda term, tp: part_of(term, 1)


@pytest.mark.slow
def test_what_a_tp_group_has_whole_counts_once():
    """In what is logged, and in the gradient."""
    options = [*ON, "--training.param_dtype=float64"]
    want = run_ranks(1, seen_of, options, 1, report_attention)[0]
    names = [f"{name}/layer-{i}" for name in ("gathered", "heads", "normed") for i in range(3)]
    assert sorted(want["terms"]) == [*names, "z_loss"]
    assert not differences(on_mesh("tp2", options, report_attention), want, 1e-12)
    wrong = differences(on_mesh("tp2", options, report_attention_as_parts), want, 1e-12)
    assert any(line.startswith("heads/layer-2 by ") for line in wrong), wrong
    assert any(line.startswith("norm by") for line in wrong), wrong


# Mistakes, each of which a comparison must see. ---------------------------------------------------


def gradient_dropped() -> None:
    """A term that is logged, and not trained on."""

    def backward(ctx, grad: Tensor) -> tuple:
        return grad, None, None, None

    InjectGradient.backward = staticmethod(backward)


def counted_on_every_rank() -> None:
    """The ranks of tensor parallelism have the same logits, and each reports all of the term."""
    train.AuxiliaryTerms = lambda *counts: AuxiliaryTerms(*counts[:-1])


def divided_by_own_tokens() -> None:
    """The mean over each rank's own tokens, which are not equally many."""
    real = train.Microbatches

    def microbatches(model: nn.Module, batch: dict[str, Tensor], *rest: object) -> object:
        own = (batch["labels"] != -100).sum()
        train.AuxiliaryTerms = lambda scale, *counts: AuxiliaryTerms(1 / own, *counts)
        return real(model, batch, *rest)

    train.Microbatches = microbatches


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, change, found",
    [
        ("fsdp2", gradient_dropped, "norm"),
        ("tp2", counted_on_every_rank, "z_loss"),
        ("fsdp2", divided_by_own_tokens, "norm"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_seen(mesh, change, found, oracle):
    problems = differences(on_mesh(mesh, ON, change), oracle)
    assert any(problem.startswith(found) for problem in problems), problems


# ------------------------------------------------------------------------------------- what is said


def alone() -> SimpleNamespace:
    """Return a mesh of one rank that counts its collectives."""
    mesh = SimpleNamespace(device=torch.device("cpu"), calls=[])

    def gather(names: list[str]) -> list:
        mesh.calls.append("gather")
        return [names]

    def sum_over_ranks(x: Tensor) -> Tensor:
        mesh.calls.append("sum")
        return x

    mesh.gather, mesh.sum_over_ranks = gather, sum_over_ranks
    return mesh


def reporting(tokens: int = 4, **values: float) -> AuxiliaryTerms:
    """Return the terms of a step."""
    step = AuxiliaryTerms(torch.ones(()), torch.tensor(tokens))
    for name, value in values.items():
        step.report(name, torch.tensor(value))
    return step


def test_a_line_has_the_mean_of_the_steps_that_changed_weights():
    log = TermLog(alone())
    log.add(reporting(tokens=4, entropy=8.0), skipped=False)
    log.add(reporting(tokens=8, entropy=8.0), skipped=False)
    log.add(reporting(tokens=8, entropy=float("nan")), skipped=True)
    assert log.line() == {"entropy": 1.5}
    log.add(reporting(entropy=float("nan")), skipped=True)
    assert log.line() == {}, "no step counted"
    log.add(reporting(entropy=4.0), skipped=False)
    assert log.line() == {"entropy": 1.0}


def test_a_run_without_terms_asks_for_names_once_and_sums_nothing():
    mesh = alone()
    log = TermLog(mesh)
    for _ in range(3):
        log.add(reporting(), skipped=False)
        assert log.line() == {}
    assert mesh.calls == ["gather"]


def test_a_name_that_turns_up_late_is_refused_by_name():
    """Other ranks would not sum it."""
    log = TermLog(alone())
    log.add(reporting(first=1.0), skipped=False)
    log.line()
    with pytest.raises(
        ValueError, match="auxiliary term second was not reported in the first step"
    ):
        log.add(reporting(first=1.0, second=1.0), skipped=False)


def test_a_term_that_is_no_scalar_is_refused_by_name():
    step = reporting()
    step.report("norms", torch.ones(3), 2)
    with pytest.raises(ValueError, match=r"norms/layer-2 has the shape \[3\]: report a scalar"):
        TermLog(alone()).add(step, skipped=False)


def logged(options: list[str], folder) -> tuple[int, str]:
    layers.Block.forward = measured
    return run(options, folder)


def test_a_run_logs_terms_by_name(tmp_path):
    options = [*tiny_run(tmp_path), "--training.steps=3", f"--training.z_loss={Z_LOSS}"]
    folder = tmp_path / "run"
    folder.mkdir()
    mesh = ["--parallelism.pipeline_parallel=2", "--debug.replay_interval=2", "--run.device=cpu"]
    assert run_ranks(2, logged, [*options, *mesh], folder) == [(0, "")] * 2
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in of_steps] == [1, 2, 3]
    for line in of_steps:
        assert {*NAMES[:2], "z_loss"} < line.keys()
        # Z of 263 logits near 0 is near 263
        assert line["z_loss"] == pytest.approx(Z_LOSS * np.log(263) ** 2, rel=0.2)
