"""OLMo 2 and 3: the norm over all heads of a projection, which ranks share under tensor parallelism,
and windows in three of four layers. The matrix of tests/test_parallel.py compares the family on
every mesh, tests/test_hf_parity.py with transformers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from models.formats.olmo2 import FORMATS as formats
from models.layers import AttentionSpec
from models.olmo2 import FAMILY as OLMO
from parallelisms import tp
from tests.parity import (
    DOCUMENTS,
    NUMBERS,
    check,
    combination_of,
)
from tests.ranks import run_ranks
from tests.shapes import OLMO2, YARN

COLUMNS = 14
DOCUMENTED = NUMBERS | {"documents": {"masked": [DOCUMENTS]}}


def norm_of_two_ranks() -> dict[str, float]:
    """Compare the norm of two ranks with that of one process: the largest differences of its
    output, and of the gradients of its input and gain, and the collectives of forward and backward."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(COLUMNS, eps=0.01)
    norm.weight.data.normal_()
    x = torch.randn(2, 5, COLUMNS, requires_grad=True)
    weights = torch.randn(2, 5, COLUMNS)  # of the outputs in a loss
    want = norm(x)
    (want * weights).sum().backward()
    want_gain = norm.weight.grad

    mesh = init_device_mesh("cpu", (2,))
    mine = slice(mesh.get_rank() * COLUMNS // 2, (mesh.get_rank() + 1) * COLUMNS // 2)
    norm.weight.grad = None
    norm = parallelize_module(norm, mesh, tp.STYLES["norm_of_columns"].build())
    own = x.detach()[..., mine].clone().requires_grad_()
    with CommDebugMode() as forward:
        got = norm(own)
    with CommDebugMode() as backward:
        (got * weights[..., mine]).sum().backward()
    gain = norm.weight.grad
    assert isinstance(gain, DTensor)
    return {
        "output": (got - want[..., mine]).abs().max().item(),
        "input's gradient": (own.grad - x.grad[..., mine]).abs().max().item(),
        "gain's gradient": (gain.to_local() - want_gain[mine]).abs().max().item(),
        "forward": forward.get_total_counts(),
        "backward": backward.get_total_counts(),
    }


def test_a_norm_whose_columns_are_shared_is_that_of_one_process():
    """At the cost of one all-reduce in each direction."""
    for seen in run_ranks(2, norm_of_two_ranks):
        assert (seen.pop("forward"), seen.pop("backward")) == (1, 1)
        assert max(seen.values()) < 2e-6, seen


@pytest.mark.slow
def test_windows_inside_documents_equal_the_plain_model():
    """On a mesh that gathers keys; in a pipeline: tests/test_gemma3.py."""
    combination = {
        factor: chosen for factor, chosen in combination_of().items() if factor in NUMBERS
    }
    combination |= {"model": "olmo2", "documents": "masked", "clipping": "in force"}
    check("cp2", [combination], factors=DOCUMENTED)


# Windows and rotary positions ----------------------------------------------------------------------


def test_every_fourth_layer_attends_to_all_tokens():
    with torch.device("meta"):
        model = OLMO.build(replace(OLMO2, n_layers=9, window=7))
    windows = [core.spec.window for core in model.cores()]
    assert windows == [7, 7, 7, None, 7, 7, 7, None, 7]
    assert all(core.spec == AttentionSpec() for core in OLMO.build(OLMO2).cores())


# config.json ---------------------------------------------------------------------------------------

OLMO3 = replace(OLMO2, window=7, rope_scaling=YARN)


@pytest.mark.parametrize("args", [OLMO2, OLMO3, replace(OLMO2, rope_scaling=YARN)])
def test_both_ways_of_writing_rotary_numbers_are_read(args):
    """Read the form of transformers 5, and that of everything older. The length of queries and keys
    follows from the factor."""
    config = formats.hf_config(args)
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert formats.args_from_hf(new) == formats.args_from_hf(old) == args
    if args.rope_scaling:
        del old["rope_scaling"]["attention_factor"]
        length = formats.args_from_hf(old).rope_scaling["attention_factor"]
        assert length == pytest.approx(1.1386294)  # 0.1 ln 4 + 1


@pytest.mark.parametrize("args", [OLMO2, OLMO3])
def test_an_epsilon_that_is_not_said_is_the_default_of_transformers(args):
    """1e-5 in Olmo2Config and Olmo3Config, where Llama's is 1e-6."""
    config = formats.hf_config(replace(args, norm_eps=1e-5))
    del config["rms_norm_eps"]
    assert formats.args_from_hf(config).norm_eps == 1e-5
