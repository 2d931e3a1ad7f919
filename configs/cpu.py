"""Sets up the CPU and the libraries below PyTorch for a process: how threads wait, which library
runs float32 GEMMs, what memory is kept.

Import this module before torch: OpenMP reads its settings when its library is loaded. `train.py`
and the packages whose modules are started with `python -m` (tools, data, checkpoint) do so first of
all. Settings in the environment take precedence.
"""

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

# A thread that waits spins for some 10 us, then sleeps. If it slept at once, a step would take
# longer. If it spun for long, as OpenMP does by default, a step would take several times longer
# when other work wants the cores (docs/performance.md).
THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

# Values of ONEDNN_MAX_CPU_ISA that leave out bfloat16 (oneDNN's documentation, CPU dispatcher control)
WITHOUT_BFLOAT16 = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
)

# parameters of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

for _name, _value in THREADS.items():
    os.environ.setdefault(_name, _value)


def keep_memory() -> None:
    """Let this process keep the memory that tensors give back, as the GPU's allocator does.

    glibc returns large pieces to the kernel, and the next tensor touches its pages again, which
    takes a good part of a step where layers are large (docs/performance.md). With these settings of
    mallopt(3) nothing is made by mmap and nothing is trimmed. Where the C library has no mallopt,
    this does nothing.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def float32_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Let oneDNN run float32 GEMMs where MKL, PyTorch's choice, reaches only half the throughput: on
    AMD's processors with AVX-512 (340 against 164 GFLOP/s at 2048^3 on two cores of Zen 5,
    docs/performance.md).

    PyTorch takes oneDNN for float32 only if it may compute in bfloat16 inside. oneDNN does that
    with AMX alone, which no processor of AMD has: it runs its float32 kernel. A matmul whose result
    bfloat16 cannot represent makes sure of it.
    """
    import torch  # not above: see the first paragraph

    if (
        not cpuinfo.exists()
        or "AuthenticAMD" not in cpuinfo.read_text()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        return
    torch.set_float32_matmul_precision("medium")
    fine = torch.full((64, 64), 1 + 2.0**-20)  # bfloat16 ends at 2^-7
    if not torch.equal(fine @ torch.eye(64), fine):
        torch.set_float32_matmul_precision("highest")


def bfloat16_is_fast() -> bool:
    """Return whether oneDNN multiplies bfloat16 faster than float32 here: with AMX or AVX512-BF16,
    unless its environment forbids their use. Elsewhere a GEMM takes a hundred times longer than in
    float32."""
    import torch

    for name in "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA":
        if os.environ.get(name, "").upper() in WITHOUT_BFLOAT16:
            return False
    # private probes, absent on some platforms: then it is not known to be fast
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def bfloat16_slowness() -> float:
    """Measure how many times longer a bfloat16 GEMM of 256^3 takes here than one in float32. Takes
    a fifth of a second where that is much."""
    import torch

    seconds = []
    for dtype in torch.bfloat16, torch.float32:
        x = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
    return seconds[0] / seconds[1]


def ordered_sums() -> None:
    """Let the gradients of indexed rows be added in one order. By default the threads of `index_put`
    add float32 as they come, and a mixture of experts differs from run to run. Where run.deterministic
    has asked for more, that stays: operators that cannot repeat are refused."""
    import torch

    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def cpu_settings() -> None:
    """Apply the settings of a run on a CPU that need torch to be loaded."""
    keep_memory()
    float32_products()
    ordered_sums()
