"""The output projection with its loss, forward and backward, in bfloat16: whole logits, and
training/loss.py's pieces with PyTorch's operators and with compiled passes
(`compile.enabled = true`).

    python -m lab.bench loss [--rounds 15] [--shapes 2048,512,8192 ...] [--json out.json]

A shape is tokens, width, vocabulary. Pieces have 2,048 tokens. In alternation, each in a process of
its own, whose peak memory is reported.
"""

import statistics
from collections.abc import Callable

from configs.cpu import keep_memory

import torch

from configs.schema import Compile
from lab.bench import harness, isolated
from training.loss import linear_cross_entropy, plain_cross_entropy
from training.loss_passes import compiled_loss

PIECE = 2048
SHAPES = {
    "cpu": "4096,512,8192 2048,256,32768",
    "cuda": "8192,4096,128256 8192,4096,32768 16384,2048,128256",  # of 8B, and of 1B
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def whole(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, _: int) -> torch.Tensor:
    return plain_cross_entropy(h @ w.t(), labels)


CONTENDERS = {
    "whole logits": lambda: whole,
    "pieces": lambda: linear_cross_entropy,
    "pieces, compiled": lambda: compiled_loss(linear_cross_entropy, Compile(enabled=True)),
}


def contender(name: str, shape: str) -> Callable[[], object]:
    if DEVICE == "cpu":
        keep_memory()
    tokens, width, vocabulary = map(int, shape.split(","))
    how = {"device": DEVICE, "dtype": torch.bfloat16}
    h = torch.randn(1, tokens, width, **how).requires_grad_()
    w = (torch.randn(vocabulary, width, **how) / width**0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens), device=DEVICE)
    loss = CONTENDERS[name]()
    return lambda: torch.autograd.grad(loss(h, w, labels, PIECE), (h, w))


def main() -> None:
    parser = harness.shapes_parser(__doc__, 15, SHAPES[DEVICE])
    parser.add_argument("--one", help="this contender, one timing per line of input")
    args = parser.parse_args()
    if args.one:
        isolated.serve(contender(args.one, args.shapes[0]))
        return
    rows = []
    for shape in args.shapes:
        one = ["-m", "lab.bench", "loss", f"--shapes={shape}"]
        contenders = {name: [*one, f"--one={name}"] for name in CONTENDERS}
        seconds, ended = isolated.timed(contenders, args.rounds)
        for name, times in seconds.items():
            rows.append(
                [
                    shape.replace(",", ", "),
                    name,
                    f"{statistics.median(times) * 1e3:.1f} ms",
                    f"{harness.ratio(seconds, name, 'pieces'):.2f}",
                    f"{ended[name]['gib']:.2f}",
                ]
            )
    columns = ["tokens, width, vocabulary", "loss", "median", "to pieces", "peak GiB"]
    notes = f"bfloat16, {args.rounds} alternating rounds, pieces of {PIECE:,} tokens."
    harness.report("Output projection and loss", columns, rows, notes, args.json)
