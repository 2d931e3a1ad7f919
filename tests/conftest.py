"""The wall-clock cap of every test: a hang is a failure with a stack, not a stuck CI job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEFAULT_CAP_SECONDS = 120


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
