"""How much longer a step takes while a checkpoint is being written.

    python -m tools.bench.beside [--tensors 1137] [--gigabytes 1] [--rounds 10] [--folder DIR] [--json out.json]

The step is bound by the host, as the step of a small model on a GPU is: one thread of Python that calls thousands of small
operations. A save that holds Python's lock, or works in it, shows here first. The state has as many tensors as that of
405B (1,137 weights and their moments), so that work for each tensor shows too. Steps without a save and steps beside one
alternate in one process. A save has to have a core that the step leaves free.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from checkpoint.manager import CheckpointManager
from configs.schema import Checkpoint, Parallelism, Run
from parallelisms.mesh import close_mesh, open_mesh
from tools.bench import harness

OPERATIONS = 3000  # of a step, about 2 us each


def step_seconds(x: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(OPERATIONS):
        torch.add(x, 1)
    return time.perf_counter() - began


def measure(folder: Path, tensors: int, elements: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step without a save, of each step beside a save, and of each save until it is durable."""
    mesh = open_mesh(Run(device="cpu"), Parallelism(), 1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointManager(Checkpoint(keep_last=1), folder / "checkpoints", mesh, {"must_match": {}})
    checkpoints.load(model, optimizer)  # nothing is there yet; as in every run, this makes the buffers
    x, quiet, beside, durable = torch.ones(8), [], [], []
    for i in range(1, rounds + 2):
        alone = [step_seconds(x) for _ in range(40)]
        checkpoints.save(i, model, optimizer, {})
        checkpoints.wait_for_copy()  # how long a step waits for the copy is what `tools.bench.checkpoint` measures
        began, together = time.perf_counter(), []
        while checkpoints.writing():
            together.append(step_seconds(x))
        if i > 1:  # the first save plans, and touches memory for the first time
            quiet += alone
            beside += together
            durable.append(time.perf_counter() - began)
        checkpoints.poll()
        os.sync()
    checkpoints.close()
    close_mesh()
    return quiet, beside, durable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1137, help="weights; each has two moments")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", help="on the disk to measure [a temporary folder]")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        quiet, beside, durable = measure(Path(folder), args.tensors, int(args.gigabytes * 1e9 / 12 / args.tensors), args.rounds)
    rows = [("without a save", quiet), ("beside a save", beside)]
    table = [[name, f"{len(steps)}", *(f"{of(steps) * 1e3:.2f} ms" for of in (statistics.median, statistics.mean)),
              *(f"{of(steps) / of(quiet):.3f}" for of in (statistics.median, statistics.mean))] for name, steps in rows]  # fmt: skip
    columns = ["step", "steps", "median", "mean", "median / without", "mean / without"]
    notes = f"{args.tensors * 3:,} tensors, {args.gigabytes:g} GB; a save takes {statistics.median(durable):.2f} s."
    harness.report("A step beside a save", columns, table, notes, args.json)


if __name__ == "__main__":
    main()
