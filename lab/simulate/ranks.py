"""Runs functions on ranks that have a simulated GPU each.

    with Simulator() as simulator:
        outcome = simulator.run(2, function, *arguments, folder=path)

A process that has loaded PyTorch above the stand-ins for CUDA and NCCL, and never computes, forks
the ranks of each run: a rank starts in a moment, and a process that has used CUDA is never forked.
"""

import faulthandler
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lab.simulate import build

ROOT = Path(__file__).resolve().parent.parent.parent
AFTER_A_FINDING = 3  # seconds that the other ranks have to say what they wait for


@dataclass
class Outcome:
    """Outcome of a run's ranks. Everything is by rank except the findings."""

    codes: list[int | None]  # exit code, minus a signal, or None for a rank that had to be killed
    results: list[Any]  # what the function returned
    errors: list[str]  # the traceback of what it raised, or ""
    records: list[dict]  # host-device syncs and collectives, as `_record` makes them
    logs: list[Path]  # what the rank printed
    findings: list[str] = field(default_factory=list)  # of all ranks, each once

    @property
    def whole(self) -> bool:
        return all(code == 0 for code in self.codes)

    def explain(self) -> str:
        """Explain to the user why it is not whole."""
        lines = list(self.findings)
        for rank, code in enumerate(self.codes):
            if code == 0:
                continue
            how = "did not end in time" if code is None else f"ended with {code}"
            tail = self.errors[rank] or self.logs[rank].read_text(errors="replace")[-1500:]
            lines.append(f"rank {rank} {how}:\n{tail}")
        return "\n".join(lines)


@dataclass
class Request:
    gpus: int  # 0: one rank on the CPU
    call: bytes  # (function, arguments), pickled
    folder: str
    seconds: float
    environment: dict[str, str]
    sanitize: bool


def _send(stream: BinaryIO, thing: Any) -> None:
    pickle.dump(thing, stream)
    stream.flush()


class Simulator:
    """Starts the process that forks the ranks, at the first run. Raises build.CannotSimulate where
    it cannot."""

    def __init__(self) -> None:
        self.server: subprocess.Popen | None = None

    def __enter__(self) -> "Simulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen:
        if self.server is None or self.server.poll() is not None:
            library = build.library()
            preload = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
            environment = os.environ | {
                "LD_PRELOAD": preload,
                "OMP_NUM_THREADS": "1",
                "PLUMBLINE_SIMULATED_GPUS": "0",
            }
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            command = [sys.executable, "-m", "lab.simulate.server"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.server = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, **pipes
            )
        return self.server

    def run(
        self,
        gpus: int,
        function: Callable,
        *arguments: Any,
        folder: Path,
        seconds: float = 120,
        environment: dict[str, str] | None = None,
        sanitize: bool = False,
    ) -> Outcome:
        """function(*arguments) on `gpus` ranks of one host, each with its own GPU; with 0, on one
        rank without any.

        The function belongs to a module that can be imported. folder: for what the ranks leave,
        made if it is missing. seconds: after which the ranks are killed. sanitize: PyTorch's CUDA
        sanitizer looks for races between streams.
        """
        folder.mkdir(parents=True, exist_ok=True)
        server = self._started()
        try:
            call = pickle.dumps((function, arguments))
            _send(
                server.stdin, Request(gpus, call, str(folder), seconds, environment or {}, sanitize)
            )
            return pickle.load(server.stdout)
        except BaseException:  # also a test's time limit: the next run would read the answer
            self.close()
            raise

    def close(self) -> None:
        if self.server is None:
            return
        if self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)  # with its ranks
        self.server.wait()
        self.server.stdin.close()
        self.server.stdout.close()
        self.server = None


# ----------------------------------------------------------------------- in the process that forks


def answer(request: Request) -> Outcome:
    """Fork the ranks, wait for them, and collect what they left."""
    folder = Path(request.folder)
    size = max(request.gpus, 1)
    memory = Path("/dev/shm")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(
        dir=memory if memory.is_dir() else None, prefix="plumbline-"
    ) as shared:
        settings = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PLUMBLINE_SIMULATED_GPUS": str(request.gpus),
            "PLUMBLINE_SIMULATED_FOLDER": str(folder),
            "PLUMBLINE_SIMULATED_SHARED": shared,
        }
        children = {}
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, request, settings | own | request.environment)
            children[pid] = rank
        codes = _wait(children, folder, request.seconds)
    return _collect(folder, [codes[rank] for rank in range(size)])


def _become_rank(rank: int, request: Request, environment: dict[str, str]) -> None:
    """Never returns."""
    os.environ.update(environment)
    folder = Path(request.folder)
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    code = 0
    result = None
    error = ""
    try:
        function, arguments = pickle.loads(request.call)
        if request.sanitize:
            torch.cuda.init()
            from lab.simulate import sanitizer

            sanitizer.enable()
        result = function(*arguments)
    except BaseException:
        code = 1
        error = traceback.format_exc()
        print(error, file=sys.stderr)
    sys.stdout.flush()
    (folder / f"result-{rank}").write_bytes(pickle.dumps((result, error, _record())))
    os._exit(code)


def _record() -> dict:
    """Host-device syncs, copies from pageable memory, and collectives of this rank."""
    from lab.simulate import kernels

    device = kernels.SimulatedDevice()
    device.library.simulated_finish()
    lines = device.library.simulated_collectives().decode().splitlines()
    record = kernels.RECORD
    return {
        "waits": [(*key, times) for key, times in record.waits.items()],
        "late": [(*key, times) for key, times in record.late.items()],
        "operators": dict(record.operators),
        "collectives": [json.loads(line) for line in lines],
    }


def _wait(children: dict[int, int], folder: Path, seconds: float) -> dict[int, int | None]:
    """Return the exit code of each rank. When one cannot continue, the others have a moment to
    report it too."""
    deadline = time.monotonic() + seconds
    running = dict(children)
    codes: dict[int, int | None] = {}
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            continue
        if any(folder.glob("stuck-*")):
            deadline = min(deadline, time.monotonic() + AFTER_A_FINDING)
        time.sleep(0.01)
    for pid, rank in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = None
    return codes


def _collect(folder: Path, codes: list[int | None]) -> Outcome:
    size = len(codes)
    logs = [folder / f"log-{rank}" for rank in range(size)]
    outcome = Outcome(codes, [None] * size, [""] * size, [{}] * size, logs)
    for rank in range(size):
        path = folder / f"result-{rank}"
        if path.exists():
            outcome.results[rank], outcome.errors[rank], outcome.records[rank] = pickle.loads(
                path.read_bytes()
            )
    for path in sorted(folder.glob("findings-*")):
        for line in path.read_text().splitlines():
            if line not in outcome.findings:
                outcome.findings.append(line)
    return outcome
