"""Dispatch and combine by host (parallelisms/ep_hosts.py): the numbers of one process, and one row
for each token and host on the wire."""

import os
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import InputError
from models.moe import Experts, LocalDispatcher, MixtureOfExperts
from parallelisms import ep_dispatch, ep_hosts
from parallelisms.ep_hosts import Dispatched
from reliability.collectives import group_of
from tests.parity import BETWEEN_OTHERS, EXECUTION, EXPERTS, NUMBERS, check
from tests.ranks import run_ranks
from tests.runs import COMPILED

# Three hosts of two ranks; each rank has two experts. All sizes differ.
HOSTS, RANKS, OF_RANK = 3, 2, 2
WORLD, X, K, DIM, HIDDEN = 6, 12, 5, 7, 11
PEAK = 13  # tokens of the last rank
CHUNKS = 4  # more than the tokens of some ranks


def tokens_of(rank: int) -> int:
    """Dispatched of a rank: each has another number, and the first has none."""
    return PEAK * rank // (WORLD - 1)


def spread(n: int) -> Tensor:
    return torch.rand(n, X).topk(K).indices


def to_one_rank_first(n: int) -> Tensor:
    """Every token wants both experts of rank 4, and three others."""
    scores = torch.rand(n, X)
    scores[:, 8:10] += 1
    return scores.topk(K).indices


def not_to_a_host(n: int) -> Tensor:
    """No token wants an expert of the second host, the experts 4 to 7."""
    scores = torch.rand(n, X)
    scores[:, 4:8] -= 1
    return scores.topk(K).indices


def to_one_expert(n: int) -> Tensor:
    return torch.full((n, 1), 9)


ROUTINGS = {
    "spread": spread,
    "all to one rank, and to others": to_one_rank_first,
    "none to a host": not_to_a_host,
    "all to one expert": to_one_expert,
}


class CountRows(TorchDispatchMode):
    """The rows of all-to-alls that leave this rank's host, and those that stay on it: the count of
    each by the type of the numbers, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.crossing: list[int] = []
        self.staying: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.note(*args)
        return func(*args, **(kwargs or {}))

    def note(self, rows: Tensor, _: list[int], sent: list[int], group: str) -> None:
        if not rows.is_floating_point():
            return  # numbers of rows and of experts
        here = dist.get_rank() // RANKS
        ranks = dist.get_process_group_ranks(group_of((group,)))
        hosts = Counter()
        for rank, count in zip(ranks, sent, strict=True):
            hosts[rank // RANKS == here] += count
        self.crossing.append(hosts[False])
        self.staying.append(hosts[True])


def layer() -> Experts:
    experts = Experts(SimpleNamespace(n_experts=X, expert_dim=HIDDEN, dim=DIM)).double()
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.5)
    return experts


def part_of(experts: Experts, rank: int) -> Experts:
    """With the experts of this rank alone."""
    part = layer()
    for name, weight in experts.named_parameters():
        own = weight.detach()[rank * OF_RANK : (rank + 1) * OF_RANK].clone()
        part.register_parameter(name, nn.Parameter(own))
    return part


def plainly(experts: Experts, *inputs: Tensor) -> Tensor:
    """Compute as one process does."""
    return by_dispatcher(LocalDispatcher(), experts, *inputs)


def by_dispatcher(dispatcher: nn.Module, experts: Experts, *inputs: Tensor) -> Tensor:
    """Dispatch, compute and combine."""
    counts = inputs[1].flatten().bincount(minlength=X)
    state = dispatcher.compute(dispatcher.dispatch(*inputs, counts), experts)
    return dispatcher.combine(state)


def in_chunks(dispatcher: nn.Module, chunks: int) -> nn.Module:
    return dispatcher if chunks == 1 else ep_dispatch.ChunkedDispatcher(dispatcher, chunks)


def exchange_errors(
    name: str, groups: tuple, chunks: int = 1
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the largest errors of this rank's results and gradients; and the rows that it sent to
    other hosts by the hierarchical and by the flat exchange, with what each should be."""
    torch.manual_seed(7)
    rank, experts = dist.get_rank(), layer()
    begins = [sum(map(tokens_of, range(r))) for r in range(WORLD + 1)]
    mine = slice(begins[rank], begins[rank + 1])
    x = torch.randn(begins[-1], DIM, dtype=torch.float64)
    chosen = ROUTINGS[name](begins[-1])
    weights = torch.rand(chosen.shape, dtype=torch.float64)
    grad = torch.randn_like(x)
    all_inputs = [x.requires_grad_(), weights.requires_grad_()]
    right = plainly(experts, x, chosen, weights)
    right_grads = torch.autograd.grad(right, [*all_inputs, *experts.parameters()], grad)

    part = part_of(experts, rank)
    dispatcher = in_chunks(ep_hosts.HierarchicalDispatcher(*groups), chunks)
    own = [tensor.detach()[mine].requires_grad_() for tensor in (x, weights)]
    with CountRows() as by_host:
        out = by_dispatcher(dispatcher, part, own[0], chosen[mine], own[1])
        grads = torch.autograd.grad(out, [*own, *part.parameters()], grad[mine])
    flat = part_of(experts, rank)
    flat_dispatcher = in_chunks(ep_dispatch.AllToAllDispatcher(dist.group.WORLD), chunks)
    with CountRows() as of_flat:
        out_flat = by_dispatcher(flat_dispatcher, flat, own[0], chosen[mine], own[1])
        grads_flat = torch.autograd.grad(out_flat, [*own, *flat.parameters()], grad[mine])

    of_rank = slice(rank * OF_RANK, (rank + 1) * OF_RANK)
    wanted = [right[mine], right_grads[0][mine], right_grads[1][mine]]
    wanted += [gradient[of_rank] for gradient in right_grads[2:]]
    names = ("results", "x", "weights", "w1", "w2", "w3")
    errors = {}
    for exchange, values in ("", (out, *grads)), ("flat ", (out_flat, *grads_flat)):
        for what, value, want in zip(names, values, wanted, strict=True):
            errors[exchange + what] = ((value - want).norm() / (want.norm() or 1)).item()
    hosts = chosen[mine] // (OF_RANK * RANKS)  # [N, k]
    others = [host for host in range(HOSTS) if host != rank // RANKS]
    rows = {
        "by host": by_host.crossing,
        "flat": of_flat.crossing,
        "tokens": len(chosen[mine]),
        "token and host": sum((hosts == host).any(1).sum().item() for host in others),
        "token and expert": sum((hosts == host).sum().item() for host in others),
    }
    return errors, rows


def open_groups() -> tuple:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    return ep_hosts.open_groups(mesh_of_experts())


def mesh_of_experts() -> SimpleNamespace:
    """Mesh with the attributes that `open_groups` reads, whose ranks all share the experts."""

    def gather(value: object) -> list:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return SimpleNamespace(
        rank=dist.get_rank(),
        ep=dist.get_world_size(),
        more_groups={},
        timeout=lambda: timedelta(seconds=60),
        gather=gather,
    )


def fanned_out_twice() -> object:
    """The mistake: a rank gets two copies of a token, and computes with both."""
    real = ep_hosts.results_of

    def twice(experts: nn.Module, tokens: Dispatched, size: int, rows: int) -> Tensor:
        both = Dispatched(*(torch.cat((tensor, tensor)) for tensor in tokens))
        results = real(experts, both, size, 2 * rows)
        return results[: len(tokens.x)] + results[len(tokens.x) :]

    return mock.patch.object(ep_hosts, "results_of", twice)


def combined_early() -> object:
    """The mistake: results are added when those of the first rank have come."""

    def early(way: ep_hosts.WayBack) -> Tensor:
        first = way.pending.route.received[0]
        rows = ep_dispatch.wait_all_to_all(way.pending)
        return ep_hosts.added(rows[:first], way.copies[:first], way.tokens)

    return mock.patch.object(ep_hosts, "collect", early)


def swapped_chunks() -> object:
    """The mistake: the results of the last chunk come first."""

    def reversed_chunks(dispatcher: nn.Module, states: list) -> Tensor:
        chunks = [dispatcher.dispatcher.combine(state) for state in states]
        return torch.cat(chunks[::-1])

    return mock.patch.object(ep_dispatch.ChunkedDispatcher, "combine", reversed_chunks)


def every_routing() -> tuple[dict[str, tuple], dict[str, dict], dict[str, dict]]:
    """Return the errors of each routing; those of each mistake; and those of each routing in
    chunks."""
    groups = open_groups()
    right = {name: exchange_errors(name, groups) for name in ROUTINGS}
    in_chunks = {name: exchange_errors(name, groups, CHUNKS)[0] for name in ROUTINGS}
    wrong = {}
    for mistake in fanned_out_twice, combined_early:
        with mistake():
            wrong[mistake.__name__], _ = exchange_errors("spread", groups)
    with swapped_chunks():
        wrong["swapped_chunks"], _ = exchange_errors("spread", groups, CHUNKS)
    return right, wrong, in_chunks


@pytest.fixture(scope="module")
def routed() -> list[tuple]:
    """Return the findings of each rank."""
    return run_ranks(WORLD, every_routing)


@pytest.mark.parametrize("name", ROUTINGS)
def test_results_and_gradients_are_those_of_one_process(routed, name):
    """Chunks are also right on ranks with fewer tokens than chunks, and with none."""
    for rank, (right, _, in_chunks) in enumerate(routed):
        for errors in right[name][0], in_chunks[name]:
            assert max(errors.values()) < 1e-12, (rank, errors)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["fanned_out_twice", "combined_early", "swapped_chunks"])
def test_negative_control_a_wrong_exchange_is_seen(routed, mistake):
    for rank, (_, wrong, _) in enumerate(routed[1:], start=1):  # rank 0 has no tokens
        errors = wrong[mistake]
        assert errors["results"] > 0.1 and errors["x"] > 0.1, (rank, errors)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_token_crosses_to_a_host_once_and_back_once(routed, name):
    """Rows that a rank sends over the wire: in dispatch and combine of the forward pass, and in
    those of the backward pass. Combine sends the results of other ranks' tokens, so it is their
    sum that counts. Negative control: the flat exchange sends a row for each expert."""
    every = [right[name][1] for right, *_ in routed]
    for rows in every:
        assert rows["token and host"] <= rows["tokens"] * (HOSTS - 1)
        dispatch, inside, back_inside, _ = rows["by host"][:4]
        assert dispatch == rows["token and host"] and inside == back_inside == 0
        assert rows["flat"][0] == rows["token and expert"]
    for kind, counted in ("by host", "token and host"), ("flat", "token and expert"):
        wanted = sum(rows[counted] for rows in every)
        sums = [sum(column) for column in zip(*(rows[kind] for rows in every), strict=True)]
        assert [n for n in sums if n] == [wanted] * 4, (kind, sums)  # two in each direction
    if name == "spread":
        assert wanted > 1.5 * sum(rows["token and host"] for rows in every)


def members_of_groups(on_a_host: list[int]) -> list[list[int]] | str:
    """Return the ranks of this rank's groups, where that many ranks say that they are on a host."""
    os.environ["LOCAL_WORLD_SIZE"] = str(on_a_host[dist.get_rank()])
    try:
        groups = ep_hosts.open_groups(mesh_of_experts())
    except InputError as error:
        return str(error)
    return [dist.get_process_group_ranks(group) for group in groups]


def test_peers_have_the_same_place_on_their_hosts():
    assert run_ranks(4, members_of_groups, [2, 2, 2, 2]) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def test_hosts_with_different_numbers_of_ranks_are_refused_on_every_rank():
    for said in run_ranks(3, members_of_groups, [2, 2, 1]):
        assert "as many processes on every host" in said and "some have 1, others 2" in said


FACTORS = {"experts": EXPERTS, "dtype": NUMBERS["dtype"], "optimizer": NUMBERS["optimizer"]}
FACTORS |= {
    factor: {name: options for name, options in table.items() if name not in BETWEEN_OTHERS}
    for factor, table in EXECUTION.items()
}


def of_each_family(*rows: tuple[str, str, str, str]) -> list[dict[str, str]]:
    """Return combinations: the first setting of every factor, except for these four."""
    first = {factor: next(iter(table)) for factor, table in FACTORS.items()}
    names = ("experts", "dtype", "checkpointing", "accumulation")
    return [first | dict(zip(names, row, strict=True)) for row in rows]


IN_CHUNKS = "--parallelism.expert_chunks=3"  # no rank's tokens can be split equally
RUNS = {  # name: (mesh, settings of experts, dtype, checkpointing and accumulation, further options)
    # with the accumulations and recomputations that differ by what they keep
    "two hosts": (
        "ep4 by host",
        [
            ("deepseek_v3", "float64", "none", "reduced once"),
            ("gpt_oss", "float32", "full", "reduced each time"),
        ],
        [],
    ),
    "chunks": ("ep2", [("gpt_oss", "float32", "full", "reduced once")], [IN_CHUNKS]),
    "compiled chunks": (
        "ep2",
        [("deepseek_v3", "float32", "selective", "none")],
        [IN_CHUNKS, *COMPILED],
    ),
    "chunks in a pipeline": (
        "ep2xpp2",
        [("deepseek_v3", "float64", "none", "reduced each time")],
        [IN_CHUNKS, "--parallelism.pipeline_schedule=zero_bubble", "--model.n_layers=4"],
    ),
    "tensor parallelism inside hosts": (
        "experts on ep4xtp2 by host",
        [("deepseek_v3", "float32", "none", "none")],
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize("name", RUNS)
def test_a_mesh_equals_the_plain_model(name):
    mesh, rows, more = RUNS[name]
    check(mesh, of_each_family(*rows), more, factors=FACTORS)


class Order:
    """Notes when rows leave, when they are waited for, and when experts compute."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.real = ep_dispatch.send, ep_dispatch.arrived

    def send(self, *args: object) -> Tensor:
        self.seen.append("leave")
        return self.real[0](*args)

    def arrived(self, rows: Tensor) -> Tensor:
        self.seen.append("arrive")
        return self.real[1](rows)

    def watch(self, mixture: MixtureOfExperts) -> None:
        for name, module in ("shared", mixture.shared_experts), ("experts", mixture.experts):
            module.register_forward_hook(partial(self.note, name))

    def note(self, name: str, _: nn.Module, __: tuple, out: Tensor) -> None:
        self.seen.append(name)
        out.register_hook(lambda _: self.seen.append(name))

    def patched(self) -> object:
        return mock.patch.multiple(ep_dispatch, send=self.send, arrived=self.arrived)


class DispatcherAtOnce(nn.Module):
    """Another dispatcher that does all of its work in `dispatch`: nothing is computed while rows
    are on their way."""

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


def all_orders(cases: list[tuple[str, int]]) -> list[tuple[list[str], list[str]]]:
    groups = open_groups()
    return [orders(groups, exchange, chunks) for exchange, chunks in cases]


def orders(groups: tuple, exchange: str, chunks: int) -> tuple[list[str], list[str]]:
    """Return the order of events on one rank in forward and backward of a mixture with shared
    experts, as it is and with an immediate wait for the rows."""
    torch.manual_seed(dist.get_rank())
    found = []
    for at_once in False, True:
        mixture = MixtureOfExperts(numbers_of_a_mixture())
        for weight in mixture.parameters():
            nn.init.normal_(weight, std=0.1)
        mixture.experts = part_of(layer(), dist.get_rank()).float()
        dispatcher = ep_dispatch.AllToAllDispatcher(dist.group.WORLD)
        if exchange == "hierarchical":
            dispatcher = ep_hosts.HierarchicalDispatcher(*groups)
        mixture.dispatcher = in_chunks(dispatcher, chunks)
        if at_once:
            mixture.dispatcher = DispatcherAtOnce(mixture.dispatcher, mixture.experts)
        order = Order()
        order.watch(mixture)
        with order.patched():
            out, _ = mixture(torch.randn(1, 5, DIM, requires_grad=True))
            order.seen.append("backward")
            out.sum().backward()
        found.append(order.seen)
    return tuple(found)


def numbers_of_a_mixture() -> SimpleNamespace:
    return SimpleNamespace(
        dim=DIM,
        n_experts=X,
        experts_per_token=K,
        expert_dim=HIDDEN,
        n_shared_experts=1,
        router_score="sigmoid",
        normalised_weights=True,
        routed_scale=1.0,
        expert_groups=1,
        groups_per_token=1,
        balancing_bias=False,
        balance_loss=0.0,
    )


def test_experts_compute_while_rows_are_on_their_way():
    """The shared ones behind all dispatches, the others behind the next dispatch and the combine
    before; in backward the same in reverse. Between hosts, that is: the rows for the ranks of this
    host follow. Negative control: waiting at once."""
    cases = [("flat", 1), ("flat", 3), ("hierarchical", 2)]
    for of_rank in run_ranks(WORLD, all_orders, cases):
        for (exchange, chunks), (seen, at_once) in zip(cases, of_rank, strict=True):
            experts = ["experts"]
            if exchange == "hierarchical":
                experts = ["leave", "arrive", "experts", "leave", "arrive"]
            of_chunk = ["arrive", *experts, "leave"]
            forward = ["leave"] * chunks + ["shared"] + of_chunk * chunks + ["arrive"] * chunks
            other = {"leave": "arrive", "arrive": "leave"}
            backward = [other.get(event, event) for event in reversed(forward)]
            assert seen == [*forward, "backward", *backward]
            assert at_once != seen and at_once[:chunks] == ["leave"] * chunks
            assert at_once.index("shared") > at_once.index("arrive")
