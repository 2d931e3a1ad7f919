"""Enumerate the choices of a search: meshes, checkpointing modes, microbatches, pipelines."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, get_args

from configs import check
from configs.schema import SCHEDULES, Config, Parallelism
from tools.plan.plan import PlanInputs
from tools.plan.trace import changed

GATHER_AGAIN = "gather again"  # selective, with activation_checkpoint.gather_again
# of activation checkpointing, by how much they keep
MODES = ("full", GATHER_AGAIN, "selective", "none")
EXPERT_RANKS = (1, 4, 8, 16, 32, 64)  # degrees of expert parallelism
DEPTHS = (2, 4, 8, 16)  # ranks of a pipeline
LEAST_TOKENS = 8192  # of a rank in a sequence: shorter sequences are not shared between ranks


class Choice(NamedTuple):
    """Choice of one value for each quantity that the search varies."""

    tensor_parallel: int = 1
    data_parallel_replicate: int = 1
    mode: str = "full"  # one of MODES
    local_batch_size: int = 1
    accumulate_gradients: str = "whole"
    pipeline_parallel: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_stages_per_rank: int = 0
    context_parallel: int = 1
    context_parallel_method: str = "gather"
    expert_parallel: int = 1
    expert_exchange: str = "flat"

    @property
    def checkpointing(self) -> dict[str, str | bool]:
        """Return the options of [activation_checkpoint] that the mode stands for."""
        if self.mode == GATHER_AGAIN:
            return {"mode": "selective", "gather_again": True}
        return {"mode": self.mode, "gather_again": False}

    def applied_to(self, cfg: Config) -> Config:
        parallelism = {"data_parallel_shard": -1, "pipeline_layers": (), **self._asdict()}
        batch = {"local_batch_size": parallelism.pop("local_batch_size")}
        del parallelism["mode"]
        if self.expert_parallel == 1:
            parallelism["expert_chunks"] = 1
        tables = {"activation_checkpoint": self.checkpointing, "training": batch}
        return changed(cfg, parallelism=parallelism, **tables)

    def __str__(self) -> str:
        parts = []
        for name, value, usual in zip(self._fields, self, Choice()):
            if name == "mode":
                parts.append(f"activation_checkpoint.mode = {self.checkpointing['mode']}")
                if value == GATHER_AGAIN:
                    parts.append("gather_again = true")
            elif value != usual or name in ("tensor_parallel", "local_batch_size"):
                parts.append(f"{name} = {value}")
        return ", ".join(parts)

    @property
    def sharded(self) -> "Choice":
        """Return the same choice with sharded gradients."""
        return self._replace(accumulate_gradients="sharded")


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
    return changed(cfg, training={"global_batch_size": sequences})


def bases(cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Return every degree of tensor parallelism, combined with every degree of context parallelism
    that leaves a rank LEAST_TOKENS of a sequence. Models with experts get every degree of expert
    parallelism that divides the experts, but no tensor parallelism, which splits no expert."""
    degrees = [tp for tp in range(1, inputs.per_host + 1) if inputs.per_host % tp == 0]
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
            context_parallel=cp,
            context_parallel_method=method,
            expert_parallel=ep,
            expert_exchange=cfg.parallelism.expert_exchange if spans_hosts else "flat",
        )
        tp_only = cp == 1 and len(experts) == 1
        if tp_only or legal(choice.applied_to(with_batch(inputs.gpus, cfg)), inputs):
            choices.append(choice)
    return choices


def modes_of(base: Choice) -> list[str]:
    return [mode for mode in MODES if mode != GATHER_AGAIN or base.tensor_parallel > 1]


def microbatches_of(base: Choice, cfg: Config, inputs: PlanInputs) -> list[int]:
    """Return the sequences of a microbatch to try with a mesh: every power of two, and the most,
    which need no accumulation."""
    ranks_of_sequence = base.tensor_parallel * base.context_parallel
    largest = cfg.training.global_batch_size * ranks_of_sequence // inputs.gpus
    powers = [2**i for i in range(12) if 2**i < largest]
    return [*powers, largest] if largest > 0 else powers


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
    depths = [depth for depth in DEPTHS if inputs.gpus % depth == 0]
    choices = []
    for depth, mode, (schedule, v) in product(depths, modes_of(base), per_rank):
        staged = base._replace(pipeline_schedule=schedule, pipeline_stages_per_rank=v)
        choices.append(staged._replace(mode=mode, pipeline_parallel=depth))
    return choices


def every_choice(cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Return all legal choices, with whole gradients. Those are never slower than sharded ones,
    which a search tries where they do not fit."""
    choices = []
    for base in bases(cfg, inputs):
        for mode, local in product(modes_of(base), microbatches_of(base, cfg, inputs)):
            choices.append(base._replace(mode=mode, local_batch_size=local))
        choices += with_pipeline(base, inputs)
    return [choice for choice in choices if legal(choice.applied_to(cfg), inputs)]


def replicated(best: list[Choice], cfg: Config, inputs: PlanInputs) -> list[Choice]:
    """Replicas on top of shards (HSDP), for the first three of `best` without a pipeline."""
    hosts = inputs.gpus // inputs.per_host
    powers = [2**i for i in range(1, 12)]
    counts = [n for n in powers if n <= hosts and inputs.gpus % n == 0][:3]
    alone = [choice for choice in best if choice.pipeline_parallel == 1][:3]
    hybrids = [
        choice._replace(data_parallel_replicate=count) for choice in alone for count in counts
    ]
    return [choice for choice in hybrids if legal(choice.applied_to(cfg), inputs)]
