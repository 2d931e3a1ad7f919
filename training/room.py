"""Refuse a model whose state cannot fit this machine, before hours of tokenising, and a process that may
open too few files.

The state of a training step has an exact size before anything is built: weights, their gradients, and
what the optimizer keeps. It is the least that a step needs, since activations come on top, so what
is refused here could not have run. `tools.plan` knows the rest.
"""

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config, InputError
from parallelisms import dp, freezing
from parallelisms import mesh as meshes
from training.optimizers import OPTIMIZERS, kept_of
from training.rates import RateFactors, options_of_group

GIB = 2**30
FEW_FILES = 256
MANY_FILES = 65536
CGROUP = Path("/sys/fs/cgroup/memory.max")  # of this container, by cgroup v2; "max": no limit


def state_bytes(cfg: Config, family: Any, args: Any) -> int:
    """Count the bytes of the whole state, all ranks of one replica together.

    Muon keeps one average of a matrix and two of everything else; all is counted as a matrix, so this
    is never above the truth.
    """
    count = family.parameters(args)
    master = dp.master_dtype(cfg.training)
    frozen = dp.DTYPES.get(cfg.training.param_dtype, torch.bfloat16)
    if family.trained_parameters:
        trained = family.trained_parameters(args)
    else:
        with torch.device("meta"):
            trained = count - freezing.count(family.build(args), cfg.training.freeze)
        frozen = master
    rule = OPTIMIZERS[cfg.optimizer.kind].matrices
    group = options_of_group(rule, cfg.optimizer, True, RateFactors())
    group.setdefault("momentum", cfg.optimizer.momentum)
    kept = [one for one in kept_of(rule, group).values() if one.like_parameter]
    of_optimizer = sum((one.dtype or master).itemsize for one in kept)
    return trained * (2 * master.itemsize + of_optimizer) + (count - trained) * frozen.itemsize


def host_memory() -> int:
    """Return the bytes that processes of this host may use at all, swap included."""
    kilobytes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    most = 1024 * (kilobytes["MemTotal"] + kilobytes.get("SwapTotal", 0))
    with suppress(OSError, ValueError):
        most = min(most, int(CGROUP.read_text()))
    return most


def allow_files() -> None:
    """Let this process have as many files open as the system allows, and raise InputError where these
    are too few: a batch of a worker would be lost, and the run would wait for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < FEW_FILES:
        raise InputError(
            f"this process may have {most} files open (ulimit -Hn), and a rank with its workers needs "
            f"{FEW_FILES}: raise the limit"
        )


def check_room(
    cfg: Config, family: Any, args: Any, memory: Callable[[], int] = host_memory
) -> None:
    """Raise InputError where the state of this run's ranks cannot fit the host, or the GPU.

    memory: bytes of the host. A system that does not say how much it has is not judged.
    """
    allow_files()
    here = meshes.world()
    replicas = cfg.parallelism.data_parallel_replicate
    of_rank = state_bytes(cfg, family, args) * replicas // here.size
    device = meshes.pick_device(cfg.run, here.local_rank)
    if device.type == "cuda" and not cfg.parallelism.cpu_offload:
        needed, place = of_rank, "this GPU"
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        needed, place = of_rank * here.local_size, "this machine"
        try:
            room = memory()
        except (OSError, KeyError, ValueError):
            return
    if needed <= room:
        return
    raise InputError(
        f"the model has {family.parameters(args):,} parameters, whose weights, gradients and "
        f"optimizer state need {needed / GIB:,.1f} GiB, and {place} has {room / GIB:,.1f} GiB: take "
        "a smaller model.flavor, more machines or GPUs, or adapters (lora.rank); tools.plan says what "
        "a step needs in all"
    )
