"""Two hosts for real: two network namespaces, each with its own loopback, joined by one cable (a
veth pair).

    python -m pytest tests/test_two_hosts.py -m slow          about 4 minutes on two cores; needs root and iproute2

A node of two ranks runs in each, started by run_train.sh as on a cluster: tensor parallel inside a
host, FSDP between them. The cable is cut, slowed down and put back, and a host dies. What is shared
is what a cluster shares: the run folder.
"""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import (
    ADDRESSES,
    Hosts,
    hosts,  # noqa: F401  a fixture
)
from tests.ranks import NEIGHBOURS
from tests.runs import in_mid_run, losses_of_four, series, tiny_run

ROOT = Path(__file__).resolve().parent.parent
# the tests interfere after step 12, and a step of four ranks takes over a second of processor time
STEPS = 30
# Seconds; the grace is for a machine with other things to do: it takes a few. Beside other tests a
# step, too, takes longer.
STEP_TIMEOUT, GRACE = 12 * NEIGHBOURS, 60
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny run of 2 x 2 over a small corpus, prepared once."""
    return [
        *tiny_run(tmp_path_factory.mktemp("data")),
        f"--training.steps={STEPS}",
        "--parallelism.tensor_parallel=2",
        "--parallelism.data_parallel_shard=2",
        f"--run.step_timeout_seconds={STEP_TIMEOUT}",
        f"--run.init_timeout_seconds={60 * NEIGHBOURS}",
    ]


@pytest.fixture(scope="module")
def unbroken(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same mesh on one host, which nobody disturbs."""
    return losses_of_four(tmp_path_factory.mktemp("one") / "run", options)


def until(true: Callable[[], bool], seconds: float, complaint: Callable[[], str]) -> float:
    """Wait, beside other tests for longer. Returns the seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds * NEIGHBOURS, complaint()
        time.sleep(0.01)
    return time.monotonic() - began


def words(said: Path) -> str:
    return "\n".join(
        f"--- node {node}\n" + Path(f"{said}-{node}").read_text(errors="replace")
        for node in range(2)
    )


def trained(running: list[subprocess.Popen], folder: Path, said: Path, step: int = 12) -> None:
    """Until both hosts are in mid-run."""
    until(lambda: in_mid_run(folder, step), 120, lambda: words(said))
    assert all(process.poll() is None for process in running), words(said)


def ended(running: list[subprocess.Popen], seconds: float, said: Path) -> tuple[list[int], float]:
    """The exit codes, and how long the last took to end."""
    took = until(
        lambda: all(p.poll() is not None for p in running),
        seconds,
        lambda: "not ended in time\n" + words(said),
    )
    return [process.returncode for process in running], took


def whole_run(hosts: Hosts, options: list[str], said: Path) -> str:
    codes, _ = ended(hosts.start(options, said), 150, said)
    assert codes == [0, 0], words(said)
    return words(said)


@pytest.mark.cap(400)
def test_two_hosts_train_as_one(
    hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    """... and node 0 listens on its own address alone."""
    here = [*options, f"--run.folder={tmp_path / 'run'}"]
    running, said = hosts.start(here, tmp_path / "said"), tmp_path / "said"
    trained(running, tmp_path / "run", said)
    for name, address in zip(hosts.names, ADDRESSES, strict=True):
        shown = subprocess.run(
            ["ip", "netns", "exec", name, "ss", "-Hltn"], capture_output=True, text=True
        ).stdout
        listening = {line.split()[3].rpartition(":")[0] for line in shown.splitlines()}
        assert listening == {address}, shown
    assert ended(running, 150, said)[0] == [0, 0], words(said)
    assert series(tmp_path / "run") == unbroken, "bitwise: it is the same mesh"


@pytest.mark.cap(400)
def test_a_cut_longer_than_the_time_out_ends_both_hosts_and_the_run_resumes(
    hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    here, said = [*options, f"--run.folder={tmp_path / 'run'}"], tmp_path / "said"
    running = hosts.start(here, said)
    trained(running, tmp_path / "run", said)
    hosts.cable("down")
    try:
        codes, seconds = ended(running, STEP_TIMEOUT + GRACE, said)
        print(
            f"both hosts ended {seconds:.1f} s after the cut, with a time-out of {STEP_TIMEOUT} s "
            f"and codes {codes}"
        )
        assert not {0, 2, 75} & set(codes), words(said)
        assert not hosts.survivors()
        for node in range(2):
            text = Path(f"{said}-{node}").read_text()
            assert re.search(r"launch: rank \d on ", text) and re.search(
                r"[Tt]imed? ?-?out", text
            ), text
    finally:
        hosts.cable("up")
    assert "resumed after step" in whole_run(hosts, here, tmp_path / "again")
    assert series(tmp_path / "run") == unbroken


@pytest.mark.cap(400)
def test_after_a_cut_both_hosts_start_again_by_themselves(
    hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    """RESTARTS=1: nobody starts anything, and node 1 finds the new store of node 0 when the cable
    is back."""
    here, said = [*options, f"--run.folder={tmp_path / 'run'}"], tmp_path / "said"
    running = hosts.start(here, said, RESTARTS="1")
    trained(running, tmp_path / "run", said)
    hosts.cable("down")
    try:
        until(
            lambda: words(said).count("launch: restart 1 of 1") == 2,
            STEP_TIMEOUT + GRACE,
            lambda: words(said),
        )
    finally:
        hosts.cable("up")
    assert ended(running, 150, said)[0] == [0, 0], words(said)
    assert "resumed after step" in words(said) and series(tmp_path / "run") == unbroken


@pytest.mark.cap(400)
def test_a_cut_of_eight_seconds_costs_eight_seconds(
    hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    here, said = (
        [
            *options,
            f"--run.folder={tmp_path / 'run'}",
            f"--run.step_timeout_seconds={60 * NEIGHBOURS}",
        ],
        tmp_path / "said",
    )
    running = hosts.start(here, said)
    trained(running, tmp_path / "run", said)
    hosts.cable("down")
    time.sleep(8)
    before = len(series(tmp_path / "run"))
    hosts.cable("up")
    assert before < STEPS, "it waited"
    assert ended(running, 150, said)[0] == [0, 0], words(said)
    assert series(tmp_path / "run") == unbroken


@pytest.mark.cap(400)
@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_dies_ends_the_other_and_the_run_resumes(
    node: int, hosts: Hosts, options: list[str], unbroken: dict, tmp_path: Path
) -> None:
    """Node 0 serves the store and holds the lease of the run folder."""
    here, said = [*options, f"--run.folder={tmp_path / 'run'}"], tmp_path / "said"
    running = hosts.start(here, said)
    trained(running, tmp_path / "run", said)
    hosts.kill(node)
    codes, seconds = ended(running, STEP_TIMEOUT + GRACE, said)
    print(
        f"the other host ended {seconds:.1f} s after node {node} died, with code {codes[1 - node]}"
    )
    assert codes[1 - node] not in (0, 2, 75), words(said)
    assert not hosts.survivors()
    assert "resumed after step" in whole_run(hosts, here, tmp_path / "again")
    assert series(tmp_path / "run") == unbroken


@pytest.mark.cap(400)
def test_the_step_time_over_a_slower_cable(
    hosts: Hosts, options: list[str], tmp_path: Path
) -> None:
    """Prints (-s) the time of a step for each speed; the losses must not depend on it."""
    larger = (
        "--model.dim=128 --model.hidden_dim=512 --model.n_layers=4 --model.head_dim=32 "
        "--training.steps=5"
    ).split()
    losses = []
    for rate in ("10gbit", "100mbit"):
        hosts.limit(rate)
        folder = tmp_path / rate
        whole_run(
            hosts,
            [*options, *larger, "--checkpoint.interval=0", f"--run.folder={folder}"],
            tmp_path / f"said-{rate}",
        )
        seconds = sorted(series(folder, "step_seconds").values())
        print(f"{rate}: median step {seconds[len(seconds) // 2]:.3f} s, fastest {seconds[0]:.3f} s")
        losses.append(series(folder))
    for name in hosts.names:
        subprocess.run(
            ["tc", "-n", name, "qdisc", "delete", "dev", "cable", "root"],
            check=True,
            capture_output=True,
        )
    assert len(losses[0]) == 5 and losses[0] == losses[1]
