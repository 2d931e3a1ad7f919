"""The messages of a pipeline in one step: what each rank has sent, and what has arrived."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tools.replay.operators import Summary, summary


@dataclass
class MessageNotes:
    """Notes of one rank. Keys: the number of the other rank in the job, and the kind of message."""

    sent: dict[tuple[int, str], list[Summary]] = field(default_factory=lambda: defaultdict(list))
    got: dict[tuple[int, str], list[Summary]] = field(default_factory=lambda: defaultdict(list))


class NotedLink:
    """Sends and receives as parallelisms/pp.py::Link does, and notes the content."""

    def __init__(self, link: Any, notes: MessageNotes) -> None:
        self.link, self.notes = link, notes
        self.ranks = dist.get_process_group_ranks(link.to_higher)

    def send(self, name: str, tensor: Tensor, rank: int) -> dist.Work:
        self.notes.sent[self.ranks[rank], name].append(content(tensor))
        return self.link.send(name, tensor, rank)

    def receive(self, name: str, tensor: Tensor, rank: int) -> "NotedMessage":
        work = self.link.receive(name, tensor, rank)
        return NotedMessage(work, tensor, self.notes.got[self.ranks[rank], name])


class NotedMessage:
    """Message that is noted when a rank has waited for it. Has the interface of a dist.Work."""

    def __init__(self, work: Any, tensor: Tensor, notes: list[Summary]) -> None:
        self.work, self.tensor, self.notes = work, tensor, notes

    def wait(self, *limit: timedelta) -> None:
        self.work.wait(*limit)
        self.notes.append(content(self.tensor))


def content(tensor: Tensor) -> Summary:
    """Return its three numbers, computed outside of the step's noted operators."""
    with _disable_current_modes():
        return summary(tensor)


@contextmanager
def noting_messages(job: Any) -> Iterator[MessageNotes]:
    """Note the messages of the steps that are made meanwhile."""
    notes = MessageNotes()
    if job.mesh.pp == 1:
        yield notes
        return
    link = job.model.link
    job.model.link = NotedLink(link, notes)
    try:
        yield notes
    finally:
        job.model.link = link
