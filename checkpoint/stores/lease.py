"""Keep a prefix of a store to one run, without a lock: the lease is the object `.lease`, and the
run that replaces the version that it has read owns it.  The owner replaces it every BEAT seconds
with a higher count. A process of this machine lives or has ended, and so its lease is refused or
taken at once. For another machine's the lease is watched: it is refused at its next beat, and taken
after PATIENCE seconds without one. Of two runs that take over a dead one's lease, one gets it,
because both name the version that they have seen. A run that lost its lease is stopped before it
publishes anything.

The lease also names the newest checkpoint: a listing may lag behind, a read of one object does not.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path

import xxhash

from checkpoint.lease import named, refused, taken_over
from configs.schema import InputError
from reliability.objects import Key, Unreachable, Version

BEAT = 5.0  # seconds
PATIENCE = 30.0  # seconds
LEAVING = 3.0  # seconds of retries to release a lease in a store that fails at once
STALLED = 10.0  # seconds that a release waits for a beat which the store does not answer
# Conditions of a put that hold for no version of an object that is there.
BROKEN_CONDITIONS = {
    "If-None-Match": "create",
    "If-Match": {"e_tag": '"00000000000000000000000000000000"', "version": "1"},
}
logger = logging.getLogger("plumbline")


class StoreLease:
    """A lease, held from construction to `release`, as checkpoint/lease.py::Lease is.

    option: what another run sets, for the refusal. handover: seconds for which a run on another
    machine may still go on, before this one is refused. of_start: as of Lease. Raises InputError if
    another run holds it.
    """

    def __init__(
        self,
        key: Key,
        option: str = "checkpoint.store",
        handover: float = 0.0,
        of_start: str = "",
    ):
        self.key, self.option, self.start = key, option, of_start
        self.id = uuid.uuid4().hex[:8]
        self.count = 0
        self.changing = threading.Lock()
        owner, version = self._await_end(handover)
        self.newest = owner.get("newest", "")  # name of a checkpoint
        text = self._text(self.id)
        taken = key.replace(text, version) if version else key.create(text)
        if taken is None:
            raise refused(key.parent, "which took it at this moment", option)
        self.version: Version = taken
        self._check_store(text)
        self.released = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, daemon=True)
        self.thread.start()

    def _await_end(self, handover: float) -> tuple[dict, Version | None]:
        """Wait until no living run holds the lease. Returns what it says then, and its version."""
        owner, version = _read(self.key)
        began = beaten = time.monotonic()
        told = ""
        while owner.get("id") and not (self.start and owner.get("start") == self.start):
            alive = _is_alive(owner)
            if alive:
                raise refused(self.key.parent, named(owner), self.option)
            silence = time.monotonic() - beaten
            if alive is False or silence > PATIENCE:
                break
            state = f"watching for up to {PATIENCE:.0f} s whether it is alive"
            if beaten > began:
                state = f"waiting for up to {handover:.0f} s for its end"
            if state != told:
                logger.warning(f"{self.key.parent} is held by {named(owner)}: {state}")
                told = state
            time.sleep(min(0.5, PATIENCE / 4))
            owner, seen = _read(self.key)
            if seen != version and owner.get("id"):
                version, beaten = seen, time.monotonic()
                if beaten >= began + handover:
                    raise refused(self.key.parent, named(owner), self.option)
            version = seen
        return owner, version

    def _check_store(self, content: bytes) -> None:
        """Raise InputError if the store lacks conditional puts, which a lease and a publication need: the
        check is two puts of the same bytes whose conditions do not hold."""
        problem = ""
        if self.version == Version(None, None):
            problem = "gives no ETag"
        else:
            for header, mode in BROKEN_CONDITIONS.items():
                if not self.key.keeps_condition(content, mode):
                    problem = problem or f"ignores {header}"
        if problem:
            self.key.remove()
            raise InputError(
                f"{self.key.parent}: this store {problem}, so two runs could write there at once and "
                "replace each other's checkpoints: use one that knows conditional puts (S3 and MinIO "
                "do), or keep checkpoints in a folder"
            )

    def _text(self, run: str) -> bytes:
        self.count += 1
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "where": _where(),
            "started": _started(os.getpid()),
            "id": run,
            "start": self.start,
            "count": self.count,
            "newest": self.newest,
        }
        text = json.dumps(owner)
        return json.dumps({"hash": _hash(text), "owner": text}).encode()

    def _replace(self, run: str, tries: int | None = None) -> bool:
        """Replace our version, if it still is the one that is there, or if that is another one of
        ours: the answer to an earlier beat may have been lost. Returns whether it did."""
        with self.changing:
            for _ in range(2):
                version = self.key.replace(self._text(run), self.version, tries)
                if version:
                    self.version = version
                    return True
                owner, there = _read(self.key)
                if owner and owner["id"] != self.id:
                    return False
                if there is None:  # it was removed, by no run: each leaves its name
                    made = self.key.create(self._text(run), tries)
                    self.version = made or self.version
                    return made is not None
                self.version = there  # of an earlier beat, or of what is no lease
        return False

    def _keep_beating(self) -> None:
        while not self.released.wait(BEAT):
            # a missed beat makes the owner look dead; `check` covers it
            with contextlib.suppress(Unreachable):
                self._replace(self.id, tries=1)

    def publish(self, name: str) -> None:
        """Name this checkpoint in the lease as the newest. Raises Lost if another run has it by
        now: it may have removed the files of the checkpoint, which had no manifest yet."""
        self.newest = name
        if not self._replace(self.id):
            self.check()

    def held(self) -> bool:
        """Return whether the lease is still ours: no other run took it over. Writes the object
        again if it was removed or damaged."""
        owner, _ = _read(self.key)
        if owner:
            return owner["id"] == self.id
        logger.warning(f"{self.key} was removed or damaged, and is mended")
        return self._replace(self.id)

    def check(self) -> None:
        """Raise Lost if the lease is not held. Called before anything below the prefix changes
        visibly."""
        if not self.held():
            raise taken_over(self.key.parent)

    def release(self) -> None:
        """Release the prefix, once."""
        if self.released.is_set():
            return
        self.released.set()
        self.thread.join(STALLED)
        if self.thread.is_alive():
            # a scheduler does not wait for what the next start can do without
            logger.warning(f"the lease could not be given back: {self.key.parent} does not answer")
            return
        until = time.monotonic() + LEAVING
        while True:
            try:
                self._replace("", tries=1)
                return
            except Unreachable as error:
                # obstore does not repeat a conditional put whose connection broke
                if time.monotonic() > until:
                    logger.warning(f"the lease could not be given back: {error}")
                    return
            time.sleep(LEAVING / 10)


def _read(key: Key) -> tuple[dict, Version | None]:
    """Return the run that holds or held the lease, empty if the object is not there or holds
    something else, and the version of the object. What a network has damaged is read again: it must
    not look like another run's."""
    version = None
    for _ in range(key.tries):
        try:
            content, version = key.read_version()
        except FileNotFoundError:
            return {}, None
        try:
            outer = json.loads(content)
            owner = json.loads(outer["owner"])
            complete = {"host", "pid", "id", "where"} <= owner.keys()
            if complete and outer["hash"] == _hash(outer["owner"]):
                return owner, version
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}, version


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def check_free(place: Key) -> None:
    """Raise InputError if a living process of this machine holds the lease of this prefix. Takes
    nothing, and waits for no other machine."""
    owner, _ = _read(place / ".lease")
    if owner.get("id") and _is_alive(owner):
        raise refused(place, named(owner), "checkpoint.store")


def _where() -> str:
    """Identify this boot of this machine, and its processes that can see each other; "" where Linux
    does not say. Only there does a number identify a process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _is_alive(owner: dict) -> bool | None:
    """Return whether the owner, a process of this machine, still runs; None where that is not
    known: it is of another machine, or this process, which may have left a lease that it could not
    give back."""
    if not owner["where"] or owner["where"] != _where() or owner["pid"] == os.getpid():
        return None
    try:
        pid = int(owner["pid"])
        os.kill(pid, 0)
        if _is_zombie(pid):
            return False
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return None
    if "started" not in owner:  # written by an earlier version
        return None
    return owner["started"] == _started(pid)


def _started(pid: int) -> int | None:
    """Return when a process began, in ticks after its machine: its number may be another's by now.
    None where Linux does not say."""
    try:
        return int(_stat(pid)[19])
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return what Linux says of a process after its name, from its state on (proc(5))."""
    text = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _is_zombie(pid: int) -> bool:
    """Return whether nothing is left of a process but its exit code, which its parent has not read
    yet. It has one thread then, in state Z (proc(5))."""
    return _stat(pid)[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
