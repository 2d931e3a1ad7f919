"""Compare Muon with AdamW: the cost of a step, its parts, and the loss of a small model.

    python -m lab.bench.optimizers [--rounds 8] [--steps 200] [--seeds 5] [--json out.json]

The cost is that of the debug model (configs/llama_debug.toml), in one process. Steps of the two
alternate. Times are processor time of all threads. GFLOP are counted: those of forward and backward
by the formula that MFU uses, those of the Newton-Schulz iterations by the shapes of the matrices.
State is what the optimizer keeps.

The curves are of the small model of lab/bench/curve.py on the bytes of Python's standard library.
Each kind gets the learning rate that is best for its first seed among RATES. Losses are means over
the last 25 steps.
"""

import argparse
import functools
import statistics
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train
from configs import program
from configs.load import load_config
from lab.bench import harness
from lab.bench.curve import WINDOW, curve, windows
from parallelisms.gather_matrices import stacked
from tools.parity import in_memory
from training.muon import newton_schulz_flops
from training.optimizers import materialise

KINDS = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
DEBUG = [
    "--training.seq_len=256",
    "--training.global_batch_size=8",
    "--training.local_batch_size=8",
    "--model.vocab_size=4096",
    "--data.tokenizer=bytes",
]


def options_of(kind: str) -> list[str]:
    return [f"--optimizer.kind={kind}"]


def library() -> np.ndarray:
    """Return the bytes of the modules of Python's standard library, as token ids."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


class Cost(NamedTuple):
    step: float  # seconds of processor time
    optimizer: float  # the same
    gflop: float  # forward and backward
    gflop_optimizer: float  # GEMMs
    state: int  # bytes


def orthogonalisation_flops(optimizer: torch.optim.Optimizer) -> int:
    flops = 0
    for group in optimizer.param_groups:
        if group["rule"] == "Muon":
            for weight in group["params"]:
                matrices, rows, columns = stacked(weight).shape
                flops += matrices * newton_schulz_flops(rows, columns, group["ns_steps"])
    return flops


def costs(rounds: int) -> dict[str, Cost]:
    jobs = {}
    batches = {}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began = 0.0

    def begin(*_: object) -> None:
        nonlocal began
        began = time.process_time()

    text = np.random.default_rng(0).integers(0, 4096, 100_000).astype(np.uint16)
    for kind in KINDS:
        cfg = load_config([*DEBUG, *options_of(kind)])
        jobs[kind] = train.build(cfg)
        materialise(jobs[kind].optimizer)
        batches[kind] = in_memory.batches(cfg, jobs[kind].mesh, text)[0]
        jobs[kind].optimizer.register_step_pre_hook(begin)

    def step(kind: str) -> None:
        train.train_step(jobs[kind], batches[kind])

    def note(kind: str, *_: object) -> None:
        seconds[kind].append(time.process_time() - began)

    contenders = {}
    for kind in KINDS:
        jobs[kind].optimizer.register_step_post_hook(functools.partial(note, kind))
        contenders[kind] = functools.partial(step, kind)
    whole = harness.alternate(contenders, rounds, clock=time.process_time)
    found = {}
    for kind, job in jobs.items():
        family, args = train.architecture(job.cfg)
        training = job.cfg.training
        tokens = training.global_batch_size * training.seq_len
        kept = [t for state in job.optimizer.state.values() for t in state.values()]
        found[kind] = Cost(
            step=statistics.median(whole[kind]),
            optimizer=statistics.median(seconds[kind][-rounds:]),
            gflop=family.flops_per_token(args, training.seq_len) * tokens / 1e9,
            gflop_optimizer=orthogonalisation_flops(job.optimizer) / 1e9,
            state=sum(t.numel() * t.element_size() for t in kept),
        )
    return found


def best_rate(kind: str, steps: int, text: np.ndarray) -> tuple[float, dict[float, float]]:
    """And the loss at the end with each of RATES, of one seed."""
    ends = {}
    for rate in RATES:
        losses = curve([*options_of(kind), f"--optimizer.lr={rate}"], 0, steps, text)
        ends[rate] = statistics.fmean(losses[-WINDOW:])
    return min(ends, key=ends.__getitem__), ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for kind, cost in costs(args.rounds).items():
        rows.append(
            [
                kind,
                f"{cost.step * 1e3:.0f} ms",
                f"{cost.optimizer * 1e3:.1f} ms",
                f"{cost.optimizer / cost.step:.1%}",
                f"{cost.gflop:.1f}",
                f"{cost.gflop_optimizer:.1f}",
                f"{cost.state / 2**20:.1f}",
            ]
        )
    columns = ["kind", "step", "its optimizer", "share", "GFLOP", "of the optimizer", "state, MiB"]
    harness.report("What a step costs", columns, rows, "Debug model, one process.", args.json)

    text = library()
    seen = {}
    said = []
    for kind in KINDS:
        rate, ends = best_rate(kind, args.steps, text)
        tried = ", ".join(f"{r:g}: {loss:.3f}" for r, loss in ends.items())
        said.append(f"{kind}: loss by learning rate {tried}; {rate:g} is taken.")
        run = [*options_of(kind), f"--optimizer.lr={rate}"]
        seen[kind] = [windows(curve(run, s, args.steps, text)) for s in range(args.seeds)]
    rows = []
    for i in range(len(seen["adamw"][0])):
        row = [f"{i * WINDOW + 1} to {(i + 1) * WINDOW}"]
        for kind in KINDS:
            losses = [of_seed[i] for of_seed in seen[kind]]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            row.append(f"{statistics.fmean(losses):.4f} ± {spread:.4f}")
        rows.append(row)
    note = f"{args.seeds} seeds, mean ± deviation. {' '.join(said)}"
    harness.report("Loss curves", ["steps", *KINDS], rows, note, None)


if __name__ == "__main__":
    program.run(main)
