"""Measure whether the exchange of rows hides behind experts: a MoE layer on two ranks, whose rows
take a stated time to arrive, on a simulated wire, which sleeps.

    python -m lab.bench.async_all_to_all [--rounds 9] [--json out.json]

The ranks exchange real rows by gloo. Rows of dispatch and combine, and their gradients in backward,
may be used when the wire has had its time, one transfer after the other. All chunks together take a
share of the time of the shared experts' forward pass. `exposed` is how much longer forward and
backward take than without a wire, relative to the time of the four transfers.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest import mock

from configs.cpu import cpu_settings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs import program
from lab.bench import experts, harness
from models.moe import MixtureOfExperts
from parallelisms import async_all_to_all, ep, ep_chunks

TOKENS, DIM, EXPERT_DIM, EXPERTS, PER_TOKEN, SHARED = 2048, 512, 256, 8, 2, 4
SHARES = (0.25, 0.5, 1.0)  # of the shared experts' forward, that a transfer takes
WAYS = {  # (chunks, whether rows are waited for at once)
    "one chunk": (1, False),
    "two chunks": (2, False),
    "four chunks": (4, False),
    "waits at once": (1, True),
}


class SlowLink:
    """Link on which rows arrive `seconds` after those before them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.due: dict[int, float] = {}
        self.free = 0.0  # when the last rows are there
        self.real = async_all_to_all.send, async_all_to_all.arrived

    def send(self, rows: Tensor, route: async_all_to_all.Route) -> Tensor:
        arriving = self.real[0](rows, route)
        self.free = max(self.free, time.monotonic()) + self.seconds
        self.due[arriving.data_ptr()] = self.free
        return arriving

    def arrived(self, rows: Tensor) -> Tensor:
        due = self.due.pop(rows.data_ptr())
        rows = self.real[1](rows)
        time.sleep(max(0.0, due - time.monotonic()))
        return rows

    @contextmanager
    def between_ranks(self) -> Iterator[None]:
        with mock.patch.multiple(async_all_to_all, send=self.send, arrived=self.arrived):
            yield


def layer(chunks: int, waits_at_once: bool) -> MixtureOfExperts:
    """Build the layer of a rank of two, with its half of the experts."""
    numbers = experts.numbers(
        argparse.Namespace(
            dim=DIM, experts=EXPERTS, per_token=PER_TOKEN, expert_dim=EXPERT_DIM, tokens=TOKENS
        )
    )
    numbers.n_shared_experts = SHARED
    numbers.balancing_bias = False
    mixture = experts.filled(MixtureOfExperts(numbers))
    for name, weight in list(mixture.experts.named_parameters()):
        half = weight.detach().chunk(2)[dist.get_rank()].clone()
        setattr(mixture.experts, name, nn.Parameter(half))
    mixture.dispatcher = ep.AllToAllDispatcher(dist.group.WORLD)
    if chunks > 1:
        mixture.dispatcher = ep_chunks.ChunkedDispatcher(mixture.dispatcher, chunks)
    if waits_at_once:
        wait_at_once(mixture)
    return mixture


class DispatcherAtOnce(nn.Module):
    """Another dispatcher that does all of its work in `dispatch`."""

    def __init__(self, dispatcher: nn.Module, experts: nn.Module):
        super().__init__()
        self.dispatcher = dispatcher
        self.experts = experts

    def dispatch(self, *inputs: Tensor) -> Tensor:
        state = self.dispatcher.dispatch(*inputs)
        return self.dispatcher.combine(self.dispatcher.compute(state, self.experts))

    def compute(self, results: Tensor, experts: nn.Module) -> Tensor:
        return results

    def combine(self, results: Tensor) -> Tensor:
        return results


def wait_at_once(mixture: MixtureOfExperts) -> None:
    """Compute nothing while rows are on their way."""
    mixture.dispatcher = DispatcherAtOnce(mixture.dispatcher, mixture.experts)


def measure(rounds: int) -> None:
    """Measure on one of two ranks: rank 0 prints the shared experts' seconds, and the seconds of
    each way on each wire in every round, as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randn(1, TOKENS, DIM)
    wire = SlowLink()
    work = {}
    for way, (chunks, waits_at_once) in WAYS.items():
        mixture = layer(chunks, waits_at_once)
        work[way] = experts.work(mixture, tokens.clone())
    forward = harness.alternate({"": partial(mixture.shared_experts, tokens)}, 5)[""]
    shared = torch.tensor(statistics.median(forward), dtype=torch.float64)
    dist.broadcast(shared, 0)

    def step(way: str, share: float) -> None:
        wire.seconds = share * shared.item() / WAYS[way][0]
        work[way]()
        dist.barrier()

    contenders = {
        f"{way} {share}": partial(step, way, share) for way, share in product(WAYS, (0, *SHARES))
    }
    with wire.between_ranks():
        seconds = harness.alternate(contenders, rounds)
    if dist.get_rank() == 0:
        print(json.dumps([shared.item(), seconds]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    # on one rank, for `harness.child`
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cpu_settings()
    if args.measure:
        return measure(args.rounds)
    shared, seconds = harness.child(
        "lab.bench.async_all_to_all", "--measure", f"--rounds={args.rounds}", ranks=2
    )
    rows = []
    for way, share in product(WAYS, SHARES):
        with_wire = seconds[f"{way} {share}"]
        without = seconds[f"{way} 0"]
        more = statistics.median(a - b for a, b in zip(with_wire, without, strict=True))
        times = (statistics.median(without), share * shared, statistics.median(with_wire))
        exposed = more / (4 * share * shared)
        rows.append([way, *(f"{t * 1e3:,.0f} ms" for t in times), f"{exposed:.0%}"])
    notes = (
        f"{TOKENS:,} tokens of width {DIM} on each rank, {PER_TOKEN} of {EXPERTS} experts and "
        f"{SHARED} shared ones with {EXPERT_DIM} hidden units each, float32. The shared experts' "
        f"forward takes {shared * 1e3:,.0f} ms. {args.rounds} alternating rounds."
    )
    columns = ["the layer", "without a wire", "a transfer", "with it", "exposed"]
    harness.report("The exchange of rows behind experts", columns, rows, notes, args.json)


if __name__ == "__main__":
    program.run(main)
