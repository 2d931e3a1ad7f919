"""Says who goes on when ranks of a run are lost (run.fault_tolerant), and with which options.

A round is the time in which the same ranks train together. When ranks are lost, or come back, those
that are there end the round, meet, and begin the next one: with as many whole replicas of the model
(parallelism.data_parallel_replicate) as there are, and the same global batch. A slot is the place of
a rank in the whole mesh, its number in the first round.

Ranks and launchers meet in the launcher's store. Its keys, all below `rounds/`: `start`, a name of
this start; `latest`, the number of the round; `begun`, a rank has a state, and `begun/SLOT`, that one
has; and for each round N: `N/call`, it ends; `N/end`, why, LOST or ENDED; without it others wait to
join after a step; `N/door`, a line for each rank that waits for the next round: its slot, and the
step that its state is after; `N/dead`, a line for each whose process has ended; `N/ranks`, a
`RoundOfRanks`; `alive/NODE`, HOLDER/COUNT: the launcher that has this place, which counts up while it
lives; `over`, the exit code of the run, when no further round begins; `given`, the options and the
code that it began with; `used`, the restarts that were used, and `N/used`, those of single ranks in a
round. What all ranks write for node 0 is one key, so that it reads that with one call.
It imports no torch.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from configs.load import load_config
from configs.program import INTERRUPTED, STOPPED
from configs.ranks import OF_RANKS, default, written
from configs.schema import Config, InputError

ROLE = "PLUMBLINE_ROUNDS"  # in the environment of a rank: "member" or "newcomer"
ROUND = "PLUMBLINE_ROUND"  # the same: the number of its round, after the first
LEASE = "PLUMBLINE_LEASE"  # the same: names this start in leases, which its ranks share
HOLDER = "PLUMBLINE_HOLDER"  # the same: the launcher that has started it
NO_STATE = -1  # the step of a rank that has no whole state
START, LATEST, BEGUN, OVER = "rounds/start", "rounds/latest", "rounds/begun", "rounds/over"
GIVEN, USED = "rounds/given", "rounds/used"
ORDERLY = (0, 2, STOPPED, 76, INTERRUPTED)  # exit codes with which a run ends on all ranks
NO_REPLICA = 1  # the exit code where no replica is left whole
CALL, END = "call", "end"
LOST, ENDED = "ranks are lost", "the next has begun"


def key(number: int, *parts: object) -> str:
    return "/".join(map(str, ("rounds", number, *parts)))


def alive(node: int) -> str:
    """Return the key by which a launcher is seen to live."""
    return f"rounds/alive/{node}"


def report_loss(store: Any, number: int) -> None:
    """Tell all ranks and launchers that ranks of this round are lost. store: a TCPStore."""
    store.set(key(number, END), LOST)
    store.set(key(number, CALL), "")


def come(store: Any, number: int, slot: int, step: int) -> None:
    """Say that a rank waits for the round after this one, with the state after a step."""
    store.append(key(number, "door"), f"{slot} {step}\n")


def report_death(store: Any, number: int, slot: int) -> None:
    """Say that the process of a rank has ended in this round."""
    store.append(key(number, "dead"), f"{slot} {NO_STATE}\n")


def at_door(store: Any, number: int) -> dict[int, int]:
    """Return the ranks that wait for the next round: slot -> the step of its state."""
    return _slots(store, key(number, "door"))


def dead(store: Any, number: int) -> set[int]:
    """Return the slots of the ranks whose process has ended in this round."""
    return set(_slots(store, key(number, "dead")))


def _slots(store: Any, name: str) -> dict[int, int]:
    if not store.check([name]):
        return {}
    lines = store.get(name).decode().splitlines()
    return {int(slot): int(step) for slot, step in map(str.split, lines)}


@dataclass(frozen=True)
class RoundOfRanks:
    """The ranks of a round, and where they get their state."""

    slots: list[int]  # by rank
    steps: list[int]  # the same: what its state is after
    replicas: int
    options: list[str]  # that replace those of the run
    step: int  # that the state is after
    source: int  # a replica of this round that has it
    whole: bool  # whether all ranks have it
    local_size: int  # ranks on a host, where all have equally many

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> "RoundOfRanks":
        return RoundOfRanks(**json.loads(text))


@dataclass(frozen=True)
class WholeMesh:
    """The mesh of all slots: (pp, replicas, rest), in which they are numbered row by row
    (parallelisms/mesh.py)."""

    pp: int
    replicas: int
    rest: int

    @staticmethod
    def of(cfg: Config, size: int) -> "WholeMesh":
        p = cfg.parallelism
        return WholeMesh(
            p.pipeline_parallel,
            p.data_parallel_replicate,
            size // (p.pipeline_parallel * p.data_parallel_replicate),
        )

    def slots(self, replicas: Collection[int]) -> list[int]:
        """Return the slots of these replicas in the order of their ranks."""
        found = []
        for stage in range(self.pp):
            for replica in sorted(replicas):
                begin = (stage * self.replicas + replica) * self.rest
                found += range(begin, begin + self.rest)
        return found


def next_round(
    argv: list[str], cfg: Config, whole: WholeMesh, steps: Mapping[int, int], per_node: int
) -> RoundOfRanks | None:
    """Choose the ranks of the next round; None where none of the replicas that are whole has a
    state. Raises InputError where the options suit no number of them.

    argv: of the script; cfg: as it resolves it for the whole mesh; steps: of the ranks that wait, by
    slot; per_node: ranks of a node.
    """
    there = []
    for replica in range(whole.replicas):
        found = {steps.get(slot) for slot in whole.slots([replica])}
        if None not in found:
            there.append((replica, found.pop() if len(found) == 1 else NO_STATE))
    newest = max((step for _, step in there), default=NO_STATE)
    if newest == NO_STATE:
        return None
    there.sort(key=lambda row: (row[1] != newest, row[0]))
    problem = None
    for count in range(len(there), 0, -1):
        chosen = dict(sorted(there[:count]))
        slots = whole.slots(chosen)
        nodes = Counter(slot // per_node for slot in slots)
        on_hosts = set(nodes.values())
        local_size = min(on_hosts) if len(on_hosts) == 1 else min(per_node, len(slots))
        hosts = len(nodes) if len(on_hosts) == 1 else 0
        options = _options(cfg, whole, count, hosts)
        try:
            load_config([*argv, *options], len(slots), local_size)
        except InputError as error:
            problem = error
            continue
        at = list(chosen.values())
        return RoundOfRanks(
            slots=slots,
            steps=[steps[slot] for slot in slots],
            replicas=count,
            options=options,
            step=newest,
            source=at.index(newest),
            whole=set(at) == {newest},
            local_size=local_size,
        )
    raise problem


def _options(cfg: Config, whole: WholeMesh, replicas: int, hosts: int) -> list[str]:
    """Return the options of a round with so many replicas: rows of a microbatch at most as before,
    so that it fits in memory, with little padding (data/uneven.py), and nothing that fewer ranks have
    no use for. hosts: of equally many ranks; 0 if they differ."""
    p, training = cfg.parallelism, cfg.training
    ranks = replicas * whole.rest // (p.context_parallel * p.tensor_parallel)
    rows = -(-training.global_batch_size // ranks)
    microbatches = -(-rows // training.local_batch_size)
    local = -(-rows // microbatches)
    options = [
        f"--parallelism.data_parallel_replicate={replicas}",
        f"--training.local_batch_size={local}",
    ]
    for name, needs in OF_RANKS.items():
        others = {*needs.degrees} - {"data_parallel_replicate"}
        is_idle = replicas == 1 and len(others) < len(needs.degrees)
        if is_idle and all(getattr(p, degree) == 1 for degree in others):
            options.append(f"--{name}={written(default(name))}")
    peers = min(cfg.checkpoint.peers, max(0, hosts - 1))  # whose hosts are of equally many ranks
    if peers < cfg.checkpoint.peers:
        options.append(f"--checkpoint.peers={peers}")
        if peers == 0:
            names = [f"checkpoint.{name}" for name in ("peer_interval", "peer_stride")]
            options += [f"--{name}={written(default(name))}" for name in names]
    return options
