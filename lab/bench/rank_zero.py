"""Measure the cost of a phase of a run for rank 0 of many ranks that do not exist: the collectives,
and the processor time of Python.

The run's own code runs on PyTorch's fake process group (`tools/plan/trace.py::pretend`). Every
other rank is taken to send what rank 0 sends.
"""

import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

from reliability.collectives import Watch, group_of
from tools.plan.device import load_device
from tools.plan.estimate import Ring

RANKS_PER_HOST = 8
# a step's collectives of at most that many bytes are the loss's, the norm's and the like
CONTROL_BYTES = 1024
DEVICE = "h100"


@dataclass(frozen=True)
class Collective:
    """Collective call on rank 0. bytes: what each rank gives; for a broadcast, what each receives."""

    kind: str
    ranks: int
    bytes: int


# kind -> (messages that rank 0 sends and receives, their bytes, sequential hops), of n ranks and b
# bytes. gloo's all-reduce and all-gather are rings, its broadcast is a binomial tree (allreduce.cc,
# allgather.cc, broadcast.cc).
ALGORITHMS: dict[str, Callable[[int, int], tuple[int, float, int]]] = {
    "all_reduce": lambda n, b: (4 * (n - 1), 4 * b * (n - 1) / n, 2 * (n - 1)),
    "all_gather": lambda n, b: (2 * (n - 1), 2 * b * (n - 1), n - 1),
    "broadcast": lambda n, b: (
        math.ceil(math.log2(n)),
        b * math.ceil(math.log2(n)),
        math.ceil(math.log2(n)),
    ),
    "gather": lambda n, b: (n - 1, b * (n - 1), 1),
    "store": lambda n, b: (n, b * n, 1),  # every rank or host sends one message to the store
}
NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather",
    "broadcast_": "broadcast",
    "gather_": "gather",
}


@dataclass
class Phase:
    """Phase, by its cost for rank 0. on_device: its collectives are of GPU tensors (NCCL), not of
    the CPU's (gloo)."""

    collectives: list[Collective] = field(default_factory=list)
    seconds: float = 0.0  # processor time of rank 0
    on_device: bool = False
    details: dict[str, float] = field(default_factory=dict)  # parts of `seconds`, and sizes

    @property
    def messages(self) -> int:
        return sum(ALGORITHMS[c.kind](c.ranks, c.bytes)[0] for c in self.collectives)

    @property
    def bytes(self) -> float:
        return sum(ALGORITHMS[c.kind](c.ranks, c.bytes)[1] for c in self.collectives)

    def latency(self, hop_seconds: float) -> float:
        """Return the seconds of messages on the critical path, from latency alone."""
        if self.on_device:
            device = load_device(DEVICE)
            seconds = 0
            for c in self.collectives:
                ring = Ring.of(list(range(c.ranks)), RANKS_PER_HOST)
                seconds += ring.seconds("all-reduce", c.bytes, device)
            return seconds
        hops = 0
        for c in self.collectives:
            _, _, sequential = ALGORITHMS[c.kind](c.ranks, c.bytes)
            hops += sequential
        return hops * hop_seconds

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Add what the body costs, whose name is `part`."""
        with Recorder() as recorder, self.timed(part):
            yield
        self.seconds += self.details[part]
        self.collectives += [
            c for c in recorder.seen if not self.on_device or c.bytes <= CONTROL_BYTES
        ]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note the processor time of a part of a body that is `measured` already."""
        began = time.process_time()
        yield
        self.details[part] = time.process_time() - began


class Recorder(Watch):
    """Recorder of the collectives of this thread, on a fake process group."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def see(self, name: str, func: Callable, args: tuple) -> None:
        if name in NAMES and (ranks := group_of(args).size()) > 1:
            given = args[1] if name in ("allgather_", "gather_") else args[0]
            tensors = [given] if isinstance(given, torch.Tensor) else given
            self.seen.append(
                Collective(NAMES[name], ranks, sum(t.numel() * t.element_size() for t in tensors))
            )


@contextmanager
def everyone_is_like_rank_0() -> Iterator[None]:
    """Gather as if all ranks sent what rank 0 does: a fake group moves nothing, so gathered tensors
    would be undefined. Objects are packed and unpacked as often as on a real group."""
    real_all_gather = dist.all_gather
    real_gather = dist.gather

    def all_gather(
        tensors: list[torch.Tensor], own: torch.Tensor, *args: object, **kwargs: object
    ) -> None:
        real_all_gather(tensors, own, *args, **kwargs)
        for tensor in tensors:
            tensor.copy_(own)

    def gather(
        own: torch.Tensor,
        tensors: list[torch.Tensor] | None = None,
        *args: object,
        **kwargs: object,
    ) -> None:
        real_gather(own, tensors, *args, **kwargs)
        for tensor in tensors or []:
            tensor.copy_(own)

    def all_gather_object(
        objects: list, own: object, group: dist.ProcessGroup | None = None
    ) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        size = torch.tensor([len(packed)])
        all_gather([torch.empty_like(size) for _ in objects], size, group=group)
        real_all_gather([torch.empty_like(packed) for _ in objects], packed, group=group)
        objects[:] = [pickle.loads(packed.numpy().tobytes()) for _ in objects]

    with (
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(dist, "gather", gather),
        mock.patch.object(dist, "all_gather_object", all_gather_object),
    ):
        yield
