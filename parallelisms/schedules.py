"""Pipeline schedules: in which order each rank works on which microbatch of which stage.

A schedule is a table of actions, one list for each rank. The runtime runs the table on real
tensors, and `tools/plan` simulates the same table with planned seconds, so that the bubble in a
plan is that of the schedule that runs. Plain Python on numbers. What distinguishes the schedules is
the table `configs/schema.py::SCHEDULES`.

A model is cut into stages, numbered from 0; a rank has one or several of them. Backward gives the
gradient of a stage's input and the gradients of its weights. A split backward does these two one
after the other: other ranks wait for the first one only, so the second one can fill the time in
which a rank would otherwise wait (arXiv:2401.10241). The first stage never splits: tokens have no
gradient that another rank waits for, so its whole backward can fill such time."""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from configs.schema import SCHEDULES

FORWARD = "forward"
BACKWARD = "backward"  # whole
BACKWARD_INPUT = "backward_input"  # the two halves of a split backward
BACKWARD_WEIGHT = "backward_weight"


class Action(NamedTuple):
    """One forward, backward or half backward of a microbatch in one of a rank's stages."""

    kind: str  # FORWARD, BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT
    stage: int  # from 0, over all ranks
    microbatch: int


Table = list[list[Action]]  # for each rank of a pipeline, its actions in their order
Timeline = list[list[tuple[Action, float, float]]]  # the same with begin and end, in seconds


def placement(schedule: str, ranks: int, stages_per_rank: int = 0) -> list[int]:
    """Return the rank of every stage. stages_per_rank 0: the schedule's own number."""
    rounds = stages_per_rank or SCHEDULES[schedule].default_stages
    turns_back = SCHEDULES[schedule].shape == "v"
    rank_of: list[int] = []
    for i in range(rounds):
        one_round = list(range(ranks))
        if turns_back and i % 2:
            one_round.reverse()
        rank_of += one_round
    return rank_of


def least_microbatches(schedule: str, ranks: int) -> int:
    """Return the fewest microbatches of a step with which the schedule can run."""
    return max(1, SCHEDULES[schedule].microbatches_per_rank * ranks)


def table(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Table:
    """Return the actions of every rank: complete, and free of deadlock. stages_per_rank 0: the
    schedule's own number.

    Raises ValueError for fewer microbatches than the schedule needs.
    """
    least = least_microbatches(schedule, ranks)
    if microbatches < least:
        raise ValueError(
            f"{schedule} on {ranks} ranks needs at least {least} microbatches, not {microbatches}"
        )
    if schedule == "dualpipe_v":
        return [_dualpipe_v(ranks, rank, microbatches) for rank in range(ranks)]
    return _Scheduler(schedule, ranks, stages_per_rank, microbatches).table()


# Results and inputs of an action ------------------------------------------------------------------

RESULTS = {
    FORWARD: "hidden",
    BACKWARD: "gradient",
    BACKWARD_INPUT: "gradient",
    BACKWARD_WEIGHT: "weights",
}
Result = tuple[str, int, int]  # (a value of RESULTS, stage, microbatch)


def result(action: Action) -> Result:
    """Return the result of an action: the hidden state after its stage, the gradient of the one
    before it, or those of its weights."""
    return RESULTS[action.kind], action.stage, action.microbatch


def needs(action: Action, stages: int) -> list[Result]:
    """Return the results that must exist before an action can begin. If the last of them comes from
    another rank, it is sent."""
    kind, stage, microbatch = action
    if kind == FORWARD:
        return [("hidden", stage - 1, microbatch)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [("gradient", stage, microbatch)]
    own = [("hidden", stage, microbatch)]
    return own if stage == stages - 1 else [*own, ("gradient", stage + 1, microbatch)]


# Making a table -----------------------------------------------------------------------------------


class _Scheduler:
    """Makes a table by simulating the pipeline in ticks: a forward takes one tick, a whole backward
    two, half a backward one.

    Whenever a rank is free, it takes the first of these that can be done: a forward, for which
    there is room; a backward for which another rank waits, or its first half; the rest of
    backwards. Only the room and the order of the forwards differ between schedules. The tests
    compare the bubbles with the published ones.
    """

    def __init__(self, schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> None:
        self.row = SCHEDULES[schedule]
        self.ranks = ranks
        self.microbatches = microbatches
        self.rank_of = placement(schedule, ranks, stages_per_rank)
        self.stages = len(self.rank_of)
        # microbatches that pass one stage before any passes the next
        self.round = 1 if self.row.shape == "v" else ranks
        self.own: list[list[int]] = [[] for _ in range(ranks)]  # the stages of each rank
        for stage, rank in enumerate(self.rank_of):
            self.own[rank].append(stage)
        self.orders = [self.order(stage) for stage in range(self.stages)]
        self.begun = {kind: [0] * self.stages for kind in RESULTS}  # microbatches of every stage
        self.ready_at: dict[Result, int] = {}  # tick

    def splits(self, stage: int) -> bool:
        return self.row.splits_backward and stage > 0

    def order(self, stage: int) -> tuple[str, ...]:
        """Return the kinds of a stage's actions by their urgency; "" where the stage has none."""
        if self.splits(stage):
            return FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
        return (FORWARD, "", BACKWARD) if self.row.splits_backward else (FORWARD, BACKWARD, "")

    def table(self) -> Table:
        actions: Table = [[] for _ in range(self.ranks)]
        busy_until = [0] * self.ranks
        tick = 0
        kinds_of_all_stages = [kind for kinds in self.orders for kind in kinds if kind]
        left = self.microbatches * len(kinds_of_all_stages)
        while left:
            free = [rank for rank in range(self.ranks) if busy_until[rank] <= tick]
            taken = 0
            for rank in free:
                if action := self.choose(rank, tick):
                    actions[rank].append(action)
                    self.begun[action.kind][action.stage] += 1
                    busy_until[rank] = tick + (2 if action.kind == BACKWARD else 1)
                    self.ready_at[result(action)] = busy_until[rank]
                    taken += 1
            if not taken and len(free) == self.ranks:
                raise ValueError(
                    f"a pipeline of {self.ranks} ranks and {self.stages} stages stands still at "
                    f"tick {tick}"
                )
            left -= taken
            tick += 1
        return actions

    def choose(self, rank: int, tick: int) -> Action | None:
        """Return the action that this rank begins at this tick, or None."""
        forwards = [a for a in self.possible(0, rank, tick) if self.has_room(rank, a.stage)]
        if forwards:
            return min(forwards, key=self.forward_order)
        for urgency in 1, 2:
            if possible := self.possible(urgency, rank, tick):
                return min(possible, key=lambda a: (a.microbatch // self.round, -a.stage))
        return None

    def possible(self, urgency: int, rank: int, tick: int) -> list[Action]:
        """Return the next action of this urgency for each stage of the rank whose inputs are
        ready."""
        actions = []
        for stage in self.own[rank]:
            kind = self.orders[stage][urgency]
            if not kind or self.begun[kind][stage] == self.microbatches:
                continue
            action = Action(kind, stage, self.begun[kind][stage])
            never = tick + 1
            ready = [self.ready_at.get(needed, never) for needed in needs(action, self.stages)]
            if all(at <= tick for at in ready):
                actions.append(action)
        return actions

    def forward_order(self, action: Action) -> tuple[int, int]:
        """Return a forward's sort key. Loop: as many microbatches as there are ranks go through one
        stage, then through the next. V: those on their way back to the first rank come first."""
        if self.row.shape == "v":
            return 0, -action.stage
        return action.microbatch // self.round, action.stage

    def has_room(self, rank: int, stage: int) -> bool:
        """Return whether the rank may hold the activations of one more microbatch of this stage.

        Loop: a rank holds as many as it needs to stay busy until the first gradient is back. After
        its last stage's first forward this takes one tick per hop and direction, with several
        stages and whole backwards twice as many as the hops. A split backward holds activations
        until its second half has ended. V: as many in all as 1F1B holds on its first rank, and one
        place stays free for the second stage, without which the pipeline would deadlock.
        """
        own = self.own[rank]
        most = len(own) * self.ranks
        splits = self.row.splits_backward
        if splits and sum(self.held(s) for s in own) >= most:
            return False
        if self.row.shape == "v":
            return stage != own[0] or self.held(stage) < most - 1
        hops = self.ranks - 1 - rank
        if len(own) > 1 and not splits:
            hops *= 2
        return sum(self.ahead(s) for s in own) < most - self.ranks + 1 + hops

    def held(self, stage: int) -> int:
        """Return the number of microbatches of a stage whose activations are held: from the begin
        of forward to that of the end of backward."""
        last = BACKWARD_WEIGHT if self.splits(stage) else BACKWARD
        return self.begun[FORWARD][stage] - self.begun[last][stage]

    def ahead(self, stage: int) -> int:
        """Return the number of microbatches of a stage that have begun forward and not yet
        backward."""
        first = BACKWARD_INPUT if self.splits(stage) else BACKWARD
        return self.begun[FORWARD][stage] - self.begun[first][stage]


def _dualpipe_v(ranks: int, rank: int, microbatches: int) -> list[Action]:
    """Return one rank's actions, as the eight phases of dualpipe/dualpipev.py: (how often, what).

    f0, b0: forward and whole backward of the rank's first stage; f1, b1: of its second. i0, i1:
    first half of a backward; w: the second half of the earliest backward that has had only its
    first.
    """
    before, after = rank + 1, ranks - rank - 1
    halves = ["b1", "b0"] * before
    halves[before:] = [name.replace("b", "i") for name in halves[before:]]
    phases = [
        (2 * after, ["f0"]),
        (before, ["f0", "f1"]),
        (after, ["i1", "w", "f1"]),
        (microbatches - 2 * ranks + before, ["f0", "b1", "f1", "b0"]),
        (after, ["b1", "f1", "b0"]),
        (1, halves),
        (after, ["w", "i0"]),
        (before, ["w"]),
    ]
    kinds = {"f": FORWARD, "b": BACKWARD, "i": BACKWARD_INPUT}
    stages = rank, 2 * ranks - 1 - rank
    count = {"f0": 0, "f1": 0, "b0": 0, "b1": 0}
    actions: list[Action] = []
    split: list[Action] = []  # first halves whose second half is still to come
    in_order: list[str] = []
    for times, names in phases:
        in_order += names * times
    for name in in_order:
        if name == "w":
            if split:
                actions.append(split.pop(0)._replace(kind=BACKWARD_WEIGHT))
            continue
        if name == "i0" and rank == 0:
            name = "b0"  # the first stage of all
        kind = kinds[name[0]]
        stage = stages[int(name[1])]
        counter = name.replace("i", "b")
        action = Action(kind, stage, count[counter])
        actions.append(action)
        count[counter] += 1
        if kind == BACKWARD_INPUT:
            split.append(action)
    return actions


# Timing a table -----------------------------------------------------------------------------------


def timeline(
    table: Table,
    placement: list[int],
    seconds: Callable[[Action], float],
    travel: Callable[[int, int], float] = lambda *_: 0.0,
    ready: Callable[[Action], float] = lambda _: 0.0,
) -> Timeline:
    """Return when every action begins and ends, if each takes `seconds(action)`, none begins before
    `ready(action)`, and a result that another rank needs travels for `travel(sender, receiver)`
    seconds, during which both work on. Raises ValueError for a table in which ranks wait for each
    other for ever."""
    ended: dict[Result, float] = {}
    played: Timeline = [[] for _ in table]
    left = sum(map(len, table))
    while left:
        before = left
        for rank, actions in enumerate(table):
            for action in islice(actions, len(played[rank]), None):
                needed = needs(action, len(placement))
                if any(r not in ended for r in needed):
                    break
                begin = max(ready(action), played[rank][-1][2] if played[rank] else 0.0)
                for r in needed:
                    sender = placement[r[1]]
                    on_the_way = travel(sender, rank) if sender != rank else 0.0
                    begin = max(begin, ended[r] + on_the_way)
                end = begin + seconds(action)
                played[rank].append((action, begin, end))
                ended[result(action)] = end
                left -= 1
        if left == before:
            waiting = [
                actions[len(done)]
                for actions, done in zip(table, played)
                if len(done) < len(actions)
            ]
            raise ValueError(f"the ranks of this table wait for each other: {waiting}")
    return played


def bubble(played: Timeline) -> float:
    """Return the share of the ranks' time in which they are idle, from the first begin to the last
    end of the step."""
    entries = [entry for actions in played for entry in actions]
    busy = sum(end - begin for _, begin, end in entries)
    first = min(begin for _, begin, _ in entries)
    last = max(end for _, _, end in entries)
    return 1 - busy / (len(played) * (last - first))


class Transfer(NamedTuple):
    """A result that is sent from one rank to another."""

    sender: int  # rank
    receiver: int
    made_by: Action
    needed_by: Action


def transfers(table: Table, placement: list[int]) -> list[Transfer]:
    """Return all sends of a step, in one order that is possible for all ranks at once.

    If every rank starts its sends and receives in this order, then those of two ranks for each
    other are in the same order on both sides, which NCCL requires. A rank has to start all of its
    own up to what its next action needs, and those among them that are sends belong to actions that
    it has done already.
    """
    wanted: dict[Result, Action] = {}  # result that is sent -> the action that needs it
    for rank, actions in enumerate(table):
        for action in actions:
            for needed in needs(action, len(placement)):
                if placement[needed[1]] != rank:
                    wanted[needed] = action
    played = timeline(table, placement, lambda a: 2.0 if a.kind == BACKWARD else 1.0)
    made = [
        (end, rank, action) for rank, actions in enumerate(played) for action, _, end in actions
    ]
    found = []
    for _, sender, action in sorted(made):
        needed_by = wanted.get(result(action))
        if needed_by:
            found.append(Transfer(sender, placement[needed_by.stage], action, needed_by))
    return found


# The layers of a stage ----------------------------------------------------------------------------


def stage_layers(
    n_layers: int, stages: int, weight_of_embedding: float, weight_of_head: float
) -> list[range]:
    """Return the layers of every stage such that the most expensive stage is as cheap as possible.
    The weights are the costs of the embedding, in the first stage, and of the head, in the last, in
    units of a layer. Every stage gets a layer."""
    if n_layers < stages:
        raise ValueError(f"{n_layers} layers are too few for {stages} stages")
    counts = [1] * stages
    for _ in range(n_layers - stages):
        cost = [float(count) for count in counts]
        cost[0] += weight_of_embedding
        cost[-1] += weight_of_head
        counts[cost.index(min(cost))] += 1
    return consecutive(counts)


def consecutive(counts: list[int] | tuple[int, ...]) -> list[range]:
    """Return ranges of these lengths, one after the other from 0: `parallelism.pipeline_layers` as
    numbers of layers."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts)]


def layers_text(layers: range) -> str:
    """Format layers as "3-5", or "3" for a single layer: numbers from 0, as in the names of
    weights."""
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}"


def end_weights(
    args: Any, more: Any, parameters: Callable[[Any], int], flops: Callable[[Any], float]
) -> tuple[float, float]:
    """Return `weight_of_embedding` and `weight_of_head` of `stage_layers`, from a family's
    functions of its `Args`; `more`: the same numbers with one more layer.

    The embedding costs next to no time, so what counts is its memory: its parameters over those of
    a layer. The first stage holds the most activations, too. The head counts by its matmuls: 6
    FLOPs per weight and token, over those of a layer.
    """
    matrix = args.vocab_size * args.dim
    parameters_of_a_layer = parameters(more) - parameters(args)
    flops_of_a_layer = flops(more) - flops(args)
    return matrix / parameters_of_a_layer, 6 * matrix / flops_of_a_layer
