"""Enumerate the choices of a search: meshes, checkpointing modes, microbatches, pipelines."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, get_args

from configs import check
from configs.schema import SCHEDULES, Config, Parallelism
from tools.plan.plan import PlanInputs

GATHER_AGAIN = "gather again"  # selective, with activation_checkpoint.gather_again
# of activation checkpointing, by how much they keep
MODES = ("full", GATHER_AGAIN, "selective", "none")
EXPERT_RANKS = (1, 4, 8, 16, 32, 64)  # degrees of expert parallelism
DEPTHS = (2, 4, 8, 16)  # ranks of a pipeline
LEAST_TOKENS = 8192  # of a rank in a sequence: shorter sequences are not shared between ranks


class Choice(NamedTuple):
    """Choice of one value for each quantity that the search varies."""

    tensor_parallel: int
    replicas: int  # parallelism.data_parallel_replicate
    mode: str  # one of MODES
    local_batch_size: int
    accumulate: str  # parallelism.accumulate_gradients
    pipeline_parallel: int = 1
    schedule: str = "1f1b"  # parallelism.pipeline_schedule
    stages_per_rank: int = 0
    context_parallel: int = 1
    method: str = "gather"  # parallelism.context_parallel_method
    expert_parallel: int = 1
    exchange: str = "flat"  # parallelism.expert_exchange

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
            "expert_exchange": self.exchange,
        }
        if self.expert_parallel == 1:
            parallelism["expert_chunks"] = 1
        mode = {"mode": self.checkpointing, "gather_again": self.mode == GATHER_AGAIN}
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
        if self.exchange != "flat":
            parts.append(f"expert_exchange = {self.exchange}")
        if self.replicas > 1:
            parts.append(f"data_parallel_replicate = {self.replicas}")
        if self.pipeline_parallel > 1:
            parts.append(f"pipeline_parallel = {self.pipeline_parallel}")
            parts.append(f"pipeline_schedule = {self.schedule}")
            parts.append(f"pipeline_stages_per_rank = {self.stages_per_rank}")
        parts.append(f"activation_checkpoint.mode = {self.checkpointing}")
        if self.mode == GATHER_AGAIN:
            parts.append("gather_again = true")
        parts.append(f"local_batch_size = {self.local_batch_size}")
        if self.accumulate == "sharded":
            parts.append("accumulate_gradients = sharded")
        return ", ".join(parts)

    @property
    def checkpointing(self) -> str:
        """activation_checkpoint.mode"""
        return "selective" if self.mode == GATHER_AGAIN else self.mode

    @property
    def base(self) -> "Choice":
        """Return the choice that `bases` gave, from which this one was made."""
        return Choice(
            self.tensor_parallel,
            1,
            "full",
            1,
            "whole",
            context_parallel=self.context_parallel,
            method=self.method,
            expert_parallel=self.expert_parallel,
            exchange=self.exchange,
        )

    @property
    def whole(self) -> "Choice":
        """Return the same choice with whole gradients. It is never slower, so sharded ones are
        worth a row only where whole ones do not fit."""
        return self._replace(accumulate="whole")


@dataclass(frozen=True)
class Candidate:
    """Candidate: a choice with the figures of its row; small enough to travel between processes."""

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


def with_batch(sequences: int, cfg: Config) -> Config:
    """Return the configuration with another number of sequences in a step."""
    training = cfg.training.model_copy(update={"global_batch_size": sequences})
    return cfg.model_copy(update={"training": training})


def bases(cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Return every degree of tensor parallelism, combined with every degree of context parallelism
    that leaves a rank LEAST_TOKENS of a sequence. Models with experts get every degree of expert
    parallelism that divides the experts, but no tensor parallelism, which splits no expert."""
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
        spans_hosts = ep > inputs.per_host and ep % inputs.per_host == 0
        choice = Choice(
            tp,
            1,
            "full",
            1,
            "whole",
            context_parallel=cp,
            method=method,
            expert_parallel=ep,
            exchange=cfg.parallelism.expert_exchange if spans_hosts else "flat",
        )
        tp_only = cp == 1 and len(experts) == 1
        if tp_only or legal(choice.applied_to(with_batch(inputs.gpus, cfg)), inputs):
            choices.append(choice)
    return choices


def modes_of(base: Choice) -> list[str]:
    return [mode for mode in MODES if mode != GATHER_AGAIN or base.tensor_parallel > 1]


def without_pipeline(base: Choice, cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Return the choices with the tensor, context and expert parallelism of `base`: every mode,
    every power of two as a microbatch, and the largest one, which needs no accumulation."""
    ranks_of_sequence = base.tensor_parallel * base.context_parallel
    largest = cfg.training.global_batch_size * ranks_of_sequence // inputs.gpus
    powers = [2**i for i in range(12) if 2**i < largest]
    sizes = [*powers, largest] if largest > 0 else powers
    choices = []
    for mode, local in product(modes_of(base), sizes):
        for accumulate in ("whole", "sharded") if local < largest else ("whole",):
            choices.append(base._replace(mode=mode, local_batch_size=local, accumulate=accumulate))
    return choices


def with_pipeline(base: Choice, inputs: PlanInputs) -> list[Choice]:
    """Return the choices with pipelines of 2 to 16 ranks and every schedule. None on one host:
    pipelines are for links that are too slow for everything else. Microbatches are small, since the
    bubble is smaller the more there are."""
    if inputs.gpus == inputs.per_host or base.context_parallel > 1:
        return []
    per_rank = []
    for name, row in SCHEDULES.items():
        fewest, most = row.stages_per_rank
        per_rank += [(name, v) for v in (1, 2, 4) if fewest <= v <= most]
    choices = []
    for depth, mode, accumulate in product(DEPTHS, modes_of(base), ("whole", "sharded")):
        if inputs.gpus % depth:
            continue
        for schedule, v in per_rank:
            choices.append(
                base._replace(
                    mode=mode,
                    accumulate=accumulate,
                    pipeline_parallel=depth,
                    schedule=schedule,
                    stages_per_rank=v,
                )
            )
    return choices


def every_choice(cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Return all legal choices."""
    choices = []
    for base in bases(cfg, inputs):
        choices += without_pipeline(base, cfg, inputs)
        choices += with_pipeline(base, inputs)
    return [choice for choice in choices if legal(choice.applied_to(cfg), inputs)]


def replicated(best: list[Choice], cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Replicas on top of shards (HSDP), for the first three of `best` without a pipeline."""
    hosts = inputs.gpus // inputs.per_host
    powers = [2**i for i in range(1, 12)]
    counts = [n for n in powers if n <= hosts and inputs.gpus % n == 0][:3]
    alone = [choice for choice in best if choice.pipeline_parallel == 1][:3]
    hybrids = [choice._replace(replicas=count) for choice in alone for count in counts]
    return [choice for choice in hybrids if legal(choice.applied_to(cfg), inputs)]
