"""How long a traced step takes on a device: a roofline for the operators, rings for the collectives, two streams for overlap.

Every number that is not counted stands in `tools/plan/devices.toml` with its source, or here; nothing is fitted to a
configuration. `docs/planning.md` has the formulas and how far off they were.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import tomli
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.schema import ActivationCheckpoint, InputError, Model, Training
from models import MODELS
from models.kernels.causal_attention import causal_attention
from parallelisms import ac
from parallelisms.dp import param_dtype
from parallelisms.mesh import float32_products
from tools.plan.trace import Op, Step, Trace, Where
from training.metrics import peak_flops

HERE = Path(__file__).resolve().parent
NCCL_BASE_US = 6.6  # of starting any collective: NCCL's cost model (src/graph/tuning.cc, ring, LL)
MEMORY_EFFICIENCY = 0.8  # share of the memory's bandwidth that an elementwise kernel reaches; STREAM-like copies reach 0.9


class Device(BaseModel):
    """A row of tools/plan/devices.toml, which explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    peak_tflops: float = Field(0.0, ge=0)
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    link_gb_per_s: float = Field(gt=0)
    fabric_gb_per_s: float = Field(gt=0)
    host_gb_per_s: float = Field(26.0, gt=0)
    matmul_efficiency: float = Field(0.7, gt=0, le=1)
    attention_efficiency: float = Field(0.4, gt=0, le=1)
    link_efficiency: float = Field(0.8, gt=0, le=1)
    link_latency_us: float = Field(0.6, ge=0)
    fabric_latency_us: float = Field(2.7, ge=0)
    attention_backward: float = Field(1.0, gt=0)
    """Rate of attention's backward, to that of its forward; 1 where attention_efficiency is of both together."""
    attention_row_ns: float = Field(0.0, ge=0)
    """What attention's forward costs for each query, head and product whatever the length; 0 on GPUs."""
    overhead_us: float = Field(0.0, ge=0)
    """Time that each operator (views are none) takes beside its work; 0 where a queue hides it."""
    policy_us: float = Field(0.0, ge=0)
    """What selective checkpointing adds to each operator of a block's forward, its recomputation included; as above."""
    source: str = ""

    @property
    def peak(self) -> float:
        """Peak FLOP/s, dense bfloat16."""
        return peak_flops(self.name, self.peak_tflops) or 0.0


def load_device(name: str) -> Device:
    """A row of the table, or the one table of a TOML file, or `cpu`: this machine, measured now. Raises InputError."""
    if name == "cpu":
        return measure_cpu()
    path = Path(name) if name.endswith(".toml") else HERE / "devices.toml"
    try:
        table = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--device {name}: cannot be read: {error}") from None
    if path.name == "devices.toml" and path.parent == HERE:
        if name.lower() not in table:
            near = get_close_matches(name.lower(), table, n=1)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise InputError(f"--device {name}: unknown; {hint}known are {', '.join(table)}, cpu (this machine, measured) and "
                             "a TOML file of your own")  # fmt: skip
        rows = [table[name.lower()]]
    else:
        rows = [row for row in table.values() if isinstance(row, dict)] or [table]
    if len(rows) != 1:
        raise InputError(f"--device {name}: one table with the numbers of one device is needed, found {len(rows)}")
    try:
        device = Device(**rows[0])
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise InputError(f"--device {name}: {problems} (tools/plan/devices.toml explains the fields)") from None
    if not device.peak:
        raise InputError(f"--device {name}: give peak_tflops, or a name that training/metrics.py::PEAK_TFLOPS knows")
    return device


def measure_cpu(threads: int = 0) -> Device:
    """This machine as a device: rates of products, attention, copies and of an operator that does nothing, a second in all.

    The rates are what is attained, so the efficiencies are 1. Links are guesses: processes of one machine that talk by gloo.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    float32_products()  # as a run
    dtype = param_dtype(Training(), torch.device("cpu"))
    a, b = torch.randn(2048, 768).to(dtype), torch.randn(768, 768).to(dtype)
    products = 2 * 2048 * 768 * 768 / _seconds(lambda: a @ b)
    rows, short, long = 1 << 13, 256, 1024  # the same queries in short and in long sequences: two equations

    def attend(length: int) -> tuple[float, float]:
        """Seconds for a query of each of the two products of forward, and of the five of backward."""
        q, k, v, grad = (torch.randn(rows // length // 4, 4, length, 64).to(dtype).requires_grad_() for _ in range(4))
        out = causal_attention(q, k, v)
        forward = _seconds(lambda: causal_attention(q, k, v))
        backward = _seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        return forward / rows / 2, backward / rows / 5

    per_row = {length: attend(length) for length in (short, long)}
    per_key, behind = (max(1e-12, (b - a) / (long - short)) for a, b in zip(per_row[short], per_row[long]))
    attention = 64 / per_key  # FLOP/s: half of the 2 x 64 of a query and a key
    x, y = torch.randn(1 << 24), torch.empty(1 << 24)
    copied = 2 * x.nbytes / _seconds(lambda: y.copy_(x))
    overhead, policy = _operator_overheads(dtype)
    torch.set_num_threads(before)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Device(
        name="this machine's CPU", peak_tflops=products / 1e12, memory_gib=gib,
        memory_gb_per_s=copied / 1e9 / MEMORY_EFFICIENCY,
        link_gb_per_s=1.0, fabric_gb_per_s=1.0, host_gb_per_s=copied / 1e9, matmul_efficiency=1.0,
        attention_efficiency=min(1.0, attention / products), link_efficiency=1.0, link_latency_us=50, fabric_latency_us=50,
        attention_backward=per_key / behind, attention_row_ns=max(0.0, per_row[short][0] - per_key * short) * 1e9,
        overhead_us=overhead * 1e6, policy_us=policy * 1e6,
        source="measured now; links assumed",
    )  # fmt: skip


def _operator_overheads(dtype: torch.dtype) -> tuple[float, float]:
    """Seconds that an operator takes beside its work, in forward and backward of small models: with the views, the autograd and
    the Python around it, where there is no work; and until all threads have woken and come together, which is the time that
    as many sequences on all threads take beyond one on one (32,768 elements are the least that ATen gives a thread).
    And what selective checkpointing's policy, which is Python, adds for each operator of forward."""
    threads = torch.get_num_threads()

    def step(dim: int, batch: int, length: int, mode: str = "none") -> Callable[..., object]:
        family = MODELS[Model().family]  # any: what an operator costs beside its work depends on no family
        model = ac.apply(family.build(family.small(dim)).to(dtype), ActivationCheckpoint(mode=mode))
        tokens, positions = torch.zeros(batch, length, dtype=torch.int64), torch.arange(length)
        return lambda backward=True: model(tokens, positions).sum().backward() if backward else model(tokens, positions)

    def operators(run: Callable, *args: bool) -> int:
        with Trace() as trace:
            run(*args)
        return sum(isinstance(row, Op) for stretch in trace.stretches for row in stretch.rows)

    together = _seconds(step(64, threads, 512), 40)
    torch.set_num_threads(1)
    alone, empty, policed = _seconds(step(64, 1, 512), 40), step(16, 1, 4), step(16, 1, 4, "selective")
    each = _seconds(empty) / operators(empty)
    policy = (_seconds(policed) - each * operators(policed)) / operators(empty, False)
    torch.set_num_threads(threads)
    return each + max(0.0, together - alone) / operators(empty), max(0.0, policy)


def _seconds(run: Callable[[], object], rounds: int = 15) -> float:
    """The fastest of `rounds` runs after three: a rate that the machine has, whatever else it does at the time."""
    times = []
    for i in range(rounds + 3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times[3:])


# Collectives.
@dataclass(frozen=True)
class Ring:
    """What one mesh dimension's group is made of."""

    ranks: int
    hosts: int

    @classmethod
    def of(cls, ranks: list[int], per_host: int) -> "Ring":
        return cls(len(ranks), len({rank // per_host for rank in ranks}))

    def bandwidth(self, device: Device) -> float:
        """Bytes per second that a ring of them moves. Between hosts every rank of the group has its own card to the
        fabric, and a ring runs through all of them; inside a host the links limit."""
        link = device.link_gb_per_s
        if self.hosts > 1:
            link = min(link, device.fabric_gb_per_s * self.ranks / self.hosts)
        return link * 1e9 * device.link_efficiency

    def seconds(self, kind: str, message: int, device: Device) -> float:
        """Alpha-beta model of a ring: hops of latency alpha, bytes over bandwidth. `message` as NCCL's tests count it:
        every rank sends (n-1)/n of it, twice for an all-reduce (nccl-tests, doc/PERFORMANCE.md)."""
        if self.ranks == 1:
            return 0.0
        rounds = 2 if kind == "all-reduce" else 1
        between = self.hosts if self.hosts > 1 else 0
        hops = (self.ranks - 1 - between) * device.link_latency_us + between * device.fabric_latency_us
        sent = message * (self.ranks - 1) / self.ranks
        return rounds * (max(hops, 0) * 1e-6 + sent / self.bandwidth(device)) + NCCL_BASE_US * 1e-6


# The step.
@dataclass
class Line:
    """All collectives of one kind on one mesh dimension in a step."""

    count: int = 0
    sent: int = 0  # bytes: of messages
    smallest: int = 0
    largest: int = 0
    seconds: float = 0.0
    exposed: float = 0.0  # seconds in which nothing is computed


@dataclass
class Estimate:
    seconds: float = 0.0
    products: float = 0.0  # seconds of matrix products
    attention: float = 0.0
    memory_bound: float = 0.0
    again: float = 0.0  # seconds of these that are recomputation
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)  # (mesh dimension, kind of collective)
    bars: list[tuple[str, float, float, str]] = field(default_factory=list)  # (stream, start, end, where) of what was traced

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.memory_bound

    @property
    def exposed(self) -> float:
        return sum(line.exposed for line in self.lines.values())


def op_seconds(op: Op, where: Where, device: Device, fused: bool) -> tuple[float, float, float]:
    """Seconds of an operator as product, as attention, and as bound by memory. Attention is counted whole in `Op`, but
    causal kernels do half of it."""
    rate = device.peak
    traffic = op.fused if fused and where.block >= 0 else op.traffic
    product = op.product_flops / (rate * device.matmul_efficiency)
    attention = op.attention_flops / 2 / (rate * device.attention_efficiency) + op.attention_rows * device.attention_row_ns * 1e-9
    if "backward" in op.name:
        attention /= device.attention_backward
    moved = traffic / (device.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY) + device.overhead_us * 1e-6
    return product, attention, moved


def estimate(step: Step, device: Device, per_host: int, compiled: bool, selective: bool = False) -> Estimate:
    """Play the step through: one stream computes, one moves FSDP's data beside it, and each waits where PyTorch waits.

    - FSDP's all-gather starts when the one before has been copied out (`FSDPParamGroup.wait_for_unshard`), so the gather
      of the next block runs while this one is computed; computing goes on when its own weights are there.
    - FSDP's reduce-scatter (and HSDP's all-reduce) starts when the block's gradients are there; the gradients' clipping
      waits for the last.
    - Tensor parallelism's collectives, and all small ones, stand between operators that need them: computing waits.
    """
    rings = {dim: Ring.of(ranks, per_host) for dim, ranks in step.groups.items()}
    result = Estimate()
    now = free = gate = 0.0  # seconds: of computing; when FSDP's stream is free; since when the next gather may run
    gathers: list[float] = []  # ends of all-gathers that were not waited for yet
    pending: tuple[str, str] | None = None
    per_micro: dict[int, float] = {}
    for stretch in step.stretches:
        where, times, began = stretch.where, step.times(stretch.where), now
        busy = now  # since when nothing but computing happened

        def compute_bar(until: float) -> None:
            if until > busy:
                result.bars.append(("compute", busy, until, _place(where)))

        if stretch.where.phase in ("clip", "optimizer") and free > now:
            _line(result, *(pending or ("dp_shard", "reduce-scatter"))).exposed += free - now
            now = free
        for op in stretch.rows:
            if not isinstance(op, Op):
                continue
            if op.kind:
                seconds = rings[op.dimension].seconds(op.kind, op.message, device) if op.dimension in rings else 0.0
                line = _line(result, op.dimension, op.kind)
                line.smallest = min(line.smallest or op.message, op.message)
                line.largest = max(line.largest, op.message)
                line.count, line.sent = line.count + times, line.sent + times * op.message
                line.seconds += times * seconds
                name = f"{op.dimension} {op.kind}"
                if not op.background:
                    compute_bar(now)
                    result.bars.append((name, now, now + seconds, _place(where)))
                    line.exposed += times * seconds
                    now = busy = now + seconds
                    continue
                start = max(free, gate if op.kind == "all-gather" else now)
                free = start + seconds
                result.bars.append((name, start, free, _place(where)))
                if op.kind == "all-gather":
                    gathers.append(free)
                else:
                    pending = (op.dimension, op.kind)
                continue
            if op.wait and gathers:
                ready = gathers.pop(0)
                if ready > now:
                    compute_bar(now)
                    _line(result, "dp_shard", "all-gather").exposed += times * (ready - now)
                    now = busy = ready
                gate = now
            product, attention, moved = op_seconds(op, where, device, compiled)
            if selective and where.phase == "forward" and 0 <= where.block < step.layers:
                moved += device.policy_us * 1e-6
            result.products, result.attention = result.products + times * product, result.attention + times * attention
            result.memory_bound += times * moved
            whole = op.product_flops + op.attention_flops
            result.again += times * (product + attention) * (op.again / whole if whole else 0)
            now += product + attention + moved
        compute_bar(now)
        per_micro[where.micro] = per_micro.get(where.micro, 0.0) + now - began
    result.seconds = now + (step.repeats - 1) * per_micro.get(1, 0.0)
    return result


def _line(result: Estimate, dimension: str, kind: str) -> Line:
    return result.lines.setdefault((dimension, kind), Line())


def _place(where: Where) -> str:
    return f"{where.phase} {where.block}, {where.micro}" if where.phase in ("forward", "backward") else where.phase
