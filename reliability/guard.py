"""What may end a run, or warn a person, because of its numbers: one object that the training loop
asks by name.

The numbers that are judged are global, so all ranks come to the same verdict at the same step.
"""

import logging
import math
from collections.abc import Sequence

import torch
from torch import nn

from configs.schema import Config
from parallelisms.mesh import Mesh
from reliability.health import Spikes, Stragglers, mismatching_replicas, named

say = logging.getLogger("plumbline")


class Diverged(RuntimeError):
    """There is no point in training on from this state."""


class Guard:
    """Spikes, skipped steps, gradients and replicas that differ, and ranks that the others wait
    for."""

    def __init__(
        self,
        cfg: Config,
        mesh: Mesh,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spikes: dict[str, list[float]],
    ) -> None:
        """spikes: what `state` returned when the checkpoint was saved; {} for a new run."""
        self.cfg, self.mesh, self.model, self.optimizer = cfg, mesh, model, optimizer
        self.spikes = Spikes(cfg.training.spike_threshold, spikes)
        self.stragglers = Stragglers()
        self.skipped_in_a_row = 0

    def skip_above(self) -> float:
        """The gradient norm above which the next step must change no weight (training.skip_spikes)."""
        return self.spikes.limit("grad_norm") if self.cfg.training.skip_spikes else math.inf

    def check_replay(self, step: int, ranks: Sequence[int]) -> None:
        """Raises Diverged if there are `ranks` whose gradient differed when it was computed a
        second time."""
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
        if not skipped and not spike:
            return ""
        return (spike or f"loss {loss}, gradient norm {grad_norm}") + (
            ", skipped: no weight changed" if skipped else ""
        )

    def check_skipped(self, step: int) -> None:
        """Raises Diverged after more than training.max_skipped_steps steps in a row that changed no
        weight."""
        if self.skipped_in_a_row > self.cfg.training.max_skipped_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row without a gradient to use: diverged at "
                f"step {step}"
            )

    def check_replicas(self, step: int, loss: float, grad_norm: float) -> None:
        """Raises Diverged if state that several ranks hold is not the same on all of them. Called
        by all ranks."""
        if problems := mismatching_replicas(
            self.model, self.optimizer, self.mesh, loss=loss, grad_norm=grad_norm
        ):
            raise Diverged(
                f"step {step}: state that must be the same on several ranks is not: "
                f"{'; '.join(problems)}. "
                "A device computes or remembers wrong; nothing of this state is saved"
            )

    def late_ranks(self, step: int, steps: int) -> dict[str, float]:
        """Warn of each rank that the others waited for in the last `steps` steps. Returns metrics:
        the seconds per step that they waited. Called by all ranks."""
        late = {}
        for rank, section, seconds in self.stragglers.report(self.mesh, steps):
            say.warning(
                f"step {step}: rank {rank} is late: the others wait {seconds:.3f} s per step for "
                f"its {section}"
            )
            late[f"late/{section}/rank-{rank}"] = seconds
        return late

    def state(self) -> dict[str, list[float]]:
        """JSON for a checkpoint."""
        return self.spikes.state()
