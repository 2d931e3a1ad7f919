"""Measure the cost of initialising a model for one rank: every shard of rank 0 is filled for real,
one parameter in memory at a time.

    python -m lab.bench.init [configs/llama_405b.toml] [--ranks 1024] [--table.key=value ...]

The mesh is the real one over PyTorch's fake process group, so any world size fits on a laptop. In
addition to our counter-based values it times the obvious alternative, a generator per parameter
that draws the *whole* tensor so that each rank can keep its shard, on the largest parameter, and
scales it by the number of parameters.
"""

import argparse
import resource
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from configs import check, program
from configs.load import load_config
from lab.bench import harness
from parallelisms import mesh as meshes
from parallelisms import parallelize
from training import init


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/llama_405b.toml")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--json")
    args, overrides = parser.parse_known_args()
    cfg = load_config([args.config, *overrides, "--run.device=cpu"], args.ranks, 8)
    family, numbers = train.architecture(cfg)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    began = time.perf_counter()
    has_experts = bool(getattr(numbers, "n_experts", 0))
    mesh = meshes.open_mesh(
        cfg.run, cfg.parallelism, check.data_parallel_shard(cfg, args.ranks), has_experts
    )
    with torch.device("meta"):
        model = family.build(numbers)
    parallelize(model, mesh, cfg, family.tp_plan(numbers))
    build_seconds = time.perf_counter() - began
    before = peak_gib()

    began = time.perf_counter()
    values = 0
    largest = 0
    for name, param in model.named_parameters():
        shard = torch.empty_like(param, device="cpu")
        init.initialise(
            torch.nn.ParameterDict({name.replace(".", "/"): shard}), [("*", "normal", 0.02)], 0
        )
        values = values + shard.to_local().numel()
        largest = max(largest, shard.to_local().numel())
    ours = time.perf_counter() - began
    after = peak_gib()

    total = sum(p.numel() for p in model.parameters())
    sample = torch.empty(50_000_000)
    began = time.perf_counter()
    sample.normal_(generator=torch.Generator().manual_seed(0))
    rate = sample.numel() / (time.perf_counter() - began)
    whole = max(p.numel() for p in model.parameters())
    rows = [
        [
            "ours: hash of the global index",
            f"{values:,}",
            f"{ours:.1f} s",
            f"{after - before:.2f} GiB",
        ],
        [
            "a generator per parameter, whole tensors (projected)",
            f"{total:,}",
            f"{total / rate:,.0f} s",
            f"{whole * 4 / 2**30:.2f} GiB",
        ],
    ]
    notes = (
        f"{args.config} on {args.ranks} ranks, rank 0; largest shard "
        f"{largest * 4 / 2**20:.0f} MiB; meta model and mesh {build_seconds:.1f} s."
    )
    harness.report(
        "Initial values",
        ["method", "values drawn by one rank", "time", "memory above the model"],
        rows,
        notes,
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
