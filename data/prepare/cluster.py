"""Makes parts on the machines of a Ray cluster, one task for each part.

Ray schedules the parts over the machines, and retries a part whose process or machine is lost. A
part is finished when its record is in place (part.py), so nothing of a lost process is used. Two
processes may make the same part, if a machine that seemed lost was not: they write under different
names, and both put the same bytes in place.

A machine that does not see the folder makes a part in a temporary folder, and Ray carries the files
to the machine of the command. So a store is enough to read from; that machine needs room for the
corpus. This repository, its Python and a source that is no URL must have the same paths on all
machines.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from configs.schema import InputError
from data import sources
from data.prepare.job import PLAN, PrepareJob
from data.prepare.workers import answer, raise_error

# How often Ray repeats a part that was lost with its process: a part that always kills its
# process must come to an end.
RETRIES = 8
CONNECT_SECONDS = 10.0
INSTALL = '--on ray needs Ray: pip install "ray==2.60.0", on every machine'
SHARED = "the source must be a URL, or on storage that all machines of the cluster share"


def check_installed() -> None:
    """Raise InputError if Ray is not installed."""
    if not importlib.util.find_spec("ray"):
        raise InputError(INSTALL)


def _check_answers(address: str) -> None:
    """Raise InputError if nothing listens at `host:port`. Ray would try for some minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # "auto", "local" or nothing
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise InputError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}): start one, or correct "
            "the address"
        ) from None


class RayCluster(AbstractContextManager):
    """The cluster at RAY_ADDRESS, or else the one that runs on this machine, or else one that is
    started here and ends with this process. InputError: there is none at RAY_ADDRESS."""

    def __init__(self, log: Callable[[str], object]) -> None:
        check_installed()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
        import ray

        _check_answers(os.environ.get("RAY_ADDRESS", ""))
        self.connection = ray.init(include_dashboard=False, logging_level=logging.WARNING)
        alive = [node for node in ray.nodes() if node["Alive"]]
        cpus = ray.cluster_resources().get("CPU", 0)
        log(f"Ray: {len(alive)} machines, {cpus:.0f} CPUs; each makes a part at a time")

    def __exit__(self, *_: object) -> None:
        """Disconnect. Ray then ends the tasks that still run."""
        self.connection.__exit__(None, None, None)

    def make(
        self,
        job: PrepareJob,
        todo: list[int],
        change: dict,
        progress: Callable[[int], object],
        add: Callable[[int, dict], None],
    ) -> None:
        """Make the parts as Ray tasks, like workers.Processes.make. `progress` counts finished
        parts."""
        import ray

        task = ray.remote(num_cpus=1, max_retries=RETRIES)(make_part)
        plan = ray.put(job.plan())
        running = {task.remote(job.folder, plan, part, change): part for part in todo}
        while running:
            (done, *_), _ = ray.wait(list(running))
            part = running.pop(done)
            try:
                message, files = ray.get(done)
            except ray.exceptions.RayError as error:
                raise RuntimeError(
                    f"part {part} of {job.folder} was given up after {RETRIES} retries: {error}"
                ) from error
            raise_error(message)
            if files:
                job.receive(part, message, files)
            add(part, message)
            progress(job.size(part))


def make_part(
    folder: str, plan: dict[str, bytes], part: int, change: dict
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Make the part, as a Ray task on any machine. plan: as PrepareJob.plan. Returns the result of
    workers.answer, and the files of the part where this machine does not see the folder."""
    is_shared = _sees(folder, plan)
    job = _load(folder) if is_shared else _load(_own_folder(tuple(plan.items())).name)
    for index in sorted({index for index, *_ in job.parts[part]}):
        file = job.files[index]
        if not _is_same(file):
            sentence = f"{file.path} is another file on {socket.gethostname()}: {SHARED}"
            return {"input_error": sentence}, {}
    message = answer(job, part, change, 1, _ignore)
    return message, {} if is_shared else job.take(part)


def _sees(folder: str, plan: dict[str, bytes]) -> bool:
    try:
        return Path(folder, PLAN).read_bytes() == plan[PLAN]
    except OSError:
        return False


@functools.lru_cache(1)
def _own_folder(plan: tuple[tuple[str, bytes], ...]) -> tempfile.TemporaryDirectory:
    """Write the files of a plan to a temporary folder of this process."""
    folder = tempfile.TemporaryDirectory(prefix="plumbline-parts-")
    for name, content in plan:
        path = Path(folder.name, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return folder


@functools.lru_cache(1)
def _load(folder: str) -> PrepareJob:
    """Load the job of a folder once per process: a process makes many parts of one job, and Ray
    starts new processes for another job."""
    return PrepareJob.load(folder)


def _is_same(file: sources.File) -> bool:
    """Return whether this machine has the same file as the plan names. Names that are no paths are
    checked by their reader."""
    if not os.path.isabs(file.path):
        return True
    try:
        status = os.stat(file.path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)


def _ignore(size: int) -> None:
    pass
