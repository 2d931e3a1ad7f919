"""Validation: the loss on held-out sequences, token-weighted and the same number on every mesh."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from data import text_bytes
from data.loader import Batch, loader
from parallelisms import dp, pp
from parallelisms.mesh import Mesh
from training import averages, forecast
from training.loss import IGNORE, linear_cross_entropy
from training.microbatches import Microbatches, to_host_async

logger = logging.getLogger("plumbline")


# takes the place of a run's stop (reliability/stop.py) where nothing is left to save
UNSTOPPABLE = SimpleNamespace(asked=lambda: False)


def run_validation(run: Any, step: int, stop: Any = UNSTOPPABLE) -> bool:
    """Log the scores on the held-out sets after `step`, unless a stop of the run is requested
    meanwhile. Returns whether one is. All ranks call it.

    run: a train.Session; stop: its own.
    """
    job = run.job
    cfg = job.cfg
    if not run.held_out:
        return False
    sums = sums_of_sets(run, stop)
    stopping = ended_by_stop(run, step, stop, run_validation)
    if not stopping and cfg.optimizer.average_decay:
        run.checkpoints.wait_for_copy()  # of the weights, which change
        with averages.in_place(job.optimizer):
            of_average = sums_of_sets(run, stop)
            stopping = ended_by_stop(run, step, stop, run_validation)
    if not stopping:
        found = scores(sums)
        if cfg.optimizer.average_decay:
            found["average/validation_loss"] = scores(of_average)["validation_loss"]
        run.metrics.log(step, found | forecast.judged(cfg, step, found["validation_loss"]))
    run.clock.record("validation")
    return stopping


def sums_of_sets(run: Any, stop: Any) -> dict[str, Tensor]:
    """Return the sums of `validate` over each held-out set, incomplete where a stop is requested
    meanwhile."""
    cfg = run.job.cfg
    patience = cfg.run.step_timeout_seconds + cfg.data.timeout_seconds
    sums = {}
    tokenizer = run.corpora.tokenizer
    token_bytes = text_bytes.of_ids(tokenizer)
    for name, rows in run.held_out.items():
        read = loader(rows, 0, cfg.validation.steps, cfg.data)
        sized = text_bytes.sized(read, rows, tokenizer)
        batches = until_stopped(sized, run.job.mesh, stop, run.watchdog, patience)
        sums[name] = validate(
            run.job.model, run.job.mesh, batches, cfg.training.loss_chunk_tokens, token_bytes
        )
    return sums


def until_stopped(
    batches: Iterator[Batch], mesh: Mesh, stop: Any, watchdog: Any, patience: float
) -> Iterator[Batch]:
    """Yield the batches until a stop of the run is requested. Each may take `patience` seconds."""
    answer = any_rank_stops(mesh, stop.asked())
    for batch in batches:
        if answer():
            return
        # read after the next batch, so that a GPU works on this one meanwhile
        answer = any_rank_stops(mesh, stop.asked())
        watchdog.arm(patience, "validate")
        yield batch


def ended_by_stop(run: Any, step: int, stop: Any, scoring: Callable) -> bool:
    """Free the weights that the forwards of `scoring` have left unsharded, and say so where a rank is
    asked to stop: then batches may be missing, and nothing is logged. After the last step, which no
    later start repeats, the scores wait until its state is saved. All ranks call it."""
    for stage in pp.stages_of(run.job.model):
        dp.reshard(stage)
    stopping = any_rank_stops(run.job.mesh, stop.asked())()
    what = scoring.__name__.removeprefix("run_")
    if stopping and step == run.job.cfg.training.last_step:
        run.left_out.append(scoring)
        logger.warning(f"step {step}: the {what} comes after the save, since the run is to stop")
    elif stopping:
        logger.warning(f"step {step}: no {what}, since the run is to stop")
    return stopping


def any_rank_stops(mesh: Mesh, asked: bool) -> Callable[[], bool]:
    """Start an all-reduce of `asked`, whether this rank was asked to stop. The result waits, and
    returns whether any was. All ranks call both."""
    flag = torch.full((1,), float(asked), device=mesh.device)
    numbers = to_host_async(mesh.sum_over_ranks(flag))
    return lambda: any(numbers())


@torch.no_grad()
def validate(
    model: nn.Module, mesh: Mesh, batches: Iterable[dict], chunk_tokens: int, token_bytes: Tensor
) -> Tensor:
    """Return sums over the `batches` of all ranks (dicts as data/loader.py makes them), float64
    [3]: loss in nats, tokens predicted, bytes of those tokens. token_bytes: int64 [vocabulary], the
    bytes of text that each token stands for; a batch's own `sizes` (data/text_bytes.py) come before
    it."""
    total = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    token_bytes = token_bytes.to(mesh.device)
    for batch in batches:
        microbatches = Microbatches(model, batch, mesh, linear_cross_entropy, chunk_tokens)
        if mesh.pp > 1:
            total[0] += model.losses(microbatches)
        else:
            total[0] += sum(model(*microbatches(a)) for a in range(len(microbatches)))
        counts = microbatches.labels != IGNORE
        total[1] += counts.sum()
        if "sizes" in batch:
            total[2] += batch["sizes"].to(mesh.device)[counts].sum()
        else:
            total[2] += token_bytes[microbatches.labels[counts]].sum()
    # only the ranks of the last stage have a loss; all ranks of a pipeline count the same tokens
    mesh.sum_over_pp(total[0])
    return mesh.sum_over_tokens(total)


def scores(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return metrics from the `validate` sums of each set: over all sets together, and of each set
    if there are several. (The set without a name is the held-out part of the only source.)"""
    values = {f"validation_{key}": value for key, value in _scores(sum(sums.values())).items()}
    if len(sums) > 1:
        for name, total in sums.items():
            for key, value in _scores(total).items():
                values[f"validation/{name or 'held_out'}/{key}"] = value
    return values


def _scores(total: Tensor) -> dict[str, float]:
    """Return the loss in nats per token; perplexity; bits per byte of text, which compares models
    of different tokenizers."""
    nats, tokens, size = total.tolist()
    loss = nats / max(tokens, 1)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # a float ends at e^709
    return {
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": nats / math.log(2) / max(size, 1),
    }
