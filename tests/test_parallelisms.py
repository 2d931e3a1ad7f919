"""Each option of a parallelism does what it says, alone: what no comparison with the plain model can see, because an option that
does nothing computes the same numbers."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import train
from configs.load import load_config
from configs.schema import Compile, Training
from models import llama
from parallelisms import attention, compile, dp, mesh
from tests.ranks import run_ranks
from tests.runs import SMALL_MODEL, run, tiny_run
from tools.plan import trace


@pytest.mark.parametrize("kernel, enabled", [
    ("auto", {"flash", "cudnn", "mem_efficient", "math"}), ("flash", {"flash"}), ("cudnn", {"cudnn"}),
])  # fmt: skip
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


def compiled_graphs(enabled: bool, backend: str) -> tuple[int, int]:
    """How many graphs torch.compile and AOTAutograd have made when two blocks have run."""
    from torch._dynamo.utils import counters

    args = llama.Args(**llama.FLAVORS["debug"] | {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8,
                                                  "hidden_dim": 16, "vocab_size": 11})  # fmt: skip
    model = llama.build(args)
    assert compile.apply(model, Compile(enabled=enabled, backend=backend)) is model
    counters.clear()
    model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)).sum().backward()
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["ok"]


def three_ways() -> list[tuple[int, int]]:
    return [compiled_graphs(*way) for way in ((False, "eager"), (True, "eager"), (True, "aot_eager"))]


def test_blocks_are_compiled_by_the_backend_that_is_named():
    """Both blocks have the same code, which is compiled once. Only aot_eager hands it to AOTAutograd."""
    assert run_ranks(1, three_ways)[0] == [(0, 0), (1, 0), (1, 1)]


def graph_break() -> str:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

    model = nn.Module()
    model.layers = nn.ModuleDict({"0": Block()})
    compile.apply(model, Compile(enabled=True, backend="eager"))
    try:
        model.layers["0"](torch.zeros(2))
    except torch._dynamo.exc.Unsupported:
        return "refused"
    return "ran"


def test_a_graph_break_in_a_block_is_an_error():
    assert run_ranks(1, graph_break) == ["refused"]


class Gathers(TorchDispatchMode):
    """How many gathers had begun when each matrix product ran."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers, self.at_product = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.gathers += "allgather" in name or "all_gather_into_tensor" in name
        if name == "mm":
            self.at_product.append(self.gathers)
        return func(*args, **(kwargs or {}))


def gathers_in_forward_and_backward(prefetch: int) -> tuple[list[int], list[int]]:
    """On rank 0 of two that do not exist: how many gathers had begun at the first product of each of four blocks, in the order
    in which the forward pass reaches the blocks; and the same for the backward pass, which begins with the last block."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with trace.pretend(2, 2):
        options = [*SMALL_MODEL, "--model.n_layers=4", "--parallelism.reshard_after_forward=true", f"--parallelism.prefetch={prefetch}"]
        job = train.build(load_config(options, 2, 2))
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        with Gathers() as seen:
            loss = job.model(tokens, torch.arange(16), lambda h, weight: (h @ weight.t()).sum())
            forward, before = seen.at_product[:], seen.gathers
            seen.at_product.clear()
            loss.backward()
        backward = [count - before for count in seen.at_product[2:]]  # the output's two products come first
        return forward[:28:7], backward[::14]  # a block has seven products, and each has two in the backward pass


def both_prefetches() -> list[tuple[list[int], list[int]]]:
    return [gathers_in_forward_and_backward(prefetch) for prefetch in (0, 2)]


def test_prefetch_gathers_so_many_blocks_ahead():
    """The root and block 0 are gathered before the first product; with prefetch = 2 so are blocks 1 and 2. In the backward pass
    the output comes first, and FSDP2 gathers one block ahead if it is not told how many."""
    without, two_ahead = run_ranks(1, both_prefetches)[0]
    assert without == ([2, 3, 4, 5], [3, 4, 5, 5])
    assert two_ahead == ([4, 5, 5, 5], [4, 5, 5, 5])


# option -> gathers of the forward pass, and of the backward pass after it: the root, 4 blocks, the output.
GATHERS = {
    "default": (6, 4),  # the output keeps its weights, because backward needs them at once
    "true": (6, 5),
    "false": (6, 0),
    "default --parallelism.keep_gathered=3": (6, 1),
}


def gathers_of_each_option() -> list[tuple[int, int]]:
    dist.destroy_process_group()
    counts = []
    for words in GATHERS:
        with trace.pretend(2, 2):
            options = f"--parallelism.reshard_after_forward={words}".split()
            job = train.build(load_config([*SMALL_MODEL, "--model.n_layers=4", *options], 2, 2))
            with Gathers() as seen:
                loss = job.model(torch.zeros(1, 16, dtype=torch.int64), torch.arange(16), lambda h, weight: (h @ weight.t()).sum())
                forward = seen.gathers
                loss.backward()
            counts.append((forward, seen.gathers - forward))
    return counts


def test_weights_that_are_freed_after_forward_are_gathered_again():
    assert run_ranks(1, gathers_of_each_option)[0] == list(GATHERS.values())


@pytest.mark.parametrize("kind, hardware, dtype", [
    ("cuda", (7, 5), torch.float32), ("cuda", (8, 0), torch.bfloat16), ("cuda", (9, 0), torch.bfloat16),
    ("cpu", (False, False), torch.float32), ("cpu", (True, False), torch.bfloat16), ("cpu", (False, True), torch.bfloat16),
])  # fmt: skip
def test_the_type_of_the_weights_follows_the_hardware(kind, hardware, dtype, monkeypatch):
    """hardware: the compute capability of a GPU, or whether a CPU has AMX, AVX512-BF16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: hardware)
    for probe, answer in zip(("_is_amx_tile_supported", "_is_avx512_bf16_supported"), hardware):
        monkeypatch.setattr(torch.cpu, probe, lambda answer=answer: answer, raising=False)
    assert dp.param_dtype(Training(), torch.device(kind)) == dtype
    assert dp.param_dtype(Training(param_dtype="float32"), torch.device(kind)) == torch.float32
    assert dp.param_dtype(Training(param_dtype="bfloat16"), torch.device(kind)) == torch.bfloat16


def test_nccls_flight_recorder_is_on_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    mesh.record_flights(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7" and os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/nccl-"


def watched_run(options: list[str], folder: Path) -> dict:
    """A run of this process; what PyTorch and Python are set to during its steps."""
    seen = {"deterministic": set(), "collector": set(), "collections": Counter()}
    step, collect = train.train_step, gc.collect

    def watched_step(*args):
        seen["deterministic"].add(torch.are_deterministic_algorithms_enabled())
        seen["collector"].add(gc.isenabled())
        seen["collections"]["steps"] += 1
        return step(*args)

    def watched_collect() -> int:
        seen["collections"][seen["collections"]["steps"]] += 1
        return collect()

    train.train_step, train.gc.collect = watched_step, watched_collect
    code, errors = run(options, folder)
    assert code == 0, errors
    return seen


def test_a_run_asks_for_deterministic_kernels_and_collects_garbage_at_its_own_times(tmp_path):
    more = ["--run.deterministic=true", "--run.gc_interval=3", "--training.steps=7"]
    seen = run_ranks(1, watched_run, [*tiny_run(tmp_path), *more], tmp_path / "run")[0]
    assert seen["deterministic"] == {True} and not torch.are_deterministic_algorithms_enabled()
    assert seen["collector"] == {False}, "Python collects at a moment of its own, and all ranks wait"
    assert seen["collections"] == {"steps": 7, 3: 1, 6: 1}
