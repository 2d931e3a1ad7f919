"""The settings that a number of GPUs allows, ranked by speed.

What cannot be among the best is not traced (tools/plan/bounds.py). The most promising choice is
traced next, until every choice that is left is slower, at best, than the last of those reported, or
does not fit. So the ranking is that of `every_choice`, traced and sorted.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

from configs.schema import SCHEDULES, Config, InputError
from configs.words import aligned, number_of
from tools.plan.bounds import Bounds, Profile, profile
from tools.plan.choices import (
    MODES,
    Candidate,
    Choice,
    every_choice,
    legal,
    microbatches_of,
    replicated,
    with_batch,
)
from tools.plan.pipeline import Stages
from tools.plan.plan import Plan, PlanInputs, make_plan
from tools.plan.step import GIB
from tools.plan.workers import workers

COLUMNS = ("tp", "ep", "context", "replicas", "pipeline", "checkpointing", "microbatch")
COLUMNS += ("accumulation", "memory GiB", "s/step", "exposed", "bubble", "tokens/s", "MFU")
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
    """Plan choices that share traces, with sharded gradients where whole ones do not fit. Returns also
    what the first says about others, if a profile can be had of it. Called in a worker."""
    stages = Stages(parallel=False)
    found = []
    known = None
    for choice in choices:
        plan = make_plan(choice.applied_to(cfg), inputs, stages)
        sharded = choice.sharded if plan.microbatches > 1 else choice
        if choice.sharded == of_profile(choice).sharded:
            known = profile(make_plan(sharded.applied_to(cfg), inputs, stages))
        if not plan.fits:
            choice = sharded
            plan = make_plan(choice.applied_to(cfg), inputs, stages)
        found.append(candidate(choice, plan))
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
    """Return the choice whose trace gives the profile for this one: of no accumulation, replicas or
    pipeline."""
    return Choice(
        choice.tensor_parallel,
        mode=choice.mode,
        context_parallel=choice.context_parallel,
        context_parallel_method=choice.context_parallel_method,
        expert_parallel=choice.expert_parallel,
        expert_exchange=choice.expert_exchange,
    )


def together(choice: Choice) -> Choice:
    """Equal for choices whose plans share traces: the pipelines with the same stages."""
    return choice._replace(pipeline_schedule="1f1b", pipeline_stages_per_rank=0)


@dataclass
class Found:
    """Result of a search."""

    ranking: list[Candidate]  # the fastest that fit, as many as were asked for
    said: str  # what was left out


def by_speed(row: Candidate) -> tuple:
    """Sort key: the fastest first; of equals in the order of their settings."""
    return -row.tokens_per_second, row.choice


class Search:
    """State of a search: which choices are open, and which figures are known."""

    def __init__(self, cfg: Config, inputs: PlanInputs, shown: int) -> None:
        self.cfg = cfg
        self.inputs = inputs
        self.shown = shown
        self.bounds = Bounds(cfg, inputs)
        self.choices = every_choice(cfg, inputs)
        self.legal = set(self.choices)
        self.open = dict.fromkeys(self.choices)
        self.too_large = 0  # choices that were left out since they cannot fit
        self.too_slow = 0  # since they cannot be among those that are shown
        self.known: dict[Choice, Candidate] = {}
        # None: that cannot be traced, so there are no bounds
        self.profiles: dict[Choice, Profile | None] = {}
        self.running: dict[Future, list[Choice]] = {}
        self.capacity = inputs.device.memory_gib * GIB
        self.tokens = cfg.training.global_batch_size * cfg.training.seq_len

    def bound(self, choice: Choice) -> tuple[float, float]:
        """Return the least seconds and bytes of a choice. A mode that keeps more computes less, so
        its profile bounds the seconds of this one too; the bytes need this choice's own profile."""
        own = of_profile(choice)
        for mode in MODES[MODES.index(choice.mode) :]:
            known = self.profiles.get(own._replace(mode=mode))
            if known is None:
                continue
            needed = self.bounds.needed(choice.sharded, known) if mode == choice.mode else 0.0
            return self.bounds.seconds(self.variant(choice), known), needed
        return 0.0, 0.0

    def variant(self, choice: Choice) -> Choice:
        """Return the choice with sharded gradients where whole ones cannot fit."""
        known = self.profiles.get(of_profile(choice))
        if known is None or self.bounds.microbatches(choice) == 1:
            return choice
        return choice.sharded if self.bounds.needed(choice, known) > self.capacity else choice

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

    @cache  # noqa: B019
    def leaner(self, choice: Choice) -> list[Choice]:
        """Return the other choices that need no more memory: of a mode that keeps no more; without a
        pipeline also with a smaller microbatch. Where backward is in two halves, what the first
        recomputes is kept until the second."""
        modes = MODES[: MODES.index(choice.mode) + 1]
        if SCHEDULES[choice.pipeline_schedule].splits_backward:
            modes = (choice.mode,)
        sizes = [choice.local_batch_size]
        if choice.pipeline_parallel == 1:
            every = microbatches_of(choice, self.cfg, self.inputs)
            sizes = every[: every.index(choice.local_batch_size) + 1]
        every = product(modes, sizes)
        found = [choice._replace(mode=mode, local_batch_size=size) for mode, size in every]
        return [one for one in found if one in self.legal and one != choice]

    def best(self) -> list[Candidate]:
        """Return the fastest that fit."""
        return sorted((row for row in self.known.values() if row.fits), key=by_speed)[: self.shown]

    def leave_out(self) -> None:
        """Close what cannot fit, and what cannot be among the best."""
        best = self.best()
        slowest = best[-1].tokens_per_second if len(best) == self.shown else 0.0
        for choice in list(self.open):
            if self.is_too_large(choice):
                self.too_large += 1
            elif self.at_most(choice) < slowest:
                self.too_slow += 1
            else:
                continue
            del self.open[choice]

    def next(self) -> list[Choice]:
        """Return what to trace next: the choice that may be fastest, with those that share its
        traces; or first the one that bounds it. Empty: wait for the traces that run now."""
        self.leave_out()
        order = sorted(self.open, key=self.promise)
        in_flight = {of_profile(choice) for choices in self.running.values() for choice in choices}
        for choice in order:
            own = of_profile(choice)
            if own in self.profiles:
                return [one for one in order if together(one) == together(choice)]
            if own not in in_flight:
                return [own]
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
        self.known |= zip(choices, found)
        if choices[0] == of_profile(choices[0]):
            self.profiles.setdefault(of_profile(choices[0]), known)

    def start(self, pool: ProcessPoolExecutor, choices: list[Choice]) -> None:
        for choice in choices:
            self.open.pop(choice, None)
        if choices[0] in self.legal:
            variants = [self.variant(choice) for choice in choices]
            future = pool.submit(planned, variants, self.cfg, self.inputs)
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
        line = f"searching: {len(self.known)} of {len(self.choices):,} choices traced"
        for first in self.best()[:1]:
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
    cfg: Config, inputs: PlanInputs, shown: int = SHOWN, log: Callable | None = None
) -> Found:
    """Return the choices that fit, the fastest `shown` of them. log: called now and then with a
    line about the progress. Raises InputError, naming the nearest, where nothing fits."""
    state = Search(cfg, inputs, shown)
    if not state.choices:
        raise InputError(
            f"no mesh of {inputs.gpus} GPUs is legal, training.global_batch_size = "
            f"{cfg.training.global_batch_size}: it must be a multiple of the data-parallel ranks, "
            f"{inputs.gpus} / tensor_parallel / context_parallel / pipeline_parallel"
        )
    with workers() as pool:
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
        nearest = min(state.known.values(), key=lambda row: (row.needed, row.choice))
        raise InputError(
            f"nothing fits {inputs.device.memory_gib:.1f} GiB on {number_of(inputs.gpus, 'GPU')}; "
            f"the nearest is {nearest.choice}, which needs {nearest.needed / GIB:.1f} GiB: "
            f"{what_would_do(cfg, inputs, nearest)}"
        )
    ranking = sorted(best + hybrid_rows, key=by_speed)[:shown]
    return Found(ranking, state.left_out())


def what_would_do(cfg: Config, inputs: PlanInputs, nearest: Candidate) -> str:
    """Return the fewest GPUs, in doublings, on which the nearest choice fits; and the memory that a
    device would need."""
    would_do = ""
    for gpus in (inputs.gpus * 2**i for i in range(1, 7)):
        more = replace(inputs, gpus=gpus)
        shared = nearest.choice.tensor_parallel * nearest.choice.context_parallel
        sizes = {1}
        if nearest.choice.pipeline_parallel == 1:
            sizes = {1, cfg.training.global_batch_size * shared // gpus} - {0}
        choices = [nearest.choice._replace(mode="full", local_batch_size=size) for size in sizes]
        possible = [c for c in choices if legal(c.applied_to(cfg), more)]
        fitting = [c for c in possible if make_plan(c.applied_to(cfg), more).fits]
        if fitting:
            would_do = f"{gpus} GPUs would do ({fitting[0]}), "
            break
    return f"{would_do}or a device with {nearest.needed / GIB:.0f} GiB"


def cells_of(c: Candidate) -> list[str]:
    """Return the row of a candidate in the table, by COLUMNS."""
    choice = c.choice
    context = pipeline = "-"
    if choice.context_parallel > 1:
        context = f"{choice.context_parallel} {choice.context_parallel_method}"
    if choice.pipeline_parallel > 1:
        stages = choice.pipeline_stages_per_rank
        several = f" x {stages}" if stages > 1 else ""
        pipeline = f"{choice.pipeline_parallel}{several} {choice.pipeline_schedule}"
    accumulation = f"{c.microbatches} {choice.accumulate_gradients}" if c.microbatches > 1 else "1"
    return [
        str(choice.tensor_parallel),
        str(choice.expert_parallel),
        context,
        str(choice.data_parallel_replicate),
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
    rows = [COLUMNS, *map(cells_of, found.ranking)]
    return "\n".join([*aligned(rows, right=range(len(COLUMNS))), found.said])
