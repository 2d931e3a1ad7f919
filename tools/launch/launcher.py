"""Start a script as the ranks of this node: torchrun's engine, with exit codes that mean something.

    python -m tools.launch --nproc-per-node=4 --max-restarts=3 train.py configs/llama_debug.toml

What torchrun itself does differently, and why `run_train.sh` uses this instead:

- torchrun turns every failure into exit code 1. Here it is that of the first rank to fail (128 + n
  if signal n killed it), so that a scheduler can tell "stopped with a checkpoint, run again" (75)
  from "wrong input" (2) from a crash.
- A signal makes torchrun stop watching its ranks. Here it is passed on to them, and what they make
  of it is reported.
- When torchrun itself is killed, its ranks live on and hold their GPUs. Here they die with it.
- torchrun's store listens on every interface, without a password. Here that of one node listens on
  the loopback only, that of several on node 0's own address.
- The last lines on the console are one for each rank that failed and the whole traceback of the
  first of them, however much the other ranks have printed since.
- torchrun's restarts hand the ranks the store of the previous start, whose stale addresses gloo
  then tries in vain. Here every start (--max-restarts) has a new store, on one node and on many.
- A failure on one node is known on the others when their collectives time out. Here the nodes tell
  each other at once.
"""

import argparse
import collections
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, DistStoreError, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from configs.load import load_config
from configs.program import INTERRUPTED, STOPPED, exit_code_of, is_train, stopped_early
from configs.rounds import ORDERLY, ROLE
from configs.schema import Config, InputError
from tools.launch import log
from tools.launch.rounds import Coordinator, NodePlace, Rounds, Signs, is_frozen, wait_for
from tools.launch.standby import Standby

# the ranks have --shutdown-timeout seconds to end
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (*STOP, signal.SIGUSR1, signal.SIGUSR2)
# exit codes for which the ranks have already said why; 130: Ctrl-C again
QUIET_CODES = (2, 75, 76, INTERRUPTED)
# of train.py, and without a traceback: it has said why, too (reliability/exit.py::refuse)
FAILED = 1
# Exit codes of ranks to which the launcher has passed on a signal, or which it has ended after
# others had failed. They come last in the order of blame.
TOLD_TO_END = (STOPPED, -signal.SIGTERM)
BACKLOG = 4096  # connections that may wait to be accepted: all ranks connect at once
# seconds that the store of several nodes outlives the ranks, so that all nodes hear how they ended
LINGER = 1.0
# seconds in which the ranks of a node may end by themselves when those of another ended on request
GRACE_SECONDS = 10.0
COMPARED = 3.0  # seconds in which the launchers tell each other how far their ranks had come
# Seconds in which Ctrl-C again is the same request: a little more than in reliability/stop.py, as
# a rank hears of the first later than the launcher.
ECHO = 2.2
INSISTS = 3  # seconds that ranks may take to end after Ctrl-C again
SILENT = 5.0  # seconds that a node searches for node 0 before it says so
LAST_LINES = 20  # of a rank's log, shown when it died without a Python traceback


class Rendezvous(StaticTCPRendezvous):
    """Rendezvous of a job's nodes for one start: a key-value store that node 0 serves until the
    next start, and that its ranks use too.

    The store has no password, so it listens on as few addresses as possible: for one node on the
    loopback, on any free port; for several on the address of master_addr, when this host has that
    address. When it does not (a name that this host resolves to itself, an address behind a
    translator) it listens on every interface, as torchrun's store always does. Keys: node/N, node N
    has come; `members`, the nodes of this start; `over/N`, all ranks of node N have ended; `end`,
    how the start ended.
    """

    run_id = "plumbline"

    def __init__(self, options: argparse.Namespace, script: list[str]) -> None:
        self.options = options
        self.script = script
        self.store: TCPStore | None = None
        self.where: tuple[str, int] | None = None
        self.members: list[int] = []
        self.address = ""
        self.node = options.node_rank  # a spare takes the place of another
        self.place: NodePlace | None = None  # of a node that was lost, in a run that has gone on

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the nodes of the next start. Raises RendezvousError when fewer than the least
        number come within --join-timeout seconds, SpareIsDone when the job has ended without this
        one."""
        o = self.options
        least, most = o.nnodes
        address, port = ("127.0.0.1", 0) if most == 1 else (o.master_addr, o.master_port)
        deadline = time.monotonic() + o.join_timeout
        if o.node_rank == 0:
            wait_for_name(address, deadline)
            listener = listen(address, port)
            port = listener.getsockname()[1]
            kept = {
                "is_master": True,
                "master_listen_fd": listener.detach(),
                "wait_for_workers": False,
            }
            self.store = TCPStore(address, port, timeout=timedelta(seconds=o.join_timeout), **kept)
            members = self._collect(least, most, deadline)
        else:
            members = self._join(address, port, deadline)
        self.where = (address, port) if len(members) > 1 else None
        self.members = members
        self.address = address
        return RendezvousInfo(
            self.store, members.index(self.node), len(members), RendezvousStoreInfo(address, port)
        )

    def _collect(self, least: int, most: int, deadline: float) -> list[int]:
        """Collect nodes, on node 0, until all have come, or until the least number have and no more
        came for --last-call seconds."""
        came = [0]
        since = time.monotonic()
        while len(came) < most:
            there = [0]
            for node in range(1, most):
                if node in came or self.store.check([f"node/{node}"]):
                    there.append(node)
            if len(there) > len(came):
                came = there
                since = time.monotonic()
            now = time.monotonic()
            if least <= len(came) < most and now > since + self.options.last_call:
                break
            if now > deadline and len(came) < least:
                raise RendezvousError(
                    f"{len(came)} of at least {least} nodes came within "
                    f"{self.options.join_timeout} s"
                )
            time.sleep(0.05)
        came = came[: self._fit(len(came), least)]
        self.store.set("members", json.dumps(came))
        return came

    def _fit(self, came: int, least: int) -> int:
        """Return the largest number of nodes, of those that came, on which the configuration can
        run: 3 may not divide the batch, where 2 do."""
        each = self.options.nproc_per_node
        for nodes in range(came, least - 1, -1):
            if _config(self.script, nodes * each, each):
                return nodes
        return came

    def _join(self, address: str, port: int, deadline: float) -> list[int]:
        """Join, on the other nodes. A store that already has its members belongs to a start that is
        over, or that continues without this node: then wait for the next."""
        node = self.options.node_rank
        waits = False
        searched = time.monotonic()
        signs: dict[int, Signs] = collections.defaultdict(Signs)
        why = ""
        while True:
            try:
                # what torch prints of an address that does not answer is 40 lines long
                socket.create_connection((address, port), timeout=5).close()
                left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
                self.store = TCPStore(
                    address, port, is_master=False, wait_for_workers=False, timeout=left
                )
                if not self.store.check(["members"]):
                    self.store.set(f"node/{node}", "")
                members = json.loads(self.store.get("members"))
                if node in members and not self.store.check([f"taken/{node}"]):
                    self.store.set(f"taken/{node}", "")
                    return members
                if self._takes_a_place(members, signs):
                    return members
                deadline = time.monotonic() + self.options.join_timeout  # node 0 lives
                if node not in members and not waits:
                    waits = True
                    log(f"node {node} waits: the run goes on without it until its next start")
                # a call that waits would warn of each second
                code = int(self.store.get("end")) if self.store.check(["end"]) else None
                if code in ORDERLY:
                    raise SpareIsDone(code)
            except DistError:  # node 0 is not there any more
                pass
            except OSError as error:  # nor there yet
                now = time.monotonic()
                if not why and now > min(searched + SILENT, deadline):
                    why = f" ({error.strerror or error})"
                    log(f"node {node} waits for node 0 at {address}:{port}{why}")
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"no answer, or not enough nodes came within {self.options.join_timeout} s{why}"
                )
            time.sleep(0.2)

    def _takes_a_place(self, members: list[int], signs: dict[int, Signs]) -> bool:
        """Take the place of a node that is lost, in a run that goes on without it: that of this node,
        or on a spare any other than node 0's. Returns False where there is none."""
        own = self.options.node_rank
        for place, node in enumerate(members):
            if place == 0 or not signs[node].have_ended(self.store, place, node == own):
                continue
            taken = NodePlace(place)
            if taken.take(self.store, signs[node].beat.decode()):
                if node != own:
                    log(f"node {own} takes the place of node {node}, which does not answer")
                self.node = node
                self.place = taken
                return True
        return False

    def close(self) -> None:
        """Close the store, so that the next start can listen on the same port."""
        self.store = None
        gc.collect()


class SpareIsDone(RendezvousError):
    """Raised on a spare node when the nodes of the running start have ended."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def wait_for_name(address: str, deadline: float) -> None:
    """Wait until this host finds the address: the name of a new host may take a while. Raises
    RendezvousError at the deadline, on the monotonic clock."""
    said = False
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if not said:
                said = True
                log(f"waits until this host finds {address} ({error.strerror})")
            if time.monotonic() > deadline:
                raise RendezvousError(f"{address} is not found: {error.strerror}") from None
        time.sleep(0.2)


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket on that address of this host; on all its interfaces where others
    might not reach that one.

    Raises RendezvousConnectionError when the port is taken.
    """
    try:
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if address == where[0] or not ipaddress.ip_address(where[0]).is_loopback:
            return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:  # a name not known here yet, an address of no interface here
        if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
            raise RendezvousConnectionError(error.strerror) from None
    try:
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        raise RendezvousConnectionError(error.strerror) from None


class Agent(LocalElasticAgent):
    """torchrun's agent, except that a signal does not end its watch over the ranks but is passed on
    to them, and that it tells the agents of the other nodes how its ranks ended, and hears of
    theirs."""

    grace_seconds: int
    rendezvous: Rendezvous
    rounds: Rounds | None = None  # of a run that goes on without ranks that it has lost
    coordinator: Coordinator | None = None  # the same, on node 0
    standby: Standby  # the processes of the next start
    asked: set[int]  # the signals that were passed on
    interrupted = 0.0  # when Ctrl-C was pressed
    left = 0  # the quiet code with which a rank ended before this launcher had told any to end
    told: int | None = None  # the exit code with which another node's ranks ended
    heard = 0.0  # when that was

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        if self.rendezvous.where:
            threading.Thread(target=self._hear, args=self.rendezvous.where, daemon=True).start()
        held: list[int] = []

        def on_signal(number: int, frame: object) -> None:
            if self._pcontext:
                self._pass_on(number)
            else:  # there may be ranks, but their process ids are not known yet
                held.append(number)

        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, on_signal)
        signal.signal(signal.SIGALRM, on_signal)
        self._open_rounds()
        # torch sets handlers before it starts the first rank, and only of the signals named here
        # (PContext.start in torch.distributed.elastic.multiprocessing.api)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        # ranks inherit it and unblock it when they have a handler (tools/launch/rank.py)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            ranks = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number in held:
            self._pass_on(number)
        return ranks

    def _open_rounds(self) -> None:
        """Let the run go on without ranks that it has lost, if it is to (tools/launch/rounds.py)."""
        o, script = self.rendezvous.options, self.rendezvous.script
        nodes = self.rendezvous.members
        cfg = _config(script, len(nodes) * o.nproc_per_node, o.nproc_per_node)
        os.environ.pop(ROLE, None)
        if not cfg or not cfg.run.fault_tolerant or cfg.parallelism.data_parallel_replicate == 1:
            return
        place = nodes.index(self.rendezvous.node)
        where = (self.rendezvous.address, self.rendezvous.store.port)
        if place == 0:
            self.coordinator = Coordinator(where, script[1:], cfg, len(nodes), o.nproc_per_node)
            self.coordinator.begin()
        self.rounds = Rounds(where, o, place, len(nodes), self.rendezvous.place)
        os.environ[ROLE] = "newcomer" if self.rendezvous.place else "member"

    def _exit_barrier(self) -> None:
        """Wait for the other nodes; where some are lost, not for these."""
        if self.rounds:
            self.rounds.wait_for_others()
        else:
            super()._exit_barrier()

    def _pass_on(self, number: int) -> None:
        """Pass a signal on to the ranks, which say what they make of it. Those that have not ended
        in time are killed."""
        self.asked.add(number)
        if number == signal.SIGINT and self.interrupted:
            if time.monotonic() < self.interrupted + ECHO:
                return
            self.grace_seconds = INSISTS
        if number == signal.SIGINT:
            self.interrupted = time.monotonic()
        if number == signal.SIGALRM:
            log(f"not stopped after {self.grace_seconds} s: the ranks are killed")
            number = signal.SIGKILL
        elif number in STOP:
            signal.alarm(self.grace_seconds)
        self._send(number)

    def _send(self, number: int) -> None:
        for pid in self._pcontext.pids().values():  # each one leads its process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _hear(self, address: str, port: int) -> None:
        """Watch the other nodes in a thread with its own connection: a network that is cut silently
        must not block the main thread."""
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False)
            while not self.heard:
                with contextlib.suppress(DistStoreError):  # nothing yet
                    store.wait(["end"], timedelta(hours=1))
                    self.told = int(store.get("end"))
                    self.heard = time.monotonic()
        except DistError:  # node 0's launcher is gone, and so are its ranks
            self.told = 1
            self.heard = time.monotonic()

    def tell(self, code: int) -> None:
        """Tell the other nodes how the ranks of this one ended, and learn how theirs did. A rank
        that ended on request counts more than ranks that failed afterwards because it was missing,
        so a node whose ranks failed waits for the others: the process that was asked to end may be
        the slower one."""
        if self.rendezvous.where:
            teller = threading.Thread(target=self._tell, args=(str(code),), daemon=True)
            teller.start()
            teller.join(GRACE_SECONDS + LINGER)  # a cable that is cut gives no answer
            time.sleep(LINGER)

    def _tell(self, code: str) -> None:
        store = self.rendezvous.store
        with contextlib.suppress(DistError):
            if int(code) in QUIET_CODES:
                store.set("end", code)
            else:
                store.compare_set("end", "", code)
            store.set(f"over/{self.rendezvous.node}", "")
            if int(code) in ORDERLY:
                return
            all_over = [f"over/{node}" for node in json.loads(store.get("members"))]
            wait_for(store, all_over, GRACE_SECONDS)
            self.told = int(store.get("end"))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.standby.prepare()
        if self.rounds and not self.rounds.watch(self, worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        ended = {handler.proc.poll() for handler in self._pcontext.subprocess_handlers.values()}
        if None in ended and self.asked & {*STOP} and ended <= {None, 0, *QUIET_CODES}:
            # a rank that got the signal may be slower, and say what the others leave to it
            return RunResult(state=WorkerState.HEALTHY)
        # before super() ends the rest
        self.left = next((code for code in QUIET_CODES if code in ended), 0)
        if ended - {None, 0}:
            for local_rank, pid in self._pcontext.pids().items():
                if is_frozen(pid):
                    rank = worker_group.workers[local_rank].global_rank
                    why = "is frozen (SIGSTOP, or a debugger), so the others waited for it"
                    log(f"rank {rank} on {socket.gethostname()} {why}")
            self._send(signal.SIGCONT)  # a frozen rank would not get SIGTERM
        result = super()._monitor_workers(worker_group)
        for local_rank, error_file in self._pcontext.error_files.items():
            if failure := result.failures.get(worker_group.workers[local_rank].global_rank):
                failure.begun = _read_begun(f"{error_file}.begun")
        patience = GRACE_SECONDS if self.told in QUIET_CODES else 0
        over = self.told and time.monotonic() > self.heard + patience
        if result.state == WorkerState.HEALTHY and over:
            return RunResult(state=WorkerState.UNHEALTHY)  # run() ends the ranks and returns
        return result


def launch(options: argparse.Namespace, script: list[str]) -> int:
    """Run the script on every rank of this node until all are done; start it again when a rank has
    failed, at most --max-restarts times. Returns the exit code."""
    logging.disable(logging.ERROR)  # torchrun's messages are replaced by those below
    command = [sys.executable, "-u", "-m", "tools.launch.rank", str(os.getpid()), *script]
    options.used = 0  # restarts, of all ranks or of a single one (tools/launch/rounds.py)
    with Standby(command, options.nproc_per_node) as standby:
        for number in range(options.max_restarts + 1):
            began = time.monotonic()
            standby.begin(more=number < options.max_restarts)
            code, worth_retrying = start(options, script, standby)
            if not worth_retrying or options.used >= options.max_restarts:
                break
            options.used += 1
            seconds = time.monotonic() - began
            log(f"restart {number + 1} of {options.max_restarts}, after {seconds:,.0f} s")
    return code


def start(options: argparse.Namespace, script: list[str], standby: Standby) -> tuple[int, bool]:
    """Run one start. Returns its exit code, and whether another start may succeed. standby: has the
    command of a rank of this script."""
    before = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGALRM)}
    if before[signal.SIGINT] == signal.default_int_handler:
        # it does not run while this waits for other nodes; that of configs/program.py does
        before[signal.SIGINT] = signal.SIG_DFL
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    rendezvous = Rendezvous(options, script)
    _, most = options.nnodes
    with tempfile.TemporaryDirectory(prefix="plumbline-launch-") as folder:
        spec = WorkerSpec(
            role="rank",
            local_world_size=options.nproc_per_node,
            rdzv_handler=rendezvous,
            entrypoint=standby.command[0],
            args=tuple(standby.command[1:]),
            max_restarts=0,
        )
        # Nodes that are done wait for the others at a barrier. This is the limit where one failed.
        barrier = options.shutdown_timeout
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), exit_barrier_timeout=barrier)
        agent.grace_seconds = options.shutdown_timeout
        agent.asked = set()
        agent.rendezvous = rendezvous
        agent.standby = standby
        try:
            result = agent.run()
        except SignalException as stopped:  # SIGQUIT, the only signal left to torch's handler
            return stopped_before(stopped.sigval), False
        except SpareIsDone as done:
            return done.code, False
        except (DistError, RendezvousError) as error:
            node = f"node {options.node_rank} of {most} on {socket.gethostname()}"
            endpoint = "" if most == 1 else f" at {options.master_addr}:{options.master_port}"
            log(f"{node} could not meet the others{endpoint}: {str(error).splitlines()[0]}")
            return 1, False
        finally:
            signal.alarm(0)
            # our signal handlers refer to the agent, which refers to the store
            for number, handler in before.items():
                signal.signal(number, handler)
        code = 0
        if result.state != WorkerState.SUCCEEDED:
            code = end(agent, result.failures, script)
        elif options.node_rank == 0:
            agent.tell(0)  # spare nodes wait for it
        if agent.coordinator:
            agent.coordinator.close()
        worth_retrying = code not in ORDERLY and not agent.asked
        del agent, spec, result
        rendezvous.close()
    return code, worth_retrying


def end(agent: Agent, failures: dict[int, ProcessFailure], script: list[str]) -> int:
    """Tell the other nodes and the person; returns the exit code."""
    if not failures:  # the ranks were well until they were ended
        if agent.told not in QUIET_CODES:
            why = "one does not answer, not even to the kernel"
            if agent.told:
                why = "the ranks of another node failed"
            log(f"{why}, so those of this one were ended")
        agent.tell(agent.told or 1)
        return agent.told or 1
    failed = sorted((FailedRank(*row) for row in failures.items()), key=FailedRank.blame)
    codes = {one.code for one in failed}
    others = codes - {agent.left, *TOLD_TO_END}
    code = failed[0].code
    if agent.left and all(c > 0 for c in others):
        code = agent.left
    is_early = -code in agent.asked  # told before it listened
    agent.tell(
        stopped_early(signal.Signals(-code))[0] if is_early else abs(code) + 128 * (code < 0)
    )
    # and so those of this node could not go on
    if code not in QUIET_CODES and agent.told in QUIET_CODES:
        return agent.told
    if code == agent.left and others:
        log(f"a rank ended with exit code {code}, and the others could not go on without it")
        return code
    if -signal.SIGALRM in codes:
        rendezvous = agent.rendezvous
        store = rendezvous.store if rendezvous.where else None
        # ranks that had begun none have left no count
        counts = {one.rank: one.begun for one in failed if one.begun}
        say_who_is_behind(counts, store, rendezvous.node)
    say_where_everyone_was(failed, script)
    return report(failed, script, agent.asked)


class FailedRank:
    """How a rank has ended that has failed."""

    def __init__(self, rank: int, failure: ProcessFailure) -> None:
        # what tools/launch/rank.py wrote of the exception, if one ended it
        error = failure.message if isinstance(failure.message, dict) else {}
        self.rank = rank
        self.process = failure.pid
        self.signal = failure.signal_name()
        self.code = failure.exitcode
        if error and (self.code < 0 or self.code in TOLD_TO_END):
            # it took so long to end that a signal of the launcher ended it
            self.code = FAILED
        self.raised: float | None = error.get("time")
        self.noticed = failure.timestamp  # in whole seconds
        self.traceback = error.get("message", "").rstrip()
        self.begun: int = getattr(failure, "begun", 0)  # collectives

    def blame(self) -> tuple[int, int, float, int]:
        """Return the sort key: who failed first. Without an exception only the second is known in
        which its end was noticed, which may be the second after. Ranks that merely ended when the
        launcher told them to come last."""
        moment = self.raised or self.noticed
        # Its watchdog killed it. The others waited for it, and may have failed sooner.
        if self.code == -signal.SIGALRM:
            # under NCCL all ranks may die so; the rank that is behind is to blame
            return -1, self.begun, moment, self.rank
        last = 1 + TOLD_TO_END.index(self.code) if self.code in TOLD_TO_END else 0
        return last, 0, moment - (self.raised is None), self.rank


def report(failed: list[FailedRank], script: list[str], asked: set[int]) -> int:
    """Name the ranks that failed (at most eight), then tell all about the first to fail; returns
    the job's exit code. failed: the first to fail first.

    Ranks that got a stop signal before they had installed their handlers die of it: there was nothing
    to save yet.
    """
    first, *others = failed
    if -first.code in asked:
        return stopped_before(-first.code)
    has_said = is_train(script[0]) and {FAILED} == {one.code for one in failed} - {*TOLD_TO_END}
    if first.code not in QUIET_CODES and (any(one.traceback for one in failed) or not has_said):
        log_of_first = _log_of(first.rank, script)
        for one in [first, *(one for one in others if one.code not in TOLD_TO_END)][:8]:
            how = f"ended with exit code {one.code}"
            if one.code <= 0:
                how = f"was killed by {one.signal}"
            at = f" at {_clock(one.raised)}" if one.raised else ""
            its_log = _named(_log_of(one.rank, script))
            log(f"rank {one.rank} on {socket.gethostname()} {how}{at}{its_log}")
        if first.traceback:
            title = f"the traceback of rank {first.rank}, the first to fail here:"
            log(f"{title}\n{first.traceback}")
        elif log_of_first and others:
            text = log_of_first.read_text(encoding="utf-8", errors="replace")
            title = f"the last lines of the log of rank {first.rank}, the first to fail here:"
            log("\n".join([title, *text.splitlines()[-LAST_LINES:]]))
    return exit_code_of(first.code)


def stopped_before(number: int) -> int:
    """Say that a signal has stopped the run before training, and return the exit code."""
    code, sentence = stopped_early(signal.Signals(number))
    log(sentence)
    return code


def _read_begun(path: str) -> int:
    """Read the progress counter that a rank has left in this file
    (parallelisms/progress.py::ProgressCounter); 0 if it had not opened it yet."""
    with contextlib.suppress(OSError, struct.error):
        return struct.unpack("<q", Path(path).read_bytes())[0]
    return 0


def say_who_is_behind(counts: dict[int, int], store: TCPStore | None, node: int) -> None:
    """Name, after a hang, the ranks of all nodes that had begun fewer collectives than others,
    which waited for them.

    counts: collectives begun, by rank of this node. store: shared by several nodes; None for one.
    Prints nothing if all ranks had begun equally many: then a device hangs and not a process, or
    ranks hang inside forward or backward.
    """
    host = socket.gethostname()
    everyone = {rank: (count, host) for rank, count in counts.items()}
    if store:
        teller = threading.Thread(target=_compare, args=(store, node, everyone), daemon=True)
        teller.start()
        teller.join(2 * COMPARED)  # a cable that is cut gives no answer
    most = max((count for count, _ in everyone.values()), default=0)
    behind = {rank: place for rank, place in sorted(everyone.items()) if place[0] < most}
    for rank, (count, host) in list(behind.items())[:8]:
        counts_of = f"it had begun {count:,} collectives, the others {most:,}"
        log(f"rank {rank} on {host} is behind: {counts_of}")


def _compare(store: TCPStore, node: int, everyone: dict[int, tuple[int, str]]) -> None:
    """Tell the other nodes, and add to `everyone` what they tell within COMPARED seconds. A node
    sends its ranks that are furthest behind and one that is furthest ahead, so a message is short
    however many ranks there are."""
    ranks = sorted(everyone, key=everyone.__getitem__)
    with contextlib.suppress(DistError):
        shown = {*ranks[:8], *ranks[-1:]}
        rows = [[rank, *everyone[rank]] for rank in shown]
        store.set(f"begun/{node}", json.dumps(rows))
        keys = [f"begun/{other}" for other in json.loads(store.get("members"))]
        wait_for(store, keys, COMPARED)
        for key in keys:
            if store.check([key]):
                for rank, count, host in json.loads(store.get(key)):
                    everyone[rank] = (count, host)


def say_where_everyone_was(failed: list[FailedRank], script: list[str]) -> None:
    """Print, after a hang, the report of tools/hang.py on the positions that the ranks left in the
    run's folder. Ranks of other nodes are included where the folder is shared."""
    if not any("imed out" in one.traceback or one.code == -signal.SIGALRM for one in failed):
        return
    cfg = _config(script)
    if not cfg:
        return
    from tools import hang  # it imports what only a rank needs

    try:
        ranks = hang.read(Path(cfg.run.folder))
    except (InputError, OSError) as error:
        return log(str(error))
    # a script that is no run has left none, and those of an older run say nothing
    of_these = {(one.rank, one.process) for one in failed}
    if any((rank.rank, rank.process) in of_these for rank in ranks):
        log("\n".join(["where everyone was:", *hang.judge(ranks).lines]))


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"


def _log_of(rank: int, script: list[str]) -> Path | None:
    """Return the path of the rank's log, when the script is one of ours and has opened it."""
    cfg = _config(script)
    path = cfg and Path(cfg.run.folder) / "logs" / f"rank-{rank:05d}.log"
    return path if path and path.exists() else None


def _config(script: list[str], *sizes: int) -> Config | None:
    """Return the run's configuration; None if it cannot run so, or if the script is not ours."""
    try:
        return load_config(script[1:], *sizes)
    except InputError:
        return None


def _named(log: Path | None) -> str:
    if not log:
        return ""
    stacks = log.with_suffix(".stacks")  # of reliability/health.py::Watchdog; empty after kill -9
    has_stacks = stacks.exists() and stacks.stat().st_size
    return f"; its log: {log}" + (f", its stacks: {stacks}" if has_stacks else "")
