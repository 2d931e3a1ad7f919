"""Evaluation: the scores of tasks (data/tasks.py), the same numbers on every mesh.

Requests are sorted by length and distributed over the data-parallel ranks, so that a batch has
little padding, and the batches of all ranks have one shape. A batch goes through the model as one
of validation does. Nothing of it stays: no random number is drawn, no term of a loss is collected
and no weight changes."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from configs.schema import Config
from data.loader import Batch, at
from data.tasks import EncodedTask, ScoreRequest, open_task
from parallelisms.mesh import Mesh
from training.attention import for_many_shapes
from training.greedy import LossAndMistakes
from training.loss import IGNORE
from training.microbatches import Microbatches
from training.scores import line, scores
from training.validate import UNSTOPPABLE, ended_by_stop, until_stopped

logger = logging.getLogger("plumbline")


def open_tasks(cfg: Config, tokenizer: Any) -> list[EncodedTask]:
    """Open and encode the tasks of a run. tokenizer: a data/tokenizer.py::Tokenizer. Raises
    InputError as `data/tasks.py::open_task` does."""
    window = cfg.training.seq_len
    tasks = []
    for row in cfg.evaluation.tasks:
        task = open_task(row, tokenizer, window)
        report = logger.warning if task.truncated else logger.info
        report(task.describe(window))
        tasks.append(task)
    return tasks


def run_evaluation(run: Any, step: int, stop: Any = UNSTOPPABLE) -> bool:
    """Log the scores of all tasks after `step`, unless a stop of the run is requested meanwhile.
    Returns whether one is. All ranks call it. run and stop: as in `validate.run_validation`.
    """
    job = run.job
    cfg = job.cfg
    if not run.tasks:
        return False
    patience = cfg.run.step_timeout_seconds

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        return until_stopped(batches, job.mesh, stop, run.watchdog, patience)

    values = {}
    lines = []
    for task in run.tasks:
        found = score_requests(
            job.model,
            job.mesh,
            task.requests,
            cfg.training.local_batch_size * cfg.training.seq_len,
            cfg.training.loss_chunk_tokens,
            watched,
        )
        of_task = scores(task, *found)
        lines.append(line(task.name, task.kind, of_task))
        values |= {f"evaluation/{task.name}/{key}": value for key, value in of_task.items()}
    stopping = ended_by_stop(run, step, stop, run_evaluation)
    if not stopping:
        run.metrics.log(step, values, f"evaluation of {';  '.join(lines)}")
    run.clock.record("validation")
    return stopping


def _all(batches: Iterator[Batch]) -> Iterator[Batch]:
    return batches


class Scored(NamedTuple):
    """Scores of each request, the same on all ranks: float64 [requests]."""

    log_likelihoods: np.ndarray  # of what it scores, in nats
    mistakes: np.ndarray  # how many of the tokens that it scores are not the likeliest


@torch.no_grad()
def score_requests(
    model: nn.Module,
    mesh: Mesh,
    requests: Sequence[ScoreRequest],
    most_tokens: int,
    chunk_tokens: int,
    watched: Callable[[Iterator[Batch]], Iterator[Batch]] = _all,
) -> Scored:
    """Score the requests; all ranks call it.

    most_tokens: of a microbatch, with padding, as far as one request does not have more;
    chunk_tokens: as in `linear_cross_entropy`; watched: passes the batches on, or ends early, on
    all ranks at the same batch.
    """
    total = torch.zeros(2, len(requests), dtype=torch.float64, device=mesh.device)
    shares = shares_of(requests, mesh, most_tokens)
    with for_many_shapes():
        for batch in watched(batch_of(requests, share, mesh) for share in shares):
            loss = LossAndMistakes(batch["labels"], mesh.device)
            microbatches = Microbatches(model, batch, mesh, loss, chunk_tokens)
            microbatches.losses.zero_()  # what only the last stage of a pipeline fills
            if mesh.pp > 1:
                model.losses(microbatches)
            else:
                for a in range(len(microbatches)):
                    model(*microbatches(a))
            own = batch["requests"].to(mesh.device)
            for i, (numbers, sign) in enumerate([(microbatches.losses, -1), (loss.mistakes, 1)]):
                sums = numbers.double().sum(-1).flatten()  # [A * b]
                total[i].index_add_(0, own, sums[: len(own)], alpha=sign)
    mesh.sum_over_tokens(total)
    return Scored(*mesh.sum_over_pp(total).cpu().numpy())


class Share(NamedTuple):
    """One rank's share of the requests that all ranks score in one forward. All ranks have the same
    shape, so a rank may have fewer requests than rows."""

    requests: list[int]
    microbatches: int  # A
    rows: int  # b
    length: int  # T


def shares_of(requests: Sequence[ScoreRequest], mesh: Mesh, most_tokens: int) -> Iterator[Share]:
    """Yield the shares of a batch, those of the longest requests first: whether memory suffices is
    known at once. A pipeline gets a microbatch for each of its ranks."""
    # ranks have equal parts of a sequence
    unit = math.lcm(mesh.cp * len(mesh.parts), mesh.cp * mesh.tp)
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
    begin = 0
    while begin < len(order):
        longest = len(requests[order[begin]].tokens) - 1
        length = -(-longest // unit) * unit
        ranks = mesh.dp_size * mesh.pp
        left = -(-(len(order) - begin) // ranks)
        rows = min(max(1, most_tokens // length), left)
        stop = begin + rows * ranks
        own = order[begin:stop][mesh.dp_rank :: mesh.dp_size]
        yield Share(own, mesh.pp, rows, length)
        begin = stop


def batch_of(requests: Sequence[ScoreRequest], share: Share, mesh: Mesh) -> Batch:
    """Build a batch as data/loader.py does, of this rank's tokens, and `requests` int64 [n]: which
    request each of the first rows is. Padding is on the right, where causal attention does not
    look, and its labels do not count."""
    rows = share.microbatches * share.rows
    tokens = np.zeros((rows, share.length), np.int64)
    labels = np.full((rows, share.length), IGNORE, np.int64)
    for row, number in enumerate(share.requests):
        request = requests[number]
        count = len(request.tokens) - 1
        tokens[row, :count] = request.tokens[:-1]
        labels[row, count - request.scored : count] = request.tokens[-request.scored :]
    shape = share.microbatches, share.rows, -1
    token_ranges = mesh.token_ranges(share.length)
    batch = {"requests": torch.tensor(share.requests, dtype=torch.int64)}
    for name, array in {"tokens": tokens, "labels": labels}.items():
        batch[name] = torch.from_numpy(at(token_ranges, array)).view(shape)
    if mesh.zigzag:
        # attention to gathered keys is prepared for windows of the training length; for others it
        # needs the positions where sequences begin
        positions = torch.arange(share.length).expand(rows, -1)
        batch["positions"] = positions.reshape(*shape[:2], share.length)
    return batch
