"""The settings that a number of GPUs allows, ranked by speed.

What cannot be among the best is not traced (tools/plan/bounds.py). The most promising choice is
traced next, until every choice that is left is slower, at best, than the last of those reported, or
does not fit. So the ranking is that of `every_choice`, traced and sorted.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf

from configs.schema import SCHEDULES, Config, InputError
from configs.words import number_of
from tools.plan.bounds import Bounds, Profile, profile
from tools.plan.choices import (
    MODES,
    Candidate,
    Choice,
    every_choice,
    legal,
    replicated,
    with_batch,
)
from tools.plan.pipeline import Stages
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.step import GIB
from tools.plan.workers import workers

COLUMNS = {  # of the table -> width
    "tp": 4,
    "ep": 4,
    "context": 12,
    "replicas": 10,
    "pipeline": 24,
    "checkpointing": 15,
    "microbatch": 13,
    "accumulation": 14,
    "memory GiB": 12,
    "s/step": 9,
    "exposed": 9,
    "bubble": 8,
    "tokens/s": 14,
    "MFU": 7,
}
SHOWN = 10  # rows of the table
EVERY = 5.0  # seconds between two lines of progress


def candidate(choice: Choice, plan: Plan) -> Candidate:
    return Candidate(
        choice,
        plan.microbatches,
        plan.needed,
        plan.fits,
        plan.time.seconds,
        plan.tokens_per_second,
        plan.mfu,
        plan.time.exposed,
        plan.pipeline.bubble if plan.pipeline else 0.0,
    )


def planned(
    choices: list[Choice], cfg: Config, inputs: PlanInputs
) -> tuple[list[Candidate], Profile | None]:
    """Plans of choices that share traces; and of the first what it says about others, if it is one
    of `profiled`. Called in a worker."""
    stages = Stages(parallel=False)
    found = []
    known = None
    for choice in choices:
        plan = make_plan(choice.applied_to(cfg), inputs, stages)
        found.append(candidate(choice, plan))
        if choice.pipeline_parallel == choice.local_batch_size == 1 and choice.replicas == 1:
            known = profile(plan)
    return found, known


def stand_in(
    choice: Choice, cfg: Config, inputs: PlanInputs
) -> tuple[list[Candidate], Profile | None]:
    """Return the profile alone, of a choice that the batch does not allow. One microbatch is as
    good: no other does less than the first. Called in a worker."""
    cfg = with_batch(Bounds(cfg, inputs).data_parallel(choice), cfg)
    cfg = choice.applied_to(cfg)
    if not legal(cfg, inputs):
        return [], None
    return [], profile(make_plan(cfg, inputs, Stages(parallel=False)))


def of_profile(choice: Choice) -> Choice:
    """Return the choice whose trace gives the profile for this one, up to its accumulation."""
    return choice.base._replace(mode=choice.mode)


def together(choice: Choice) -> Choice:
    """Equal for choices whose plans share traces: the pipelines with the same stages."""
    return choice._replace(schedule="1f1b", stages_per_rank=0)


@dataclass
class Found:
    """Result of a search."""

    ranking: list[Candidate]  # the fastest that fit, as many as were asked for
    said: str  # what was left out


def by_speed(row: Candidate) -> tuple:
    """Sort key: the fastest first; of equals in the order of their settings."""
    return -row.tokens_per_second, row.choice


@dataclass
class Search:
    """State of a search: which choices are open, and which figures are known."""

    cfg: Config
    inputs: PlanInputs
    shown: int
    bounds: Bounds
    open: dict[Choice, None] = field(default_factory=dict)
    too_large: int = 0  # choices that were left out since they cannot fit
    too_slow: int = 0  # since they cannot be among those that are shown
    known: dict[Choice, Candidate] = field(default_factory=dict)
    # None: that cannot be traced, so there are no bounds
    profiles: dict[Choice, Profile | None] = field(default_factory=dict)
    running: dict[Future, list[Choice]] = field(default_factory=dict)
    # choice -> profile that the bounds come from, seconds, bytes
    cached: dict[Choice, tuple[Profile, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choices = every_choice(self.cfg, self.inputs)
        self.legal = set(self.choices)
        self.open = dict.fromkeys(self.choices)
        self.leaners: dict[Choice, list[Choice]] = {}
        self.capacity = self.inputs.device.memory_gib * GIB
        self.tokens = self.cfg.training.global_batch_size * self.cfg.training.seq_len
        self.profiled: dict[Choice, Choice] = {}  # what `of_profile` gives -> whom to trace for it
        for choice in self.choices:
            if choice.pipeline_parallel == choice.local_batch_size == 1:
                self.profiled[of_profile(choice)] = choice

    def bound(self, choice: Choice) -> tuple[float, float]:
        """Return the least seconds and bytes of a choice. A mode that keeps more computes less, so
        its profile bounds the seconds of this one too; the bytes need this choice's own profile."""
        own = of_profile(choice)
        for mode in MODES[MODES.index(choice.mode) :]:
            known = self.profiles.get(own._replace(mode=mode))
            if known is None:
                continue
            cached = self.cached.get(choice)
            if cached is None or cached[0] is not known:
                seconds = self.bounds.seconds(choice, known)
                needed = self.bounds.needed(choice, known) if mode == choice.mode else 0.0
                cached = self.cached[choice] = known, seconds, needed
            return cached[1:]
        return 0.0, 0.0

    def at_most(self, choice: Choice) -> float:
        """Return the tokens per second that the choice cannot exceed."""
        seconds, _ = self.bound(choice)
        return self.tokens / seconds if seconds else inf

    def is_too_large(self, choice: Choice) -> bool:
        """Return True if it cannot fit: by its bound, or since one that needs no more does not."""
        _, needed = self.bound(choice)
        if needed > self.capacity:
            return True
        known = [self.known[one] for one in self.leaner(choice) if one in self.known]
        return not all(row.fits for row in known)

    def leaner(self, choice: Choice) -> list[Choice]:
        """Other choices that need no more memory: of a mode that keeps no more, with sharded
        gradients; without a pipeline also with a smaller microbatch. The largest microbatch has no
        accumulation, so of the smaller ones only sharded gradients need no more. Where backward is
        in two halves, what the first recomputes is kept until the second."""
        if choice not in self.leaners:
            modes = MODES[: MODES.index(choice.mode) + 1]
            if SCHEDULES[choice.schedule].splits_backward:
                modes = (choice.mode,)
            sizes = [choice.local_batch_size]
            if choice.pipeline_parallel == 1:
                every = self.sizes(choice)
                sizes = every[: every.index(choice.local_batch_size) + 1]
            found = []
            for mode, size in product(modes, sizes):
                one = choice._replace(mode=mode, local_batch_size=size)
                found.append(one._replace(accumulate="sharded"))
                if self.accumulates(one) == self.accumulates(choice):
                    found.append(one)
            legal_ones = [one for one in found if one in self.legal and one != choice]
            self.leaners[choice] = legal_ones
        return self.leaners[choice]

    def accumulates(self, choice: Choice) -> bool:
        return self.bounds.microbatches(choice) > 1

    def sizes(self, choice: Choice) -> list[int]:
        """Return the microbatches to try with a mesh, the smallest first."""
        ranks = choice.tensor_parallel * choice.context_parallel
        largest = self.cfg.training.global_batch_size * ranks // self.inputs.gpus
        return [*(2**i for i in range(12) if 2**i < largest), largest]

    def best(self) -> list[Candidate]:
        """Return the fastest choice that fits; with sharded accumulation only where whole does not
        fit."""
        rows = [row for row in self.known.values() if row.fits and self.counts(row.choice)]
        return sorted(rows, key=by_speed)[: self.shown]

    def counts(self, choice: Choice) -> bool:
        if choice.accumulate == "whole" or choice.whole in self.known:
            return self.may_count(choice)
        return self.is_too_large(choice.whole)

    def may_count(self, choice: Choice) -> bool:
        """Return True as long as whole gradients are not known to fit too."""
        if choice.accumulate == "whole" or choice.whole not in self.known:
            return True
        return not self.known[choice.whole].fits

    def leave_out(self) -> None:
        """Close what cannot fit, and what cannot be among the best."""
        best = self.best()
        slowest = best[-1].tokens_per_second if len(best) == self.shown else 0.0
        for choice in list(self.open):
            if self.is_too_large(choice):
                self.too_large += 1
            elif self.at_most(choice) < slowest or not self.may_count(choice):
                self.too_slow += 1
            else:
                continue
            del self.open[choice]

    def next(self) -> list[Choice]:
        """Return what to trace next: the choice that may be fastest, with those that share its
        traces; or first the one that bounds it. Empty: wait for the traces that run now."""
        self.leave_out()
        order = sorted(self.open, key=self.promise)
        in_flight = {choice for choices in self.running.values() for choice in choices}
        profiles_in_flight = {of_profile(choice) for choice in in_flight}
        for choice in order:
            own = of_profile(choice)
            if own not in self.profiles:
                if own in profiles_in_flight:
                    continue
                return [self.profiled.get(own, own._replace(accumulate="sharded"))]
            whole = choice.whole
            if whole != choice and whole in in_flight:
                continue  # whether that fits decides whether this one counts
            if whole in self.open:
                choice = whole
            return [one for one in order if together(one) == together(choice)]
        return []

    def promise(self, choice: Choice) -> tuple:
        """Sort key: what may be fastest first; where nothing is known the mode that computes
        least, whose profile bounds the others."""
        return -self.at_most(choice), -MODES.index(choice.mode), choice

    def next_smallest(self) -> list[Choice]:
        """Return what to trace next where nothing fits: what may need the least memory, until all
        that is left needs more than the nearest."""
        if self.running:
            return []
        nearest = min((row.needed for row in self.known.values()), default=inf)
        rows = []
        for choice in self.choices:
            if choice in self.known or self.leaner(choice):
                continue
            _, needed = self.bound(choice)
            rows.append((needed, choice))
        return [choice for needed, choice in sorted(rows)[:1] if needed < nearest]

    def learn(self, choices: list[Choice], found: list[Candidate], known: Profile | None) -> None:
        for row in found:
            self.known[row.choice] = row
        if choices[0].pipeline_parallel == choices[0].local_batch_size == 1:
            self.profiles.setdefault(of_profile(choices[0]), known)

    def start(self, pool: ProcessPoolExecutor, choices: list[Choice]) -> None:
        for choice in choices:
            self.open.pop(choice, None)
        if choices[0] in self.legal:
            future = pool.submit(planned, choices, self.cfg, self.inputs)
        else:
            future = pool.submit(stand_in, choices[0], self.cfg, self.inputs)
        self.running[future] = choices

    def run(
        self, pool: ProcessPoolExecutor, work: Callable[[], list[Choice]], log: Callable | None
    ) -> None:
        """Trace what `work` asks for, until it asks for no more."""
        said = time.monotonic()
        while True:
            while len(self.running) < pool._max_workers:
                choices = work()
                if not choices:
                    break
                self.start(pool, choices)
            if not self.running:
                return
            done, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in done:
                self.learn(self.running.pop(future), *future.result())
            if log and time.monotonic() - said > EVERY:
                said = time.monotonic()
                log(self.progress())

    def progress(self) -> str:
        best = self.best()
        line = f"searching: {len(self.known)} of {len(self.choices):,} choices traced"
        if best:
            first = best[0]
            line += f"; best so far {first.tokens_per_second:,.0f} tokens/s: {first.choice}"
        return line

    def left_out(self) -> str:
        traced = len(self.known)
        return (
            f"{traced:,} of {len(self.choices):,} choices were traced; of the others "
            f"{self.too_large:,} cannot fit, and {self.too_slow:,} cannot be among the first "
            f"{self.shown}"
        )


def search(
    cfg: Config,
    inputs: PlanInputs,
    shown: int = SHOWN,
    log: Callable | None = None,
    fresh: bool = False,
) -> Found:
    """Return the choices that fit, the fastest `shown` of them. log: called now and then with a
    line about the progress. fresh: as for `workers`. Raises InputError, naming the nearest, where
    nothing fits."""
    state = Search(cfg, inputs, shown, Bounds(cfg, inputs))
    if not state.choices:
        raise InputError(
            f"no mesh of {inputs.gpus} GPUs is legal, training.global_batch_size = "
            f"{cfg.training.global_batch_size}: "
            f"it must be a multiple of the data-parallel ranks, {inputs.gpus} / tensor_parallel / "
            "context_parallel / "
            "pipeline_parallel"
        )
    with workers(fresh=fresh) as pool:
        state.run(pool, state.next, log)
        best = state.best()
        hybrid_rows = []
        if not best:
            state.run(pool, state.next_smallest, log)
        hybrids = replicated([row.choice for row in best], cfg, inputs)
        done = [pool.submit(planned, [choice], cfg, inputs) for choice in hybrids]
        for future in done:
            (row,), _ = future.result()
            if row.fits:
                hybrid_rows.append(row)
    if not best:
        nearest = min(state.known.values(), key=by_memory)
        raise InputError(
            f"nothing fits {inputs.device.memory_gib:.1f} GiB on {number_of(inputs.gpus, 'GPU')}; the nearest is "
            f"{nearest.choice}, which needs "
            f"{nearest.needed / GIB:.1f} GiB: {what_would_do(cfg, inputs, nearest)}"
        )
    ranking = sorted(best + hybrid_rows, key=by_speed)[:shown]
    return Found(ranking, state.left_out())


def by_memory(row: Candidate) -> tuple:
    return row.needed, row.choice


def what_would_do(cfg: Config, inputs: PlanInputs, nearest: Candidate) -> str:
    """Return the fewest GPUs, in doublings, on which the nearest choice fits; and the memory that a
    device would need."""
    gpus = inputs.gpus
    remedies = []
    for _ in range(6):
        gpus *= 2
        more = replace(inputs, gpus=gpus)
        depth = nearest.choice.pipeline_parallel
        shared = nearest.choice.tensor_parallel * nearest.choice.context_parallel
        sizes = {1}
        if depth == 1:
            sizes = {1, cfg.training.global_batch_size * shared // gpus} - {0}
        choices = [nearest.choice._replace(mode="full", local_batch_size=size) for size in sizes]
        possible = [c for c in choices if legal(c.applied_to(cfg), more)]
        fitting = [c for c in possible if make_plan(c.applied_to(cfg), more).fits]
        if fitting:
            remedies.append(f"{gpus} GPUs would do ({fitting[0]})")
            break
    remedies.append(f"or a device with {nearest.needed / GIB:.0f} GiB")
    return ", ".join(remedies)


def cells_of(c: Candidate) -> list[str]:
    """Return the row of a candidate in the table, by COLUMNS."""
    choice = c.choice
    context = "-"
    if choice.context_parallel > 1:
        context = f"{choice.context_parallel} {choice.method}"
    pipeline = "-"
    if choice.pipeline_parallel > 1:
        stages = f" x {choice.stages_per_rank}" if choice.stages_per_rank > 1 else ""
        pipeline = f"{choice.pipeline_parallel}{stages} {choice.schedule}"
    accumulation = "1"
    if c.microbatches > 1:
        accumulation = f"{c.microbatches} {choice.accumulate}"
    return [
        str(choice.tensor_parallel),
        str(choice.expert_parallel),
        context,
        str(choice.replicas),
        pipeline,
        choice.mode,
        str(choice.local_batch_size),
        accumulation,
        f"{c.needed / GIB:.1f}",
        f"{c.seconds:.2f}",
        f"{c.exposed / c.seconds:.0%}",
        f"{c.bubble:.0%}",
        f"{c.tokens_per_second:,.0f}",
        f"{c.mfu:.1%}",
    ]


def table(found: Found) -> str:
    rows = ["".join(f"{title:>{width}}" for title, width in COLUMNS.items())]
    for c in found.ranking:
        cells = zip(cells_of(c), COLUMNS.values(), strict=True)
        rows.append("".join(f"{cell:>{width}}" for cell, width in cells))
    return "\n".join([*rows, found.said])
