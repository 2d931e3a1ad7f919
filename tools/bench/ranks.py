"""What the ranks tell each other besides gradients and weights, and what it costs as their number grows.

    python -m tools.bench.ranks [--ranks 8,512,4096,16384] [--hop-us 0] [--json out.json] [--table.key=value ...]

Rank 0 of each number of ranks runs the run's own code on PyTorch's fake process group, on the mesh of the presets
(sharded over at most 64 ranks, replicated beyond) with a tiny model. Counted are the collectives of each phase, those of
FSDP and tensor parallelism left out (`tools.plan` has them). From them follow the messages and bytes that rank 0 sends or
receives and the longest chain of messages that wait for each other (`ALGORITHMS`). Latency is that chain times what one hop
takes: between processes of this machine over gloo, which is measured, or on a network of GPUs (`tools/plan/devices.toml`).
Processor time is that of rank 0's Python process.
"""

import argparse
import io
import math
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import train
from configs.load import load_config
from configs.schema import Config
from parallelisms import contract
from reliability.collectives import Watch, group_of
from reliability.health import Stragglers
from reliability.record import hosts
from tools.bench import harness
from tools.plan.device import load_device
from tools.plan.estimate import Ring
from tools.plan.trace import batch_of, pretend

TINY = (
    "--model.dim=64 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 --model.hidden_dim=64 --model.vocab_size=263 "
    "--data.tokenizer=bytes --training.seq_len=8 --training.local_batch_size=1 --run.device=cpu"
).split()
RANKS_PER_HOST = 8
CONTROL_BYTES = 1024  # a step's collectives of at most that many bytes are the loss's, the norm's and the like
DEVICE = "h100"


@dataclass(frozen=True)
class Collective:
    """One call on rank 0. bytes: what each rank gives; for a broadcast, what each receives."""

    kind: str
    ranks: int
    bytes: int


# kind -> (messages that rank 0 sends and receives, their bytes, hops that wait for each other), of n ranks and b bytes.
# gloo sums and gathers in a ring, and broadcasts along a binomial tree (its allreduce.cc, allgather.cc, broadcast.cc).
ALGORITHMS: dict[str, Callable[[int, int], tuple[int, float, int]]] = {
    "all_reduce": lambda n, b: (4 * (n - 1), 4 * b * (n - 1) / n, 2 * (n - 1)),
    "all_gather": lambda n, b: (2 * (n - 1), 2 * b * (n - 1), n - 1),
    "broadcast": lambda n, b: (math.ceil(math.log2(n)), b * math.ceil(math.log2(n)), math.ceil(math.log2(n))),
    "gather": lambda n, b: (n - 1, b * (n - 1), 1),
    "store": lambda n, b: (n, b * n, 1),  # every rank or host sends one message to the store
}
NAMES = {"allreduce_": "all_reduce", "all_reduce": "all_reduce", "allgather_": "all_gather", "broadcast_": "broadcast"}


@dataclass
class Phase:
    """What a phase costs rank 0. on_device: its collectives are of GPU tensors (NCCL), not of the CPU's (gloo)."""

    collectives: list[Collective] = field(default_factory=list)
    seconds: float = 0.0  # processor time of rank 0
    on_device: bool = False

    @property
    def messages(self) -> int:
        return sum(ALGORITHMS[c.kind](c.ranks, c.bytes)[0] for c in self.collectives)

    @property
    def bytes(self) -> float:
        return sum(ALGORITHMS[c.kind](c.ranks, c.bytes)[1] for c in self.collectives)

    def latency(self, hop_seconds: float) -> float:
        """Seconds on the critical path, of messages alone."""
        if self.on_device:
            device = load_device(DEVICE)
            rings = [(Ring.of(list(range(c.ranks)), RANKS_PER_HOST), c) for c in self.collectives]
            return sum(ring.seconds("all-reduce", c.bytes, device) for ring, c in rings)
        return sum(ALGORITHMS[c.kind](c.ranks, c.bytes)[2] for c in self.collectives) * hop_seconds


class Recorder(Watch):
    """The collectives of this thread, on a fake process group."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def see(self, name: str, func: Callable, args: tuple) -> None:
        if name in NAMES and (ranks := group_of(args).size()) > 1:
            tensors = args[1] if name == "allgather_" else args[0]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            self.seen.append(Collective(NAMES[name], ranks, sum(t.numel() * t.element_size() for t in tensors)))


@contextmanager
def everyone_is_like_rank_0() -> Iterator[None]:
    """A fake group moves nothing, so what is gathered would be undefined: here all ranks send what rank 0 does. Objects are
    packed and unpacked as often as on a real group."""
    gather = dist.all_gather

    def all_gather(tensors: list[torch.Tensor], own: torch.Tensor, **kwargs: object) -> None:
        gather(tensors, own, **kwargs)
        for tensor in tensors:
            tensor.copy_(own)

    def all_gather_object(objects: list, own: object, group: dist.ProcessGroup | None = None) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        size = torch.tensor([len(packed)])
        all_gather([torch.empty_like(size) for _ in objects], size, group=group)
        gather([torch.empty_like(packed) for _ in objects], packed, group=group)
        objects[:] = [pickle.loads(packed.numpy().tobytes()) for _ in objects]

    with mock.patch.object(dist, "all_gather", all_gather), mock.patch.object(dist, "all_gather_object", all_gather_object):
        yield


@contextmanager
def recorded(phases: dict[str, Phase], name: str, on_device: bool = False) -> Iterator[None]:
    began = time.process_time()
    with Recorder() as recorder:
        yield
    control = [c for c in recorder.seen if not on_device or c.bytes <= CONTROL_BYTES]
    phases[name] = Phase(control, time.process_time() - began, on_device)


def mesh_options(ranks: int) -> list[str]:
    return [f"--parallelism.data_parallel_replicate={max(1, ranks // 64)}", f"--training.global_batch_size={ranks}"]


def phases_of(options: list[str], ranks: int) -> dict[str, Phase]:
    """The phases of a run on so many ranks."""
    phases: dict[str, Phase] = {}
    with pretend(ranks, min(ranks, RANKS_PER_HOST)), everyone_is_like_rank_0():
        cfg = load_config([*TINY, *mesh_options(ranks), *options], ranks, min(ranks, RANKS_PER_HOST))
        with recorded(phases, "start"):
            job = start(cfg)
        batch = batch_of(job, 1)
        train.train_step(job, batch)  # the first one looks up every sharding
        with recorded(phases, "step", on_device=True):
            train.train_step(job, batch)
        with recorded(phases, "log"):
            Stragglers().report(job.mesh, 1)
        with recorded(phases, "stop (in a validation)"):
            job.mesh.any_rank(True)
    return phases | {
        "retention": Phase(),  # a thread of rank 0 that nobody waits for
        "stop (in a step)": Phase(),  # travels with the loss
        "fault": Phase([Collective("store", -(-ranks // RANKS_PER_HOST), 64)]),  # each launcher tells the others by the store
    }


def start(cfg: Config) -> train.Job:
    """What `train.train` does before it opens the data and the checkpoints."""
    job = train.build(cfg)
    hosts(job.mesh)
    job.mesh.gather((-1, 0, ""))  # train.fails_again_and_again
    contract.verify(job.model, job.optimizer, job.mesh, {"config": "x" * 6000, "code": "0" * 12, "torch": torch.__version__})
    return job


STEPS, WARM = 24, 8  # of the loop that is measured; the first of them are left out


def loop(options: list[str], ranks: int) -> Phase:
    """A step of the whole loop of `train.train`, with its data and everything that it does after a step, but for saves."""
    began, train_step, new_group = [], train.train_step, dist.new_group

    def noting(*args: object) -> train.StepResult:
        began.append(time.process_time())
        return train_step(*args)

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for i in range(40):
            (corpus / f"{i}.txt").write_text(f"document {i} " * 200)
        arguments = [
            *TINY, *mesh_options(ranks), f"--data.source={corpus}", f"--data.cache={folder}/cache", f"--run.folder={folder}/run",
            f"--training.steps={STEPS}", "--checkpoint.interval=0", "--validation.interval=0", "--metrics.tensorboard=false",
            "--metrics.progress=off", "--debug.sample_tokens=0", *options,
        ]  # fmt: skip
        with (
            pretend(ranks, min(ranks, RANKS_PER_HOST)), everyone_is_like_rank_0(), redirect_stdout(io.StringIO()),
            mock.patch.object(train, "train_step", noting), mock.patch.object(train.meshes, "close_mesh", lambda: None),
            mock.patch.object(train.CheckpointManager, "save", lambda *_: None),
            mock.patch.object(dist, "new_group", lambda *args, backend=None, **how: new_group(*args, backend="fake", **how)),
        ):  # fmt: skip
            if code := train.main(arguments):
                raise RuntimeError(f"the run ended with exit code {code}")
    return Phase([], statistics.median(after - before for before, after in pairwise(began[WARM:])))


def hop_seconds(sizes: tuple[int, ...] = (2, 4, 6), rounds: int = 300) -> float:
    """Seconds that one more hop adds to a sum of one number over gloo, on this machine: median by number of ranks, and the
    slope of a line through them."""
    medians = [_sum_seconds(n, rounds) for n in sizes]
    hops = [2 * (n - 1) for n in sizes]
    return statistics.linear_regression(hops, medians).slope


def _sum_seconds(ranks: int, rounds: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
                seconds, number = [], torch.ones(())
                for _ in range(rounds):
                    began = time.perf_counter()
                    dist.all_reduce(number)
                    seconds.append(time.perf_counter() - began)
                with open(f"{folder}/{rank}", "w") as file:
                    file.write(str(statistics.median(seconds)))
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        with open(f"{folder}/0") as file:
            return float(file.read())


def table(ranks: list[int], options: list[str], hop: float) -> list[list[str]]:
    rows = []
    for n in ranks:
        for name, phase in (phases_of(options, n) | {"loop, beside the step's collectives": loop(options, n)}).items():
            kinds = [f"{[c.kind for c in phase.collectives].count(kind)} {kind}" for kind in ALGORITHMS
                     if kind in [c.kind for c in phase.collectives]]  # fmt: skip
            rows.append([
                name, f"{n:,}", ", ".join(kinds) or "none", f"{phase.messages:,}", f"{phase.bytes / 1e3:,.1f} kB",
                f"{phase.seconds * 1e3:,.1f} ms", f"{phase.latency(hop) * 1e3:,.2f} ms",
            ])  # fmt: skip
    return sorted(rows, key=lambda row: [other[0] for other in rows].index(row[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,512,4096,16384", help="numbers of ranks, separated by commas")
    parser.add_argument("--hop-us", type=float, default=0.0, help="microseconds of a hop over gloo; 0: measure it here")
    parser.add_argument("--json")
    args, options = parser.parse_known_args()
    hop = args.hop_us / 1e6 or hop_seconds()
    columns = ["phase", "ranks", "collectives", "messages of rank 0", "bytes of rank 0", "processor time of rank 0", "latency"]
    notes = f"A hop over gloo takes {hop * 1e6:.0f} us; the step's collectives are of {DEVICE}s."
    harness.report("What the ranks tell each other", columns, table([int(n) for n in args.ranks.split(",")], options, hop), notes, args.json)


if __name__ == "__main__":
    main()
