"""What holds for every test: a cap on its time, its neighbours, and the default reaction to Ctrl-C
in the programs it starts.

Nothing of the project is imported here: tests/test_scripts.py runs a copy of this file in a
repository of its own.
"""

import fcntl
import functools
import json
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEFAULT_CAP_SECONDS = 120

# `nohup` and the background jobs of a script start the suite with SIGINT ignored, and what is
# ignored stays ignored in every child: the tests of Ctrl-C would wait for ever. A handler is not
# inherited by a program that is started, so that has the default again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist: put the tests into the order in which they are handed out, and
    write down for the scheduler which of them belong on one worker. These are those of a file that
    share a fixture, which is then made once, and those that must be alone, so that the other
    workers wait only once."""
    if not hasattr(config, "workerinput"):
        return

    def marked(item: pytest.Item, *names: str) -> bool:
        return any(item.get_closest_marker(name) for name in names)

    groups, caps = {}, Counter()
    for item in items:
        if marked(item, "alone"):
            groups[item.nodeid] = "alone"
        elif any(
            fixtures[-1].scope == "module"
            for fixtures in item._fixtureinfo.name2fixturedefs.values()
        ):
            groups[item.nodeid] = item.path.stem
        caps[groups.get(item.nodeid, item.nodeid)] += _cap(item)

    def place(item: pytest.Item) -> tuple:
        """Groups and long tests come first, so that none begins when all others are done; those
        that must be alone come last. Neighbours in a file are alike: if all workers had them at the
        same time, all would wait at the same time. A checksum of the name separates them, in the
        same way on every worker."""
        name = groups.get(item.nodeid, item.nodeid)
        return (
            marked(item, "alone"),
            not marked(item, "slow", "torture"),
            -caps[name],
            zlib.crc32(name.encode()),
            -_cap(item),
        )

    items.sort(key=place)
    (config._tmp_path_factory.getbasetemp() / "groups.json").write_text(json.dumps(groups))


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """The server that forks ranks begins with the first test: it takes some seconds to import what
    they need."""
    if forks := sys.modules.get("tests.forks"):
        forks.start_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """In the process that hands out the tests: a group goes to one worker, any other test to the
    next that is free.

    pytest-xdist's own `--dist loadgroup` does nothing with pytest 9.2: it writes the group into a
    name that is not read."""
    from xdist.scheduler import LoadScopeScheduling

    place = config._tmp_path_factory.getbasetemp()
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems

    class Groups(LoadScopeScheduling):
        @functools.cached_property
        def groups(self) -> dict[str, str]:
            return json.loads(next(place.glob("*/groups.json")).read_text())

        def _split_scope(self, nodeid: str) -> str:
            return self.groups.get(nodeid, nodeid)

    return Groups(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `alone` waits for the tests of the other workers, and they wait for it. Every
    test holds a lock together with the others, or, if it must be alone, for itself; whoever waits
    for the lock holds the gate before it, so that a test that must be alone gets its turn."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    # the workers' folders are side by side in the run's
    place = item.config._tmp_path_factory.getbasetemp().parent
    with open(place / "gate", "w") as gate, open(place / "lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _cap(item: pytest.Item) -> float:
    """Seconds that a test may take on a machine of its own."""
    marker = item.get_closest_marker("cap")
    return marker.args[0] if marker else DEFAULT_CAP_SECONDS


@contextmanager
def _capped(item: pytest.Item, phase: str) -> Iterator[None]:
    """A hang is a failure with a stack, not a stuck CI job. Beside other workers a test has a share
    of the processor, so its cap is that many times longer."""
    seconds = _cap(item) * getattr(item.config, "workerinput", {}).get("workercount", 1)

    def too_late(signum: int, frame: object) -> None:
        pytest.fail(
            f"{item.name}: {phase} took longer than its cap of {seconds} s (raise it with "
            "@pytest.mark.cap)"
        )

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
