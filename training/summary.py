"""Summarise a run in its last log lines."""

from pathlib import Path
from typing import Any

from configs import done
from training.meter import Meter
from training.metrics import MetricsWriter
from training.sample import sample


def summarise(job: Any, tokenizer: Any, step: int, meter: Meter, metrics: MetricsWriter) -> str:
    """Summarise a run: the loss, a sample if the run is done, where its files are, and how to go
    on. All ranks call it, because all of them compute the sample.

    job: a train.Job; tokenizer: a data/tokenizer.py::Tokenizer; step: the last one.
    """
    cfg = job.cfg
    folder = Path(cfg.run.folder)
    steps = cfg.training.last_step
    lines = []
    if meter.last_loss is None and step >= steps:
        lines.append(done.sentence(folder, step, cfg.training))
    elif meter.last_loss is not None:
        lines.append(
            f"loss {meter.first_loss:.3f} -> {meter.last_loss:.3f} nats per token; "
            f"{metrics.summary()}"
        )
    if cfg.debug.sample_tokens and step == steps:
        text = sample_text(job, tokenizer)
        if text:
            lines.append("a sample from the final weights:")
            lines += ["    " + line for line in text.splitlines()]
    lines.append(f"tensorboard --logdir {folder / 'tensorboard'}")
    if cfg.checkpoint.store:
        store = cfg.checkpoint.store
        lines.append(f"checkpoints in {store}; try: python -m checkpoint.verify {store}")
    else:
        question = "--chat 'Hello'" if cfg.data.format == "chat" else "--prompt 'class '"
        lines.append(
            f"checkpoints in {folder / 'checkpoints'}; try: python -m tools.generate {folder} "
            f"{question}"
        )
    if step < steps:
        lines.append(
            f"stopped on request after step {step} of {steps}; run the same command again to go on"
        )
    return "\n".join(lines)


def sample_text(job: Any, tokenizer: Any) -> str:
    """Return debug.sample_prompt and the model's continuation."""
    debug = job.cfg.debug
    ids = sample(
        job.model,
        tokenizer.encode(debug.sample_prompt).tolist(),
        debug.sample_tokens,
        job.cfg.training.seq_len,
        job.mesh.device,
        [tokenizer.eot_id],
        temperature=debug.sample_temperature,
        multiple=job.mesh.tp,
    )
    return tokenizer.decode(ids)
