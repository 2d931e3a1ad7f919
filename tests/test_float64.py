"""In float64 meshes equal one process to 1e-12, in gradients and after steps. So a mistake that
float32's rounding hides is seen.

The matrices (tests/test_parallel.py, tests/test_context.py, tests/test_experts.py) have both types.
"""

import pytest
import torch

from parallelisms.mesh import Mesh
from tests import parity
from tests.parity import EQUAL, EXACT, EXPERTS, FLOAT64
from tests.ranks import run_ranks
from tests.runs import MESHES

# mesh -> settings of the plain model, and further options; what the matrices do not have
CASES = {
    "pp2xfsdp2": (
        {"checkpointing": "full"},
        ["--parallelism.pipeline_schedule=zero_bubble", "--model.n_layers=4"],
    ),
    "experts on ep2xtp2": ({}, [*EXPERTS["gpt_oss"], "--model.expert_dim=12"]),
}


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", CASES)
def test_mesh_equals_the_plain_model(mesh: str) -> None:
    settings, more = CASES[mesh]
    parity.check(mesh, [parity.combination_of(**settings)], [*more, FLOAT64])


def miscounted(options: list[str]) -> dict:
    """One token in a million is counted twice."""
    real = Mesh.sum_over_tokens

    def one_in_a_million(self: Mesh, x: torch.Tensor) -> torch.Tensor:
        return real(self, x) * (1 + 1e-6)

    Mesh.sum_over_tokens = one_in_a_million
    return parity.trajectory(options)


def larger_epsilon(options: list[str]) -> dict:
    """A norm across ranks adds an epsilon of 1.000001e-6."""
    real = torch.rsqrt
    torch.rsqrt = lambda mean_square: real(mean_square + 1e-12)
    return parity.trajectory(options)


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("mistake", [miscounted, larger_epsilon])
def test_a_mistake_below_float32s_rounding_is_seen(mistake) -> None:
    """The mistake is seen in float64, and not in float32, whose own limit it passes."""
    ranks, of_mesh, _ = MESHES["tp2"]
    verdicts = {}
    for limit, dtype in (EXACT, [FLOAT64]), (EQUAL, []):
        oracle = parity.plain(*dtype, model="olmo2")
        options = [*parity.NUMBERS["model"]["olmo2"], *parity.NUMBERS["optimizer"]["adamw"]]
        options += [*of_mesh, *dtype, parity.seed_of(oracle)]
        seen = parity.whole_model(run_ranks(ranks, mistake, options))
        verdicts[limit] = parity.compare(mistake.__name__, seen, oracle, limit)
    assert verdicts[EXACT] and not verdicts[EQUAL], verdicts


def test_the_loss_is_as_exact_as_the_weights() -> None:
    oracle = parity.plain(FLOAT64)
    assert all(weight.dtype == "float64" for weight in oracle["weights"].values())
    loss = oracle["loss"][0]
    assert loss != float(torch.tensor(loss, dtype=torch.float32))
