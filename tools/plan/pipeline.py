"""The plan of a pipeline: each kind of stage is traced alone, and the schedule is simulated with
the traced costs.

A stage does the same work for every microbatch but the first and the last, so three microbatches
show the cost of every action: its seconds, its peak memory, and the memory that it leaves more or
less. Simulating the table of `parallelisms/schedules.py` with these gives each rank's memory and
the time of the step, bubbles included. Every stage is traced in a pipeline of three stages, as the
first, the middle or the last one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple
from unittest import mock

import torch

import train
from configs import check
from configs.schema import Config
from parallelisms import ep_hosts, pp, schedules
from parallelisms.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Table,
    Timeline,
)
from tools.plan.estimate import Estimate, Machine, Playback, Ring
from tools.plan.repeat import few_layers, traced, with_layers
from tools.plan.routing import BALANCED, Routing
from tools.plan.step import IN_BLOCKS, OUTSIDE, Curve, Parameters, Step, Where
from tools.plan.trace import changed, trace_step, tracing
from tools.plan.workers import in_processes

ALONE = 3  # stages of the pipeline in which one is traced: first, middle, last
Sizes = dict[str, int]  # bytes by kind of memory


@dataclass(frozen=True)
class Part:
    """Part of a stage's step: one action, or one of the other phases."""

    time: Estimate
    tail: float  # seconds for which FSDP's collectives go on after its end
    flops: tuple[int, int]  # needed, recomputed
    change: Sizes  # what it leaves more or less
    peak: Sizes  # more or less than at its begin, when it needs most
    most: Sizes  # each kind by itself, at most
    gathers: float = 0.0  # seconds of its all-gathers, where they have begun before


class Stage:
    """Stage that was traced, and the costs of its actions."""

    def __init__(self, step: Step, machine: Machine) -> None:
        self.step = step
        self.machine = machine
        # (phase, microbatch as traced; -1 outside forward and backward)
        self.parts: dict[tuple[str, int], Part] = {}
        keys = dict.fromkeys(self.key(stretch.where) for stretch in step.stretches)
        for key in keys:
            stretches = [stretch for stretch in step.stretches if self.key(stretch.where) == key]
            self.parts[key] = self.part(step.of(stretches))

    @staticmethod
    def key(where: Where) -> tuple[str, int]:
        return where.phase, where.micro if where.phase in IN_BLOCKS else -1

    def part(self, step: Step) -> Part:
        """step: the whole one with the stretches of this part alone."""
        m = self.machine
        playback = Playback(step, m)
        playback.early_gathers = m.stack.early_gathers or m.gathers_ahead
        time = playback.play()
        gathers = 0.0
        if m.gathers_ahead:
            keys = {(op.dimension, op.kind) for _, _, op in step.ops() if op.background}
            gathers = sum(time.lines[key].seconds for key in keys if key[1] == "all-gather")
        tail = max(0.0, playback.link_free - playback.now)
        _, _, peak = step.peak({})
        most = step.highest_by_kind({})
        return Part(time, tail, step.flops(), step.change(), peak, most, gathers)

    def action(self, action: Action, microbatches: int) -> Part:
        traced = self.step.microbatches
        micro = action.microbatch
        if microbatches > traced:  # a middle one represents all in between
            micro = {0: 0, microbatches - 1: traced - 1}.get(micro, 1)
        # the first stage has no first half of a split backward
        return self.parts.get((action.kind, micro), NOTHING)


NOTHING = Part(Estimate(), 0.0, (0, 0), {}, {}, {})


@dataclass
class Rank(Curve):
    """Rank of a pipeline: its stages, and its step in the order of the schedule. The report reads
    it like a `tools/plan/step.py::Step`."""

    number: int
    stages: dict[int, Stage]  # by number, as for their layers
    layers_of: dict[int, range]
    actions: list[Action]
    microbatches: int
    groups: dict[str, list[int]]
    costs: dict[Action, Part]
    busy: float = 0.0  # seconds in which it works on microbatches

    @property
    def first(self) -> int:
        return min(self.stages)

    def seconds(self, action: Action) -> float:
        return self.costs[action].time.seconds

    @property
    def layers(self) -> int:
        return sum(map(len, self.layers_of.values()))

    @property
    def parameters(self) -> dict[int, Parameters]:
        """Return the parameters by stage; of a tied weight the first stage's alone."""
        totals = {}
        for number, stage in self.stages.items():
            blocks = stage.step.parameters.values()
            elements = sum(p.elements for p in blocks)
            local_bytes = sum(p.local_bytes for p in blocks)
            frozen = sum(p.frozen for p in blocks)
            totals[number] = Parameters(elements, local_bytes, frozen=frozen)
        return totals

    def parts(self) -> Iterator[tuple[Where, Part]]:
        """Everything of the step in order. A place has the number of the stage where a Step's has
        that of a block."""
        yield Where(-1, "start", self.first), self.stages[self.first].parts["start", -1]
        for action in self.actions:
            yield Where(action.microbatch, action.kind, action.stage), self.costs[action]
        for phase in ("clip", "optimizer"):
            for number, stage in self.stages.items():
                where = Where(self.microbatches - 1, phase, number)
                yield where, stage.parts.get((phase, -1), NOTHING)

    def before(self) -> Sizes:
        total: Sizes = {}
        for number, stage in self.stages.items():
            for kind, size in stage.step.before().items():
                if kind != "batch" or number == self.first:  # the batch is there once
                    total[kind] = total.get(kind, 0) + size
        return total

    def curve(self) -> Iterator[tuple[Where, str, int]]:
        for where, part in self.parts():
            rest: Sizes = {}
            for kind in part.change | part.peak:
                rest[kind] = part.change.get(kind, 0) - part.peak.get(kind, 0)
            for sizes in part.peak, rest:
                # All of these happen at one moment, so decreases come first.
                for kind in sorted(sizes, key=sizes.__getitem__):
                    yield where, kind, sizes[kind]

    def highest_by_kind(self) -> Sizes:
        live = self.before()
        highest = dict(live)
        for _, part in self.parts():
            for kind, size in part.most.items():
                highest[kind] = max(highest.get(kind, 0), live.get(kind, 0) + size)
            for kind, size in part.change.items():
                live[kind] = live.get(kind, 0) + size
        return highest

    def flops(self) -> tuple[int, int]:
        counted, recomputed = zip(*(part.flops for _, part in self.parts()))
        return sum(counted), sum(recomputed)

    def place(self, where: Where) -> str:
        if where.phase not in IN_BLOCKS:
            return OUTSIDE[where.phase]
        phase = {
            BACKWARD_INPUT: "first half of backward",
            BACKWARD_WEIGHT: "second half of backward",
        }.get(where.phase, where.phase)
        return (
            f"{phase} of stage {where.block}, microbatch {where.micro + 1} of {self.microbatches}"
        )

    def total(self) -> Estimate:
        """Return the seconds of its step by kind, without waiting for other stages."""
        total = Estimate()
        for _, part in self.parts():
            t = part.time
            for name in ("matmul", "attention", "attended_flops", "memory_bound", "recomputed"):
                setattr(total, name, getattr(total, name) + getattr(t, name))
            for key, line in t.lines.items():
                total.line(*key).add(line)
        return total

    @cached_property
    def clip_and_optimizer(self) -> float:
        return sum(
            part.time.seconds
            for where, part in self.parts()
            if where.phase in ("clip", "optimizer")
        )


@dataclass(frozen=True)
class Pipeline:
    """Step of all ranks of one pipeline."""

    ranks: list[Rank]
    played: Timeline
    # share of the ranks' time that is idle, from the first forward to the last backward
    bubble: float
    p2p: float  # seconds that sends between stages add to the step
    reduction: float  # seconds that gradient reductions take beyond the last backward
    seconds: float  # of the whole step

    @property
    def worst(self) -> Rank:
        """Return the rank that needs the most memory."""
        peaks = [rank.peak()[0] for rank in self.ranks]
        return self.ranks[peaks.index(max(peaks))]

    @property
    def slowest(self) -> Rank:
        """Return the rank that works longest on microbatches: the others wait for it."""
        return max(self.ranks, key=attrgetter("busy"))

    def time(self, rank: Rank) -> Estimate:
        """Return the step as one rank sees it."""
        estimate = rank.total()
        estimate.seconds = self.seconds
        for (_, kind), line in estimate.lines.items():
            if kind == "send":
                line.exposed += self.p2p
        return estimate


class Alone(NamedTuple):
    """Inputs of a stage's trace, besides the configuration."""

    position: int  # among ALONE stages
    layers: int
    split: bool  # backwards in two halves
    data_parallel: int
    per_host: int
    on_gpu: bool
    dense: int = 0  # leading layers without experts, of a model that has experts
    routing: Routing = BALANCED

    def trace(self, cfg: Config, known: "dict[Alone, Step]") -> Step:
        """Return the step of this stage, repeated from a few layers where that is exact. known:
        traces of the same configuration; those of few layers serve every depth."""
        few, edge, period = few_layers(cfg, self.layers, self.dense)
        sharded = self.data_parallel * cfg.parallelism.context_parallel > 1
        shallow = self
        # In the second half of a split backward no hook tells to which block an operator belongs.
        if few < self.layers and sharded and not self.split:
            shallow = self._replace(layers=few)
        if shallow not in known:
            known[shallow] = shallow.trace_whole(cfg)
        if shallow == self:
            return known[self]
        return with_layers(known[shallow], self.layers, edge, period) or self.trace_whole(cfg)

    def trace_whole(self, cfg: Config) -> Step:
        torch.set_num_threads(1)
        numbers = {"n_layers": self.layers * ALONE}
        if "n_dense_layers" in check.architecture(cfg.model):  # of the flavor, if not given
            numbers["n_dense_layers"] = self.position * self.layers + self.dense
        layers = (self.layers,) * ALONE
        cfg = changed(cfg, parallelism={"pipeline_layers": layers}, model=numbers)
        p = cfg.parallelism
        ranks = self.data_parallel * p.context_parallel * p.tensor_parallel
        microbatches = min(3, cfg.training.microbatches(self.data_parallel))
        table = one_by_one(microbatches, self.split)
        with mock.patch.object(schedules, "table", lambda *_: table):
            return trace_step(
                cfg,
                ALONE * ranks,
                self.per_host,
                self.on_gpu,
                rank=self.position * ranks,
                routing=self.routing,
            )


class Stages:
    """Traces steps, and the stages of pipelines. What several plans share is traced once: a trace
    depends neither on the device nor on the stack. parallel: stages are traced by workers."""

    def __init__(self, parallel: bool = True) -> None:
        self.parallel = parallel
        self.traced: dict[str, dict[Alone, Step]] = {}  # by configuration
        self.wholes: dict[tuple, Step] = {}

    def whole(
        self, cfg: Config, gpus: int, per_host: int, on_gpu: bool, routing: Routing = BALANCED
    ) -> Step:
        """Return the step without a pipeline: tools/plan/repeat.py::traced."""
        key = (name_of(cfg), gpus, per_host, on_gpu, routing)
        if key not in self.wholes:
            self.wholes[key] = traced(cfg, gpus, per_host, on_gpu, routing)
        return self.wholes[key]

    def steps(self, cfg: Config, wanted: Iterable[Alone]) -> dict[Alone, Step]:
        alone = {
            "pipeline_parallel": ALONE,
            "data_parallel_shard": -1,
            "pipeline_schedule": "1f1b",
            "pipeline_stages_per_rank": 0,
            "pipeline_layers": (),
        }
        cfg = changed(cfg, parallelism=alone)
        known = self.traced.setdefault(name_of(cfg), {})
        missing = [stage for stage in set(wanted) if stage not in known]
        if self.parallel:
            steps = in_processes(Alone.trace, [(stage, cfg, {}) for stage in missing])
            known |= zip(missing, steps)
        else:
            for stage in missing:
                known[stage] = stage.trace(cfg, known)
        return {stage: known[stage] for stage in wanted}


def name_of(cfg: Config) -> str:
    """Equal for configurations that have equal traces."""
    return f"{cfg.compile.enabled} {tracing(cfg).model_dump_json()}"


def one_by_one(microbatches: int, split: bool) -> Table:
    """Return a schedule without anything at the same time, so that the cost of each action shows."""
    kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if split else (FORWARD, BACKWARD)
    table = []
    for stage in range(ALONE):
        table.append([Action(kind, stage, m) for m in range(microbatches) for kind in kinds])
    return table


def make_pipeline(
    cfg: Config,
    gpus: int,
    on_gpu: bool,
    machine: Machine,
    stages: Stages,
    routing: Routing = BALANCED,
) -> Pipeline:
    """Trace the stages of the configuration, which has been checked, and play its schedule."""
    p = cfg.parallelism
    data_parallel = gpus // (p.context_parallel * p.tensor_parallel * p.pipeline_parallel)
    microbatches = cfg.training.microbatches(data_parallel)
    placement = schedules.placement(
        p.pipeline_schedule, p.pipeline_parallel, p.pipeline_stages_per_rank
    )
    table = schedules.table(
        p.pipeline_schedule, p.pipeline_parallel, p.pipeline_stages_per_rank, microbatches
    )
    layers = pp.layers_of_stages(cfg, *train.architecture(cfg))

    every_action = list(chain.from_iterable(table))
    split = {(a.stage, a.microbatch) for a in every_action if a.kind == BACKWARD_INPUT}

    def variant(action: Action) -> tuple[int, bool]:
        """Return the stage of an action, and whether the backward of its microbatch is in two
        halves."""
        return action.stage, (action.stage, action.microbatch) in split

    last = len(placement) - 1
    dense = check.architecture(cfg.model).get("n_dense_layers", 0)
    alone: dict[tuple[int, bool], Alone] = {}
    for stage, halves in {variant(action) for action in every_action}:
        alone[stage, halves] = Alone(
            {0: 0, last: 2}.get(stage, 1),
            len(layers[stage]),
            halves,
            data_parallel,
            machine.per_host,
            on_gpu,
            min(max(dense - layers[stage].start, 0), len(layers[stage])),
            routing,
        )
    steps = stages.steps(cfg, alone.values())
    traced: dict[Alone, Stage] = {}
    for key, step in steps.items():
        traced[key] = Stage(
            replace(step, groups=groups(cfg, 0, data_parallel, machine.per_host)), machine
        )
    ranks = []
    for number, actions in enumerate(table):
        own: dict[int, Stage] = {}
        for (stage, _), key in alone.items():
            if placement[stage] == number:
                own[stage] = traced[key]
        own_layers = {s: layers[s] for s in own}
        costs = {a: traced[alone[variant(a)]].action(a, microbatches) for a in actions}
        of_rank = groups(cfg, number, data_parallel, machine.per_host)
        ranks.append(Rank(number, own, own_layers, actions, microbatches, of_rank, costs))
    return played(ranks, table, placement, machine, gpus // p.pipeline_parallel)


def played(
    ranks: list[Rank], table: Table, placement: list[int], machine: Machine, ranks_of_stage: int
) -> Pipeline:
    """Play the pipeline's step in time, from the costs of its ranks' actions."""
    # the size of every send between stages: hidden states, or their gradients
    message = 0
    for rank in ranks:
        for action, part in rank.costs.items():
            if action.kind == FORWARD:
                message = max(message, largest_sent(part))

    def travel(sender: int, receiver: int, size: int = message) -> float:
        ring = Ring.of([sender * ranks_of_stage, receiver * ranks_of_stage], machine.per_host)
        return ring.seconds("send", size, machine.device)

    # A tied weight goes to the last stage before the first forward, and its gradient comes back
    # after the last backward.
    first = placement[0]
    last = placement[-1]
    tied = 0.0
    if first != last:
        weight = largest_sent(ranks[first].stages[0].parts["start", -1])
        tied = travel(first, last, weight)

    def seconds(action: Action) -> float:
        return ranks[placement[action.stage]].seconds(action)

    begins = first_forwards(ranks)

    def ready(action: Action) -> float:
        return begins.get(action, 0.0)

    at_once = schedules.timeline(table, placement, seconds, ready=ready)
    real = schedules.timeline(table, placement, seconds, travel, ready)
    ends = []  # of each rank's last action
    reduced = []  # of its last gradient reduction
    for rank, actions in zip(ranks, real):
        rank.busy = sum(stop - start for _, start, stop in actions)
        _, _, end = actions[-1]
        ends.append(end)
        tails = [stop + rank.costs[action].tail for action, _, stop in actions]
        reduced.append(max(end, *tails))
    start = max(rank.stages[rank.first].parts["start", -1].time.seconds for rank in ranks)
    rest = max(rank.clip_and_optimizer for rank in ranks)
    end_at_once = max(actions[-1][2] for actions in at_once)
    p2p = max(ends) - end_at_once + 2 * tied
    step_seconds = start + max(reduced) + rest + 2 * tied
    reduction = max(reduced) - max(ends)
    return Pipeline(ranks, real, schedules.bubble(real), p2p, reduction, step_seconds)


def first_forwards(ranks: list[Rank]) -> dict[Action, float]:
    """Return the earliest begin of each stage's first forward, of a pipeline whose ranks begin the
    all-gathers of all their weights at the start of the step, one after another, in the order in
    which their stages come to their first forward."""
    begins: dict[Action, float] = {}
    for rank in ranks:
        gathered = 0.0
        for action in rank.actions:
            if action.kind != FORWARD or action.microbatch > 0:
                continue
            part = rank.costs[action]
            layers = max(1, len(rank.layers_of[action.stage]))
            # Forward waits for its first layer, and has its last one left when that comes.
            first_layer = gathered + part.gathers / layers
            gathered += part.gathers
            last_layer = gathered - part.time.seconds * (layers - 1) / layers
            begins[action] = max(first_layer, last_layer)
    return begins


def largest_sent(part: Part) -> int:
    """Return the bytes of the largest message that a part of the step sends to another stage; 0 for
    none."""
    sends = [line.largest for (_, kind), line in part.time.lines.items() if kind == "send"]
    return max(sends, default=0)


def groups(cfg: Config, number: int, data_parallel: int, per_host: int) -> dict[str, list[int]]:
    """Mesh dimension -> ranks of the group of the first of the ranks that work on stage `number`."""
    p = cfg.parallelism
    cp = p.context_parallel
    tp = p.tensor_parallel
    ep = p.expert_parallel
    shard = data_parallel // p.data_parallel_replicate
    ranks_of_stage = data_parallel * cp * tp
    begin = number * ranks_of_stage
    found = {
        "pp": [i * ranks_of_stage for i in range(p.pipeline_parallel)],
        "dp_replicate": [begin + i * shard * cp * tp for i in range(p.data_parallel_replicate)],
        "dp_shard": [begin + i * cp * tp for i in range(shard)],
        "cp": [begin + i * tp for i in range(cp)],
        "tp": [begin + i for i in range(tp)],
    }
    if check.architecture(cfg.model).get("n_experts") and ep * tp > 1:
        found["edp"] = [begin + i * ep for i in range(shard * cp * tp // ep)]
        found["ep"] = [begin + i for i in range(ep)]
    if p.expert_exchange == "hierarchical":
        found[ep_hosts.PEERS] = [begin + i for i in range(0, ep, per_host)]
        found[ep_hosts.HOST] = [begin + i for i in range(per_host)]
    if cp > 1:
        found["dp_shard_cp"] = [begin + i * tp for i in range(shard * cp)]
    return found
