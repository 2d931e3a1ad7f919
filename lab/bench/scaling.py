"""Measure the cost of a step as the work grows: batch, sequence, layers, width, ranks; and the
host's time for a step on many ranks.

    python -m lab.bench.scaling [--axis NAME] [--rounds 3] [--json out.json] [--table.key=value ...]

One row per size, each in a separate process (`lab.bench.sections --one`). `grows` is the time by
which a step got longer over what the FLOPs grew by, from the row above: 1 is proportional. The axis
`fake ranks` runs rank 0 of many on PyTorch's fake process group, where collectives return at once,
with a model so small that what remains is Python's and the dispatcher's work; processor time of one
thread.
"""

import argparse

import train
from configs import program
from configs.load import load_config
from lab.bench import harness

SMALL = (
    "--model.flavor=1B --model.dim=64 --model.head_dim=32 --model.n_layers=1 --model.n_heads=2 "
    "--model.n_kv_heads=2 "
    "--model.hidden_dim=176 --model.vocab_size=263 --data.tokenizer=bytes"
)
TINY = (
    "--model.dim=64 --model.n_layers=4 --model.n_heads=4 --model.n_kv_heads=4 "
    "--model.hidden_dim=64 --model.vocab_size=263 --data.tokenizer=bytes --training.seq_len=8"
)
RANKS = "--training.global_batch_size=8 --training.seq_len=256"
AXES = {  # axis -> the model that it varies, sizes, options of a size
    "batch": (
        "",
        (1, 2, 4, 8, 16),
        "--training.local_batch_size={0} --training.global_batch_size={0}",
    ),
    "sequence": (
        SMALL,
        (512, 1024, 2048, 4096, 8192, 16384, 32768),
        "--training.seq_len={0} --training.local_batch_size=1 --training.global_batch_size=1",
    ),
    "layers": ("", (2, 4, 8, 16), "--model.n_layers={0}"),
    "width": (
        "--model.n_heads=8 --model.n_kv_heads=8",
        (128, 256, 512, 1024),
        "--model.dim={0} --model.hidden_dim={0}",
    ),
    "gloo ranks": (RANKS, (1, 2, 4), "ranks={0}"),
    "fake ranks": (TINY, (1, 8, 64, 512, 4096, 16384), "fake={0}"),
}


def options_of(axis: str, size: int, overrides: list[str]) -> tuple[list[str], int, int]:
    """(options, gloo ranks, fake ranks) of one row."""
    base, _, template = AXES[axis]
    if axis == "gloo ranks":
        return [*base.split(), f"--training.local_batch_size={8 // size}", *overrides], size, 0
    if axis == "fake ranks":  # as the presets lay them: sharded over at most 64, replicated beyond
        mesh = [
            f"--parallelism.data_parallel_replicate={max(1, size // 64)}",
            "--training.local_batch_size=1",
        ]
        return [*base.split(), *mesh, f"--training.global_batch_size={size}", *overrides], 1, size
    return [*base.split(), *template.format(size).split(), *overrides], 1, 0


def measure(axis: str, rounds: int, overrides: list[str]) -> list[list[str]]:
    rows = []
    before = None
    for size in AXES[axis][1]:
        options, ranks, fake = options_of(axis, size, overrides)
        how = [
            f"--rounds={1 if size > 8192 else rounds}",
            *([f"--fake-world={fake}"] if fake else []),
        ]
        seen = harness.child("lab.bench.sections", "--one", *how, *options, ranks=ranks)
        cfg = load_config(options, fake or ranks, min(8, fake or ranks))
        family, args = train.architecture(cfg)
        flops = (
            family.flops_per_token(args, cfg.training.seq_len)
            * cfg.training.global_batch_size
            * cfg.training.seq_len
        )
        flops = flops / fake if fake else flops
        grows = seen["seconds"] / before[0] / (flops / before[1]) if before else 1.0
        before = seen["seconds"], flops
        memory = seen.get("memory_gib")
        rate = seen.get("tokens_per_second")
        rows.append(
            [
                axis,
                f"{size:,}",
                f"{seen['seconds'] * 1e3:,.1f} ms",
                f"{rate:,.0f}" if rate else "-",
                f"{grows:.2f}",
                f"{memory:.2f}" if memory else "-",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--axis", choices=AXES)
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    rows = [
        row
        for axis in ([args.axis] if args.axis else AXES)
        for row in measure(axis, args.rounds, overrides)
    ]
    columns = ["axis", "size", "median step", "tokens/s", "grows", "peak GiB of rank 0"]
    harness.report("A step as the work grows", columns, rows, f"{args.rounds} rounds.", args.json)


if __name__ == "__main__":
    program.run(main)
