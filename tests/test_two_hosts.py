"""Two hosts for real: two network namespaces, each with its own loopback, joined by one cable (a
veth pair).

    python -m pytest tests/test_two_hosts.py -m slow          needs root and iproute2

A node of two ranks runs in each: tensor parallel inside a host, FSDP between them. The cable is cut,
slowed down and put back, and a host dies. What is shared is what a cluster shares: the run folder.
"""

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults import WRAPPER
from tests.hosts import (
    ADDRESSES,
    Hosts,
    hosts,  # noqa: F401  a fixture
)
from tests.launched import Launcher
from tests.ranks import WORKERS, wait_until
from tests.runs import losses_of_four, series, tiny_run

# Seconds; the grace is for a machine with other things to do: it takes a few. With other tests a
# step, too, takes longer.
STEP_TIMEOUT, GRACE = 12 * WORKERS, 60
pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a tiny run of 2 x 2 over a small corpus, prepared once."""
    return [
        *tiny_run(tmp_path_factory.mktemp("data")),
        "--parallelism.tensor_parallel=2",
        "--parallelism.data_parallel_shard=2",
        f"--run.step_timeout_seconds={STEP_TIMEOUT}",
        f"--run.init_timeout_seconds={60 * WORKERS}",
    ]


@pytest.fixture(scope="module")
def unbroken(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the same mesh on one undisturbed host."""
    return losses_of_four(tmp_path_factory.mktemp("one") / "run", options)


def words(said: Path) -> str:
    return "\n".join(
        f"--- node {node}\n" + Path(f"{said}-{node}").read_text(errors="replace")
        for node in range(2)
    )


def ended(running: list, seconds: float, said: Path) -> list[int]:
    """Return the exit codes."""
    wait_until(
        lambda: all(p.poll() is not None for p in running),
        seconds,
        lambda: "not ended in time\n" + words(said),
    )
    return [process.returncode for process in running]


def resumed(folder: Path) -> int:
    """Return the step after which the newest start that has resumed went on."""
    text = (folder / "logs" / "rank-00000.log").read_text()
    return int(re.findall(r"resumed after step (\d+)", text)[-1])


# Rank 0 waits in these steps, of the starts up to the last number, until the test has done
# something: its file is then removed. In steps 8 and 12 a checkpoint is published before.
HOLDS = (
    "0 hold:held 6 1; 0 wait:checkpoints/step-00000005 8 1; 0 hold:held 8 1; 0 hold:held 9 2; "
    "0 wait:checkpoints/step-00000010 12 3; 0 hold:held 12 3"
)


@pytest.mark.cap(900)
def test_two_hosts_train_as_one_through_cuts_and_the_death_of_either(
    hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    """One run. Node 0 listens on its own address alone. A cut of four seconds costs its time. After
    one that is longer than the time-out both hosts start again by themselves, and node 1 finds the
    new store of node 0. When either host dies, the other ends: node 0 serves the store and holds
    the lease of the run folder. The next start resumes. A slower cable changes no number."""
    folder, held = tmp_path / "run", tmp_path / "run" / "held"
    script = tmp_path / "wrapper.py"
    script.write_text(WRAPPER)
    here = [*options, f"--run.folder={folder}"]

    def start(said: Path, *flags: str) -> list[Launcher]:
        return hosts.launch(script, here, said, *flags, FAULT=HOLDS)

    def until_held(running: list[Launcher], said: Path) -> None:
        def held_or_ended() -> bool:
            return held.exists() or any(p.poll() is not None for p in running)

        wait_until(held_or_ended, 120, lambda: words(said))
        assert held.exists(), words(said)

    said = tmp_path / "cuts"
    running = start(said, "--max-restarts=1")
    until_held(running, said)  # in step 6
    for name, address in zip(hosts.names, ADDRESSES, strict=True):
        shown = subprocess.run(
            ["ip", "netns", "exec", name, "ss", "-Hltn"], capture_output=True, text=True
        ).stdout
        listening = {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}
        assert listening == {address}, shown
    hosts.cable("down")
    held.unlink()
    time.sleep(4)
    waited_in = len(series(folder)) + 1
    hosts.cable("up")
    assert waited_in == 6, words(said)
    until_held(running, said)  # in step 8
    assert "launch:" not in words(said), "the cut cost its time and no more"

    hosts.cable("down")
    held.unlink()
    try:
        wait_until(
            lambda: words(said).count("launch: restart 1 of 1") == 2,
            STEP_TIMEOUT + GRACE,
            lambda: words(said),
        )
    finally:
        hosts.cable("up")
    for node in range(2):
        text = Path(f"{said}-{node}").read_text()
        assert re.search(r"launch: rank \d on ", text), text
        assert re.search(r"[Tt]imed? ?-?out", text), text

    until_held(running, said)  # in step 9 of the second start
    for dies, step in (1, 9), (0, 12):
        if dies == 0:
            said = tmp_path / "again"
            running = start(said)
            until_held(running, said)
        assert resumed(folder) == 5
        assert series(folder).items() <= unbroken.items() and max(series(folder)) == step - 1
        hosts.kill(dies)
        held.unlink()
        codes = ended(running, STEP_TIMEOUT + GRACE, said)
        assert codes[1 - dies] not in (0, 2, 75), words(said)
        assert not hosts.survivors()

    said = tmp_path / "last"
    hosts.limit("100mbit")
    try:
        assert ended(start(said), 150, said) == [0, 0], words(said)
    finally:
        hosts.unlimited()
    assert resumed(folder) == 10
    assert series(folder) == unbroken, "bitwise: it is the same mesh"
