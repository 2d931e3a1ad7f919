"""Check the resources of a host besides devices: open files, memory, and an address that other
hosts can reach."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections import defaultdict
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import torch

from checkpoint.peers import GENERATIONS
from tools.preflight.copies import bytes_of_copies
from tools.preflight.machine import device_table, part_of_a_rank
from tools.preflight.probe import Probe, ProbeRow, failed, fine
from training.metrics import in_bytes

OWN_FILES = 512  # of a rank: data shards, pipes, logs, and the sockets of groups and network cards
STORE_FILES = 4  # connections of each rank to the store, which the launcher of node 0 serves
CGROUP = Path("/sys/fs/cgroup")


def measure_host(probe: Probe) -> dict:
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "address": own_address(),
        "free": free_memory(),
        "needed": memory_of_a_rank(probe),
        "copied": bytes_of_copies(probe),  # which the next ones replace
    }


def own_address() -> str:
    """Return the address of this host's name; "" without one, or where a card is given by name."""
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        with suppress(OSError):
            return socket.gethostbyname(socket.gethostname())
    return ""


def free_memory() -> int:
    """Return the bytes that processes of this host may still take. The limit of the container
    counts if there is one (cgroup v2)."""
    free = device_table(torch.device("cpu"))["free"]
    with suppress(OSError, ValueError):  # no such files, or "max": no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        cache = re.search(
            r"^inactive_file (\d+)", (CGROUP / "memory.stat").read_text(), re.MULTILINE
        )
        free = min(free, limit - used + (int(cache[1]) if cache else 0))
    return free


def memory_of_a_rank(probe: Probe) -> int:
    """Return the bytes of host memory for a rank's part of the state: the copy that a save is
    written from, which CUDA rounds up to at most twice as much when it pins it; with cpu_offload
    also the state itself; with checkpoint.peers the copies for this and other hosts."""
    part = part_of_a_rank(probe)
    pinned = 2 if probe.device.type == "cuda" else 1
    peers = probe.cfg.checkpoint.peers
    copies = GENERATIONS * (1 + peers) if peers else 0
    staged = pinned * probe.cfg.checkpoint.async_save
    return part * (staged + probe.cfg.parallelism.cpu_offload + copies)


def judge_host(probe: Probe, answers: list[dict]) -> list[ProbeRow]:
    rows = []
    few: dict[tuple[int, int], list[int]] = defaultdict(list)  # (limit, needed) -> ranks
    for rank, answer in enumerate(answers):
        wanted = OWN_FILES
        if probe.hosts[rank] == probe.hosts[0]:
            wanted += STORE_FILES * probe.world.size
        if answer["files"] < wanted:
            few[answer["files"], wanted].append(rank)
    for (files, wanted), ranks in few.items():
        text = (
            f"{probe.named(ranks)}: at most {files:,} files may be open, and {wanted:,} are needed: "
            f"raise the limit before the start, with ulimit -n {wanted} or LimitNOFILE"
        )
        rows.append(failed(text, blocks=False))
    loopback = [r for r in probe.leaders if answers[r]["address"].startswith("127.")]
    if len(probe.leaders) > 1 and loopback:
        text = (
            f"the host name of {probe.named(loopback)} resolves to "
            f"{answers[loopback[0]]['address']} there, so the other hosts would look for its ranks on "
            "themselves: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its network card, or "
            "correct /etc/hosts"
        )
        rows.append(failed(text))
    for leader in probe.leaders:
        ranks = [r for r in range(len(answers)) if probe.hosts[r] == probe.hosts[leader]]
        free = answers[leader]["free"] + answers[leader]["copied"]
        needed = sum(answers[r]["needed"] for r in ranks)
        if answers[leader]["free"] and needed > free:
            text = (
                f"{probe.named(ranks)} need {in_bytes(needed)} of host memory for the copy that a save "
                "is written from (and parallelism.cpu_offload, checkpoint.peers), but "
                f"{in_bytes(free)} are free: fewer ranks on a host, fewer peers, or "
                "checkpoint.async_save = false"
            )
            rows.append(failed(text, blocks=False))
    least = min(answers, key=itemgetter("free"))
    files = min(answer["files"] for answer in answers)
    text = (
        f"{files:,} files may be open; {in_bytes(least['free'])} of host memory are free at least, of "
        f"which the state's copies take {in_bytes(least['needed'])} a rank"
    )
    return rows or [fine(text)]
