"""Find the rank that the others wait for, on a run that hangs or has hung.

    python -m tools.hang RUN

Combines the files that each rank leaves in RUN/logs (reliability/position.py): its step, phase,
microbatch and layer, the collectives that it has begun and those that have not ended, its stacks,
and the dump of NCCL's flight recorder. Run it while the run hangs, or after its end and before its
next start.

Exit code 0: no rank is stuck. 1: ranks are stuck, and the lines name them. 2: a folder without
positions.
"""

import argparse
import io
import json
import pickle
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from configs import program
from configs.schema import InputError
from configs.words import plural
from reliability import position_file
from reliability.position_file import PHASES, QUIET
from tools.places import run_folder

# Sizes differ between ranks, so only the kind is compared.
UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "barrier")
# Files of Python in which a thread waits for another thread or a child process
IDLE = (
    "threading.py",
    "queue.py",
    "_base.py",
    "thread.py",
    "popen_fork.py",
    "connection.py",
    "selectors.py",
    "stop.py",  # reliability/stop.py listens for signals
    "graph.py",  # of torch.autograd, whose thread for a GPU runs the backward
)
LOOPS = 0.3  # share of a processor from which on a data worker computes
SHOWN = 8  # ranks in a sentence


class BegunCall(NamedTuple):
    group: str
    number: int  # the same on all ranks of the group
    kind: str  # such as "gloo:all_reduce"
    sizes: list[list[int]]  # of its inputs
    types: list[str]
    ended: bool

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the identity of the call in its group. Each backend counts its own calls."""
        return self.group, self.kind.partition(":")[0], self.number

    @property
    def name(self) -> str:
        return self.kind.partition(":")[2] or self.kind

    def call(self) -> str:
        """Return the part of a call that must be equal on all ranks."""
        if self.name.startswith(UNEVEN) and not self.name.startswith("reduce_scatter"):
            return self.name
        shapes = [f"{kind.lower()}{size}" for kind, size in zip(self.types, self.sizes)]
        return " ".join([self.name, *shapes])


@dataclass
class RankState:
    """Last known state of one rank, read from the files that it left."""

    rank: int
    ranks: int  # of the run
    process: int
    started: float  # seconds since 1970, as the next three
    looked: float
    moved: float
    over: float  # 0 for a process that has not ended by itself
    gap: tuple[float, float]  # when its heartbeat did not run last
    step: int
    phase: str
    microbatch: int
    layer: str
    host: str
    standing: dict[str, Any]
    line: str = ""  # of this repository, which it executes
    flights: list[BegunCall] = field(default_factory=list)
    groups: dict[str, tuple[str, list[int], int]] = field(default_factory=dict)
    silent: bool = False  # its process does not answer: stopped, or C code that holds the GIL
    busy: bool = False  # it is inside something that is no communication

    @property
    def waiting(self) -> list[BegunCall]:
        """Return the collectives that have not ended, of each group the first."""
        first: dict[tuple[str, str], BegunCall] = {}
        for flight in self.flights:
            if not flight.ended:
                first.setdefault(flight.key[:2], flight)
        return list(first.values())

    def begun(self, group: str, backend: str) -> int:
        """Return the number of the last collective that the rank has begun in a group."""
        numbers = [f.number for f in self.flights if f.key[:2] == (group, backend)]
        if numbers:
            return max(numbers)
        return self.groups[group][2] if group in self.groups else 0

    def where(self) -> str:
        """Return, for example, "backward of layers.18, microbatch 3 of step 7"."""
        words = self.phase
        if self.phase in ("forward", "backward", "validate") and self.layer:
            words += f" of {self.layer}"
        if self.phase in ("forward", "backward") and self.microbatch:
            words += f", microbatch {self.microbatch}"
        return f"{words}{' of' if self.microbatch else ','} step {self.step}"


def read(folder: Path) -> list[RankState]:
    """Read the ranks of the newest start in RUN/logs. Raises InputError for a folder without any."""
    logs = folder / "logs"
    ranks = [rank for path in sorted(logs.glob("rank-*.position")) if (rank := read_rank(path))]
    if not ranks:
        raise InputError(
            f"{folder} has no positions of ranks (logs/rank-00000.position): it is not the folder "
            "of a run, its ranks had not come so far, or an older version has made it"
        )
    size = max(ranks, key=lambda rank: rank.started).ranks
    ranks = [rank for rank in ranks if rank.rank < size]
    now = max(rank.looked for rank in ranks)
    if time.time() - now < QUIET:
        now = time.time()
    # those that waited have failed, and what the launcher did then is no matter
    now = min([now, *(rank.over for rank in ranks if rank.over)])
    for rank in ranks:
        began, ended = rank.gap
        was_quiet = began + QUIET < now < ended + QUIET
        rank.silent = was_quiet or (not rank.over and rank.looked < now - QUIET)
        understand(rank, logs)
    return ranks


def read_rank(path: Path) -> RankState | None:
    """Read one rank's file. None where it is incomplete (a rank has just made it)."""
    data = path.read_bytes()
    if len(data) < position_file.SIZE or not data.startswith(position_file.MAGIC):
        return None
    _, number, ranks, process, started = position_file.WHO.unpack_from(data, 0)
    _, step, phase, microbatch, layer = position_file.WHERE.unpack_from(
        data, position_file.WHERE_AT
    )
    looked, moved, over, *gap = position_file.SEEN.unpack_from(data, position_file.SEEN_AT)
    about = text(data, position_file.ABOUT_AT)
    layers = about.get("layers", [])
    return RankState(
        number,
        ranks,
        process,
        started,
        looked,
        moved,
        over,
        (gap[0], gap[1]),
        step,
        PHASES[phase],
        microbatch,
        layers[layer] if 0 <= layer < len(layers) else "",
        about.get("host", "an unknown host"),
        text(data, position_file.STANDING_AT),
    )


def text(data: bytes, at: int) -> dict[str, Any]:
    """Return the JSON at that path; {} where there is none, or half of one."""
    (length,) = position_file.LENGTH.unpack_from(data, at)
    start = at + position_file.LENGTH.size
    try:
        return json.loads(data[start : start + length]) if length else {}
    except ValueError:
        return {}


def understand(rank: RankState, logs: Path) -> None:
    """Fill in what follows from the heartbeat's record, the stacks and the dump."""
    standing = rank.standing
    for name, description, ranks, begun in standing.get("groups", []):
        members = list(range(*ranks.values())) if isinstance(ranks, dict) else ranks
        rank.groups[name] = (description, members, begun)
    rank.flights = [BegunCall(*row) for row in standing.get("flights", [])]
    dump = logs / f"nccl-{rank.rank}"
    if dump.exists() and dump.stat().st_mtime > rank.started:
        ours = [flight for flight in rank.flights if not flight.kind.startswith("nccl:")]
        rank.flights = ours + read_dump(dump)
    rank.flights.sort(key=lambda flight: flight.number)
    rank.line = line_of_stacks(logs / f"rank-{rank.rank:05d}.stacks", rank.started)
    if standing.get("threads") and not rank.silent:
        thread = thread_that_counts(standing["threads"])
        rank.busy = not is_of_torch(thread["inner"])
        rank.line = next(iter(thread["lines"]), "")


def thread_that_counts(threads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the main thread; where that waits for another thread of its process, such as the one
    that saves, return a thread that is not waiting."""
    main, *others = threads
    if not is_idle(main):
        return main
    others = [thread for thread in others if not is_idle(thread)]
    others.sort(key=lambda thread: is_of_torch(thread["inner"]))
    return others[0] if others else main


def is_idle(thread: dict[str, Any]) -> bool:
    """Return True if the thread waits for another thread or a child process."""
    return Path(thread["inner"]).name in IDLE


def is_of_torch(path: str) -> bool:
    return Path(path).is_relative_to(position_file.TORCH) or "torchinductor" in path


class Plain(pickle.Unpickler):
    """Unpickler of dictionaries, lists, texts and numbers alone, which is all that a dump has."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump of flights does not need {module}.{name}")


def read_dump(path: Path) -> list[BegunCall]:
    """Read the dump of NCCL's flight recorder. [] for half a file."""
    try:
        entries = Plain(io.BytesIO(path.read_bytes())).load()["entries"]
    except (pickle.UnpicklingError, EOFError, KeyError):
        return []
    return [BegunCall(*position_file.as_row(entry)) for entry in entries if not entry["is_p2p"]]


def line_of_stacks(path: Path, started: float) -> str:
    """Return the innermost line of ours in the current thread, or in the main one, which comes last,
    if none was running Python; "" for stacks of an older start."""
    if not path.exists() or path.stat().st_mtime < started:
        return ""
    text = path.read_text(errors="replace")
    word = "Current thread" if "Current thread" in text else "\nThread "
    stack = text.rpartition(word)[2]
    for file, line, name in re.findall(r'File "(.+?)", line (\d+) in (\w+)', stack):
        if ours := position_file.own(file):
            return f"{ours}:{line} {name}"
    return ""


# Who waits for whom ----------------------------------------------------------------------------------


@dataclass
class Verdict:
    """Lines to print. culprits: the ranks that the others wait for; [] where unknown."""

    culprits: list[int]
    lines: list[str]
    stuck: bool = True


class Wait(NamedTuple):
    rank: int
    flight: BegunCall
    for_whom: list[int]


def judge(ranks: list[RankState]) -> Verdict:
    """Return the verdict for the user, the most certain explanation first."""
    standing = [rank for rank in ranks if rank.standing or rank.silent]
    if all(rank.phase == "end" for rank in ranks):
        words = "no rank hangs: all have come to the end of the run, or of a round"
        return Verdict([], [words + " (run.fault_tolerant: they wait for each other)"], False)
    if not standing:
        furthest = max(rank.step for rank in ranks)
        ended = any(rank.over for rank in ranks) or time.time() - ranks[0].looked > QUIET
        verb = "was stuck before the end" if ended else "is stuck"
        return Verdict([], [f"no rank {verb}: step {furthest}"], False)
    by_number = {rank.rank: rank for rank in ranks}
    waits = [wait for rank in ranks for wait in waits_of(rank, by_number)]
    for verdict in (
        other_calls(by_number),
        blocking_ranks(by_number, waits, also_unwanted=False),
        circle(by_number, waits),
        # messages of a pipeline are in no flight recorder of gloo
        blocking_ranks(by_number, waits, also_unwanted=True),
        ranks_behind(by_number, waits),
    ):
        if verdict:
            break
    else:
        verdict = all_inside(by_number, waits)
    verdict.lines += everyone_else(ranks, verdict.culprits)
    if missing := ranks[0].ranks - len(ranks):
        verdict.lines.append(f"{missing} of {ranks[0].ranks} ranks have left no position here")
    return verdict


def waits_of(rank: RankState, by_number: dict[int, RankState]) -> list[Wait]:
    """List, for each collective that a rank is inside, the ranks of the group that have not begun
    it.

    A process that is doing something else is inside none, but its GPU may be: the host runs ahead
    of it.
    """
    if rank.silent:
        return []
    rows = []
    for flight in rank.waiting:
        group, backend, number = flight.key
        if rank.busy and backend != "nccl":
            continue
        _, members, _ = rank.groups.get(group, ("", list(by_number), 0))
        absent = [
            member
            for member in members
            if member in by_number and by_number[member].begun(group, backend) < number
        ]
        rows.append(Wait(rank.rank, flight, absent))
    return rows


def other_calls(by_number: dict[int, RankState]) -> Verdict | None:
    """Find ranks that run different collectives at the same position of a group."""
    inside = {flight.key for rank in by_number.values() for flight in rank.waiting}
    for key in sorted(inside, key=lambda key: key[2]):
        calls = {}
        for rank in by_number.values():
            for flight in rank.flights:
                if flight.key == key:
                    calls[rank.rank] = flight.call()
        if len(set(calls.values())) < 2:
            continue
        common, count = Counter(calls.values()).most_common(1)[0]
        odd = [n for n, call in calls.items() if call != common or 2 * count <= len(calls)]
        said = "; ".join(
            f"{ranks_of(n for n in calls if calls[n] == call)}: {call}"
            for call in dict.fromkeys(calls.values())
        )
        place = in_group(by_number[odd[0]], key[0])
        first = (
            f"{ranks_of(odd)} {plural(len(odd), 'runs', 'run')} another collective than the "
            f"rest as #{key[2]}{place}: {said}"
        )
        return Verdict(odd, [first, *(describe(by_number[n]) for n in odd)])
    return None


def blocking_ranks(
    by_number: dict[int, RankState], waits: list[Wait], also_unwanted: bool
) -> Verdict | None:
    """Find ranks that are busy or silent while others wait for them.

    also_unwanted: also where no other rank is known to wait for them.
    """
    waiting = {wait.rank for wait in waits if wait.for_whom}
    free = [
        rank
        for rank in by_number.values()
        if rank.silent or (rank.busy and rank.standing and rank.rank not in waiting)
    ]
    wanted = Counter(n for wait in waits for n in wait.for_whom)
    asked = [rank for rank in free if wanted[rank.rank] or also_unwanted]
    if not asked:
        return None
    lines = []
    for rank in asked:
        own = [wait for wait in waits if rank.rank in wait.for_whom]
        lines.append(f"{describe(rank)}, waits for no rank ({how(rank)}){others(by_number, own)}")
    return Verdict([rank.rank for rank in asked], lines)


def circle(by_number: dict[int, RankState], waits: list[Wait]) -> Verdict | None:
    """Find ranks that wait for each other in different collectives: a deadlock."""
    edges = {n: {m for wait in waits if wait.rank == n for m in wait.for_whom} for n in by_number}
    members = sorted(n for n in by_number if n in reached(edges, n))
    if not members:
        return None
    lines = [f"{ranks_of(members)} wait for each other: a deadlock"]
    for wait in waits:
        if wait.rank in members and wait.for_whom:
            lines.append(f"{describe(by_number[wait.rank])}: {inside(by_number, wait)}")
    return Verdict(members, lines)


def reached(edges: dict[int, set[int]], start: int) -> set[int]:
    """Return the ranks reachable from `start` along edges; `start` itself only by a circle."""
    found: set[int] = set()
    new = set(edges[start])
    while new:
        found |= new
        new = {m for n in new for m in edges.get(n, ())} - found
    return found


def ranks_behind(by_number: dict[int, RankState], waits: list[Wait]) -> Verdict | None:
    """Find ranks that others wait for and that wait for no rank themselves, as far as the files
    show: a device is still computing, or a message between two ranks does not arrive."""
    wanted = {n for wait in waits for n in wait.for_whom}
    last = sorted(wanted - {wait.rank for wait in waits})
    if not last:
        return None
    lines = []
    for n in last:
        own = [wait for wait in waits if n in wait.for_whom]
        lines.append(f"{describe(by_number[n])}, is behind{others(by_number, own)}")
    return Verdict(last, lines)


def all_inside(by_number: dict[int, RankState], waits: list[Wait]) -> Verdict:
    """Report a collective that all ranks have entered and that does not end."""
    complete = {wait.flight.key: wait for wait in waits if not wait.for_whom}
    calls = []
    for wait in complete.values():
        calls.append(title(by_number[wait.rank], wait.flight))
    came = f"all have come to {', '.join(calls[:3])}, and it does not end" if calls else ""
    lost = {n: rank.standing.get("unanswered", []) for n, rank in by_number.items()}
    cut_off = sorted(n for n, addresses in lost.items() if addresses)
    if not cut_off:
        why = "a device or the network hangs, or a message is missing"
        return Verdict([], [f"no rank is behind: {came or 'none waits in a collective'}: {why}"])
    pairs = [f"rank {n} ({by_number[n].host}) to {', '.join(lost[n])}" for n in cut_off[:SHOWN]]
    said = f"the network does not answer what was sent by {'; '.join(pairs)}"
    return Verdict(cut_off, [said, *([came] if came else [])])


# Sentences -------------------------------------------------------------------------------------------


def describe(rank: RankState) -> str:
    line = f", at {rank.line}" if rank.line else ""
    return f"rank {rank.rank} on {rank.host} (process {rank.process}): {rank.where()}{line}"


def how(rank: RankState) -> str:
    if rank.silent:
        return "its process does not answer: it is stopped (SIGSTOP), or C code holds the GIL"
    names = {"R": "computes", "S": "sleeps", "D": "waits for a disk", "T": "is stopped"}
    words = f"its own process {names.get(rank.standing.get('state', ''), 'is')} in {rank.phase}"
    if rank.phase == "data":
        for process, state, share in rank.standing.get("children", []):
            does = "computes" if share >= LOOPS else names.get(state, state)
            words += f"; its worker {process} {does} ({share:.0%} of a processor)"
    return words


def others(by_number: dict[int, RankState], waits: list[Wait]) -> str:
    """Describe which ranks wait for this rank, and in which collective."""
    by_flight: dict[tuple, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_flight[wait.flight.key].append(wait)
    words = []
    for some in by_flight.values():
        call = title(by_number[some[0].rank], some[0].flight)
        words.append(f"{len(some)} {plural(len(some), 'waits', 'wait')} in its {call}")
    return "; " + ", ".join(words) if words else ""


def inside(by_number: dict[int, RankState], wait: Wait) -> str:
    words = f"inside {title(by_number[wait.rank], wait.flight)}"
    return f"{words}, waits for {ranks_of(wait.for_whom)}" if wait.for_whom else words


def title(rank: RankState, flight: BegunCall) -> str:
    return f"{flight.name} #{flight.number}{in_group(rank, flight.group)}"


def in_group(rank: RankState, group: str) -> str:
    if group not in rank.groups:
        return ""
    description, ranks, _ = rank.groups[group]
    named = "" if description == "undefined" else f" {description}"
    return f" of group{named} ({ranks_of(ranks)})"


def everyone_else(ranks: list[RankState], named: list[int]) -> list[str]:
    """Return one line for all other ranks that are stuck in the same place."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        if rank.rank in named:
            continue
        words = rank.where()
        if rank.line:
            words += f", at {rank.line}"
        if rank.waiting:
            words += f", inside {', '.join(title(rank, flight) for flight in rank.waiting)}"
        failed = [f"{name}: {text}" for name, text in rank.standing.items() if "failed" in name]
        places["; ".join([words, *failed])].append(rank.rank)
    return [f"{ranks_of(some)}: {words}" for words, some in places.items()]


def ranks_of(numbers: Iterable[int]) -> str:
    """Format rank numbers, for example "ranks 0, 1, 3"."""
    some = sorted(numbers)
    shown = ", ".join(map(str, some[:SHOWN]))
    more = f" and {len(some) - SHOWN} more" if len(some) > SHOWN else ""
    return f"{plural(len(some), 'rank')} {shown}{more}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.hang",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=run_folder, help="the folder or the URL of a run")
    try:
        verdict = judge(read(parser.parse_args(argv).run))
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(verdict.lines))
    return int(verdict.stuck)


if __name__ == "__main__":
    program.run(main)
