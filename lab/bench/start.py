"""From the command to the end of the first step: a run of the debug preset, compared with the
barest script around the same model.

    python -m lab.bench.start [--rounds 5] [--json out.json] [--table.key=value ...]

- ours: `python train.py configs/llama_debug.toml`, until `metrics.jsonl` has its first line. The
  corpus is prepared beforehand.
- bare: `import torch`, build the same model with float32 masters by hand, one step of the same size
  on random tokens.
- import torch: that alone.
- 8B on 8 fake ranks: `train.build` of configs/llama_8b.toml as one of 8 ranks, on meta, sharded; no
  memory (the fill of the initial values is in lab/bench/init.py).
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from configs import program
from configs.load import load_config
from lab.bench import harness
from parallelisms import dp

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import torch
from models import llama
model = llama.FAMILY.build(llama.Args(**llama.NUMBERS.flavors["debug"])).to(torch.{dtype})
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
window = torch.randint(0, 4096, (8, 257))
torch.nn.functional.cross_entropy(model(window[:, :-1], torch.arange(256)).flatten(0, 1).float(), window[:, 1:].flatten()).backward()
for master, p in zip(masters, model.parameters()):
    master.grad = p.grad.float()
torch.nn.utils.clip_grad_norm_(masters, 1.0)
optimizer.step()
"""
SHARD = """
import torch
from torch import nn
from unittest import mock
import train
from configs.load import load_config
from tools.plan.trace import pretend
from training import init
with pretend(8, 8), mock.patch.object(nn.Module, "to_empty", lambda model, **_: model), mock.patch.object(init, "fill", lambda *_: None):
    train.build(load_config(["configs/llama_8b.toml", "--run.device=cpu", "--training.global_batch_size=8"], 8, 8))
"""


def until_the_first_step(command: list[str], metrics: Path | None) -> float:
    """Return the seconds until the file has a line, or until the command ends."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (metrics and metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    _, complaints = process.communicate()
    if process.returncode:
        raise RuntimeError(complaints[-2000:])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    dtype = str(dp.param_dtype(load_config(overrides).training, torch.device("cpu"))).removeprefix(
        "torch."
    )
    seconds: dict[str, list[float]] = {}
    for i in range(args.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            run = [
                sys.executable,
                "train.py",
                "configs/llama_debug.toml",
                f"--run.folder={folder}/run",
                "--training.steps=1",
                "--lr_schedule.warmup_steps=0",
                "--validation.interval=0",
                "--debug.sample_tokens=0",
                *overrides,
            ]
            contenders = {
                "ours": (run, Path(folder) / "run" / "metrics.jsonl"),
                "bare": ([sys.executable, "-c", BARE.format(dtype=dtype)], None),
                "import torch": ([sys.executable, "-c", "import torch"], None),
                "8B on 8 fake ranks, built": ([sys.executable, "-c", SHARD], None),
            }
            for name, (command, metrics) in contenders.items():
                spent = until_the_first_step(command, metrics)
                if i:  # the first round prepares the corpus and fills the page cache
                    seconds.setdefault(name, []).append(spent)
    rows = [
        [
            name,
            f"{statistics.median(times):.2f} s",
            f"{min(times):.2f} s",
            f"{harness.ratio(seconds, name, 'bare'):.2f}",
        ]
        for name, times in seconds.items()
    ]
    columns = ["what", "median", "fastest", "this / bare (median of pairs)"]
    harness.report(
        "From the command to the first step",
        columns,
        rows,
        f"{args.rounds} rounds in turn.",
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
