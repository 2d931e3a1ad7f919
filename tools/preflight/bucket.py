"""The object store of a run's checkpoints: what the check of the folder asks where hosts share no
folder. Every rank writes there and sees what the others wrote, and a conditional put is given once."""

import os
import time

from configs.schema import Config
from reliability.objects import Key, location
from tools.preflight.probe import Probe, ProbeRow, failed, judge_writing

LEASE = "lease"  # what all ranks try to create


def prefix(cfg: Config, name: str) -> Key | None:
    """Return a prefix for a preflight next to the checkpoints; None where these are in a folder."""
    where = location(cfg.checkpoint.store) if cfg.checkpoint.store else None
    return where.parent / f".preflight-{name}" if isinstance(where, Key) else None


def measure(probe: Probe, place: Key, share: float) -> dict:
    """share: bytes of a checkpoint of this rank. Raises InputError where the store fails."""
    rank = probe.world.rank
    size = int(max(1 << 20, min(share, 1 << 28)))
    data = memoryview(os.urandom(1 << 20) * -(-size // (1 << 20)))
    began = time.perf_counter()
    (place / f"data-{rank}").upload(lambda: [data], len(data))
    seconds = time.perf_counter() - began
    is_taken = (place / LEASE).create(f"rank {rank}".encode()) is not None
    unseen = set(range(probe.world.size))
    deadline = time.monotonic() + probe.limit("folder") / 2
    while unseen and time.monotonic() < deadline:
        names = [name for name in place.below() if name != LEASE]
        unseen -= {int(name.removeprefix("data-")) for name in names}
        time.sleep(0.2 if unseen else 0)
    return {
        "store": str(place.parent),
        "rate": len(data) / seconds,
        "unseen": sorted(unseen),
        "taken": is_taken,
    }


def judge(probe: Probe, answers: list[dict], size: int) -> list[ProbeRow]:
    """size: bytes of a checkpoint."""
    for rank, answer in enumerate(answers):
        if answer["unseen"]:
            seen = f"{probe.named([rank])} does not see in {answer['store']} what "
            seen += f"{probe.named(answer['unseen'])} wrote: all hosts must name the same store"
            return [failed(seen)]
    store = answers[0]["store"]
    taken = [rank for rank, answer in enumerate(answers) if answer["taken"]]
    if len(taken) != 1:
        given = f"{probe.named(taken)} were all given" if taken else "no rank was given"
        text = f"{given} what a store gives once: {store} keeps no conditional puts, so two runs "
        return [failed(f"{text}could write to one prefix", blocks=False)]
    rates = [answer["rate"] for answer in answers]
    writing, slow = judge_writing(probe, rates, size, "uploads")
    detail = f"{store} is seen by all ranks, and a conditional put is given once; {writing}"
    return [ProbeRow("warn" if slow else "ok", detail, blocks=False)]
