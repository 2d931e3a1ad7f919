"""Processes that trace, so that a plan uses every core.

They are forked by a server that has imported everything and computes nothing: PyTorch's CUDA build
refuses a backward in the fork of a process that has run one. A worker traces many steps one after the
other. What PyTorch has learnt of an operator's shapes then serves the next step too.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.forkserver import ensure_running

import torch

from configs.program import deaf_children

MOST = 8  # workers: each holds up to half a GiB, and a search has no more to do at a time


def ready() -> None:
    """Call first in a worker. The collector need not look at what the server has imported: before
    every step that took a quarter of the trace's time."""
    torch.set_num_threads(1)
    gc.freeze()


def workers(calls: int = MOST) -> ProcessPoolExecutor:
    """Start as many workers as there are cores, and no more than there are calls."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.plan.search"])
    with deaf_children():
        ensure_running()
    count = min(calls, os.cpu_count() or 1, MOST)
    return ProcessPoolExecutor(count, mp_context=context, initializer=ready)


def in_processes(function: Callable, calls: list[tuple]) -> list:
    """Return function(*call) of each call, each computed on the next free worker."""
    if not calls:
        return []
    with workers(len(calls)) as pool:
        return [done.result() for done in [pool.submit(function, *call) for call in calls]]
