"""Remove old checkpoints, and what an unfinished save left behind, in a background thread.

Removing files can take minutes on a busy file system, and training gains nothing by waiting for it.
So rank 0 only queues the work for this thread, and goes on. The thread is a daemon: a process that
ends does not wait for it either. What it leaves has a temporary name, and the next start removes
it.
"""

import functools
import itertools
import logging
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from checkpoint import verify
from checkpoint.lease import Lease
from configs.schema import Checkpoint

GRACE = 1.0  # seconds that the end of a run waits for it
logger = logging.getLogger("plumbline")


class Retention:
    """The thread, on rank 0 only. Its methods return at once, except `wait` and `close`.

    `gone` holds the names that `remove_expired` was given and that are no longer in the folder.
    """

    def __init__(self, folder: Path, lease: Lease, cfg: Checkpoint):
        self.folder, self.lease, self.cfg = folder, lease, cfg
        self.gone: set[str] = set()
        self.closing = False
        self.tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._work, name="retention", daemon=True).start()

    def remove_leftovers(self, paths: list[Path]) -> None:
        """Remove these folders, which an earlier run left unfinished."""
        for path in paths:
            self.tasks.put(functools.partial(self.remove_leftover, path))

    def remove_expired(self, ancestors: list[str], number: int) -> None:
        """Remove the checkpoints among `ancestors` (oldest first, the newest included) that the
        options do not keep.

        number: of the save that asks. It makes the temporary names differ.
        """
        self.tasks.put(functools.partial(self._remove_expired, list(ancestors), number))

    def wait(self, seconds: float) -> None:
        """Wait until all queued work is done, but no longer than `seconds`."""
        with self.tasks.all_tasks_done:
            self.tasks.all_tasks_done.wait_for(lambda: not self.tasks.unfinished_tasks, seconds)

    def close(self) -> None:
        """Wait for GRACE seconds, then begin no further removal. To be called before the lease is
        released."""
        self.wait(GRACE)
        self.closing = True

    def _work(self) -> None:
        while True:
            task = self.tasks.get()
            try:
                task()
            except Exception as error:  # any failure here costs disk space and nothing else
                logger.warning(f"old checkpoints could not be removed: {error}")
            self.tasks.task_done()

    def _remove_expired(self, ancestors: list[str], number: int) -> None:
        """Rename each checkpoint before removing it, so that none is ever partly there."""
        present = self.present(ancestors)
        self.gone.update(name for name in ancestors if name not in present)
        ancestors = [name for name in ancestors if name in present]
        newest_first = (name for name in reversed(ancestors) if verify.is_whole(self.folder / name))
        whole = list(itertools.islice(newest_first, self.cfg.keep_last))
        whole.reverse()
        for name in expired(ancestors, whole, self.cfg.keep_last, self.cfg.keep_every):
            if self.closing:
                return
            self.lease.check()
            trash = self.hide(name, number)
            self.gone.add(name)
            self.erase(trash)

    # What a store does differently (stores/bucket.py::StoreRetention)

    def present(self, names: list[str]) -> list[str]:
        """Return those of these checkpoints, and perhaps others, that are there."""
        return verify.published(self.folder)

    def hide(self, name: str, number: int) -> Path:
        """Make a checkpoint none, in one step. Returns where its files are now."""
        trash = self.folder / f".del-{self.lease.id}-{number}-{name}"
        (self.folder / name).rename(trash)
        return trash

    def erase(self, path: Path) -> None:
        shutil.rmtree(path)

    def remove_leftover(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def expired(ancestors: list[str], whole: list[str], keep_last: int, keep_every: int) -> list[str]:
    """Return the names of the checkpoints to remove: a pure function of names.

    ancestors: the checkpoints that the run descends from, oldest first, its newest included. No
    other checkpoint is ever removed, neither what others put into the folder nor a future that was
    abandoned. whole: the ancestors whose files are complete (the newest keep_last are enough). Only
    these count as kept, so the newest whole one always stays. keep_last = 0 keeps all; a step that
    keep_every divides stays.
    """
    if keep_last == 0 or len(whole) < keep_last:
        return []
    oldest_kept = ancestors.index(whole[-keep_last])
    names = []
    for name in ancestors[:oldest_kept]:
        _, step = verify.parse_name(name)
        stays = keep_every and step % keep_every == 0
        if not stays:
            names.append(name)
    return names
