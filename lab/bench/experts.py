"""Measure the cost of an MoE layer: compared with a dense layer of as many FLOPs, with a loop over
separate experts, and with its experts on several ranks.

    python -m lab.bench.experts [--tokens 4096] [--dim 512] [--expert-dim 256] [--experts 32]
                                  [--per-token 4] [--ranks 2] [--rounds 9] [--json out.json]

Forward and backward of one feed-forward layer, in bfloat16 on a GPU and in float32 elsewhere. Times
are of the processor where there is no GPU, so that work of others on the machine does not count.
The dense layer has as many hidden units as a token's experts together, so all rows but those of
--ranks have the same FLOPs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

from configs.cpu import cpu_settings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs import program
from lab.bench import harness
from models.layers import FeedForward
from models.moe import Experts, MixtureOfExperts
from parallelisms import ep
from parallelisms import mesh as meshes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CLOCK = time.perf_counter if DEVICE.type == "cuda" else time.process_time


class Loop(nn.Module):
    """Loop over separate experts: a naive implementation."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.experts = nn.ModuleList(
            FeedForward(experts.w1.shape[2], experts.w1.shape[1]) for _ in experts.w1
        )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat(
            [
                expert(part)
                for expert, part in zip(self.experts, rows.split(counts.tolist()), strict=True)
            ]
        )


def filled(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        nn.init.normal_(p, std=0.02)
    return module.to(DEVICE, DTYPE)


def work(module: nn.Module, *inputs: Tensor) -> Callable[[], None]:
    """Forward and backward once; the gradients are dropped."""
    first = inputs[0].requires_grad_()
    trained = [p for p in module.parameters() if p.requires_grad]

    def run() -> None:
        out = module(first, *inputs[1:])
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out, [first, *trained], torch.ones_like(out), allow_unused=True)

    return run


def numbers(args: argparse.Namespace) -> SimpleNamespace:
    """Return the numbers of an MoE layer, as a family's `Args` has them."""
    return SimpleNamespace(
        dim=args.dim,
        n_experts=args.experts,
        experts_per_token=args.per_token,
        expert_dim=args.expert_dim,
        n_shared_experts=0,
        router_score="softmax",
        normalised_weights=True,
        routed_scale=1.0,
        expert_groups=1,
        groups_per_token=1,
        balancing_bias=True,
        balance_loss=0.0,
    )


def moe_layer(args: argparse.Namespace, to_few: bool = False) -> nn.Module:
    """to_few: the biases send all tokens to the same experts."""
    layer = filled(MixtureOfExperts(numbers(args)))
    layer.router.bias = nn.Parameter(torch.zeros(args.experts, device=DEVICE), requires_grad=False)
    if to_few:
        layer.router.bias[: args.per_token] += 10.0
    return layer


def contenders(args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    tokens = torch.randn(1, args.tokens, args.dim, device=DEVICE, dtype=DTYPE)
    rows = torch.randn(args.tokens * args.per_token, args.dim, device=DEVICE, dtype=DTYPE)
    even = torch.full((args.experts,), len(rows) // args.experts, device=DEVICE)
    even[0] += len(rows) - int(even.sum())
    experts = filled(Experts(numbers(args)))
    return {
        "a dense layer of as many FLOPs": work(
            filled(FeedForward(args.dim, args.per_token * args.expert_dim)), tokens
        ),
        "the experts alone, as separate layers in a loop": work(
            filled(Loop(experts)), rows.clone(), even
        ),
        "the experts alone, as grouped GEMMs": work(experts, rows, even),
        "the MoE layer: router, sorting, experts": work(moe_layer(args), tokens.clone()),
        f"the MoE layer, all tokens to {args.per_token} experts": work(
            moe_layer(args, to_few=True), tokens.clone()
        ),
    }


def measure(args: argparse.Namespace) -> None:
    """Measure on one rank of an ep group: rank 0 prints the slowest rank's median times without and
    with dispatch and combine as JSON."""
    here = meshes.world()
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(here.local_rank)
    torch.manual_seed(here.rank)
    tokens = torch.randn(1, args.tokens, args.dim, device=DEVICE, dtype=DTYPE)
    local = moe_layer(args)
    dealt = moe_layer(args)
    for name, weight in list(dealt.experts.named_parameters()):
        part = weight.detach().chunk(here.size)[here.rank].clone()
        setattr(dealt.experts, name, nn.Parameter(part))
    dealt.dispatcher = ep.AllToAllDispatcher(dist.group.WORLD)
    seconds = harness.alternate(
        {"local": work(local, tokens), "dealt": work(dealt, tokens.clone())},
        args.rounds,
        clock=CLOCK,
    )
    mine = torch.tensor(
        [statistics.median(times) for times in seconds.values()], dtype=torch.float64
    )
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if here.rank == 0:
        print(json.dumps(mine.tolist()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "tokens": 4096,
        "dim": 512,
        "expert-dim": 256,
        "experts": 32,
        "per-token": 4,
        "rounds": 9,
    }
    for name, default in {**sizes, "ranks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    # on one rank, for `harness.child`
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if DEVICE.type == "cpu":
        cpu_settings()
    if args.measure:
        return measure(args)
    seconds = harness.alternate(contenders(args), args.rounds, clock=CLOCK)
    dense = next(iter(seconds))
    rows = [
        [
            name,
            f"{statistics.median(times) * 1000:.0f} ms",
            f"{harness.ratio(seconds, name, dense):.2f}",
        ]
        for name, times in seconds.items()
    ]
    if args.ranks > 1 and (DEVICE.type == "cpu" or torch.cuda.device_count() >= args.ranks):
        shape = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in sizes]
        local, dealt = harness.child("lab.bench.experts", "--measure", *shape, ranks=args.ranks)
        slower = f"{dealt / local:.2f} times that"
        rows += [
            [
                f"the MoE layer on each of {args.ranks} ranks, all experts on each",
                f"{local * 1000:.0f} ms",
                "",
            ],
            [
                f"the same, with expert parallelism over the {args.ranks} ranks",
                f"{dealt * 1000:.0f} ms",
                slower,
            ],
        ]
    notes = (
        f"{args.tokens:,} tokens of width {args.dim}, {args.per_token} of {args.experts} experts "
        f"with {args.expert_dim} "
        f"hidden units for each, {DTYPE}. Medians of {args.rounds} alternating rounds.".replace(
            "torch.", ""
        )
    )
    harness.report(
        "An MoE layer, forward and backward",
        ["layer", "time", "ratio"],
        rows,
        notes,
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
