"""Parts that only Kimi Linear has: a decay per channel from narrow vectors on every mesh, attention
without positions, and the mistakes that a comparison must notice.

tests/test_hf_parity.py compares the whole model with transformers', tests/test_convert.py its files,
tests/test_hf_configs.py has what its format refuses.
"""

from itertools import combinations

import pytest
import torch

from models import kimi_linear
from models.formats.kimi_linear import FORMATS as OURS
from models.formats.layouts import WithOnes
from parallelisms import tp_plain
from tests import parity
from tests.parity import DOCUMENTS, KIMI_LINEAR, LORA_KIMI
from tests.ranks import run_ranks
from tests.shapes import KIMI_LINEAR as ARGS
from training.optim import first_match

# --------------------------------------------------------------------------------------------------
# meshes

EVEN = "--model.expert_dim=12"
MODEL = [*KIMI_LINEAR, EVEN, DOCUMENTS]
EXACTLY = parity.combination_of(dtype="float64")


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", ["tp2", "ep2 of cp2", "pp2"])
def test_meshes_equal_the_plain_model(mesh):
    """In float64, with documents of which some are shorter than the convolution."""
    parity.check(mesh, [EXACTLY], MODEL)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_adapters_on_a_mesh_equal_the_plain_model():
    parity.check("tp2", [EXACTLY], [*LORA_KIMI, EVEN])


def with_a_gradient_of_one_rank(runs: list[list[str]]) -> list[dict]:
    """The bug put in: what a rank's heads want of the input counts as what all ranks' want."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, tp_plain.DTensor) else x

    tp_plain._plain = plain
    return parity.trajectories(runs, 1)


@pytest.mark.slow
@pytest.mark.cap(300)
def test_negative_control_a_narrow_vector_needs_the_gradients_of_all_heads():
    more = [*MODEL, *parity.MESHES["tp2"][1]]
    oracle = parity.plain(*more, dtype="float64")
    run = [*parity.options_of(EXACTLY), *more, parity.seed_of(oracle)]
    seen = run_ranks(2, with_a_gradient_of_one_rank, [run])[0][0]
    apart, _ = parity.apart(seen, oracle)
    assert apart["grad of tok_embeddings.weight"] > 1e-4


# --------------------------------------------------------------------------------------------------
# numbers and files


def test_the_parameters_are_those_of_transformers_and_of_the_report():
    """48B, of which 3B work on a token, without the embedding and the output projection."""
    args = kimi_linear.Args(**kimi_linear.NUMBERS.flavors["48B-A3B"])
    assert kimi_linear.FAMILY.parameters(args) == 49_122_675_072  # counted in transformers 5.23
    both = 2 * args.vocab_size * args.dim
    assert kimi_linear.FAMILY.parameters(args) - both == pytest.approx(48e9, rel=0.01)
    assert kimi_linear.FAMILY.active_parameters(args) - both == pytest.approx(3e9, rel=0.1)


def test_vectors_and_norms_do_not_decay():
    names = [name for name, _ in kimi_linear.FAMILY.build(ARGS).named_parameters()]
    kept = {name for name in names if not first_match(kimi_linear.DECAY, name)}
    vectors = {name for name in kept if not name.endswith("norm.weight")}
    assert {name.split(".")[-1] for name in vectors} == {"A_log", "dt_bias"}
    assert {name for name in names if name.endswith("norm.weight")} == kept - vectors


def test_slices_of_a_tensor_with_more_dimensions_are_those_of_the_parameter():
    own = torch.randn(5)
    layout = WithOnes("x", before=2, behind=1)
    theirs = layout.join([own])
    assert list(theirs.shape) == layout.files(own.shape)["x"] == [1, 1, 5, 1]
    for start, stop in combinations(range(6), 2):
        got = layout.read((slice(start, stop),), lambda name, part: theirs[part])
        assert torch.equal(got, own[start:stop])


def test_the_layers_are_read_from_the_hubs_file_and_from_transformers():
    config = OURS.hf_config(ARGS)
    hub = {k: v for k, v in config.items() if k not in ("layer_types", "mlp_layer_types")}
    assert OURS.args_from_hf(config) == OURS.args_from_hf(hub) == ARGS
    of_transformers = {k: v for k, v in config.items() if k != "linear_attn_config"}
    assert OURS.args_from_hf(of_transformers) == ARGS
