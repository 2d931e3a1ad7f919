"""Estimate the time of a traced step on a device: a roofline for the operators, rings for the
collectives, two streams for overlap.

Numbers that are not counted are in `tools/plan/devices.toml` with their sources, or here. Nothing
is fitted to a configuration. `docs/planning.md` has the formulas and their errors.
"""

from dataclasses import dataclass, field

from tools.plan.device import MEMORY_EFFICIENCY, Device
from tools.plan.routing import NO_EXPERTS, Chosen
from tools.plan.stack import OURS, Software
from tools.plan.step import (
    IN_BLOCKS,
    STAGE,
    Op,
    Step,
    Stretch,
    Where,
    fsdp_dimension,
    ranks_of_stage,
)

# attention that cuDNN does not compute: models/kernels/document_attention.py, ruled_attention.py
PACKED = ("aten._flash_attention_", "plumbline.ruled_attention")
NARROW = 64  # numbers of a head: one for which `narrow_attention` was measured
# Rows of a tile of a grouped GEMM. The last tile of a group is assumed half empty.
GROUP_TILE = 128
EVERY_ROW = (1.0, 1.0)  # one row for each expert of a token
NCCL_BASE_US = 6.6  # of starting any collective: NCCL's cost model (src/graph/tuning.cc, ring, LL)


@dataclass(frozen=True)
class Ring:
    """Size of one mesh dimension's group: its ranks, and the hosts that they are on."""

    ranks: int
    hosts: int

    @classmethod
    def of(cls, ranks: list[int], per_host: int) -> "Ring":
        return cls(len(ranks), len({rank // per_host for rank in ranks}))

    def bandwidth(self, device: Device) -> float:
        """Return the bytes per second that a ring moves. Between hosts each rank of the group has
        its own network card, and a ring runs through all of them. Inside a host the links limit."""
        link = device.link_gb_per_s
        if self.hosts > 1:
            link = min(link, device.fabric_gb_per_s * self.ranks / self.hosts)
        return link * 1e9 * device.link_efficiency

    def seconds(
        self, kind: str, message: int, device: Device, sent: tuple[float, float] = EVERY_ROW
    ) -> float:
        """Estimate a collective by the alpha-beta model of a ring: hops of latency alpha, bytes
        over bandwidth. `message` is counted as NCCL's tests count it: every rank sends (n-1)/n of
        it, twice for an all-reduce (nccl-tests, doc/PERFORMANCE.md). sent: the part of an
        all-to-all's rows that is sent inside the host, and of those for other hosts."""
        if self.ranks == 1:
            return 0.0
        bandwidth = self.bandwidth(device)
        if kind in ("send", "receive"):
            return message / bandwidth + (self.latency_us(device) + NCCL_BASE_US) * 1e-6
        if kind == "all-to-all":
            return self.all_to_all_seconds(message, device, sent)
        rounds = 2 if kind == "all-reduce" else 1
        between_hosts = self.hosts if self.hosts > 1 else 0
        inside_hosts = self.ranks - 1 - between_hosts
        hops_us = inside_hosts * device.link_latency_us + between_hosts * device.fabric_latency_us
        sent = message * (self.ranks - 1) / self.ranks
        round_seconds = max(hops_us, 0) * 1e-6 + sent / bandwidth
        return rounds * round_seconds + NCCL_BASE_US * 1e-6

    def latency_us(self, device: Device) -> float:
        """Latency of a direct message, in microseconds: over the fabric if any hop needs it."""
        return device.fabric_latency_us if self.hosts > 1 else device.link_latency_us

    def all_to_all_seconds(self, message: int, device: Device, sent: tuple[float, float]) -> float:
        """Return the seconds of an all-to-all, in which every rank sends an equal part of its
        message to every other directly. Traffic to other hosts goes through the rank's network
        card, at the same time as traffic inside the host."""
        on_host = self.ranks / self.hosts
        part = message / self.ranks
        efficiency = 1e9 * device.link_efficiency
        inside_part, outside_part = sent
        inside = inside_part * part * (on_host - 1) / (device.link_gb_per_s * efficiency)
        outside = (
            outside_part * part * (self.ranks - on_host) / (device.fabric_gb_per_s * efficiency)
        )
        return max(inside, outside) + (self.latency_us(device) + NCCL_BASE_US) * 1e-6


@dataclass
class Line:
    """Sum of all collectives of one kind on one mesh dimension in a step."""

    count: int = 0
    sent: int = 0  # bytes of all messages
    smallest: int = 0  # bytes of a message
    largest: int = 0
    seconds: float = 0.0
    exposed: float = 0.0  # seconds that do not overlap with computation

    def add(self, other: "Line") -> None:
        self.smallest = min(self.smallest or other.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        for name in ("count", "sent", "seconds", "exposed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Estimate:
    """Seconds of a step, by kind of work."""

    seconds: float = 0.0
    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    attended_flops: float = 0.0
    recomputed: float = 0.0  # part of the three above that is recomputation
    # (mesh dimension, kind of collective)
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    # (stream, start, end, place) of what was traced
    bars: list[tuple[str, float, float, str]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of the stretches of the step

    @property
    def computing(self) -> float:
        return self.matmul + self.attention + self.memory_bound

    @property
    def exposed(self) -> float:
        return sum(line.exposed for line in self.lines.values())

    def line(self, dimension: str, kind: str) -> Line:
        return self.lines.setdefault((dimension, kind), Line())


def attention_seconds(op: Op, device: Device) -> float:
    """Return the seconds of an operator in attention, in proportion to its FLOPs."""
    if not op.attention_flops:
        return 0.0
    efficiency = device.attention_efficiency
    if op.name.startswith(PACKED):
        efficiency = device.packed_attention_efficiency or efficiency
    if op.head_width <= NARROW:
        efficiency *= device.narrow_attention
    if "backward" in op.name:
        efficiency *= device.attention_backward
    return op.attended_flops / (device.peak * efficiency)


@dataclass(frozen=True)
class Machine:
    """Inputs of a step's time other than the step: device, hosts, compiler and stack."""

    device: Device
    per_host: int
    compiled: bool = False  # memory-bound operators are fused
    selective: bool = False  # selective checkpointing's policy has an overhead
    stack: Software = OURS
    chosen: Chosen = NO_EXPERTS
    # whether a pipeline's stages gather their weights at the start of its step
    # (parallelisms/fsdp_details.py::gather_ahead) and wait for them: the stack has no early_gathers
    gathers_ahead: bool = False


def op_seconds(
    op: Op, where: Where, machine: Machine, in_block: bool = False
) -> tuple[float, float, float]:
    """Return the seconds of an operator: in matmuls, in attention, and bound by memory. `Op` counts
    attention without its causal mask, but causal kernels do half of that, and more inside a window.
    in_block: of a layer, where float8 applies."""
    device = machine.device
    stack = machine.stack
    traffic = (
        op.fused if (machine.compiled or stack.fused_kernels) and where.block >= 0 else op.traffic
    )
    if stack.leaves_out(op, where):
        traffic = 0
    bandwidth = device.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY
    matmul = op.matmul_flops / (device.peak * device.matmul_efficiency)
    if in_block:
        matmul /= stack.float8
    if op.matmul_flops:
        matmul += stack.gemm_traffic * op.operands / (device.memory_gb_per_s * 1e9)
    if op.rows:
        padded = matmul * (1 + GROUP_TILE / 2 * op.groups / op.rows)
        matmul = max(padded, op.operands / bandwidth)
    row_seconds = op.attention_rows * device.attention_row_ns * 1e-9
    if "backward" in op.name:
        row_seconds /= device.attention_backward
    attention = attention_seconds(op, device) + row_seconds
    moved = traffic / bandwidth + device.overhead_us * 1e-6
    return matmul, attention, moved


def estimate(step: Step, machine: Machine) -> Estimate:
    """Return the time of a step."""
    return Playback(step, machine).play()


class Playback:
    """Simulation of a step on two streams, compute and FSDP's communication. Each waits for the
    other where it does in PyTorch.

    - FSDP's all-gather starts when the previous one has been copied out
      (`FSDPParamGroup.wait_for_unshard`), so the next block is unsharded while this one is
      computed. Compute waits for the all-gather of the block's weights.
    - FSDP's reduce-scatter (and HSDP's all-reduce) starts when the block's gradients are there.
      Clipping waits for the last.
    - An exchange of experts starts when the one before of its group has ended. Compute
      waits for it where the trainer does, after the shared experts, or at once if the stack has no
      `hidden_dispatch`.
    - The collectives of tensor and context parallelism, and all small ones, block compute: the
      next operator needs their result.
    """

    def __init__(self, step: Step, machine: Machine) -> None:
        self.step = step
        self.machine = machine
        self.device = machine.device
        self.stack = machine.stack
        # whether all-gathers were done before the stretches that are played
        self.early_gathers = False
        self.rings = {dim: Ring.of(ranks, machine.per_host) for dim, ranks in step.groups.items()}
        self.rings[STAGE] = Ring.of(ranks_of_stage(step.groups), machine.per_host)
        self.result = Estimate()
        self.now = 0.0  # seconds: the compute stream's clock
        self.bar_start = 0.0  # start of the present stretch of uninterrupted compute
        self.link_free = 0.0  # when FSDP's stream is free
        self.all_gather_from = 0.0  # earliest start of the next all-gather
        # mesh dimension -> when its last exchange of experts has ended
        self.exchange_free: dict[str, float] = {}
        # Op.flight -> its end, mesh dimension
        self.flights: dict[int, tuple[float, str]] = {}
        # (end, mesh dimension) of the all-gathers in flight
        self.all_gather_ends: list[tuple[float, str]] = []
        # clipping waits for this one
        self.last_reduction = (fsdp_dimension(step.groups), "reduce-scatter")

    def play(self) -> Estimate:
        per_microbatch: dict[int, float] = {}
        for stretch in self.step.stretches:
            micro = stretch.where.micro
            began = self.now
            self.result.starts.append(began)
            self.play_stretch(stretch)
            per_microbatch[micro] = per_microbatch.get(micro, 0.0) + self.now - began
        self.result.seconds = self.now + (self.step.repeats - 1) * per_microbatch.get(1, 0.0)
        return self.result

    def play_stretch(self, stretch: Stretch) -> None:
        where = stretch.where
        times = self.step.times(where)
        self.bar_start = self.now
        if where.phase in ("clip", "optimizer") and self.link_free > self.now:
            self.result.line(*self.last_reduction).exposed += self.link_free - self.now
            self.now = self.link_free
        for op in stretch.rows:
            if not isinstance(op, Op):
                continue
            if op.kind:
                self.communicate(op, where, times)
            elif op.flight:
                self.wait_for(op.flight, where, times)
            else:
                self.compute(op, where, times)
        for flight in list(self.flights):
            self.wait_for(flight, where, times)
        self.end_bar(where)

    def end_bar(self, where: Where) -> None:
        if self.now > self.bar_start:
            self.result.bars.append(("compute", self.bar_start, self.now, place(where)))

    def communicate(self, op: Op, where: Where, times: int) -> None:
        seconds = 0.0
        if op.dimension in self.rings:
            ring = self.rings[op.dimension]
            seconds = ring.seconds(op.kind, op.message, self.device, self.sent(op))
        line = self.result.line(op.dimension, op.kind)
        line.add(Line(times, times * op.message, op.message, op.message, times * seconds))
        if op.kind in ("send", "receive"):
            # overlaps with the action; tools/plan/pipeline.py makes the receiver wait for it
            return
        if op.background and op.kind == "all-gather" and self.early_gathers:
            seconds = 0.0
        stream = f"{op.dimension} {op.kind}"
        if not op.background:
            hidden = self.hidden(op)
            seconds *= 1 - hidden
            if hidden:
                self.add_copies(self.copied(op), times)
            if op.flight and self.stack.hidden_dispatch:
                start = max(self.now, self.exchange_free.get(op.dimension, 0.0))
                end = self.exchange_free[op.dimension] = start + seconds
                self.result.bars.append((stream, start, end, place(where)))
                self.flights[op.flight] = end, op.dimension
                return
            self.end_bar(where)
            self.result.bars.append((stream, self.now, self.now + seconds, place(where)))
            line.exposed += times * seconds
            self.now = self.bar_start = self.now + seconds
            return
        ready = self.all_gather_from if op.kind == "all-gather" else self.now
        start = max(self.link_free, ready)
        self.link_free = start + seconds
        self.result.bars.append((stream, start, self.link_free, place(where)))
        if op.kind == "all-gather":
            self.all_gather_ends.append((self.link_free, op.dimension))
        else:
            self.last_reduction = (op.dimension, op.kind)

    def wait_for(self, flight: int, where: Where, times: int) -> None:
        """Compute needs the rows of an exchange, if one is on its way."""
        end, dimension = self.flights.pop(flight, (self.now, "ep"))
        if end > self.now:
            self.end_bar(where)
            self.result.line(dimension, "all-to-all").exposed += times * (end - self.now)
            self.now = self.bar_start = end

    def sent(self, op: Op) -> tuple[float, float]:
        """Return the part of an all-to-all's rows that is sent, for `Ring.seconds`."""
        if op.dimension != "ep":
            return EVERY_ROW
        ring = self.rings["ep"]
        return self.stack.sent(ring.ranks, ring.hosts, self.machine.chosen)

    def hidden(self, op: Op) -> float:
        """Return the part of a collective that runs behind computation, though the next operator
        needs its result. Sums of float8 GEMMs are not one GEMM (parallelisms/async_tp.py), so
        inductor fuses no reduce-scatter with them."""
        if op.dimension == "tp" and self.rings["tp"].hosts == 1:
            apart = self.copied(op) and self.stack.float8 > 1
            return 0.0 if apart else self.stack.hidden_tensor
        return self.stack.hidden_exchange if op.dimension == "ep" else 0.0

    def copied(self, op: Op) -> int:
        """Return the bytes of the weights that must be copied together for one GEMM to make what a
        reduce-scatter sends (parallelisms/async_tp.py::multiply_once). Fused kernels need no copy."""
        return 0 if self.stack.fused_kernels else op.summed_weights

    def add_copies(self, size: int, times: int) -> None:
        seconds = 2 * size / (self.device.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY)
        self.result.memory_bound += times * seconds
        self.now += seconds

    def compute(self, op: Op, where: Where, times: int) -> None:
        if op.wait and self.all_gather_ends:
            ready, dimension = self.all_gather_ends.pop(0)
            if ready > self.now:
                self.end_bar(where)
                self.result.line(dimension, "all-gather").exposed += times * (ready - self.now)
                self.now = self.bar_start = ready
            self.all_gather_from = self.now
        in_block = 0 <= where.block < self.step.layers
        matmul, attention, moved = op_seconds(op, where, self.machine, in_block)
        if self.machine.selective and where.phase == "forward" and in_block:
            moved += self.device.policy_us * 1e-6
        result = self.result
        result.matmul += times * matmul
        result.attention += times * attention
        result.attended_flops += times * op.attended_flops
        result.memory_bound += times * moved
        flops = op.matmul_flops + op.attention_flops
        share = op.recomputed / flops if flops else 0
        result.recomputed += times * (matmul + attention) * share
        self.now += matmul + attention + moved


def place(where: Where) -> str:
    """Name the place in the step, as a bar of the time line does."""
    if where.phase in IN_BLOCKS:
        return f"{where.phase} {where.block}, {where.micro}"
    return where.phase
