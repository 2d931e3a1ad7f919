"""Ranks that hang in many ways, for tests/test_hang.py. Ranks import it by name."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import data.loader
import data.workers
import train
from checkpoint.manager import CheckpointManager
from models.layers import AttentionCore, Block
from reliability import position
from tests import hosts, runs

ROUNDS = 3  # of collectives that all ranks run before one does something else
PATIENCE = timedelta(seconds=300)
FULL = 1 << 20  # bytes that no pipe takes


def begin(folder: Path, rank: int, size: int) -> None:
    """Become a rank with a shorter heartbeat interval than usual, because a test waits for it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    torch.set_num_threads(1)
    position.TICK, position.STANDS, position.AGAIN = 0.2, 0.6, 0.6
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )


def light_rank(folder: Path, rank: int, size: int, way: Callable[[int], None]) -> None:
    """Run a rank that has a position and runs collectives, and then hangs in that way."""
    begin(folder, rank, size)
    here = position.Position(folder / "logs" / f"rank-{rank:05d}.position", rank)
    here.open()
    here.begin("data")
    here.begin("forward")
    for _ in range(ROUNDS):
        one_round()
    way(rank)
    (folder / f"through-{rank}").touch()  # a way that does not hang is a mistake of the test


def one_round(leaves_out: bool = False) -> None:
    size = dist.get_world_size()
    part, whole = torch.ones(3), torch.ones(3 * size)
    dist.all_gather(list(whole.chunk(size)), part)
    if not leaves_out:
        dist.all_to_all_single(whole, whole.clone())
    dist.all_reduce(part)


def leaves_one_out(rank: int) -> None:
    one_round(leaves_out=rank == 2)
    dist.barrier()


def other_order(rank: int) -> None:
    calls = [lambda: dist.all_reduce(torch.ones(5)), lambda: dist.broadcast(torch.ones(5), 0)]
    for call in reversed(calls) if rank == 1 else calls:
        call()


def other_size(rank: int) -> None:
    """Send another number of elements. gloo sends both in parts of 1 MiB, so only their number
    differs; most other sizes make it end the process (SIGABRT), which is no hang."""
    dist.all_reduce(torch.ones((6 if rank == 3 else 4) << 20))
    dist.barrier()


def two_groups(rank: int) -> None:
    """Let ranks 0 and 1 take two groups in different order."""
    groups = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])
    for group in reversed(groups) if rank == 1 else groups:
        if rank in dist.get_process_group_ranks(group):
            dist.all_reduce(torch.ones(2), group=group)
    time.sleep(PATIENCE.total_seconds())


def cut_off(folder: Path, rank: int, size: int, names: list[str]) -> None:
    """Run a rank on one of two hosts (tests/hosts.py), whose collectives go on until the cable is
    cut."""
    hosts.enter(names[rank * len(names) // size])
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"

    def way(rank: int) -> None:
        (folder / f"at-{rank}").touch()
        while True:
            one_round()

    light_rank(folder, rank, size, way)


def send_over_a_cable(folder: Path, names: list[str], mapped: bool) -> None:
    """Write to the other host once the cable is cut, by a socket of IPv6 where `mapped`, and list
    the unanswered addresses, before and after, a line each."""
    hosts.enter(names[1])
    server = socket.create_server((hosts.ADDRESSES[1], 0))
    hosts.enter(names[0])
    connection = socket.socket(socket.AF_INET6 if mapped else socket.AF_INET)
    connection.connect(("::ffff:" * mapped + hosts.ADDRESSES[1], server.getsockname()[1]))
    with open(folder / "listed", "a") as listed:
        print(*position.unanswered(), file=listed, flush=True)
        (folder / "connected").touch()
        while not (folder / "cut").exists():
            time.sleep(0.05)
        connection.send(b"what is not acknowledged")
        while True:
            time.sleep(0.1)
            print(*position.unanswered(), file=listed, flush=True)


# One run that hangs in several ways, one after another ---------------------------------------------

# way: (the step in which it begins, the rank)
OF_A_RUN = {
    "sleeps in forward": (2, 1),
    "sleeps in backward": (3, 2),
    "sleeps in data": (4, 3),
    "sleeps in a save": (5, 0),
    "stopped": (7, 1),
    "a data worker loops": (8, 3),
    "a disk that blocks": (10, 2),
}
OPTIONS = (
    "--training.local_batch_size=1 --training.steps=12 --checkpoint.interval=5 --data.workers=1"
).split()


class Tour:
    """Patches this rank so that it hangs in each way, until the test removes the file `at-<way>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.step = 0
        self.calls = 0  # of attention in this step

    def due(self, way: str, step: int | None = None) -> bool:
        return OF_A_RUN[way] == (self.step if step is None else step, self.rank)

    def file(self, way: str) -> Path:
        return self.folder / f"at-{way}"

    def hold(self, way: str) -> None:
        self.file(way).touch()
        while self.file(way).exists():
            time.sleep(0.02)

    def patch(self) -> None:
        data.workers.AHEAD = 1  # so that a worker's step is near the trainer's
        real_step, real_attention, real_block = (
            train.train_step,
            AttentionCore.forward,
            Block.forward,
        )
        real_loader, real_rows = data.loader.loader, data.loader.Batches.__getitem__
        real_save, real_sync = CheckpointManager.save, os.fsync

        def step(*args):
            self.step += 1
            self.calls = 0
            if self.due("stopped"):
                self.file("stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return real_step(*args)

        def attention(*args):
            """The fourth is that of the second block, in the second microbatch."""
            out = real_attention(*args)
            self.calls += 1
            if self.due("sleeps in backward") and self.calls == 3:
                out.register_hook(lambda gradient: self.hold("sleeps in backward"))
            return out

        def block(*args):
            if self.due("sleeps in forward") and self.calls == 3:
                self.hold("sleeps in forward")
            return real_block(*args)

        def loader(*args) -> Iterator[dict]:
            for batch in real_loader(*args):
                if self.due("sleeps in data", self.step + 1):
                    self.hold("sleeps in data")
                yield batch

        def rows(batches, number: int) -> dict:
            """In the worker."""
            if self.due(way := "a data worker loops", number + 1):
                self.file(way).touch()
                while self.file(way).exists():
                    pass
            return real_rows(batches, number)

        def save(*args):
            if self.due("sleeps in a save"):
                self.hold("sleeps in a save")
            return real_save(*args)

        def sync(descriptor: int) -> None:
            """A write that does not return, in the thread that saves."""
            way = "a disk that blocks"
            if self.due(way) or self.due(way, self.step - 1):
                if not self.file(way).exists():
                    self.file(way).touch()
                    fill(self.folder / "disk")
            real_sync(descriptor)

        train.train_step, AttentionCore.forward, Block.forward = step, attention, block
        data.loader.loader, data.loader.Batches.__getitem__ = loader, rows
        CheckpointManager.save, os.fsync = save, sync


def fill(pipe: Path) -> None:
    """Write until the kernel takes no more, and wait there until the other side reads."""
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)
    os.write(descriptor, bytes(FULL))


def read_all(pipe: Path) -> None:
    """Read everything, so that `fill` returns."""
    descriptor = os.open(pipe, os.O_RDWR)
    left = FULL
    while left:
        left -= len(os.read(descriptor, left))
    os.close(descriptor)


def toured(folder: Path, options: list[str]) -> tuple[int, str]:
    """Start a run on this rank that hangs in each way of OF_A_RUN."""
    Tour(folder).patch()
    return runs.run([*options, *OPTIONS], folder)


def tour_rank(folder: Path, rank: int, size: int, options: list[str]) -> None:
    begin(folder, rank, size)
    code, said = toured(folder, options)
    (folder / f"through-{rank}").write_text(f"{code} {said}")


def leave_out_a_sum() -> None:
    """Patch a run of train.py so that rank 1 leaves a sum over ranks out in its third step."""
    real, steps = train.clip_grad_norm, []

    def clip(*args):
        steps.append(1)
        return torch.ones(()) if dist.get_rank() == 1 and len(steps) == 3 else real(*args)

    train.clip_grad_norm = clip
