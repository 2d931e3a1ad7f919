"""Detects faults of a run: a rank that hangs, loss and gradient spikes, replicas that differ, slow
ranks."""

import contextlib
import faulthandler
import logging
import math
import os
import signal
import statistics
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.schema import InputError, redact
from configs.words import number_of, plural
from parallelisms.mesh import Mesh
from reliability.position import Position, frames_of_others

logger = logging.getLogger("plumbline")


class Watchdog:
    """Ends a rank that hangs, and leaves the stacks of all its threads in
    <folder>/logs/rank-00000.stacks.

    It consists of a timer of the kernel and a signal handler in C, so it needs neither the main
    thread nor the GIL (C code that does not release the GIL stops every Python thread). The process
    dies of SIGALRM. It is a context manager around a run. A run that ends with an exception leaves
    its stacks too, so that all ranks can be compared. Its `position` says where the rank is.
    """

    # seconds beyond the limit: ranks that wait for a hung one end before it, with torch's own
    # message
    GRACE = 4.0
    DYING = 90.0  # seconds that a failed run may take to end, its last save included
    # seconds to read or write a checkpoint: a little more than checkpoint/manager.py::PATIENCE
    STORAGE = 1860.0

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / "logs" / f"rank-{rank:05d}.stacks"
        self.position = Position(self.path.with_suffix(".position"), rank)

    def __enter__(self) -> "Watchdog":
        self.file = self.path.open("a")
        self.position.open()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # chain: it then dies of it
        faulthandler.register(signal.SIGALRM, self.file, all_threads=True, chain=True)
        # of a crash in C++ nothing else would tell (reliability/causes.py)
        faulthandler.enable(self.file)
        return self

    def arm(self, seconds: float, phase: str = "") -> None:
        """Give the process `seconds` + GRACE from now on, until the next call of `arm`. A call
        takes 10 us. phase: the one that begins (reliability/position_file.py::PHASES)."""
        if phase:
            self.position.begin(phase)
        signal.setitimer(signal.ITIMER_REAL, seconds + self.GRACE)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self.position.close(failed=kind is not None)
        if self.file.closed:
            return
        if kind is None or issubclass(kind, InputError):
            self.rest()
        else:
            with contextlib.suppress(OSError):  # a full disk must not hide the error
                self.file.write(redact("".join(traceback.format_exception(error))))
                self.stacks()
            self.arm(self.DYING)

    def stacks(self) -> None:
        """Write the stacks of all threads. Python does it itself because it knows when a C++ thread
        is just becoming a Python thread; `faulthandler.dump_traceback` does not, and a rank whose
        save had failed died of it (SIGSEGV, 3.11)."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {threading.get_ident(): traceback.format_stack()}
        for number, frame in frames_of_others().items():
            stacks[number] = traceback.format_stack(frame)
        for number, lines in stacks.items():
            name = names.get(number, "")
            self.file.write(f"\nThread {number:#018x} {name}:\n{''.join(lines)}")
        self.file.flush()

    def rest(self) -> None:
        """Disarm the timer, and remove the file if no stack was written."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self.file.closed:
            faulthandler.unregister(signal.SIGALRM)
            faulthandler.disable()
            own = os.fstat(self.file.fileno())
            with contextlib.suppress(OSError):  # a full disk; or the folder was removed
                self.file.close()
                is_own = os.path.samestat(own, self.path.stat())
                if is_own and own.st_size == 0:
                    self.path.unlink()


@contextlib.contextmanager
def failure_time(position: Position | None = None) -> Iterator[None]:
    """Note in an exception when it was raised, as its attribute `failed_at` (seconds since 1970).

    The first rank to fail is the one that explains a failure (tools/launch). A rank may take a
    minute to end after its error, for example until a save is on disk. Meanwhile others fail
    because they wait for it, and may end first. position: that of this rank, which is kept as it
    was when the exception was raised.
    """
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "failed_at"):
            error.failed_at = time.time()
            if position:
                position.over.set()
        raise


class Spikes:
    """Finds spikes of the loss and the gradient norm among the last WINDOW steps. A spike is more
    than `threshold` standard deviations above the median. The deviation is estimated as 1.4826
    times the median absolute deviation (exact for a normal distribution: Rousseeuw and Croux,
    1993), so that one spike does not hide the next.

    All numbers are global, so every rank comes to the same verdict. They are in the checkpoint, so
    a resumed run does too.
    """

    WINDOW, LEAST = 128, 20  # steps; with fewer than LEAST nothing is a spike

    def __init__(self, threshold: float, state: dict[str, list[float]]) -> None:
        """threshold: 0 for never; state: what `state` returned."""
        self.threshold = threshold
        self.values = {
            name: deque(state.get(name, ()), self.WINDOW) for name in ("loss", "grad_norm")
        }

    def limit(self, name: str) -> float:
        values = self.values[name]
        if not self.threshold or len(values) < self.LEAST:
            return math.inf
        median = statistics.median(values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
        return median + self.threshold * max(deviation, 0.01 * abs(median))

    def add(self, **step: float) -> str:
        """Take one step's values by name. Returns a description of the spikes in them, "" if there
        are none. Values that are not finite are left out."""
        spikes = []
        for name, value in step.items():
            if math.isfinite(value):
                if value > (limit := self.limit(name)):
                    median = statistics.median(self.values[name])
                    spikes.append(
                        f"{name} {value:.4g} (the median is {median:.4g}, a spike begins at "
                        f"{limit:.4g})"
                    )
                self.values[name].append(value)
        return ", ".join(spikes)

    def state(self) -> dict[str, list[float]]:
        return (
            {name: list(values) for name, values in self.values.items()} if self.threshold else {}
        )


def _replicated(model: nn.Module, optimizer: torch.optim.Optimizer, over: str) -> dict[str, Tensor]:
    """Return this rank's part of the weights and of the optimizer's state that all ranks of the mesh
    dimension `over` have, by name."""
    parts = {}
    for name, weight in model.named_parameters():
        named_state = {f"{name}.{key}": v for key, v in optimizer.state.get(weight, {}).items()}
        for key, tensor in {name: weight, **named_state}.items():
            if not isinstance(tensor, DTensor):
                parts[key] = torch.as_tensor(tensor).detach()
                continue
            placements = dict(
                zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=False)
            )
            # Experts are on a mesh without tp, whose ranks have different parts of them.
            if over in placements and placements[over].is_replicate():
                parts[key] = tensor.detach().to_local()
    return parts


class Mismatch(NamedTuple):
    """State that should be the same on several ranks and is not."""

    ranks: tuple[int, ...]  # that differ from the majority; all, if there is none
    text: str


def mismatching_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, **numbers: float
) -> list[Mismatch]:
    """Return the state that should be the same on several ranks and is not; the same on every rank.

    Compared are `numbers` and the hashes of the weights and optimizer state that are replicated, by
    FSDP (dp_replicate) or by tensor parallelism (norms). A hash is the exclusive or of all
    elements' bits, which changes with every single flipped bit. Of three or more ranks the one that
    differs is named, of two both. State that only one rank has cannot be compared.
    """
    problems = []
    for dim in ("dp_replicate", "tp"):
        if mesh.sizes[dim] == 1:
            continue
        group = mesh.device_mesh.get_group(dim)
        tensors = _replicated(model, optimizer, dim)
        own_hashes = hashes(tensors.values(), mesh.device)
        all_hashes = [torch.empty_like(own_hashes) for _ in range(group.size())]
        dist.all_gather(all_hashes, own_hashes, group=group)
        ranks = dist.get_process_group_ranks(group)
        for name, values in zip(tensors, torch.stack(all_hashes, 1).tolist(), strict=True):
            if odd := outliers(values):
                problems.append((name, dim, tuple(ranks[i] for i in odd)))
    everyone = (
        mesh.gather((problems, numbers))
        if mesh.any_rank(bool(problems)) or _differ(mesh, numbers)
        else []
    )
    names_by_ranks: dict[tuple, set[str]] = {}
    for rank_problems, _ in everyone:
        for name, dim, odd in rank_problems:
            names_by_ranks.setdefault((dim, odd), set()).add(name)
    found = []
    for (dim, odd), names in sorted(names_by_ranks.items()):
        count = number_of(len(names), "tensor")
        found.append(Mismatch(odd, f"{named(odd)} of {dim}: {count}, {min(names)} among them"))
    for name in numbers:
        values = [rank_numbers[name] for _, rank_numbers in everyone]
        if odd := outliers(values):
            found.append(Mismatch(tuple(odd), f"{named(odd)}: {name} {values[odd[0]]!r}"))
    return found


def hashes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash of each tensor, int64 [n] on the device."""
    none = torch.zeros((), dtype=torch.uint64)
    found = [torch.hash_tensor(tensor) if tensor.numel() else none for tensor in tensors]
    return torch.stack([value.to(device).view(torch.int64) for value in found])


def _differ(mesh: Mesh, numbers: dict[str, float]) -> bool:
    """Return whether any number differs between ranks: if not, the largest equals the smallest."""
    if mesh.size == 1:
        return False
    x = torch.tensor([[value, -value] for value in numbers.values()], dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return bool((x[:, 0] != -x[:, 1]).any())


def outliers(values: list) -> list[int]:
    """Indices of the values that differ from the majority; all indices if there is no majority."""
    if len(set(values)) < 2:
        return []
    common, count = Counter(values).most_common(1)[0]
    return [i for i, value in enumerate(values) if value != common or count <= len(values) // 2]


def named(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


class Stragglers:
    """Finds stragglers, the ranks that the others wait for. Steps are in lockstep, so a step takes
    every rank the same time. The ranks differ in how long each works before the next collective.
    These sections are measured, in seconds of the host:

        data       waiting for the batch
        prepare    from there to the first collective of the step: the batch is moved to the device
        optimizer  its step, including the wait for the copy that a save makes; on a GPU only the host's part of it
        forward    of its stages, in a pipeline only, without the waiting for other stages; on a GPU the host's part
        backward   the same

    Without a pipeline the ranks meet at every layer of forward and backward, so a rank that is late
    there is not seen here; nor is one rank of a stage that has several. A profile shows it, and
    tools/preflight finds a slow device. A stage that has more to compute than the others is late in
    every step: parallelism.pipeline_layers can give it less.
    """

    SECTIONS = ("data", "prepare", "optimizer", "forward", "backward")
    # late: above RATIO times the median of all ranks, and by more than SHARE of the whole time
    RATIO, SHARE = 1.3, 0.1

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seconds, self.since = dict.fromkeys(self.SECTIONS, 0.0), time.monotonic()

    def add(self, **seconds: float) -> None:
        for section, value in seconds.items():
            self.seconds[section] += value

    def report(self, mesh: Mesh, steps: int) -> list[tuple[int, str, float]]:
        """Returns (rank, section, seconds per step above the median) of all that are late, the same
        on every rank, and resets the counts."""
        elapsed = time.monotonic() - self.since
        own_seconds = torch.tensor([self.seconds[section] for section in self.SECTIONS] + [elapsed])
        everyone = [torch.empty_like(own_seconds) for _ in range(mesh.size)]
        dist.all_gather(everyone, own_seconds)
        self.reset()
        table = torch.stack(everyone)  # [ranks, sections + 1]
        median, least = table.median(0).values, self.SHARE * table[:, -1].median()
        late = (table > self.RATIO * median) & (table - median > least)
        return [
            (rank, self.SECTIONS[s], ((table - median)[rank, s] / steps).item())
            for rank, s in late[:, :-1].nonzero().tolist()
        ]
