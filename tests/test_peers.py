"""Copies of the state in the memory of hosts (checkpoint/peers.py).

The hosts are launchers on this machine, each with a folder of its own for its memory. A host is lost
when its launcher and its ranks are killed and that folder is removed.
"""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoint import copies, peers, verify
from checkpoint.peers import FileTransfer, HostCopy, Offer
from configs.schema import InputError
from parallelisms.mesh import World
from reliability.guard import Diverged
from tests.checkpoints import build, fill, heard, on_a_host_of_its_own, open_manager, save_filled
from tests.faults import WRAPPER
from tests.launched import Launcher, ended
from tests.ranks import run_ranks, wait_until
from tests.runs import as_typed, free_port, run, series, tiny_run

pytestmark = pytest.mark.cap(240)

# What the hosts hold, and who sends what: functions of numbers alone


def offers(*hosts: dict[str, tuple[str, list[int]]], files: int = 3) -> list[dict[str, Offer]]:
    return [
        {name: Offer(manifest, files, tuple(held)) for name, (manifest, held) in host.items()}
        for host in hosts
    ]


NEW, OLD = "step-00000020", "step-00000010"


def test_a_copy_is_whole_if_the_hosts_that_are_left_hold_all_of_its_files():
    found, said = peers.whole(
        offers({NEW: ("a", [0, 2]), OLD: ("b", [0, 2])}, {}, {NEW: ("a", [2, 1]), OLD: ("b", [2])})
    )
    assert found == [HostCopy(NEW, "a", (0, 2), ((0,), (2,), (0, 2)))]
    assert said == [f"{OLD}: no host has the files of ranks 1"]


def test_a_host_that_lies_is_left_out():
    true = ("a", [0, 1, 2])
    found, said = peers.whole(offers({NEW: true}, {NEW: ("lie", [0, 1, 2])}, {NEW: true}))
    assert [copy.holders for copy in found] == [((0, 2),) * 3]
    assert "hosts [1]" in said[0]
    found, said = peers.whole(offers({NEW: true}, {NEW: ("lie", [0, 1, 2])}))
    assert not found and "other manifests" in said[0]


def test_files_come_from_hosts_that_have_them_and_go_where_they_are_wanted():
    copy = HostCopy(NEW, "a", (0, 2), ((0,), (0, 2), (2,), (2,)))
    wanted = [[0], [1], [2], [2, 3], [0], [3]]  # of three hosts with two ranks each
    found = peers.transfers(copy, wanted, 2)
    assert found == [FileTransfer(2, 4, 2), FileTransfer(3, 5, 3), FileTransfer(0, 0, 4)]


def test_copies_go_to_as_many_other_hosts_for_every_stride():
    for hosts, stride in itertools.product(range(2, 9), range(1, 12)):
        for number in range(1, hosts):
            found = peers.shifts(number, stride, hosts)
            assert len(set(found)) == number and set(found) <= set(range(1, hosts))
    assert peers.shifts(2, 4, 16) == [4, 8]  # racks of four hosts


def test_the_bytes_of_a_host_are_those_of_two_copies_of_all_that_it_holds():
    sizes = [1, 2, 4, 8, 16, 32]
    here = World(rank=3, size=6, local_rank=1, local_size=2)
    assert peers.bytes_of_host(sizes, here, [1]) == 2 * (4 + 8 + 1 + 2)


# Two hosts whose ranks do nothing but copy


def open_copies(place: Path, **options: object) -> tuple:
    """Return a job and its checkpoints, on a host of its own, and what a load says."""
    on_a_host_of_its_own(place, int(os.environ["RANK"]))
    job = build("--training.global_batch_size=12")
    checkpoints = open_manager(job, place / "checkpoints", peers=1, **options)
    return job, checkpoints, checkpoints.load(job.model, job.optimizer)


def copy(job, checkpoints, *steps: int) -> None:
    for step in steps:
        fill(job, step)
        checkpoints.copy_to_peers(step, job.model, job.optimizer, {"step": step})
        checkpoints.wait_for_copy()
        checkpoints._finish()


def died(checkpoints) -> None:
    """Do what the end of a process does."""
    checkpoints.thread.shutdown()
    checkpoints.place.release()
    dist.barrier()


def copies_of(checkpoints) -> list[str]:
    dist.barrier()
    return verify.published(checkpoints.peers.folder)


def misfortunes(place: Path) -> None:
    """Copy through what may happen to a host's memory, and to a run that has copies."""
    rank = dist.get_rank()
    job, checkpoints, progress = open_copies(place)
    assert progress is None
    copy(job, checkpoints, 5)
    shutil.rmtree(checkpoints.peers.folder)  # as systemd does when a user logs out
    dist.barrier()
    copy(job, checkpoints, 10, 15)
    assert copies_of(checkpoints) == [verify.step_name(step, 0) for step in (15, 10)]

    # one host has no room for the manifest: no host has the copy
    with heard() as words, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "write_bytes", lambda *_: os.write(-1, b""))
        copy(job, checkpoints, 20)
    assert copies_of(checkpoints) == [verify.step_name(15, 0)]
    assert rank or "step 20 could not be copied" in words[0]
    died(checkpoints)

    # a start that ends before it has saved anything leaves the copy that it has gone on from
    no_room = pytest.MonkeyPatch()
    no_room.setattr(peers, "free_host_memory", lambda: -(10**9))
    with heard() as words:  # it had room before, so it goes on
        job, checkpoints, progress = open_copies(place)
    assert progress == {"step": 15}
    assert rank or "has room for" in words[0]
    checkpoints.close()
    assert copies_of(checkpoints) == [verify.step_name(15, 0)]

    # parts of a copy are removed by the start that has to do its steps anew
    for path in checkpoints.peers.folder.glob("*/rank-00001*"):
        path.unlink()
    dist.barrier()
    with pytest.raises(InputError, match=r"state, \S+ MB, and \S+ has room for"):
        open_copies(place)
    no_room.undo()
    job, checkpoints, progress = open_copies(place)
    assert progress is None and not copies_of(checkpoints)

    # what has been found to be corrupt is in no copy
    copy(job, checkpoints, 2)
    assert copies_of(checkpoints) == [verify.step_name(2, 0)]
    checkpoints.__exit__(Diverged)
    assert not checkpoints.peers.folder.exists()

    # the last save waits for the copy before it, and is not copied itself
    fill(job, 3)
    checkpoints.copy_to_peers(3, job.model, job.optimizer, {"step": 3})
    checkpoints.wait_for_copy()
    fill(job, 4)
    checkpoints.save(4, job.model, job.optimizer, {"step": 4}, last=True)
    checkpoints._finish()
    assert copies_of(checkpoints) == [verify.step_name(3, 0)]
    checkpoints.close()
    dist.barrier()
    assert not checkpoints.peers.folder.exists()

    # a start says where its state comes from, also where memory and disk have the same step
    logging.getLogger("plumbline").setLevel(logging.INFO)
    with heard() as words:
        job, checkpoints, progress = open_copies(place)
    assert progress == {"step": 4} and Path(checkpoints.loaded).parent == place / "checkpoints"
    assert rank or words == [
        f"step 4 comes from {place / 'checkpoints'}, in {words[0].split()[-2]} s"
    ]
    save_filled(job, checkpoints, 5)
    checkpoints.wait_for_copy()
    checkpoints._finish()
    died(checkpoints)
    with heard() as words:
        job, checkpoints, progress = open_copies(place)
    assert progress == {"step": 5} and Path(checkpoints.loaded).parent == checkpoints.peers.folder
    assert rank or "step 5 comes from the memory of the hosts" in words[0]
    died(checkpoints)


def test_copies_survive_the_misfortunes_of_a_run_and_are_removed_when_it_is_saved(tmp_path):
    for rank in range(2):
        (tmp_path / f"memory-{rank}").mkdir()
    run_ranks(2, misfortunes, tmp_path)


# Real runs


class Cluster:
    """Hosts with a rank each, their memories, and a tiny run."""

    def __init__(self, place: Path, hosts: int, *options: str, copied_to: int = 1) -> None:
        self.place = place
        self.hosts = hosts
        self.folder = place / "run"
        self.script = place / "wrapper.py"
        self.script.write_text(WRAPPER)
        often = [f"--checkpoint.peers={copied_to}", "--checkpoint.peer_interval=2"]
        # a step waits for its copy: beside training one is left out while another is under way
        often += ["--checkpoint.async_save=false"]
        data = place / "data"
        data.mkdir()
        batch = ["--training.global_batch_size=12", "--training.local_batch_size=1"]
        length = ["--training.steps=12", "--checkpoint.interval=100"]
        self.plain = as_typed([*tiny_run(data), *batch, *length, *options])
        self.options = [*self.plain, *often]
        self.port = free_port()
        self.started = itertools.count()
        self.fault = ""
        for host in range(hosts):
            self.memory(host).mkdir()

    def memory(self, host: int) -> Path:
        return self.place / f"memory-{host}"

    def copied(self, step: int, rank: int, until: int, starts: int = 1) -> str:
        """Return the fault by which a rank waits, in step `until`, for all hosts' copies of
        `step`."""
        waits = [
            f"{rank} wait:{self.memory(host)}/*/step-{step:08d} {until} {starts}"
            for host in range(self.hosts)
        ]
        return "; ".join(waits)

    def start(self, host: int, fault: str, *flags: str) -> Launcher:
        arguments = [
            "--nproc-per-node=1",
            f"--nnodes={self.hosts}",
            f"--node-rank={host}",
            "--master-addr=127.0.0.1",
            f"--master-port={self.port}",
            "--max-restarts=2",
            *flags,
            self.script,
            f"--run.folder={self.folder}",
            *self.options,
        ]
        said = self.place / f"said-{host}-{next(self.started)}"
        memory = str(self.memory(host))
        return Launcher(arguments, said, FAULT=fault, PLUMBLINE_HOST_MEMORY=memory)

    def lose(self, host: int) -> None:
        """Lose the memory of a host, and get another host in its place."""
        shutil.rmtree(self.memory(host))
        self.memory(host).mkdir()

    def losses(self) -> dict[int, float]:
        return series(self.folder)

    def undisturbed(self) -> dict[int, float]:
        folder = self.place / "whole"
        folder.mkdir()
        assert run_ranks(self.hosts, run, self.plain, folder) == [(0, "")] * self.hosts
        return series(folder)

    def log(self) -> str:
        """Return what the ranks have logged."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("logs/*.log")))

    def resumed(self) -> list[int]:
        log = (self.folder / "logs" / "rank-00000.log").read_text()
        return [int(step) for step in re.findall(r"resumed after step (\d+)", log)]


def test_after_a_kill_the_run_goes_on_from_the_memory_of_its_hosts(tmp_path):
    """There is no checkpoint yet. The copies are gone when the run has ended."""
    cluster = Cluster(tmp_path, 2)
    fault = f"{cluster.copied(6, 1, 8)}; 1 SIGKILL 8 1"
    codes, said = ended([cluster.start(host, fault) for host in range(2)])
    assert codes == [0, 0], said
    assert cluster.resumed() == [6], said
    assert cluster.losses() == cluster.undisturbed()
    assert not list(tmp_path.glob("memory-*/*"))
    lines = copies.recorded(cluster.folder)
    assert [line["step"] for line in lines if "bytes" in line] == [2, 4, 6, 8, 10]
    new, start = [line for line in lines if "source" in line]
    assert (new["source"], new["held"]) == ("new", {})
    assert (start["source"], start["step"], start["sent"]) == ("memory", 6, [])
    assert start["held"] == {f"step-{step:08d}": [2, 2] for step in (4, 6)}


def until(true: Callable[[], bool], running: list[Launcher]) -> None:
    is_over = lambda: any(launcher.poll() is not None for launcher in running)  # noqa: E731
    wait_until(true, 150, lambda: str(ended(running, 1)), over=is_over)


def lost_hosts(cluster: Cluster, lost: list[int], step: int, fault: str) -> tuple[list[int], str]:
    """Run, lose these hosts in this step of the first start, and put others in their places."""
    last = f"{lost[-1]} hold:lost {step} 1"
    running = [cluster.start(host, f"{fault}; {last}") for host in range(cluster.hosts)]
    until((cluster.folder / "lost").exists, running)
    for host in lost:  # before one of them has heard of the end of another
        running[host].process.kill()
    for host in lost:
        running[host].kill()
        cluster.lose(host)
    for host in lost:
        running[host] = cluster.start(host, fault)
    return ended(running)


@pytest.mark.slow
def test_another_host_gets_the_part_of_a_lost_one_from_its_peers(tmp_path):
    """The store of the run is a host's disk here, which has no checkpoint: all comes from memory."""
    cluster = Cluster(tmp_path, 3)
    codes, said = lost_hosts(cluster, [1], 9, cluster.copied(8, 1, 9))
    assert codes == [0, 0, 0], said
    assert cluster.resumed() == [8], said
    assert cluster.losses() == cluster.undisturbed()


@pytest.mark.slow
def test_adapters_come_from_the_only_host_that_is_left(tmp_path):
    """Two of three hosts are lost at once, and the third has a copy of both."""
    base = f"--checkpoint.load_path={tmp_path / 'base'}"
    adapters = [base, "--lora.rank=2", '--lora.targets=["wq", "w2"]', "--optimizer.lr=0.01"]
    cluster = Cluster(tmp_path, 3, *adapters, copied_to=2)
    (tmp_path / "base").mkdir()
    plain = [option for option in cluster.plain if option not in adapters]
    assert run_ranks(1, run, plain, tmp_path / "base") == [(0, "")]
    codes, said = lost_hosts(cluster, [1, 2], 9, cluster.copied(8, 0, 9))
    assert codes == [0, 0, 0], said
    assert cluster.resumed() == [8], said
    start = [line for line in copies.recorded(cluster.folder) if "source" in line][-1]
    assert start["held"]["step-00000008"] == [3, 0, 0]
    assert [row[:3] for row in start["sent"]] == [[0, 1, 3], [0, 2, 3]]
    assert cluster.losses() == cluster.undisturbed()


@pytest.mark.slow
def test_what_the_memories_do_not_hold_together_comes_from_the_disk(tmp_path):
    """Two hosts are lost, one of which had the copy of the other."""
    cluster = Cluster(tmp_path, 3, "--checkpoint.interval=5")
    fault = f"0 wait:checkpoints/step-00000005 9 1; {cluster.copied(8, 0, 9)}"
    codes, said = lost_hosts(cluster, [1, 2], 9, fault)
    assert codes == [0, 0, 0], said
    assert cluster.resumed() == [5], said
    assert "step-00000008: no host has the files of ranks 1" in cluster.log()
    assert cluster.losses() == cluster.undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["a bit", "the manifest", "a file"])
def test_a_damaged_copy_is_not_used(tmp_path, damaged):
    """The copy before it is. The manifest of one of two hosts, so none is that of most."""
    cluster = Cluster(tmp_path, 2)
    running = [
        cluster.start(host, f"{cluster.copied(8, 1, 9)}; 1 hold:held 9 1; 1 SIGKILL 9 1")
        for host in range(2)
    ]
    until(lambda: (cluster.folder / "held").exists(), running)
    [copy] = cluster.memory(0).glob("*/step-00000008")
    if damaged == "a bit":
        for memory in range(2):  # all that hold it
            [file] = cluster.memory(memory).glob("*/step-00000008/rank-00000.safetensors")
            data = bytearray(file.read_bytes())
            data[-9] ^= 4
            file.write_bytes(data)
    elif damaged == "the manifest":
        text = (copy / "manifest.json").read_text()
        (copy / "manifest.json").write_text(text.replace('"step":8', '"step":9'))
    else:
        for memory in range(2):
            [file] = cluster.memory(memory).glob("*/step-00000008/rank-00001.safetensors")
            file.unlink()
    (cluster.folder / "held").unlink()
    codes, said = ended(running)
    assert codes == [0, 0], said
    # the other host has the true manifest and all files
    assert cluster.resumed() == [8 if damaged == "the manifest" else 6], said
    assert ("hash" in cluster.log()) == (damaged != "a file")
    assert cluster.losses() == cluster.undisturbed()
