"""Shared state of the checks of one rank, lines of the page, and the format of ranks and numbers in
them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import train
from checkpoint.lease import Lease
from configs.schema import Config
from configs.words import plural
from data.loader import Corpora
from data.order import Order
from parallelisms.mesh import World
from tools.plan.device import Device
from tools.plan.estimate import Ring
from tools.preflight.arguments import LONG, SLOW, TIMEOUT
from training.metrics import in_bytes


@dataclass
class ProbeRow:
    """Line of the page. result: ok, warn, FAIL or left out. After a failure that `blocks`, the
    checks that need this one are left out."""

    result: str
    detail: str
    blocks: bool = True
    check: str = ""  # filled in by the page


def fine(detail: str) -> ProbeRow:
    return ProbeRow("ok", detail)


def failed(detail: str, blocks: bool = True) -> ProbeRow:
    return ProbeRow("FAIL", detail, blocks)


@dataclass
class Probe:
    """Preflight of one rank: its arguments, and the results of its checks so far."""

    argv: list[str]
    world: World
    host: str
    node: str  # number of the host in the run; two hosts may have the same name
    seconds: int | None  # --timeout
    expect: dict[str, float] = field(default_factory=dict)  # --expect: GB/s by mesh dimension
    # --device: what the machines should be, as tools/plan/device.py describes it
    table: Device | None = None
    id: str = ""  # of this preflight, the same on all ranks
    hosts: dict[int, str] = field(default_factory=dict)  # on rank 0: rank -> host
    leaders: list[int] = field(default_factory=list)  # on rank 0: the first rank of each host
    cfg: Config | None = None
    args: Any = None  # the model's numbers: `Args` of its family
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    place: Path | None = None  # the temporary folder
    lease: Lease | None = None
    order: Order | None = None
    corpora: Corpora | None = None
    job: train.Job | None = None

    def limit(self, check: str) -> int:
        """Return the seconds that a check may take on a rank."""
        usual = self.cfg.run.init_timeout_seconds if self.cfg and check in LONG else TIMEOUT
        return self.seconds or usual

    def wanted(self, dim: str, kind: str, ranks: Sequence[int], size: int) -> tuple[float, str]:
        """GB/s (bus bandwidth) that a collective of `size` bytes should reach, or a message (kind
        "send"), and which option says so; 0: none does."""
        if dim in self.expect:
            return self.expect[dim], f"--expect={dim}:{self.expect[dim]:g}"
        if not self.table:
            return 0.0, ""
        n = len(ranks)
        share = (n - 1) / n  # of the bytes, that each rank sends
        if kind == "send":
            share = 1
        elif kind == "all-reduce":
            share = 2 * (n - 1) / n
        seconds = Ring.of(list(ranks), self.world.local_size).seconds(kind, size, self.table)
        rate = size * share / seconds / 1e9
        return rate, f"{self.table.name or 'the device'} should make {rate:.3g}"

    @property
    def slow(self) -> str:
        """Return the result for a slow rank. Where the ranks of a host share its cores, a low rate
        may come from other processes, so it only warns."""
        return "FAIL" if self.device.type == "cuda" else "warn"

    def named(self, ranks: Iterable[int]) -> str:
        """ "ranks 0-3, 6 (hosts a, b)" """
        ranks = sorted(ranks)
        of_ranks = [self.hosts.get(r, f"number {r // self.world.local_size}") for r in ranks]
        hosts = list(dict.fromkeys(of_ranks))
        more = ", ..." if len(hosts) > 4 else ""
        return f"{spans(ranks)} ({plural(len(hosts), 'host')} {', '.join(hosts[:4])}{more})"


def spans(ranks: Sequence[int]) -> str:
    """Format ascending numbers as "rank 5" or "ranks 0-3, 6"."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][-1] + 1:
            runs[-1][1:] = [r]
        else:
            runs.append([r])
    texts = ["-".join(map(str, run)) for run in runs]
    more = ", ..." if len(texts) > 12 else ""
    return f"{plural(len(ranks), 'rank')} {', '.join(texts[:12])}{more}"


def differences(probe: Probe, values: Sequence[object]) -> str:
    """Describe the ranks that differ from most; "" if none does. values: by rank, None: not set."""
    counts = Counter(values)
    if len(counts) == 1:
        return ""
    usual = max(counts, key=counts.__getitem__)  # of equally many ranks' the lowest rank's
    parts = []
    others = [value for value, _ in counts.most_common() if value != usual]
    for value in [usual, *others][:4]:
        ranks = [r for r, v in enumerate(values) if v == value]
        parts.append(f"{'not set' if value is None else short(value)} on {probe.named(ranks)}")
    return f"{parts[0]}, but {'; '.join(parts[1:])}"


def least(values: Iterable[float]) -> int:
    """Return the rank with the smallest value. values: by rank."""
    return min(enumerate(values), key=itemgetter(1))[0]


def most(values: Iterable[float]) -> int:
    """Return the rank with the largest value. values: by rank."""
    return max(enumerate(values), key=itemgetter(1))[0]


def judge_writing(probe: Probe, rates: list[float], size: int, does: str) -> tuple[str, list[int]]:
    """Describe the bytes/s at which ranks write a checkpoint of `size` bytes, and name the slow
    ranks. does: the action, as "uploads"."""
    middle = statistics.median(rates)
    low = least(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < SLOW["write"] * middle]
    seconds = size / len(rates) / rates[low]
    detail = f"a rank {does} {in_bytes(middle)}/s (median), {in_bytes(rates[low])}/s at least, on "
    detail += f"{probe.named([low])}: a save of {in_bytes(size)} takes about {in_seconds(seconds)}"
    if slow:
        detail += f"; {probe.named(slow)} below {SLOW['write']} of the median"
    return detail, slow


def short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def in_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min"
