"""Asynchronous tensor parallelism on a CPU: a run in which the fused operators are PyTorch's own plain
versions of them, and are counted."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from parallelisms import async_tp
from tests.parity import trajectory
from tests.runs import ADAMW

ASYNC = [*ADAMW, "--compile.enabled=true", "--parallelism.async_tensor_parallel=true"]
SELECTIVE = "--activation_checkpoint.mode=selective"
AGAIN = [SELECTIVE, "--activation_checkpoint.gather_again=true"]
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


class Overlapped(NamedTuple):
    trajectory: dict
    calls: dict[str, int]  # of the fused operators
    behind: list[int]  # GEMMs between the start of every other all-gather in a block and its wait


def overlapped(options: list[str], dp_size: int) -> Overlapped:
    """Emulate symmetric memory on a CPU: the operators are PyTorch's own plain versions of them,
    all-gather then matmul, matmul then scatter, so that the rewritten graph runs for real."""
    import torch._functorch.config
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    # counted is what is compiled here
    config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    config.compile_threads = 1  # a pool of compilers costs more than these few kernels
    torch.distributed.is_nccl_available, async_tp.SYMMETRIC_MEMORY = lambda: True, ("cpu",)
    counts, library = dict.fromkeys(FUSED, 0), torch.library.Library("symm_mem", "IMPL")

    def counted(name: str, plainly: Callable) -> Callable:
        def run(*args, **kwargs):
            counts[name] += 1
            return plainly(*args, **kwargs)

        return run

    for name in FUSED:
        library.impl(name, counted(name, getattr(_symmetric_memory, f"_{name}_fallback")), "CPU")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seen = trajectory(options, dp_size)
    return Overlapped(seen, counts, gemms_behind_gathers(profile))


def gemms_behind_gathers(profile: torch.profiler.profile) -> list[int]:
    found, begun, fused_until = [], None, 0.0
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.time_range.start < fused_until:
            continue  # inside of a fused operator
        if event.name.startswith("symm_mem::"):
            fused_until = event.time_range.end
        elif event.name == "_c10d_functional::all_gather_into_tensor":
            begun = 0
        elif event.name == "_c10d_functional::wait_tensor" and begun is not None:
            found.append(begun)
            begun = None
        elif event.name == "aten::mm" and begun is not None:
            begun += 1
    return found
