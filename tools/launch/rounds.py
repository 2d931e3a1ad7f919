"""Lets a run go on without the ranks that it has lost (run.fault_tolerant, configs/rounds.py).

Each launcher has a `Rounds`: it tells which of its ranks have ended, starts others in their place
as long as restarts are left, and counts up a number, by which its host is seen to live. On node 0 a
`Coordinator` decides who takes part in the next round.
"""

import argparse
import collections
import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from configs.load import KEPT, keep_file
from configs.rounds import (
    BEGUN,
    CALL,
    END,
    ENDED,
    HOLDER,
    LATEST,
    NO_REPLICA,
    NO_STATE,
    ORDERLY,
    OVER,
    ROLE,
    START,
    USED,
    RoundOfRanks,
    WholeMesh,
    alive,
    at_door,
    dead,
    key,
    next_round,
    report_death,
    report_loss,
)
from configs.schema import Config, InputError
from reliability.sockets import end_if_unacknowledged, open_sockets
from tools.launch import log

ANSWER = timedelta(seconds=20)  # in which the launchers' store answers
TICK = 0.05  # seconds between looks at the store while ranks come to the door
BEAT = 0.25  # seconds between looks of a launcher, which are its signs of life
SILENT = 5.0  # seconds without one after which its host is lost, or with a rank that is stopped
ANSWERS = 1.5  # the same while all others wait at the door
LOOK = 0.5  # of these, those that count between two looks for signs
# seconds that the ranks of a host that lives may take to the door; then they are killed, unless they
# compute: a compilation takes a minute, a collective that waits takes no processor
PATIENCE = 15.0
COMPUTES = 0.5  # of the time, or waits for a processor
COMPILES = 600.0  # the same seconds for a rank that computes
# rounds in a row that may end without a step, where no process has ended: of a link that stays cut,
# every round fails
IN_VAIN = 5


class Rounds:
    """The ranks of this node in the rounds of a start."""

    def __init__(
        self,
        where: tuple[str, int],
        options: argparse.Namespace,
        node: int,
        nodes: int,
        place: "NodePlace | None" = None,
    ) -> None:
        """where: the launchers' store; options: of the launcher, whose `used` counts the restarts of
        the run, those of single ranks included; node: the place of this one among those of this start, of
        which there are `nodes`; place: the same, if it was taken from a launcher that is lost."""
        self.where = where
        self.store = connect(where)
        self.options = options
        self.node = node
        self.nodes = nodes
        self.per_node = options.nproc_per_node
        self.lost: set[int] = set()  # local ranks without a process
        self.place = place or NodePlace(node)
        os.environ[HOLDER] = self.place.holder
        self.looked = 0.0
        self.is_over = False
        for slot in range(node * self.per_node, (node + 1) * self.per_node):
            self.store.delete_key(f"{BEGUN}/{slot}")  # of ranks that were lost with their launcher
        if node == 0:
            self.store.set(USED, str(options.used))
        self.loss_seen: LossSeen | None = None
        self.stopped: dict[int, int] = {}  # process -> looks at which it was stopped
        # the round in which a process was started; those of the start belong to round 0
        self.start_round = int(self.store.get(LATEST)) if place else -1
        self.started_in: dict[int, int] = {}

    def watch(self, agent: Any, group: WorkerGroup) -> bool:
        """Look after the ranks. Returns True where the agent shall: all is over, or node 0."""
        if self.is_over:
            return True
        now = time.monotonic()
        if now < self.looked + BEAT:
            return False
        self.looked = now
        try:
            if not self.place.hold(self.store):
                self.is_over = True
                if self.store.check([self.place.name]):  # else node 0 has started again
                    host = socket.gethostname()
                    log(f"another host has taken the place of {host}, which did not answer")
                    agent._send(signal.SIGKILL)
                return True
            self._look(agent, group)
        except DistError:
            self.is_over = not self._connects_again(agent)
        return self.is_over

    def _connects_again(self, agent: Any) -> bool:
        """Connect to a store that did not answer. Returns False where there is none, or it does not
        answer yet and a rank of this host has ended."""
        try:
            socket.create_connection(self.where, timeout=1.0).close()
            self.store = connect(self.where)
        except ConnectionRefusedError:
            return False
        except (OSError, DistError):
            handlers = agent._pcontext.subprocess_handlers
            running = agent._pcontext._running_local_ranks
            return all(handlers[local].proc.poll() is None for local in running)
        return True

    def _look(self, agent: Any, group: WorkerGroup) -> None:
        context = agent._pcontext
        handlers = context.subprocess_handlers
        # before the look at the store: ranks end because it says so
        codes = {local: handlers[local].proc.poll() for local in context._running_local_ranks}
        if self.store.check([OVER]):
            self.is_over = True
            if int(self.store.get(OVER)) not in ORDERLY:
                # the agent then finds those that have ended, and ends the others
                context._running_local_ranks |= self.lost
                self._count_restarts()
            return
        for local, code in sorted(codes.items()):
            if code is None:
                continue
            is_late = self._comes_late(local)
            if is_late and agent.asked:  # the others stop with what they have
                context._running_local_ranks.discard(local)
                self.lost.add(local)
            elif not is_late and (code in ORDERLY or agent.asked):
                self.store.set(OVER, str(code))
                self.is_over = True
                return
            else:
                self._lose(agent, group, local, code)
        self._kill_frozen(context)
        self._kill_late(context)

    def _comes_late(self, local: int) -> bool:
        """Return whether others have a state and this rank has none yet: its end, on request or
        because its host lacks what the run reads, is not the run's."""
        slot = self._slot(local)
        return self.store.check([BEGUN]) and not self.store.check([f"{BEGUN}/{slot}"])

    def _slot(self, local: int) -> int:
        return self.node * self.per_node + local

    def wait_for_others(self) -> None:
        """Wait, for at most --shutdown-timeout seconds, until the ranks of all nodes have ended: they
        use the store that node 0 serves."""
        with contextlib.suppress(DistError):
            self.store.set(f"rounds/ended/{self.node}", "")
            number = int(self.store.get(LATEST))
            slots = range(self.nodes * self.per_node)
            if number:
                slots = RoundOfRanks.read(self.store.get(key(number, "ranks"))).slots
            names = [f"rounds/ended/{node}" for node in {slot // self.per_node for slot in slots}]
            wait_for(self.store, names, self.options.shutdown_timeout)

    def _lose(self, agent: Any, group: WorkerGroup, local: int, code: int) -> None:
        """Report a rank whose process has ended, and start another in its place."""
        slot = self._slot(local)
        if not self.store.check([BEGUN]):  # no rank could go on
            self.store.set(OVER, str(NO_REPLICA))
            return
        context = agent._pcontext
        context._running_local_ranks.discard(local)
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        then = "the replicas that are left go on without its replica"
        left = self._take_restart()
        if left:
            then += f", and another process takes its place (restarts left: {left - 1})"
        log(f"rank {slot} on {socket.gethostname()} {how}: {then}")
        if message := _message(context.error_files[local]):
            log(f"its traceback:\n{message}")
        self._report(slot)
        self.store.delete_key(f"{BEGUN}/{slot}")
        if not left:
            self.lost.add(local)
            return
        environment = context.envs[local] | {ROLE: "newcomer"}
        handler = SubprocessHandler(
            context.entrypoint, context.args[local], environment, None, None, local, None
        )
        context.subprocess_handlers[local] = handler
        context._running_local_ranks.add(local)
        group.workers[local].id = handler.proc.pid
        self.started_in[handler.proc.pid] = int(self.store.get(LATEST))

    def _take_restart(self) -> int:
        """Take one of the restarts that all nodes share. Returns how many were left, 0 if none."""
        left = self.options.max_restarts - self.store.add(USED, 1) + 1
        if left <= 0:
            self.store.add(USED, -1)
            return 0
        self.store.add(key(int(self.store.get(LATEST)), "used"), 1)
        return left

    def _count_restarts(self) -> None:
        """Note, on each node, the restarts that the run has used. Those of single ranks in the last
        round, which no other has followed, do not count: all ranks start again, by one restart."""
        in_vain = key(int(self.store.get(LATEST)), "used")
        count = int(self.store.get(in_vain)) if self.store.check([in_vain]) else 0
        self.options.used = int(self.store.get(USED)) - count
        if count and self.node == 0:
            log(f"restarts of single ranks that count no more, as none has joined: {count}")

    def _report(self, slot: int) -> None:
        """Report that a rank's process has ended; to the next round too, if it begins meanwhile."""
        number = None
        while number != (latest := int(self.store.get(LATEST))):
            number = latest
            report_death(self.store, number, slot)
            report_loss(self.store, number)

    def _kill_frozen(self, context: Any) -> None:
        """Kill ranks that have been stopped for SILENT seconds, of which this process was not."""
        for local in context._running_local_ranks:
            pid = context.subprocess_handlers[local].proc.pid
            self.stopped[pid] = self.stopped.get(pid, 0) + 1 if is_frozen(pid) else 0
            if self.stopped[pid] > SILENT / BEAT:
                self._kill(local, pid, "is frozen (SIGSTOP, or a debugger)")

    def _kill(self, local: int, pid: int, why: str) -> None:
        log(f"rank {self._slot(local)} on {socket.gethostname()} {why}: it is killed")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _kill_late(self, context: Any) -> None:
        """Kill ranks that do not come to the door: they wait for a device, or are stopped. One
        that was started since the round began is not waited for."""
        number = int(self.store.get(LATEST))
        if not self.store.check([key(number, END)]):
            self.loss_seen = None
            return
        handlers = context.subprocess_handlers
        pids = {local: handlers[local].proc.pid for local in context._running_local_ranks}
        if self.loss_seen is None or self.loss_seen.number != number:
            self.loss_seen = LossSeen(number, pids.values())
        for local, pid in pids.items():
            if self.started_in.get(pid, self.start_round) >= number:
                continue
            is_late = self.loss_seen.is_over_for(pid) or is_frozen(pid)
            if is_late and self._slot(local) not in at_door(self.store, number):
                self._kill(local, pid, "does not answer while others go on")


class LossSeen:
    """The end of a round, as a launcher has seen it, and what its ranks do since."""

    def __init__(self, number: int, pids: Iterable[int]) -> None:
        self.number = number
        self.since = time.monotonic()
        self.before = {pid: processor_seconds(pid) for pid in pids}

    def is_over_for(self, pid: int) -> bool:
        """Return whether a rank has had its time: all of COMPILES if it computes, else PATIENCE."""
        waited = time.monotonic() - self.since
        used = processor_seconds(pid) - self.before.get(pid, 0.0)
        return waited > (COMPILES if used > COMPUTES * waited else PATIENCE)


def processor_seconds(pid: int) -> float:
    """Return the seconds of processors that a rank has used, and for which it has waited for one: of
    its main thread, since those of gloo may spin, and of the processes that it has started, which
    compile. 0 if it has ended."""
    seconds = _processor_seconds(f"{pid}/task/{pid}")
    for child in _children(pid):
        seconds += _processor_seconds(str(child))
    return seconds


def _processor_seconds(task: str) -> float:
    """Return the same of a process or a thread, by its folder in /proc; the time in which it waited
    where the kernel says that (Linux, Documentation/scheduler/sched-stats)."""
    fields = _stat(task)
    if not fields:
        return 0.0
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError):
        used += int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    return used


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *_children(child)]
    return found


def wait_for(store: TCPStore, keys: list[str], seconds: float) -> None:
    """Wait until a store has all these keys, so many seconds at most. Unlike the store's own call it
    does not warn when these are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not store.check(keys):
        time.sleep(TICK)


def connect(where: tuple[str, int]) -> TCPStore:
    """Connect to the launchers' store. A call that is not answered fails: the network is cut."""
    before = open_sockets()
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=ANSWER)
    end_if_unacknowledged(SILENT, before)
    return store


class NodePlace:
    """The place of a node in the run, which one launcher holds at a time."""

    def __init__(self, node: int) -> None:
        self.name = alive(node)
        self.holder = f"{socket.gethostname()}-{time.time_ns()}"
        self.beats = 0
        self.last = ""  # what the store has

    def hold(self, store: TCPStore) -> bool:
        """Give a sign of life. Returns whether this launcher still holds the place."""
        self.beats += 1
        return self._write(store, f"{self.holder}/{self.beats}")

    def take(self, store: TCPStore, last: str) -> bool:
        """Take the place of a launcher. Returns False if it, or another, has given a later sign."""
        self.last = last
        return self._write(store, f"{self.holder}/0")

    def _write(self, store: TCPStore, sign: str) -> bool:
        found = store.compare_set(self.name, self.last, sign).decode()
        if found != sign and found.rpartition("/")[0] == self.holder:
            # that of a call whose answer was lost, with the connection
            found = store.compare_set(self.name, found, sign).decode()
        self.last = sign
        return found == sign


class Signs:
    """The signs of life of a launcher."""

    def __init__(self) -> None:
        self.beat: bytes | None = None  # the last one
        self.seconds = 0.0  # since it has come
        self.looked = 0.0

    def silence(self, beat: bytes) -> float:
        """Note its number as it is now; returns the seconds for which that has not changed, of which a
        look counts at most LOOK: a process that has stood still itself hears of none. beat: b"" for a
        launcher that has not begun, which is waited for."""
        now = time.monotonic()
        self.seconds += min(now - self.looked, LOOK)
        if beat != self.beat or not beat:
            self.beat, self.seconds = beat, 0.0
        self.looked = now
        return self.seconds

    def have_ended(self, store: TCPStore, node: int, is_own: bool) -> bool:
        """Return whether the launcher of a node that takes part in rounds is gone. Without a call
        that waits: the store may be closed a second after the run has ended. is_own: the node is
        that of the launcher that asks."""
        name = alive(node)
        seconds = ANSWERS if is_own else SILENT
        return store.check([LATEST, name]) and self.silence(store.get(name)) > seconds


def is_frozen(pid: int) -> bool:
    """Return whether a process is stopped; False where the kernel does not say."""
    return _stat(pid)[:1] == ["T"]


def _stat(task: int | str) -> list[str]:
    """Return what the kernel says of a process or a thread, from its state on (proc(5)); [] if it has
    ended. task: its folder in /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    return []


def _message(error_file: str) -> str:
    """Return the traceback that a rank has left (tools/launch/rank.py), "" where there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(error_file, encoding="utf-8") as file:
            return json.load(file)["message"]["message"].rstrip()
    return ""


class Coordinator:
    """Decides, in a thread of node 0's launcher, who takes part in the next round."""

    def __init__(
        self,
        where: tuple[str, int],
        argv: list[str],
        cfg: Config,
        nodes: int,
        per_node: int,
    ) -> None:
        """where: the launchers' store; argv: of the script, and cfg: what it resolves to."""
        self.where = where
        self.argv = argv
        self.cfg = cfg
        self.per_node = per_node
        self.size = nodes * per_node
        self.whole = WholeMesh.of(cfg, self.size)
        self.members = list(range(self.size))
        self.waiting: set[int] = set()  # ranks at the door of this round that are no members
        self.step = NO_STATE  # after which this round has begun
        self.in_vain = 0  # rounds before it that have begun after the same step
        self.signs: dict[int, Signs] = collections.defaultdict(Signs)
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def begin(self) -> None:
        keep_file(self.argv)
        self.store = connect(self.where)
        self.store.set(START, uuid.uuid4().hex[:8])
        self.store.set(LATEST, "0")
        slots = self.whole.slots(range(self.whole.replicas - 1))
        try:
            next_round(self.argv, self.cfg, self.whole, dict.fromkeys(slots, 0), self.per_node)
        except InputError as error:
            log(
                "run.fault_tolerant has no effect: every loss is a restart, since the options suit "
                f"no smaller number of replicas: {error}"
            )
        self.thread.start()

    def close(self) -> None:
        """End the thread, before the store is closed."""
        self.is_closed.set()
        self.thread.join(ANSWER.total_seconds())
        KEPT.clear()  # another start takes edits

    def _run(self) -> None:
        with contextlib.suppress(DistError):  # the store does not answer
            number = 0
            while not self.is_closed.is_set() and not self.store.check([OVER]):
                number = self._look(number)
                self.is_closed.wait(TICK)

    def _look(self, number: int) -> int:
        """Do what a look at this round asks for: end it when ranks are lost, or when all have left it
        for others to join, which have made another replica whole. Returns the number of the round."""
        there = at_door(self.store, number)
        if self.store.check([key(number, END)]) or there.keys() >= {*self.members}:
            return self._end(number)
        silent = self._silent(self.members)
        for node in sorted(silent):
            log(f"node {node} has given no sign of life for {SILENT:.0f} s")
        if silent or self._are_replaced(there):
            report_loss(self.store, number)
        elif self._have_come(there):
            self.store.set(key(number, CALL), "")
        return number

    def _are_replaced(self, there: Mapping[int, int]) -> bool:
        """Return whether new processes wait in the slots of members: their host was lost and came back
        before that was noticed. (Members that leave so that others can join have a state.)"""
        return any(there.get(slot) == NO_STATE for slot in self.members)

    def _have_come(self, there: Mapping[int, int]) -> bool:
        """Return whether ranks of live hosts that are no members have come since the last call, and
        complete another replica."""
        waiting = self._of_living(there.keys() - {*self.members})
        if waiting == self.waiting:
            return False
        self.waiting = waiting
        steps = dict.fromkeys(self.members, 0) | dict.fromkeys(waiting, NO_STATE)
        with contextlib.suppress(InputError):
            more = next_round(self.argv, self.cfg, self.whole, steps, self.per_node)
            return more is not None and len(more.slots) > len(self.members)
        return False

    def _silent(self, slots: Iterable[int], seconds: float = SILENT) -> set[int]:
        """Return the nodes of these ranks that have given no sign of life for so many seconds."""
        beats = self._beats(sorted({slot // self.per_node for slot in slots}))
        return {node for node, beat in beats.items() if self.signs[node].silence(beat) > seconds}

    def _of_living(self, slots: Collection[int]) -> set[int]:
        """Return those of these ranks whose host gives signs of life. Others would be lost again."""
        silent = self._silent(slots) if slots else set()
        return {slot for slot in slots if slot // self.per_node not in silent}

    def _beats(self, nodes: list[int]) -> dict[int, bytes]:
        """Return what the launchers have counted, b"" before one has begun, with few calls."""
        names = [alive(node) for node in nodes]
        if self.store.check(names):
            found = self.store.multi_get(names)
        else:
            found = [self.store.get(name) if self.store.check([name]) else b"" for name in names]
        return dict(zip(nodes, found, strict=True))

    def _wait(self, number: int) -> None:
        """Wait until all members are at the door, dead, or on a host that is silent."""
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline:
            silent = self._silent(self.members, ANSWERS)
            missing = set(self.members) - set(at_door(self.store, number))
            missing -= dead(self.store, number)
            missing = {slot for slot in missing if slot // self.per_node not in silent}
            if not missing or self.is_closed.wait(TICK) or self.store.check([OVER]):
                return

    def _end(self, number: int) -> int:
        """End a round and begin the next. Returns its number."""
        began = time.monotonic()
        self._wait(number)
        gone = dead(self.store, number)
        there = at_door(self.store, number)
        steps = {slot: there[slot] for slot in sorted(self._of_living(there)) if slot not in gone}
        chosen, why = None, "no replica is left whole"
        try:
            chosen = next_round(self.argv, self.cfg, self.whole, steps, self.per_node)
        except InputError as error:
            why = f"the options do not suit the replicas that are left ({error})"
        if chosen and self._is_in_vain(chosen.step, gone):
            why = (
                f"{IN_VAIN} rounds in a row ended without a step after step {chosen.step}, though no "
                "process did (see `ranks are lost` in their logs)"
            )
            chosen = None
        if chosen is None:
            log(f"{why}: all ranks end, for a restart")
            self.store.set(OVER, str(NO_REPLICA))
            return number
        self.members = chosen.slots
        self.waiting = set()
        self.store.set(key(number + 1, "ranks"), chosen.text())
        self.store.set(LATEST, str(number + 1))
        self.store.compare_set(key(number, END), "", ENDED)
        if not dead(self.store, number).isdisjoint(chosen.slots):
            report_loss(self.store, number + 1)  # it ended after the look above
        log(
            f"{chosen.replicas} of {self.whole.replicas} replicas go on after step {chosen.step}, "
            f"agreed in {time.monotonic() - began:.2f} s"
        )
        return number + 1

    def _is_in_vain(self, step: int, gone: set[int]) -> bool:
        """Note the step after which the next round begins. Returns whether too many in a row have
        done none. gone: the slots whose process has ended, of which as many as have a restart may."""
        self.in_vain = self.in_vain + 1 if step == self.step and not gone else 0
        self.step = step
        return self.in_vain >= IN_VAIN
