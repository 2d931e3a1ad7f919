"""Compare the loss curves of the fast path and the plain one over 300 steps, and measure how far
apart seeds alone put them.

    python -m lab.bench.curve [--steps 300] [--seeds 4] [--json out.json] [--table.key=value ...]

Plain is float32, one process, nothing compiled; `fast` is bfloat16 with compiled blocks. A small
model reads this repository's own source. Curves are means over windows of 25 steps. The same seed
gives both the same weights and data. `fast - plain`, the mean over the seeds, must be smaller than
the spread (standard deviation over seeds) of the plain curve. Of a single seed it need not be:
rounding alone drives two runs apart after some hundred steps. Options --table.key=value apply to
the fast one.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch

import train
from configs import program
from configs.load import load_config
from lab.bench import harness
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


def source() -> np.ndarray:
    """Return the bytes of this repository's Python files, as token ids."""
    files = sorted(Path(__file__).resolve().parents[2].glob("[a-z]*/*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def curve(options: list[str], seed: int, steps: int, text: np.ndarray) -> list[float]:
    """Return the loss of every step on this text (bytes)."""
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
    """Return for each seed the mean loss of each window of steps."""
    return [windows(curve(options, seed, steps, text)) for seed in range(seeds)]


def compared(
    plain: list[list[float]], other: list[list[float]]
) -> list[tuple[float, float, float]]:
    """Return for each window of steps: plain loss and other - plain, means over the seeds, and the
    deviation of the plain loss over them."""
    rows = []
    for slow, quick in zip(zip(*plain, strict=True), zip(*other, strict=True), strict=True):
        mean = statistics.fmean(slow)
        rows.append((mean, statistics.fmean(quick) - mean, statistics.stdev(slow)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    torch.manual_seed(0)
    text = source()
    plain = curves(PLAIN, args.steps, args.seeds, text)
    seen = compared(plain, curves([*FAST, *overrides], args.steps, args.seeds, text))
    rows = [
        [
            f"{i * WINDOW + 1} to {(i + 1) * WINDOW}",
            f"{plain:.4f}",
            f"{apart:+.4f}",
            f"{spread:.4f}",
            f"{abs(apart) / spread:.2f}",
        ]
        for i, (plain, apart, spread) in enumerate(seen)
    ]
    columns = ["steps", "plain loss", "fast - plain", "deviation over seeds", "ratio"]
    harness.report(
        "Loss curves",
        columns,
        rows,
        f"{args.seeds} seeds; fast: {' '.join([*FAST, *overrides])}.",
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
