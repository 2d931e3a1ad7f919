"""Find the best learning rate at several widths, with and without transfer over width
(`model.width_base`): losses of small Llamas that are trained on the sources of Python's library.

    python -m lab.bench transfer [--widths 32 64 128 256] [--steps 120] [--seeds 1]
                                 [--kind adamw] [--picture out.svg]

Runs of one seed see the same bytes once; the schedule is linear, to 0. A loss is the mean of the last
tenth of a run's steps, and of all seeds. The best rate is the vertex of the parabola through the
three lowest neighbours, over the logarithm of the rate. The base is the largest width, whose runs are
the usual ones: at a base that is so narrow that a deviation of 0.02 is far below 1 / sqrt(width), all
widths would begin with weights that are too small.
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import train
from configs.load import load_config
from configs.schema import Config
from tools.ladder.page import COLORS, LEFT, TOP, Plot
from training.optim import learning_rate, set_learning_rate

BATCH, LENGTH = 4, 128
LAYERS = 2
HEAD = 16
RATES = [2.0**power for power in range(-12, -3)]
WAYS = {"usual": False, "transferred": True}
SHOWN = 0.8  # nats above the lowest loss


def options(width: int, base: int, seed: int, args: argparse.Namespace) -> list[str]:
    """Return the options of a run; base: of the transfer, or 0."""
    heads = width // HEAD
    return [
        "configs/llama_debug.toml",
        f"--run.seed={seed}",
        f"--model.dim={width}",
        f"--model.n_layers={LAYERS}",
        f"--model.n_heads={heads}",
        f"--model.n_kv_heads={heads}",
        f"--model.hidden_dim={3 * width}",
        "--model.vocab_size=512",
        "--data.tokenizer=bytes",
        f"--model.width_base={base}",
        f"--training.seq_len={LENGTH}",
        f"--training.global_batch_size={BATCH}",
        f"--training.steps={args.steps}",
        "--training.param_dtype=float32",
        "--lr_schedule.kind=linear",
        "--lr_schedule.min_ratio=0",
        "--lr_schedule.warmup_fraction=0.1",
        f"--optimizer.kind={args.kind}",
        "--run.device=cpu",
        "--compile.enabled=false",
    ]


def library() -> Tensor:
    """Return the sources of Python's library as bytes, int64, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def loss_of(text: Tensor, rate: float, width: int, base: int, args: argparse.Namespace) -> float:
    """Train with each seed, and return the mean loss at the end in nats per byte."""
    configs = [load_config(options(width, base, seed, args), 1, 1) for seed in range(args.seeds)]
    return float(np.mean([loss_of_seed(text, rate, cfg) for cfg in configs]))


def loss_of_seed(text: Tensor, rate: float, cfg: Config) -> float:
    job = train.build(cfg)
    steps = cfg.training.steps
    generator = torch.Generator().manual_seed(cfg.run.seed)
    order = torch.randperm(len(text) // (LENGTH + 1), generator=generator)
    losses = []
    for step in range(steps):
        lr = learning_rate(step, steps, rate, cfg.lr_schedule)
        set_learning_rate(job.optimizer, lr)
        rows = order[step * BATCH : (step + 1) * BATCH, None] * (LENGTH + 1)
        windows = text[rows + torch.arange(LENGTH + 1)]
        batch = {"tokens": windows[None, :, :-1], "labels": windows[None, :, 1:]}
        losses.append(train.train_step(job, batch).loss)
    return float(np.mean(losses[-max(1, steps // 10) :]))


def best_rate(losses: list[float]) -> float:
    """Return the rate of the lowest loss, between those that were tried."""
    at = int(np.nanargmin(losses))
    if at in (0, len(RATES) - 1):
        return RATES[at]
    x = np.log2(RATES[at - 1 : at + 2])
    square, slope, _ = np.polyfit(x, losses[at - 1 : at + 2], 2)
    return float(2 ** (-slope / (2 * square)))


def picture(measured: dict[tuple[str, int], list[float]], widths: list[int]) -> str:
    """Return the SVG of losses over learning rates: solid lines of transferred rates."""
    lowest = min(min(row) for row in measured.values())
    title = "Loss over the learning rate, with transfer over width (solid) and without (dashed)"
    plot = Plot((RATES[0], RATES[-1]), (lowest, lowest + SHOWN), log=True, title=title)
    plot.axes("learning rate", "loss, nats per byte")
    for (way, width), losses in measured.items():
        points = [(x, y) for x, y in zip(RATES, losses, strict=True) if y < lowest + SHOWN]
        plot.curve(points, COLORS[widths.index(width)], "none" if WAYS[way] else "5 4")
    for row, (width, color) in enumerate(zip(widths, COLORS, strict=False)):
        y = TOP + 20 * (row + 1)
        plot.picture.rect((LEFT + 260, y - 10, 12, 12), color)
        plot.picture.text(LEFT + 278, y, f"width {width}", "s")
    return plot.picture.svg()


def main() -> None:
    parser = argparse.ArgumentParser("python -m lab.bench transfer", description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kind", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    text = library()
    measured = {}
    print(f"{'':12}{'width':>6}" + "".join(f"{rate:9.2g}" for rate in RATES) + f"{'best':>10}")
    for way, is_transferred in WAYS.items():
        for width in args.widths:
            base = args.widths[-1] if is_transferred else 0
            losses = measured.get(("usual", width)) if width == base else None
            losses = losses or [loss_of(text, rate, width, base, args) for rate in RATES]
            measured[way, width] = losses
            cells = "".join(f"{loss:9.3f}" for loss in losses)
            print(f"{way:12}{width:6}{cells}{best_rate(losses):10.4f}", flush=True)
        best = [best_rate(measured[way, width]) for width in args.widths]
        print(f"{way}: the best rates are within a factor of {max(best) / min(best):.2f}")
        widest = measured[way, args.widths[-1]]
        reached = float(np.interp(np.log2(best[0]), np.log2(RATES), widest))
        print(
            f"  width {args.widths[-1]} at the best rate of width {args.widths[0]}: {reached:.3f}, "
            f"{reached - min(widest):.3f} above its lowest loss"
        )
    if args.picture:
        args.picture.write_text(picture(measured, args.widths), encoding="utf-8")
