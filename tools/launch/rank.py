"""Start one rank's script under the launcher:  python -m tools.launch.rank LAUNCHER_PID [-m] SCRIPT [ARGUMENT ...]

Sets a parent-death signal, so that the rank dies with the launcher. If an exception ends the
script, leaves the traceback and the time for the launcher, which shows the traceback of the first
rank to fail at the end. A process that stands by (tools/launch/standby.py) waits first.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from configs import program

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # prctl(2)
STANDBY = "PLUMBLINE_STANDBY"  # in the environment of a process that stands by: its pipe
# what takes long of all that train.py imports, and is not of this repository
SLOW = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.planner_helpers",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "pydantic",
    "tiktoken",
)


def main(launcher: int, script: str) -> None:
    end_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    unblock_interrupt()
    if STANDBY in os.environ:
        stand_by(int(os.environ[STANDBY]))
    if script == "-m":  # a module, which may import what is in this folder
        del sys.argv[0]
        script = sys.argv[0] = _file_of(sys.argv[0])
    else:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        _leave(_from_script_on(error, script), getattr(error, "failed_at", time.time()))
        raise


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when the process that started it ends."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def unblock_interrupt() -> None:
    """Unblock SIGINT, which the launcher blocks because Python answers Ctrl-C by a traceback, and by
    exit code 1, while it starts. One that came meanwhile ends the process without a word, as other
    signals do; that of train.py has a handler by now (configs/program.py)."""
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def stand_by(pipe: int) -> None:
    """Import what takes long, and wait for the environment of a rank."""
    for module in SLOW:
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    with open(pipe, encoding="utf-8") as word:
        environment = word.read()
    if not environment:
        sys.exit("the launcher is gone")
    os.environ.clear()
    os.environ.update(json.loads(environment))
    program.stood_by_until = time.monotonic()


def _file_of(module: str) -> str:
    """Return the file that `python -m` would run: of a package its __main__."""
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec.origin


def _leave(traceback_text: str, failed_at: float) -> None:
    """Write the exception's record in the file and format of torchrun's engine, which reads whole
    seconds only; `time` is our addition. failed_at: when the exception was raised
    (reliability/health.py::failure_time), in seconds since 1970."""
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    extra = {"timestamp": int(failed_at), "py_callstack": traceback_text}
    report = {"message": traceback_text, "time": failed_at, "extraInfo": extra}
    file.with_suffix(".tmp").write_text(json.dumps({"message": report}), encoding="utf-8")
    file.with_suffix(".tmp").rename(file)  # never half a file, which the engine would not survive


def _from_script_on(error: Exception, script: str) -> str:
    """Return the traceback as Python prints it for a script that was started directly."""
    frame = error.__traceback__
    while frame.tb_next and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frame)))


if __name__ == "__main__":
    pid = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    main(pid, sys.argv[0])
