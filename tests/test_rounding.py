"""Models that amplify rounding: a correct mesh passes the parity check, and a wrong one fails."""

from collections.abc import Callable

import pytest
import torch

import train
from models import layers
from tests import parity
from tests.parity import EQUAL, apart, compare, trajectory
from tests.ranks import run_ranks
from tests.runs import MESHES

RANKS, MESH, DP_SIZE = MESHES["fsdp2"]
# the last one counts: of two options the plain model's are 0.01 and three steps
LARGE_STEPS = ["--optimizer.lr=0.03", "--training.steps=5"]


def normalised_outputs(
    block: torch.nn.Module, x: torch.Tensor, cos, sin, documents=None
) -> torch.Tensor:
    """A block that normalises what attention and the feed-forward layer return, and not what they
    get, as OLMo 2 does (arXiv:2501.00656). What they return is small at first, so the norm makes
    large gradients for their weights."""
    h = x + block.attention_norm(block.attention(x, cos, sin, documents))
    return h + block.ffn_norm(block.feed_forward(h))


OPTIONS = [*parity.ADAMW, *LARGE_STEPS]


def post_norm(
    options: list[str], dp_size: int = 1, mistake: Callable[[], None] | None = None
) -> dict:
    """Return a trajectory of such a model. Runs in a rank, so the patches end with it."""
    layers.Block.forward = normalised_outputs
    if mistake:
        mistake()
    return trajectory(options, dp_size)


@pytest.fixture(scope="module")
def oracle() -> dict:
    """Return the plain model, and how far it is off when its initial weights are moved by
    rounding."""
    seen = run_ranks(1, post_norm, OPTIONS)[0] | {"options": OPTIONS}
    shaken = run_ranks(1, post_norm, [*OPTIONS, parity.SHAKEN])[0]
    return seen | {"bounds": parity.rounding_bounds(shaken, seen)}


def on_a_mesh(mistake: Callable[[], None] | None = None) -> dict:
    return run_ranks(RANKS, post_norm, [*OPTIONS, *MESH], DP_SIZE, mistake)[0]


def test_a_correct_mesh_passes_although_five_steps_amplify_its_rounding(oracle):
    """By more than 10, so that 1e-5 would not do."""
    seen = on_a_mesh()
    equal_weights, later = apart(seen, oracle)
    assert max(equal_weights.values()) < EQUAL / 4 and max(later.values()) > 10 * max(
        equal_weights.values()
    )
    assert max(later.values()) > EQUAL
    assert not compare("post-norm", seen, oracle)


def gradient_slightly_off() -> None:
    """One part in 10,000, in the first step and in all others."""
    real = train.clip_grad_norm

    def clip(parameters, *rest):
        parameters = list(parameters)
        for p in parameters:
            p.grad.mul_(1.0001)
        return real(parameters, *rest)

    train.clip_grad_norm = clip


def no_decay() -> None:
    """The first gradients are right, and the weights are not."""
    real = train.build_optimizer
    train.build_optimizer = lambda model, rows, cfg, *more: real(model, [("*", False)], cfg, *more)


@pytest.mark.parametrize(
    "mistake, seen_in", [(gradient_slightly_off, "at equal weights"), (no_decay, "after step 1")]
)
def test_a_wrong_mesh_does_not_pass(oracle, mistake, seen_in):
    problems = compare(mistake.__name__, on_a_mesh(mistake), oracle)
    assert problems and all(seen_in in problem for problem in problems), problems
