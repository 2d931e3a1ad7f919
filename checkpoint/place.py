"""The storage of a run's checkpoints: a folder, or a prefix of an object store
(`stores/bucket.py`).

Both have the same methods, in the order of a save: `draft` names the place where the ranks `write`
their files, and `publish` makes it a checkpoint. What a crash leaves in between is no checkpoint,
and `take` of the next start removes it.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from checkpoint import storage, verify
from checkpoint.agreement import on_rank_0
from checkpoint.ended import refuse_done
from checkpoint.lease import Lease, Lost, removed
from checkpoint.retention import Retention
from checkpoint.storage import OneByOne, SavePlan, Staged
from checkpoint.stores.bucket import Bucket
from configs.rounds import LEASE, ROLE
from configs.schema import Checkpoint, Config, InputError
from reliability import disk
from reliability.objects import Unreachable, location

TEMPORARY = re.compile(r"\.(tmp|del)-[0-9a-f]{8}-[0-9]+-step-[0-9]{8,}(\.[0-9]+)?")
PATIENCE = 15 * 60  # seconds that a start waits for the removal of what an earlier run left
logger = logging.getLogger("plumbline")


def open_place(cfg: Checkpoint, folder: Path) -> "CheckpointFolder | Bucket":
    """Return the place that `checkpoint.store` names, or else this folder. Raises InputError."""
    where = location(cfg.store) if cfg.store else Path(folder)
    if isinstance(where, Path):
        return CheckpointFolder(where, cfg)
    return Bucket(where, cfg)


@contextlib.contextmanager
def claimed(cfg: Config) -> "Iterator[CheckpointFolder | Bucket]":
    """Claim the run's folder for this start alone while the context lasts. Called by all ranks
    before anything is written there: a start that is refused, or has nothing to do, leaves the
    folder as it was. Raises InputError on every rank."""
    place = open_place(cfg.checkpoint, Path(cfg.run.folder) / "checkpoints")
    try:
        on_rank_0(None, _claim, place, cfg)  # fails if another rank is lost, and it is claimed
        yield place
    except Unreachable:  # a store that does not answer would not hear of it either
        raise
    except Exception as error:
        # a process that lives on must not keep the folder from others (checkpoint/rounds.py)
        if isinstance(error, InputError) or ROLE in os.environ:
            place.release()
        raise
    place.release()


def _claim(place: "CheckpointFolder | Bucket", cfg: Config) -> None:
    try:
        place.claim()
    except OSError as error:
        raise InputError(
            f"run.folder = {cfg.run.folder!r} cannot be written ({error.filename or place.path}: "
            f"{error.strerror}): choose another"
        ) from None
    try:
        refuse_done(cfg, place.path, place.names())
    except InputError:
        place.release()
        raise


class CheckpointFolder:
    """A folder of a run's checkpoints. All ranks have one; rank 0 alone calls the methods after
    `write`."""

    def __init__(self, path: Path, cfg: Checkpoint):
        self.path, self.cfg = path, cfg
        self.lease: Lease | None = None
        self.retention: Retention | None = None

    def draft(self, run: str, number: int, name: str) -> Path:
        """Return the temporary folder of a save."""
        return self.path / f".tmp-{run}-{number}-{name}"

    def write(self, draft: Path, plan: SavePlan, parts: OneByOne | Staged) -> list:
        """Write this rank's file, and sync it. Returns its row in the manifest's `files`. Makes a
        folder of checkpoints again that was removed; raises Lost if the run's folder was."""
        try:
            # another rank may be the first to make the folder
            if self.lease and not self.lease.path.exists():
                logger.warning(f"{self.path} was removed: it is made again, for a new checkpoint")
            self.path.mkdir(exist_ok=True)
            draft.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise Lost(removed(self.path)) from None
        return storage.write(draft, plan, parts)

    def claim(self) -> None:
        """Become the only run that writes here, until `release`."""
        self.path.mkdir(parents=True, exist_ok=True)
        for parent in (self.path.parent, self.path.parent.parent):
            # a folder whose name a power cut takes away is lost with all that was synced in it
            disk.sync(parent)
        self.lease = Lease(self.path / ".lease", of_start=os.environ.get(LEASE, ""))

    def release(self) -> None:
        """Release the folder, if it is ours."""
        if self.retention:
            self.retention.close()
        if self.lease:
            self.lease.release()

    def take(self) -> str:
        """Claim the folder unless that is done, and let a thread remove what an earlier run left
        unfinished. Returns the name of this run."""
        if not self.lease:
            self.claim()
        self.retention = Retention(self.path, self.lease, self.cfg)
        ours = {".lease", ".peers", *verify.published(self.path)}
        leftovers = []
        for path in self.path.iterdir():
            if TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                leftovers.append(path)
            elif path.name not in ours:
                logger.warning(
                    f"{verify.shown(path)} is not a checkpoint of this run and is left alone"
                )
        self.retention.remove_leftovers(leftovers)
        return self.lease.id

    def names(self) -> list[str]:
        """List the names of the checkpoints, newest first."""
        return verify.published(self.path)

    def check_room(self, size: int, count: int) -> None:
        """Raise NoRoom if the disk has no room for `count` more checkpoints of `size` bytes,
        which is how many this run adds before it removes one."""
        if shutil.disk_usage(self.path).free < size * count:
            # what an earlier run left may be what fills the disk
            self.retention.wait(PATIENCE)
        free = shutil.disk_usage(self.path).free
        if free >= size * count:
            return
        have = f"{self.path} has {free / 1e6:,.1f} MB free"
        if free < size:
            raise disk.NoRoom(
                f"{have}, one checkpoint of this run takes {size / 1e6:,.1f} MB: make room"
            )
        raise disk.NoRoom(
            f"{have}, and this run adds {count} checkpoints of {size / 1e6:,.1f} MB before it "
            f"removes one (checkpoint.keep_last = {self.cfg.keep_last}): make room for "
            f"{size * count / 1e6:,.1f} MB, or lower checkpoint.keep_last"
        )

    def publish(self, draft: Path, name: str, manifest: dict) -> None:
        """Make the folder a checkpoint. Raises Lost if another run has taken over."""
        verify.write_manifest(draft, manifest)
        self.lease.check()
        draft.rename(self.path / name)
        try:
            disk.sync(self.path)
        except OSError as error:
            logger.warning(f"{self.path / name} is published, but a power cut may lose it: {error}")

    def found(self) -> list[str]:
        """Return no names: a rename on a disk either succeeds or raises, unlike a store's request
        without an answer."""
        return []

    def discard(self, draft: Path) -> None:
        """Let a thread remove what a failed save left: it may be what fills the disk."""
        self.retention.remove_leftovers([draft])
