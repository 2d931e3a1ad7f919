"""Measure whether FSDP's all-gathers overlap with compute: steps whose all-gathers take a stated
time, on a simulated wire, which sleeps.

    python -m lab.bench.overlap [--rounds 7] [--json out.json] [--table.key=value ...]

Rank 0 of 8 on PyTorch's fake process group, with a real model that computes. An all-gather copies
its result at once and is done when the wire has had the time for its bytes, one transfer after the
other, without using a processor. The wire's speed is chosen so that all all-gathers of a step take
a given share of its compute time. `exposed` is how much longer the step is than without a wire,
relative to the time that the wire was in use.

A GPU has streams, which make every all-gather asynchronous (FSDP2's implicit prefetch). A CPU has
none: there FSDP2 blocks on each all-gather unless `_set_unshard_async_op` is set, as it is here for
the rows with prefetch. Its reduce-scatters always block on a CPU, so they are not on the wire.
"""

import argparse
import queue
import statistics
import threading
import time
from functools import partial
from itertools import product

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import train
from configs import program
from configs.load import load_config
from lab.bench import harness
from lab.bench.sections import BENCH
from tools.plan.trace import batch_of, pretend

RANKS = 8
SHARES = (0.25, 0.5, 0.75)  # of the step's computing, that the wire is in use
PREFETCH = (0, 1, 2)
OPTIONS = (
    f"{BENCH} --training.param_dtype={harness.narrow()} --training.local_batch_size=2 "
    f"--training.global_batch_size={2 * RANKS}"
)


class Wire:
    """Transfers, one after the other."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.bytes = 0
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        free = 0.0
        while True:
            seconds, asked, done = self.queue.get()
            free = max(free, asked) + seconds
            time.sleep(max(0.0, free - time.monotonic()))
            done.set()

    def send(self, size: int) -> threading.Event:
        done = threading.Event()
        seconds = size * self.seconds_per_byte
        self.bytes += size
        if seconds:
            self.queue.put((seconds, time.monotonic(), done))
        else:
            done.set()
        return done


class Gather(DefaultAllGather):
    """Gather as if every rank had the same shard as this one."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # which is a part of it
        done = self.wire.send(output_tensor.nbytes)
        return done if async_op else done.wait() and None


class Scatter(DefaultReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])


def built(prefetch: int, wire: Wire, overrides: list[str]) -> train.Job:
    job = train.build(
        load_config(
            [*OPTIONS.split(), f"--parallelism.prefetch={prefetch}", *overrides], RANKS, RANKS
        )
    )
    for module in job.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather(wire))
            module.set_custom_reduce_scatter(Scatter())
            module._set_unshard_async_op(prefetch > 0)
    return job


def measure(rounds: int, overrides: list[str]) -> list[list[str]]:
    wire = Wire()
    jobs = {prefetch: built(prefetch, wire, overrides) for prefetch in PREFETCH}
    batch = batch_of(jobs[0], 1)

    def step(prefetch: int, wire_seconds: float) -> None:
        """Return a step on a wire that is in use for `wire_seconds`, if the all-gathers have as
        many bytes as in the previous step."""
        wire.seconds_per_byte = wire_seconds / max(1, wire.bytes)
        wire.bytes = 0
        train.train_step(jobs[prefetch], batch)

    computing = statistics.median(harness.alternate({"": lambda: step(0, 0.0)}, 5)[""])
    contenders = {}
    for prefetch, share in product(PREFETCH, (0.0, *SHARES)):
        contenders[prefetch, share] = partial(step, prefetch, share * computing)
    seconds = harness.alternate(contenders, rounds)
    rows = []
    for prefetch, share in product(PREFETCH, SHARES):
        with_ = seconds[prefetch, share]
        without = seconds[prefetch, 0.0]
        more = statistics.median(a - b for a, b in zip(with_, without))
        times = (statistics.median(without), share * computing, statistics.median(with_))
        name = str(prefetch) if prefetch else "0: waits"
        rows.append(
            [name, *(f"{t * 1e3:,.0f} ms" for t in times), f"{more / (share * computing):.0%}"]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    with pretend(RANKS, RANKS):
        rows = measure(args.rounds, overrides)
    columns = ["prefetch", "step without a wire", "wire in use", "step", "exposed"]
    harness.report(
        "Gathers behind computing", columns, rows, f"{args.rounds} alternating rounds.", args.json
    )


if __name__ == "__main__":
    program.run(main)
