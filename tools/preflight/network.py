"""The checks of what is between ranks: that they reach each other, their clocks, the rates of
groups and links."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from configs.words import number_of
from parallelisms import dp
from parallelisms import mesh as meshes
from tools.preflight.arguments import SLOW
from tools.preflight.machine import synchronise
from tools.preflight.probe import Probe, ProbeRow, failed, fine, in_seconds
from training.metrics import in_bytes

LEAST_LINKS = 3  # of one kind: among fewer no link can be called slow
# that clocks may differ: logs of several hosts can be read together, certificates hold, `make`
# works
CLOCK_SECONDS = 1.0
ROUND_TRIPS = 10
LINK_BYTES = 64 << 20  # of a message between two ranks, at most
# seconds by which NCCL's own limit, which aborts the process, exceeds that of a check
NCCL_MARGIN = 60
DEBUG = "see with NCCL_DEBUG=INFO which network"
# torch 2.13 renamed it
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


# connect, clock: ranks reach each other -----------------------------------------------------------


def measure_connect(probe: Probe) -> dict:
    """Start the process group, and sum something on the CPU and on the device."""
    began = time.perf_counter()
    run = probe.cfg.run.model_copy(update={"init_timeout_seconds": probe.limit("connect")})
    meshes.open_group(run)
    limit_collectives(probe, probe.limit("connect"))
    for device in {torch.device("cpu"), probe.device}:
        count = torch.ones(1, device=device)
        dist.all_reduce(count)
        if count.item() != probe.world.size:
            raise RuntimeError(
                f"the sum of 1 over {probe.world.size} ranks was {count.item():g} on {device}"
            )
    return {"seconds": time.perf_counter() - began}


def limit_collectives(probe: Probe, seconds: int) -> None:
    """Let a rank that waits in vain report it before its check's time is over."""
    seconds += NCCL_MARGIN if probe.device.type == "cuda" else 0
    if probe.job:
        probe.job.mesh.set_timeout(seconds)
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def judge_connect(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    backend = "NCCL and gloo" if probe.device.type == "cuda" else "gloo"
    seconds = max(a["seconds"] for a in answers)
    return [fine(f"{backend}: all ranks reach each other, within {in_seconds(seconds)}")]


def measure_clock(probe: Probe) -> dict:
    """Measure the offsets of the hosts' clocks from rank 0's: the reply's time against the middle
    between request and reply, of the fastest of ROUND_TRIPS; wrong by at most half that round
    trip (Cristian's estimate, doi:10.1007/BF01784024)."""
    now = torch.zeros(1, dtype=torch.float64)
    if probe.world.rank:
        for _ in range(0 if probe.world.local_rank else ROUND_TRIPS):
            dist.recv(now, 0)
            dist.send(torch.tensor([wall_clock()], dtype=torch.float64), 0)
        return {}
    offsets = {}
    for leader in probe.leaders[1:]:
        rounds = []
        for _ in range(ROUND_TRIPS):
            began = wall_clock()
            dist.send(now, leader)
            dist.recv(now, leader)
            ended = wall_clock()
            rounds.append((ended - began, now.item() - (began + ended) / 2))
        offsets[str(leader)] = min(rounds)
    return {"offsets": offsets}


def wall_clock() -> float:
    return time.time()


def judge_clock(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    offsets = {0: 0.0}  # leader -> seconds from rank 0's clock
    round_trips = [0.0]
    for r, (seconds, offset) in answers[0]["offsets"].items():
        offsets[int(r)] = offset
        round_trips.append(seconds)
    if len(offsets) == 1:
        return [fine("one host, one clock")]
    middle = statistics.median(offsets.values())
    from_middle = {r: abs(offset - middle) for r, offset in offsets.items()}
    odd = max(from_middle, key=from_middle.__getitem__)
    skew = max(offsets.values()) - min(offsets.values())
    error = max(round_trips) / 2
    detail = (
        f"the hosts' clocks differ by {in_seconds(skew)} (known to {in_seconds(error)}; "
        f"limit {CLOCK_SECONDS:g} s)"
    )
    if skew - error <= CLOCK_SECONDS:
        return [fine(detail)]
    detail += f", most on {probe.named([odd])}: {offsets[odd] - middle:+.3g} s from the median"
    return [failed(f"{detail}; start its time service (chrony, NTP)", blocks=False)]


# bandwidth: of each mesh dimension, and of each link ----------------------------------------------


def messages(probe: Probe) -> dict[str, tuple[int, torch.dtype]]:
    """Return the typical message of each mesh dimension: bytes (at most 1 GiB, where any link is at
    its full rate) and dtype.

    - FSDP's dimension (dp_shard, or with context parallelism dp_shard_cp): all-gather of a block's
      weights, of which tensor parallelism leaves a share.
    - dp_replicate: all-reduce of the shards of their gradients.
    - cp: keys and values of whole sequences, about as large as the activations, [b, T, dim / tp].
    - tp: all-gather of a microbatch's activations, [b, T / cp, dim].
    - pp: send of each tensor-parallel rank's share of them.
    - ep: all-to-all of a row of dim for each expert of each token.
    - edp: all-gather of the weights of a rank's experts.
    """
    mesh = probe.job.mesh
    t = probe.cfg.training
    reduced = dp.DTYPES[t.reduce_dtype]
    layers = probe.job.model.layers
    last = list(layers.values())[-1]  # the first ones may have no experts
    block = sum(p.numel() for p in last.parameters()) / mesh.tp
    activations = t.local_batch_size * t.seq_len // mesh.cp * probe.args.dim
    experts = {}
    if mesh.experts_mesh:
        *_, layer = probe.job.model.mixtures().values()
        weights = sum(p.numel() for p in layer.experts.parameters())
        block -= weights / mesh.tp
        rows = activations / mesh.tp * probe.args.experts_per_token
        experts = {"edp": (weights / mesh.ep, probe.dtype), "ep": (rows, probe.dtype)}
    elements = {
        "pp": (activations / mesh.tp, probe.dtype),
        mesh.fsdp_mesh.mesh_dim_names[-1]: (block, probe.dtype),
        "dp_replicate": (block / mesh.fsdp_mesh.size(-1), reduced),
        "cp": (activations * mesh.cp / mesh.tp, probe.dtype),
        "tp": (activations, probe.dtype),
        **experts,
    }
    return {
        dim: (int(min(count * dtype.itemsize, 1 << 30)), dtype)
        for dim, (count, dtype) in elements.items()
    }


def measure_bandwidth(probe: Probe) -> dict:
    """Measure rates of collectives by dimension, and of the links between adjacent ranks. Stages of
    a pipeline send each other messages and have no collectives that matter: for `pp` only links are
    measured, and the bytes of a message."""
    mesh = probe.job.mesh
    by_dimension = {}
    links = []
    stage_bytes = 0
    for dim, (size, dtype) in messages(probe).items():
        dims = mesh.device_mesh
        if mesh.experts_mesh and dim in ("edp", "ep"):
            dims = mesh.experts_mesh
        elif dim in mesh.fsdp_mesh.mesh_dim_names:
            dims = mesh.fsdp_mesh
        group = dims.get_group(dim)
        ranks = dist.get_process_group_ranks(group)
        n = len(ranks)
        if n == 1:
            continue
        if dim == "pp":
            elements = min(size, LINK_BYTES) // dtype.itemsize
            hidden = torch.ones(elements, dtype=dtype, device=mesh.device)
            links += ring_links(probe, dim, group, ranks, hidden)
            stage_bytes = hidden.nbytes
            continue
        elements = max(1, -(-size // dtype.itemsize // n))
        part = torch.ones(elements, dtype=dtype, device=mesh.device)
        whole = part.repeat(n)
        other = torch.empty_like(whole) if dim == "ep" else None
        by_dimension[dim] = {"ranks": ranks, "bytes": whole.nbytes}
        # bus bandwidth: the share of the message that each rank sends
        share = (n - 1) / n
        collectives = {
            "all-gather": (share, partial(ALL_GATHER, whole, part, group=group)),
            "all-reduce": (2 * share, partial(dist.all_reduce, whole, group=group)),
        }
        if dim == "ep":
            exchange = partial(dist.all_to_all_single, other, whole, group=group)
            collectives = {"all-to-all": (share, exchange)}
        for name, (factor, fn) in collectives.items():
            seconds = collective_seconds(fn, mesh.device, group)
            by_dimension[dim][name] = whole.nbytes * factor / seconds
        links += ring_links(probe, dim, group, ranks, part[: LINK_BYTES // dtype.itemsize])
    return {"dims": by_dimension, "links": links, "stage_bytes": stage_bytes}


def collective_seconds(
    fn: Callable[[], object], device: torch.device, group: dist.ProcessGroup
) -> float:
    """Return the median of five calls that the ranks begin together, after one that connects."""
    seconds = []
    for i in range(6):
        dist.barrier(group)
        synchronise(device)
        began = time.perf_counter()
        fn()
        synchronise(device)
        if i:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def ring_links(
    probe: Probe, dim: str, group: dist.ProcessGroup, ranks: list[int], data: torch.Tensor
) -> list[list]:
    """Measure the links of a group's ring, pair by pair: [dim, from, to, bytes per second, seconds
    of latency], reported by the first of the pair. The latency is that of a message of one element,
    the best of four.

    A small message goes there and back before each measurement, so that both ranks are ready.
    """
    n = len(ranks)
    me = ranks.index(probe.world.rank)
    links = []
    small = data[:1].clone()
    device = probe.job.mesh.device
    pairs = [(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
    for number in range(3):
        for a, b in (pair for pair in pairs if phase(pair, n) == number and me in pair):
            other = ranks[b if me == a else a]
            rates = []
            latencies = []
            for _ in range(4):
                seconds = []
                for message in small, small, data:
                    synchronise(device)
                    began = time.perf_counter()
                    ping_pong(message, other, me == a, group)
                    synchronise(device)
                    seconds.append(time.perf_counter() - began)
                latencies.append(seconds[1] / 2)
                rates.append(2 * data.nbytes / seconds[2])
            if me == a:
                links.append([dim, probe.world.rank, other, max(rates), min(latencies)])
    return links


def phase(pair: tuple[int, int], n: int) -> int:
    """Return the phase in which a pair of a ring of n is measured, so that no rank is in two pairs
    at once: even pairs, odd pairs, and last the pair that closes a ring of odd length."""
    first, second = pair
    if n % 2 and second == 0:
        return 2
    return first % 2


def ping_pong(message: torch.Tensor, other: int, first: bool, group: dist.ProcessGroup) -> None:
    """Send and receive, in that order if `first`."""
    for sends in (first, not first):
        if sends:
            dist.send(message, other, group=group)
        else:
            dist.recv(message, other, group=group)


def judge_bandwidth(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    for dim in answers[0]["dims"]:
        groups: dict[tuple, list[dict]] = defaultdict(list)
        for a in answers:
            groups[tuple(a["dims"][dim]["ranks"])].append(a["dims"][dim])
        of_rank_0 = answers[0]["dims"][dim]
        summary = []
        size = of_rank_0["bytes"]
        for name in "all-gather", "all-reduce", "all-to-all":
            if name not in of_rank_0:
                continue
            rates = {}
            for ranks, members in groups.items():
                rates[ranks] = min(row[name] for row in members) / 1e9
            middle = statistics.median(rates.values())
            low = min(rates, key=rates.__getitem__)
            slow = [ranks for ranks, rate in rates.items() if rate < SLOW["group"] * middle]
            for ranks in slow[:8]:
                text = (
                    f"{dim}: {name} of {probe.named(ranks)}: {rates[ranks]:.3g} GB/s, "
                    f"{rates[ranks] / middle:.2f} of the median {middle:.3g} of the {len(rates)} groups"
                )
                rows.append(ProbeRow(probe.slow, text, blocks=False))
            wanted, source = probe.wanted(dim, name, low, size)
            if middle < SLOW["group"] * wanted:
                text = (
                    f"{dim}: {name} {middle:.3g} GB/s, but {source}: {DEBUG} and protocol are used"
                )
                rows.append(failed(text, blocks=False))
            least = f" (least {rates[low]:.3g}, {probe.named(low)})" if len(rates) > 1 else ""
            summary.append(f"{name} {middle:.3g} GB/s{least}")
        groups_of = f"{number_of(len(groups), 'group')} of {len(of_rank_0['ranks'])}"
        rates_of = f"{in_bytes(size)}: {', '.join(summary)} (bus bandwidth)"
        rows.append(fine(f"{dim}, {groups_of}, {rates_of}"))
    return rows + judge_links(probe, answers) or [fine("one rank: nothing is sent")]


class NetworkLink(NamedTuple):
    """Row of `ring_links`."""

    dim: str
    first: int  # rank
    second: int
    rate: float  # bytes per second
    latency: float  # seconds


def judge_links(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    kinds: dict[tuple[str, bool], list[NetworkLink]] = defaultdict(list)
    for a in answers:
        for link in itertools.starmap(NetworkLink, a["links"]):
            between = probe.hosts[link.first] != probe.hosts[link.second]
            kinds[link.dim, between].append(link)
    for (dim, between), links in kinds.items():
        middle = statistics.median(link.rate for link in links)
        latency = statistics.median(link.latency for link in links)
        kind = f"{dim} {'between' if between else 'within'} hosts"
        if dim == "pp":  # the other dimensions are judged by their collectives
            ends = (links[0].first, links[0].second)
            wanted, source = probe.wanted(dim, "send", ends, answers[0]["stage_bytes"])
            if middle / 1e9 < SLOW["group"] * wanted:
                text = (
                    f"links {kind}: median {middle / 1e9:.3g} GB/s, but {source}: {DEBUG} is used"
                )
                rows.append(failed(text, blocks=False))
        slow = []
        if len(links) >= LEAST_LINKS:
            slow = [link for link in links if link.rate < SLOW["link"] * middle]
        for link in slow[:8]:
            text = (
                f"link {probe.named([link.first])} - {probe.named([link.second])}: "
                f"{link.rate / 1e9:.3g} GB/s, {link.rate / middle:.2f} of the median of {kind}; see "
                "cable, card and NCCL_* there"
            )
            rows.append(ProbeRow(probe.slow, text, blocks=False))
        if not slow:
            slowest = min(links, key=attrgetter("rate"))
            text = (
                f"links {kind}: {len(links)}, median {middle / 1e9:.3g} GB/s, least "
                f"{slowest.rate / 1e9:.3g} between ranks {slowest.first} and {slowest.second}; "
                f"latency {in_seconds(latency)}"
            )
            rows.append(fine(text))
    return rows
