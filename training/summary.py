"""Summarise a run in its last log lines."""

import shlex
from pathlib import Path
from typing import Any

from configs import done, stages
from training.sample import Sampling, sample_stream
from training.validate import any_rank_stops


def summarise(run: Any, step: int) -> str:
    """Summarise a run: the loss, a sample if the run is done, where its files are, and how to go
    on. All ranks call it, because all of them compute the sample.

    run: a train.Session; step: the last one.
    """
    cfg = run.job.cfg
    meter = run.meter
    folder = Path(cfg.run.folder)
    steps = cfg.training.last_step
    shown = shlex.quote(str(folder))  # commands are copied
    lines = []
    if meter.last_loss is None and step >= steps:
        lines.append(done.sentence(folder, step, cfg.training))
    elif meter.last_loss is not None:
        lines.append(
            f"loss {meter.first_loss:.3f} -> {meter.last_loss:.3f} nats per token; "
            f"{run.metrics.summary()}"
        )
    if step == steps < stages.whole(cfg).training.last_step:
        return "\n".join(lines)  # another stage follows
    if cfg.debug.sample_tokens and step == steps:
        lines += sample_lines(run)
    if cfg.metrics.tensorboard:
        lines.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}")
    if cfg.checkpoint.store:
        store = cfg.checkpoint.store
        lines.append(f"checkpoints in {store}; try: python -m checkpoint.verify {store}")
    else:
        question = "--chat 'Hello'" if cfg.data.format == "chat" else "--prompt 'class '"
        lines.append(
            f"checkpoints in {folder / 'checkpoints'}; try: python -m tools.generate {shown} "
            f"{question}"
        )
    if run.stop.leaves:
        return f"after step {step} all ranks meet those that have come"
    if step < steps:
        lines.append(
            f"stopped on request after step {step} of {steps}; run the same command again to go on"
        )
    return "\n".join(lines)


def sample_lines(run: Any) -> list[str]:
    """Return debug.sample_prompt and the model's continuation, under a title. A stop on which all
    ranks agree cuts it short."""
    job = run.job
    debug = job.cfg.debug
    tokenizer = run.corpora.tokenizer
    ids = tokenizer.encode(debug.sample_prompt).tolist()
    how = Sampling(
        debug.sample_tokens,
        job.cfg.training.seq_len,
        [tokenizer.eot_id],
        debug.sample_temperature,
        multiple=job.mesh.tp,
    )
    title = "a sample from the final weights"
    for [token] in sample_stream(job.model, [ids], job.mesh.device, how):
        ids.append(token)
        if any_rank_stops(job.mesh, run.stop.asked())():
            title += ", cut short since the run is to stop"
            break
    text = tokenizer.decode(ids)
    return [f"{title}:", *("    " + line for line in text.splitlines())] if text else []
