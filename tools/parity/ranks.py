"""Ranks of a mesh, as processes of this machine."""

import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.program import deaf_children
from configs.schema import InputError
from tools.parity.failures import raised
from tools.parity.trajectory import Notes, record


class Failed(RuntimeError):
    """Raised when a rank raised, died or hung."""


def be_rank(folder: Path, rank: int, ranks: int, work: Callable, args: tuple) -> None:
    """Run one rank, in its own process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    if ranks > 1:  # one alone computes as a run of one process does, to the last bit
        torch.set_num_threads(1)
    # it warns of slow gathers; these are few
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        with contextlib.redirect_stdout(io.StringIO()):
            result = work(*args)
        (folder / f"{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except InputError as error:
        (folder / f"{rank}.refused").write_text(str(error), encoding="utf-8")
        os._exit(1)
    except BaseException as error:
        (folder / f"{rank}.error").write_text(raised(error), encoding="utf-8")
        os._exit(1)  # the others wait in a collective that this rank will not join
    os._exit(0)


def on_ranks(ranks: int, seconds: float, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(*args) on each of these ranks, and return the results by rank. All of it is pickled.

    Raises Failed if one fails, or if `seconds` pass, and InputError if one raises that.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.parity.ranks"])
    with deaf_children():
        ensure_running()
    with tempfile.TemporaryDirectory(prefix="plumbline-parity-") as name:
        folder = Path(name)
        processes = []
        for rank in range(ranks):
            arguments = (folder, rank, ranks, work, args)
            processes.append(context.Process(target=be_rank, args=arguments))
            processes[-1].start()
        deadline = time.monotonic() + seconds
        running = set(processes)
        while running and time.monotonic() < deadline:
            wait([process.sentinel for process in running], deadline - time.monotonic())
            running = {process for process in running if process.exitcode is None}
            if any(process.exitcode for process in processes):
                break
        for process in processes:
            process.kill()
            process.join()
        for refused in sorted(folder.glob("*.refused")):
            raise InputError(refused.read_text(encoding="utf-8"))
        failed = sorted(folder.glob("*.error"))
        if failed:
            raise Failed(f"rank {failed[0].stem}: {failed[0].read_text(encoding='utf-8')}")
        missing = [r for r in range(ranks) if not (folder / f"{r}").exists()]
        if missing:
            codes = [process.exitcode for process in processes]
            raise Failed(
                f"ranks {missing} did not end in {seconds:g} s, or died: exit codes {codes}"
            )
        return [pickle.loads((folder / f"{r}").read_bytes()) for r in range(ranks)]


def train_on(ranks: int, argv: list[str], steps: int, seconds: float) -> list[Notes]:
    """Train on these ranks and return the notes of all (tools/parity/trajectory.py)."""
    return on_ranks(ranks, seconds, record, argv, steps)
