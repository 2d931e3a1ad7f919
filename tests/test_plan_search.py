"""tools/plan/search.py finds what a search without bounds and without shared traces finds."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import pytest

from configs import check
from configs.load import load_config
from configs.schema import Config, InputError
from tools.plan import pipeline, search
from tools.plan.bounds import Bounds, Profile, profile
from tools.plan.choices import Candidate, Choice, every_choice, replicated
from tools.plan.device import load_device
from tools.plan.pipeline import Stages
from tools.plan.plan import PlanInputs, make_plan
from tools.plan.search import by_speed, candidate, planned
from tools.plan.step import GIB
from tools.plan.workers import in_processes

# Two hosts of one GPU: microbatches of 1 and 2 sequences, and pipelines of 2 ranks.
SMALL = [
    "--training.seq_len=256",
    "--model.n_layers=2",
    "--training.global_batch_size=4",
    "--compile.enabled=true",
    "--training.param_dtype=bfloat16",
]
# A model this small is all latency on a fast device.
SLOW = load_device("h100").model_copy(
    update={"peak_tflops": 0.5, "name": "", "memory_gb_per_s": 20, "fabric_gb_per_s": 0.5}
)
ALL = 100  # rows: more than there are choices

Plain = dict[Choice, tuple[Candidate, Profile | None]]


def traced_alone(
    choice: Choice, cfg: Config, inputs: PlanInputs
) -> tuple[Candidate, Profile | None]:
    """Return the choice's plan. It shares traces with no other choice."""
    plan = make_plan(choice.applied_to(cfg), inputs, Stages(parallel=False))
    alone = choice.pipeline_parallel == choice.local_batch_size == 1
    return candidate(choice, plan), profile(plan) if alone else None


class Space:
    """Everything that can be chosen, traced choice by choice, on machines with different memory."""

    def __init__(self, options: list[str], inputs: PlanInputs) -> None:
        self.cfg = load_config(options)
        self.choices = every_choice(self.cfg, inputs)
        of_replicas = [choice for choice in self.choices if choice.pipeline_parallel == 1]
        hybrids = [replicated([choice], self.cfg, inputs) for choice in of_replicas]
        whole = [*self.choices, *chain.from_iterable(hybrids)]
        everything = whole + [
            choice.sharded for choice in whole if self.accumulates(choice, inputs)
        ]
        found = in_processes(traced_alone, [(choice, self.cfg, inputs) for choice in everything])
        self.plain: Plain = dict(zip(everything, found))
        self.inputs = inputs

    def accumulates(self, choice: Choice, inputs: PlanInputs) -> bool:
        return Bounds(self.cfg, inputs).microbatches(choice) > 1

    def of_memory(self, gib: float) -> PlanInputs:
        device = self.inputs.device.model_copy(update={"memory_gib": gib})
        return replace(self.inputs, device=device)

    def row(self, choice: Choice, inputs: PlanInputs) -> Candidate:
        """Return the traced row on a device with another memory: only whether it fits depends on
        that, and whether gradients are sharded."""
        row, _ = self.plain[choice]
        row = replace(row, fits=row.needed <= inputs.device.memory_gib * GIB)
        if row.fits or choice.sharded not in self.plain or choice == choice.sharded:
            return row
        return self.row(choice.sharded, inputs)

    def ranking(self, inputs: PlanInputs, shown: int) -> list[Candidate]:
        """Return the answer of a search without bounds: everything, sorted."""
        rows = [self.row(choice, inputs) for choice in self.choices]
        best = sorted((row for row in rows if row.fits), key=by_speed)[:shown]
        hybrids = replicated([row.choice for row in best], self.cfg, inputs)
        best += [row for choice in hybrids if (row := self.row(choice, inputs)).fits]
        return sorted(best, key=by_speed)[:shown]

    def planned(
        self, choices: list[Choice], cfg: Config, inputs: PlanInputs
    ) -> tuple[list[Candidate], Profile | None]:
        """In the place of search.planned: what was traced before."""
        sharded = choices[0].sharded
        _, known = self.plain[sharded if sharded in self.plain else choices[0]]
        return [self.row(choice, inputs) for choice in choices], known

    @contextmanager
    def workers(self) -> Iterator["Space"]:
        """In the place of search.workers. Nothing is traced, so no process is needed."""
        yield self

    _max_workers = 2

    def submit(self, function, *call) -> Future:
        done: Future = Future()
        done.set_result(self.planned(*call))
        return done

    def searched(self, inputs: PlanInputs, shown: int) -> list[Candidate]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "workers", self.workers)
            patch.setattr(search, "what_would_do", lambda *_: "")
            try:
                return search.search(self.cfg, inputs, shown).ranking
            except InputError:  # nothing fits
                return []

    def memories(self) -> list[float]:
        """GiB with which more and more of the choices fit."""
        needed = sorted(row.needed / GIB for row, _ in self.plain.values())
        return [needed[i] + 1e-6 for i in range(0, len(needed), len(needed) // 8)] + [100.0]


@pytest.fixture(scope="module")
def small() -> Space:
    return Space(SMALL, PlanInputs(2, 1, SLOW))


def differences(space: Space) -> list[tuple[float, int]]:
    """(GiB, rows) for which the search and the plain one differ."""
    found = []
    for gib in space.memories():
        inputs = space.of_memory(gib)
        for shown in (1, 3, ALL):
            if space.searched(inputs, shown) != space.ranking(inputs, shown):
                found.append((gib, shown))
    return found


@pytest.mark.slow
def test_the_search_finds_what_tracing_everything_finds(small):
    assert len(small.choices) == 9 and len(small.memories()) > 8
    assert not differences(small)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("seconds", "needed"))
def test_negative_control_a_bound_that_is_too_tight_changes_the_answer(small, monkeypatch, name):
    exact = getattr(Bounds, name)

    def tight(self, choice, known):
        return exact(self, choice, known) * 2

    monkeypatch.setattr(Bounds, name, tight)
    assert differences(small)
    assert broken_bounds(small)


def broken_bounds(space: Space) -> list[str]:
    """Return the choices whose plan is faster or smaller than their bounds."""
    profiles = {}
    for choice, (_, known) in space.plain.items():
        if known is not None and choice.data_parallel_replicate == 1:
            profiles[search.of_profile(choice)] = known  # of sharded gradients, if there are any
    bounds = Bounds(space.cfg, space.inputs)
    broken = []
    for choice, (row, _) in space.plain.items():
        known = profiles[search.of_profile(choice)]
        if bounds.seconds(choice, known) > row.seconds or bounds.needed(choice, known) > row.needed:
            broken.append(str(choice))
    return broken


@pytest.mark.slow
def test_no_plan_is_below_its_bounds(small):
    assert not broken_bounds(small)


@pytest.mark.slow
def test_where_backward_is_split_full_recomputation_needs_more():
    """Full recomputation that does not fit says nothing of the other modes."""
    halves = Choice(1, 1, "none", 1, "whole", 2, "zero_bubble", 2)
    cfg = load_config([*SMALL, "--model.n_layers=8", "--compile.enabled=false"])
    inputs = PlanInputs(2, 1, SLOW)
    choices = [halves, halves._replace(mode="full")]
    (((none, full), _),) = in_processes(planned, [(choices, cfg, inputs)])
    assert full.needed > none.needed
    state = search.Search(cfg, inputs, 1)
    assert halves in state.legal
    assert not state.leaner(halves)
    assert state.leaner(halves._replace(pipeline_schedule="interleaved_1f1b"))


@pytest.mark.slow
def test_equal_meshes_of_different_jobs_are_traced_by_one_process():
    """A pipeline's tensor-parallel group has the ranks of the one before, and another name."""
    cfg = load_config([*SMALL, "--training.global_batch_size=16"])
    inputs = PlanInputs(8, 4, SLOW)
    choices = [Choice(2, 1, "full", 1, "whole"), Choice(2, 1, "full", 1, "whole", 2, "1f1b", 1)]
    ((rows, _),) = in_processes(planned, [(choices, cfg, inputs)])
    assert [row.choice for row in rows] == choices


def test_a_stage_is_traced_with_its_own_dense_layers(monkeypatch):
    """The flavor, and not the file, may set how many dense layers the model has: here three."""
    cfg = load_config(
        [
            "configs/deepseek_v3_671b.toml",
            "--parallelism.expert_parallel=1",
            "--parallelism.expert_chunks=1",
            "--parallelism.expert_exchange=flat",
        ]
    )
    traced = []
    monkeypatch.setattr(pipeline, "trace_step", lambda cfg, *_, **__: traced.append(cfg))
    for position, layers, dense in ((0, 4, 3), (1, 2, 1), (1, 2, 0), (2, 1, 0)):
        pipeline.Alone(position, layers, False, 1, 8, True, dense).trace_whole(cfg)
        first = position * layers  # of the stage, in the model in which it is traced
        numbers = check.architecture(traced[-1].model)
        assert numbers["n_dense_layers"] - first == dense
