"""Compare the loader with torchdata and HF datasets: tokens/s, the first batch after a resume at
step 10^6, and memory.

    python -m lab.bench.data [--batches 200] [--tokens 20_000_000] [--resume-step 1_000_000] [--step-seconds 0.1]
                               [--json out.json]

All read the same random tokens from one file in a temporary folder (so, from the page cache), in
shuffled windows. Each contender has a separate process; its memory is what that process has written
to (Private_Dirty) since the fork. "data wait" is the share of the time that a loop waits for its
batches when each step sleeps for `--step-seconds`. torchdata: a map-style dataset, RandomSampler,
StatefulDataLoader. Hugging Face `datasets`: the windows as an Arrow dataset in torch format,
shuffled, through the same StatefulDataLoader; a row only where it is installed.
"""

import argparse
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from configs import program
from configs.schema import Data
from data import splice
from data.loader import Batches, loader
from data.tokens import Tokens
from lab.bench import harness

SHAPES = ((8, 256), (64, 256), (8, 8192))  # sequences per rank and step, tokens of each
RESUMED = (8, 256)


def private_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) / 1e3
    return float("nan")


def ours(
    tokens: Tokens, rows: int, T: int, sources: int, workers: int, mask: bool = False
) -> Callable[[int, int], Iterator]:
    """Batches of one rank of 8, by first step and count; the sources of a mixture are the same
    tokens."""
    weights = [0.5, 0.25, 0.15, 0.07, 0.03][:sources]
    table = [
        (f"s{i}" if sources > 1 else "", f"text {i}", tokens, [[0, weight]])
        for i, weight in enumerate(weights)
    ]
    order = splice.begin(splice.describe(table, 0, T, rows * 8))
    batches = Batches([tokens] * sources, order, rows, 3, 8, mask)
    return lambda start, count: loader(batches, start, start + count, Data(workers=workers))


class Windows(torch.utils.data.Dataset):
    """Windows of the same tokens for torchdata."""

    def __init__(self, tokens: Tokens, T: int) -> None:
        self.tokens = tokens
        self.T = T

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.T

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(
            self.tokens.read(i * self.T, i * self.T + self.T + 1).astype(np.int64)
        )
        return window[:-1], window[1:]


class Endless(torch.utils.data.Sampler):
    """Epoch after epoch in new orders."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for epoch in range(2**62):
            yield from torch.randperm(
                self.size, generator=torch.Generator().manual_seed(epoch)
            ).tolist()


def torchdata(
    dataset: torch.utils.data.Dataset, rows: int, workers: int
) -> Callable[[int, int], Iterator]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def batches(start: int, count: int) -> Iterator:
        loaded = StatefulDataLoader(
            dataset, rows, sampler=Endless(len(dataset)), num_workers=workers
        )
        if start:
            some = iter(loaded)
            for _ in range(2):
                next(some)
            # put forward to what a run would have left after `start` (an even number of) steps
            state = loaded.state_dict()
            snapshot = state["_snapshot"] if workers else {"_main_snapshot": state}
            state["_num_yielded"] = snapshot["_snapshot_step"] = start
            sampled = {
                "_sampler_iter_yielded": start,
                "_sampler_iter_state": {"samples_yielded": start * rows},
            }
            snapshot["_main_snapshot"].update(sampled)
            loaded.load_state_dict(state)
        return iter(loaded)

    return batches


def hugging_face(tokens: Tokens, T: int, folder: str) -> torch.utils.data.Dataset:
    import datasets

    starts = range(0, len(tokens) - T, T)
    windows = np.stack([tokens.read(start, start + T + 1) for start in starts])
    datasets.Dataset.from_dict({"tokens": windows}).save_to_disk(f"{folder}/arrow-{T}")
    return datasets.load_from_disk(f"{folder}/arrow-{T}").with_format("torch")


def measure(
    make: Callable[[], Callable], start: int, count: int, step_seconds: float = 0.0
) -> tuple[float, float, float]:
    """Return (seconds to the first batch, mean seconds of waiting for a later one, MB written to),
    from a separate process. step_seconds: how long the process sleeps between two batches, as
    during a training step."""

    def child(pipe) -> None:
        torch.set_num_threads(1)
        before = private_mb()
        began = time.perf_counter()
        stream = make()(start, count)
        times = []
        for _ in range(count):
            next(stream)
            times.append(time.perf_counter() - began)
            time.sleep(step_seconds)
            began = time.perf_counter()
        pipe.send((times[0], statistics.fmean(times[1:] or times), private_mb() - before))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--resume-step", type=int, default=1_000_000)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        np.random.default_rng(0).integers(0, 50_000, args.tokens, np.uint16).tofile(
            f"{folder}/train-00000.bin"
        )
        np.arange(0, args.tokens, 700, dtype="<i8").tofile(f"{folder}/train.starts")
        tokens = Tokens(folder, "train", np.dtype(np.uint16))
        for size, T in SHAPES:
            contenders = {
                "one source": lambda: ours(tokens, size, T, 1, 0),
                "one source, 2 workers": lambda: ours(tokens, size, T, 1, 2),
                "5 sources": lambda: ours(tokens, size, T, 5, 0),
                "5 sources, documents masked": lambda: ours(tokens, size, T, 5, 0, True),
                "torchdata": lambda: torchdata(Windows(tokens, T), size, 0),
                "torchdata, 2 workers": lambda: torchdata(Windows(tokens, T), size, 2),
            }
            if importlib.util.find_spec("datasets"):
                arrow = hugging_face(tokens, T, folder)
                contenders["HF datasets"] = lambda: torchdata(arrow, size, 0)
            for name, make in contenders.items():
                first, mean, memory = measure(make, 0, args.batches)
                resumed = (
                    ""
                    if (size, T) != RESUMED
                    else f"{measure(make, args.resume_step, 1)[0] * 1e3:,.1f} ms"
                )
                wait = measure(make, 0, 30, args.step_seconds)[1]
                share = f"{wait / (wait + args.step_seconds):.2%}"
                rate = f"{size * T / mean / 1e6:,.1f} M/s"
                cells = [
                    f"{mean * 1e3:.3f} ms",
                    rate,
                    share,
                    f"{first * 1e3:.1f} ms",
                    resumed,
                    f"{memory:,.1f} MB",
                ]
                rows.append([f"{size} x {T}, {name}", *cells])
    notes = (
        f"{args.tokens:,} tokens, {args.batches} batches of one rank each, nothing else running."
    )
    columns = [
        "what",
        "batch",
        "tokens",
        f"data wait, {args.step_seconds:g} s a step",
        "first batch",
        f"first after step {args.resume_step:,}",
        "memory",
    ]
    harness.report("Data loader", columns, rows, notes, args.json)


if __name__ == "__main__":
    program.run(main)
