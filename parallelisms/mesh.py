"""The process group and the one DeviceMesh of a run: (pp, dp_replicate, dp_shard, cp, tp), and the
few reductions the loop needs.

`tp` is innermost, so that the ranks of one tensor-parallel group are neighbours on one host
(NVLink). `pp` is outermost: the stages of a pipeline exchange the least, so the slowest links are
theirs. Each rank trains on the batch rows of its data-parallel rank. The ranks of a tp group share
these rows, and so do the ranks of a pipeline. Those of a cp group share them too, and each has
other positions of them. FSDP takes them for data-parallel ranks, and shards over both.

With `train.py` this is the only module that reads the environment: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, as `torchrun` sets them. Without them a run is one process.
"""

import logging
import mmap
import os
import struct
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from configs.cpu import cpu_settings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import InputError, Parallelism, Run


@dataclass(frozen=True)
class World:
    """What torchrun says about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World:
    """From the environment; one process when torchrun did not set it."""
    names = (
        ("RANK", 0),
        ("WORLD_SIZE", 1),
        ("LOCAL_RANK", 0),
        ("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)),
    )
    return World(*(int(os.environ.get(name, default)) for name, default in names))


class ProgressCounter:
    """Counts the exchanges that this rank has begun, in memory that outlives it.

    Under NCCL all ranks of a run that hangs may die at the same second. The one that they waited
    for has begun fewer exchanges than the others, and its launcher reads that from the file
    (tools/launch). Memory that is mapped to a file needs no call when it changes, and no Python
    lock when it is read.
    """

    def __init__(self, path: str | None) -> None:
        """path: of the file to make, 8 bytes on a disk of this host; None to count for nobody."""
        self.count, self.memory = 0, bytearray(8)
        if path:
            with open(path, "wb+") as file:
                file.truncate(8)
                self.memory = mmap.mmap(file.fileno(), 8)

    def advance(self, by: int = 1) -> None:
        self.count += by
        struct.pack_into("<q", self.memory, 0, self.count)


def progress_file() -> str | None:
    """Beside the file into which this rank writes its exception for the launcher; None where no
    launcher started it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return error_file and f"{error_file}.begun"


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `device_mesh` has the dimensions pp, dp_replicate, dp_shard, cp, tp,
    each of at least 1."""

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
    head_and_tail: bool = False
    ep: int = 1  # ranks of dp_shard x cp x tp that share the experts of a mixture
    # The same ranks by pp, dp_replicate, edp, ep (parallelisms/ep.py): for mixtures with ep or tp
    # above 1.
    experts_mesh: DeviceMesh | None = None
    # the ranks of this pipeline again: `open_mesh` says what for
    to_lower: dist.ProcessGroup | None = None
    progress_counter: ProgressCounter = field(
        default_factory=lambda: ProgressCounter(progress_file()), compare=False
    )

    @property
    def size(self) -> int:
        return self.pp * self.dp_size * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """By dimension. All but ep multiply to the number of ranks; an ep group is a part of other
        dimensions."""
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

    def token_ranges(self, seq_len: int) -> list[range]:
        """The positions of a sequence whose tokens this rank has, in their order there: equally
        many on every rank of a cp group. A causal query costs as much as there are keys before it.
        Where every rank computes its own queries, it gets one part near the beginning and one as
        near to the end, so that all have the same work."""
        parts = (
            [self.cp_rank, 2 * self.cp - 1 - self.cp_rank] if self.head_and_tail else [self.cp_rank]
        )
        length = seq_len // (self.cp * len(parts))
        return [range(part * length, (part + 1) * length) for part in parts]

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
        """Whether the flag is set on any rank. A CPU collective (gloo): what the ranks must agree
        on in every step travels with the loss instead (`train.Flags`)."""
        self.progress_counter.advance()
        if self.size == 1:
            return flag
        x = torch.tensor(int(flag))
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return bool(x)

    def gather(self, value: object) -> list:
        """What each rank has, by rank; every rank of the mesh must call it. Small objects over the
        CPU (gloo)."""
        self.progress_counter.advance()
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def set_timeout(self, seconds: int) -> None:
        """Limit every collective. The mesh's groups do not inherit the default group's limit, so
        each is set."""
        groups = [
            dist.group.WORLD,
            *self.device_mesh.get_all_groups(),
            *self.fsdp_mesh.get_all_groups(),
        ]
        groups += self.experts_mesh.get_all_groups() if self.experts_mesh else []
        for group in groups + [self.to_lower] * (self.to_lower is not None):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def timeout(self) -> timedelta:
        """The limit that `set_timeout` set, on a CPU."""
        return self.device_mesh.get_group("pp")._get_backend(torch.device("cpu")).options._timeout


def pick_device(run: Run, local_rank: int) -> torch.device:
    """This rank's own device. Raises InputError where CUDA is asked for and missing, or has fewer
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
    GPU synchronisation. There gloo connects two ranks when they first have something to send.
    Otherwise each of its groups would be a socket from every rank to every other, and two groups of
    512 ranks are more files than a process may usually have open. Messages of a pipeline need more
    care then (`meet_neighbours`).
    """
    here = world()
    device = pick_device(run, here.local_rank)
    if device.type == "cpu":
        cpu_settings()
    else:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if not dist.is_initialized():
        if device.type == "cuda":
            record_flights(Path(run.folder) / "logs")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=run.init_timeout_seconds)
        if here.size == 1:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
            )
        else:
            dist.init_process_group(backend, timeout=limit)
    return device


def record_flights(folder: Path) -> None:
    """Let NCCL's flight recorder keep the last collectives, and leave them in nccl-<rank> there
    when one times out, for `torchfrtrace`. Both generations of the names; what the environment says
    already counts."""
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/nccl-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/nccl-",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("plumbline").info(
        f"when a collective times out: {os.environ['TORCH_FR_DUMP_TEMP_FILE']}<rank>"
    )


def open_mesh(run: Run, parallelism: Parallelism, dp_shard: int, has_experts: bool = False) -> Mesh:
    """Lay the mesh over the process group; the sizes are already checked. has_experts: whether the
    model has mixtures of experts, whose weights are on a mesh of their own where ep or tp is above
    1.

    Every pipeline gets a second group. One carries what goes to a higher rank, the other what goes
    to a lower one. NCCL runs what two ranks of a group send each other one after another, so with
    one group for both directions two ranks that send at the same time would wait for each other for
    ever.
    """
    device = open_group(run)
    pp, cp = parallelism.pipeline_parallel, parallelism.context_parallel
    sizes = (pp, parallelism.data_parallel_replicate, dp_shard, cp, parallelism.tensor_parallel)
    device_mesh = init_device_mesh(
        device.type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    stage, replicate, shard, part, _ = device_mesh.get_coordinate()
    rank, to_lower = dist.get_rank(), None
    if pp > 1:
        # all ranks make all groups, in the same order
        for ranks in device_mesh.mesh.view(pp, -1).t().tolist():
            group = dist.new_group(ranks)
            to_lower = group if rank in ranks else to_lower
    head_and_tail = cp > 1 and parallelism.context_parallel_method == "gather"
    ep, tp, experts_mesh = parallelism.expert_parallel, parallelism.tensor_parallel, None
    if has_experts and ep * tp > 1:
        sizes_of_experts = (pp, parallelism.data_parallel_replicate, dp_shard * cp * tp // ep, ep)
        experts_mesh = init_device_mesh(
            device.type, sizes_of_experts, mesh_dim_names=("pp", "dp_replicate", "edp", "ep")
        )
    mesh = Mesh(
        device_mesh,
        fsdp_mesh(device_mesh),
        device,
        rank,
        *sizes,
        replicate * dp_shard + shard,
        part,
        stage,
        head_and_tail,
        ep,
        experts_mesh,
        to_lower,
    )
    mesh.set_timeout(run.init_timeout_seconds)
    meet_neighbours(mesh, device, timedelta(seconds=run.init_timeout_seconds))
    return mesh


def meet_neighbours(mesh: Mesh, device: torch.device, limit: timedelta) -> None:
    """Open every connection that messages of a pipeline use, for tensors of this device. All ranks
    of a pipeline call it.

    NCCL connects two ranks of a group at their first message, and gloo does where its connections
    are lazy. Whoever comes first waits for the other one. In a step both may come at the same time
    with different messages: rank 0 asks for a gradient, from rank 1, while rank 1 asks for a hidden
    state, from rank 0. Both would wait for ever. So each pair exchanges one number in each
    direction here, and all ranks go through the pairs in one order.
    """
    to_higher, to_lower = mesh.device_mesh.get_group("pp"), mesh.to_lower
    for lower, higher in neighbours(mesh.pp):
        for sender, receiver, group in (lower, higher, to_higher), (higher, lower, to_lower):
            number = torch.zeros(1, device=device)
            if mesh.pp_rank == sender:
                work = dist.isend(number, group=group, group_dst=receiver)
            elif mesh.pp_rank == receiver:
                work = dist.irecv(number, group=group, group_src=sender)
            else:
                continue
            work.wait(limit)


def neighbours(ranks: int) -> list[tuple[int, int]]:
    """The pairs of ranks of a pipeline that send each other something, the lower rank first. No
    pair waits for more than two others, whatever the number of ranks."""
    even = [(i, i + 1) for i in range(0, ranks - 1, 2)]
    odd = [(i, i + 1) for i in range(1, ranks - 1, 2)]
    # A loop of stages goes on at rank 0, and a tied weight is at both ends.
    ring = [(0, ranks - 1)] if ranks > 2 else []
    return even + odd + ring


def fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that FSDP works on: dp_shard and cp as one dimension, and dp_replicate,
    if it is above 1."""
    shard = "dp_shard"
    if device_mesh["cp"].size() > 1:
        shard = "dp_shard_cp"
        device_mesh["dp_shard", "cp"]._flatten(shard)
    # to slice what is flattened shall go one day (torch 2.13); there is no other way yet
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        return (
            device_mesh["dp_replicate", shard]
            if device_mesh["dp_replicate"].size() > 1
            else device_mesh[shard]
        )


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
