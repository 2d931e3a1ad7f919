"""Check the memory of each host that copies of the state are kept in (checkpoint.peers): that it can
be written, is in memory, has room for the copies, and is no other host's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from checkpoint import peers
from reliability.objects import Key, location
from tools.preflight.machine import part_of_a_rank
from tools.preflight.probe import Probe, ProbeRow, failed, fine
from training.metrics import in_bytes

IN_MEMORY = ("tmpfs", "ramfs", "")  # types of file system; "": it is not known
REPAIR = "set PLUMBLINE_HOST_MEMORY to a folder of tmpfs on each host, or checkpoint.peers = 0"

LARGER = "make it larger (mount -o remount,size=..., docker --shm-size), or copy to fewer hosts"
ONE_MEMORY = (
    "have one memory for copies, so no copy would outlive it: start one node on each machine, or set "
    "checkpoint.peers = 0"
)


def measure_copies(probe: Probe) -> dict:
    """Return what this host's memory for copies is: `why` it cannot be written or "", the type of
    its file system, the bytes that copies may take, and what tells it from other hosts'; {} without
    checkpoint.peers."""
    if not probe.cfg.checkpoint.peers:
        return {}
    folder = peers.host_memory()
    try:
        with tempfile.TemporaryDirectory(prefix="plumbline-preflight-", dir=folder):
            about = folder.stat()
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return {"folder": str(folder), "why": error.strerror}
    return {
        "folder": str(folder),
        "why": "",
        "type": file_system(folder),
        "room": free + bytes_of_copies(probe),
        "memory": [peers.machine(), about.st_dev, about.st_ino],
    }


def bytes_of_copies(probe: Probe) -> int:
    """Return the bytes of this run's copies on this host, which the next ones replace."""
    store = probe.cfg.checkpoint.store
    place = location(store) if store else Path(probe.cfg.run.folder) / "checkpoints"
    found = 0
    for path in peers.host_memory().glob(f"{peers.prefix_of(place)}*/**/*"):
        with suppress(OSError):  # a run that goes on removes it
            found += path.lstat().st_size
    return found


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system (proc(5)); "" where Linux does not say."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0]
    return ""


def judge_copies(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    count = probe.cfg.checkpoint.peers
    if not count:
        return [fine("checkpoint.peers = 0: none")]
    needed = peers.GENERATIONS * (1 + count) * part_of_a_rank(probe) * probe.world.local_size
    need = f"{peers.GENERATIONS} copies of {1 + count} hosts' state need {in_bytes(needed)}"
    rows = []
    owners: dict[tuple, list[int]] = defaultdict(list)
    for leader in probe.leaders:
        found = answers[leader]
        where = f"{found['folder']} of {probe.named([leader])}"
        if found["why"]:
            rows.append(failed(f"{where} cannot be written ({found['why']}): {REPAIR}"))
            continue
        owners[tuple(found["memory"])].append(leader)
        if found["room"] < needed:
            text = f"{where} has room for {in_bytes(found['room'])}, and {need}: {LARGER}"
            rows.append(failed(text))
        if found["type"] not in IN_MEMORY:
            slow = f"is on {found['type']}, not in memory: copies are as slow as that is"
            rows.append(ProbeRow("warn", f"{where} {slow}; {REPAIR}"))
    for leaders in owners.values():
        if len(leaders) > 1:
            rows.append(failed(f"{probe.named(leaders)} {ONE_MEMORY}"))
    room = min((answer.get("room", 0) for answer in answers), default=0)
    return rows or [fine(f"each host has room for {in_bytes(room)} at least: {need}")]


def remove(place: Path | Key) -> None:
    """Remove from this host the copies of the checkpoints in a folder that preflight has made."""
    for path in peers.host_memory().glob(f"{peers.prefix_of(place)}*"):
        shutil.rmtree(path, ignore_errors=True)
