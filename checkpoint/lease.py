"""Keep a folder to one run: two runs that save into the same folder would mix their weights, and
one of them is a mistake.

The lease is a lock on the file `.lease`. The kernel releases it when the process that holds it
ends, even if it is killed, so on one host there is no stale lease. A network file system may keep
locks to one host, or have none. So the owner also increases a count in the file every BEAT seconds,
and a run that finds a lease of another host first watches for PATIENCE seconds whether its count
goes up. A run that loses its lease all the same (its process was frozen for longer) is stopped
before it publishes anything: see `Lease.check`. A file that was removed, or that holds something
else than a run's name, is no other run's: the owner writes it again.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
import uuid
from pathlib import Path

from configs.schema import InputError
from reliability.objects import Key

SIZE = 200  # bytes of the file, so that a beat writes over all of the one before
BEAT = 5.0  # seconds
PATIENCE = 20.0  # seconds
logger = logging.getLogger("plumbline")


class Lost(InputError):
    """Another run took the folder over. Training stops, because nothing could be saved."""


class Lease:
    """A lease, held from construction to `release`. Raises InputError if another run holds it,
    OSError if the folder cannot be written.

    `id` is new with every lease. Temporary folders carry it, so that they are never confused with
    those of an earlier run.

    of_start: names the start whose ranks share the folder (checkpoint/rounds.py). Another rank of it
    that holds the lease is lost, or not in this round: it is not waited for, and neither is a lock
    that the server of a network file system still keeps for a host that is lost.
    """

    def __init__(self, path: Path, of_start: str = ""):
        self.path = path
        self.id = uuid.uuid4().hex[:8]
        self.start = of_start
        self.count = 0
        self.changing = threading.Lock()
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            locked = _lock(self.fd)
            owner, is_free = _read(self.fd)
            if owner and of_start and owner.get("start") == of_start:
                locked, is_free = locked or None, True
            if is_free:
                owner = None
            local = locked and owner and owner["host"] == socket.gethostname()
            holder = named(owner)
            # the lock does not tell whether that run is alive
            if locked is not False and not is_free and not local:
                found = f"was left by {holder}" if owner else "has a damaged .lease"
                logger.warning(
                    f"{path.parent} {found}: watching for {PATIENCE:.0f} s whether "
                    f"{'it' if owner else 'its run'} is alive"
                )
                locked = not _counts_on(path) and _lock(self.fd)
            if locked is False:
                raise refused(path.parent, holder)
            self._beat()
        except BaseException:
            os.close(self.fd)
            raise
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        self.count += 1
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "id": self.id}
        self._write(owner | {"start": self.start, "count": self.count})

    def _write(self, content: dict) -> None:
        os.pwrite(self.fd, json.dumps(content).ljust(SIZE).encode(), 0)
        os.ftruncate(self.fd, SIZE)
        os.fsync(self.fd)

    def _keep_beating(self) -> None:
        while not self.released.wait(BEAT):
            # a missed beat makes the owner look dead; `check` covers it
            with contextlib.suppress(OSError):
                if self.held():
                    with self.changing:
                        self._beat()

    def held(self) -> bool:
        """Return whether the lease is still ours: no other run took it over, and its folder is
        there. Writes the file again if it was removed or holds no run's name."""
        with self.changing:
            if self.fd < 0:  # given back
                return False
            try:
                if not self.path.exists():
                    self._write_anew()
                same = os.stat(self.path).st_ino == os.fstat(self.fd).st_ino
                owner, _ = _read(self.fd)
                if same and owner is None:
                    logger.warning(f"{self.path} was damaged, and is mended")
                    self._beat()
                    owner, _ = _read(self.fd)
            except OSError:
                return False
        return same and owner is not None and owner["id"] == self.id

    def _write_anew(self) -> None:
        """Write the file again after it was removed. Raises FileExistsError where another run was
        first."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        os.dup2(fd, self.fd)
        os.close(fd)
        if _lock(self.fd) is False:
            raise BlockingIOError(errno.EAGAIN, "another run was first", str(self.path))
        self._beat()
        logger.warning(f"{self.path} was removed, and is written again")

    def check(self) -> None:
        """Raise Lost if the lease is not held. Called before anything in the folder changes
        visibly."""
        if self.held():
            return
        folder = self.path.parent
        if not folder.is_dir():
            raise Lost(removed(folder))
        raise taken_over(folder)

    def release(self) -> None:
        """Give the folder back, once."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join()
        if self.held():
            # not emptied: an owner that was frozen meanwhile must see that another run was here
            with contextlib.suppress(OSError):
                self._write({"id": self.id, "released": True})
        with self.changing:
            os.close(self.fd)
            self.fd = -1


def check_free(folder: Path) -> None:
    """Raise InputError if a process of this host holds the lease of a folder. Takes nothing, so that
    no start meanwhile is refused. The process must hold no lease: to close a file gives up locks."""
    try:
        fd = os.open(folder / ".lease", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no run was here, or taking the lease will say why not
        return
    try:
        if _is_locked(fd):
            raise refused(folder, named(_read(fd)[0]))
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    """Return whether another process has the lock (fcntl(2), struct flock of Linux)."""
    if sys.platform != "linux":
        return False
    asked = struct.pack("hhlli", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
    except OSError:  # the file system has no locks
        return False
    return struct.unpack("hhlli", answer)[0] != fcntl.F_UNLCK


def named(owner: dict | None) -> str:
    known = owner and "pid" in owner  # it may have the lock and not have written yet
    return f"process {owner['pid']} on {owner['host']}" if known else "another process"


def refused(place: Path | Key, holder: str, option: str = "run.folder") -> InputError:
    """Return the refusal of a start where another run writes."""
    return InputError(
        f"{place} is being written by another run ({holder}): stop it, or set another {option}"
    )


def taken_over(place: Path | Key) -> Lost:
    return Lost(f"{place} was taken over by another run: nothing more is published by this one")


def removed(folder: Path) -> str:
    return f"{folder} was removed during the run: nothing can be saved any more"


def _lock(fd: int) -> bool | None:
    """Take the lock and return whether we got it; None if the file system has none. Unlike flock's,
    a fork does not inherit this lock."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _read(fd: int) -> tuple[dict | None, bool]:
    """Return the run that holds or held the lease, or gave it back ({"id", "released"}), None if
    the file does not say; and whether the lease is free."""
    content = os.pread(fd, 1000, 0)
    try:
        owner = json.loads(content)
        if owner.get("released") is True and "id" in owner:
            return owner, True
        if {"host", "pid", "id"} <= owner.keys():
            return owner, False
    except (ValueError, AttributeError):
        pass
    return None, not content


def _counts_on(path: Path) -> bool:
    """Return whether the owner on another host is alive. The file is opened again each time,
    because NFS shows changes when a file is opened. Closing it drops this process's own lock, so
    the caller must lock again."""
    first = path.read_bytes()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if path.read_bytes() != first:
            return True
    return False
