"""Two hosts on one machine: two network namespaces, each with its own loopback, joined by one cable
(a veth pair).

Needs root and iproute2; a test that asks for `hosts` is skipped without them.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.launched import Launcher
from tests.runs import free_port

ADDRESSES = ("10.123.45.1", "10.123.45.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Hosts:
    """Two namespaces, and the processes that were started in them."""

    def __init__(self) -> None:
        self.names = [f"plumbline-{os.getpid()}-{node}" for node in range(2)]
        self.running: list[Launcher] = []
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
        self.cable("up")

    def cable(self, state: str, ends: tuple[int, ...] = (0, 1)) -> None:
        """Set the cable up or down at these ends. Without one's own end the route is gone."""
        for name in (self.names[end] for end in ends):
            ip("-n", name, "link", "set", "cable", state)

    def limit(self, rate: str) -> None:
        """Both ends send at most that fast, from a queue of at most 50 ms."""
        for name in self.names:
            words = (
                f"tc -n {name} qdisc replace dev cable root tbf rate {rate} burst 256kb "
                "latency 50ms"
            )
            subprocess.run(words.split(), check=True, capture_output=True, timeout=20)

    def unlimited(self) -> None:
        for name in self.names:
            words = f"tc -n {name} qdisc delete dev cable root"
            subprocess.run(words.split(), check=True, capture_output=True, timeout=20)

    def launch(
        self, script: Path | str, options: list[str], said: Path, *flags: str, **settings: str
    ) -> list[Launcher]:
        """The same script (a module after the flag -m) on both, by launchers that are forked; what
        node n says and prints goes to said-n."""
        port = free_port()
        self.running = []
        for node, name in enumerate(self.names):
            words = [
                "--nproc-per-node=2",
                "--nnodes=2",
                f"--node-rank={node}",
                f"--master-addr={ADDRESSES[0]}",
                f"--master-port={port}",
                "--shutdown-timeout=10",
                *flags,
                script,
                *options,
            ]
            begin = partial(_launch_from, name)
            here = settings | {"GLOO_SOCKET_IFNAME": "cable"}
            self.running.append(Launcher(words, Path(f"{said}-{node}"), begin, **here))
        return self.running

    def kill(self, node: int) -> None:
        """kill -9 of everything on that host."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.names[node]], capture_output=True, text=True
        ).stdout.split()
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def survivors(self) -> list[str]:
        """Return the processes that still run in the namespaces."""
        shown = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for name in self.names
        ]
        return " ".join(shown).split()

    def remove(self) -> None:
        for node, name in enumerate(self.names):
            self.kill(node)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        for process in self.running:
            process.wait()


def enter(name: str) -> None:
    """Enter the network namespace of a host, by a process that has no other thread yet."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def _launch_from(name: str) -> None:
    """Enter a host, and print where errors go."""
    os.dup2(2, 1)
    enter(name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or not shutil.which("ip"):
        pytest.skip(
            "two hosts are made of Linux network namespaces by the command ip (Debian: apt "
            "install iproute2)"
        )
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"network namespaces are not permitted here (root is needed): {error.stderr.strip()}"
        )
    yield made
    made.remove()
