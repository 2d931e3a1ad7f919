"""Start a script as the ranks of this node: torchrun's engine, with exit codes that mean something.

    python -m tools.launch --nproc-per-node=4 train.py configs/llama_debug.toml

What torchrun itself does differently, and why `run_train.sh` uses this instead:

- torchrun turns every failure into exit code 1. Here it is that of the first rank to fail (128 + n if signal n killed
  it), so that a scheduler can tell "stopped with a checkpoint, run again" (75) from "wrong input" (2) from a crash.
- A signal makes torchrun stop watching its ranks. Here it is passed on to them, and what they make of it is reported.
- When torchrun itself is killed, its ranks live on and hold their GPUs. Here they die with it.
- One line for each rank that failed, instead of a second traceback.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the ranks have --shutdown-timeout seconds to end
PASSED_ON = (*STOP, signal.SIGUSR1, signal.SIGUSR2)
QUIET_CODES = (2, 75)  # of which the ranks have said all there is to say
TOLD_TO_END = (75, -signal.SIGTERM)  # how ranks end when the launcher passes on a signal, or ends them after a failure

# A rank asks Linux to be killed when its parent dies (prctl(2), PR_SET_PDEATHSIG = 1), then becomes the script.
DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): sys.exit("the launcher is gone")
os.execv(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
"""


class Agent(LocalElasticAgent):
    """torchrun's agent, except that a signal does not end its watch over the ranks but is passed on to them."""

    grace_seconds: int

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
    command = ["-u", *script]
    if sys.platform == "linux":
        command = ["-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *script]
    endpoint = f"{options.master_addr}:{options.master_port}"
    with tempfile.TemporaryDirectory(prefix="plumbline-launch-") as folder:
        if options.nnodes == 1:  # meets itself through a file, so the ranks' store is all that listens, on a free port
            where = {"local_addr": "127.0.0.1"}
            meeting = RendezvousParameters("c10d", f"{folder}/meeting", "one", 1, 1, store_type="file", **where)
        else:
            where = {"master_addr": options.master_addr, "master_port": options.master_port}
            who = {"rank": options.node_rank, "timeout": options.join_timeout}
            meeting = RendezvousParameters("static", endpoint, "many", options.nnodes, options.nnodes, **who)
        spec = WorkerSpec(
            role="rank",
            local_world_size=options.nproc_per_node,
            rdzv_handler=get_rendezvous_handler(meeting),
            entrypoint=sys.executable,
            args=tuple(command),
            max_restarts=0,
            **where,
        )
        # The barrier: nodes that are done wait for the others, but for a node that failed only that long.
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder), exit_barrier_timeout=options.shutdown_timeout)
        agent.grace_seconds = options.shutdown_timeout
        try:
            failures = agent.run().failures
        except SignalException as stopped:  # between the start of the first rank and of the last
            return 128 + stopped.sigval
        except (DistError, RendezvousError) as error:
            node = f"node {options.node_rank} of {options.nnodes} on {socket.gethostname()}"
            say(f"{node} could not meet the others at {endpoint}: {str(error).splitlines()[0]}")
            return 1
        return report(failures, script) if failures else 0


def report(failures: dict[int, ProcessFailure], script: list[str]) -> int:
    """Name the ranks that failed (at most eight), the first to fail first, and return the exit code it stands for.

    Times are whole seconds. Within the same one, a rank killed by a signal comes before those that its death made fail,
    and any failure before those that merely ended when the launcher told them to.
    """

    def order(rank: int) -> tuple[int, int, int]:
        code = failures[rank].exitcode
        return failures[rank].timestamp, 2 if code in TOLD_TO_END else int(code > 0), rank

    first, *others = sorted(failures, key=order)
    code = failures[first].exitcode
    if code not in QUIET_CODES:
        for rank in [first, *(other for other in others if failures[other].exitcode not in TOLD_TO_END)][:8]:
            say(f"rank {rank} on {socket.gethostname()} {_end_of(failures[rank])}{_log_of(rank, script)}")
    return code if code >= 0 else 128 - code


def _end_of(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    return f"ended with exit code {failure.exitcode}"


def _log_of(rank: int, script: list[str]) -> str:
    """Where the rank wrote its log, when the script is one of ours and got as far as that."""
    from configs.load import load_config
    from configs.schema import InputError

    try:
        path = Path(load_config(script[1:]).run.folder) / "logs" / f"rank-{rank:05d}.log"
    except InputError:
        return ""
    return f"; its log: {path}" if path.exists() else ""


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
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args(argv)
    if not options.script:
        parser.error("a script is needed")
    return launch(options, options.script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
