"""Tensor parallelism of MoE layers and of latent attention: every mesh computes what one
process computes."""

import pytest
import torch

import train
from checkpoint.storage import box_of, local
from configs.load import load_config
from parallelisms.mesh import world
from reliability.health import mismatching_replicas
from tests.parity import (
    CONTEXT,
    DEEPSEEK,
    EXECUTION,
    EXPERTS,
    NUMBERS,
    OPTIONS,
    check,
)
from tests.ranks import run_ranks
from tests.runs import EXPERT_MESHES, whole

FACTORS = (
    {"experts": EXPERTS | {"deepseek_v3": [*DEEPSEEK, "--model.mtp_depth=1"]}}
    | {factor: NUMBERS[factor] for factor in ("optimizer", "clipping", "dtype")}
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
    "mesh, experts, more",
    [
        pytest.param("tp2", "deepseek_v3", {"checkpointing": "selective"}, id="tp2"),
        pytest.param(
            "ep2xtp2",
            "gpt_oss",
            {"accumulation": "reduced each time", "checkpointing": "full", "dtype": "float64"},
            id="ep2xtp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ep4 of cp2xtp2",
            "deepseek_v3",
            {"documents": "masked", "labels": "at the beginning"},
            id="ep4 of cp2xtp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mesh_equals_the_plain_model(mesh, experts, more):
    check(f"experts on {mesh}", [settings(experts=experts, **more)], factors=FACTORS)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_sequences_that_are_gathered_again_equal_the_plain_model():
    """Sinks. Latent attention: below."""
    again = ["--activation_checkpoint.gather_again=true"]
    chosen = settings(experts="gpt_oss", checkpointing="selective")
    check("experts on tp2", [chosen], again, factors=FACTORS)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_queries_from_a_narrow_vector_equal_the_plain_model():
    """DeepSeek-V3 itself has such a vector, its debug flavor has none. With sequences that are
    gathered again."""
    chosen = {"optimizer": "sgd", "accumulation": "reduced once", "checkpointing": "selective"}
    combination = settings(experts="deepseek_v3", **chosen)
    more = ["--model.q_rank=23", "--activation_checkpoint.gather_again=true"]
    check("experts on ep2 of tp2", [combination], more, factors=FACTORS)


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
