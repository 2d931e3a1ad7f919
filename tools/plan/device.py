"""A device as numbers: a row of `devices.toml`, a file of the user's, or this machine, measured
now."""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Literal

from configs.cpu import float32_products

import tomli
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.schema import ActivationCheckpoint, InputError, Model, Training
from models import MODELS
from models.kernels.causal_attention import causal_attention
from parallelisms import blocks
from parallelisms.dp import param_dtype
from tools.plan.rows import DEVICES, device_row
from tools.plan.step import Op
from tools.plan.trace import Trace
from training.metrics import peak_flops

# share of the memory's bandwidth that an elementwise kernel reaches; STREAM-like copies reach 0.9
MEMORY_EFFICIENCY = 0.8


class Device(BaseModel):
    """Device: a row of tools/plan/devices.toml, which explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    peak_tflops: float = Field(0.0, ge=0)
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    link_gb_per_s: float = Field(gt=0)
    fabric_gb_per_s: float = Field(gt=0)
    host_gb_per_s: float = Field(26.0, gt=0)
    matmul_efficiency: float = Field(0.7, gt=0, le=1)
    attention_efficiency: float = Field(0.4, gt=0, le=1)
    fast_attention_efficiency: float = Field(0.0, ge=0, le=1)
    """Of cuDNN's kernel and FlashAttention-3; 0: there is no such kernel."""
    packed_attention_efficiency: float = Field(0.0, ge=0, le=1)
    """Of documents, windows and gathered keys, if `plan.with_kernel` has chosen another kernel for
    all other attention."""
    narrow_attention: float = Field(1.0, gt=0, le=1)
    """Share of these rates that is left for heads of at most 64 numbers."""
    link_efficiency: float = Field(0.8, gt=0, le=1)
    link_latency_us: float = Field(0.6, ge=0)
    fabric_latency_us: float = Field(2.7, ge=0)
    attention_backward: float = Field(1.0, gt=0)
    """Rate of attention's backward relative to its forward; 1 where attention_efficiency is of both
    together."""
    attention_row_ns: float = Field(0.0, ge=0)
    """Overhead of attention's forward for each query, head and matmul, independent of the length; 0 on
    GPUs."""
    overhead_us: float = Field(0.0, ge=0)
    """Launch overhead of each operator (views are none); 0 where the device's queue hides it."""
    policy_us: float = Field(0.0, ge=0)
    """Overhead that selective checkpointing's policy adds to each operator of a block's forward,
    its recomputation included; 0 as above."""
    source: str = ""

    @property
    def peak(self) -> float:
        """Peak FLOP/s, dense bfloat16."""
        return self.peak_tflops * 1e12 or known_peak(self.name) or 0.0


known_peak = cache(peak_flops)  # a plan asks for each of its operators


def load_device(name: str) -> Device:
    """Load a row of the table, or the one table of a TOML file, or `cpu`: this machine, measured
    now. Raises InputError."""
    if name == "cpu":
        return measure_cpu()
    row = device_row(name)
    try:
        device = Device(**row)
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise InputError(
            f"--device {name}: {problems} (tools/plan/devices.toml explains the fields)"
        ) from None
    if not device.peak:
        raise InputError(
            f"--device {name}: give peak_tflops, or a name that training/metrics.py::PEAK_TFLOPS "
            "knows"
        )
    return device


def known_device(name: str) -> Device | None:
    """Return the row of the table for a GPU with this name (torch.cuda.get_device_name()); None if
    there is none."""
    rows = tomli.loads(DEVICES.read_text(encoding="utf-8")).values()
    return next((Device(**row) for row in rows if row["name"] == name), None)


def measure_cpu(threads: int = 0) -> Device:
    """Measure this machine as a device, in about a second: rates of matmuls, attention and copies,
    and the overhead of an operator.

    The rates are attained ones, so the efficiencies are 1. The links are guesses, for gloo within
    one machine.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    float32_products()  # as a run does
    dtype = param_dtype(Training(), torch.device("cpu"))
    a = torch.randn(2048, 768).to(dtype)
    b = torch.randn(768, 768).to(dtype)
    matmul = 2 * 2048 * 768 * 768 / _seconds(lambda: a @ b)  # FLOP/s
    per_key, per_row, backward = _attention_costs(dtype)
    attention = 64 / per_key  # FLOP/s: half of the 2 x 64 of a query and a key
    x = torch.randn(1 << 24)
    y = torch.empty(1 << 24)
    copied = 2 * x.nbytes / _seconds(lambda: y.copy_(x))
    overhead, policy = _operator_overheads(dtype)
    torch.set_num_threads(threads_before)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Device(
        name="this machine's CPU",
        kind="cpu",
        peak_tflops=matmul / 1e12,
        memory_gib=gib,
        memory_gb_per_s=copied / 1e9 / MEMORY_EFFICIENCY,
        link_gb_per_s=1.0,
        fabric_gb_per_s=1.0,
        host_gb_per_s=copied / 1e9,
        matmul_efficiency=1.0,
        attention_efficiency=min(1.0, attention / matmul),
        link_efficiency=1.0,
        link_latency_us=50,
        fabric_latency_us=50,
        attention_backward=backward,
        attention_row_ns=per_row * 1e9,
        overhead_us=overhead * 1e6,
        policy_us=policy * 1e6,
        source="measured now; links assumed",
    )


def _attention_costs(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the seconds of forward per query and key, and per query independent of the length; and
    the rate of backward relative to forward.

    The same number of queries in short and in long sequences gives two equations.
    """
    rows = 1 << 13
    short = 256
    long = 1024

    def seconds(length: int) -> tuple[float, float]:
        """Per query and matmul: forward has two matmuls, backward five."""
        shape = (rows // length // 4, 4, length, 64)
        q, k, v, grad = (torch.randn(shape).to(dtype) for _ in range(4))
        for tensor in (q, k, v, grad):
            tensor.requires_grad_()
        out = causal_attention(q, k, v)
        forward = _seconds(lambda: causal_attention(q, k, v))
        backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        return forward / rows / 2, backward / rows / 5

    at_short = seconds(short)
    at_long = seconds(long)
    slopes = [(b - a) / (long - short) for a, b in zip(at_short, at_long)]
    forward, backward = (max(1e-12, slope) for slope in slopes)
    per_query = max(0.0, at_short[0] - forward * short)
    return forward, per_query, forward / backward


def _operator_overheads(dtype: torch.dtype) -> tuple[float, float]:
    """Overhead of an operator in seconds; and what selective checkpointing adds to an operator of
    forward, since its policy is Python.

    The first has two parts. One is the views, the autograd and the Python around an operator: the
    time of a model so small that there is no work. The other is the threads' fork and join: the
    time of one sequence per thread on all threads, minus that of one sequence on one thread.
    (32,768 elements are the least that ATen gives a thread.)
    """
    threads = torch.get_num_threads()

    def step(dim: int, batch: int, length: int, mode: str = "none") -> Callable[..., object]:
        # any family will do: the overhead of an operator does not depend on it
        family = MODELS[Model().family]
        model = family.build(family.small(dim)).to(dtype)
        model = blocks.checkpoint_blocks(model, ActivationCheckpoint(mode=mode))
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        positions = torch.arange(length)

        def run(backward: bool = True) -> None:
            out = model(tokens, positions)
            if backward:
                out.sum().backward()

        return run

    def operators(run: Callable, *args: bool) -> int:
        with Trace() as trace:
            run(*args)
        return sum(isinstance(row, Op) for stretch in trace.stretches for row in stretch.rows)

    together = _seconds(step(64, threads, 512), 40)
    torch.set_num_threads(1)
    alone = _seconds(step(64, 1, 512), 40)
    empty = step(16, 1, 4)
    policed = step(16, 1, 4, "selective")
    per_operator = _seconds(empty) / operators(empty)
    policy = (_seconds(policed) - per_operator * operators(policed)) / operators(empty, False)
    torch.set_num_threads(threads)
    return per_operator + max(0.0, together - alone) / operators(empty), max(0.0, policy)


def _seconds(run: Callable[[], object], rounds: int = 15) -> float:
    """Return the fastest of `rounds` runs after three, so that other load on the machine counts
    little."""
    times = []
    for _ in range(rounds + 3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times[3:])
