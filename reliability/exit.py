"""Defines the exit codes of train.py, and ends a rank that cannot go on with an error message."""

import contextlib
import errno
import sys

from configs.done import NothingToDo
from configs.program import STOPPED as STOPPED
from configs.schema import InputError
from parallelisms import mesh as meshes

DONE = 0
FAILED = 1
WRONG_INPUT = 2
CRASH_LOOP = 76
# no space left, over the quota, file too large for the file system, file system is read-only
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class RunFailed(InputError):
    """Failure of a run that had trained. Exit code 2 would say that nothing was started, and a
    launcher does not restart after it."""


def refuse(error: Exception) -> int:
    """End this rank with a sentence instead of a traceback; an error that all ranks raise is said by
    the first rank of each node. Returns the exit code. The other ranks may still compute, so nothing
    waits for them.

    Raises `error` if it is an OSError of a different kind than a disk that cannot be written: only
    its traceback says where it came from.
    """
    if isinstance(error, NothingToDo):
        if meshes.world().rank == 0:
            print(error)
        meshes.abort_mesh()
        return DONE
    sentence = str(error)
    if isinstance(error, OSError):
        if error.errno not in CANNOT_WRITE:
            raise error
        sentence = cannot_write(error)
    _say(sentence, is_common(error))
    meshes.abort_mesh()
    is_refusal = isinstance(error, InputError) and not isinstance(error, RunFailed)
    return WRONG_INPUT if is_refusal else FAILED


def cannot_write(error: OSError) -> str:
    """Return the sentence for a disk that takes nothing more."""
    place = error.filename or "to the run folder"
    return (
        f"cannot write {place}: {error.strerror}. What was saved before is untouched; make room and "
        "run the same command again"
    )


def is_common(error: BaseException | None) -> bool:
    """Return True for an error that all ranks raise (checkpoint/agreement.py), or one made of it."""
    while error is not None:
        if getattr(error, "is_common", False):
            return True
        error = error.__cause__
    return False


def _say(sentence: str, of_all: bool) -> None:
    speaker = ""
    with contextlib.suppress(InputError):  # which may be the error
        here = meshes.world()
        if of_all and here.local_rank != 0:
            return
        speaker = f"rank {here.rank}: " if here.size > 1 and not of_all else ""
    print(speaker + sentence, file=sys.stderr, flush=True)
