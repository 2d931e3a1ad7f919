"""Several ranks on one GPU, which NCCL refuses: gloo moves their tensors through host memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class OnTheWay:
    """Send or receive of a GPU's tensor through a copy on the host: the only operations of a mesh
    that gloo itself does not move."""

    def __init__(self, work: dist.Work, on_host: Tensor, received: Tensor | None) -> None:
        self.work = work
        self.on_host = on_host  # kept until the work is done
        self.received = received

    def wait(self, *limit: timedelta) -> bool:
        """Wait, and bring what was received onto the GPU."""
        self.work.wait(*limit)
        if self.received is not None:
            self.received.copy_(self.on_host)
        return True


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Inside, this rank takes the first GPU, and groups communicate by gloo."""
    torch.cuda.set_device(0)
    torch.cuda.init()
    init = dist.init_process_group
    isend = dist.isend
    irecv = dist.irecv

    def with_gloo(backend: str, **how: Any) -> None:
        init("gloo", **how)

    def send(tensor: Tensor, **how: Any) -> OnTheWay:
        on_host = tensor.detach().cpu()
        return OnTheWay(isend(on_host, **how), on_host, None)

    def receive(tensor: Tensor, **how: Any) -> OnTheWay:
        on_host = torch.empty_like(tensor, device="cpu")
        return OnTheWay(irecv(on_host, **how), on_host, tensor)

    replaced: dict[str, Callable] = {
        "init_process_group": with_gloo,
        "isend": send,
        "irecv": receive,
    }
    with mock.patch.dict(os.environ, LOCAL_RANK="0"), mock.patch.multiple(dist, **replaced):
        yield
