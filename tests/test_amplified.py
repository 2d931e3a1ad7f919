"""Models that amplify rounding: a correct mesh passes the parity check, and a wrong one fails."""

import pytest
import torch

import train
from models import layers
from tests import parity
from tests.parity import EQUAL, apart, compare, plain, trajectory
from tests.ranks import run_ranks
from tests.runs import MESHES

RANKS, MESH, DP_SIZE = MESHES["fsdp2"]
LARGE_STEPS = ["--optimizer.lr=0.03"]  # the last one counts: of two options the plain model's is 0.01


def normalised_outputs(block: torch.nn.Module, x: torch.Tensor, cos, sin, documents=None) -> torch.Tensor:
    """A block that normalises what attention and the feed-forward layer return, and not what they get, as OLMo 2 does
    (arXiv:2501.00656). What they return is small at first, so the norm makes large gradients for their weights."""
    h = x + block.attention_norm(block.attention(x, cos, sin, documents))
    return h + block.ffn_norm(block.feed_forward(h))


@pytest.fixture
def post_norm(monkeypatch):
    """In this process, and in the ranks that it forks."""
    monkeypatch.setattr(layers.Block, "forward", normalised_outputs)
    monkeypatch.setitem(parity.NUMBERS["optimizer"], "adamw", [*parity.ADAMW, *LARGE_STEPS])
    parity.oracle_of.cache_clear()
    yield
    parity.oracle_of.cache_clear()


def on_a_mesh() -> dict:
    return run_ranks(RANKS, trajectory, [*parity.NUMBERS["optimizer"]["adamw"], *MESH], DP_SIZE)[0]


def test_a_correct_mesh_passes_although_five_steps_amplify_its_rounding(post_norm):
    """By more than 10, so that 1e-5 would not do."""
    seen, oracle = on_a_mesh(), plain()
    equal_weights, later = apart(seen, oracle)
    assert max(equal_weights.values()) < EQUAL / 4 and max(later.values()) > 10 * max(equal_weights.values())
    assert max(later.values()) > EQUAL
    assert not compare("post-norm", seen, oracle)


def gradient_slightly_off(patch: pytest.MonkeyPatch) -> None:
    """One part in 10,000, in the first step and in all others."""
    real = train.clip_grad_norm

    def clip(parameters, *rest):
        parameters = list(parameters)
        for p in parameters:
            p.grad.mul_(1.0001)
        return real(parameters, *rest)

    patch.setattr(train, "clip_grad_norm", clip)


def no_decay(patch: pytest.MonkeyPatch) -> None:
    """The first gradients are right, and the weights are not."""
    real = train.build_optimizer
    patch.setattr(train, "build_optimizer", lambda model, rows, cfg: real(model, [("*", False)], cfg))


@pytest.mark.parametrize("mistake, seen_in", [(gradient_slightly_off, "at equal weights"), (no_decay, "after step 1")])
def test_a_wrong_mesh_does_not_pass(post_norm, monkeypatch, mistake, seen_in):
    oracle = plain()
    mistake(monkeypatch)
    seen = on_a_mesh()
    problems = compare(mistake.__name__, seen, oracle)
    assert problems and all(seen_in in problem for problem in problems), problems
