"""Route log records: rank 0's to the console, every rank's to one file per rank. Known harmless
noise is dropped.

Any module may log with `logging.getLogger("plumbline")`. Before `setup` (in tests, in tools) these
records go where Python's logging sends them by default.
"""

import contextlib
import logging
import os
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from configs.schema import InputError, redact

# Rows: the logger ("py.warnings": Python's warnings), a part of the message, and why the message is
# dropped.
HARMLESS = (
    (
        "torch.distributed.tensor._redistribute",
        "While redistributing from",
        "once per gradient norm, of a few numbers",
    ),
    (
        "py.warnings",
        "DTensor random operators may not have",
        "training/init.py draws initial values without them",
    ),
)


# ranks from which on there is one file per host: the others only load the file system
MANY_RANKS = 1024


class _ToFile(logging.FileHandler):
    """Writes to a file until that fails (a full disk), and says so once: a log ends no run. Lines
    that could not be written stay in the buffer, and come when there is room. A file that was
    removed begins anew."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(self.baseFilename)
        try:
            if self.stream and not path.exists():
                self._begin_anew(path)
            super().emit(record)
        except OSError:  # the run's folder is gone, too
            self.handleError(record)

    def _begin_anew(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        opened = self._open()
        with contextlib.suppress(OSError):
            self.stream.close()
        self.stream = opened
        logging.getLogger("plumbline").warning(f"{path} was removed: it begins anew here")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed and Path(self.baseFilename).parent.parent.is_dir():
            self.failed = True
            print(
                f"{self.baseFilename} cannot be written ({error.strerror}): the run goes on",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _OnceItFails(logging.Handler):
    """Keeps the last records in memory. With the first error it writes them to the file at `path`,
    and then all others."""

    RECORDS = 200

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.last: deque[logging.LogRecord] = deque(maxlen=self.RECORDS)
        # it is made when something is written
        self.file = _ToFile(path, encoding="utf-8", delay=True)

    def setFormatter(self, formatter: logging.Formatter) -> None:
        super().setFormatter(formatter)
        self.file.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self.last.append(record)
        if record.levelno >= logging.ERROR or self.file.stream:
            while self.last:
                self.file.emit(self.last.popleft())

    def close(self) -> None:
        self.file.close()
        super().close()


class _AboveBar(logging.StreamHandler):
    """Writes lines above the progress bar instead of through it. A console that goes away (`|
    head`, a full disk behind `>`) stops nothing, and is said once."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except OSError as error:
            self._leave(error)
        except Exception:
            self.handleError(record)

    def _leave(self, error: OSError) -> None:
        """Let what is written from now on, also when Python ends, go nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)
        with contextlib.suppress(OSError):
            print(
                f"the console cannot be written ({error.strerror}): the run goes on, and its lines are "
                "in its logs",
                file=sys.stderr,
                flush=True,
            )


class _Formatter(logging.Formatter):
    """Leaves out the secrets that an exception's text may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Terminal(_Formatter):
    """Breaks lines that are no step's after WIDTH columns, and colours warnings and errors."""

    WIDTH = 100
    COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}

    def __init__(self, *args: Any, colours: bool) -> None:
        super().__init__(*args)
        self.colours = colours

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not record.getMessage().startswith("step "):
            text = "\n".join(map(self._broken, text.splitlines()))
        colour = self.COLOURS.get(record.levelno) if self.colours else None
        return f"{colour}{text}\033[0m" if colour else text

    def _broken(self, line: str) -> str:
        """Leave words whole: paths and commands are copied."""
        return textwrap.fill(
            line,
            self.WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )


def _for_console(stream: TextIO, text: str, times: str) -> logging.Formatter:
    """Return the formatter of a terminal, or of what a program reads. https://no-color.org"""
    if not stream.isatty():
        return _Formatter(text, times)
    has_colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return _Terminal(text, times, colours=has_colours)


def writes_log(ranks: int, local_rank: int) -> bool:
    """Return True if a rank writes all its records to a file. ranks: of the whole run."""
    return local_rank == 0 or ranks < MANY_RANKS


def setup(
    folder: str | Path, rank: int, writes: bool = True, warnings: Sequence[str] = ()
) -> logging.Logger:
    """Send log records to the console and to `<folder>/logs/rank-00000.log`; returns the logger to
    use.

    The console shows the records of rank 0, and errors of any rank. Records with `extra={"console":
    False}` go to the file only. The file is appended to, so a
    resumed run continues its own history. A crash is in the file too. If this rank `writes` nothing
    else, the file begins with the last records before its first error. `warnings` come first. Raises InputError if the
    folder cannot be written.
    """
    path = Path(folder) / "logs" / f"rank-{rank:05d}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _ToFile(path, encoding="utf-8") if writes else _OnceItFails(path)
    except OSError as error:
        raise InputError(
            f"run.folder = {str(folder)!r} cannot be written ({error.filename}: "
            f"{error.strerror}): choose another"
        ) from None
    file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    console = _AboveBar(sys.stdout)
    speaker = "" if rank == 0 else f"rank {rank}: "
    form = f"%(asctime)s {speaker}%(message)s"
    console.setFormatter(_for_console(sys.stdout, form, "%Y-%m-%d %H:%M:%S"))
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    console.addFilter(lambda record: getattr(record, "console", True))

    logging.basicConfig(level=logging.WARNING, handlers=[file, console], force=True)
    leave_out_harmless()

    logger = logging.getLogger("plumbline")
    logger.setLevel(logging.INFO)

    def crashed(*exception: Any) -> None:
        logger.critical("crashed", exc_info=exception, extra={"console": False})
        sys.__excepthook__(*exception)

    for sentence in warnings:
        logger.warning(sentence)
    # the launcher points to the file, so it holds the traceback as well as stderr
    sys.excepthook = crashed
    threading.excepthook = _thread_crashed
    return logger


def _thread_crashed(crash: threading.ExceptHookArgs) -> None:
    """Print a thread's exception as Python does, except that of TensorBoard's writer thread, which
    the metrics report (training/metrics.py)."""
    is_tensorboard = "event_file_writer" in type(crash.thread).__module__
    if not (is_tensorboard and isinstance(crash.exc_value, OSError)):
        threading.__excepthook__(crash)


def leave_out_harmless() -> None:
    """Drop the log records and warnings that match a row of HARMLESS."""
    logging.captureWarnings(True)
    for name, part, _ in HARMLESS:
        logging.getLogger(name).addFilter(lambda record, part=part: part not in record.getMessage())
