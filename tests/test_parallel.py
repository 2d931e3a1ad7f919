"""The parallel matrix: every mesh computes what one plain process computes, from the same TOML and
seed.

`tests/parity.py` has the comparison. CI runs the few combinations of settings in which every two
settings meet, so another model costs no run. A mesh of two ranks has four runs or five, one of more
has two, since it leaves out what others show (`tests/parity.py::pairwise`). `-m exhaustive` runs the
whole product on every mesh. The negative controls, which are mistakes that the comparison must see,
are in `tests/test_museum.py`.
"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import InputError
from parallelisms import tp
from parallelisms.mesh import world
from tests.covering import every_pair, pairs
from tests.fused import ASYNC
from tests.parity import (
    BATCH,
    EXECUTION,
    FACTORS,
    FLOAT64,
    NUMBERS,
    OPTIONS,
    SEQ,
    SGD,
    TWO_MICROBATCHES,
    VOCAB,
    check,
    combination_of,
    compare,
    pairwise,
    plain,
    trajectory,
)
from tests.ranks import run_ranks
from tests.runs import ADAMW, COMPILED, MESHES, Count

# On others: cp2 in tests/test_context.py, pp2xtp2 in tests/test_gemma3.py, several stages on pp4 below,
# eight ranks in tests/test_any_mesh.py.
SIMPLE = ["one", "fsdp2", "ddp2", "tp2", "pp2"]
COMPOSED = ["fsdp3", "hsdp2x2", "fsdp2xtp2", "pp2xfsdp2"]
PAIRWISE = pairwise(FACTORS, SIMPLE, COMPOSED, FACTORS)


def test_every_two_settings_meet_in_the_matrix():
    settings = {factor: list(table) for factor, table in FACTORS.items()}
    wanted = set(every_pair({"mesh": SIMPLE} | settings))
    assert set().union(*map(pairs, PAIRWISE)) >= wanted
    assert len(PAIRWISE) <= 1.2 * (4 * len(SIMPLE) + 2 * len(COMPOSED)), (
        "far more runs than are needed"
    )


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=() if mesh == "fsdp2" else pytest.mark.slow)
        for mesh in SIMPLE + COMPOSED
    ],
)
def test_mesh_equals_the_plain_model(mesh):
    check(mesh, [combination for combination in PAIRWISE if combination["mesh"] == mesh])


@pytest.mark.exhaustive
@pytest.mark.cap(7200)
@pytest.mark.parametrize("numbers", list(itertools.product(*NUMBERS.values())), ids="-".join)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_combination_equals_the_plain_model(mesh, numbers):
    settings = itertools.product(*([setting] for setting in numbers), *EXECUTION.values())
    check(mesh, [dict(zip(FACTORS, chosen, strict=True)) for chosen in settings], timeout=7000)


TIED = {"embeddings": "tied", "clipping": "in force", "checkpointing": "full", "model": "qwen3"}


@pytest.mark.cap(300)
@pytest.mark.parametrize(
    ("mesh", "schedule", "settings"),
    [
        ("pp2", "zbv", [TIED]),
        pytest.param("pp2", "dualpipe_v", [{}], marks=pytest.mark.slow),
        # where the backward is split, gradients are easily lost when FSDP frees the weights in
        # between
        pytest.param("pp2xfsdp2", "zero_bubble", [TIED, {}], marks=pytest.mark.slow),
        pytest.param("pp4", "interleaved_1f1b", [TIED], marks=pytest.mark.slow),
    ],
)
def test_every_schedule_equals_the_plain_model(mesh, schedule, settings):
    """With weights tied and not. Odd numbers of layers make uneven stages. (With AdamW and five
    layers, one process and the same process with accumulation differ by 1e-4 in the norm.) The
    matrix has 1f1b.

    A tied weight stays unsharded for the whole second half of a backward: its gradient comes from
    two parts of that half, and with full checkpointing each part computes the block again.
    """
    combinations = []
    for chosen in settings:
        how = "reduced once" if chosen else "reduced each time"
        combinations.append(combination_of(optimizer="sgd", accumulation=how, **chosen))
    layers = f"--model.n_layers={9 if mesh == 'pp4' else 5}"
    check(mesh, combinations, [f"--parallelism.pipeline_schedule={schedule}", layers])


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


def orders_of_a_step(runs: list[list[str]]) -> list[list[str]]:
    """Return the order of the first step of each run."""
    seen = []
    for options in runs:
        job = train.build(load_config(options, 4, 4))
        with Order() as order:
            train.train_step(job, random_batch(job))
        seen.append(order.seen)
    return seen


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


@pytest.mark.slow
def test_a_pipeline_gathers_the_weights_of_all_stages_before_its_first_forward():
    """The weights are not gathered again in the step. Negative control: weights that are freed
    after each forward are gathered as they are needed."""
    freed = [*TWO_STAGES_A_RANK, "--parallelism.reshard_after_forward=true"]
    for kept, again in run_ranks(4, orders_of_a_step, [TWO_STAGES_A_RANK, freed]):
        before = kept.index("forward")
        assert before > 2 and kept.count("all-gather") == before, kept
        assert again.count("all-gather") > again.index("forward"), again


@pytest.mark.slow
@pytest.mark.cap(300)
def test_compiled_mesh_equals_the_plain_model():
    check("tp2", [combination_of(checkpointing="full")], COMPILED)


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


def whole_vocabularies() -> list[int]:
    """Return the whole vocabularies in a step on two ranks of tensor parallelism; and with PyTorch's
    own style."""
    counts = []
    for prepare in list, put_stock_style:
        prepare()
        job = train.build(load_config([*OPTIONS, "--parallelism.tensor_parallel=2"], 2, 2))
        with WholeVocabulary() as mode:
            train.train_step(job, random_batch(job))
        counts.append(mode.count)
    return counts


@pytest.mark.slow
def test_no_rank_computes_a_gradient_of_the_whole_vocabulary():
    """Negative control: PyTorch's own style does."""
    for ours, of_pytorch in run_ranks(2, whole_vocabularies):
        assert ours == 0 < of_pytorch


def test_clipping_is_in_force_where_a_run_says_so():
    free, clipped = plain(), plain(clipping="in force")
    assert all(0.1 < norm < 1 for seen in (free, clipped) for norm in seen["norm"])
    assert all(
        np.linalg.norm(clipped["weights"][n] - w) > 1e-4 * np.linalg.norm(w)
        for n, w in free["weights"].items()
    )


def test_the_loss_is_as_exact_as_the_weights():
    """In float64. Museum rows 52 and 53 are mistakes that only such runs show."""
    oracle = plain(FLOAT64)
    assert all(weight.dtype == np.float64 for weight in oracle["weights"].values())
    assert oracle["loss"][0] != float(np.float32(oracle["loss"][0]))


@pytest.mark.slow
def test_weights_kept_sharded_over_some_ranks_equal_the_plain_model():
    options = [*ADAMW, "--parallelism.reshard_after_forward=2"]
    seen = run_ranks(4, trajectory, options, 4, timeout=110)[0]
    problems = compare("fsdp4, resharded over 2", seen, plain())
    assert not problems, "\n".join(problems)


def counted(modes: list[str]) -> list[tuple[dict, int]]:
    """Return the operations of a forward and backward of one process, and the bytes that autograd
    keeps between them, by checkpointing mode."""
    return [counted_in(mode) for mode in modes]


def counted_in(mode: str) -> tuple[dict, int]:
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
    modes = ["none", "every_n", "full", "selective"]
    none, every_n, full, selective = run_ranks(1, counted, modes)[0]
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


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
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
