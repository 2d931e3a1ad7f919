"""A step of a deep model, put together from the step of a shallow one.

A large model is traced with few layers. The events of its middle blocks are then repeated, and each
reference to a block's memory is shifted with them. That is exact where neighbouring middle blocks
do the same thing, which is compared event by event. Where they do not, all layers are traced.
"""

import math
from dataclasses import replace

import torch

import train
from configs import check
from configs.schema import Config
from models.cores import attention_in
from tools.plan.routing import BALANCED, Routing
from tools.plan.step import IN_BLOCKS, Memory, Op, Step, Stretch, Where
from tools.plan.trace import trace_step
from training.optimizers import OPTIMIZERS


def traced(
    cfg: Config, world_size: int, per_host: int, on_gpu: bool, routing: Routing = BALANCED
) -> Step:
    """Return the step of rank 0, which has the largest shards, repeated from a few layers where
    that is exact. An optimizer that works matrix by matrix is traced with all layers: a part of
    them does not show which matrices a rank gets."""
    numbers = check.architecture(cfg.model)
    layers = numbers["n_layers"]
    few, edge, period = few_layers(cfg, layers, numbers.get("n_dense_layers", 0))
    # without FSDP the two ways were never compared
    data_parallel = world_size > cfg.parallelism.tensor_parallel
    grows_with_elements = all(rule.is_one_kernel for rule in OPTIMIZERS[cfg.optimizer.kind].rules)
    if few < layers and data_parallel and grows_with_elements:
        model = cfg.model.model_copy(update={"n_layers": few})
        shallow = trace_step(
            cfg.model_copy(update={"model": model}), world_size, per_host, on_gpu, routing=routing
        )
        step = with_layers(shallow, layers, edge, period)
        if step is not None:
            return step
    return trace_step(cfg, world_size, per_host, on_gpu, routing=routing)


def few_layers(cfg: Config, layers: int, dense: int) -> tuple[int, int, int]:
    """Return the number of layers to trace for a model with `layers`, of which the first `dense`
    have no experts where the others do. Also the arguments of `with_layers`: the number of blocks
    at the front that are not repeated, and the period of those after them."""
    period = period_of_attention(cfg, dense)
    if cfg.activation_checkpoint.mode == "every_n":
        period = math.lcm(period, cfg.activation_checkpoint.every_n)
    # Blocks at either end that may differ from the middle: FSDP prefetches one, and the last blocks
    # may stay unsharded.
    edge = 1 + cfg.parallelism.keep_gathered
    # FSDP has two groups per block then, so prefetching at the end covers one block more
    several = cfg.parallelism.expert_parallel > 1
    few = dense + 2 * edge + several + 2 * period
    return few + (layers - few) % period, dense + edge, period


def period_of_attention(cfg: Config, first: int) -> int:
    """Return the number of blocks after which the masks of attention repeat, from block `first` on;
    1 where all are the same. Sliding windows alternate with whole attention, for example."""
    family, args = train.architecture(cfg)
    with torch.device("meta"):
        blocks = list(family.build(args).layers.values())[first:]
    rules = []
    for block in blocks:
        specs = tuple(core.spec for core in attention_in(block))
        rules.append((repr(block), specs))
    for period in range(1, len(rules)):
        if rules[period:] == rules[:-period]:
            return period
    return max(1, len(rules))


def with_layers(step: Step, layers: int, edge: int, period: int) -> Step | None:
    """Return the step of the same model with `layers` blocks, from one with fewer: blocks `edge`
    ... `edge + period - 1` repeated.

    None where that would not be exact: those blocks and the next `period` ones differ in some
    event, or the optimizer does more than update each element by itself, which `_scale` would not
    know how to enlarge.
    """
    optimizer = (op for where, _, op in step.ops() if where.phase == "optimizer")
    if any(op.matmul_flops or op.groups or op.attention_flops or op.kind for op in optimizer):
        return None
    repetition = Repetition(step, layers, edge, period)
    return repetition.step() if repetition.is_exact() else None


class Repetition:
    """Repetition of the blocks `unit` of a traced step, each of them there `copies` more times.
    Copy 0 is the traced one."""

    def __init__(self, step: Step, layers: int, edge: int, period: int) -> None:
        self.traced = step
        self.layers = layers
        self.edge = edge
        self.period = period
        self.copies, self.remainder = divmod(layers - step.layers, period)
        self.unit = range(edge, edge + period)
        self.after = edge + period
        self.stretches = {stretch.where: stretch for stretch in step.stretches}
        # microbatch, phase, block and order of a birth -> storage
        self.births: dict[tuple[int, str, int, int], int] = {}
        for number, memory in step.memory.items():
            if memory.born.phase != "build":
                self.births[(*memory.born, memory.order)] = number
        self.places: dict[tuple[Where, int], Where] = {}  # what `moved` has found
        # (storage as traced, copy) -> storage of the new step
        self.numbers: dict[tuple[int, int], int] = {}

    def is_exact(self) -> bool:
        """Return True if the unit is followed by blocks that do the same, so that it may be
        repeated."""
        if self.remainder or self.copies < 0 or len(self.stretches) < len(self.traced.stretches):
            return False
        for where, stretch in self.stretches.items():
            if where.block in self.unit and where.phase in IN_BLOCKS:
                following = self.stretches.get(where._replace(block=where.block + self.period))
                if following is None or self.relative(stretch) != self.relative(following):
                    return False
        return True

    def relative(self, stretch: Stretch) -> list:
        """Return the events of a block, with blocks numbered from this one."""
        events = []
        for row in stretch.rows:
            if isinstance(row, Op):
                events.append(row)
                continue
            m = self.traced.memory[row[1]]
            in_a_block = 0 <= m.born.block < self.traced.layers
            born = m.born
            if in_a_block:
                born = born._replace(block=born.block - stretch.where.block)
            events.append((row[0], m.size, m.kind, born, in_a_block, m.order))
        return events

    def moved(self, where: Where, copy: int = 0) -> Where:
        """Return the place in the new step of a traced place in this copy."""
        if (where, copy) not in self.places:
            self.places[where, copy] = self.new_place(where, copy)
        return self.places[where, copy]

    def new_place(self, where: Where, copy: int) -> Where:
        block = where.block
        if where.phase in ("build", *IN_BLOCKS) and block >= 0:
            if block in self.unit:
                block += copy * self.period
            elif block >= self.after:
                block += self.copies * self.period
        return where._replace(block=block)

    def copies_of(self, block: int) -> range:
        return range(self.copies + 1 if block in self.unit else 1)

    def storages(self, number: int, where: Where, copy: int) -> list[int]:
        """Return the storages of the new step that storage `number` represents, seen from a copy of
        the stretch `where`."""
        memory = self.traced.memory[number]
        born = memory.born
        if not 0 <= born.block < self.traced.layers or born.phase == "build":
            return [self.numbers[number, 0]]
        if not 0 <= where.block < self.traced.layers or where.phase not in IN_BLOCKS:
            return [self.numbers[number, c] for c in self.copies_of(born.block)]
        # in the new step; now find the traced one
        block = self.moved(where, copy).block + born.block - where.block
        copy_of_block = 0
        if block >= self.edge:
            copy_of_block = min((block - self.edge) // self.period, self.copies)
        traced_block = block - copy_of_block * self.period
        traced_number = self.births[born.micro, born.phase, traced_block, memory.order]
        if traced_block not in self.unit:
            copy_of_block = 0
        return [self.numbers[traced_number, copy_of_block]]

    def copy_of(self, stretch: Stretch, copy: int) -> Stretch:
        rows = []
        for row in stretch.rows:
            if isinstance(row, Op):
                rows.append(row)
                continue
            event, number = row
            rows += [(event, n) for n in self.storages(number, stretch.where, copy)]
        return Stretch(self.moved(stretch.where, copy), rows)

    def step(self) -> Step:
        """Return the step with all layers."""
        memory: dict[int, Memory] = {}
        for n, m in self.traced.memory.items():
            for copy in self.copies_of(m.born.block):
                born = self.moved(m.born, copy)
                died = m.died and self.moved(m.died, copy)
                self.numbers[n, copy] = len(memory)
                memory[len(memory)] = replace(m, born=born, died=died)

        stretches: list[Stretch] = []
        for stretch in self.traced.stretches:
            where = stretch.where
            if where.phase not in IN_BLOCKS or where.block not in self.unit:
                stretches.append(self.copy_of(stretch, 0))
                continue
            forward = where.phase == "forward"
            # the last of the unit to happen: all copies are due
            if where.block == self.unit[-1 if forward else 0]:
                blocks = self.unit
                copies = range(self.copies + 1)
                if not forward:
                    blocks = reversed(blocks)
                    copies = reversed(copies)
                pieces = [self.stretches[where._replace(block=block)] for block in blocks]
                for copy in copies:
                    stretches += [self.copy_of(piece, copy) for piece in pieces]

        parameters = {}
        for block, totals in self.traced.parameters.items():
            for copy in range(self.copies + 1):
                place = self.moved(Where(-1, "build", block), copy)
                parameters[place.block] = totals
        moe_layers = self.traced.moe_layers
        if moe_layers:
            moe_layers += self.copies * self.period
        whole = replace(
            self.traced,
            stretches=stretches,
            memory=memory,
            layers=self.layers,
            parameters=parameters,
            moe_layers=moe_layers,
        )
        _scale(whole, self.traced)
        return whole


def _scale(step: Step, traced: Step) -> None:
    """Enlarge what grows with the layers outside of the blocks. Clipping and the optimizer work on
    all parameters in one go: their traffic grows with the number of elements. Their messages do not
    grow: clipping sends one number for all tensors. The all-reduce of the experts' token counts has
    a row for each MoE layer."""
    before = sum(p.local_bytes for p in traced.parameters.values())
    after = sum(p.local_bytes for p in step.parameters.values())
    for stretch in step.stretches:
        in_optimizer = stretch.where.phase in ("clip", "optimizer")
        for i, row in enumerate(stretch.rows):
            if not isinstance(row, Op):
                continue
            if row.bytes_per_moe_layer:
                stretch.rows[i] = replace(row, message=row.bytes_per_moe_layer * step.moe_layers)
            elif row.traffic and in_optimizer:
                traffic = row.traffic * after // before
                stretch.rows[i] = replace(row, traffic=traffic, fused=traffic)
