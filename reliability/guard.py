"""Ends a run, or warns, because of its numbers: one object that the training loop calls by name.

The numbers that are judged are global, so all ranks come to the same verdict at the same step.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Config
from parallelisms.mesh import Mesh
from reliability.health import Spikes, Stragglers, mismatching_replicas, named

logger = logging.getLogger("plumbline")

Where = Callable[[int, list[list[int]]], str]


class Diverged(RuntimeError):
    """The state is not worth training from."""


class Guard:
    """Checks for spikes, skipped steps, gradients and replicas that differ, and stragglers."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spikes: dict[str, list[float]],
    ) -> None:
        """spikes: what `state` returned when the checkpoint was saved; {} for a new run."""
        self.cfg = cfg
        self.mesh = mesh
        self.model = model
        self.optimizer = optimizer
        self.spikes = Spikes(cfg.training.spike_threshold, spikes)
        self.stragglers = Stragglers()
        self.skipped_in_a_row = 0

    def skip_above(self) -> float:
        """Return the gradient norm above which the next step must change no weight
        (training.skip_spikes)."""
        return self.spikes.limit("grad_norm") if self.cfg.training.skip_spikes else math.inf

    def check_replay(self, step: int, ranks: Sequence[int]) -> None:
        """Raise Diverged if there are `ranks` whose gradient differed when it was computed a second
        time."""
        if ranks:
            raise Diverged(
                f"step {step}: recomputing the gradient gave a different result on "
                f"{named(ranks)}: a device computes "
                "wrong, or not deterministically; nothing of it is saved"
            )

    def note(self, loss: float, grad_norm: float, skipped: bool) -> str:
        """Remember a step's numbers. Returns what is wrong with them, "" if nothing is."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        spike = self.spikes.add(loss=loss, grad_norm=grad_norm)
        if not skipped:
            return spike
        trouble = spike or f"loss {loss}, gradient norm {grad_norm}"
        return f"{trouble}, skipped: no weight changed"

    def judge(self, step: int, result: Any, windows: Tensor, where: Where) -> None:
        """Warn of a spike or of a step that changed no weight, and say where its text is. Raises
        Diverged after too many such steps in a row. Called by all ranks.

        result: a train.StepResult; windows: of this rank's batch; where: what
        data/loader.py::Corpora.audit_hint does.
        """
        trouble = self.note(result.loss, result.grad_norm, result.skipped)
        if trouble:
            of_all_ranks = self.mesh.gather(windows.tolist())
            logger.warning(f"step {step}: {trouble}; {where(step, of_all_ranks)}")
        self.check_skipped(step)

    def check_skipped(self, step: int) -> None:
        """Raise Diverged after more than training.max_skipped_steps steps in a row that changed no
        weight."""
        if self.skipped_in_a_row > self.cfg.training.max_skipped_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row without a gradient to use: diverged at "
                f"step {step}"
            )

    def check_replicas(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise Diverged if state that several ranks hold is not the same on all of them; with
        debug.leave_out_odd_replica only on those that differ from the majority. Called by all ranks.
        After a step that was skipped there is nothing new to compare."""
        if self.skipped_in_a_row:
            return
        problems = mismatching_replicas(
            self.model, self.optimizer, self.mesh, loss=loss, grad_norm=grad_norm
        )
        if not problems:
            return
        found = (
            f"step {step}: state that must be the same on several ranks is not: "
            f"{'; '.join(problem.text for problem in problems)}. "
            "A device computes or remembers wrong; "
        )
        odd = sorted({rank for problem in problems for rank in problem.ranks})
        is_left = replicas_without(odd, self.mesh) if self.cfg.debug.leave_out_odd_replica else 0
        if is_left and self.mesh.rank not in odd:
            logger.warning(f"{found}the others go on without {named(odd)}")
            return
        raise Diverged(f"{found}nothing of this state is saved")

    def add_seconds(self, data_seconds: float, result: Any) -> None:
        """Add this rank's seconds of a step before it met the others: `late_ranks` compares them.
        result: a train.StepResult."""
        self.stragglers.add(
            data=data_seconds,
            prepare=result.prepare_seconds,
            optimizer=result.optimizer_seconds,
        )
        if self.mesh.pp > 1:
            self.stragglers.add(**self.model.seconds)

    def late_ranks(self, step: int, steps: int) -> dict[str, float]:
        """Warn of each rank that the others waited for in the last `steps` steps. Returns metrics:
        the seconds per step that they waited. Called by all ranks."""
        late: dict[str, float] = {}
        if self.mesh.size == 1:
            return late
        for rank, section, seconds in self.stragglers.report(self.mesh, steps):
            logger.warning(
                f"step {step}: rank {rank} is late: the others wait {seconds:.3f} s per step for "
                f"its {section}"
            )
            late[f"late/{section}/rank-{rank}"] = seconds
        return late

    def state(self) -> dict[str, list[float]]:
        """Return JSON for a checkpoint."""
        return self.spikes.state()


def replicas_without(ranks: Sequence[int], mesh: Mesh) -> int:
    """Return how many replicas (dp_replicate) have none of these ranks."""
    by_replica = mesh.device_mesh.mesh.transpose(0, 1).flatten(1)
    return sum(set(ranks).isdisjoint(of_one) for of_one in by_replica.tolist())
