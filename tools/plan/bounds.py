"""Bound the time and memory of a choice from below, without tracing it.

A block's computation does not depend on the ranks that FSDP spreads it over, on the pipeline, or on
accumulation. So one trace for each mode of checkpointing and each degree of tensor, context and
expert parallelism bounds the speed of all choices that share these. Bounds leave out what they do
not know: they are never above the plan (`tests/test_plan_search.py`).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import train
from configs import check
from configs.schema import SCHEDULES, Config
from parallelisms import pp, schedules
from parallelisms.dp import DTYPES
from parallelisms.fsdp_details import gathers_once
from tools.plan.choices import Choice
from tools.plan.device import MEMORY_EFFICIENCY
from tools.plan.estimate import EVERY_ROW, Playback, Ring, attention_seconds
from tools.plan.pipeline import groups
from tools.plan.plan import Plan, PlanInputs, machine, with_margin
from tools.plan.step import Op, Stretch, fsdp_dimension
from tools.plan.trace import EXCHANGES
from training.optimizers import OPTIMIZERS

SLACK = 1 - 1e-9  # sums in another order differ by rounding
# How often at most each element of a gradient's shard is moved in a microbatch: divided, added to
# what is there, and each time read and written.
SHARD_MOVES = 8
# Bytes that memory-bound operators move at most for each gathered weight and its gradient. All else
# that a block moves is of tokens.
OF_WEIGHTS = {"forward": 4, "backward": 24}
# The same for the weights of blocks with experts alone, which FSDP shards by another dimension than
# the first: it copies them after each gather, which a pipeline does once, and before each reduction.
AFTER_GATHER = 4
BEFORE_REDUCTION = 8
MASTER = 4  # bytes of a master weight, and of its gradient


class Layer(NamedTuple):
    """Least cost of one block on a rank, for a microbatch of one sequence."""

    forward: float  # seconds
    backward: float
    kept: int  # bytes of activations from forward to backward
    elements: int
    gathered: int  # elements on a rank while FSDP has it unsharded
    reduction: float  # seconds of backward that only a microbatch has whose gradients are reduced


@dataclass(frozen=True, eq=False)
class Profile:
    """Profile from the trace of one choice, valid for all with the same mode and the same tensor,
    context and expert parallelism."""

    layers: tuple[Layer, ...]
    before: Layer  # what comes before the first block
    after: Layer
    linear: float  # seconds of a microbatch that grow with its tokens
    moments: float  # bytes of optimizer state for each byte of a weight


def profile(plan: Plan) -> Profile:
    """plan: without a pipeline, of microbatches of one sequence whose gradients are reduced."""
    step = plan.step
    least: dict[tuple[str, int], Seconds] = {}
    for (phase, block, _), seconds in seconds_by_place(plan).items():
        before = least.get((phase, block), seconds)
        smaller = [min(pair) for pair in zip(before, seconds)]
        least[phase, block] = Seconds(*smaller)
    bandwidth = plan.inputs.device.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY
    linear = 0.0
    for (phase, block), seconds in least.items():
        linear += seconds.growing
        if 0 <= block < step.layers:
            of_weights = OF_WEIGHTS[phase] * step.parameters[block].gathered / bandwidth
            linear += max(0.0, seconds.moving - of_weights)
    kept: Counter[int] = Counter()
    tokens = plan.cfg.training.seq_len // plan.cfg.parallelism.context_parallel
    tokens //= plan.cfg.parallelism.tensor_parallel
    for memory in step.memory.values():
        # what is smaller than a number for each token does not grow with them
        of_tokens = memory.kind == "activations" and memory.size >= 2 * tokens
        if of_tokens and memory.born.micro == 0:
            kept[memory.born.block] += memory.size

    has_experts = "n_experts" in check.architecture(plan.cfg.model)

    def at_least(phase: str, block: int, copied: int) -> float:
        """copied: bytes of a weight that do not count."""
        seconds = least.get((phase, block), Seconds())
        part = step.parameters.get(block)
        if part is None or not has_experts:
            return seconds.all
        return seconds.all - min(seconds.moving, copied * part.gathered / bandwidth)

    def layer(block: int) -> Layer:
        forward = at_least("forward", block, AFTER_GATHER)
        reduced = at_least("backward", block, AFTER_GATHER)
        backward = at_least("backward", block, AFTER_GATHER + BEFORE_REDUCTION)
        part = step.parameters.get(block)
        if part is None:
            return Layer(forward, backward, 0, 0, 0, 0.0)
        shards = SHARD_MOVES * part.local_bytes / bandwidth
        reduction = reduced - backward
        backward = max(0.0, backward - shards)
        sizes = kept[block], part.elements, part.gathered
        return Layer(forward, backward, *sizes, reduction)

    weights = sum(part.local_bytes for part in step.parameters.values())
    elementwise = all(rule.is_one_kernel for rule in OPTIMIZERS[plan.cfg.optimizer.kind].rules)
    return Profile(
        tuple(layer(block) for block in range(step.layers)),
        layer(-1)._replace(elements=0, gathered=0),  # its weights may be the last stage's
        layer(step.layers),
        linear,
        step.before().get("optimizer state", 0) / weights if elementwise else 0.0,
    )


class Seconds(NamedTuple):
    """Seconds of one place in the step, without FSDP's operators."""

    all: float = 0.0
    growing: float = 0.0  # that certainly grow with the tokens of a microbatch
    moving: float = 0.0  # of memory-bound operators


def seconds_by_place(plan: Plan) -> dict[tuple[str, int, int], Seconds]:
    """(phase, block, microbatch) -> its seconds."""
    step = plan.step
    m = machine(plan.cfg, plan.inputs)
    device = m.device.model_copy(update={"overhead_us": 0.0, "policy_us": 0.0})
    playback = Playback(step, replace(m, device=device))
    found: dict[tuple[str, int, int], Seconds] = {}
    for stretch in step.stretches:
        where = stretch.where
        if where.phase not in ("forward", "backward"):
            continue
        rows = [row for row in stretch.rows if isinstance(row, Op) and not of_fsdp(row)]
        began = playback.now
        moved = playback.result.memory_bound
        waited = exchange_exposed(playback)
        playback.play_stretch(Stretch(where, rows))
        moved = playback.result.memory_bound - moved
        growing = sum(grows(row, playback) for row in rows)
        growing += waiting_that_grows(playback, waited, rows, step.times(where))
        key = where.phase, where.block, where.micro
        before = found.get(key, Seconds())
        found[key] = Seconds(
            before.all + playback.now - began,
            before.growing + growing,
            before.moving + moved / step.times(where),
        )
    return found


def of_fsdp(op: Op) -> bool:
    return op.background or op.name.startswith("fsdp")


def grows(op: Op, playback: Playback) -> float:
    """Return the seconds of an operator that double with the tokens."""
    device = playback.device
    if op.kind and op.flight and playback.stack.hidden_dispatch:
        return 0.0  # waiting_that_grows
    if op.kind:
        ring = playback.rings.get(op.dimension)
        if ring is None or op.kind in ("send", "receive"):
            return 0.0
        seconds = ring.seconds(op.kind, op.message, device, playback.sent(op))
        at_once = ring.seconds(op.kind, 0, device, EVERY_ROW)
        return (seconds - at_once) * (1 - playback.hidden(op))
    rate = device.peak * device.matmul_efficiency * playback.stack.float8
    return op.matmul_flops / rate + attention_seconds(op, device)


def exchange_exposed(playback: Playback) -> float:
    """Return the seconds in which compute has waited for rows of experts."""
    lines = playback.result.lines
    return sum(lines[key].exposed for key in product(EXCHANGES, ["all-to-all"]) if key in lines)


def waiting_that_grows(playback: Playback, before: float, rows: list[Op], times: int) -> float:
    """Return the exchange's waiting that something else may hide. For twice the tokens both are
    twice as long, without the latency of a message. before: `exchange_exposed` before these rows."""
    if not playback.stack.hidden_dispatch:
        return 0.0
    latency = sum(
        playback.rings[row.dimension].seconds(row.kind, 0, playback.device, EVERY_ROW)
        for row in rows
        if row.kind and row.flight and row.dimension in playback.rings
    )
    return max(0.0, (exchange_exposed(playback) - before) / times - latency)


class Bounds:
    """Bounds of a search, from the profiles that it has so far."""

    def __init__(self, cfg: Config, inputs: PlanInputs) -> None:
        self.cfg = cfg
        self.inputs = inputs
        self.reduced = DTYPES[cfg.training.reduce_dtype].itemsize
        self.narrow = DTYPES.get(cfg.training.param_dtype, DTYPES["bfloat16"]).itemsize

    @cache  # noqa: B019
    def layout(self, choice: Choice) -> tuple[list[int], list[range]]:
        """Return the rank of each stage, and its layers."""
        key = choice.pipeline_schedule, choice.pipeline_parallel, choice.pipeline_stages_per_rank
        if choice.pipeline_parallel == 1:
            key = "1f1b", 1, 0
        cfg = choice.applied_to(self.cfg)
        return schedules.placement(*key), pp.layers_of_stages(cfg, *train.architecture(cfg))

    def data_parallel(self, choice: Choice) -> int:
        shared = choice.tensor_parallel * choice.context_parallel * choice.pipeline_parallel
        return self.inputs.gpus // shared

    def microbatches(self, choice: Choice) -> int:
        sequences = self.cfg.training.global_batch_size // self.data_parallel(choice)
        return sequences // choice.local_batch_size

    def stages(self, choice: Choice, known: Profile) -> list[list[Layer]]:
        """Return the parts of each stage."""
        _, layers = self.layout(choice)
        stages = [[known.layers[i] for i in of_stage] for of_stage in layers]
        stages[0].insert(0, known.before)
        stages[-1].append(known.after)
        if choice.accumulate_gradients == "whole":
            return stages
        return [[with_reduction(layer) for layer in stage] for stage in stages]

    @cache  # noqa: B019
    def seconds(self, choice: Choice, known: Profile) -> float:
        """Return the least seconds of a step."""
        microbatches = self.microbatches(choice)
        stages = self.stages(choice, known)
        if choice.pipeline_parallel == 1:
            of_one = known.linear * choice.local_batch_size
            if choice.local_batch_size == 1:
                of_one = max(of_one, work(stages[0]))
            busy = microbatches * of_one
            busy = max(busy, self.link(choice, stages[0], microbatches))
        else:
            # a pipeline's plan lets the reductions of one action overlap with all that follow, so
            # the link is no bound of it
            busy = self.pipelined(choice, stages, microbatches)
        return busy * SLACK

    def pipelined(self, choice: Choice, stages: list[list[Layer]], microbatches: int) -> float:
        """Return the least seconds of a pipeline. A rank begins when the first microbatch has come
        down to it. It is busy with all of them. After its last backward the gradient goes up to the
        first stage."""
        placement, _ = self.layout(choice)
        most = 0.0
        for rank in range(choice.pipeline_parallel):
            own = [stage for stage, its_rank in enumerate(placement) if its_rank == rank]
            way = sum(layer.forward for stage in stages[: own[0]] for layer in stage)
            if not splits_backward(choice):
                way += sum(layer.backward for stage in stages[: own[0]] for layer in stage)
            busy = microbatches * sum(work(stages[stage]) for stage in own)
            most = max(most, way + busy)
        return most

    def link(self, choice: Choice, layers: list[Layer], microbatches: int) -> float:
        """Return the least seconds of FSDP's collectives, without a pipeline."""
        p = self.cfg.parallelism
        cfg = choice.applied_to(self.cfg)
        of_groups = groups(cfg, 0, self.data_parallel(choice), self.inputs.per_host)
        names = {fsdp_dimension(of_groups), "edp" if "edp" in of_groups else "dp_shard"}
        per_byte = min(self.seconds_per_byte(of_groups[name]) for name in names)
        reductions = microbatches if choice.accumulate_gradients == "sharded" else 1
        gathers = 1
        resharded = p.reshard_after_backward and not p.keep_gathered
        if resharded and p.reshard_after_forward in ("default", True):
            gathers = 2 * microbatches
        if self.inputs.stack.early_gathers:
            gathers = 0
        bytes_of_one = gathers * self.narrow + reductions * self.reduced
        return sum(layer.gathered for layer in layers) * bytes_of_one * per_byte

    def seconds_per_byte(self, ranks: list[int]) -> float:
        if len(ranks) == 1:
            return 0.0
        ring = Ring.of(ranks, self.inputs.per_host)
        return (len(ranks) - 1) / len(ranks) / ring.bandwidth(self.inputs.device)

    @cache  # noqa: B019
    def needed(self, choice: Choice, known: Profile) -> float:
        """Return the least bytes of the fullest rank: `Plan.needed`, counting only tensors that are
        certainly live at one time."""
        placement, _ = self.layout(choice)
        stages = self.stages(choice, known)
        most = 0.0
        for rank in range(choice.pipeline_parallel):
            own = [stage for stage, its_rank in enumerate(placement) if its_rank == rank]
            most = max(most, self.live(choice, known, [stages[stage] for stage in own], rank))
        return with_margin(most, self.inputs) * SLACK

    def live(self, choice: Choice, known: Profile, own: list[list[Layer]], rank: int) -> float:
        """own: the rank's stages."""
        microbatches = self.microbatches(choice)
        layers = [layer for stage in own for layer in stage]
        shards = self.inputs.gpus // choice.pipeline_parallel // choice.data_parallel_replicate
        elements = sum(layer.elements for layer in layers)
        gathered = sum(layer.gathered for layer in layers)
        state = MASTER * (1 + known.moments) * elements / shards
        gradients = MASTER * elements / shards
        if choice.accumulate_gradients == "whole" and microbatches > 1:
            gradients = self.reduced * gathered
        if choice.pipeline_parallel == 1:
            kept = choice.local_batch_size * sum(layer.kept for layer in layers[1:-1])
            # the last forward ends when the gradients of the others are there
            return state + (gradients + kept if microbatches > 1 else max(gradients, kept))
        if microbatches == 1:
            gradients = 0  # what is gathered may be free before they are there
        if self.data_parallel(choice) > 1 and gathers_once(self.cfg.parallelism):
            state += self.narrow * gathered  # until backward
        kept = 0
        if not splits_backward(choice):
            kept = held(choice, own, rank, microbatches)
        return state + max(gradients, kept)


def with_reduction(layer: Layer) -> Layer:
    """Return the cost where every microbatch reduces its gradients."""
    return layer._replace(backward=layer.backward + layer.reduction)


def splits_backward(choice: Choice) -> bool:
    return SCHEDULES[choice.pipeline_schedule].splits_backward


def work(layers: list[Layer]) -> float:
    """Return the seconds of a microbatch."""
    return sum(layer.forward + layer.backward for layer in layers)


def held(choice: Choice, own: list[list[Layer]], rank: int, microbatches: int) -> int:
    """Return the bytes of activations when a rank begins its first backward, which is of its last
    stage. As many microbatches as there are ranks have then gone through its other stages."""
    sizes = [sum(layer.kept for layer in stage) for stage in own]
    several = min(microbatches, choice.pipeline_parallel)
    in_last = 1
    if len(own) == 1:
        in_last = min(microbatches, choice.pipeline_parallel - rank)
    return several * sum(sizes[:-1]) + in_last * sizes[-1]
