"""What a log line needs to know about the steps since the line before: rates, loss by source, and
the load of experts."""

from typing import Any

import torch
from torch import Tensor, nn

from parallelisms.mesh import Mesh
from training.experts import ExpertLoad
from training.loss import IGNORE
from training.metrics import Metrics, memory_gib


class Meter:
    """Counts steps, their seconds and, where there are several sources, the loss of each.

    waited, worked: seconds spent waiting for data and in steps. The loop adds to them.
    reported: further metrics for the next line: of experts, and of ranks that the others wait for
    (reliability/guard.py::Guard.late_ranks).
    """

    def __init__(
        self,
        mesh: Mesh,
        sources: int,
        tokens_per_step: int,
        flops_per_token: float,
        experts: ExpertLoad | None = None,
    ) -> None:
        """sources: how many the run trains on; tokens_per_step: of the global batch;
        flops_per_token: as the model's family counts them; experts: None for a model without
        experts."""
        self.mesh, self.tokens_per_step, self.flops_per_token, self.experts = (
            mesh,
            tokens_per_step,
            flops_per_token,
            experts,
        )
        self.first_loss = self.last_loss = None  # of this process
        # nats and tokens of this rank
        self.by_source = torch.zeros(2, sources, dtype=torch.float64, device=mesh.device)
        self.reset()

    def reset(self) -> None:
        self.steps, self.waited, self.worked, self.reported = 0, 0.0, 0.0, {}
        self.by_source.zero_()

    def add(self, batch: dict[str, Tensor], result: Any) -> None:
        """A step is done. result: its train.StepResult."""
        self.steps += 1
        self.first_loss, self.last_loss = (
            result.loss if self.first_loss is None else self.first_loss,
            result.loss,
        )
        if self.experts and not result.skipped:
            self.experts.add(result.expert_counts, result.router_sums)
        if self.by_source.shape[1] > 1 and not result.skipped:
            device = self.by_source.device
            counted = batch["labels"].to(device, non_blocking=True) != IGNORE
            rows = torch.stack((result.losses, counted)).double().sum(-1)  # [2, A, b]
            self.by_source.index_add_(
                1, batch["source"].to(device, non_blocking=True), rows.flatten(1)
            )

    def line(self, step: int, order, loss: float, grad_norm: float, lr: float) -> dict[str, float]:
        """The metrics after `step`, and a new beginning. order: data/order.py's or
        data/stream.py's. Called by all ranks."""
        seconds = self.waited + self.worked
        rate = self.tokens_per_step * self.steps / seconds
        values = (
            {
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens_per_second": rate,
                "tokens_seen": order.tokens(step),
                "tflops_per_device": rate * self.flops_per_token / self.mesh.size / 1e12,
                "memory_gib": memory_gib(self.mesh.device),
                "data_wait": self.waited / seconds,
                "step_seconds": seconds / self.steps,
            }
            | (self._sources(step, order) if self.by_source.shape[1] > 1 else {})
            | self.reported
        )
        self.reset()
        return values

    def report_experts(self, step: int, model: nn.Module, metrics: Metrics) -> None:
        """Of a model with experts: how tokens were spread over them since the last report, for the
        next line. Called by all ranks."""
        if self.experts:
            values, counts = self.experts.report(step, model)
            self.reported |= values
            metrics.record_experts(counts)

    def _sources(self, step: int, order) -> dict[str, float]:
        """For each source of a mixture: its mean loss since the last line (none if it had no
        token), the tokens seen of it in the whole run, and how often it has been read."""
        segment, values = order.segment(step), {}
        # the losses are 0 but in the last stage; all stages count the same tokens
        self.mesh.sum_over_pp(self.by_source[0])
        sums = self.mesh.sum_over_tokens(self.by_source).tolist()
        for source, consumed, loss, tokens in zip(
            segment.sources, order.consumed(step), *sums, strict=True
        ):
            values |= {f"loss/{source.name}": loss / tokens} if tokens else {}
            values |= {
                f"tokens_seen/{source.name}": consumed * segment.seq_len,
                f"epochs/{source.name}": consumed / source.windows,
            }
        return values
