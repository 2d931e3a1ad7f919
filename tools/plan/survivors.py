"""Model what a run loses that goes on without the replicas that it has lost (run.fault_tolerant).

A failure takes one replica. All others stop for P seconds, until the next round has begun
(checkpoint/rounds.py), and again when the replica is back, D seconds later. Until then the others
train, at the pace of the rank that has most of the batch. With M seconds between failures

    goodput = saves x e^(-P / M) x sum over k of Poisson(k; D / M) s(R - k) / s(R)

- saves: tools/plan/interruptions.py::two_levels, for the failures alone after which all restart:
  node 0's host is lost, which serves the store, or no replica is left.
- e^(-P / M): the share of the time outside stops, each of which a failure begins anew (Daly 2006,
  equation 20, without saves). P is of both stops.
- the sum: of R replicas, k are missing as in a queue with room for all (M/G/infinity), and s(n) is
  the speed of n.

What a stop takes, in seconds for n ranks (`Survivors`): measured, 0.39 on two ranks; noticed, 5 for
a host that is silent; agreed, a grace, and four calls of each rank to the store, which answers
10,000 a second; groups, 265 n / 96,000; the state to the host and back, by bytes / rate; the model
built and compiled again (--rebuild-seconds); half a step. The second stop has the state of a
replica to send in place of what is noticed and of the half step.
"""

import math
from dataclasses import dataclass

from checkpoint.rounds import GRACE, look
from configs.words import aligned, number_of
from tools.launch.rounds import SILENT
from tools.plan.arguments import REBUILD_SECONDS
from tools.plan.report import size_text, time_text

# From kill -9 of one of two ranks to the next step of the other (lab/bench/results/restart.txt)
NEXT_STEP = 0.39
CALLS_PER_SECOND = 10_000  # that a TCPStore answers (checkpoint/rounds.py::look)
# NCCL took some 265 s to open its communicators on 96,000 GPUs, and NCCLX an eleventh: so a summary
# of arXiv:2510.20171 says, and the paper was not read. In proportion to the ranks: assumed, and too
# much for fewer, since it is said to grow faster than they do.
GROUPS = 265 / 96_000
COLUMNS = ("GPUs", "replicas", "noticed", "agreed", "groups", "state", "built", "half a step")
COLUMNS += ("stop", "at return", "missing for", "speed meanwhile", "state of a GPU")


def groups(ranks: int) -> float:
    """Return the seconds in which so many ranks open their process groups."""
    return GROUPS * ranks


@dataclass(frozen=True)
class Survivors:
    """The replicas of a run, and what happens to them. Seconds, bytes, bytes per second."""

    gpus: int
    hosts: int
    replicas: int
    batch: int  # sequences
    ranks: int  # of a replica, among which its sequences are shared further
    mtbf: float  # of all GPUs together
    step: float
    held: float  # weights and optimizer state of a GPU
    to_host: float  # rate
    network: float  # rate of a GPU
    built: float
    back: float  # from a failure until the replica can return
    gradients: float  # of a GPU

    noticed = SILENT

    @property
    def agreed(self) -> float:
        return GRACE + look(self.gpus) + 3 * self.gpus / CALLS_PER_SECOND

    @property
    def groups(self) -> float:
        return groups(self.gpus)

    @property
    def state(self) -> float:
        return 2 * self.held / self.to_host

    @property
    def stop(self) -> float:
        """Return the seconds from a failure until the survivors are as far as they were."""
        return self.noticed + self.step / 2 + self._round

    @property
    def at_return(self) -> float:
        """Return the seconds for which all stop when the replica is back."""
        return self._round + self.held / self.network

    @property
    def _round(self) -> float:
        return NEXT_STEP + self.agreed + self.groups + self.state + self.built

    @property
    def missing(self) -> float:
        """Return the seconds in which the others train without the replica."""
        return max(0.0, self.back - self.stop)

    def training(self, missing: int) -> float:
        """Return the share of the throughput while so many replicas are missing."""
        left = self.replicas - missing
        return self._rows(self.replicas) / self._rows(left) if left else 0.0

    def _rows(self, replicas: int) -> int:
        """Return the sequences of the rank that has most (data/uneven.py)."""
        return -(-self.batch // (replicas * self.ranks))

    def kept(self) -> float:
        """Return the share of the work that failures leave which the replicas survive."""
        mean = self.missing / self.mtbf
        share = 0.0
        chance = math.exp(-mean)
        for missing in range(self.replicas):
            share += chance * self.training(missing)
            chance *= mean / (missing + 1)
        return share * math.exp(-(self.stop + self.at_return) / self.mtbf)

    def cells(self) -> tuple[str, ...]:
        """Format a row of the table of parts."""
        parts = self.noticed, self.agreed, self.groups, self.state, self.built, self.step / 2
        return (
            f"{self.gpus:,}",
            f"{self.replicas:,}",
            *map(time_text, (*parts, self.stop, self.at_return, self.missing)),
            f"{self.training(1):.0%}",
            size_text(self.held + self.gradients),
        )


def lines(rows: list[Survivors], size: int, batch: int, asked: bool) -> list[str]:
    """Describe the parts of what survivors lose. size: GPUs of a replica;
    batch: its sequences are shared; asked: whether --replace-minutes says when one returns."""
    of = number_of(size, "GPU")
    if not rows:
        return [f"  no restart: it needs two replicas of {of}, as the planned run is one"]
    back = (
        "with --replace-minutes" if asked else "as a restart's processes, without --replace-minutes"
    )
    return [
        "",
        "No restart (run.fault_tolerant): what a failure takes",
        *aligned([COLUMNS, *(row.cells() for row in rows)]),
        f"  replicas: of {of}, as planned; state of a GPU: weights, gradients, moments in float32",
        "  noticed: a silent host (a process that ends, at once); groups: 265 s on 96,000 GPUs (NCCL, "
        f"arXiv:2510.20171), in proportion; built: {REBUILD_SECONDS:g} s where compile.enabled "
        "(assumed; --rebuild-seconds); state: to the host and back",
        f"  missing for: {back}, if a host is spare; speed meanwhile: the {batch:,} sequences of a batch "
        "are shared by one replica less, some ranks with padding",
        "  all restart when node 0's host is lost, or no replica is left; a rank that hangs is noticed "
        "as before a restart",
    ]
