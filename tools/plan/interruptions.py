"""Compare what interruptions cost with checkpoints in storage alone, with copies of the state in the
memory of other hosts, and where other replicas go on, on 1,024 to 65,536 GPUs (`--peers`).

Failures come at random, with exponential gaps, and each is of one of two kinds. Most leave enough
hosts to restore the newest copy; some take a host with all hosts that hold copies of its part, and
the run goes back to storage. That is two-level checkpointing: Vaidya (1995), "A case for two-level
distributed recovery schemes"; Moody et al. (2010), "Design, Modeling, and Evaluation of a Scalable
Multi-level Checkpointing System". With one kind alone it is Daly's (2006) formula, as in
tools/goodput.py::expected.

Other numbers of GPUs than the plan's are assumed to train as many tokens per second and GPU, with
the same batch, and to shard the state over all of them, or over replicas of the plan's size.
"""

import math
from dataclasses import dataclass

from checkpoint.peers import GENERATIONS
from configs.words import aligned, number_of
from tools.goodput import best_interval, expected
from tools.plan import survivors
from tools.plan.arguments import LOST_TOGETHER, REBUILD_SECONDS, SIZES
from tools.plan.plan import Plan
from tools.plan.report import size_text, time_text
from tools.plan.survivors import Survivors

COLUMNS = ("GPUs", "a failure in", "back to", "saved every", "back in", "goodput", "lost", "memory")
# GB/s at which a rank sends copies to another host, over gloo and TCP: assumed
PEER_GB_PER_S = 1.0
# Seconds from kill -9 of a rank to the end of the next step there, in one allocation, with processes
# that stand by (lab/bench/results/restart.txt; 4.30 without them). --restart-minutes is for large
# runs, which take longer: 10 minutes on some 100,000 GPUs (arXiv:2602.00277, abstract).
RESTARTED = 1.78
# A row of the comparison: its name, the seconds of work between saves that most failures go back to,
# those from such a failure to the next step, the goodput, the bytes of each host for the copies
Outlook = tuple[str, float, float, float, float]
# Storage is written at least daily: other things than failures need checkpoints, too.
DAY = 86400.0


@dataclass(frozen=True)
class SaveLevel:
    """Where a run goes back to, in seconds."""

    interval: float  # of work between saves
    stall: float  # that a save holds training up
    write: float  # from there until it counts
    back: float  # from a failure to the next step


def segment(mtbf: float, seconds: float, back: float, lost: float) -> tuple[float, float]:
    """Return the mean seconds until a stretch of so many seconds is over or a failure sends the run
    back to storage, and the probability of the latter.

    Other failures repeat the stretch from its beginning, after `back` seconds in which the run may
    fail again. lost: the share of failures that send it back to storage.
    """
    fails = -math.expm1(-seconds / mtbf)
    # in storage, or by a restart that no failure interrupts
    ends = lost + (1 - lost) * math.exp(-back / mtbf)
    leaves = ends * math.exp(-seconds / mtbf) + fails * lost
    return mtbf * fails / leaves, fails * lost / leaves


def two_levels(mtbf: float, memory: SaveLevel, storage: SaveLevel, lost: float) -> float:
    """Return the goodput with copies in memory and saves in storage. Exact where both count at once,
    as failures during saves and restarts count, too.

    Between two saves in storage are k copies, so k stretches and the save's stall. With A the mean
    seconds until all have passed or storage is read, G the probability that it is read, and
    D = M (e^(back/M) - 1) for a restart from it (Daly 2006, equation 20), the interval takes
    E = A + G (D + E). What is only published `write` seconds later adds those to `back`, as in
    tools/goodput.py::expected.
    """
    copies = max(1, round(storage.interval / memory.interval))
    back = memory.back + memory.write
    seconds, reads = segment(mtbf, memory.interval + memory.stall, back, lost)
    last_seconds, last_reads = segment(mtbf, storage.stall, back, lost)
    log_passes = copies * math.log1p(-reads) if reads < 1 else -math.inf
    stretches = -math.expm1(log_passes) / reads if reads else copies
    passes = math.exp(log_passes)
    mean = seconds * stretches + passes * last_seconds
    whole = passes * (1 - last_reads)
    restarts = math.exp(-(storage.back + storage.write) / mtbf)
    spent = mean * restarts + (1 - whole) * mtbf * (1 - restarts)
    return copies * memory.interval * whole * restarts / spent


def lost_with_copies(mtbf: float, hosts: int, peers: int, window: float, together: float) -> float:
    """Return the share of failures after which no host holds the newest copy of some part.

    Assumed: a share `together` takes a host and all hosts with its copies. In the others one host
    is lost alone, and each of the `peers` others that have its part fails independently in the
    `window` seconds until there are as many copies again. GEMINI (Wang et al., SOSP 2023) counts
    such placements for failures that come at once.
    """
    one = -math.expm1(-window / (mtbf * hosts))
    return together + (1 - together) * one**peers


class ScaledRun:
    """The run of a plan on another number of GPUs. Seconds, bytes, bytes per second."""

    def __init__(
        self,
        plan: Plan,
        gpus: int,
        peers: int,
        together: float,
        built: float | None = None,
        replicas: int = 0,
    ) -> None:
        """peers, together: as in `lost_with_copies`; built: seconds in which the model is built and
        compiled, None for what is assumed; replicas: in place of the plan's."""
        inputs = plan.inputs
        checkpoint = plan.cfg.checkpoint
        self.plan = plan
        self.gpus = gpus
        self.replicas = replicas or plan.cfg.parallelism.data_parallel_replicate
        self.built = REBUILD_SECONDS * plan.cfg.compile.enabled if built is None else built
        self.hosts = math.ceil(gpus / inputs.per_host)
        self.mtbf = inputs.mtbf_gpu_hours * 3600 / gpus
        self.step = plan.time.seconds * inputs.gpus / gpus
        part = plan.checkpoint_bytes / gpus  # that a rank writes
        self.held = part * self.replicas
        self.copies = GENERATIONS * (1 + peers) * part * inputs.per_host  # on a host
        self.rate = checkpoint.peer_rate * 1e6 or PEER_GB_PER_S * 1e9
        copy = self.held / inputs.device.host_gb_per_s / 1e9
        sent = copy + peers * part / self.rate
        self.write = plan.checkpoint_bytes / inputs.storage_gb_per_s / 1e9
        self.restart = inputs.restart_seconds
        # Of a restart without reading storage: what --restart-minutes leaves, and at least what was
        # measured on two cores, with groups of this size and the model built.
        least = RESTARTED + survivors.groups(gpus) + self.built
        self.processes = max(self.restart - self.write, least)
        stall = max(0.0, copy - self.step)  # for which a copy holds training up
        self.save_stall = stall if checkpoint.async_save else copy + self.write
        # A copy is made and sent, and one that holds training up comes as often as loses least.
        often = max(sent, best_interval(self.mtbf, stall) if stall else 0.0)
        steps = max(1, math.ceil(often / self.step))
        if checkpoint.peers:
            steps = max(steps, checkpoint.peer_interval)
        back = self.processes + self.held / self.rate + copy  # loaded by a host that is new
        self.memory = SaveLevel(steps * self.step, stall, sent, back)
        window = back + self.memory.interval + sent
        self.lost = lost_with_copies(self.mtbf, self.hosts, peers, window, together)

    def storage(self, lost: float = 1.0) -> SaveLevel:
        """Return saves in storage at the best interval, where a share of the failures needs them: that
        of Young (1974) and Daly (2006) with the mean time between those. A save is written before
        the next begins, and comes after a step."""
        best = best_interval(self.mtbf / max(lost, 1e-9), self.save_stall)
        interval = max(min(best, DAY), self.write, self.step)
        return SaveLevel(interval, self.save_stall, self.write, self.restart)

    def alone(self) -> Outlook:
        level = self.storage()
        goodput = expected(self.mtbf, level.stall, level.back, level.interval, level.write)
        return "storage alone", level.interval, level.back, goodput, 0.0

    def with_copies(self) -> Outlook:
        level = self.memory
        goodput = two_levels(self.mtbf, level, self.storage(self.lost), self.lost)
        return "copies, restart", level.interval, level.back, goodput, self.copies

    def without_restart(self, left: Survivors) -> Outlook:
        """Return what copies and survivors together do."""
        host = 1 / self.hosts  # node 0's
        end = lost_with_copies(self.mtbf, self.replicas, self.replicas - 1, left.back, host)
        saved = two_levels(self.mtbf / end, self.memory, self.storage(self.lost * end), self.lost)
        goodput = saved * left.kept()
        return "copies, no restart", self.memory.interval, left.stop, goodput, self.copies

    def survivors(self, back: float | None) -> Survivors:
        """Return the replicas of this run. back: seconds until one that is lost can return; None: as
        many as the processes of a restart take."""
        plan = self.plan
        cfg, device = plan.cfg, plan.inputs.device
        ranks = plan.data_parallel // cfg.parallelism.data_parallel_replicate
        if cfg.training.global_batch_size < ranks * self.replicas:
            ranks = 1  # of a mesh that shares sequences further
        return Survivors(
            self.gpus,
            self.hosts,
            self.replicas,
            cfg.training.global_batch_size,
            ranks,
            self.mtbf,
            self.step,
            self.held,
            device.host_gb_per_s * 1e9,
            device.fabric_gb_per_s * 1e9,
            self.built,
            self.processes if back is None else back,
            4 * plan.parameters * self.replicas / self.gpus,
        )


def section(
    plan: Plan, peers: int, together: float | None, back: float | None, built: float | None
) -> str:
    """Format the comparison, with what it assumes. peers: other hosts that have a copy. together: as
    in `lost_with_copies`; None: none where copies go to other racks. back: seconds until a lost
    replica can return; built: those in which the model is built again; None: as `ScaledRun` says."""
    if together is None:
        together = LOST_TOGETHER if plan.cfg.checkpoint.peer_stride == 1 else 0.0
    price = plan.inputs.usd_per_gpu_hour
    hours = plan.steps * plan.time.seconds * plan.inputs.gpus / 3600
    size = plan.inputs.gpus // plan.cfg.parallelism.data_parallel_replicate  # of a replica
    rows = [COLUMNS]
    parts = []
    own = [plan.inputs.gpus] if plan.inputs.gpus > peers * plan.inputs.per_host else []
    for gpus in sorted({*SIZES, *own}):
        run = ScaledRun(plan, gpus, peers, together, built)
        outlooks = [run.alone(), run.with_copies()]
        if gpus >= 2 * size:
            replicated = ScaledRun(plan, gpus, peers, together, built, gpus // size)
            parts.append(replicated.survivors(back))
            outlooks.append(replicated.without_restart(parts[-1]))
        first = (f"{gpus:,}", time_text(run.mtbf))
        for outlook in outlooks:
            rows.append((*first, *cells(outlook, hours, price)))
            first = ("", "")
    lines = aligned(rows)
    lines += assumptions(plan, peers, together)
    lines += survivors.lines(parts, size, plan.cfg.training.global_batch_size, back is not None)
    return "\n".join(["Interruptions", *lines])


def cells(row: Outlook, hours: float, price: float) -> tuple[str, ...]:
    """Format a row. hours: of all GPUs, without interruptions."""
    name, interval, back, goodput, memory = row
    lost = "all"
    if goodput:
        more = hours * (1 / goodput - 1)
        lost = f"${more * price:,.0f}" if price else f"{more:,.0f} GPU-h"
    size = size_text(memory) if memory else "-"
    return name, time_text(interval), time_text(back), f"{goodput:.2%}", lost, size


def assumptions(plan: Plan, peers: int, together: float) -> list[str]:
    """Say what the comparison assumes."""
    inputs = plan.inputs
    checkpoint = plan.cfg.checkpoint
    run = ScaledRun(plan, inputs.gpus, peers, together)
    often = f"every {number_of(checkpoint.peer_interval, 'step')}"
    often = often if checkpoint.peers else "after each step, if they can be sent so often"
    rate = (
        f"{run.rate / 1e9:g} GB/s per rank ({'peer_rate' if checkpoint.peer_rate else 'assumed'})"
    )
    lines = [
        f"  copies: in the memory of {number_of(peers, 'other host')}, {often}, at "
        f"{rate}; memory: of each host, for {GENERATIONS} generations",
        f"  a restart takes {time_text(run.restart)} (--restart-minutes), of which storage is read "
        f"{time_text(run.write)}; from copies the rest, at least {RESTARTED} s, as measured from kill "
        "-9 to the next step in one allocation (lab/bench/results/restart.txt), with groups and the "
        "model built as below",
        f"  before a restart a silent host is noticed after {time_text(plan.cfg.run.step_timeout_seconds)} "
        "(run.step_timeout_seconds), which --restart-minutes includes",
        f"  {together:.1%} of failures take a host and those with its copies (--lost-together), and "
        "storage is read",
        f"  {plan.tokens_per_second / inputs.gpus:,.0f} tokens/s per GPU on any number of them; not "
        "modelled: what copies take from the network of training",
    ]
    if run.write > run.restart:
        lines.append(
            f"  Storage takes {time_text(run.write)} to read, longer than --restart-minutes: raise that."
        )
    return lines
