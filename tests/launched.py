"""Fork `python -m tools.launch`, without the 5 s of processor time that each of its processes takes
to import torch: the server of tests/fork_server.py forks the launcher, and its ranks are forked
from a copy of it that has no thread.

They are separate processes like real ones, each rank in its own session: they are killed, stopped
and waited for in the same way. Differences of separately started programs are tested elsewhere:
with ranks that are started in tests/test_scripts.py and tests/test_launchers.py.
"""

import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from configs.program import leave
from tests import fork_server
from tests.programs import environment
from tests.ranks import WORKERS
from tools.launch import launcher as launch
from tools.launch import rank as ranks_of
from tools.launch import standby
from tools.launch.__main__ import main

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def nothing_first() -> None:
    pass


class Launcher:
    """A launcher with these arguments, which is polled and waited for as subprocess.Popen is.

    `settings` are for its environment. What it and its ranks write to the error stream is in the
    file `said`. `prepare` is called in it first, which has no thread yet.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        said: Path,
        prepare: Callable[[], None] = nothing_first,
        **settings: str,
    ) -> None:
        said.parent.mkdir(exist_ok=True)
        said.touch()
        self.said = said
        here = environment(**{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | settings)
        words = [str(argument) for argument in arguments]
        self.process = fork_server.start(_become_launcher, prepare, words, said, here)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def kill(self) -> None:
        """Its ranks die with it."""
        self.process.kill()
        self.process.join()


def ended(launchers: Sequence[Launcher], seconds: float = 150) -> tuple[list[int], str]:
    """The exit codes, and what was said. `seconds`: until they are killed, on a machine of its
    own."""
    deadline = time.monotonic() + seconds * WORKERS
    codes, said = [], []
    for launcher in launchers:
        if launcher.wait(max(0.0, deadline - time.monotonic())) is None:
            said.append("--- had to be killed ---")
            launcher.kill()
        codes.append(launcher.returncode)
        said.append(launcher.said.read_text())
    return codes, "\n".join(said)


def _become_launcher(
    prepare: Callable[[], None], words: list[str], said: Path, settings: dict[str, str]
) -> None:
    _become(settings)
    errors = os.open(said, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream, file in enumerate((nothing, nothing, errors)):
        os.dup2(file, stream)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    prepare()
    nursery = Nursery()
    standby.AFTER = math.inf  # a forked rank imports nothing
    SubprocessHandler._popen = lambda handler, args, env: Forked(nursery.fork(args, env))
    code = main(words)
    nursery.close()
    leave(code)


class Nursery:
    """Forks ranks that become children of the process that makes it, which has threads by then.

    Such a process must not fork them itself: a lock that one of its threads holds at that moment
    (the dynamic linker's, the resolver's) is never released in the child.
    """

    def __init__(self) -> None:
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1):
            raise OSError("prctl(PR_SET_CHILD_SUBREAPER)")
        self.asked, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.asked.close()
            ranks_of.end_with_parent(signal.SIGKILL)
            os._exit(_fork_on_request(theirs, os.getppid()))
        theirs.close()

    def fork(self, args: tuple[str, ...], settings: dict[str, str]) -> int:
        """The process id of a rank."""
        self.asked.send((args, settings))
        return self.asked.recv()

    def close(self) -> None:
        self.asked.close()
        os.waitpid(self.pid, 0)


def _fork_on_request(asked: Connection, launcher: int) -> int:
    """Fork each rank twice: the process between ends at once, so the launcher adopts it."""
    while True:
        try:
            args, settings = asked.recv()
        except EOFError:
            return 0
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank:
                asked.send(rank)
                os._exit(0)
            asked.close()
            while os.getppid() != launcher:
                time.sleep(0.001)
            os._exit(_rank(args, settings))
        os.waitpid(between, 0)


class Forked:
    """Forked rank with the part of subprocess.Popen that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        self.pid = pid
        while os.getpgid(self.pid) != self.pid:  # the launcher signals the group
            time.sleep(0.001)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode


def _rank(args: tuple[str, ...], settings: dict[str, str]) -> int:
    """Run tools/launch/rank.py as a program and return its exit code. args: as agents start it."""
    os.setsid()
    assert not fork_server._unfit, fork_server._unfit
    for number in (*launch.PASSED_ON, signal.SIGALRM):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable(logging.NOTSET)  # which the launcher has raised
    _become(settings)
    module = args.index("tools.launch.rank")
    launcher, *sys.argv = args[module + 1 :]
    try:
        ranks_of.main(int(launcher), sys.argv[0])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
        return 1
    return code or 0


def _become(settings: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(settings)
    torch.set_num_threads(1)
