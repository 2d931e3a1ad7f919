"""The parallel matrix: every mesh computes what one plain process computes, from the same TOML and seed.

Compared with the plain model (one process, float32, no checkpointing): initial weights bitwise; loss, gradient norm, every
gathered gradient and the weights after 5 optimizer steps to 1e-5. The sizes are ones that meshes do not divide: vocabulary
263, width 50; labels that do not count are spread unevenly over ranks and micro-batches.
"""

import functools
import shutil
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import InputError
from parallelisms import dp, tp
from parallelisms.mesh import world
from tests.ranks import run_ranks
from tools.bench import harness

STEPS, SEQ, BATCH, VOCAB = 5, 16, 24, 263
MODEL = (
    "--model.dim=50 --model.n_layers=3 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=6 --model.hidden_dim=44 "
    f"--model.vocab_size={VOCAB} --data.tokenizer=bytes --training.param_dtype=float32 "
    f"--training.seq_len={SEQ} --training.global_batch_size={BATCH} --training.steps={STEPS} --training.loss_chunk_tokens=40 --lr_schedule.warmup_steps=0"
).split()
ADAMW = ["--optimizer.lr=0.01", "--optimizer.eps=1e-4"]  # with eps 1e-8 Adam amplifies rounding where gradients are near 0
SGD = ["--optimizer.kind=sgd", "--optimizer.lr=0.5"]

MESHES = {  # name: (ranks, options, data-parallel ranks)
    "fsdp2": (2, [], 2),
    "ddp2": (2, ["--parallelism.data_parallel_replicate=2"], 2),
    "tp2": (2, ["--parallelism.tensor_parallel=2"], 1),
    "fsdp3": (3, [], 3),
    "fsdp4": (4, [], 4),
    "hsdp2x2": (4, ["--parallelism.data_parallel_replicate=2"], 4),
    "tp4": (4, ["--parallelism.tensor_parallel=4"], 1),
    "fsdp2xtp2": (4, ["--parallelism.tensor_parallel=2"], 2),
    "hsdp2x2xtp2": (8, ["--parallelism.tensor_parallel=2", "--parallelism.data_parallel_replicate=2"], 4),
}
VARIANTS = {
    "adamw": ADAMW,
    "sgd": SGD,
    "accumulation": [*ADAMW, "accumulate"],
    "tied": [*ADAMW, "--model.tied_embeddings=true"],
    "ac-full": [*ADAMW, "--activation_checkpoint.mode=full"],
    "ac-every_n": [*ADAMW, "--activation_checkpoint.mode=every_n"],
    "ac-selective": [*ADAMW, "--activation_checkpoint.mode=selective", "accumulate"],
    "reshard-never": [*ADAMW, "--parallelism.reshard_after_forward=false", "accumulate"],
    "keep-gathered": [*ADAMW, "--parallelism.keep_gathered=2", "accumulate"],
    "reshard-always-prefetch": [*ADAMW, "--parallelism.reshard_after_forward=true", "--parallelism.prefetch=2"],
    "accumulation-sharded": [*ADAMW, "--parallelism.accumulate_gradients=sharded", "accumulate"],
}
COMPILED = {  # traced and partitioned for real; the backend that only traces is fast enough for tests
    "compile": [*ADAMW, "--compile.enabled=true", "--compile.backend=aot_eager"],
    "compile-selective": [*ADAMW, "--compile.enabled=true", "--compile.backend=aot_eager",
                          "--activation_checkpoint.mode=selective"],
    "compile-full": [*ADAMW, "--compile.enabled=true", "--compile.backend=aot_eager", "--activation_checkpoint.mode=full"],
}  # fmt: skip


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def trajectory(options: list[str], dp_size: int = 1) -> dict:
    """Train STEPS steps on this rank through train.build and train.train_step; gathers everything worth comparing."""
    warnings.simplefilter("ignore")
    options = list(options)
    local = BATCH // dp_size
    if "accumulate" in options:
        options.remove("accumulate")
        local //= 2
    cfg = load_config([*MODEL, f"--training.local_batch_size={local}", *options], world().size, world().local_size)
    job = train.build(cfg)
    seen = {"init": {n: whole(p).numpy() for n, p in job.model.named_parameters()}, "loss": [], "norm": []}

    def keep_gradients(*_):
        if "grad" not in seen:
            seen["grad"] = {n: whole(p.grad).numpy() for n, p in job.model.named_parameters()}

    job.optimizer.register_step_pre_hook(keep_gradients)
    batches = harness.batches(cfg, job.mesh, np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.uint16))
    for step in range(STEPS):
        batch = batches[step]
        sample = batch["sample"].view(*batch["labels"].shape[:2], 1)  # [A, b, 1]
        masked = (sample * 7 + torch.arange(SEQ)) % 11 < sample % 5  # by sample, so that ranks hold different counts
        batch["labels"] = batch["labels"].masked_fill(masked, -100)
        result = train.train_step(job, batch)
        seen["loss"].append(result.loss)
        seen["norm"].append(result.grad_norm)
    seen["weights"] = {n: whole(p).numpy() for n, p in job.model.named_parameters()}
    return seen


def all_variants(names: list[str], table: dict, mesh_options: list[str], dp_size: int) -> dict:
    return {name: trajectory([*table[name], *mesh_options], dp_size) for name in names}


@functools.cache
def plain(optimizer: str, tied: bool) -> dict:
    """The oracle: one process, no parallelism, no accumulation, no checkpointing."""
    options = [*(SGD if optimizer == "sgd" else ADAMW), f"--model.tied_embeddings={str(tied).lower()}"]
    return run_ranks(1, trajectory, options)[0]


def compare(name: str, seen: dict, oracle: dict) -> list[str]:
    """What differs: sentences, empty when all is equal."""
    problems = [f"{name}: initial {n} is not bitwise equal" for n, w in oracle["init"].items()
                if not np.array_equal(w, seen["init"][n])]  # fmt: skip
    for key in "loss", "norm":
        error = np.max(np.abs(np.array(seen[key]) / np.array(oracle[key]) - 1))
        if not error <= 1e-5:
            problems.append(f"{name}: {key} off by {error:.1e} relative")
    for key in "grad", "weights":
        assert seen[key].keys() == oracle[key].keys()
        for n, want in oracle[key].items():
            error = np.linalg.norm(seen[key][n] - want) / np.linalg.norm(want)
            if not error <= 1e-5:
                problems.append(f"{name}: {key} of {n} off by {error:.1e} relative")
    return problems


def check(mesh: str, table: dict, names: list[str]) -> None:
    ranks, options, dp_size = MESHES[mesh]
    results = run_ranks(ranks, all_variants, names, table, options, dp_size, timeout=270)
    problems = []
    for name in names:
        oracle = plain("sgd" if name == "sgd" else "adamw", name == "tied")
        problems += compare(f"{mesh} {name}", results[0][name], oracle)
        for rank, other in enumerate(results):
            if other[name]["loss"] != results[0][name]["loss"] or other[name]["norm"] != results[0][name]["norm"]:
                problems.append(f"{mesh} {name}: rank {rank} reports another loss or norm than rank 0")
    assert not problems, "\n".join(problems)


FIRST = ("adamw", "accumulation-sharded", "tied", "ac-selective")  # on every mesh in the default run; on these all the others too:
WHOLE = ("fsdp2", "tp2")


@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_equals_the_plain_model(mesh):
    check(mesh, VARIANTS, list(VARIANTS) if mesh in WHOLE else list(FIRST))


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh not in WHOLE])
def test_other_variants_on_wide_meshes_equal_the_plain_model(mesh):
    check(mesh, VARIANTS, [name for name in VARIANTS if name not in FIRST])


def test_one_process_variants_equal_the_plain_model():
    """Accumulation and checkpointing alone, and a mesh of one rank."""
    names = [name for name in VARIANTS if not name.startswith("reshard")]
    results = run_ranks(1, all_variants, names, VARIANTS, [], 1)[0]
    problems = []
    for name in names:
        problems += compare(name, results[name], plain("sgd" if name == "sgd" else "adamw", name == "tied"))
    assert not problems, "\n".join(problems)


@pytest.mark.cap(300)
@pytest.mark.parametrize("mesh, variant", [("fsdp2", "compile-selective"), pytest.param("tp2", "compile-full", marks=pytest.mark.slow), ("fsdp2xtp2", "compile")])
def test_compiled_mesh_equals_the_plain_model(mesh, variant):
    check(mesh, COMPILED, [variant])


ASYNC = [*ADAMW, "--compile.enabled=true", "--parallelism.async_tensor_parallel=true"]
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def overlapped(options: list[str], dp_size: int, enabled: bool = True) -> tuple[dict, dict[str, int]]:
    """A trajectory, and how often inductor's fused operators ran. A CPU has no symmetric memory: here the operators are PyTorch's
    own plain versions of them, gather then multiply, multiply then scatter, so that the rewritten graph runs for real."""
    import torch._functorch.config
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False  # counted is what is compiled here
    torch.distributed.is_nccl_available, tp.SYMMETRIC_MEMORY = lambda: True, ("cpu",)
    if not enabled:
        _symmetric_memory.enable_symm_mem_for_group = lambda name: None
    counts, library = dict.fromkeys(FUSED, 0), torch.library.Library("symm_mem", "IMPL")

    def counted(name: str, plainly: Callable) -> Callable:
        def run(*args, **kwargs):
            counts[name] += 1
            return plainly(*args, **kwargs)

        return run

    for name in FUSED:
        library.impl(name, counted(name, getattr(_symmetric_memory, f"_{name}_fallback")), "CPU")
    return trajectory(options, dp_size), counts


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor compiles with a C++ compiler, and there is none")
@pytest.mark.parametrize("mesh", ["tp2", "fsdp2xtp2"])
def test_asynchronous_tensor_parallelism_equals_the_plain_model(mesh):
    """And it does something: inductor rewrites nothing, in silence, where it does not find its patterns. Per block a step has two
    gathers with products behind them in forward and two in backward, and two scatters behind a product in forward; backward's
    two scatters are of sums of products, and stay as they are."""
    ranks, options, dp_size = MESHES[mesh]
    results = run_ranks(ranks, overlapped, [*ASYNC, *options], dp_size, timeout=270)
    assert not [p for seen, _ in results for p in compare(mesh, seen, plain("adamw", False))]
    blocks = 3 * STEPS
    assert [counts for _, counts in results] == [{FUSED[0]: 4 * blocks, FUSED[1]: 2 * blocks}] * ranks


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor compiles with a C++ compiler, and there is none")
def test_negative_control_without_symmetric_memory_nothing_is_fused():
    """As in a program that takes PyTorch 2.13 by its word, that `enable_symm_mem_for_group` need not be called."""
    results = run_ranks(2, overlapped, [*ASYNC, *MESHES["tp2"][1]], 1, False, timeout=270)
    assert [counts for _, counts in results] == [dict.fromkeys(FUSED, 0)] * 2


def refused(options: list[str]) -> str:
    try:
        train.build(load_config([*MODEL, f"--training.local_batch_size={BATCH // world().size}", *options], world().size))
    except InputError as error:
        return str(error)
    return "built"


def test_what_needs_a_gpu_says_so():
    """`run.device = "auto"`, where only the run finds out that there is none."""
    tensor = [f"--training.local_batch_size={BATCH}", "--parallelism.tensor_parallel=2"]
    assert all("async_tensor_parallel = true needs GPUs" in said for said in run_ranks(2, refused, [*ASYNC, *tensor]))
    flash = ["--training.attention=flash", "--training.param_dtype=bfloat16", "--model.head_dim=8", "--run.device=auto"]
    assert 'training.attention = "flash" is a kernel for GPUs, this is a cpu' in run_ranks(1, refused, flash)[0]


def stock_embedding(options: list[str], dp_size: int) -> dict:
    """The bug put back: PyTorch's own RowwiseParallel, whose output is exchanged asynchronously, on the embedding."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    tp.STYLES["vocab_embedding"] = lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return trajectory(options, dp_size)


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="the upstream bug is in torch 2.13.0 alone")
def test_negative_control_asynchronous_embedding_loses_its_gradient():
    ranks, options, dp_size = MESHES["fsdp2xtp2"]
    seen = run_ranks(ranks, stock_embedding, [*COMPILED["compile"], *options], dp_size)[0]
    problems = compare("stock", seen, plain("adamw", False))
    assert any("grad of tok_embeddings" in p for p in problems), "the comparison did not notice a lost gradient"


def unscaled(options: list[str], dp_size: int) -> dict:
    """The bug put in: no micro-batch counts as the last, so gradients are never reduced."""
    real, dp.synchronise_gradients = dp.synchronise_gradients, lambda model, last, accumulate: real(model, False, accumulate)
    return trajectory(options, dp_size)


def test_negative_control_missing_reduction_is_noticed():
    ranks, options, dp_size = MESHES["fsdp2"]
    with pytest.raises(AssertionError):
        check_one = run_ranks(ranks, unscaled, [*ADAMW, *options], dp_size)[0]
        problems = compare("unreduced", check_one, plain("adamw", False))
        assert not problems, "\n".join(problems)


def test_same_mesh_twice_is_bitwise_equal():
    ranks, options, dp_size = MESHES["fsdp2xtp2"]
    first, second = (run_ranks(ranks, trajectory, [*ADAMW, *options], dp_size)[0] for _ in range(2))
    assert first["loss"] == second["loss"] and first["norm"] == second["norm"]
    for key in "init", "grad", "weights":
        assert all(np.array_equal(first[key][n], second[key][n]) for n in first[key])


def test_weights_kept_sharded_over_some_ranks_equal_the_plain_model():
    ranks, options, dp_size = MESHES["fsdp4"]
    seen = run_ranks(ranks, trajectory, [*ADAMW, "--parallelism.reshard_after_forward=2", *options], dp_size)[0]
    problems = compare("reshard over 2", seen, plain("adamw", False))
    assert not problems, "\n".join(problems)


class Count(TorchDispatchMode):
    """How often a step runs a matrix product, attention, and a SiLU (which stands for the cheap rest)."""

    def __init__(self):
        super().__init__()
        self.seen = {"mm": 0, "attention": 0, "silu": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kind = {"mm": "mm", "silu": "silu", "_scaled_dot_product_flash_attention_for_cpu": "attention",
                "document_attention": "attention"}.get(name)  # fmt: skip
        if kind:
            self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


def counted(mode: str) -> tuple[dict, int]:
    """(operations of a forward and backward, bytes that autograd keeps between them) of one process."""
    cfg = load_config([*MODEL, *ADAMW, "--training.local_batch_size=24", f"--activation_checkpoint.mode={mode}"])
    job = train.build(cfg)
    tokens, kept = torch.zeros(24, SEQ, dtype=torch.int64), {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with Count() as count:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = job.model(tokens, torch.arange(tokens.shape[1]), functools.partial(train.linear_cross_entropy, labels=tokens, chunk_tokens=999))
        loss.backward()
    return count.seen, sum(kept.values())


def test_checkpointing_recomputes_what_it_says_and_keeps_less():
    """3 blocks of 7 products, one attention, one SiLU each; the head and all backward products come on top. The last product
    of a block is not recomputed: PyTorch stops once it has all that backward needs."""
    none, every_n, full, selective = (run_ranks(1, counted, mode)[0] for mode in ("none", "every_n", "full", "selective"))
    assert none[0]["attention"] == none[0]["silu"] == 3
    for mode, blocks in (every_n, 2), (full, 3):
        assert mode[0] == {"mm": none[0]["mm"] + 6 * blocks, "attention": 3 + blocks, "silu": 3 + blocks}
    assert selective[0] == {"mm": none[0]["mm"], "attention": 3, "silu": 6}
    assert full[1] < every_n[1] < none[1] and selective[1] < none[1]


def offloaded(options: list[str], dp_size: int) -> dict:
    return trajectory([*options, "--parallelism.cpu_offload=true"], dp_size)


def test_cpu_offload_equals_the_plain_model():
    ranks, options, dp_size = MESHES["fsdp2"]
    problems = compare("offload", run_ranks(ranks, offloaded, [*ADAMW, *options], dp_size)[0], plain("adamw", False))
    assert not problems, "\n".join(problems)


def bfloat16(options: list[str], dp_size: int) -> dict:
    return trajectory([*options, "--training.param_dtype=bfloat16"], dp_size)


@pytest.mark.parametrize("mesh", ["fsdp2", "fsdp2xtp2", "ddp2"])
def test_bfloat16_is_near_float32_and_keeps_float32_masters(mesh):
    """bfloat16 has 8 bits of mantissa: the loss agrees to 2^-8, and the first update, made on float32 masters, is no coarser
    than the gradients' own error."""
    ranks, options, dp_size = MESHES[mesh]
    seen = run_ranks(ranks, bfloat16, [*SGD, *options], dp_size)[0]
    oracle = plain("sgd", False)
    assert np.max(np.abs(np.array(seen["loss"]) / np.array(oracle["loss"]) - 1)) < 2**-8
    for n, want in oracle["grad"].items():
        assert np.linalg.norm(seen["grad"][n] - want) / np.linalg.norm(want) < 0.05, n
    assert all(w.dtype == np.float32 for w in seen["weights"].values())
