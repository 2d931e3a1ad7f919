"""Two processes that train one model against two that train one each: what working together costs on this machine.

    python -m tools.bench.together [--rounds 3] [--steps 5] [--json out.json] [--table.key=value ...]

`apart` is two runs at the same time, each of one process with half of the batch; the others are one run of two ranks on all of
it (`tools.bench.sections --one`), every process with half of this machine's threads. `bytes` are the messages of a step of one
rank, traced (tools/trace.py); `expected` is the time of `apart` and that of these bytes at the rate at which gloo gathers
between two ranks that do nothing else. In turn, each in processes of their own.
"""

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from configs.load import load_config
from configs.schema import Run
from parallelisms.mesh import close_mesh, open_group
from tools import trace
from tools.bench import harness
from tools.bench.sections import BENCH

MODELS = {"debug": "", "d512": BENCH}
MESHES = {
    "FSDP 2": "", "DDP 2": "--parallelism.data_parallel_replicate=2 --parallelism.data_parallel_shard=1",
    "TP 2": "--parallelism.tensor_parallel=2",
}  # fmt: skip
MESSAGE = 8 * 2**20  # bytes


def gather_rate() -> float:
    """Bytes per second of an all-gather of MESSAGE bytes; both ranks call it."""
    open_group(Run())
    whole, mine = torch.empty(MESSAGE, dtype=torch.uint8), torch.ones(MESSAGE // 2, dtype=torch.uint8)
    seconds = harness.alternate({"gather": lambda: dist.all_gather_into_tensor(whole, mine)}, 20)["gather"]
    close_mesh()
    return MESSAGE / statistics.median(seconds)


def moved(options: list[str]) -> int:
    """Bytes of all messages of a step of one of two ranks."""
    torch.set_num_threads(1)
    step = trace.traced(load_config(options, 2, 2), 2, 2, False)
    return sum(times * op.message for _, times, op in step.ops() if op.kind)


def seconds_of(options: list[str], steps: int, **processes: int) -> float:
    return harness.child("tools.bench.sections", "--one", f"--rounds={steps}", *options, **processes)["seconds"]


def measure(model: str, rounds: int, steps: int, overrides: list[str]) -> list[list[str]]:
    base = [*MODELS[model].split(), *overrides]
    batch = load_config(base).training.global_batch_size
    half = [*base, *(f"--training.{name}_batch_size={batch // 2}" for name in ("local", "global"))]
    share = {name: batch // (1 if name == "TP 2" else 2) for name in MESHES}
    runs = {name: [*base, *words.split(), f"--training.local_batch_size={share[name]}"] for name, words in MESHES.items()}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        sizes = {name: pool.apply(moved, (options,)) for name, options in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("apart", *runs)}
    rates = []
    for _ in range(rounds):
        rates.append(harness.child("tools.bench.together", "--rate", ranks=2)["rate"])
        with ThreadPoolExecutor() as both:
            seconds["apart"].append(max(both.map(lambda _: seconds_of(half, steps, beside=2), range(2))))
        for name, options in runs.items():
            seconds[name].append(seconds_of(options, steps, ranks=2))
    rows = []
    for name, times in seconds.items():
        middle, size = statistics.median(times), sizes.get(name, 0)
        expected = statistics.median(seconds["apart"]) + size / statistics.median(rates)
        rows.append([
            model, name, f"{middle * 1e3:,.0f} ms", f"{harness.ratio(seconds, name, 'apart'):.2f}", f"{size / 1e6:,.0f} MB",
            f"{expected * 1e3:,.0f} ms", f"{middle / expected:.2f}",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    print(f"gloo gathers {statistics.median(rates) / 1e9:.2f} GB/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--rate", action="store_true", help="one of two ranks of the gather")
    args, overrides = parser.parse_known_args()
    if args.rate:
        print(json.dumps({"rate": gather_rate()}))
        return
    rows = [row for model in MODELS for row in measure(model, args.rounds, args.steps, overrides)]
    columns = ["model", "two processes", "median step", "to apart", "bytes", "expected", "of expected"]
    harness.report("Two processes together", columns, rows, f"{args.rounds} rounds of {args.steps} steps.", args.json)


if __name__ == "__main__":
    main()
