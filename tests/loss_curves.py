"""Loss curves of a small model under two sets of options, over several seeds.

The same seed gives both the same weights and data. Curves are means over windows of 25 steps. Of a
single seed two curves need not be near: rounding alone drives two runs apart after some hundred
steps.
"""

import statistics

import numpy as np

import train
from configs.load import load_config
from tools.parity import in_memory

MODEL = (
    "--model.dim=96 --model.n_layers=3 --model.n_heads=4 --model.n_kv_heads=2 "
    "--model.hidden_dim=256 --model.vocab_size=257 "
    "--data.tokenizer=bytes --training.seq_len=96 --training.global_batch_size=8 "
    "--training.local_batch_size=8 "
    "--optimizer.lr=2e-3 --lr_schedule.warmup_steps=20"
).split()
PLAIN = ["--training.param_dtype=float32"]
FAST = ["--training.param_dtype=bfloat16", "--compile.enabled=true"]
WINDOW = 25


def curve(options: list[str], seed: int, steps: int, text: np.ndarray) -> list[float]:
    """The loss of every step on this text (bytes)."""
    cfg = load_config([*MODEL, f"--run.seed={seed}", f"--training.steps={steps}", *options])
    job = train.build(cfg)
    batches = in_memory.batches(cfg, job.mesh, text)
    losses = []
    for step in range(steps):
        train.set_learning_rate(
            job.optimizer, train.learning_rate(step, steps, cfg.optimizer.lr, cfg.lr_schedule)
        )
        losses.append(train.train_step(job, batches[step]).loss)
    return losses


def windows(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[a : a + WINDOW]) for a in range(0, len(losses), WINDOW)]


def curves(options: list[str], steps: int, seeds: int, text: np.ndarray) -> list[list[float]]:
    """For each seed the mean loss of each window of steps."""
    return [windows(curve(options, seed, steps, text)) for seed in range(seeds)]


def compared(
    plain: list[list[float]], other: list[list[float]]
) -> list[tuple[float, float, float]]:
    """For each window of steps: plain loss and other - plain, means over the seeds, and the
    deviation of the plain loss over them."""
    rows = []
    for slow, quick in zip(zip(*plain, strict=True), zip(*other, strict=True), strict=True):
        mean = statistics.fmean(slow)
        rows.append((mean, statistics.fmean(quick) - mean, statistics.stdev(slow)))
    return rows
