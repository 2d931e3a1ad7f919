"""Meshes, checkpointing modes and microbatches that a number of GPUs allows, traced and ranked by
speed."""

from dataclasses import dataclass, replace
from itertools import chain, product
from typing import NamedTuple, get_args

import torch

from configs import check
from configs.schema import SCHEDULES, Config, InputError, Parallelism
from tools.plan.pipeline import Stages
from tools.plan.plan import PlanInputs, make_plan
from tools.plan.step import GIB
from tools.plan.workers import in_processes

MODES = ("full", "selective", "none")  # of activation checkpointing, by how much they keep
EXPERT_RANKS = (1, 4, 8, 16, 32, 64)  # degrees of expert parallelism
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
        parallelism = {
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
        mode = {"mode": self.mode}
        batch = {"local_batch_size": self.local_batch_size}
        tables = {
            "parallelism": cfg.parallelism.model_copy(update=parallelism),
            "activation_checkpoint": cfg.activation_checkpoint.model_copy(update=mode),
            "training": cfg.training.model_copy(update=batch),
        }
        return cfg.model_copy(update=tables)

    def __str__(self) -> str:
        parts = [f"tensor_parallel = {self.tensor_parallel}"]
        if self.context_parallel > 1:
            parts.append(f"context_parallel = {self.context_parallel}")
            parts.append(f"context_parallel_method = {self.method}")
        if self.expert_parallel > 1:
            parts.append(f"expert_parallel = {self.expert_parallel}")
        if self.replicas > 1:
            parts.append(f"data_parallel_replicate = {self.replicas}")
        if self.pipeline_parallel > 1:
            parts.append(f"pipeline_parallel = {self.pipeline_parallel}")
            parts.append(f"pipeline_schedule = {self.schedule}")
            parts.append(f"pipeline_stages_per_rank = {self.stages_per_rank}")
        parts.append(f"activation_checkpoint.mode = {self.mode}")
        parts.append(f"local_batch_size = {self.local_batch_size}")
        if self.accumulate == "sharded":
            parts.append("accumulate_gradients = sharded")
        return ", ".join(parts)


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
    exposed: float  # seconds of exposed communication in a step
    bubble: float = 0.0  # share of the ranks' time, as tools/plan/pipeline.py::Pipeline.bubble


def legal(cfg: Config, inputs: PlanInputs) -> bool:
    return not check.broken_rules(cfg, inputs.gpus, inputs.per_host)


def candidate(
    choice: Choice, cfg: Config, inputs: PlanInputs, stages: Stages | None = None
) -> Candidate:
    torch.set_num_threads(1)
    plan = make_plan(choice.applied_to(cfg), inputs, stages)
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


def candidates(base: Choice, cfg: Config, inputs: PlanInputs) -> list[Candidate]:
    """The choices with the tensor and context parallelism of `base`, without those that cannot fit.

    With everything else equal, a mode that keeps more activations needs more memory, and so does a
    larger microbatch. The largest one is an exception: it needs no accumulation, so no gradients
    are kept between microbatches. Sharded accumulation needs less memory than whole, but a
    reduce-scatter for each microbatch: it is tried where whole does not fit. The largest
    microbatch needs at least as much as sharded accumulation.
    """
    ranks_of_sequence = base.tensor_parallel * base.context_parallel
    largest = cfg.training.global_batch_size * ranks_of_sequence // inputs.gpus
    powers = [2**i for i in range(12) if 2**i < largest]
    sizes = [*powers, largest] if largest > 0 else powers
    tried: list[Candidate] = []
    # mode, local batch size, kind of accumulation
    too_large: list[tuple[str, int, tuple[str, bool]]] = []
    for mode, local in product(MODES, sizes):
        for accumulate in ("whole", "sharded") if local < largest else ("whole",):
            choice = base._replace(mode=mode, local_batch_size=local, accumulate=accumulate)
            kind = (accumulate, local < largest)
            leaner = MODES[: MODES.index(mode) + 1]
            known = [
                size for m, size, k in too_large if m in leaner and k in (kind, ("sharded", True))
            ]
            if any(size <= local for size in known):
                continue
            if not legal(choice.applied_to(cfg), inputs):
                break
            tried.append(candidate(choice, cfg, inputs))
            if tried[-1].fits:
                break
            too_large.append((mode, local, kind))
    return tried


def bases(cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """The starting points of `candidates`: every degree of tensor parallelism, combined with every
    degree of context parallelism that leaves a rank LEAST_TOKENS of a sequence. Models with experts
    get every degree of expert parallelism that divides the experts, but no tensor parallelism,
    which splits no expert."""
    degrees = []
    for tp in range(1, inputs.per_host + 1):
        if inputs.per_host % tp == 0 and inputs.gpus % tp == 0:
            degrees.append(tp)
    shared = [2**i for i in range(1, 12) if 2**i * LEAST_TOKENS <= cfg.training.seq_len]
    methods = get_args(Parallelism.model_fields["context_parallel_method"].annotation)
    contexts = [(1, "gather"), *product(shared, methods)]
    experts = (1,)
    if check.architecture(cfg.model).get("n_experts"):
        degrees = [1]
        experts = EXPERT_RANKS
    choices = []
    for tp, (cp, method), ep in product(degrees, contexts, experts):
        if inputs.gpus % (tp * cp):
            continue
        choice = Choice(
            tp, 1, "full", 1, "whole", context_parallel=cp, method=method, expert_parallel=ep
        )
        tp_only = cp == 1 and len(experts) == 1
        if tp_only or legal(choice.applied_to(cfg), inputs):
            choices.append(choice)
    return choices


def tokens_per_second(tried: Candidate) -> float:
    return tried.tokens_per_second


def best_speed(tried: list[Candidate]) -> float:
    """Tokens per second of the fastest that fits; 0 where none does."""
    return max((c.tokens_per_second for c in tried if c.fits), default=0.0)


def columns(starts: list[Choice], cfg: Config, inputs: PlanInputs) -> list[Candidate]:
    """The candidates of all starts. Expert parallelism across hosts is tried with more and more
    ranks until that is slower than with fewer."""
    inside = [start for start in starts if start.expert_parallel <= inputs.per_host]
    tried = column_of(inside, cfg, inputs)
    across = {start.expert_parallel for start in starts if start not in inside}
    for degree in sorted(across):
        wider = [start for start in starts if start.expert_parallel == degree]
        column = column_of(wider, cfg, inputs)
        slower = best_speed(column) < best_speed(tried)
        tried += column
        if slower:
            break
    return tried


def column_of(starts: list[Choice], cfg: Config, inputs: PlanInputs) -> list[Candidate]:
    """The candidates of these starts, traced in parallel."""
    of_starts = in_processes(candidates, [(start, cfg, inputs) for start in starts])
    return list(chain.from_iterable(of_starts))


def pipelines(degrees: list[tuple[int, int]], cfg: Config, inputs: PlanInputs) -> list[Candidate]:
    """The choices with pipelines of 2 to 16 ranks and every schedule. degrees: of tensor and of
    expert parallelism. None on one host: pipelines are for links that are too slow for everything
    else.

    A deeper pipeline has more bubble and needs less memory, so depths grow until one is slower than
    a fitting one before it."""
    stages = Stages()
    tried = []
    depths = []
    if inputs.gpus != inputs.per_host:
        depths = [depth for depth in (2, 4, 8, 16) if inputs.gpus % depth == 0]
    for tp, ep in degrees:
        fastest = 0.0
        for depth in depths:
            base = Choice(tp, 1, "full", 1, "whole", depth, expert_parallel=ep)
            column = of_depth(base, cfg, inputs, stages)
            tried += column
            if best_speed(column) < fastest:
                break
            fastest = best_speed(column)
    return tried


def of_depth(base: Choice, cfg: Config, inputs: PlanInputs, stages: Stages) -> list[Candidate]:
    """The choices with the pipeline of `base`. Microbatches are small, since the bubble is smaller
    the more there are. Only the leanest mode that fits is compared with the next, since each needs
    traces of its own. Where the first schedule, 1f1b, does not fit, the others are not tried."""
    tried: list[Candidate] = []
    per_rank = []
    for name, row in SCHEDULES.items():
        fewest, most = row.stages_per_rank
        per_rank += [(name, v) for v in (1, 2, 4) if fewest <= v <= most]
    for accumulate in ("whole", "sharded"):
        for mode in MODES:
            of_mode: list[Candidate] = []
            for schedule, v in per_rank:
                choice = base._replace(
                    mode=mode, accumulate=accumulate, schedule=schedule, stages_per_rank=v
                )
                if legal(choice.applied_to(cfg), inputs):
                    of_mode.append(candidate(choice, cfg, inputs, stages))
                    if not of_mode[0].fits:
                        break
            tried += of_mode
            if not any(c.fits for c in of_mode):
                break
        if any(c.fits for c in tried):
            break
    return tried


def search(cfg: Config, inputs: PlanInputs) -> list[Candidate]:
    """The choices that fit, fastest first. Raises InputError where none does; it names the nearest."""
    starts = bases(cfg, inputs)
    tried = columns(starts, cfg, inputs)
    promising = [tried_one.choice for tried_one in sorted(tried, key=promise)] or starts[-1:]
    degrees = dict.fromkeys((c.tensor_parallel, c.expert_parallel) for c in promising)
    tried += pipelines(list(degrees)[:2], cfg, inputs)
    if not tried:
        raise InputError(
            f"no mesh of {inputs.gpus} GPUs is legal, training.global_batch_size = "
            f"{cfg.training.global_batch_size}: "
            f"it must be a multiple of the data-parallel ranks, {inputs.gpus} / tensor_parallel / "
            "context_parallel / "
            "pipeline_parallel"
        )
    fitting = [c for c in tried if c.fits]
    if not fitting:
        nearest = min(tried, key=bytes_needed)
        raise InputError(
            f"nothing fits {inputs.device.memory_gib:.1f} GiB on {inputs.gpus} GPUs; the nearest is "
            f"{nearest.choice}, which needs "
            f"{nearest.needed / GIB:.1f} GiB: {what_would_do(cfg, inputs, nearest)}"
        )
    # Replicas on top of shards (HSDP), for the best three.
    hosts = inputs.gpus // inputs.per_host
    powers = [2**i for i in range(1, 12)]
    replicas = [n for n in powers if n <= hosts and inputs.gpus % n == 0][:3]
    fastest = sorted(fitting, key=tokens_per_second, reverse=True)
    best = [c.choice for c in fastest if c.choice.pipeline_parallel == 1][:3]
    hybrids = [choice._replace(replicas=count) for choice in best for count in replicas]
    hybrids = [choice for choice in hybrids if legal(choice.applied_to(cfg), inputs)]
    replicated = in_processes(candidate, [(choice, cfg, inputs) for choice in hybrids])
    fitting += [c for c in replicated if c.fits]
    return sorted(fitting, key=tokens_per_second, reverse=True)


def promise(tried: Candidate) -> tuple[bool, float]:
    """Sort key: the fastest that fits first; then those that do not fit, by the memory needed."""
    if tried.fits:
        return False, -tried.tokens_per_second
    return True, tried.needed


def bytes_needed(tried: Candidate) -> float:
    return tried.needed


def what_would_do(cfg: Config, inputs: PlanInputs, nearest: Candidate) -> str:
    """The fewest GPUs, in doublings, on which the nearest choice fits; and how much memory a device
    would need."""
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
    """The row of a candidate in the table, by COLUMNS."""
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


def table(ranking: list[Candidate], shown: int = 20) -> str:
    rows = ["".join(f"{title:>{width}}" for title, width in COLUMNS.items())]
    for c in ranking[:shown]:
        cells = zip(cells_of(c), COLUMNS.values(), strict=True)
        rows.append("".join(f"{cell:>{width}}" for cell, width in cells))
    if len(ranking) > shown:
        rows.append(f"and {len(ranking) - shown} more that fit")
    return "\n".join(rows)
