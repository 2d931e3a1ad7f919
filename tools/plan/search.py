"""Meshes, checkpointing modes and microbatches that a number of GPUs allows, traced and ranked by
speed."""

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, get_args

import torch

from configs import check
from configs.schema import SCHEDULES, Config, InputError, Parallelism
from tools.plan.pipeline import Stages, in_processes
from tools.plan.plan import Question, make_plan
from tools.plan.step import GIB

MODES = ("full", "selective", "none")  # of activation checkpointing, by how much they keep
EXPERT_RANKS = (1, 4, 8, 16, 32, 64)  # degrees of expert parallelism
LEAST_TOKENS = 8192  # of a rank in a sequence: shorter sequences are not shared between ranks


class Choice(NamedTuple):
    """What the search varies."""

    tensor_parallel: int
    replicas: int  # parallelism.data_parallel_replicate
    mode: str  # activation_checkpoint.mode
    local_batch_size: int
    accumulate: str  # parallelism.accumulate_gradients
    pipeline_parallel: int = 1
    schedule: str = "1f1b"  # parallelism.pipeline_schedule
    stages_per_rank: int = 0
    context_parallel: int = 1
    method: str = "gather"  # parallelism.context_parallel_method
    expert_parallel: int = 1

    def applied_to(self, cfg: Config) -> Config:
        return cfg.model_copy(
            update={
                "parallelism": cfg.parallelism.model_copy(
                    update={
                        "tensor_parallel": self.tensor_parallel,
                        "data_parallel_replicate": self.replicas,
                        "data_parallel_shard": -1,
                        "accumulate_gradients": self.accumulate,
                        "pipeline_layers": (),
                        "pipeline_parallel": self.pipeline_parallel,
                        "pipeline_schedule": self.schedule,
                        "pipeline_stages_per_rank": self.stages_per_rank,
                        "context_parallel": self.context_parallel,
                        "context_parallel_method": self.method,
                        "expert_parallel": self.expert_parallel,
                    }
                ),
                "activation_checkpoint": cfg.activation_checkpoint.model_copy(
                    update={"mode": self.mode}
                ),
                "training": cfg.training.model_copy(
                    update={"local_batch_size": self.local_batch_size}
                ),
            }
        )

    def __str__(self) -> str:
        replicas = f", data_parallel_replicate = {self.replicas}" if self.replicas > 1 else ""
        sharded = ", accumulate_gradients = sharded" if self.accumulate == "sharded" else ""
        pipeline = (
            f", pipeline_parallel = {self.pipeline_parallel}, pipeline_schedule = "
            f"{self.schedule}, pipeline_stages_per_rank = "
            f"{self.stages_per_rank}"
            if self.pipeline_parallel > 1
            else ""
        )
        context = (
            f", context_parallel = {self.context_parallel}, context_parallel_method = {self.method}"
            if self.context_parallel > 1
            else ""
        )
        experts = f", expert_parallel = {self.expert_parallel}" if self.expert_parallel > 1 else ""
        return (
            f"tensor_parallel = {self.tensor_parallel}{context}{experts}{replicas}{pipeline}, "
            f"activation_checkpoint.mode = {self.mode}, "
            f"local_batch_size = {self.local_batch_size}{sharded}"
        )


@dataclass(frozen=True)
class Candidate:
    """What the table shows of one choice; small enough to travel between processes."""

    choice: Choice
    microbatches: int
    needed: float  # bytes
    fits: bool
    seconds: float  # of a step
    tokens_per_second: float
    mfu: float
    exposed: float  # seconds of a step that wait for communication
    bubble: float = 0.0  # share of the ranks' time that waits for other stages


def legal(cfg: Config, ask: Question) -> bool:
    return not check.broken_rules(cfg, ask.gpus, ask.per_host)


def candidate(
    choice: Choice, cfg: Config, ask: Question, stages: Stages | None = None
) -> Candidate:
    torch.set_num_threads(1)
    plan = make_plan(choice.applied_to(cfg), ask, stages)
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


def candidates(base: Choice, cfg: Config, ask: Question) -> list[Candidate]:
    """The choices with the tensor and context parallelism of `base`, but for those that cannot fit.

    With everything else equal, a mode that keeps more needs more, and so does a larger microbatch
    (but for the largest, which ends accumulation and with it the gradients that accumulation
    keeps). Sharded accumulation needs less than whole, but exchanges gradients once per
    microbatch: it is tried where whole does not fit. What it keeps, the largest keeps too.
    """
    largest = (
        cfg.training.global_batch_size * base.tensor_parallel * base.context_parallel // ask.gpus
    )
    sizes = sorted({largest, *(2**i for i in range(12) if 2**i < largest)} - {0})
    tried: list[Candidate] = []
    # mode, local batch size, kind of accumulation
    too_large: list[tuple[str, int, tuple[str, bool]]] = []
    for mode, local in product(MODES, sizes):
        for accumulate in ("whole", "sharded") if local < largest else ("whole",):
            choice = base._replace(mode=mode, local_batch_size=local, accumulate=accumulate)
            kind = (accumulate, local < largest)
            leaner = MODES[: MODES.index(mode) + 1]
            if any(
                m in leaner and size <= local and k in (kind, ("sharded", True))
                for m, size, k in too_large
            ):
                continue
            if not legal(choice.applied_to(cfg), ask):
                break
            tried.append(candidate(choice, cfg, ask))
            if tried[-1].fits:
                break
            too_large.append((mode, local, kind))
    return tried


def bases(cfg: Config, ask: Question) -> list[Choice]:
    """What `candidates` is asked for: every degree of tensor parallelism, and with it every degree
    of context parallelism that leaves a rank LEAST_TOKENS of a sequence. For mixtures every degree
    of expert parallelism that divides the experts instead of tensor parallelism, which splits no
    expert."""
    degrees = [
        tp for tp in range(1, ask.per_host + 1) if ask.per_host % tp == 0 and ask.gpus % tp == 0
    ]
    shared = [2**i for i in range(1, 12) if 2**i * LEAST_TOKENS <= cfg.training.seq_len]
    methods = get_args(Parallelism.model_fields["context_parallel_method"].annotation)
    contexts = [(1, "gather"), *product(shared, methods)]
    experts = (1,)
    if check.architecture(cfg.model).get("n_experts"):
        degrees, experts = [1], EXPERT_RANKS
    choices = [
        Choice(tp, 1, "full", 1, "whole", context_parallel=cp, method=method, expert_parallel=ep)
        for tp, (cp, method), ep in product(degrees, contexts, experts)
        if ask.gpus % (tp * cp) == 0
    ]
    return [
        choice
        for choice in choices
        if (choice.context_parallel, len(experts)) == (1, 1) or legal(choice.applied_to(cfg), ask)
    ]


def best_speed(tried: list[Candidate]) -> float:
    """Tokens per second of the fastest that fits; 0 where none does."""
    return max((c.tokens_per_second for c in tried if c.fits), default=0.0)


def columns(starts: list[Choice], cfg: Config, ask: Question) -> list[Candidate]:
    """The candidates of all starts. Experts are exchanged between hosts by more and more ranks
    until that is slower than with fewer ranks."""
    inside = [start for start in starts if start.expert_parallel <= ask.per_host]
    tried = [
        c
        for column in in_processes(candidates, [(start, cfg, ask) for start in inside])
        for c in column
    ]
    for degree in sorted(
        {start.expert_parallel for start in starts} - {start.expert_parallel for start in inside}
    ):
        wider = [(start, cfg, ask) for start in starts if start.expert_parallel == degree]
        column = [c for column in in_processes(candidates, wider) for c in column]
        slower = best_speed(column) < best_speed(tried)
        tried += column
        if slower:
            break
    return tried


def pipelines(degrees: list[tuple[int, int]], cfg: Config, ask: Question) -> list[Candidate]:
    """The choices with pipelines of 2 to 16 ranks and every schedule. degrees: of tensor and of
    expert parallelism. None on one host: pipelines are for links that are too slow for everything
    else.

    A deeper pipeline has more bubble and needs less memory, so depths grow until one is slower than
    a fitting one before it."""
    stages, tried = Stages(), []
    depths = [
        depth for depth in (2, 4, 8, 16) if ask.gpus % depth == 0 and ask.gpus != ask.per_host
    ]
    for tp, ep in degrees:
        fastest = 0.0
        for depth in depths:
            column = of_depth(
                Choice(tp, 1, "full", 1, "whole", depth, expert_parallel=ep), cfg, ask, stages
            )
            tried += column
            if best_speed(column) < fastest:
                break
            fastest = best_speed(column)
    return tried


def of_depth(base: Choice, cfg: Config, ask: Question, stages: Stages) -> list[Candidate]:
    """The choices with the pipeline of `base`. Microbatches are small, since the bubble is smaller
    the more there are. Only the leanest mode that fits is compared with the next, since each needs
    traces of its own. Where the first schedule, 1f1b, does not fit, the others are not tried."""
    tried: list[Candidate] = []
    per_rank = [
        (name, v)
        for name, row in SCHEDULES.items()
        for v in (1, 2, 4)
        if row.stages_per_rank[0] <= v <= row.stages_per_rank[1]
    ]
    for accumulate in ("whole", "sharded"):
        for mode in MODES:
            of_mode: list[Candidate] = []
            for schedule, v in per_rank:
                choice = base._replace(
                    mode=mode, accumulate=accumulate, schedule=schedule, stages_per_rank=v
                )
                if legal(choice.applied_to(cfg), ask):
                    of_mode.append(candidate(choice, cfg, ask, stages))
                    if not of_mode[0].fits:
                        break
            tried += of_mode
            if not any(c.fits for c in of_mode):
                break
        if any(c.fits for c in tried):
            break
    return tried


def search(cfg: Config, ask: Question) -> list[Candidate]:
    """The choices that fit, fastest first. Raises InputError where none does; it names the nearest."""
    starts = bases(cfg, ask)
    tried = columns(starts, cfg, ask)
    promising = sorted(
        tried, key=lambda c: (not c.fits, -c.tokens_per_second if c.fits else c.needed)
    )
    degrees = dict.fromkeys(
        (c.tensor_parallel, c.expert_parallel) for c in [c.choice for c in promising] or starts[-1:]
    )
    tried += pipelines(list(degrees)[:2], cfg, ask)
    if not tried:
        raise InputError(
            f"no mesh of {ask.gpus} GPUs is legal, training.global_batch_size = "
            f"{cfg.training.global_batch_size}: "
            f"it must be a multiple of the data-parallel ranks, {ask.gpus} / tensor_parallel / "
            "context_parallel / "
            "pipeline_parallel"
        )
    fitting = [c for c in tried if c.fits]
    if not fitting:
        nearest = min(tried, key=lambda c: c.needed)
        raise InputError(
            f"nothing fits {ask.device.memory_gib:.1f} GiB on {ask.gpus} GPUs; the nearest is "
            f"{nearest.choice}, which needs "
            f"{nearest.needed / GIB:.1f} GiB: {what_would_do(cfg, ask, nearest)}"
        )
    # Replicas on top of shards (HSDP), for the best three.
    replicas = [
        2**i for i in range(1, 12) if 2**i <= ask.gpus // ask.per_host and ask.gpus % 2**i == 0
    ][:3]
    best = [
        c.choice
        for c in sorted(fitting, key=lambda c: -c.tokens_per_second)
        if c.choice.pipeline_parallel == 1
    ][:3]
    hybrids = [choice._replace(replicas=count) for choice in best for count in replicas]
    hybrids = [choice for choice in hybrids if legal(choice.applied_to(cfg), ask)]
    fitting += [
        c for c in in_processes(candidate, [(choice, cfg, ask) for choice in hybrids]) if c.fits
    ]
    return sorted(fitting, key=lambda c: -c.tokens_per_second)


def what_would_do(cfg: Config, ask: Question, nearest: Candidate) -> str:
    """The fewest GPUs, in doublings, on which the nearest choice fits; and how much memory a device
    would need."""
    gpus, remedies = ask.gpus, []
    for _ in range(6):
        gpus *= 2
        more = replace(ask, gpus=gpus)
        depth = nearest.choice.pipeline_parallel
        shared = nearest.choice.tensor_parallel * nearest.choice.context_parallel
        sizes = {1, cfg.training.global_batch_size * shared // gpus} - {0} if depth == 1 else {1}
        choices = [nearest.choice._replace(mode="full", local_batch_size=size) for size in sizes]
        fitting = [
            c
            for c in choices
            if legal(c.applied_to(cfg), more) and make_plan(c.applied_to(cfg), more).fits
        ]
        if fitting:
            remedies.append(f"{gpus} GPUs would do ({fitting[0]})")
            break
    remedies.append(f"or a device with {nearest.needed / GIB:.0f} GiB")
    return ", ".join(remedies)


def table(ranking: list[Candidate], shown: int = 20) -> str:
    rows = [
        f"{'tp':>4}{'ep':>4}{'context':>12}{'replicas':>10}{'pipeline':>24}{'checkpointing':>15}{'microbatch':>13}{'accumulation':>14}"
        f"{'memory GiB':>12}{'s/step':>9}{'exposed':>9}{'bubble':>8}{'tokens/s':>14}{'MFU':>7}"
    ]
    for c in ranking[:shown]:
        accumulation = f"{c.microbatches} {c.choice.accumulate}" if c.microbatches > 1 else "1"
        depth, stages = (
            c.choice.pipeline_parallel,
            f" x {c.choice.stages_per_rank}" if c.choice.stages_per_rank > 1 else "",
        )
        pipeline = f"{depth}{stages} {c.choice.schedule}" if depth > 1 else "-"
        context = (
            f"{c.choice.context_parallel} {c.choice.method}"
            if c.choice.context_parallel > 1
            else "-"
        )
        rows.append(
            f"{c.choice.tensor_parallel:>4}{c.choice.expert_parallel:>4}{context:>12}{c.choice.replicas:>10}{pipeline:>24}{c.choice.mode:>15}"
            f"{c.choice.local_batch_size:>13}{accumulation:>14}{c.needed / GIB:>12.1f}{c.seconds:>9.2f}{c.exposed / c.seconds:>9.0%}{c.bubble:>8.0%}"
            f"{c.tokens_per_second:>14,.0f}{c.mfu:>7.1%}"
        )
    if len(ranking) > shown:
        rows.append(f"and {len(ranking) - shown} more that fit")
    return "\n".join(rows)
