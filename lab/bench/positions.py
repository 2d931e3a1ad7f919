"""Measure the cost of the position that each rank keeps (reliability/position.py).

    python -m lab.bench.positions [--rounds 60] [--json out.json]

Contenders take turns: without positions, with them, and without them once more, which shows the
noise. Counted is processor time, so other work on the machine shows less. Three kinds of work:

- steps of 24 narrow blocks in four microbatches, in which the host does little but call small
  operators, so that the hooks weigh most; the jobs are in one process, and the main thread counts;
- the same for configs/llama_debug.toml;
- 500 all-reduces of gloo in a group of one rank, which send nothing, so that PyTorch's flight
  recorder weighs most; each contender is a process.

And what a block's hooks take in a microbatch when they are called by themselves, and the heartbeat in
a second in which the rank moves on.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import train
from configs import program
from configs.load import load_config
from configs.schema import Run
from lab.bench import harness
from parallelisms.mesh import close_mesh, open_group
from parallelisms.pp import stages_of
from reliability.position import Position

NARROW = (
    "--model.dim=32 --model.n_layers=24 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=36 --model.vocab_size=263 --data.tokenizer=bytes "
    "--training.param_dtype=float32 --training.seq_len=16 --training.local_batch_size=1 "
    "--training.global_batch_size=4"
).split()
DEBUG = ["configs/llama_debug.toml", "--training.global_batch_size=4"]
OF_STEPS = {"24 narrow blocks, 4 microbatches": NARROW, "llama_debug": DEBUG}
COLLECTIVES = 500
CALLS = 10_000
CONTENDERS = ("without", "with", "without again")
WATCHED = 10.0  # seconds


def step_of(options: list[str], position: Position | None) -> Callable[[], None]:
    """Return a step of a job on random tokens, with the phases of the loop."""
    job = train.build(load_config([*options, "--run.device=cpu"], 1))
    t = job.cfg.training
    shape = (t.global_batch_size // t.local_batch_size, t.local_batch_size, t.seq_len + 1)
    numbers = torch.randint(0, job.args.vocab_size, shape)
    batch = {"tokens": numbers[..., :-1], "labels": numbers[..., 1:]}
    if position:
        position.follow(stages_of(job.model), job.optimizer, 0)

    def step() -> None:
        if position:
            position.begin("data")
            position.begin("forward")
        train.train_step(job, batch)

    return step


def of_steps(options: list[str], position: Position, rounds: int) -> dict[str, list[float]]:
    steps = {name: step_of(options, position if name == "with" else None) for name in CONTENDERS}
    return harness.alternate(steps, rounds, warm_up=5, clock=time.thread_time)


def of_collectives(rounds: int) -> dict[str, list[float]]:
    module = ["-m", "lab.bench.positions", "--serve"]
    processes = {name: [*module, name] for name in CONTENDERS}
    return harness.in_turn(processes, rounds, warm_up=5)[0]


def serve(contender: str) -> None:
    """Serve the all-reduces of one contender for harness.in_turn."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000" if contender == "with" else "0"
    torch.set_num_threads(1)
    open_group(Run(device="cpu"))
    x = torch.ones(8)

    def collectives() -> None:
        for _ in range(COLLECTIVES):
            dist.all_reduce(x)

    harness.serve(collectives, clock=time.process_time)
    close_mesh()


def hook_seconds(position: Position) -> float:
    """Processor seconds of the hooks of one block in one microbatch, without PyTorch's way to them:
    before forward, after it, and before backward. The least of five."""
    x = torch.ones(8, requires_grad=True)
    found = []
    for _ in range(5):
        outputs = [x * 2 for _ in range(CALLS)]  # each gets one hook
        began = time.thread_time()
        for y in outputs:
            position._forward(0, None, ())
            position._end_forward(0, None, (), y)
            position._backward(0, 1, y)
        found.append((time.thread_time() - began) / CALLS)
    return min(found)


def heartbeat_seconds(position: Position) -> float:
    """Processor seconds of all other threads, in each second in which the rank moves on."""
    began = time.process_time() - time.thread_time()
    end = time.monotonic() + WATCHED
    while time.monotonic() < end:
        position.begin("forward")
        time.sleep(0.05)
    return (time.process_time() - time.thread_time() - began) / WATCHED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    torch.set_num_threads(1)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        position = Position(Path(folder) / "rank-00000.position", 0)
        position.open()
        heartbeat = heartbeat_seconds(position)
        hooks = hook_seconds(position)
        for work, options in OF_STEPS.items():
            measured[work] = of_steps(options, position, args.rounds)
        position.close(failed=False)
        close_mesh()
    measured[f"{COLLECTIVES} all-reduces of one rank"] = of_collectives(args.rounds)
    rows = []
    for work, seconds in measured.items():
        for name, values in seconds.items():
            median, least = (f"{of(values) * 1e3:.2f} ms" for of in (statistics.median, min))
            rows.append(
                [work, name, median, least, f"{harness.ratio(seconds, name, 'without'):.3f}"]
            )
    columns = ["work", "positions", "median", "least", "median of ratios to without"]
    notes = (
        f"Processor time, {args.rounds} rounds in turn, one thread. The hooks of a block take "
        f"{hooks * 1e6:.2f} us in a microbatch, the heartbeat {heartbeat * 1e3:.2f} ms in a second."
    )
    harness.report("Positions of ranks", columns, rows, notes, args.json)


if __name__ == "__main__":
    program.run(main)
