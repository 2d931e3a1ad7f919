"""The open sockets of this process, those that C++ has opened included."""

import contextlib
import os
import socket
from collections.abc import Collection


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
    with contextlib.suppress(OSError):
        copy = socket.socket(fileno=os.dup(descriptor))
        try:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()


def end_if_unacknowledged(seconds: float, before: Collection[str]) -> None:
    """End the TCP connections that were opened since, once what they have sent is not acknowledged
    for so long (TCP_USER_TIMEOUT, RFC 5482): after a cut of the network TCP waits about as long
    again as the cut before it tries again. before: names of those that were open."""
    for name, descriptor in open_sockets().items():
        if name in before:
            continue
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(descriptor))
            try:
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
            finally:
                copy.close()
