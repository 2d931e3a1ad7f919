"""One run per folder: two runs that save into the same folder would mix their weights, and one of
them is a mistake.

The lease is a lock on the file `.lease`. The kernel releases it when the process that holds it
ends, in whatever way, so on one host there is no stale lease. A network file system may keep locks
to one host, or have none. So the owner also increases a count in the file every BEAT seconds, and a
run that finds a lease of another host first watches for PATIENCE seconds whether its count goes up.
A run that loses its lease all the same (its process was frozen for longer) is stopped before it
publishes anything: see `Lease.check`.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from configs.schema import InputError

BEAT = 5.0  # seconds
PATIENCE = 20.0  # seconds
say = logging.getLogger("plumbline")


class Lost(InputError):
    """Another run took the folder over. There is no point in training on, because nothing could be
    saved."""


class Lease:
    """Held from construction to `release`. Raises InputError if another run holds it, OSError if
    the folder cannot be written.

    `id` is new with every lease. Temporary folders carry it, so that they are never confused with
    those of an earlier run.
    """

    def __init__(self, path: Path):
        self.path = path
        self.id = uuid.uuid4().hex[:8]
        self.count = 0
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            locked = _lock(self.fd)
            owner = _read(self.fd)
            local = locked and owner and owner["host"] == socket.gethostname()
            holder = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            # the lock does not tell whether that run is alive
            if owner and locked is not False and not local:
                say.warning(
                    f"{path.parent} was left by {holder}: watching for {PATIENCE:.0f} s whether "
                    "it is alive"
                )
                locked = not _counts_on(path) and _lock(self.fd)
            if locked is False:
                raise InputError(
                    f"{path.parent} is being written by another run ({holder}): stop it, or set "
                    "another run.folder"
                )
            self._beat()
        except BaseException:
            os.close(self.fd)
            raise
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        self.count += 1
        text = json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "id": self.id, "count": self.count}
        )
        os.pwrite(self.fd, text.ljust(200).encode(), 0)
        os.fsync(self.fd)

    def _keep_beating(self) -> None:
        while not self.released.wait(BEAT):
            # a missed beat makes the owner look dead; `check` covers it
            with contextlib.suppress(OSError):
                if self.held():
                    self._beat()

    def held(self) -> bool:
        """Whether the lease is still ours: nobody took it over, and the file was not replaced."""
        try:
            same = os.stat(self.path).st_ino == os.fstat(self.fd).st_ino
        except OSError:
            return False
        return same and (_read(self.fd) or {}).get("id") == self.id

    def check(self) -> None:
        """Raises Lost if the lease is not held. Called before anything in the folder changes
        visibly."""
        if not self.held():
            raise Lost(
                f"{self.path.parent} was taken over by another run: nothing more is published by "
                "this one"
            )

    def release(self) -> None:
        self.released.set()
        self.thread.join()
        if self.held():
            os.ftruncate(self.fd, 0)
        os.close(self.fd)


def _lock(fd: int) -> bool | None:
    """Whether we got the lock; None if the file system has none. Unlike flock's, a fork does not
    inherit this lock."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _read(fd: int) -> dict | None:
    """Who holds or held the lease; None if it was released or never held, or if the file holds
    something else."""
    try:
        owner = json.loads(os.pread(fd, 1000, 0))
        return owner if {"host", "pid", "id"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def _counts_on(path: Path) -> bool:
    """Whether the owner on another host is alive. The file is opened anew each time, because NFS
    shows changes when a file is opened. Closing it drops this process's own lock, so the caller
    must lock again."""
    first = path.read_bytes()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if path.read_bytes() != first:
            return True
    return False
