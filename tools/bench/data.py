"""The loader and the preparation of a corpus: time per batch in process and through workers, MB/s of tokenising.

    python -m tools.bench.data [--batches 200] [--json out.json]

On the standard library's source code, prepared afresh in a temporary cache.
"""

import argparse
import statistics
import tempfile
import time

from configs.schema import Data
from data.loader import Batches, loader
from data.prepare import prepare
from tools.bench import harness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for what in "made", "opened":
            began = time.perf_counter()
            corpus = prepare(Data(cache=cache), log=print)
            rows.append([f"corpus and BPE {what}", f"{(time.perf_counter() - began) * 1e3:,.0f} ms", "", ""])
        for batch, seq_len in (8, 256), (64, 256), (2, 8192):
            batches = Batches(corpus.train, seq_len, batch, batch, 0, 1, seed=0)
            for workers in 0, 2:
                began, times = time.perf_counter(), []
                for _ in loader(batches, 0, args.batches, Data(workers=workers)):
                    times.append(time.perf_counter() - began)
                    began = time.perf_counter()
                name = f"{batch} x {seq_len} tokens, {f'{workers} workers' if workers else 'in process'}"
                median = statistics.median(times[1:])
                rate = f"{batch * seq_len / median / 1e6:.1f} M tokens/s"
                rows.append([name, f"{median * 1e3:.2f} ms", f"{times[0] * 1e3:.1f} ms", rate])
    notes = f"{args.batches} batches each, nothing else running."
    harness.report("Data", ["what", "median", "first", "rate"], rows, notes, args.json)


if __name__ == "__main__":
    main()
