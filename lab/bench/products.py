"""Matmuls at the sizes of a model's layers. On a CPU: float32 with PyTorch's defaults and as our
runs set it (`configs/cpu.py::float32_products`), and bfloat16. On a GPU: float32, float32
rounded to TF32 inside, and bfloat16.

    python -m lab.bench products [--rounds 25] [--shapes 2048,256,704 ...] [--added] [--json out.json]

A shape is tokens, inputs, outputs of a linear layer; forward, grad of its input and grad of its
weight are three matmuls of equal FLOPs, timed together.

--added: instead of that, the grad of a bfloat16 weight, added to what earlier tokens have brought in
float32, by a matmul and an addition, and by `training/loss_passes.py::add_matmul`, which is one
GEMM on a GPU.
"""

import statistics
from collections.abc import Callable

from configs.cpu import float32_products, keep_memory

import torch

from lab.bench import harness
from training.loss_passes import add_matmul

SHAPES = {
    "cpu": "2048,2048,2048 2048,256,704 2048,704,256 1024,256,4096 4096,512,1536 1024,2048,8192",
    # of 8B from the second on
    "cuda": "8192,8192,8192 8192,4096,4096 8192,4096,14336 8192,14336,4096 8192,4096,128256",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def contenders() -> dict[str, tuple[torch.dtype, str]]:
    """Return name -> dtype, and the value for torch.set_float32_matmul_precision. The second is
    compared with the first."""
    if DEVICE == "cuda":
        return {
            "float32": (torch.float32, "highest"),
            "TF32": (torch.float32, "high"),
            "bfloat16": (torch.bfloat16, "highest"),
        }
    keep_memory()
    float32_products()
    asked = torch.get_float32_matmul_precision()
    return {
        "float32": (torch.float32, "highest"),
        "float32 (ours)": (torch.float32, asked),
        "bfloat16": (torch.bfloat16, "highest"),
    }


def added(shape: str) -> dict[str, Callable[[], object]]:
    tokens, inputs, outputs = map(int, shape.split(","))
    how = {"device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(tokens, inputs, **how)
    grad = torch.randn(tokens, outputs, **how)
    total = torch.zeros(outputs, inputs, device=DEVICE)
    return {
        "matmul, then addition": lambda: total.add_(grad.mT @ x),
        "matmul alone": lambda: grad.mT @ x,
        "add_matmul": lambda: add_matmul(total, grad.mT, x),
    }


def report_added(shapes: list[str], rounds: int, json_path: str | None) -> None:
    rows = []
    for shape in shapes:
        seconds = harness.alternate(added(shape), rounds)
        times = [f"{statistics.median(some) * 1e3:.3f} ms" for some in seconds.values()]
        first, *_, last = seconds
        ratio = f"{harness.ratio(seconds, last, first):.2f}"
        rows.append([shape.replace(",", ", "), *times, ratio])
    columns = ["tokens, inputs, outputs", *seconds, f"time, {last} / {first}"]
    notes = f"{rounds} alternating rounds."
    harness.report("A weight's grad added in float32", columns, rows, notes, json_path)


def main() -> None:
    parser = harness.shapes_parser(__doc__, 25, SHAPES[DEVICE])
    parser.add_argument("--added", action="store_true")
    args = parser.parse_args()
    if args.added:
        report_added(args.shapes, args.rounds, args.json)
        return

    def layer(shape: str, dtype: torch.dtype, precision: str) -> Callable[[], None]:
        tokens, inputs, outputs = map(int, shape.split(","))
        x, w, grad = (
            torch.randn(*size, device=DEVICE).to(dtype)
            for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )

        def run() -> None:
            torch.set_float32_matmul_precision(precision)
            x @ w.mT, grad @ w, grad.mT @ x

        return run

    kinds = contenders()
    rows = []
    first, second, *_ = kinds
    for shape in args.shapes:
        tokens, inputs, outputs = map(int, shape.split(","))
        seconds = harness.alternate(
            {name: layer(shape, *kind) for name, kind in kinds.items()}, args.rounds
        )
        rates = [
            f"{6 * tokens * inputs * outputs / statistics.median(times) / 1e9:,.0f}"
            for times in seconds.values()
        ]
        rows.append(
            [shape.replace(",", ", "), *rates, f"{harness.ratio(seconds, second, first):.2f}"]
        )
    columns = [
        "tokens, inputs, outputs",
        *(f"{name} GFLOP/s" for name in kinds),
        f"time, {second} / {first}",
    ]
    notes = f"{args.rounds} alternating rounds."
    harness.report("Products of a linear layer", columns, rows, notes, args.json)
