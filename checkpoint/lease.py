"""One run per folder: two that save into the same one would mix their weights, and one of them is a mistake.

The lease is a lock on the file `.lease`. The kernel drops it with the process that held it, however that died, so on
one host there is no stale lease. A network file system may keep locks to one host, or have none; so the owner also
counts in the file every BEAT seconds, and who finds another host's lease first watches for PATIENCE seconds whether
it counts on. Whoever lost the lease nevertheless (a process frozen for longer) is stopped before it publishes: see
`Lease.check`.
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

BEAT, PATIENCE = 5.0, 20.0  # seconds
say = logging.getLogger("plumbline")


class Lost(InputError):
    """Another run took the folder over. There is no point in training on: nothing of it could be saved."""


class Lease:
    """Held from construction to `release`. Raises InputError when another run holds it, OSError for an unwritable
    folder.

    `id` is new with every lease; temporary folders carry it, so that they are never confused with those of a run
    before.
    """

    def __init__(self, path: Path):
        self.path, self.id, self.count = path, uuid.uuid4().hex[:8], 0
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            locked, before = _lock(self.fd), _read(self.fd)
            local = locked and before and before["host"] == socket.gethostname()
            who = f"process {before['pid']} on {before['host']}" if before else "another process"
            if before and locked is not False and not local:  # the lock does not tell whether that one lives
                say.warning(f"{path.parent} was left by {who}: watching for {PATIENCE:.0f} s whether it is alive")
                locked = not _counts_on(path) and _lock(self.fd)
            if locked is False:
                raise InputError(
                    f"{path.parent} is being written by another run ({who}): stop it, or set another run.folder"
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
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": self.id, "count": self.count})
        os.pwrite(self.fd, text.ljust(200).encode(), 0)
        os.fsync(self.fd)

    def _keep_beating(self) -> None:
        while not self.released.wait(BEAT):
            with contextlib.suppress(OSError):  # a missed beat: the owner looks dead for a while, which `check` covers
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
        """Raises Lost if so; called before anything in the folder changes visibly."""
        if not self.held():
            raise Lost(f"{self.path.parent} was taken over by another run: nothing more is published by this one")

    def release(self) -> None:
        self.released.set()
        self.thread.join()
        if self.held():
            os.ftruncate(self.fd, 0)
        os.close(self.fd)


def _lock(fd: int) -> bool | None:
    """Whether we got it; None where the file system has no locks. Unlike flock, a fork does not inherit this one."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _read(fd: int) -> dict | None:
    """Who holds or held the lease; None when it was released, or never held, or nonsense stands there."""
    try:
        owner = json.loads(os.pread(fd, 1000, 0))
        return owner if {"host", "pid", "id"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def _counts_on(path: Path) -> bool:
    """Whether the owner on another host is alive. The file is opened anew each time, as NFS shows changes on opening;
    closing it drops this process's own lock, so the caller locks again."""
    first, deadline = path.read_bytes(), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if path.read_bytes() != first:
            return True
    return False
