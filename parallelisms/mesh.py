"""The process group and the one DeviceMesh of a run: (pp, dp_replicate, dp_shard, cp, tp), and the
few reductions the loop needs.

`tp` is innermost, so that the ranks of one tensor-parallel group are adjacent, on one host
(NVLink). `pp` is outermost: the stages of a pipeline exchange the least, so the slowest links are
theirs. Each rank trains on the batch rows of its data-parallel rank. The ranks of a tp group share
these rows, and so do the ranks of a pipeline. Those of a cp group share them too, and each has
other positions of them. FSDP takes them for data-parallel ranks, and shards over both.

With `train.py` this is the only module that reads the environment: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, as `torchrun` sets them. Without them a run is one process.
"""

import os
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from configs.cpu import cpu_settings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import InputError, Parallelism, Run
from parallelisms.open_once import open_once
from parallelisms.p2p_warmup import group_to_lower_ranks, warm_up_p2p
from parallelisms.progress import ProgressCounter, counter_of_this_rank, record_flights

# outermost first
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class World:
    """The environment variables of torchrun for this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World:
    """Read them from the environment; one process when torchrun did not set it. Raises InputError
    where half of it is set: a process would train alone, and all of them in one folder."""
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in os.environ:
            numbers[name] = os.environ[name]
    for name, text in numbers.items():
        if not text.isdecimal():
            raise InputError(f"{name} = {text!r} in the environment: it must be a whole number")
    if ("RANK" in numbers) != ("WORLD_SIZE" in numbers):
        given, missing = ("RANK", "WORLD_SIZE") if "RANK" in numbers else ("WORLD_SIZE", "RANK")
        raise InputError(
            f"{given} is set in the environment and {missing} is not: start ranks with "
            f"./run_train.sh or torchrun, which set both, or unset {given} for one process"
        )
    size = int(numbers.get("WORLD_SIZE", 1))
    rank = int(numbers.get("RANK", 0))
    if rank >= size:
        raise InputError(f"RANK = {rank} in the environment must be below WORLD_SIZE = {size}")
    return World(
        rank=rank,
        size=size,
        local_rank=int(numbers.get("LOCAL_RANK", 0)),
        local_size=int(numbers.get("LOCAL_WORLD_SIZE", size)),
    )


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run as this rank sees it, and one reduction for each set of ranks.
    `device_mesh` has the DIMENSIONS, each of at least 1."""

    device_mesh: DeviceMesh
    # 1-D: shard. 2-D: replicate over the first dimension, shard over the second (HSDP, DDP)
    fsdp_mesh: DeviceMesh
    device: torch.device
    rank: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    dp_rank: int
    cp_rank: int = 0
    pp_rank: int = 0
    # whether context parallelism gives a rank two parts of a sequence (`token_ranges`)
    zigzag: bool = False
    ep: int = 1  # ranks of dp_shard x cp x tp that share the experts of a mixture
    # The same ranks by pp, dp_replicate, edp, ep, where several ranks share the experts
    experts_mesh: DeviceMesh | None = None
    to_lower: dist.ProcessGroup | None = None  # a second pp group, for sends to lower ranks
    # by name: groups that are opened on demand
    more_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, compare=False)
    progress_counter: ProgressCounter = field(default_factory=counter_of_this_rank, compare=False)

    @property
    def size(self) -> int:
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes by dimension. All but ep multiply to the number of ranks; an ep group is
        a part of other dimensions."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
        }

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.device_mesh["tp"]

    @property
    def parts(self) -> list[int]:
        """Return the numbers of the parts of a sequence that this rank has, in their order."""
        return [self.cp_rank, 2 * self.cp - 1 - self.cp_rank] if self.zigzag else [self.cp_rank]

    def token_ranges(self, seq_len: int) -> list[range]:
        """Return the positions of a sequence whose tokens this rank has, in their order there:
        equally many on every rank of a cp group.

        The work of a causal query is the number of keys before it. Where every rank computes its
        own queries, it gets one part near the beginning and one as near to the end, so that all
        have the same work.
        """
        length = seq_len // (self.cp * len(self.parts))
        return [range(part * length, (part + 1) * length) for part in self.parts]

    def sum_over_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that have different tokens, those of data and of context parallelism,
        in place. Every rank of the mesh must call it."""
        self.progress_counter.advance()
        for dim in reversed(range(self.fsdp_mesh.ndim)):
            if self.fsdp_mesh.size(dim) > 1:
                dist.all_reduce(x, group=self.fsdp_mesh.get_group(dim))
        return x

    def sum_over_pp(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the pipeline, in place. Every rank of the mesh must call it."""
        return self._sum_over("pp", x)

    def sum_over_tp(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of tensor parallelism, in place. Every rank of the mesh must call it."""
        return self._sum_over("tp", x)

    def _sum_over(self, dim: str, x: torch.Tensor) -> torch.Tensor:
        self.progress_counter.advance()
        if self.sizes[dim] > 1:
            dist.all_reduce(x, group=self.device_mesh.get_group(dim))
        return x

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place, by one collective. Every rank of the mesh must call it."""
        self.progress_counter.advance()
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. A CPU collective (gloo): what the ranks must
        agree on in every step travels with the loss instead (`train.Flags`)."""
        self.progress_counter.advance()
        if self.size == 1:
            return flag
        x = torch.tensor(int(flag))
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return bool(x)

    def gather(self, value: object) -> list:
        """Return the value of each rank, by rank; every rank of the mesh must call it. Small
        objects over the CPU (gloo)."""
        self.progress_counter.advance()
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def group_of_stage(self) -> dist.ProcessGroup:
        """Return the group of all ranks that have the same layers as this one. Every rank of the
        mesh must call it."""
        world = dist.group.WORLD
        if self.pp == 1 and world is not None:
            return world
        if "stage" not in self.more_groups:
            of_stage = self.device_mesh[DIMENSIONS[1:]]._flatten("stage")
            self.more_groups["stage"] = of_stage.get_group()
        return self.more_groups["stage"]

    def set_timeout(self, seconds: int) -> None:
        """Limit every collective. The mesh's groups do not inherit the default group's limit, so
        each is set."""
        groups = [dist.group.WORLD]
        groups += self.device_mesh.get_all_groups()
        groups += self.fsdp_mesh.get_all_groups()
        if self.experts_mesh is not None:
            groups += self.experts_mesh.get_all_groups()
        if self.to_lower is not None:
            groups.append(self.to_lower)
        groups += self.more_groups.values()
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def timeout(self) -> timedelta:
        """Return the limit that `set_timeout` set, on a CPU."""
        return self.device_mesh.get_group("pp")._get_backend(torch.device("cpu")).options._timeout


def pick_device(run: Run, local_rank: int) -> torch.device:
    """Return this rank's device. Raises InputError where CUDA is required and missing, or has fewer
    GPUs than ranks."""
    if run.device == "cpu" or (run.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            'run.device = "cuda", but torch sees no GPU here: use "auto" or "cpu", or a CUDA '
            "build of torch"
        )
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local_rank} has no GPU of its own: this host shows "
            f"{torch.cuda.device_count()}; "
            "start fewer processes (NGPU) or make more GPUs visible"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def open_group(run: Run) -> torch.device:
    """Start the process group, or use the one that is running; returns this rank's device.

    CUDA runs get NCCL for GPU tensors and gloo for CPU ones, so that flags and checkpoints need no
    host-device sync. There gloo connects two ranks when they first have something to send.
    Otherwise each of its groups would open a socket from every rank to every other, and two groups
    of 512 ranks are more files than a process may usually have open. The sends of a pipeline need
    more care then (`warm_up_p2p`).
    """
    here = world()
    device = pick_device(run, here.local_rank)
    if device.type == "cpu":
        cpu_settings()
    else:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        record_flights(Path(run.folder) / "logs")
    if dist.is_initialized():
        return device
    limit = timedelta(seconds=run.init_timeout_seconds)
    if here.size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise InputError(
                    f"{here.size} ranks need {name} in the environment, where they meet: start them "
                    "with ./run_train.sh or torchrun, which set it"
                )
        dist.init_process_group(backend, os.environ.get("INIT_METHOD"), timeout=limit)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    return device


@open_once
def open_mesh(run: Run, parallelism: Parallelism, dp_shard: int, has_experts: bool = False) -> Mesh:
    """Lay the mesh over the process group; the sizes are already checked. has_experts: whether the
    model has mixtures of experts."""
    device = open_group(run)
    pp = parallelism.pipeline_parallel
    dp_replicate = parallelism.data_parallel_replicate
    cp = parallelism.context_parallel
    tp = parallelism.tensor_parallel
    sizes = (pp, dp_replicate, dp_shard, cp, tp)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    pp_rank, replicate, shard, cp_rank, _ = coordinate
    to_lower = group_to_lower_ranks(device_mesh)
    experts_mesh = None
    if has_experts and parallelism.expert_parallel * tp > 1:
        experts_mesh = open_experts_mesh(device, sizes, parallelism.expert_parallel)
    mesh = Mesh(
        device_mesh=device_mesh,
        fsdp_mesh=fsdp_mesh(device_mesh),
        device=device,
        rank=dist.get_rank(),
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        dp_rank=replicate * dp_shard + shard,
        cp_rank=cp_rank,
        pp_rank=pp_rank,
        zigzag=cp > 1 and parallelism.context_parallel_method == "gather",
        ep=parallelism.expert_parallel,
        experts_mesh=experts_mesh,
        to_lower=to_lower,
    )
    mesh.set_timeout(run.init_timeout_seconds)
    warm_up_p2p(mesh, device, timedelta(seconds=run.init_timeout_seconds))
    return mesh


def open_experts_mesh(device: torch.device, sizes: tuple[int, ...], ep: int) -> DeviceMesh:
    """Open the mesh of the experts' weights (parallelisms/ep.py), of the same ranks: ep is
    innermost, and edp has the ranks with the same experts."""
    pp, dp_replicate, dp_shard, cp, tp = sizes
    return init_device_mesh(
        device.type,
        (pp, dp_replicate, dp_shard * cp * tp // ep, ep),
        mesh_dim_names=("pp", "dp_replicate", "edp", "ep"),
    )


def fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh that FSDP works on: dp_shard and cp as one dimension, and
    dp_replicate, if it is above 1."""
    shard = "dp_shard"
    if device_mesh["cp"].size() > 1:
        shard = "dp_shard_cp"
        device_mesh["dp_shard", "cp"]._flatten(shard)
    # slicing a flattened mesh is deprecated (torch 2.13); there is no other way yet
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        if device_mesh["dp_replicate"].size() > 1:
            return device_mesh["dp_replicate", shard]
        return device_mesh[shard]


def close_mesh() -> None:
    """Destroy the process groups after an orderly end. NCCL waits for the collectives in flight, so
    all ranks call this."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_mesh() -> None:
    """Drop the process groups after a failure of this rank alone. Destroying them would wait for
    collectives that the other ranks cannot finish. A rank that raises calls neither: its exception
    has to be written first, and the process ends."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
