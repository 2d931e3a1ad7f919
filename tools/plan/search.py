"""All meshes, checkpointing modes and micro-batches that a number of GPUs allows, traced and ranked by speed."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from configs import check
from configs.schema import Config, InputError
from tools.plan.plan import Question, make_plan
from tools.plan.step import GIB

MODES = ("full", "selective", "none")  # of activation checkpointing, by how much they keep


class Choice(NamedTuple):
    """What the search varies."""

    tensor_parallel: int
    replicas: int  # parallelism.data_parallel_replicate
    mode: str  # activation_checkpoint.mode
    local_batch_size: int
    accumulate: str  # parallelism.accumulate_gradients

    def applied_to(self, cfg: Config) -> Config:
        return cfg.model_copy(update={
            "parallelism": cfg.parallelism.model_copy(update={
                "tensor_parallel": self.tensor_parallel, "data_parallel_replicate": self.replicas,
                "data_parallel_shard": -1, "accumulate_gradients": self.accumulate}),
            "activation_checkpoint": cfg.activation_checkpoint.model_copy(update={"mode": self.mode}),
            "training": cfg.training.model_copy(update={"local_batch_size": self.local_batch_size}),
        })  # fmt: skip

    def __str__(self) -> str:
        replicas = f", data_parallel_replicate = {self.replicas}" if self.replicas > 1 else ""
        sharded = ", accumulate_gradients = sharded" if self.accumulate == "sharded" else ""
        return (f"tensor_parallel = {self.tensor_parallel}{replicas}, activation_checkpoint.mode = {self.mode}, "
                f"local_batch_size = {self.local_batch_size}{sharded}")  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """What the table shows of one choice; small enough to travel between processes."""

    choice: Choice
    micro_batches: int
    needed: float  # bytes
    fits: bool
    seconds: float  # of a step
    tokens_per_second: float
    mfu: float
    exposed: float  # seconds of a step that wait for communication


def legal(cfg: Config, ask: Question) -> bool:
    return not check.broken_rules(cfg, ask.gpus, ask.per_host)


def candidate(choice: Choice, cfg: Config, ask: Question) -> Candidate:
    torch.set_num_threads(1)
    plan = make_plan(choice.applied_to(cfg), ask)
    return Candidate(
        choice, plan.micro_batches, plan.needed, plan.fits, plan.time.seconds, plan.tokens_per_second, plan.mfu, plan.time.exposed
    )


def candidates(tensor_parallel: int, cfg: Config, ask: Question) -> list[Candidate]:
    """The choices with this tensor_parallel, but for those that cannot fit.

    With everything else equal, a mode that keeps more needs more, and so does a larger micro-batch (but for the largest,
    which ends accumulation and with it the gradients that accumulation keeps). Sharded accumulation needs less than whole,
    but exchanges gradients once per micro-batch: it is tried where whole does not fit.
    """
    largest = cfg.training.global_batch_size * tensor_parallel // ask.gpus
    sizes = sorted({largest, *(2**i for i in range(12) if 2**i < largest)} - {0})
    tried: list[Candidate] = []
    too_large: list[tuple[str, int, tuple[str, bool]]] = []  # mode, local batch size, kind of accumulation
    for mode, local in product(MODES, sizes):
        for accumulate in ("whole", "sharded") if local < largest else ("whole",):
            choice = Choice(tensor_parallel, 1, mode, local, accumulate)
            kind = (accumulate, local < largest)
            leaner = MODES[: MODES.index(mode) + 1]
            if any(m in leaner and size <= local and k == kind for m, size, k in too_large):
                continue
            if not legal(choice.applied_to(cfg), ask):
                break
            tried.append(candidate(choice, cfg, ask))
            if tried[-1].fits:
                break
            too_large.append((mode, local, kind))
    return tried


def search(cfg: Config, ask: Question) -> list[Candidate]:
    """The choices that fit, fastest first. Raises InputError where none does; it names the nearest."""
    degrees = [tp for tp in range(1, ask.per_host + 1) if ask.per_host % tp == 0 and ask.gpus % tp == 0]
    tried = [c for column in _in_processes(candidates, [(tp, cfg, ask) for tp in degrees]) for c in column]
    if not tried:
        raise InputError(f"no mesh of {ask.gpus} GPUs is legal, training.global_batch_size = {cfg.training.global_batch_size}: "
                         f"it must be a multiple of the data-parallel ranks, {ask.gpus} / tensor_parallel")  # fmt: skip
    fitting = [c for c in tried if c.fits]
    if not fitting:
        nearest = min(tried, key=lambda c: c.needed)
        raise InputError(
            f"nothing fits {ask.device.memory_gib:.1f} GiB on {ask.gpus} GPUs; the nearest is {nearest.choice}, which needs "
            f"{nearest.needed / GIB:.1f} GiB: {what_would_do(cfg, ask, nearest)}"
        )
    # Replicas on top of shards (HSDP), for the best three.
    replicas = [2**i for i in range(1, 12) if 2**i <= ask.gpus // ask.per_host and ask.gpus % 2**i == 0][:3]
    best = [c.choice for c in sorted(fitting, key=lambda c: -c.tokens_per_second)[:3]]
    hybrids = [choice._replace(replicas=count) for choice in best for count in replicas]
    hybrids = [choice for choice in hybrids if legal(choice.applied_to(cfg), ask)]
    fitting += [c for c in _in_processes(candidate, [(choice, cfg, ask) for choice in hybrids]) if c.fits]
    return sorted(fitting, key=lambda c: -c.tokens_per_second)


def _in_processes(function: Callable, calls: list[tuple]) -> list:
    """function(*call) for each call, in a process of its own: PyTorch keeps what belongs to a mesh while a process lives."""
    if not calls:
        return []
    with multiprocessing.get_context("fork").Pool(min(len(calls), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        return pool.starmap(function, calls, chunksize=1)


def what_would_do(cfg: Config, ask: Question, nearest: Candidate) -> str:
    """The fewest GPUs, in doublings, on which the nearest choice fits; and how much memory a device would need."""
    gpus, remedies = ask.gpus, []
    for _ in range(6):
        gpus *= 2
        more = replace(ask, gpus=gpus)
        sizes = {1, cfg.training.global_batch_size * nearest.choice.tensor_parallel // gpus} - {0}
        choices = [nearest.choice._replace(mode="full", local_batch_size=size) for size in sizes]
        fitting = [c for c in choices if legal(c.applied_to(cfg), more) and make_plan(c.applied_to(cfg), more).fits]
        if fitting:
            remedies.append(f"{gpus} GPUs would do ({fitting[0]})")
            break
    remedies.append(f"or a device with {nearest.needed / GIB:.0f} GiB")
    return ", ".join(remedies)


def table(ranking: list[Candidate], shown: int = 20) -> str:
    rows = [f"{'tp':>4}{'replicas':>10}{'checkpointing':>15}{'micro-batch':>13}{'accumulation':>14}{'memory GiB':>12}"
            f"{'s/step':>9}{'exposed':>9}{'tokens/s':>14}{'MFU':>7}"]  # fmt: skip
    for c in ranking[:shown]:
        accumulation = f"{c.micro_batches} {c.choice.accumulate}" if c.micro_batches > 1 else "1"
        rows.append(f"{c.choice.tensor_parallel:>4}{c.choice.replicas:>10}{c.choice.mode:>15}{c.choice.local_batch_size:>13}"
                    f"{accumulation:>14}{c.needed / GIB:>12.1f}{c.seconds:>9.2f}{c.exposed / c.seconds:>9.0%}"
                    f"{c.tokens_per_second:>14,.0f}{c.mfu:>7.1%}")  # fmt: skip
    if len(ranking) > shown:
        rows.append(f"and {len(ranking) - shown} more that fit")
    return "\n".join(rows)
