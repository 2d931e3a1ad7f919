"""Measure the effect of bfloat16 in AdamW's averages and in the reduction of gradients: loss
curves, and how far apart seeds alone put them.

    python -m lab.bench.moments [--steps 300] [--seeds 5] [--json out.json]

The model and the windows of steps are those of `lab.bench.curve`, with fewer layers; weights are
float32. `nearest` rounds the averages to the nearest bfloat16, which is what training/narrow_adamw.py
does not do: it is here to show why. Each row is compared with float32 at its own beta2.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs import program
from lab.bench import curve, harness
from training import narrow_adamw

SMALL = [*curve.PLAIN, "--model.dim=64", "--model.n_layers=2", "--model.hidden_dim=160"]
SMALL += ["--training.seq_len=64"]
NARROW = "--optimizer.moment_dtype=bfloat16"
SLOW = "--optimizer.betas=[0.9, 0.999]"
# contender -> (its options, what it is compared with); on two ranks where it reduces
ONE = "float32"
ONE_SLOW = "float32, beta2 0.999"
REDUCED = "gradients reduced in bfloat16"
CONTENDERS = {
    ONE: ([], ONE),
    "bfloat16 averages": ([NARROW], ONE),
    REDUCED: (
        [
            "--training.reduce_dtype=bfloat16",
            "--parallelism.data_parallel_replicate=2",
            "--training.local_batch_size=4",
        ],
        ONE,
    ),
    ONE_SLOW: ([SLOW], ONE_SLOW),
    "bfloat16 averages, beta2 0.999": ([NARROW, SLOW], ONE_SLOW),
    "nearest, beta2 0.999": ([NARROW, SLOW], ONE_SLOW),
}


def nearest(x: Tensor, bits: Tensor) -> Tensor:
    """Round to the nearest bfloat16, replacing `narrow_adamw.rounded`."""
    return x


def measure(name: str, steps: int, seeds: int, text: Path) -> list[list[float]]:
    if name.startswith("nearest"):
        narrow_adamw.rounded = nearest
    return curve.curves([*SMALL, *CONTENDERS[name][0]], steps, seeds, np.load(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json")
    # of one contender, for `harness.child`
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps, args.seeds, args.text)), flush=True)
        return
    sizes = [f"--steps={args.steps}", f"--seeds={args.seeds}"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.npy")
        np.save(text, curve.source())
        for name in CONTENDERS:
            found[name] = harness.child(
                "lab.bench.moments",
                f"--measure={name}",
                f"--text={text}",
                *sizes,
                ranks=2 if name == REDUCED else 1,
            )
            print(name, [round(x, 4) for x in map(statistics.fmean, zip(*found[name]))], flush=True)
    rows = []
    for name, (_, plain) in CONTENDERS.items():
        if name == plain:
            continue
        seen = curve.compared(found[plain], found[name])
        ratios = [abs(apart) / spread for _, apart, spread in seen]
        last, apart, spread = seen[-1]
        rows.append(
            [
                name,
                f"{last:.4f}",
                f"{apart:+.4f}",
                f"{spread:.4f}",
                f"{max(ratios):.2f}",
                f"{statistics.median(ratios):.2f}",
            ]
        )
    columns = ["", "float32's loss", "difference", "deviation over seeds", "most", "median"]
    notes = (
        f"{args.seeds} seeds, {args.steps} steps; the last {curve.WINDOW} of them; most and median"
    )
    harness.report(
        "Averages in bfloat16",
        columns,
        rows,
        f"{notes}: difference / deviation over all windows.",
        args.json,
        found,
    )


if __name__ == "__main__":
    program.run(main)
