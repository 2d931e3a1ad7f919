"""The open sockets of this process, those that C++ has opened included."""

import contextlib
import os
import socket
from collections.abc import Callable, Collection


def open_sockets() -> dict[str, int]:
    """Return them: name -> file descriptor; none where the system does not list them (macOS)."""
    found = {}
    if not os.path.isdir("/proc/self/fd"):
        return found
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[name] = int(descriptor)
    return found


def shut_down(descriptor: int) -> None:
    """End a TCP connection, so that all that wait for it fail. One that listens is left alone: gloo
    ends the process when that fails."""

    def end(found: socket.socket) -> None:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            found.getpeername()
            found.shutdown(socket.SHUT_RDWR)

    _attempt(descriptor, end)


def end_if_unacknowledged(seconds: float, before: Collection[str]) -> None:
    """End the TCP connections that were opened since, once what they have sent is not acknowledged
    for so long (TCP_USER_TIMEOUT, RFC 5482): after a cut of the network TCP waits about as long
    again as the cut before it tries again. before: names of those that were open."""

    def limit(found: socket.socket) -> None:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))

    for name, descriptor in open_sockets().items():
        if name not in before:
            _attempt(descriptor, limit)


def _attempt(descriptor: int, action: Callable[[socket.socket], None]) -> None:
    """Do something to a socket, unless it was closed meanwhile, or is of a kind that cannot do it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        action(copy)
