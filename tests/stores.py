"""The object store of tests: a server of tests/s3.py for each module, empty for each test."""

from collections.abc import Iterator

import pytest

from reliability import objects
from tests.s3 import Server, server

Settings = tuple[tuple[object, str, object], ...]  # (module, name, value)


@pytest.fixture(scope="module")
def running_store() -> Iterator[Server]:
    with server() as running:
        yield running


def emptied(running: Server, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Server:
    """Return the server with an empty bucket and no faults, which this process and its ranks can
    reach. settings: no test waits as long as a run does."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    for module, name, value in settings:
        monkeypatch.setattr(module, name, value)
    objects._open.cache_clear()
    running.rules()
    for key in running.keys():
        running.remove(key)
    running.ask("clear", b"")
    return running
