"""Copies in the memory of hosts under kill -9: seeded trials, each with its oracle.

    python -m pytest tests/test_torture_peers.py -m torture           exhaustive: 500 trials

Ranks do nothing but copy, as fast as they can; the state of step s is filled with s. Some are killed
at a random moment, and some of these hosts lose their memory. A trial takes some seconds; its seed
is in its name.
"""

import os
import random
import shutil
import tempfile
import time
from itertools import count
from pathlib import Path

import pytest

from checkpoint import peers
from tests import fork_server, ranks
from tests.checkpoints import build, fill, heard, on_a_host_of_its_own, open_manager, values
from tests.ranks import run_ranks

FIRST = 1  # the step that is on the disk
HOSTS = (2, 3, 4)


def options(number: int) -> dict:
    return {"peers": number, "peer_interval": 1}


def save_first(folder: Path) -> None:
    job = build("--training.global_batch_size=12")
    checkpoints = open_manager(job, folder)
    checkpoints.load(job.model, job.optimizer)
    fill(job, FIRST)
    checkpoints.save(FIRST, job.model, job.optimizer, {"step": FIRST}, last=True)
    checkpoints.close()


def copy_for_ever(place: Path, folder: Path, number: int) -> None:
    """Copy one step after the other, and write down those whose copies are made."""
    rank = int(os.environ["RANK"])
    on_a_host_of_its_own(place, rank)
    job = build("--training.global_batch_size=12")
    checkpoints = open_manager(job, folder, **options(number))
    start = checkpoints.load(job.model, job.optimizer)["step"]
    with open(place / f"made-{rank}", "a", buffering=1) as made:
        for step in count(start + 1):
            fill(job, step)
            checkpoints.copy_to_peers(step, job.model, job.optimizer, {"step": step})
            checkpoints.wait_for_copy()
            checkpoints._finish()
            made.write(f"{step}\n")


def resumed(place: Path, folder: Path, number: int) -> tuple[int, list[float], list[str]]:
    """Return the step and the values of the state of a new start, and what it said."""
    on_a_host_of_its_own(place, int(os.environ["RANK"]))
    job = build("--training.global_batch_size=12")
    fill(job, -1)
    with heard() as words:
        checkpoints = open_manager(job, folder, **options(number))
        step = checkpoints.load(job.model, job.optimizer)["step"]
        checkpoints.thread.shutdown()
        checkpoints.place.release()
    return step, values(job), words


def killed(
    place: Path, folder: Path, number: int, hosts: int, victims: list[int], rng: random.Random
) -> int:
    """Kill -9 these ranks at a random moment after the first copy, and a little later all others, as
    the launcher does. Returns the newest step of which any rank has seen that its copy is made."""
    at, until_the_launcher = rng.uniform(0, 0.5), rng.uniform(0, 0.3)
    running = []
    met = Path(tempfile.mkdtemp(dir=place))  # where the ranks meet
    try:
        for rank in range(hosts):
            arguments = (met, rank, hosts, copy_for_ever, (place, folder, number))
            running.append(fork_server.start(ranks.child, *arguments))
        ranks.wait_until(
            lambda: all(made(place, rank) for rank in range(hosts)),
            every=0.005,
            over=lambda: any(process.exitcode is not None for process in running),
        )
        time.sleep(at)
        for victim in victims:
            running[victim].kill()
        time.sleep(until_the_launcher)
    finally:
        for process in running:
            fork_server.end(process)
    return max(step for rank in range(hosts) for step in made(place, rank))


def made(place: Path, rank: int) -> list[int]:
    path = place / f"made-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_lost(lost: list[int], number: int, hosts: int) -> bool:
    """Return whether the file of some host was on lost hosts alone: its own, and its peers'."""
    ahead = [0, *peers.shifts(number, 1, hosts)]
    return any(all((host + shift) % hosts in lost for shift in ahead) for host in range(hosts))


def trial(place: Path, seed: int) -> None:
    """Two losses, one after the other. Each time the run goes on from the newest copy that any rank
    saw made, or a newer one; where the hosts have lost it, from the disk."""
    rng = random.Random(seed)
    hosts = rng.choice(HOSTS)
    number = rng.randint(1, min(2, hosts - 1))
    folder = place / "checkpoints"
    for rank in range(hosts):
        (place / f"memory-{rank}").mkdir(parents=True)
    run_ranks(hosts, save_first, folder)
    for _ in range(2):
        victims = rng.sample(range(hosts), rng.randint(1, min(2, hosts)))
        newest = killed(place, folder, number, hosts, victims, rng)
        lost = [victim for victim in victims if rng.random() < 0.6]
        for host in lost:
            shutil.rmtree(place / f"memory-{host}")
            (place / f"memory-{host}").mkdir()
        found = run_ranks(hosts, resumed, place, folder, number)
        assert len({step for step, *_ in found}) == 1, found
        for step, state, words in found:
            assert state == [step], (seed, found)  # whole, and of one step
            if is_lost(lost, number, hosts):
                assert step == FIRST, (seed, lost, newest, words)
            else:
                assert newest <= step <= newest + 1, (seed, lost, newest, step, words)
        for rank in range(hosts):
            (place / f"made-{rank}").unlink()


QUICK = (2, 7)  # these notice a copy that is removed too soon, and one that is not whole
MARKS = {range(12): pytest.mark.torture, range(12, 500): pytest.mark.exhaustive}
TRIALS = [*QUICK]
for numbers, mark in MARKS.items():
    TRIALS += [pytest.param(seed, marks=mark) for seed in numbers if seed not in QUICK]


@pytest.mark.cap(120)
@pytest.mark.parametrize("seed", TRIALS)
def test_a_run_goes_on_from_the_newest_copy_that_its_hosts_hold_together(tmp_path, seed):
    trial(tmp_path, seed)
