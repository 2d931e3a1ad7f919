"""Asynchronous tensor parallelism on a CPU: a run in which the fused operators are PyTorch's own plain
versions of them, and are counted."""

from collections.abc import Callable

from parallelisms import async_tp
from tests.parity import trajectory
from tests.runs import ADAMW

ASYNC = [*ADAMW, "--compile.enabled=true", "--parallelism.async_tensor_parallel=true"]
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def overlapped(
    options: list[str], dp_size: int, enabled: bool = True
) -> tuple[dict, dict[str, int]]:
    """A trajectory, and how often inductor's fused operators ran. A CPU has no symmetric memory:
    here the operators are PyTorch's own plain versions of them, all-gather then matmul, matmul then
    scatter, so that the rewritten graph runs for real."""
    import torch._functorch.config
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    # counted is what is compiled here
    config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    torch.distributed.is_nccl_available, async_tp.SYMMETRIC_MEMORY = lambda: True, ("cpu",)
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
