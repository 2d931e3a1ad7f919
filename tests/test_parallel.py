"""The parallel matrix: every mesh computes what one plain process computes, from the same TOML and
seed.

`tests/parity.py` has the comparison. CI runs the few combinations of settings in which every two
settings meet, so another model costs no run. A mesh of one dimension has four runs or five. A mesh
of several, or of more than two ranks, has three or four, since it leaves out two settings that
differ from others only by the blocks that they are for. A mesh of eight ranks has one run. `-m
exhaustive` runs the whole product. The negative controls, which are mistakes that the comparison
must see, are in `tests/test_museum.py`.
"""

import functools
import itertools
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import InputError
from parallelisms import fsdp_details, pp, tp
from parallelisms.mesh import world
from tests import parity
from tests.covering import covering_array, every_pair, pairs
from tests.fused import AGAIN, ASYNC, FUSED, overlapped
from tests.parity import (
    BATCH,
    EXECUTION,
    FACTORS,
    NUMBERS,
    OPTIONS,
    SEQ,
    SGD,
    STEPS,
    TWO_MICROBATCHES,
    VOCAB,
    check,
    combination_of,
    compare,
    matrix,
    plain,
    trajectories,
    trajectory,
    whole_model,
)
from tests.ranks import run_ranks
from tests.runs import ADAMW, COMPILED, CONTEXT_MESHES, MESHES, Count

SIMPLE = [mesh for mesh, (ranks, _, _) in MESHES.items() if ranks <= 2]
COMPOSED = [mesh for mesh, (ranks, _, _) in MESHES.items() if 2 < ranks < 8]
FEW_RANKS = SIMPLE + COMPOSED


SETTINGS, NEEDLESS = matrix(FACTORS, SIMPLE, COMPOSED)
PAIRWISE = covering_array(SETTINGS, NEEDLESS)


def test_every_two_settings_meet_in_the_matrix():
    assert set().union(*map(pairs, PAIRWISE)) >= set(every_pair(SETTINGS)) - NEEDLESS
    assert len(PAIRWISE) <= 1.2 * (4 * len(SIMPLE) + 3 * len(COMPOSED)), (
        "far more runs than are needed"
    )


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=() if mesh == "fsdp2" else pytest.mark.slow) for mesh in FEW_RANKS],
)
def test_mesh_equals_the_plain_model(mesh):
    check(mesh, [combination for combination in PAIRWISE if combination["mesh"] == mesh])


EIGHT_RANKS = {
    "hsdp2x2xtp2": {
        "model": "qwen3",
        "checkpointing": "full",
        "accumulation": "reduced once",
    },
    "pp2xhsdp2x2": {
        "embeddings": "tied",
        "checkpointing": "selective",
        "weights": "always freed, prefetched",
        "accumulation": "reduced each time",
    },
    "pp2xfsdp2xtp2": {
        "model": "qwen3",
        "embeddings": "tied",
        "checkpointing": "selective",
        "weights": "always freed, prefetched",
        "accumulation": "reduced once",
    },
}


@pytest.mark.exhaustive  # CI has three other meshes of eight ranks, in tests/test_any_mesh.py
@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", EIGHT_RANKS)
def test_eight_ranks_equal_the_plain_model(mesh):
    """One run: every two dimensions of such a mesh meet all settings on four ranks."""
    check(mesh, [combination_of(clipping="in force", **EIGHT_RANKS[mesh])])


def test_every_mesh_is_in_the_matrix():
    assert {*FEW_RANKS, *EIGHT_RANKS} == set(MESHES)


@pytest.mark.exhaustive
@pytest.mark.cap(7200)
@pytest.mark.parametrize("numbers", list(itertools.product(*NUMBERS.values())), ids="-".join)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_combination_equals_the_plain_model(mesh, numbers):
    settings = itertools.product(*([setting] for setting in numbers), *EXECUTION.values())
    check(mesh, [dict(zip(FACTORS, chosen, strict=True)) for chosen in settings], timeout=7000)


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        pytest.param("pp2", "interleaved_1f1b", marks=pytest.mark.slow),
        ("pp2", "zbv"),
        pytest.param("pp2", "dualpipe_v", marks=pytest.mark.slow),
        # where the backward is split, gradients are easily lost when FSDP frees the weights in
        # between
        pytest.param("pp2xfsdp2", "zero_bubble", marks=pytest.mark.slow),
        pytest.param("pp2xfsdp2", "zbv", marks=pytest.mark.exhaustive),
    ],
)
def test_every_schedule_equals_the_plain_model(mesh, schedule):
    """With weights tied and not, clipped and not, in both families, and recomputed in backward.
    Five layers make uneven stages. (With AdamW and five layers, one process and the same process
    with accumulation differ by 1e-4 in the norm.) The matrix has 1f1b.

    A tied weight stays unsharded for the whole second half of a backward: its gradient comes from
    two parts of that half, and with full checkpointing each part computes the block again.
    """
    check(
        mesh,
        [
            combination_of(
                optimizer="sgd",
                accumulation="reduced once",
                embeddings="tied",
                clipping="in force",
                checkpointing="full",
                model="qwen3",
            ),
            combination_of(optimizer="sgd", accumulation="reduced each time"),
        ],
        [f"--parallelism.pipeline_schedule={schedule}", "--model.n_layers=5"],
    )


@pytest.mark.slow
def test_several_stages_per_rank_on_four_ranks_equal_the_plain_model():
    layers = ["--parallelism.pipeline_schedule=interleaved_1f1b", "--model.n_layers=9"]
    check(
        "pp4",
        [combination_of(accumulation="reduced once", optimizer="sgd", embeddings="tied")],
        layers,
    )


class Order(TorchDispatchMode):
    """The all-gathers of weights and the forward passes of a step, as they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:
            self.seen.append("all-gather")
        elif func.namespace == "profiler" and args[0] is not None and str(args[0]) == "forward":
            self.seen.append("forward")
        return func(*args, **(kwargs or {}))


def order_of_a_step(options: list[str]) -> list[str]:
    """Return the order of the first step."""
    job = train.build(load_config(options, 4, 4))
    with Order() as order:
        train.train_step(job, random_batch(job))
    return order.seen


def random_batch(job: train.Job) -> dict[str, torch.Tensor]:
    microbatches = job.cfg.training.microbatches(job.mesh.dp_size)
    shape = (microbatches, job.cfg.training.local_batch_size, job.cfg.training.seq_len)
    return {name: torch.randint(VOCAB, shape) for name in ("tokens", "labels")}


TWO_STAGES_A_RANK = [
    *OPTIONS,
    "--training.local_batch_size=1",
    "--parallelism.pipeline_parallel=2",
    "--parallelism.pipeline_schedule=interleaved_1f1b",
    "--model.n_layers=5",
]


@pytest.mark.parametrize("reshards", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pipeline_gathers_the_weights_of_all_stages_before_its_first_forward(reshards):
    """The weights are not gathered again in the step. Negative control: weights that are freed
    after each forward are gathered as they are needed."""
    more = ["--parallelism.reshard_after_forward=true"] if reshards else []
    for seen in run_ranks(4, order_of_a_step, [*TWO_STAGES_A_RANK, *more]):
        before = seen.index("forward")
        after = seen.count("all-gather") - before
        assert (after > 0) if reshards else (before > 2 and after == 0), seen


def gathered_before_the_update(*args: object) -> list:
    """The mistake: the weights of the next step are gathered when the last one's microbatches are
    done, which is before the optimizer."""
    real = pp.PipelineStep.play

    def play(step: pp.PipelineStep) -> None:
        real(step)
        if step.scale is not None:
            for stage in step.model.stages.values():
                fsdp_details.gather_ahead(stage)

    with mock.patch.object(pp.PipelineStep, "play", play):
        return trajectories(*args)


@pytest.mark.slow
def test_negative_control_weights_of_the_step_before_are_seen():
    chosen = combination_of(optimizer="sgd", accumulation="reduced once")
    with (
        mock.patch.object(parity, "trajectories", gathered_before_the_update),
        pytest.raises(AssertionError, match="pp2xfsdp2"),
    ):
        check("pp2xfsdp2", [chosen])


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh, checkpointing",
    [("fsdp2", "selective"), ("fsdp2xtp2", "full")],
)
def test_compiled_mesh_equals_the_plain_model(mesh, checkpointing):
    check(mesh, [combination_of(checkpointing=checkpointing)], COMPILED)


@pytest.mark.exhaustive  # CI has tp2 with gather_again, in tests/test_gather_again.py
@pytest.mark.cap(300)
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles with a C++ compiler, and there is none"
)
@pytest.mark.parametrize("mesh", ["cp2xtp2", "fsdp2xtp2"])
def test_asynchronous_tensor_parallelism_equals_the_plain_model(mesh):
    """Check that collectives were fused: inductor rewrites nothing, in silence, where it does not
    find its patterns. Per block a step has two all-gathers before matmuls and two reduce-scatters
    after them in forward, and as many in backward."""
    ranks, options, dp_size = (MESHES | CONTEXT_MESHES)[mesh]
    results = run_ranks(ranks, overlapped, [*ASYNC, *options], dp_size, timeout=270)
    assert not [p for seen in results for p in compare(mesh, seen.trajectory, plain())]
    blocks = 3 * STEPS
    assert [seen.calls for seen in results] == [dict.fromkeys(FUSED, 4 * blocks)] * ranks


@pytest.mark.exhaustive
@pytest.mark.cap(300)
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles with a C++ compiler, and there is none"
)
def test_negative_control_without_symmetric_memory_nothing_is_fused_or_hidden():
    """A program that believes PyTorch 2.13's note that `enable_symm_mem_for_group` need not be
    called ends here."""
    options = [*ASYNC, *AGAIN, *MESHES["tp2"][1]]
    for seen in run_ranks(2, overlapped, options, 1, False, timeout=270):
        assert seen.calls == dict.fromkeys(FUSED, 0)
        assert 1 not in seen.behind


def refused(options: list[str]) -> str:
    try:
        train.build(
            load_config(
                [*OPTIONS, f"--training.local_batch_size={BATCH // world().size}", *options],
                world().size,
            )
        )
    except InputError as error:
        return str(error)
    return "built"


def test_what_needs_a_gpu_says_so():
    """`run.device = "auto"`, where only the run finds out that there is none."""
    tensor = [f"--training.local_batch_size={BATCH}", "--parallelism.tensor_parallel=2"]
    assert all(
        "async_tensor_parallel = true needs GPUs" in said
        for said in run_ranks(2, refused, [*ASYNC, *tensor])
    )
    flash = [
        "--training.attention=flash",
        "--training.param_dtype=bfloat16",
        "--model.head_dim=8",
        "--run.device=auto",
    ]
    assert (
        'training.attention = "flash" is a kernel for GPUs, this is a cpu'
        in run_ranks(1, refused, flash)[0]
    )


def stock_style() -> RowwiseParallel:
    """PyTorch's own style of an embedding, whose output collective is asynchronous."""
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))


def put_stock_style() -> None:
    tp.STYLES["vocab_embedding"] = replace(tp.STYLES["vocab_embedding"], build=stock_style)


def stock_embedding(options: list[str], dp_size: int) -> dict:
    """The bug put back."""
    put_stock_style()
    return trajectory(options, dp_size)


@pytest.mark.exhaustive
@pytest.mark.cap(300)
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0"), reason="the upstream bug is in torch 2.13.0 alone"
)
def test_negative_control_asynchronous_embedding_loses_its_gradient():
    ranks, options, dp_size = MESHES["fsdp2xtp2"]
    seen = run_ranks(ranks, stock_embedding, [*ADAMW, *COMPILED, *options], dp_size)[0]
    problems = compare("stock", seen, plain())
    assert any("grad of tok_embeddings" in p for p in problems), (
        "the comparison did not notice a lost gradient"
    )


class WholeVocabulary(TorchDispatchMode):
    """Counts the gradients of embeddings that have a row for each token of the vocabulary."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch comes back with plain tensors
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.count += len(out) == VOCAB
        return out


def whole_vocabularies(stock: bool) -> int:
    """Return the whole vocabularies in a step on two ranks of tensor parallelism."""
    if stock:
        put_stock_style()
    job = train.build(load_config([*OPTIONS, "--parallelism.tensor_parallel=2"], 2, 2))
    with WholeVocabulary() as mode:
        train.train_step(job, random_batch(job))
    return mode.count


def test_no_rank_computes_a_gradient_of_the_whole_vocabulary():
    """Negative control: PyTorch's own style does."""
    assert run_ranks(2, whole_vocabularies, False) == [0, 0]
    assert min(run_ranks(2, whole_vocabularies, True)) > 0


def test_clipping_is_in_force_where_a_run_says_so():
    free, clipped = plain(), plain(clipping="in force")
    assert all(0.1 < norm < 1 for seen in (free, clipped) for norm in seen["norm"])
    assert all(
        np.linalg.norm(clipped["weights"][n] - w) > 1e-4 * np.linalg.norm(w)
        for n, w in free["weights"].items()
    )


@pytest.mark.slow
def test_same_mesh_twice_is_bitwise_equal():
    ranks, options, dp_size = MESHES["fsdp2xtp2"]
    first, second = (run_ranks(ranks, trajectory, [*ADAMW, *options], dp_size)[0] for _ in range(2))
    assert first["loss"] == second["loss"] and first["norm"] == second["norm"]
    for key in "init", "grad", "weights":
        assert all(np.array_equal(first[key][n], second[key][n]) for n in first[key])


@pytest.mark.slow
def test_weights_kept_sharded_over_some_ranks_equal_the_plain_model():
    options = [*ADAMW, "--parallelism.reshard_after_forward=2"]
    seen = run_ranks(4, trajectory, options, 4, timeout=110)[0]
    problems = compare("fsdp4, resharded over 2", seen, plain())
    assert not problems, "\n".join(problems)


def counted(mode: str) -> tuple[dict, int]:
    """(operations of a forward and backward, bytes that autograd keeps between them) of one
    process."""
    cfg = load_config(
        [*OPTIONS, *ADAMW, "--training.local_batch_size=24", f"--activation_checkpoint.mode={mode}"]
    )
    job = train.build(cfg)
    tokens, kept = torch.zeros(24, SEQ, dtype=torch.int64), {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with Count() as count:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = job.model(
                tokens,
                torch.arange(tokens.shape[1]),
                functools.partial(train.linear_cross_entropy, labels=tokens, chunk_tokens=999),
            )
        loss.backward()
    return count.seen, sum(kept.values())


def test_checkpointing_recomputes_what_it_says_and_keeps_less():
    """3 blocks of 7 matmuls, one attention, one SiLU each; the head and all backward matmuls come
    on top. The last matmul of a block is not recomputed: PyTorch stops once it has all that
    backward needs."""
    none, every_n, full, selective = (
        run_ranks(1, counted, mode)[0] for mode in ("none", "every_n", "full", "selective")
    )
    assert none[0]["attention"] == none[0]["silu"] == 3
    for mode, blocks in (every_n, 2), (full, 3):
        assert mode[0] == {
            "mm": none[0]["mm"] + 6 * blocks,
            "attention": 3 + blocks,
            "silu": 3 + blocks,
        }
    assert selective[0] == {"mm": none[0]["mm"], "attention": 3, "silu": 6}
    assert full[1] < every_n[1] < none[1] and selective[1] < none[1]


def offloaded(options: list[str], dp_size: int) -> dict:
    return trajectory([*options, "--parallelism.cpu_offload=true"], dp_size)


def test_cpu_offload_equals_the_plain_model():
    problems = compare("offload", run_ranks(2, offloaded, ADAMW, 2)[0], plain())
    assert not problems, "\n".join(problems)


def bfloat16(options: list[str], dp_size: int) -> dict:
    return trajectory([*options, "--training.param_dtype=bfloat16"], dp_size)


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_bfloat16_is_near_float32_and_keeps_float32_masters(mesh):
    """bfloat16 has 8 bits of mantissa: the loss agrees to 2^-8, and the first update, made on
    float32 masters, is no coarser than the gradients' own error."""
    ranks, options, dp_size = MESHES[mesh]
    seen = run_ranks(ranks, bfloat16, [*SGD, *options], dp_size)[0]
    oracle = plain(optimizer="sgd")
    assert np.max(np.abs(np.array(seen["loss"]) / np.array(oracle["loss"]) - 1)) < 2**-8
    for n, want in oracle["grad"].items():
        assert np.linalg.norm(seen["grad"][n] - want) / np.linalg.norm(want) < 0.05, n
    assert all(w.dtype == np.float32 for w in seen["weights"].values())


def test_gradients_are_summed_over_ranks_in_float32():
    """Two ranks are one process with two microbatches, which adds their bfloat16 gradients in
    float32. A sum in bfloat16 would be off by 1e-3."""
    alone = run_ranks(1, bfloat16, [*SGD, TWO_MICROBATCHES], 1)[0]
    seen = run_ranks(2, bfloat16, SGD, 2)[0]
    for n, want in alone["grad"].items():
        assert np.linalg.norm(seen["grad"][n] - want) <= 1e-5 * np.linalg.norm(want), n


FLOAT8 = [  # sides that are multiples of 16
    *SGD,
    "--model.dim=48",
    "--model.n_kv_heads=8",
    "--model.hidden_dim=64",
    "--training.param_dtype=bfloat16",
    "--training.float8=rowwise",
    "--debug.emulate_float8=true",
]


@pytest.mark.slow
def test_float8_on_two_ranks_is_near_one_rank():
    """Each rank has its own scales for its tokens, so the two agree up to rounding to 8 bits: 3
    bits of mantissa."""
    alone = run_ranks(1, trajectory, FLOAT8, 1)[0]
    shared = whole_model(run_ranks(2, trajectory, FLOAT8, 2))
    assert np.max(np.abs(np.array(shared["loss"]) / np.array(alone["loss"]) - 1)) < 2**-8
    for n, want in alone["grad"].items():
        assert np.linalg.norm(shared["grad"][n] - want) < 2**-4 * np.linalg.norm(want), n
    assert all(np.array_equal(w, shared["init"][n]) for n, w in alone["init"].items())
