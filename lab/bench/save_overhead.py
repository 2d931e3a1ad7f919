"""Measure how much longer a step takes while a checkpoint is being written.

    python -m lab.bench.save_overhead [--tensors 1137] [--gigabytes 1] [--rounds 10] [--folder DIR] [--json out.json]

The step is host-bound, as the step of a small model on a GPU is: one Python thread that calls
thousands of small operations. A save that holds the GIL shows here first. The state has as many
tensors as that of 405B (1,137 weights and their moments), so that overhead per tensor shows too.
Three kinds of step alternate: without a save, during a save, and during a save-like load of a
different process, which hashes and writes as many bytes. What the last one costs is due to the
machine: memory, caches, the kernel. A step's time is wall-clock time minus the time that it waited
for a core, as Linux counts it, so other work on the machine shows less. The step itself never
blocks, so its pauses (voluntary context switches) are waits for the GIL. The save needs a core that
the step leaves free.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from checkpoint.manager import CheckpointManager
from configs import program
from configs.schema import Checkpoint, Parallelism, Run
from lab.bench import harness
from parallelisms.mesh import close_mesh, open_mesh

OPERATIONS = 3000  # of a step, about 2 us each


WRITER = """
import os, sys, xxhash
data = memoryview(bytearray(os.urandom(1 << 20)) * (int(sys.argv[2]) >> 20))
for i, _ in enumerate(sys.stdin):
    with open(f"{sys.argv[1]}-{i}", "xb") as stream:
        stream.write(data)
        for start in range(0, len(data), 1 << 24):
            xxhash.xxh3_64_hexdigest(data[start : start + (1 << 24)])
        stream.flush()
        os.fsync(stream.fileno())
    print(flush=True)
    if i:
        os.remove(f"{sys.argv[1]}-{i - 1}")
"""


def waited_for_a_core() -> float:
    """Return the seconds that this thread could have run and had no core. Linux counts them;
    elsewhere 0."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def step_seconds(x: torch.Tensor) -> tuple[float, int]:
    """Return the seconds of one step without waits for a core, and its pauses."""
    began = time.perf_counter()
    waited = waited_for_a_core()
    paused = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(OPERATIONS):
        torch.add(x, 1)
    seconds = time.perf_counter() - began - (waited_for_a_core() - waited)
    return seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - paused


def measure(
    folder: Path, tensors: int, elements: int, rounds: int
) -> tuple[dict[str, list[tuple[float, int]]], list[float]]:
    """`step_seconds` of each step, by what ran at the same time, and of each save until it is
    durable."""
    mesh = open_mesh(Run(device="cpu"), Parallelism(), 1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointManager(
        Checkpoint(keep_last=1), folder / "checkpoints", mesh, {"must_match": {}}
    )
    # nothing is there yet; as in every run, this makes the buffers
    checkpoints.load(model, optimizer)
    x = torch.ones(8)
    durable = []
    steps: dict[str, list[tuple[float, int]]] = {
        "without a save": [],
        "during a save": [],
        "while another process writes": [],
    }
    command = [sys.executable, "-c", WRITER, str(folder / "other"), str(tensors * elements * 12)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        os.set_blocking(other.stdout.fileno(), False)
        for i in range(1, rounds + 2):
            alone = [step_seconds(x) for _ in range(40)]
            during = []
            with_other = []
            checkpoints.save(i, model, optimizer, {})
            # how long a step waits for the copy is what `lab.bench.checkpoint` measures
            checkpoints.wait_for_copy()
            began = time.perf_counter()
            while checkpoints.writing():
                during.append(step_seconds(x))
            seconds = time.perf_counter() - began
            checkpoints.poll()
            os.sync()
            other.stdin.write(b"\n")
            other.stdin.flush()
            while not other.stdout.read(1):
                with_other.append(step_seconds(x))
            os.sync()
            if i > 1:  # the first save plans, and touches memory for the first time
                durable.append(seconds)
                for row, seen in zip(steps.values(), (alone, during, with_other), strict=True):
                    row += seen
        other.stdin.close()
    checkpoints.close()
    close_mesh()
    return steps, durable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=1137, help="weights; each has two moments")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", help="on the disk to measure [a temporary folder]")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        elements = int(args.gigabytes * 1e9 / 12 / args.tensors)
        steps, durable = measure(Path(folder), args.tensors, elements, args.rounds)
    quiet = [seconds for seconds, _ in steps["without a save"]]
    table = []
    for name, pairs in steps.items():
        row = [seconds for seconds, _ in pairs]
        ratios = (of(row) / of(quiet) for of in (statistics.median, statistics.mean))
        times = (f"{of(row) * 1e3:.2f} ms" for of in (statistics.median, statistics.mean))
        pauses = sum(paused for _, paused in pairs) / args.rounds
        table.append(
            [name, f"{len(row)}", *times, *(f"{ratio:.3f}" for ratio in ratios), f"{pauses:.0f}"]
        )
    columns = [
        "step",
        "steps",
        "median",
        "mean",
        "median / without",
        "mean / without",
        "pauses in a round",
    ]
    notes = (
        f"{args.tensors * 3:,} tensors, {args.gigabytes:g} GB; a save takes "
        f"{statistics.median(durable):.2f} s."
    )
    harness.report("A step during a save", columns, table, notes, args.json)


if __name__ == "__main__":
    program.run(main)
