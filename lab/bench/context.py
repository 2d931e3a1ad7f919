"""Measure the cost and savings of context parallelism: seconds of a step and memory, by length of
the sequence, ranks and method.

    python -m lab.bench.context [--lengths 2048,8192] [--ranks 2,4] [--rounds 5]
                                  [--json out.json] [--table.key=value ...]

A step of the debug model on one sequence, by `train.train_step`, on one process and on the ranks of
a cp group. All ranks share this machine's processors, so the wall time only says how much work
there is in all. The processor seconds of the busiest rank are what a rank with dedicated processors
would need, without the time of messages. Memory is what tensors hold at the peak of a step, as
`tools/plan/trace.py` counts it, on the fullest rank. A ratio compares with one process and the same
length, measured directly before.
"""

import argparse
import json
import statistics
import time

import train
from configs import program
from configs.load import load_config
from lab.bench import harness
from parallelisms import mesh as meshes
from tools.plan import trace

MIB = 2**20


def measure(rounds: int, overrides: list[str]) -> None:
    """Measure on one rank of a group; rank 0 prints the largest of all ranks' figures as JSON."""
    here = meshes.world()
    job = train.build(load_config(overrides, here.size, here.size))
    batch = trace.batch_of(job, 1)
    wall = []
    busy = []
    for _ in range(2 + rounds):
        began = time.perf_counter()
        worked = time.process_time()
        train.train_step(job, batch)
        wall.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    with trace.Trace() as accountant:
        step = trace.run_step(accountant, job, batch, 1)
    live, _, kinds = step.peak()
    most = step.highest_by_kind()
    wall_time = statistics.median(wall[2:])
    processor_time = statistics.median(busy[2:])
    rows = job.mesh.gather([wall_time, processor_time, live, most.get("activations", 0)])
    if here.rank == 0:
        print(json.dumps([max(column) for column in zip(*rows)]))


def table_of(
    lengths: list[int], ranks: list[int], rounds: int, overrides: list[str]
) -> list[list[str]]:
    rows = []
    for length in lengths:
        shape = [
            f"--training.seq_len={length}",
            f"--model.max_seq_len={length}",
            "--training.global_batch_size=1",
            "--training.local_batch_size=1",
            *overrides,
        ]
        first = None
        for cp, method in [
            (1, "gather"),
            *((cp, method) for cp in ranks for method in ("gather", "ulysses")),
        ]:
            options = [
                *shape,
                f"--parallelism.context_parallel={cp}",
                f"--parallelism.context_parallel_method={method}",
            ]
            figures = harness.child(
                "lab.bench.context", "--measure", str(rounds), *options, ranks=cp
            )
            first = first or figures
            ratios = [f"{a / b:.2f}" for a, b in zip(figures, first)]
            wall, busy, live, activations = figures
            rows.append(
                [
                    f"{length:,}",
                    str(cp),
                    method if cp > 1 else "",
                    f"{wall:.2f} s",
                    ratios[0],
                    f"{busy:.2f} s",
                    ratios[1],
                    f"{live / MIB:.0f} MiB",
                    ratios[2],
                    f"{activations / MIB:.0f} MiB",
                    ratios[3],
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    # of one rank, for `harness.child`
    parser.add_argument("--measure", type=int, default=0, help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.measure:
        return measure(args.measure, overrides)
    lengths = [int(text) for text in args.lengths.split(",")]
    ranks = [int(text) for text in args.ranks.split(",")]
    rows = table_of(lengths, ranks, args.rounds, overrides)
    columns = [
        "tokens",
        "cp",
        "method",
        "wall time",
        "ratio",
        "processor time of a rank",
        "ratio",
        "live at the peak",
        "ratio",
        "activations",
        "ratio",
    ]
    notes = f"The debug model, one sequence. Medians of {args.rounds} steps."
    harness.report(
        "A training step by length of the sequence and context parallelism",
        columns,
        rows,
        notes,
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
