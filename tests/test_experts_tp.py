"""Tensor parallelism of MoE layers and of latent attention: every mesh computes what one
process computes."""

from unittest import mock

import pytest
import torch

import train
from checkpoint.storage import box_of, local
from configs.load import load_config
from parallelisms import ep
from parallelisms.mesh import Mesh, world
from reliability.health import mismatching_replicas
from tests.parity import (
    CONTEXT,
    DEEPSEEK,
    EXECUTION,
    EXPERTS,
    NARROW_QUERIES,
    NUMBERS,
    OPTIONS,
    check,
    compare,
    plain,
    seed_of,
    trajectory,
)
from tests.ranks import run_ranks
from tests.runs import ADAMW, COMPILED, EXPERT_MESHES, whole

FACTORS = (
    {"experts": EXPERTS, "optimizer": NUMBERS["optimizer"], "clipping": NUMBERS["clipping"]}
    | EXECUTION
    | CONTEXT
)


def settings(**chosen: str) -> dict[str, str]:
    """Return a combination: the first setting of every factor, except for these."""
    return (
        {factor: next(iter(table)) for factor, table in FACTORS.items()}
        | {"clipping": "in force"}
        | chosen
    )


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh, models, more",
    [
        pytest.param("tp2", ["deepseek_v3"], {"checkpointing": "selective"}, id="tp2"),
        pytest.param(
            "tp2",
            [name for name in EXPERTS if name != "deepseek_v3"],
            {"checkpointing": "selective"},
            id="tp2, others",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ep2xtp2",
            ["gpt_oss"],
            {"accumulation": "reduced each time", "checkpointing": "full"},
            id="ep2xtp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hsdp2xtp2",
            ["qwen3 experts"],
            {"accumulation": "reduced once", "optimizer": "sgd"},
            id="hsdp2xtp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ep4 of cp2xtp2",
            ["deepseek_v3", "gpt_oss"],
            {"documents": "masked", "labels": "at the beginning"},
            id="ep4 of cp2xtp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mesh_equals_the_plain_model(mesh, models, more):
    """Covers every model with experts where tensor parallelism is alone; on larger meshes those
    with further parts to split: shared experts and latent attention, biases and sinks."""
    check(
        f"experts on {mesh}",
        [settings(experts=experts, **more) for experts in models],
        factors=FACTORS,
    )


@pytest.mark.slow
@pytest.mark.cap(300)
def test_sequences_that_are_gathered_again_equal_the_plain_model():
    """Latent attention, and sinks."""
    again = ["--activation_checkpoint.gather_again=true"]
    chosen = [
        settings(experts=experts, checkpointing="selective")
        for experts in ("deepseek_v3", "gpt_oss")
    ]
    check("experts on tp2", chosen, again, factors=FACTORS)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_queries_from_a_narrow_vector_equal_the_plain_model():
    """DeepSeek-V3 itself has such a vector, its debug flavor has none. Compiled."""
    combination = settings(experts="deepseek_v3", optimizer="sgd", accumulation="reduced once")
    check("experts on ep2 of tp2", [combination], [*COMPILED, NARROW_QUERIES], factors=FACTORS)


def boxes_and_replicas(options: list[str]) -> tuple[list[str], list[str]]:
    """Return the parameters of which this rank does not hold the box that a checkpoint takes from
    it, and the replicas that differ."""
    cfg = load_config([*options, "--training.local_batch_size=1"], world().size, world().local_size)
    job = train.build(cfg)
    wrong = []
    for name, weight in job.model.named_parameters():
        start, shape = box_of(name, weight)
        part = whole(weight)[
            tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))
        ]
        if not torch.equal(part, local(weight)):
            wrong.append(name)
    return wrong, mismatching_replicas(job.model, job.optimizer, job.mesh, step=0)


def test_checkpoints_take_the_right_boxes_and_replicas_are_equal():
    """The ranks of a tp group have different parts of the experts: that is no replica that differs."""
    ranks, options, _ = EXPERT_MESHES["experts on ep2xtp2"]
    base = [
        option
        for option in OPTIONS
        if not option.startswith(("--model.n_kv_heads", "--model.head_dim"))
    ]
    assert run_ranks(ranks, boxes_and_replicas, [*base, *DEEPSEEK, *options]) == [([], [])] * ranks


def without_factor(options: list[str], dp_size: int) -> dict:
    """The mistake: the gradient of experts is scaled for expert parallelism alone, and not for
    tensor parallelism."""
    real = ep.distribute

    def halved(experts: torch.nn.Module, mesh: Mesh) -> None:
        real(experts, mesh)
        experts.gradient_factor /= 2

    with mock.patch.object(ep, "distribute", halved):
        return trajectory(options, dp_size)


@pytest.mark.slow
def test_negative_control_experts_averaged_over_too_many_ranks():
    ranks, options, dp_size = EXPERT_MESHES["experts on tp2"]
    options = [*EXPERTS["qwen3 experts"], *options]
    oracle = plain(*options)
    seen = run_ranks(ranks, without_factor, [*ADAMW, *options, seed_of(oracle)], dp_size)[0]
    problems = compare("tp2", seen, oracle)
    assert any(
        "grad of layers.0.feed_forward.experts.w1 off by 5.0e-01" in problem for problem in problems
    )
    assert not any("grad of layers.2.feed_forward.router" in problem for problem in problems)
