"""Rules for every test: a cap on its time, its order among workers, and the default reaction to
Ctrl-C in the programs it starts.

Nothing of the project is imported here: tests/test_scripts.py runs a copy of this file in a
separate repository.
"""

import fcntl
import functools
import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEFAULT_CAP_SECONDS = 120

# The tests compare processes on a CPU, several on one machine: a GPU would take one alone. Only those
# marked gpu see it (tests/test_gpu.py).
os.environ.setdefault("PLUMBLINE_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Nothing is fetched from the Hugging Face Hub: without a network each try would take half a minute.
# Tests that fetch have a hub of their own (tests/hub.py).
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `nohup` and the background jobs of a script start the suite with SIGINT ignored, and what is
# ignored stays ignored in every child: the tests of Ctrl-C would wait for ever. A handler is not
# inherited by a program that is started, so that has the default again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of a pytest-xdist worker into the order in which they are handed out, and write
    down for the scheduler which of them belong on one worker. These are those of a file that share
    a fixture, which is then made once, and those that must be alone, so that the other workers wait
    only once."""
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
        """Order the tests. Groups and long tests come first, so that none begins when all others
        are done; those that must be alone come last. Adjacent tests of a file are similar: if all
        workers had them at the same time, all would wait at the same time. A checksum of the name
        separates them, in the same way on every worker."""
        name = groups.get(item.nodeid, item.nodeid)
        return (
            marked(item, "alone"),
            not marked(item, "slow", "torture"),
            -caps[name],
            zlib.crc32(name.encode()),
            -_cap(item),
        )

    items.sort(key=place)
    waits = {groups.get(item.nodeid, item.nodeid) for item in items if marked(item, "waits")}
    plan = {"groups": groups, "waits": sorted(waits)}
    (config._tmp_path_factory.getbasetemp() / "plan.json").write_text(json.dumps(plan))


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """Start the server that forks ranks before the first test: it takes some seconds to import what
    they need."""
    if fork_server := sys.modules.get("tests.fork_server"):
        fork_server.start_server()


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """Fail a test that leaves a process group behind, and not the next one that creates one, which
    would be a different test in each order."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test has left a process group behind")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Schedule the tests, in the process that hands them out: a group goes to one worker, any other
    test to the next that is free. A third of the workers begin with what is marked `waits`, the
    others with what computes, so that all the way some tests compute while others wait.

    pytest-xdist's own `--dist loadgroup` does nothing with pytest 9.2: it writes the group into a
    name that is not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    place = config._tmp_path_factory.getbasetemp()
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems

    class Groups(LoadScopeScheduling):
        @functools.cached_property
        def plan(self) -> dict:
            return json.loads(next(place.glob("*/plan.json")).read_text())

        def _split_scope(self, nodeid: str) -> str:
            return self.plan["groups"].get(nodeid, nodeid)

        def _assign_work_unit(self, node: object) -> None:
            likes_to_wait = self.nodes.index(node) < len(self.nodes) // 3
            for scope in self.workqueue:
                if (scope in self.plan["waits"]) == likes_to_wait:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return Groups(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Make a test marked `alone` wait for the tests of the other workers, and these wait for it.
    Every test holds a shared lock, or, if it must be alone, an exclusive one; a test that waits for
    the lock holds the gate before it, so that a test that must be alone gets its turn."""
    item.stash[COST] = (_processor_seconds(), time.monotonic())
    if not hasattr(item.config, "workerinput"):
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    # the workers' folders are side by side in the run's
    place = item.config._tmp_path_factory.getbasetemp().parent
    with open(place / "gate", "w") as gate, open(place / "lock", "w") as lock:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        item.stash[COST] = (_processor_seconds(), time.monotonic())
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _cap(item: pytest.Item) -> float:
    """Return the seconds that a test may take on an idle machine."""
    marker = item.get_closest_marker("cap")
    return marker.args[0] if marker else DEFAULT_CAP_SECONDS


@contextmanager
def _capped(item: pytest.Item, phase: str) -> Iterator[None]:
    """Turn a hang into a failure with a stack. With other workers a test has a share of the
    processor, so its cap is that many times longer."""
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


# What the tests cost -------------------------------------------------------------------------------

COST = pytest.StashKey[tuple[float, float]]()  # processor and wall clock as a test begins
COSTLIEST = 25  # tests that the report names


def _processor_seconds() -> float:
    """Return user and system time of this process, of its children, and of those that these have
    waited for, such as the ranks that a fork server has started (Linux; elsewhere of the children
    that have ended).

    Processes without a waiting parent are not included: Slurm's jobs, Ray's daemons, the ranks of a
    launcher that was killed.
    """
    seconds = sum(os.times()[:4])
    for of_thread in Path("/proc/self/task").glob("*/children"):
        children = []
        with suppress(OSError):  # the thread has just ended
            children = of_thread.read_text().split()
        for child in children:
            with suppress(OSError):
                fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _machine() -> tuple[float, float]:
    """Processor seconds since the machine started, of all programs: worked and idle. Linux only."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0, 0.0
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    idle = ticks[3] + ticks[4]
    return sum(ticks[:8]) - idle, idle


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Put into the report of a test's teardown the cost of the whole test, fixtures that were made
    for it included, for the process that prints."""
    if call.when == "teardown":
        processor, clock = item.stash[COST]
        cost = (_processor_seconds() - processor, time.monotonic() - clock)
        item.user_properties.append(("cost", cost))
    return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[COST] = _machine()


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    """Report where the time goes: processor seconds per file, and the costliest tests. Printed by a
    run of several processes and for --durations."""
    if config.getoption("dist", "no") == "no" and config.getoption("durations") is None:
        return
    costs = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, cost in getattr(report, "user_properties", ()):
                if name == "cost":
                    costs[report.nodeid] = cost
    if not costs:
        return
    files = {}
    for test, cost in costs.items():
        files.setdefault(test.partition("::")[0], []).append(cost)
    write = terminalreporter.write_line
    terminalreporter.section("processor seconds")
    for title, rows in ("file", files), ("test", {test: [cost] for test, cost in costs.items()}):
        total = {name: [sum(column) for column in zip(*row)] for name, row in rows.items()}
        write(f"{'processor':>9} {'clock':>9} {'tests':>6}  {title}")
        for name in sorted(total, key=total.get, reverse=True)[
            : COSTLIEST if title == "test" else None
        ]:
            processor, clock = total[name]
            write(f"{processor:9.1f} {clock:9.1f} {len(rows[name]):6}  {name}")
    worked, idle = (now - then for now, then in zip(_machine(), config.stash[COST]))
    write(
        f"{sum(cost[0] for cost in costs.values()):9.1f} in all; the machine worked {worked:.0f} s and "
        f"was idle for {idle:.0f} s, of all its processors"
    )
