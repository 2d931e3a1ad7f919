"""Time causal attention alone: the kernels that may run it here, forward and backward, in bfloat16.

    python -m lab.bench attention [--rounds 15] [--shapes 8,4,2,256,64 ...] [--json out.json]

A shape is batch, query heads, key/value heads, tokens, numbers of a head. On a GPU the contenders
are the values of `training.attention` (flash3 where flash_attn_3 is installed); on a CPU ours
(`models/kernels/cpu/causal_attention.py`, whose forward is PyTorch's) and PyTorch's. In
alternation, each in a separate process.
"""

import argparse
import statistics
from collections.abc import Callable
from importlib.util import find_spec

from configs.cpu import keep_memory

import torch
import torch.nn.functional as F

from lab.bench import harness, isolated
from models.kernels.causal_attention import causal_attention
from training import attention

SHAPES = {
    "cpu": (
        "8,4,2,256,64 8,8,4,512,64 2,32,8,512,64 2,8,8,384,128 1,8,4,2048,64 1,8,4,4096,64 "
        "1,4,2,8192,64 1,2,1,16384,64"
    ),
    # 1B, 8B, 70B; and 8B on longer windows
    "cuda": "1,32,8,8192,64 1,32,8,8192,128 1,64,8,8192,128 1,32,8,32768,128",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def contender(name: str, shape: list[int], part: str) -> Callable[[], object]:
    """Return a function that runs one forward, or one backward, of a contender."""
    batch, heads, kv_heads, tokens, size = shape
    if DEVICE == "cuda":
        attention.choose(name, torch.device(DEVICE))
    else:
        keep_memory()
    run = pytorch if name == "pytorch" else causal_attention
    how = {"dtype": torch.bfloat16, "device": DEVICE}
    q = torch.randn(batch, heads, tokens, size, **how, requires_grad=True)
    k = torch.randn(batch, kv_heads, tokens, size, **how, requires_grad=True)
    v = torch.randn(batch, kv_heads, tokens, size, **how, requires_grad=True)
    if part == "forward":
        return lambda: run(q, k, v)
    out = run(q, k, v)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def measure(shape: str, rounds: int) -> tuple[list[list[str]], str]:
    """Return the rows of a shape, and its fastest kernel, forward and backward together."""
    names = ["ours", "pytorch"]
    if DEVICE == "cuda":
        flash3 = ["flash3"] if find_spec("flash_attn_interface") else []
        names = ["auto", "flash", *flash3, "cudnn"]
    batch, heads, _, tokens, size = map(int, shape.split(","))
    rows = [[shape.replace(",", ", "), name] for name in names]
    together = dict.fromkeys(names, 0.0)
    for part, matmuls in ("forward", 2), ("backward", 5):
        one = ["-m", "lab.bench", "attention", f"--shapes={shape}", f"--part={part}"]
        seconds = isolated.timed({name: [*one, f"--one={name}"] for name in names}, rounds)
        # half of 2 * T * T * E for each matmul: it is causal
        flops = matmuls * batch * heads * tokens**2 * size
        for row, name in zip(rows, names):
            median = statistics.median(seconds[name])
            together[name] += median
            row += [
                f"{median * 1e3:.2f} ms",
                f"{flops / median / 1e9:,.0f}",
                f"{harness.ratio(seconds, name, names[-1]):.2f}",
            ]
    return rows, min(together, key=together.__getitem__)


def shape_of(words: str) -> str:
    """Return a shape, whose numbers are five. Raises argparse's error."""
    numbers = words.split(",")
    if len(numbers) != 5 or not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"{words} is no shape; one is {SHAPES[DEVICE].split()[0]}")
    return words


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES[DEVICE].split())
    parser.add_argument("--one", help="this contender, one timing per line of input")
    parser.add_argument("--part", choices=("forward", "backward"))
    args = parser.parse_args()
    if args.one:
        shape = [int(n) for n in args.shapes[0].split(",")]
        isolated.serve(contender(args.one, shape, args.part))
        return
    measured = {shape: measure(shape, args.rounds) for shape in args.shapes}
    rows = [row for some, _ in measured.values() for row in some]
    fastest = ", ".join(f"{name} at {shape}" for shape, (_, name) in measured.items())
    notes = (
        f"bfloat16, {args.rounds} alternating rounds. Fastest, forward and backward together: "
        f"{fastest}."
    )
    if DEVICE == "cuda":
        notes += " On a GPU that is the value for training.attention."
    last = "to PyTorch's" if DEVICE == "cpu" else "to cuDNN's"
    columns = ["B, H, K, T, E", "kernel", "forward", "GFLOP/s", last, "backward", "GFLOP/s", last]
    harness.report("Causal attention", columns, rows, notes, args.json)
