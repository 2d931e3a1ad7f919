"""Matrix products on a CPU, at the sizes of a model's layers: float32 as PyTorch comes and as our runs ask for it
(`configs/cpu.py::float32_products`), and bfloat16.

    python -m tools.bench.products [--rounds 25] [--shapes 2048,256,704 ...] [--json out.json]

A shape is tokens, inputs, outputs of a linear layer; forward, grad of its input and grad of its weight are three products of
as many operations, and timed together.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from configs.cpu import float32_products, keep_memory
from tools.bench import harness

SHAPES = "2048,2048,2048 2048,256,704 2048,704,256 1024,256,4096 4096,512,1536 1024,2048,8192".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--json")
    args = parser.parse_args()
    keep_memory()

    def layer(shape: str, dtype: torch.dtype, precision: str) -> Callable[[], None]:
        tokens, inputs, outputs = map(int, shape.split(","))
        x, w, grad = (torch.randn(*size).to(dtype) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))

        def run() -> None:
            torch.set_float32_matmul_precision(precision)
            x @ w.mT, grad @ w, grad.mT @ x

        return run

    float32_products()
    asked = torch.get_float32_matmul_precision()
    rows = []
    for shape in args.shapes:
        tokens, inputs, outputs = map(int, shape.split(","))
        seconds = harness.alternate({
            "float32": layer(shape, torch.float32, "highest"), "float32, ours": layer(shape, torch.float32, asked),
            "bfloat16": layer(shape, torch.bfloat16, "highest"),
        }, args.rounds)  # fmt: skip
        rates = [f"{6 * tokens * inputs * outputs / statistics.median(times) / 1e9:,.0f}" for times in seconds.values()]
        rows.append([shape.replace(",", ", "), *rates, f"{harness.ratio(seconds, 'float32, ours', 'float32'):.2f}"])
    columns = ["tokens, inputs, outputs", "float32 GFLOP/s", "as our runs ask", "bfloat16", "time, ours / float32"]
    harness.report("Products of a linear layer", columns, rows, f"{args.rounds} alternating rounds.", args.json)


if __name__ == "__main__":
    main()
