"""Start a script as the ranks of this node: torchrun's engine, with exit codes that mean something.

    python -m tools.launch --nproc-per-node=4 train.py configs/llama_debug.toml

What torchrun itself does differently, and why `run_train.sh` uses this instead:

- torchrun turns every failure into exit code 1. Here it is that of the first rank to fail (128 + n if signal n killed
  it), so that a scheduler can tell "stopped with a checkpoint, run again" (75) from "wrong input" (2) from a crash.
- A signal makes torchrun stop watching its ranks. Here it is passed on to them, and what they make of it is reported.
- When torchrun itself is killed, its ranks live on and hold their GPUs. Here they die with it.
- torchrun's store listens on every interface, without a password. Here that of one node listens on the loopback only,
  that of several on node 0's own address.
- The last words on the console are one line for each rank that failed and the whole traceback of the first of them,
  however much the others have said since.
"""

import argparse
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the ranks have --shutdown-timeout seconds to end
PASSED_ON = (*STOP, signal.SIGUSR1, signal.SIGUSR2)
QUIET_CODES = (2, 75, 76)  # of which the ranks have said all there is to say
# How ranks end when the launcher passes on a signal, or, last in the order of blame, ends them after others have ended.
TOLD_TO_END = (75, -signal.SIGTERM)
BACKLOG = 4096  # connections that may wait to be accepted: all ranks come at once
LAST_LINES = 20  # of a rank's log, shown when it died without a Python traceback


class Meeting(RendezvousHandler):
    """Where the nodes of a job meet: a key-value store that node 0 serves for as long as it lives, and its ranks use too.

    The store has no password, so it listens where it must and nowhere else: for one node on the loopback, on any free
    port; for several on the address that master_addr stands for, when that is one of this host's own. Where it is not (a
    name that this host resolves to itself, an address behind a translator) it listens on every interface, as torchrun's
    does always.
    """

    use_agent_store = True  # the ranks meet in this store instead of opening another one

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.store = options, None

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises RendezvousError when the nodes do not all come within --join-timeout seconds."""
        o = self.options
        address, port = ("127.0.0.1", 0) if o.nnodes == 1 else (o.master_addr, o.master_port)
        serve = {}
        if o.node_rank == 0:
            listener = listen(address, port)
            port = listener.getsockname()[1]
            serve = {"is_master": True, "master_listen_fd": listener.detach()}
        self.store = TCPStore(address, port, o.nnodes, timeout=timedelta(seconds=o.join_timeout), **serve)
        return RendezvousInfo(self.store, o.node_rank, o.nnodes, RendezvousStoreInfo(address, port))

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return "plumbline"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on that address of this host; on all its interfaces where others might not reach that one.

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
    """torchrun's agent, except that a signal does not end its watch over the ranks but is passed on to them."""

    grace_seconds: int
    asked: set[int]  # the signals that were passed on

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        wanted = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        ranks = super()._start_workers(worker_group)  # local rank -> process id, each the leader of its own group
        interrupts = 0

        def send(number: int) -> None:
            for pid in ranks.values():
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:
                    pass

        def pass_on(number: int, frame: object) -> None:
            nonlocal interrupts
            self.asked.add(number)
            interrupts += number == signal.SIGINT
            if number == signal.SIGALRM:
                say(f"not stopped after {self.grace_seconds} s: the ranks are killed")
            if number == signal.SIGALRM or interrupts > 1:  # too late, or a person who has pressed Ctrl-C again
                number = signal.SIGKILL
            elif number in STOP:
                signal.alarm(self.grace_seconds)
            send(number)

        for number in (*wanted, signal.SIGALRM):
            signal.signal(number, pass_on)
        return ranks


def launch(options: argparse.Namespace, script: list[str]) -> int:
    """Run the script on every rank of this node until all are done or one has failed. Returns the exit code."""
    logging.disable(logging.ERROR)  # what torchrun has to say is said better below
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler does not run while it waits for other nodes
    endpoint = "" if options.nnodes == 1 else f" at {options.master_addr}:{options.master_port}"
    with tempfile.TemporaryDirectory(prefix="plumbline-launch-") as folder:
        spec = WorkerSpec(
            role="rank",
            local_world_size=options.nproc_per_node,
            rdzv_handler=Meeting(options),
            entrypoint=sys.executable,
            args=("-u", "-m", "tools.launch.rank", str(os.getpid()), *script),
            max_restarts=0,
        )
        # The barrier: nodes that are done wait for the others, but for a node that failed only that long.
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), exit_barrier_timeout=options.shutdown_timeout)
        agent.grace_seconds, agent.asked = options.shutdown_timeout, set()
        try:
            failures = agent.run().failures
        except SignalException as stopped:  # between the start of the first rank and of the last
            return 128 + stopped.sigval
        except (DistError, RendezvousError) as error:
            node = f"node {options.node_rank} of {options.nnodes} on {socket.gethostname()}"
            say(f"{node} could not meet the others{endpoint}: {str(error).splitlines()[0]}")
            return 1
        return report(failures, script, agent.asked) if failures else 0


def report(failures: dict[int, ProcessFailure], script: list[str], asked: set[int]) -> int:
    """Name the ranks that failed (at most eight), then tell all about the first to fail; returns the exit code it stands for.

    A rank's error file has the moment of its exception; of one without, only the second is known in which its end was
    noticed, which for one killed by a signal may be the second after. Those that merely ended when the launcher told them
    to come last. Ranks that a stop signal found before they had begun to listen for it die of it: that too is 75, with
    nothing to save yet.
    """
    errors = {rank: f.message if isinstance(f.message, dict) else {} for rank, f in failures.items()}  # rank.py wrote it
    # A rank that has failed may take so long to end that it is ended because of the others: that is not what it died of.
    codes = {rank: 1 if errors[rank] and f.exitcode < 0 else f.exitcode for rank, f in failures.items()}

    def order(rank: int) -> tuple[int, float, int]:
        code, moment = codes[rank], errors[rank].get("time", failures[rank].timestamp)
        if code == -signal.SIGALRM:  # its watchdog: the others failed because they waited for it, and sooner
            return -1, moment, rank
        return (0, *TOLD_TO_END).index(code) if code in TOLD_TO_END else 0, moment - (code < 0), rank

    first, *others = sorted(failures, key=order)
    code = codes[first]
    if -code in asked:
        say(f"stopped by {signal.Signals(-code).name} before training began: run it again to go on")
        return 75
    if code not in QUIET_CODES:
        log = _log_of(first, script)
        for rank in [first, *(other for other in others if codes[other] not in TOLD_TO_END)][:8]:
            end = f"ended with exit code {codes[rank]}" if codes[rank] > 0 else f"was killed by {failures[rank].signal_name()}"
            at = f" at {_clock(errors[rank]['time'])}" if errors[rank] else ""
            say(f"rank {rank} on {socket.gethostname()} {end}{at}{_named(_log_of(rank, script))}")
        if errors[first]:
            say(f"the traceback of rank {first}, the first to fail here:\n{errors[first]['message'].rstrip()}")
        elif log and others:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            say("\n".join([f"the last lines of the log of rank {first}, the first to fail here:", *lines]))
    return code if code >= 0 else 128 - code


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"


def _log_of(rank: int, script: list[str]) -> Path | None:
    """Where the rank wrote its log, when the script is one of ours and got as far as that."""
    from configs.load import load_config
    from configs.schema import InputError

    try:
        path = Path(load_config(script[1:]).run.folder) / "logs" / f"rank-{rank:05d}.log"
    except InputError:
        return None
    return path if path.exists() else None


def _named(log: Path | None) -> str:
    if not log:
        return ""
    stacks = log.with_suffix(".stacks")  # training/health.py::Watchdog
    return f"; its log: {log}" + (f", its stacks: {stacks}" if stacks.exists() else "")


def say(words: str) -> None:
    print(f"launch: {words}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--master-addr", default="", help="address of node 0, where the nodes meet")
    parser.add_argument("--master-port", type=int, default=29500, help="a free port there")
    parser.add_argument("--join-timeout", type=int, default=600, help="seconds to wait for the other nodes")
    parser.add_argument("--shutdown-timeout", type=int, default=30, help="seconds from a signal to SIGKILL")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args(argv)
    if not options.script:
        parser.error("a script is needed")
    return launch(options, ["-m", *options.script] if options.module else options.script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
