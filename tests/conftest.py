"""The wall-clock cap of every test: a hang is a failure with a stack, not a stuck CI job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEFAULT_CAP_SECONDS = 120

# `nohup` and the background jobs of a script start the suite with SIGINT ignored, and what is ignored stays ignored in
# every child: the tests of Ctrl-C would wait for ever. A handler is not inherited by a program that is started, so that
# has the default again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _capped(item: pytest.Item, phase: str) -> Iterator[None]:
    marker = item.get_closest_marker("cap")
    seconds = marker.args[0] if marker else DEFAULT_CAP_SECONDS

    def too_late(signum: int, frame: object) -> None:
        pytest.fail(f"{item.name}: {phase} took longer than its cap of {seconds} s (raise it with @pytest.mark.cap)")

    previous = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _capped(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _capped(item, "the test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _capped(item, "teardown"):
        return (yield)
