"""Where words go: rank 0 to the console, every rank to a file of its own, and known harmless noise nowhere.

Any module may say something with `logging.getLogger("plumbline")`; before `setup` (in tests, in tools) those records go
where Python's logging sends them by default.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from configs.schema import InputError, redact

# Rows: the logger that says it ("py.warnings": Python's warnings), words of it, and why it is dropped.
HARMLESS = (
    ("torch.distributed.tensor._redistribute", "While redistributing from", "once per gradient norm, of a few numbers"),
    ("py.warnings", "DTensor random operators may not have", "training/init.py draws initial values without them"),
)


class _AboveBar(logging.StreamHandler):
    """Lines appear above the progress bar instead of through it. A console that goes away (`| head`) stops nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Without the secrets that an exception's text may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup(folder: str | Path, rank: int) -> logging.Logger:
    """Send log records to the console and to `<folder>/logs/rank-00000.log`; returns the logger to speak with.

    The console shows rank 0, and errors of any rank; records with `extra={"console": False}` go to the file only (what
    the progress bar already shows). The file is appended to, so a resumed run continues its own history. A crash is in
    the file too. Raises InputError if the folder cannot be written.
    """
    path = Path(folder) / "logs" / f"rank-{rank:05d}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"run.folder = {str(folder)!r} cannot be written ({error.filename}: {error.strerror}): choose another one"
        ) from None
    file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    console = _AboveBar(sys.stdout)
    speaker = "" if rank == 0 else f"rank {rank}: "
    console.setFormatter(_Formatter(f"%(asctime)s {speaker}%(message)s", "%Y-%m-%d %H:%M:%S"))
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    console.addFilter(lambda record: getattr(record, "console", True))

    logging.basicConfig(level=logging.WARNING, handlers=[file, console], force=True)
    leave_out_harmless()

    say = logging.getLogger("plumbline")
    say.setLevel(logging.INFO)

    def crashed(*exception: Any) -> None:
        say.critical("crashed", exc_info=exception, extra={"console": False})
        sys.__excepthook__(*exception)

    sys.excepthook = crashed  # so that the file, which the launcher points to, holds the traceback as well as stderr
    return say


def leave_out_harmless() -> None:
    """Of all that torch logs and warns of, the rows of HARMLESS."""
    logging.captureWarnings(True)
    for name, words, _ in HARMLESS:
        logging.getLogger(name).addFilter(lambda record, words=words: words not in record.getMessage())
