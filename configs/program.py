"""Defines how every program begins and ends: the effect of Ctrl-C on a tool, and of a stop signal
on a run outside of training (in it, reliability/stop.py handles them).

    tool               Ctrl-C: exit code 130 and one word, never a traceback, after `with` and `finally`
                       have cleaned up. A second one: exit at once
    run                Ctrl-C before training: exit code 130; SIGTERM, SIGHUP, SIGUSR1, SIGUSR2: 75, so
                       that a scheduler starts it again. A sentence, as there is nothing to save
    a child of a tool  ignores Ctrl-C, which the tool answers

A tool that is silent for 5 s at a terminal prints for how long it has run, and the function it is
in.

`configs/__init__.py` calls `begin`, and every package of ours imports configs.cpu first of all: so
the handlers work while torch is imported, which takes seconds. `run` is the last line of every
program. Python runs signal handlers on the main thread only, between two of its instructions: a
thread listens on the pipe that Python's C handler writes to, for a program that waits in C++ for
other ranks or trains a tokenizer in Rust.
"""

import atexit
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED = 130
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again to go on
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
HERE = Path(__file__).resolve().parent.parent
TRAIN = HERE / "train.py"
RUNS = ("tools.launch", "tools.mirror")  # programs that stand for a run
RANK = "tools.launch.rank"  # becomes the script that its third word names
SERVANTS = ("data.rendering", "lab.simulate.server")
ECHO = 1.0  # seconds in which Ctrl-C again is the same request: a parent may send it too
SILENT = 4.0  # seconds
LIBRARIES_END = 300.0  # seconds that libraries have to end in: one, but many on a loaded machine
PATIENCE = 2.0  # seconds that C code may keep the main thread from noticing Ctrl-C
# when a process that stood by (tools/launch/standby.py) became a rank, on the monotonic clock: what
# was before are the seconds of another start. 0: it never stood by
stood_by_until = 0.0


class Heard(io.TextIOWrapper):
    """A terminal, and when it was last written to."""

    wrote = time.monotonic()

    def write(self, text: str) -> int:
        Heard.wrote = time.monotonic()
        return super().write(text)


class Program:
    """This process, from its first import to its end. Made by `begin`, on the main thread."""

    def __init__(self, is_run: bool) -> None:
        self.is_run = is_run
        self.signals = STOP_SIGNALS if is_run else (signal.SIGINT,)  # that it answers
        self.process = os.getpid()
        self.running = False  # whether `run` has called main, and it has not returned
        self.ended: int | None = None  # the exit code of main
        self.interrupted = 0.0  # when the main thread noticed Ctrl-C
        self.heard = 0.0  # when the thread did
        self.noticed = threading.Event()
        # signals to a run. Another handler may be set before the thread wakes up
        self.noted: set[int] = set()
        self.pipe = os.pipe()
        self.began = time.monotonic()
        self.is_watched = not is_run and os.isatty(2)

    def listen(self) -> None:
        """Install the handlers of signals, except those that nohup or a parent had ignored."""
        for number in self.signals:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)
        os.set_blocking(self.pipe[1], False)
        signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        if self.is_watched:
            sys.stderr = sys.__stderr__ = heard(sys.stderr)
            sys.stdout = sys.__stdout__ = heard(sys.stdout)
        threading.Thread(target=self._hear, name="program", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # run_train.sh blocks it
        atexit.register(self.rest)  # the first that is registered runs last

    def rest(self) -> None:
        """Ignore signals from here on: the exit code is decided. Python would give each its default,
        and one that comes while C++ libraries end, which takes a second, would replace the code. If
        they hang, an alarm ends the process."""
        if os.getpid() == self.process:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, LIBRARIES_END)
            for number in self.signals:
                signal.signal(number, signal.SIG_IGN)

    def on_signal(self, number: int, frame: object) -> None:
        """Unwind the stack of a tool. All else is done by the thread."""
        if os.getpid() != self.process:  # in a fork, whose parent says what there is to say
            os._exit(128 + number)
        if self.is_run:
            self.noted.add(number)
        if self.is_run or not self.running or self.interrupted:
            return
        self.interrupted = time.monotonic()
        self.noticed.set()
        # a pool still writes to the children that end here, and SIGPIPE would end this process
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        end_children()
        raise KeyboardInterrupt

    def _hear(self) -> None:
        while True:
            if not select.select([self.pipe[0]], [], [], 0.5 if self.is_watched else None)[0]:
                self._say_where()
                continue
            for number in os.read(self.pipe[0], 4096):
                # in this order: it is noted before another handler is set
                if signal.getsignal(number) == self.on_signal or number in self.noted:
                    self._answer(signal.Signals(number))

    def _say_where(self) -> None:
        """Say where the program is, at a terminal that has shown nothing for SILENT seconds."""
        now = time.monotonic()
        if self.ended is None and not self.interrupted and now > Heard.wrote + SILENT:
            seconds = now - self.began
            print(f"at work for {seconds:.0f} s: {where()}", file=sys.stderr, flush=True)

    def _answer(self, number: signal.Signals) -> None:
        if self.is_run:
            self._stop_run(number)
        # after Ctrl-C the main thread says the word, and cleans up although it is not running
        if not self.running and not self.interrupted:
            leave(INTERRUPTED, "interrupted")
        if not self.noticed.is_set():
            if self.noticed.wait(PATIENCE):
                return
            end_children()
            leave(INTERRUPTED, "interrupted")
        # the first may be heard here long after the main thread has noted it
        self.heard = self.heard or time.monotonic()
        if time.monotonic() > self.heard + ECHO:
            leave(INTERRUPTED, "interrupted again: ended at once")

    def _stop_run(self, number: signal.Signals) -> None:
        if self.ended is not None:
            leave(self.ended)
        is_first = os.environ.get("RANK", "0") == "0"
        code, sentence = stopped_early(number)
        leave(code, sentence if is_first else "")


def exit_code_of(returned: int) -> int:
    """Return a process's exit code; of one that a signal has ended 128 + its number, as a shell has
    it, where Python's negative number would be less than success."""
    return returned if returned >= 0 else 128 - returned


def stopped_early(number: signal.Signals) -> tuple[int, str]:
    """Return the exit code and the sentence of a run that a signal stopped before it trained. A
    user who presses Ctrl-C does not want it restarted; a scheduler does."""
    if number == signal.SIGINT:
        return INTERRUPTED, "interrupted before training began"
    return STOPPED, f"stopped by {number.name} before training began: run it again to go on"


_this: Program | None = None


def decided(code: int) -> None:
    """Note how a run has ended: from now on a signal ends the process with that code."""
    if _this:
        _this.ended = code


def open_streams() -> None:
    """Open what the parent has closed (`>&-`), so that no file of a run becomes its console."""
    opened = 0
    while opened <= 2:  # the lowest number that is free
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def begin() -> None:
    """Answer signals if this process was started as a program of ours: `python -m MODULE`, or
    train.py. Not where one imports us."""
    global _this
    name = started_as()
    if name is not None:
        open_streams()
    if name == RANK or name is None:
        return
    if name in SERVANTS or "--work" in sys.orig_argv:  # --work: of data.prepare
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    _this = Program(is_run=name in (*RUNS, str(TRAIN)))
    _this.listen()


def starts_train() -> bool:
    """Return True in `python train.py`, without a launcher, whose ranks all have this name."""
    return started_as() == str(TRAIN) and "RANK" not in os.environ


def started_as() -> str | None:
    """Return the module or the script of ours that this process runs; None if it is another
    program."""
    words = sys.orig_argv
    script = sys.argv[0] if sys.argv else ""
    if (
        script == "-m" and "-m" in words
    ):  # Python looks for the module, and imports its package first
        name, *arguments = words[words.index("-m") + 1 :]
        if name != RANK:
            return name
        script = (arguments + ["", ""])[1]
        return str(TRAIN) if is_train(script) else RANK
    return str(TRAIN) if is_train(script) else None


def is_train(script: str) -> bool:
    return script.endswith(TRAIN.name) and Path(script).resolve() == TRAIN


def run(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Be the program: call main(*arguments) and exit with its code, or with 130 after Ctrl-C."""
    this = _this or Program(is_run=False)  # one that does not listen
    this.running = not this.is_run
    before = sys.unraisablehook

    def unraisable(about: "sys.UnraisableHookArgs") -> None:
        """Exit at Ctrl-C also where Python would drop the exception, such as in `__del__`."""
        if about.exc_type is KeyboardInterrupt:
            leave(INTERRUPTED, "interrupted")
        before(about)

    if _this:
        sys.unraisablehook = unraisable
    try:
        code = main(*arguments)
    except BaseException as error:
        # C++ and the libraries turn it into an error of their own
        if not this.interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        code = INTERRUPTED
        write_stderr("interrupted")
    this.ended = code or 0
    this.running = False
    if _this and code == INTERRUPTED:  # no thread of a library delays it
        atexit._run_exitfuncs()  # temporary folders
        leave(INTERRUPTED)
    sys.exit(code)


def refuses(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a tool's main: wrong input (InputError) is its sentence on stderr, and exit code 2."""

    @wraps(main)
    def refusing(*arguments: Any, **more: Any) -> int:
        from configs.schema import InputError  # here, because it imports pydantic

        try:
            return main(*arguments, **more)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2

    return refusing


def heard(stream: Any) -> Any:
    """Wrap a terminal's stream so that it notes when it is written to; others stay as they are."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    return Heard(stream.detach(), stream.encoding, stream.errors, line_buffering=True)


def where() -> str:
    """Return the innermost function of ours that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name == "<module>":
        return "its packages are imported"
    return f"{Path(frame.f_code.co_filename).relative_to(HERE)}::{frame.f_code.co_name}"


def is_ours(file: str) -> bool:
    return file.startswith(f"{HERE}{os.sep}") and "site-packages" not in file


def end_children() -> None:
    """Kill the processes of multiprocessing, which would be waited for, and the server that forks
    them: it may import torch for seconds before it notices that its parent is gone."""
    if "multiprocessing.process" not in sys.modules:  # importing it takes longer than all the rest
        return
    for child in sys.modules["multiprocessing.process"].active_children():
        child.kill()
    forkserver = sys.modules.get("multiprocessing.forkserver")
    server = forkserver and getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server:
        os.kill(server, signal.SIGKILL)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C. Call it on the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def write_stderr(sentence: str) -> None:
    """Not by print: another thread may hold its lock. A terminal has shown ^C on this line."""
    start = "\n" if os.isatty(2) else ""
    try:
        os.write(2, f"{start}{sentence}\n".encode())
    except OSError:
        pass  # stderr is closed


def leave(code: int, sentence: str = "") -> NoReturn:
    """End this process as it is, from any thread. Python would wait for threads, and where one that
    waits for another node's store returns from C++ at that moment, C++ ends the process with SIGABRT
    instead of the code."""
    if threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
        sys.stderr.flush()
    if sentence:
        write_stderr(sentence)
    os._exit(code)
