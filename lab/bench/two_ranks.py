"""Compare two processes that train one model with two that train one each: the cost of parallelism
on this machine.

    python -m lab.bench.two_ranks [--rounds 3] [--steps 5] [--json out.json] [--table.key=value ...]

`apart` is two runs at the same time, each of one process with half of the batch; `apart, as PP` is
the same in microbatches of the pipeline's size, whose matmuls are smaller. The others are one run
of two ranks on all of it (`lab.bench.sections --one`), every process with half of this machine's
threads. `bytes` are the messages of a step of one rank, traced (tools/plan/trace.py); `alone` is
how long these messages take between two ranks that do nothing else; `expected` is the sum of that
and of the time of `apart`. For a pipeline it is that of `apart, as PP`, lengthened by the planned
bubble. In turn, each in separate processes.
"""

import argparse
import json
import multiprocessing
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from configs import program
from configs.load import load_config
from configs.schema import Run
from lab.bench import harness
from lab.bench.sections import BENCH
from parallelisms import schedules
from parallelisms.mesh import close_mesh, open_group
from tools.plan.trace import trace_step

MODELS = {"debug": "", "d512": BENCH}
MESHES = {  # name: (options, data-parallel ranks, microbatches)
    "FSDP 2": ("", 2, 1),
    "DDP 2": ("--parallelism.data_parallel_replicate=2 --parallelism.data_parallel_shard=1", 2, 1),
    "TP 2": ("--parallelism.tensor_parallel=2", 1, 1),
    "PP 2": ("--parallelism.pipeline_parallel=2", 1, 8),
}
OPERATIONS = {
    "all-gather": dist.all_gather_into_tensor,
    "reduce-scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all-reduce": lambda whole, part: dist.all_reduce(whole),
    "send": lambda whole, part: dist.recv(whole, 0) if dist.get_rank() else dist.send(whole, 1),
    "receive": lambda whole, part: dist.send(whole, 0) if dist.get_rank() else dist.recv(whole, 1),
}


MOST_MICROBATCHES = max(microbatches for _, _, microbatches in MESHES.values())


def alone(messages: list[tuple[str, int]]) -> list[float]:
    """Return the seconds of each (kind, bytes of its larger side), of float32; both ranks call it."""
    open_group(Run())
    seconds = []
    for kind, size in messages:
        part = torch.zeros(-(-size // 8))
        run = partial(OPERATIONS[kind], torch.zeros(2 * len(part)), part)
        seconds.append(statistics.median(harness.alternate({kind: run}, 7)[kind]))
    close_mesh()
    return seconds


def messages_of(options: list[str]) -> Counter[tuple[str, int]]:
    """Return the messages of a step of one of two ranks, and how often each occurs."""
    torch.set_num_threads(1)
    counts: Counter[tuple[str, int]] = Counter()
    for _, times, op in trace_step(
        load_config(options, 2, 2), 2, 2, False, most=MOST_MICROBATCHES
    ).ops():
        if op.kind:
            counts[op.kind, op.message] += times
    return counts


def bubble(microbatches: int) -> float:
    """Return the share of a step in which the two ranks of a pipeline wait for each other, if they
    have the same work."""
    table = schedules.table("1f1b", 2, 1, microbatches)
    return schedules.bubble(
        schedules.timeline(
            table, [0, 1], lambda action: 2.0 if action.kind == schedules.BACKWARD else 1.0
        )
    )


def seconds_of(options: list[str], steps: int, **processes: int) -> float:
    return harness.child("lab.bench.sections", "--one", f"--rounds={steps}", *options, **processes)[
        "seconds"
    ]


def measure(model: str, rounds: int, steps: int, overrides: list[str]) -> list[list[str]]:
    base = [*MODELS[model].split(), *overrides]
    batch = load_config(base).training.global_batch_size
    half = [*base, f"--training.global_batch_size={batch // 2}"]
    halves = {"apart": batch // 2, "apart, as PP": batch // MOST_MICROBATCHES}
    runs = {
        name: [
            *base,
            *words.split(),
            f"--training.local_batch_size={batch // (ranks * microbatches)}",
        ]
        for name, (words, ranks, microbatches) in MESHES.items()
    }
    busy = {
        name: 1 - bubble(microbatches)
        for name, (words, _, microbatches) in MESHES.items()
        if "pipeline" in words
    }
    against = dict.fromkeys([*busy, "apart, as PP"], "apart, as PP")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        messages = {name: Counter() for name in halves} | {
            name: pool.apply(messages_of, (options,)) for name, options in runs.items()
        }
    every = sorted(set().union(*messages.values()))
    seconds, taken = ({name: [] for name in messages} for _ in range(2))
    for _ in range(rounds):
        each = dict(
            zip(
                every,
                harness.child("lab.bench.two_ranks", f"--alone={json.dumps(every)}", ranks=2)[
                    "seconds"
                ],
            )
        )
        for name in taken:
            taken[name].append(
                sum(times * each[message] for message, times in messages[name].items())
            )
        for name, local in halves.items():
            options = [*half, f"--training.local_batch_size={local}"]
            with ThreadPoolExecutor() as both:
                seconds[name].append(
                    max(both.map(partial(seconds_of, at_once=2), [options] * 2, [steps] * 2))
                )
        for name, options in runs.items():
            seconds[name].append(seconds_of(options, steps, ranks=2))
    rows = []
    for name, times in seconds.items():
        size = sum(size * times for (_, size), times in messages[name].items())
        apart = seconds[against.get(name, "apart")]
        expected = [time / busy.get(name, 1.0) + alone for time, alone in zip(apart, taken[name])]
        both = {"expected": expected, name: times}
        rows.append(
            [
                model,
                name,
                f"{statistics.median(times) * 1e3:,.0f} ms",
                f"{harness.ratio(seconds, name, 'apart'):.2f}",
                f"{size / 1e6:,.0f} MB",
                f"{statistics.median(taken[name]) * 1e3:,.0f} ms",
                f"{statistics.median(both['expected']) * 1e3:,.0f} ms",
                f"{harness.ratio(both, name, 'expected'):.2f}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument(
        "--alone", type=json.loads, help="one of two ranks that time these messages"
    )
    args, overrides = parser.parse_known_args()
    if args.alone:
        print(json.dumps({"seconds": alone(args.alone)}))
        return
    rows = [row for model in MODELS for row in measure(model, args.rounds, args.steps, overrides)]
    columns = [
        "model",
        "two processes",
        "median step",
        "to apart",
        "bytes",
        "alone",
        "expected",
        "of expected",
    ]
    harness.report(
        "Two processes together",
        columns,
        rows,
        f"{args.rounds} rounds of {args.steps} steps.",
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
