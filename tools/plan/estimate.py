"""How long a traced step takes on a device: a roofline for the operators, rings for the
collectives, two streams for overlap.

Every number that is not counted stands in `tools/plan/devices.toml` with its source, or here.
Nothing is fitted to a configuration. `docs/planning.md` has the formulas and how far off they were.
"""

from dataclasses import dataclass, field

from tools.plan.device import MEMORY_EFFICIENCY, Device
from tools.plan.step import IN_BLOCKS, Op, Step, Stretch, Where, fsdp_dimension

# rows of a tile of a grouped product, of which the last one of a group is half empty: assumed
GROUP_TILE = 128
NCCL_BASE_US = 6.6  # of starting any collective: NCCL's cost model (src/graph/tuning.cc, ring, LL)


@dataclass(frozen=True)
class Ring:
    """What one mesh dimension's group is made of."""

    ranks: int
    hosts: int

    @classmethod
    def of(cls, ranks: list[int], per_host: int) -> "Ring":
        return cls(len(ranks), len({rank // per_host for rank in ranks}))

    def bandwidth(self, device: Device) -> float:
        """Bytes per second that a ring moves. Between hosts every rank of the group has a card of
        its own to the fabric, and a ring runs through all of them. Inside a host the links
        limit."""
        link = device.link_gb_per_s
        if self.hosts > 1:
            link = min(link, device.fabric_gb_per_s * self.ranks / self.hosts)
        return link * 1e9 * device.link_efficiency

    def seconds(self, kind: str, message: int, device: Device) -> float:
        """Alpha-beta model of a ring: hops of latency alpha, bytes over bandwidth. `message` is
        counted as NCCL's tests count it: every rank sends (n-1)/n of it, twice for an all-reduce
        (nccl-tests, doc/PERFORMANCE.md)."""
        if self.ranks == 1:
            return 0.0
        if kind in ("send", "receive"):
            latency = device.fabric_latency_us if self.hosts > 1 else device.link_latency_us
            return message / self.bandwidth(device) + (latency + NCCL_BASE_US) * 1e-6
        if kind == "all-to-all":
            return self.exchange_seconds(message, device)
        rounds = 2 if kind == "all-reduce" else 1
        between = self.hosts if self.hosts > 1 else 0
        hops = (
            self.ranks - 1 - between
        ) * device.link_latency_us + between * device.fabric_latency_us
        sent = message * (self.ranks - 1) / self.ranks
        return rounds * (max(hops, 0) * 1e-6 + sent / self.bandwidth(device)) + NCCL_BASE_US * 1e-6

    def exchange_seconds(self, message: int, device: Device) -> float:
        """Every rank sends an equal part of its message to every other directly. What goes to other
        hosts goes through its own card, beside what goes through the links of its host."""
        on_host = self.ranks / self.hosts
        part, efficiency = message / self.ranks, 1e9 * device.link_efficiency
        inside = part * (on_host - 1) / (device.link_gb_per_s * efficiency)
        outside = part * (self.ranks - on_host) / (device.fabric_gb_per_s * efficiency)
        latency = device.fabric_latency_us if self.hosts > 1 else device.link_latency_us
        return max(inside, outside) + (latency + NCCL_BASE_US) * 1e-6


@dataclass
class Line:
    """All collectives of one kind on one mesh dimension in a step."""

    count: int = 0
    sent: int = 0  # bytes of all messages
    smallest: int = 0  # bytes of a message
    largest: int = 0
    seconds: float = 0.0
    exposed: float = 0.0  # seconds in which nothing is computed


@dataclass
class Estimate:
    """Seconds of a step, and what they go into."""

    seconds: float = 0.0
    products: float = 0.0  # matrix products
    attention: float = 0.0
    memory_bound: float = 0.0
    recomputed: float = 0.0  # seconds of these three that repeat what was computed before
    # (mesh dimension, kind of collective)
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    # (stream, start, end, place) of what was traced
    bars: list[tuple[str, float, float, str]] = field(default_factory=list)

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.memory_bound

    @property
    def exposed(self) -> float:
        return sum(line.exposed for line in self.lines.values())

    def line(self, dimension: str, kind: str) -> Line:
        return self.lines.setdefault((dimension, kind), Line())


def op_seconds(op: Op, where: Where, device: Device, fused: bool) -> tuple[float, float, float]:
    """Seconds of an operator as product, as attention, and as bound by memory. Attention is counted
    whole in `Op`, but causal kernels do half of it."""
    rate = device.peak
    traffic = op.fused if fused and where.block >= 0 else op.traffic
    bandwidth = device.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY
    product = op.product_flops / (rate * device.matmul_efficiency)
    if op.rows:
        product = max(product * (1 + GROUP_TILE / 2 * op.groups / op.rows), op.operands / bandwidth)
    attention = (
        op.attention_flops / 2 / (rate * device.attention_efficiency)
        + op.attention_rows * device.attention_row_ns * 1e-9
    )
    if "backward" in op.name:
        attention /= device.attention_backward
    moved = traffic / bandwidth + device.overhead_us * 1e-6
    return product, attention, moved


def estimate(
    step: Step, device: Device, per_host: int, compiled: bool, selective: bool = False
) -> Estimate:
    """The time of a step. `compiled`: memory-bound operators are fused; `selective`:
    checkpointing's policy is paid for."""
    return Playback(step, device, per_host, compiled, selective).play()


class Playback:
    """Plays a step through: one stream computes, one moves FSDP's data beside it, and each waits
    where PyTorch waits.

    - FSDP's all-gather starts when the one before has been copied out
      (`FSDPParamGroup.wait_for_unshard`), so the gather of the next block runs while this one is
      computed. Computing goes on when its own weights are there.
    - FSDP's reduce-scatter (and HSDP's all-reduce) starts when the block's gradients are there.
      Clipping waits for the last.
    - The collectives of tensor and context parallelism, and all small ones, stand between operators
      that need them: computing waits.
    """

    def __init__(
        self, step: Step, device: Device, per_host: int, compiled: bool, selective: bool
    ) -> None:
        self.step, self.device, self.compiled, self.selective = step, device, compiled, selective
        self.rings = {dim: Ring.of(ranks, per_host) for dim, ranks in step.groups.items()}
        self.result = Estimate()
        self.now = 0.0  # seconds: the time of computing
        self.bar_start = 0.0  # since when nothing but computing has happened
        self.link_free = 0.0  # when FSDP's stream is free
        self.gather_from = 0.0  # since when the next gather may run
        # of the all-gathers that were not waited for yet, with their dimensions
        self.gather_ends: list[tuple[float, str]] = []
        # what clipping waits for
        self.last_reduction = (fsdp_dimension(step.groups), "reduce-scatter")

    def play(self) -> Estimate:
        per_microbatch: dict[int, float] = {}
        for stretch in self.step.stretches:
            micro, began = stretch.where.micro, self.now
            self.play_stretch(stretch)
            per_microbatch[micro] = per_microbatch.get(micro, 0.0) + self.now - began
        self.result.seconds = self.now + (self.step.repeats - 1) * per_microbatch.get(1, 0.0)
        return self.result

    def play_stretch(self, stretch: Stretch) -> None:
        where, times = stretch.where, self.step.times(stretch.where)
        self.bar_start = self.now
        if where.phase in ("clip", "optimizer") and self.link_free > self.now:
            self.result.line(*self.last_reduction).exposed += self.link_free - self.now
            self.now = self.link_free
        for op in stretch.rows:
            if not isinstance(op, Op):
                continue
            if op.kind:
                self.communicate(op, where, times)
            else:
                self.compute(op, where, times)
        self.end_bar(where)

    def end_bar(self, where: Where) -> None:
        if self.now > self.bar_start:
            self.result.bars.append(("compute", self.bar_start, self.now, place(where)))

    def communicate(self, op: Op, where: Where, times: int) -> None:
        seconds = (
            self.rings[op.dimension].seconds(op.kind, op.message, self.device)
            if op.dimension in self.rings
            else 0.0
        )
        line = self.result.line(op.dimension, op.kind)
        line.smallest = min(line.smallest or op.message, op.message)
        line.largest = max(line.largest, op.message)
        line.count, line.sent = line.count + times, line.sent + times * op.message
        line.seconds += times * seconds
        if op.kind in ("send", "receive"):
            # beside the action; tools/plan/pipeline.py lets the rank that receives wait for it
            return
        stream = f"{op.dimension} {op.kind}"
        if not op.background:
            self.end_bar(where)
            self.result.bars.append((stream, self.now, self.now + seconds, place(where)))
            line.exposed += times * seconds
            self.now = self.bar_start = self.now + seconds
            return
        start = max(self.link_free, self.gather_from if op.kind == "all-gather" else self.now)
        self.link_free = start + seconds
        self.result.bars.append((stream, start, self.link_free, place(where)))
        if op.kind == "all-gather":
            self.gather_ends.append((self.link_free, op.dimension))
        else:
            self.last_reduction = (op.dimension, op.kind)

    def compute(self, op: Op, where: Where, times: int) -> None:
        if op.wait and self.gather_ends:
            ready, dimension = self.gather_ends.pop(0)
            if ready > self.now:
                self.end_bar(where)
                self.result.line(dimension, "all-gather").exposed += times * (ready - self.now)
                self.now = self.bar_start = ready
            self.gather_from = self.now
        product, attention, moved = op_seconds(op, where, self.device, self.compiled)
        if self.selective and where.phase == "forward" and 0 <= where.block < self.step.layers:
            moved += self.device.policy_us * 1e-6
        result = self.result
        result.products, result.attention = (
            result.products + times * product,
            result.attention + times * attention,
        )
        result.memory_bound += times * moved
        flops = op.product_flops + op.attention_flops
        result.recomputed += times * (product + attention) * (op.recomputed / flops if flops else 0)
        self.now += product + attention + moved


def place(where: Where) -> str:
    """Where in the step, as a bar of the page names it."""
    return (
        f"{where.phase} {where.block}, {where.micro}" if where.phase in IN_BLOCKS else where.phase
    )
