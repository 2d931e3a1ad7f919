"""OLMo 2 and 3: the norm over all heads of a projection, which ranks share under tensor parallelism,
and windows in three of four layers. The matrix of tests/test_parallel.py compares the family on
every mesh, tests/test_hf_parity.py with transformers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from models import arithmetic
from models.flavors.olmo2 import FLAVORS
from models.formats.olmo2 import FORMATS as formats
from models.layers import AttentionSpec
from models.olmo2 import FAMILY as OLMO
from parallelisms import tp, tp_plain
from tests.parity import (
    DOCUMENTS,
    FLOAT64,
    NUMBERS,
    check,
    combination_of,
)
from tests.ranks import run_ranks
from tests.runs import COMPILED, ULYSSES
from tests.shapes import OLMO2, YARN, random_pair

COLUMNS = 14
DOCUMENTED = NUMBERS | {"documents": {"masked": [DOCUMENTS]}}


def norm_of_two_ranks(mistake: Callable[[], None] | None = None) -> dict[str, float]:
    """Compare the norm of two ranks with that of one process: the largest differences of its
    output, and of the gradients of its input and gain, and the collectives of forward and backward."""
    if mistake:
        mistake()
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


def own_columns() -> None:
    """The norm is computed over the rank's own columns."""
    tp_plain.SumOverRanks.apply = lambda x, _: 2 * x


def gradient_of_own_columns() -> None:
    """The sum of squares is right, and its gradient comes from the rank's own columns."""
    tp_plain.SumOverRanks.backward = staticmethod(lambda ctx, grad: (grad, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, wrong",
    [
        (own_columns, {"output", "input's gradient", "gain's gradient"}),
        (gradient_of_own_columns, {"input's gradient"}),
    ],
)
def test_negative_control_of_the_shared_norm(mistake, wrong):
    for seen in run_ranks(2, norm_of_two_ranks, mistake):
        del seen["forward"], seen["backward"]
        assert {name for name, error in seen.items() if error > 1e-3} == wrong


def documented(mesh: str, *more: str) -> None:
    combination = {
        factor: chosen for factor, chosen in combination_of().items() if factor in NUMBERS
    }
    combination |= {"model": "olmo2", "documents": "masked", "clipping": "in force"}
    check(mesh, [combination], list(more), factors=DOCUMENTED)


@pytest.mark.parametrize(
    "mesh, more",
    [
        ("cp2", []),
        pytest.param("cp2", [ULYSSES], marks=pytest.mark.slow),
        pytest.param("pp2", ["--training.local_batch_size=4"], marks=pytest.mark.slow),
    ],
)
def test_windows_inside_documents_equal_the_plain_model(mesh, more):
    documented(mesh, *more)


@pytest.mark.slow
def test_compiled_blocks_with_a_shared_norm_equal_the_plain_model():
    check(
        "tp2",
        [combination_of(model="olmo2", checkpointing="selective")],
        # float32 would differ by 1.1e-5 after a step, as much as rounding explains
        [*COMPILED, FLOAT64],
    )


# Windows and rotary positions ----------------------------------------------------------------------


def difference(window_dropped_in: int | None = None) -> float:
    """Return the difference of a long OLMo 3's logits from transformers'."""
    theirs, ours, _ = random_pair(OLMO, replace(OLMO2, window=7, rope_scaling=YARN))
    if window_dropped_in is not None:
        ours.layers[str(window_dropped_in)].attention.core.spec = AttentionSpec()
    tokens = torch.randint(0, OLMO2.vocab_size, (2, 37))
    with torch.no_grad():
        return (ours(tokens, torch.arange(37)) - theirs(tokens).logits).abs().max().item()


@pytest.mark.slow
def test_negative_control_a_window_dropped_in_a_layer_is_noticed():
    pytest.importorskip("transformers")
    assert run_ranks(1, difference)[0] <= 1e-5
    for layer in 0, 4:
        assert run_ranks(1, difference, layer)[0] > 1e-3


def test_every_fourth_layer_attends_to_all_tokens():
    with torch.device("meta"):
        model = OLMO.build(replace(OLMO2, n_layers=9, window=7))
    windows = [core.spec.window for core in model.cores()]
    assert windows == [7, 7, 7, None, 7, 7, 7, None, 7]
    assert all(core.spec == AttentionSpec() for core in OLMO.build(OLMO2).cores())


def test_a_stage_of_a_pipeline_has_the_windows_of_its_layers():
    with torch.device("meta"):
        stage = OLMO.build(replace(OLMO2, window=7), layers=range(2, 5))
    assert [core.spec.window for core in stage.cores()] == [7, None, 7]


def test_flops_count_the_keys_inside_a_window():
    args = replace(OLMO2, window=7)
    per_key = 12 * args.n_heads * args.head_dim
    assert OLMO.flops_per_token(OLMO2, 40) == arithmetic.flops_per_token(OLMO2, 40)
    for seq_len in 5, 7, 40:
        keys = 4 * min(seq_len, 7) + seq_len
        want = 6 * arithmetic.multiplied(args) + per_key * keys
        assert OLMO.flops_per_token(args, seq_len) == want


def test_the_line_of_the_log_says_how_many_layers_have_a_window():
    args = OLMO.Args(**FLAVORS["3-32B"])
    assert OLMO.describe(args).endswith("; 48 layers with windows of 4,096 tokens")
    assert "see" not in OLMO.describe(OLMO.Args(**FLAVORS["32B"]))


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


def scaled(**more: object) -> dict:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0} | more}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types is .* over and over"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        (
            scaled(original_max_position_embeddings=16, mscale=0.7),
            "of the rotary positions is not supported",
        ),
        (
            scaled(original_max_position_embeddings=16, truncate=False),
            "of the rotary positions is not supported",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "of type 'linear'"),
        ({"rope_parameters": {"rope_type": "default"}}, "must say what holds in full_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rotary positions of sliding_attention are",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}},
            "rotary positions of sliding_attention are",
        ),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_what_an_olmo_3_cannot_express_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        formats.args_from_hf(formats.hf_config(OLMO3) | change)
