"""Each option of a parallelism does what it says, alone: what no comparison with the plain model
can see, because an option that does nothing computes the same numbers."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import Compile, InputError, Training
from models import MODELS, layers, llama, lora
from models.yarn import mscale, yarn
from parallelisms import async_tp, blocks, dp, progress
from tests.ranks import run_each, run_ranks
from tests.runs import SMALL_MODEL, run, tiny_run
from tools.plan import trace
from training import attention

aten = torch.ops.aten


@pytest.fixture(scope="module")
def seen() -> dict:
    """Return what these functions return, each in the same process."""
    return run_each(
        1,
        graph_break,
        gathers_of_each_option,
        gathers_of_a_step,
        plans_with_a_misspelt_row,
    )


@pytest.mark.parametrize(
    "kernel, enabled",
    [
        ("auto", {"flash", "cudnn", "mem_efficient", "math"}),
        ("flash", {"flash"}),
        ("cudnn", {"cudnn"}),
    ],
)
def test_the_kernel_of_attention_is_the_one_that_is_named(kernel, enabled):
    """These switches are PyTorch's for the whole process and need no GPU."""
    switches = torch.backends.cuda
    names = ("flash", "cudnn", "mem_efficient", "math")

    def state() -> dict[str, bool]:
        return {name: getattr(switches, f"{name}_sdp_enabled")() for name in names}

    before = state()
    try:
        for name in names:
            getattr(switches, f"enable_{name}_sdp")(True)
        attention.choose(kernel, torch.device("cuda"))
        assert {name for name, on in state().items() if on} == enabled
    finally:
        for name, on in before.items():
            getattr(switches, f"enable_{name}_sdp")(on)


ROTATED = (
    "--model.n_layers=2 --model.vocab_size=263 --data.tokenizer=bytes --training.seq_len=300 "
    "--training.global_batch_size=2 --training.local_batch_size=1 --training.param_dtype=bfloat16"
).split()
ROTATED_ALIKE = {  # options that give every layer attention, and the same frequencies
    "qwen3_next": ["--model.attention_interval=1"],
    "qwen3_5": ["--model.attention_interval=1"],
    "gemma3": ["--model.window=0", "--model.rope_factor=1"],
}


def errors_of_rotations(family: str) -> list[float]:
    """Return the largest error of each call of `apply_rope` in a step in bfloat16, of which one
    rounding of the exact result has at most 1."""
    more = ROTATED_ALIKE.get(family, [])
    job = train.build(load_config([*ROTATED, f"--model.family={family}", *more], 1, 1))
    theta, seen, real = job.args.rope_theta, [], layers.apply_rope

    def compared(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, T, heads, E]."""
        out, half = real(x, cos, sin), x.shape[-1] // 2
        frequencies = theta ** -(torch.arange(half).double() / half)
        length = 1.0
        scaling = getattr(job.args, "rope_scaling", None)
        if scaling is not None:
            frequencies = yarn(frequencies, theta, **scaling)
            length = mscale(scaling["factor"])
        angles = (torch.arange(x.shape[1]).double()[:, None] * frequencies)[:, None]  # [T, 1, E/2]
        a, b = x.detach().double().chunk(2, -1)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        exact = length * torch.cat(turned, -1)
        exponent = torch.frexp(exact)[1]
        rounding = torch.ldexp(torch.ones_like(exact), exponent - 9)  # half a unit of 8 bits
        # Where the two products nearly cancel, what the tables' own rounding to float32 leaves
        # counts.
        seen.append(((out - exact).abs() / (rounding + 1e-4 * x.abs().max())).max().item())
        return out

    layers.apply_rope = compared
    tokens = torch.randint(0, 263, (1, 1, 301))
    train.train_step(job, {"tokens": tokens[..., :-1], "labels": tokens[..., 1:]})
    layers.apply_rope = real
    return seen


def all_rotations() -> dict[str, list[float]]:
    turning = [family for family in MODELS if family != "kimi_linear"]  # it has no positions
    return {family: errors_of_rotations(family) for family in turning}


@pytest.mark.slow
def test_rotary_positions_are_applied_in_float32_for_weights_of_every_dtype():
    """The result is rounded to bfloat16 once. With tables in bfloat16 it is 20 times as far off."""
    for family, errors in run_ranks(1, all_rotations)[0].items():
        assert len(errors) == 4 and max(errors) <= 1, (family, errors)


def graph_break() -> str:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Block()})
    blocks.compile_blocks(model, Compile(enabled=True, backend="eager"))
    try:
        model.layers["0"](torch.zeros(2))
    except torch._dynamo.exc.Unsupported:
        return "refused"
    return "ran"


def test_a_graph_break_in_a_block_is_an_error(seen):
    assert seen[graph_break] == ["refused"]


class Collectives(TorchDispatchMode):
    """Count of gathers and of reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = 0
        self.reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.gathers += "allgather" in name or "all_gather_into_tensor" in name
        self.reductions += "reduce_scatter" in name
        return func(*args, **(kwargs or {}))


@contextmanager
def rank_0_of(ranks: int, *options: str) -> Iterator[train.Job]:
    """Build a model of four layers on rank 0 of ranks that do not exist."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with trace.pretend(ranks, ranks):
        given = [*SMALL_MODEL, "--model.n_layers=4", *options]
        yield train.build(load_config(given, ranks, ranks))


def forward_and_backward(*options: str) -> tuple[int, int]:
    """Return the gathers of the forward pass, and those of the backward pass after it."""
    with rank_0_of(2, *options) as job, Collectives() as seen:
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        loss = job.model(tokens, torch.arange(16), lambda h, weight: (h @ weight.t()).sum())
        forward = seen.gathers
        loss.backward()
    return forward, seen.gathers - forward


def drawn() -> tuple[int, list[float]]:
    options = [*SMALL_MODEL, "--training.local_batch_size=1", "--parallelism.tensor_parallel=2"]
    job = train.build(load_config(options, 4, 4))
    return job.mesh.dp_rank, torch.rand(4).tolist()


@pytest.mark.slow
def test_the_ranks_of_a_tp_group_draw_the_same_numbers_and_no_others_do():
    """A model that drops units must drop the same ones in all parts of a token."""
    by_group: dict[int, list[list[float]]] = {}
    for group, numbers in run_ranks(4, drawn):
        by_group.setdefault(group, []).append(numbers)
    (one, same), (other, equal) = by_group.values()
    assert one == same and other == equal and one != other


# option -> gathers of the forward pass, and of the backward pass after it: the root, 4 blocks, the
# output.
GATHERS = {
    "default": (6, 4),  # the output keeps its weights, because backward needs them at once
    "true": (6, 5),
    "false": (6, 0),
    "default --parallelism.keep_gathered=3": (6, 1),
}


def test_one_rank_frees_no_weights():
    mesh = SimpleNamespace(fsdp_mesh=SimpleNamespace(size=lambda _: 1), experts_mesh=None, pp=1)
    cfg = SimpleNamespace(reshard_after_forward="default")
    assert dp.reshard_of_blocks(mesh, cfg) is False
    mesh.fsdp_mesh.size = lambda _: 2
    assert dp.reshard_of_blocks(mesh, cfg) == "default"


def gathers_of_each_option() -> list[tuple[int, int]]:
    counts = []
    for words in GATHERS:
        options = f"--parallelism.reshard_after_forward={words}".split()
        counts.append(forward_and_backward(*options))
    return counts


def test_weights_that_are_freed_after_forward_are_gathered_again(seen):
    assert seen[gathers_of_each_option] == [list(GATHERS.values())]


DEBUG = "--data.tokenizer=bytes --model.vocab_size=263 --training.local_batch_size=1".split()
SEEN = {  # options of two ranks -> classes that print(model) shows
    ("--parallelism.context_parallel=2",): {"GatheredKV"},
    (
        "--parallelism.context_parallel=2",
        "--parallelism.context_parallel_method=ulysses",
    ): {"Ulysses"},
    ("--model.family=gpt_oss", "--parallelism.expert_parallel=2"): {"AllToAllDispatcher"},
    (
        "--model.family=deepseek_v3",
        "--parallelism.expert_parallel=2",
        "--parallelism.tensor_parallel=2",
        "--parallelism.expert_chunks=2",
    ): {"ChunkedDispatcher", "BalanceLossOverRanks", "PlainLinear", "SplitEmbedding"},
    (
        "--model.family=olmo2",
        "--parallelism.tensor_parallel=2",
        "--lora.rank=2",
        "--lora.alpha=2",
        '--lora.targets=["wq"]',
        "--checkpoint.load_hf=nowhere",
    ): {"SplitRMSNorm", "AdaptedLinear", "SplitLowRank"},
}


def classes_and_names(options: tuple[str, ...]) -> tuple[set[str], list[str], list[str]]:
    """Return the classes of a model's modules on this rank, the names of what a checkpoint holds,
    and those of one device."""
    cfg = load_config([*DEBUG, *options], 2, 2)
    job = train.build(cfg)
    classes = {type(module).__name__ for module in job.model.modules()}
    plain = MODELS[cfg.model.family].build(job.args)
    if cfg.lora.rank:
        lora.add(plain, cfg.lora)
    return classes, list(job.model.state_dict()), list(plain.state_dict())


def every_model() -> list[tuple]:
    return [classes_and_names(options) for options in SEEN]


def test_what_computes_is_seen_in_the_model_and_no_name_changes():
    for options, seen in zip(SEEN, run_ranks(2, every_model)[0], strict=True):
        classes, names, plain = seen
        assert SEEN[options] <= classes, options
        assert names == plain, options


# option -> gathers in a step of three microbatches: each gathers the root, 4 blocks and the output
GATHERS_OF_A_STEP = {"true": 3 * 6, "false": 6}


def gathers_of_a_step() -> list[tuple[int, bool]]:
    """Count the all-gathers of a step; also return whether it ends with shards."""
    counts = []
    batch = ["--training.local_batch_size=1", "--training.global_batch_size=6"]
    kept = "--parallelism.reshard_after_forward=false"
    for words in GATHERS_OF_A_STEP:
        option = f"--parallelism.reshard_after_backward={words}"
        with rank_0_of(2, *batch, kept, option) as job, Collectives() as seen:
            train.train_step(job, trace.batch_of(job, 3))
            weights = job.model.parameters()
            counts.append((seen.gathers, all(isinstance(w, DTensor) for w in weights)))
    return counts


def test_weights_that_are_kept_are_gathered_once_a_step(seen):
    wanted = [(gathers, True) for gathers in GATHERS_OF_A_STEP.values()]
    assert seen[gathers_of_a_step] == [wanted]


def reductions_of_a_step(runs: list[list[str]]) -> list[int]:
    counts = []
    for options in runs:
        job = train.build(load_config([*SMALL_MODEL, *options], 4, 4))
        tokens = torch.zeros(4, 1, 16, dtype=torch.int64)
        with Collectives() as seen:
            train.gradients(job, {"tokens": tokens, "labels": tokens})
        counts.append(seen.reductions)
    return counts


# schedule -> reduce-scatters of a step on both ranks of a pipeline, untied and tied: 8 blocks, and
# the root of each stage but the middle ones, which have nothing but blocks; untied, the output too.
REDUCTIONS = {"zero_bubble": ([5, 6], [5, 5]), "zbv": ([7, 4], [6, 4])}


@pytest.mark.slow
def test_a_stage_reduces_its_gradients_once_in_a_step_also_where_the_backward_is_split():
    base = (
        "--model.n_layers=8 --parallelism.pipeline_parallel=2 --training.local_batch_size=1 "
        "--training.global_batch_size=8"
    ).split()
    runs = []
    for schedule in REDUCTIONS:
        given = [*base, f"--parallelism.pipeline_schedule={schedule}"]
        runs += [[*given, f"--model.tied_embeddings={tied}"] for tied in ("false", "true")]
    first, again, last, again_last = run_ranks(4, reductions_of_a_step, runs)
    assert first == again and last == again_last
    assert list(zip(first, last)) == [tuple(pair) for both in REDUCTIONS.values() for pair in both]


class OnOneRank(fx.Interpreter):
    """Runs a graph of a group of one rank."""

    def call_function(self, target, args, kwargs):
        if target is async_tp.SCATTER:
            return args[0]
        return super().call_function(target, args, kwargs)


def scattered_sum(other: str) -> tuple[fx.Graph, list[torch.Tensor]]:
    """Return the graph of a reduce-scatter of two GEMMs' sum, as it is in backward, and its inputs.
    other: a third term: "none", an "activation", or a "twice" used GEMM."""
    given = [torch.randn(2, 5, 7), torch.randn(7, 3), torch.randn(2, 5, 4), torch.randn(4, 3)]
    given.append(torch.randn(2, 5, 3))
    graph = fx.Graph()
    names = ("a", "weight_a", "b", "weight_b", "residual")
    inputs = [graph.placeholder(name) for name in names]
    for node, tensor in zip(inputs, given, strict=True):
        node.meta["val"] = tensor

    def call(target, *args) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return node

    def gemm(gradient: fx.Node, weight: fx.Node) -> fx.Node:
        rows = call(aten.reshape.default, gradient, [10, weight.meta["val"].shape[0]])
        return call(aten.reshape.default, call(aten.mm.default, rows, weight), [2, 5, 3])

    a, weight_a, b, weight_b, residual = inputs
    second = gemm(b, weight_b)
    total = call(aten.add.Tensor, gemm(a, weight_a), second)
    if other == "activation":
        total = call(aten.add.Tensor, total, residual)
    result = [graph.call_function(async_tp.SCATTER, (total, "sum", 1, "tp"))]
    if other == "twice":
        result.append(second)
    graph.output(tuple(result))
    return graph, given


@pytest.mark.parametrize("other", ["none", "activation", "twice"])
def test_a_sum_of_gemms_is_rewritten_with_all_of_its_terms_or_not(other):
    """A pass that drops a term that is no GEMM loses its gradient, for example the residual's."""
    torch.manual_seed(0)
    graph, given = scattered_sum(other)
    want = OnOneRank(fx.GraphModule(nn.Module(), graph)).run(*given)
    async_tp.multiply_once(graph)
    got = OnOneRank(fx.GraphModule(nn.Module(), graph)).run(*given)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    joined = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert bool(joined) == (other == "none"), "a GEMM that is used twice would be computed twice"


@pytest.mark.parametrize(
    "kind, hardware, dtype",
    [
        ("cuda", (7, 5), torch.float32),
        ("cuda", (8, 0), torch.bfloat16),
        ("cuda", (9, 0), torch.bfloat16),
        ("cpu", (False, False), torch.float32),
        ("cpu", (True, False), torch.bfloat16),
        ("cpu", (False, True), torch.bfloat16),
    ],
)
def test_the_type_of_the_weights_follows_the_hardware(kind, hardware, dtype, monkeypatch):
    """hardware: the compute capability of a GPU, or whether a CPU has AMX, AVX512-BF16."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hardware)
    for probe, answer in zip(("_is_amx_tile_supported", "_is_avx512_bf16_supported"), hardware):
        monkeypatch.setattr(torch.cpu, probe, lambda answer=answer: answer, raising=False)
    assert dp.param_dtype(Training(), torch.device(kind)) == dtype
    assert dp.param_dtype(Training(param_dtype="float32"), torch.device(kind)) == torch.float32
    assert dp.param_dtype(Training(param_dtype="bfloat16"), torch.device(kind)) == torch.bfloat16


def test_nccls_flight_recorder_is_on_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    progress.record_flights(tmp_path)
    assert os.environ == {  # each earlier name brings a warning from torch 2.11 on
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-",
    }


MISSPELT = {  # pattern -> style, in a plan that is right otherwise
    "layers.*.atention.wq": "columns",  # in no stage
    "layers.*.feed_forward.w4": "rows",
}


def plans_with_a_misspelt_row() -> list[str]:
    """Return the messages of train.build for the right plan and for each such plan, on rank 0 of four
    that do not exist."""
    said, family = [], llama.FAMILY
    split = ["--parallelism.tensor_parallel=2", "--parallelism.pipeline_parallel=2"]
    for row in [None, *MISSPELT]:
        more = {row: MISSPELT[row]} if row else {}
        llama.FAMILY = replace(family, tp_plan=lambda args: family.tp_plan(args) | more)
        try:
            with rank_0_of(4, *split, "--model.tied_embeddings=true"):
                said.append("")
        except InputError as error:
            said.append(str(error))
    llama.FAMILY = family
    return said


def test_a_misspelt_row_of_the_plan_of_tensor_parallelism_is_named_in_a_pipeline(seen):
    """A stage has some of the modules, and a tied model has no output. Without a pipeline:
    tests/test_tp_check.py."""
    [[right, *wrong]] = seen[plans_with_a_misspelt_row]
    assert right == ""
    for said, row in zip(wrong, MISSPELT, strict=True):
        assert f"has a row for {row}, and the model has no such module" in said


def watched_run(options: list[str], folder: Path) -> dict:
    """A run of this process; what PyTorch and Python are set to during its steps."""
    seen = {"kernels": set(), "collector": set(), "collections": Counter()}
    step, collect = train.train_step, gc.collect

    def watched_step(*args):
        refused = not torch.is_deterministic_algorithms_warn_only_enabled()
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        seen["kernels"].add((torch.are_deterministic_algorithms_enabled(), refused, workspace))
        seen["collector"].add(gc.isenabled())
        seen["collections"]["steps"] += 1
        return step(*args)

    def watched_collect() -> int:
        seen["collections"][seen["collections"]["steps"]] += 1
        return collect()

    train.train_step, train.gc.collect, train.GC_STEPS = watched_step, watched_collect, 3
    code, errors = run(options, folder)
    assert code == 0, errors
    return seen


def test_a_run_asks_for_deterministic_kernels_and_collects_garbage_at_its_own_times(tmp_path):
    more = ["--run.deterministic=true", "--training.steps=7"]
    seen = run_ranks(1, watched_run, [*tiny_run(tmp_path), *more], tmp_path / "run")[0]
    assert seen["kernels"] == {(True, True, ":4096:8")}
    assert seen["collector"] == {False}, (
        "Python collects at an arbitrary moment, and all ranks wait"
    )
    assert seen["collections"] == {"steps": 7, 3: 1, 6: 1}
