"""Processes forked by one that never computes: Python's fork server, which has imported what the
tests have.

The first backward of a process starts a thread per GPU. fork does not carry threads along, so
PyTorch refuses a backward in the child: "Unable to handle autograd's threading in combination with
fork-based multiprocessing". The CUDA build does so on a machine without a GPU too, once a
FakeTensorMode (DTensor, torch.compile, tools/plan) has pretended that there is one. The CPU build
never does. Here it does: `Engine` refuses as the CUDA build would, wherever a child of a process
that has run a backward runs one itself.

What runs in the server's children is found by name, as pickle does: a function of a module, or a
`functools.partial` of one. They have the caller's environment and working folder, and nothing that
a test has patched.
"""

import gc
import importlib
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

# imported by the first call of FSDP or checkpointing: without this line by every rank, in 0.8 s
import torch._dynamo
from torch.autograd.variable import Variable

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = "PLUMBLINE_TESTS_PRELOAD"  # what the server imports before its first fork


class Engine(type(Variable._execution_engine)):
    """Autograd's engine, which refuses where that of the CUDA build does."""

    has_run = False  # in this process
    is_cut_off = False  # it had run in the process that forked this one

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if Engine.is_cut_off:
            raise RuntimeError(
                "a backward in a process that was forked by one that had run a backward, which a "
                "machine with a GPU refuses: "
                "fork by tests/fork_server.py, or before the first backward"
            )
        Engine.has_run = True
        return super().run_backward(*args, **kwargs)


def _after_fork() -> None:
    Engine.is_cut_off = Engine.has_run or Engine.is_cut_off
    Engine.has_run = False


Variable._execution_engine = Engine()
os.register_at_fork(after_in_child=_after_fork)


def start(fn: Callable, *args: Any) -> ForkServerProcess:
    """Run fn(*args) in a process that the server forks. The caller must end it."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    # Not a daemon: it may start workers.
    process = context.Process(target=_enter, args=(theirs, dict(os.environ), os.getcwd(), fn, args))
    try:
        process.start()
        ours.send("begin")
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise AssertionError(
            f"{fn} with {args} is not sent to another process: {error} (see tests/fork_server.py)"
        ) from error
    finally:
        theirs.close()
        ours.close()
    return process


def end(process: ForkServerProcess) -> None:
    """Kill it if it still runs."""
    process.kill()
    process.join()
    process.close()


def call(fn: Callable, *args: Any) -> Any:
    """Return the result of fn(*args), computed in a new process on one thread. Raises what it
    raises."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        process = start(_answer, answer, fn, args)
        try:
            process.join()
            assert answer.exists(), f"{fn} ended with exit code {process.exitcode}"
        finally:
            end(process)
        value, error = pickle.loads(answer.read_bytes())
    if error is not None:
        raise error
    return value


def _answer(path: Path, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    value = error = None
    try:
        value = fn(*args)
    except BaseException as exception:
        traceback.print_exc()
        error = exception
    path.with_suffix(".tmp").write_bytes(pickle.dumps((value, error)))
    path.with_suffix(".tmp").rename(path)


def _enter(
    asked: Connection, environment: dict[str, str], folder: str, fn: Callable, args: tuple
) -> None:
    try:
        asked.recv()
    except (
        EOFError
    ):  # a test's cap came before its process knew this one, so it would never be ended
        return
    asked.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    assert not _unfit, _unfit
    fn(*args)


# The server ---------------------------------------------------------------------------------------


def start_server() -> None:
    """Start the server unless it runs. It imports what of this repository is imported here.
    tests/conftest.py calls this before the first test, so that tools which use Python's fork server
    find this one."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.fork_server"])
    ours = [name for name, module in list(sys.modules.items()) if _is_ours(name, module)]
    before = {
        name: os.environ.get(name)
        for name in (PRELOAD, "PYTHONPATH", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    }
    os.environ[PRELOAD] = json.dumps({"path": sys.path, "modules": ours})
    # numpy would start threads as it is imported
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before["PYTHONPATH"]]))
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _is_ours(name: str, module: Any) -> bool:
    """Asked of each of some thousand modules whenever a rank starts, so it compares strings: with
    paths this was most of what a start costs."""
    path = getattr(module, "__file__", None) or ""
    is_here = path.startswith(f"{ROOT}{os.sep}") and path.endswith(".py")
    return is_here and f"{os.sep}.venv{os.sep}" not in path and name not in ("__main__", "conftest")


def _what_is_unfit() -> str:
    """Why this process must not fork ranks; empty if it may."""
    if Engine.has_run:
        return (
            "the server that forks ranks has run a backward: a module of the tests computes "
            "while it is imported"
        )
    if _threads() > _threads_when_ready:
        return (
            f"the server that forks ranks has {_threads()} threads, and had "
            f"{_threads_when_ready} when it had imported the tests"
        )
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1


def _before_fork() -> None:
    global _unfit
    _unfit = _what_is_unfit()


_unfit = ""
_threads_when_ready = 1
if PRELOAD in os.environ:
    wanted = json.loads(os.environ.pop(PRELOAD))
    sys.path[:] = wanted["path"]
    for wanted_module in wanted["modules"]:
        importlib.import_module(wanted_module)
    # What was imported lives as long as the process: a rank's garbage collector need not look at it,
    # which would cost 0.25 s of processor time and a copy of every page.
    gc.freeze()
    _threads_when_ready = _threads()  # pyarrow starts one
    os.register_at_fork(before=_before_fork)
