"""Accumulate the numbers of a log line over its steps: rates, loss by source, auxiliary terms, and
the load of experts."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from configs.cpu import bfloat16_is_fast, bfloat16_slowness

import torch
from torch import Tensor, nn

from configs import stages
from configs.schema import MUONS, Config, InputError
from parallelisms import dp, qk_clip
from parallelisms.mesh import Mesh
from training.experts import ExpertLoad
from training.loss import IGNORE
from training.metrics import MetricsWriter, memory_gib, model_summary, peak_flops
from training.noise_scale import NoiseScale
from training.terms import TermLog

logger = logging.getLogger("plumbline")


def open_metrics(job: Any, family: Any, start: int, sources: int) -> tuple[MetricsWriter, "Meter"]:
    """Open the metrics writer and the meter of a run that continues after step `start`. Logs a
    summary of the model, its size and its mesh. Called by all ranks, and raises InputError on all.

    job: a train.Job; family: a models/family.py::Family; sources: how many the run trains on.
    """
    cfg, mesh, args = job.cfg, job.mesh, job.args
    dtype = dp.param_dtype(cfg.training, mesh.device)
    device_name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    peak = peak_flops(device_name, dtype=dtype)
    folder = Path(cfg.run.folder)
    metrics = problem = None
    last = stages.whole(cfg).training.last_step
    try:
        metrics = MetricsWriter(cfg.metrics, folder, mesh.rank == 0, start, last, peak)
    except InputError as error:
        problem = str(error)
    refuse_all(mesh.gather(problem))
    logger.info(model_summary(family, args, job.model, mesh, dtype, cfg.training, job.optimizer))
    if warning := slow_bfloat16(cfg, mesh.device):
        logger.warning(warning)
    if mesh.pp > 1:
        logger.info(job.model.describe(cfg.training.microbatches(mesh.dp_size)))
    logger.info("\n".join([begin(start, last), *stages.title(cfg)]))
    tokens_per_step = cfg.training.global_batch_size * cfg.training.seq_len
    flops_per_token = family.flops_per_token(args, cfg.training.seq_len)
    experts = ExpertLoad(mesh, args) if getattr(args, "n_experts", 0) else None
    noise = job.compute if isinstance(job.compute, NoiseScale) else None
    if noise:
        noise.done = start
    logits = partial(qk_clip.metrics, job.model, mesh) if cfg.optimizer.qk_clip else dict
    return metrics, Meter(mesh, sources, tokens_per_step, flops_per_token, experts, noise, logits)


def refuse_all(problems: list[str | None]) -> None:
    """Raise InputError on all ranks if one has a problem: else the others would report its loss."""
    if said := next(filter(None, problems), None):
        error = InputError(said)
        error.is_common = True  # type: ignore[attr-defined]
        raise error


def begin(start: int, last: int) -> str:
    """Return the line that says where a run goes on. start: steps that are done; last: the step
    after which the run ends, which a finished run may have passed."""
    if not start:
        return "a fresh start"
    return f"resumed after step {start}" + (f" of {last}" if start <= last else "")


def slow_bfloat16(cfg: Config, device: torch.device) -> str:
    """Return a warning where the options ask for bfloat16 GEMMs of a CPU that takes far longer for
    them than for float32; "" otherwise."""
    if device.type != "cpu" or bfloat16_is_fast():
        return ""
    asked = {"training.param_dtype": cfg.training.param_dtype}
    if cfg.optimizer.kind in MUONS:
        asked["optimizer.ns_dtype"] = cfg.optimizer.ns_dtype
    slow = [f'{name} = "bfloat16"' for name, dtype in asked.items() if dtype == "bfloat16"]
    if not slow:
        return ""
    return (
        f"{' and '.join(slow)}: this processor has neither AVX512-BF16 nor AMX, and multiplies "
        f'bfloat16 {bfloat16_slowness():,.0f} times slower than float32: "auto" takes float32 here'
    )


class Meter:
    """Counts steps, their seconds and, where there are several sources, the loss of each.

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
        noise: NoiseScale | None = None,
        logits: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """sources: how many the run trains on; tokens_per_step: of the global batch;
        flops_per_token: as the model's family counts them; experts: None for a model without
        experts; noise: None without metrics.noise_scale_interval; logits: returns metrics of the
        last step's logits, called by all ranks."""
        self.mesh = mesh
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.experts = experts
        self.noise = noise
        self.logits = logits
        self.terms = TermLog(mesh)
        self.first_loss = self.last_loss = None  # of this process
        # nats and tokens of this rank
        self.by_source = torch.zeros(2, sources, dtype=torch.float64, device=mesh.device)
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.waited = 0.0  # seconds for data
        self.worked = 0.0  # seconds in steps
        self.reported = {}
        self.by_source.zero_()

    def add(
        self, batch: dict[str, Tensor], result: Any, data_seconds: float, step_seconds: float
    ) -> None:
        """Count a finished step. result: its train.StepResult; data_seconds: waiting for the
        batch."""
        self.steps += 1
        self.waited += data_seconds
        self.worked += step_seconds
        self.last_loss = result.loss
        if self.first_loss is None:
            self.first_loss = result.loss
        if self.experts and not result.skipped:
            self.experts.add(result.terms)
        if self.noise:
            self.reported |= self.noise.metrics(result.grad_norm, result.skipped)
        self.terms.add(result.terms, result.skipped)
        if self.by_source.shape[1] > 1 and not result.skipped:
            device = self.by_source.device
            counted = batch["labels"].to(device, non_blocking=True) != IGNORE
            rows = torch.stack((result.losses, counted)).double().sum(-1)  # [2, A, b]
            self.by_source.index_add_(
                1, batch["source"].to(device, non_blocking=True), rows.flatten(1)
            )

    def line(
        self, step: int, order: Any, loss: float, grad_norm: float, lr: float
    ) -> dict[str, float]:
        """Return the metrics after `step`, and reset the meter. order: data/order.py's or
        data/stream.py's. Called by all ranks."""
        seconds = self.waited + self.worked
        tokens_per_second = self.tokens_per_step * self.steps / seconds
        flops_per_device = tokens_per_second * self.flops_per_token / self.mesh.size
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": tokens_per_second,
            "tokens_seen": order.tokens(step),
            "tflops_per_device": flops_per_device / 1e12,
            "memory_gib": memory_gib(self.mesh.device),
            "data_wait": self.waited / seconds,
            "step_seconds": seconds / self.steps,
        }
        if self.by_source.shape[1] > 1:
            values |= self._sources(step, order)
        terms = self.terms.line()
        if taken := sorted(values.keys() & terms.keys()):
            raise ValueError(f"an auxiliary term is called {taken[0]}, as a metric is: rename it")
        values |= terms | self.reported | self.logits()
        self.reset()
        return values

    def report_experts(self, step: int, model: nn.Module, metrics: MetricsWriter) -> None:
        """Add to the next line how tokens were spread over a model's experts since the last report.
        Called by all ranks."""
        if self.experts:
            values, counts = self.experts.report(step, model)
            self.reported |= values
            metrics.record_experts(counts)

    def _sources(self, step: int, order) -> dict[str, float]:
        """Return for each source of a mixture its mean loss since the last line (none if it had no
        token), its tokens in the whole run, and its epochs."""
        segment = order.segment(step)
        values = {}
        # the losses are 0 but in the last stage; all stages count the same tokens
        self.mesh.sum_over_pp(self.by_source[0])
        sums = self.mesh.sum_over_tokens(self.by_source).tolist()
        for source, consumed, loss, tokens in zip(
            segment.sources, order.consumed(step), *sums, strict=True
        ):
            if tokens:
                values[f"loss/{source.name}"] = loss / tokens
            values[f"tokens_seen/{source.name}"] = consumed * segment.seq_len
            values[f"epochs/{source.name}"] = consumed / source.windows
        return values
