"""Processes that trace, so that a plan uses every core.

They are forked by a server that has imported everything and computes nothing: this process may have
run a backward, after which PyTorch's CUDA build refuses one in a fork. A worker traces many steps one
after the other. What PyTorch has learnt of an operator's shapes then serves the next step too.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

MOST = 8  # workers: each holds up to half a GiB, and a search has no more to do at a time


def ready() -> None:
    """Call first in a worker. The collector need not look at what the server has imported: before
    every step that took a quarter of the trace's time."""
    torch.set_num_threads(1)
    gc.freeze()


def workers(calls: int = MOST) -> ProcessPoolExecutor:
    """As many workers as there are cores, and no more than there are calls."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tools.plan.search"])
    count = min(calls, os.cpu_count() or 1, MOST)
    return ProcessPoolExecutor(count, mp_context=server, initializer=ready)


def in_processes(function: Callable, calls: list[tuple]) -> list:
    """function(*call) for each call, each on the next free worker."""
    if not calls:
        return []
    with workers(len(calls)) as pool:
        return [done.result() for done in [pool.submit(function, *call) for call in calls]]
