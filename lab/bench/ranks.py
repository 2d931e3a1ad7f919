"""The control traffic between ranks, gradients and weights aside, and what it costs as their number
grows.

    python -m lab.bench ranks [--ranks 8 512 4096 16384] [--hop-us 0] [--json out.json] [--table.key=value ...]

Rank 0 of each number of ranks runs the run's own code on PyTorch's fake process group, on the mesh
of the presets (sharded over at most 64 ranks, replicated beyond) with a tiny model.
`lab.bench saves` has the saves of large models. The collectives of each phase are counted, but
for those of FSDP and tensor parallelism (`tools.plan` has them). From them follow the messages and
bytes that rank 0 sends or receives and the longest chain of messages that wait for each other
(`lab/bench/rank_zero.py::ALGORITHMS`). Latency is that chain times what one hop takes: between
processes of this machine over gloo, which is measured, or on a network of GPUs
(`tools/plan/devices.toml`). Processor time is that of rank 0's Python process.
"""

import io
import os
import statistics
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import train
from checkpoint.manager import CheckpointManager
from configs.load import load_config
from configs.schema import Config
from lab.bench import harness, saves
from lab.bench.rank_zero import (
    ALGORITHMS,
    DEVICE,
    RANKS_PER_HOST,
    Collective,
    Phase,
    everyone_is_like_rank_0,
)
from parallelisms import contract
from reliability.health import Stragglers
from reliability.record import hosts
from tools.plan.trace import batch_of, pretend

TINY = (
    "--model.dim=64 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 "
    "--model.hidden_dim=64 --model.vocab_size=263 "
    "--data.tokenizer=bytes --training.seq_len=8 --training.local_batch_size=1 --run.device=cpu"
).split()


def mesh_options(ranks: int) -> list[str]:
    return [
        f"--parallelism.data_parallel_replicate={max(1, ranks // 64)}",
        f"--training.global_batch_size={ranks}",
    ]


def phases_of(options: list[str], ranks: int) -> dict[str, Phase]:
    """Return the phases of a run on so many ranks."""
    started = Phase()
    step = Phase(on_device=True)
    logged = Phase()
    stopped = Phase(on_device=True)
    with pretend(ranks, min(ranks, RANKS_PER_HOST)), everyone_is_like_rank_0():
        cfg = load_config(
            [*TINY, *mesh_options(ranks), *options], ranks, min(ranks, RANKS_PER_HOST)
        )
        with started.measured("start"):
            job = start(cfg)
        batch = batch_of(job, 1)
        train.train_step(job, batch)  # the first one looks up every sharding
        with step.measured("step"):
            train.train_step(job, batch)
        with logged.measured("log"):
            Stragglers().report(job.mesh, 1)
        with stopped.measured("stop"):
            job.mesh.sum_over_ranks(torch.ones(1))
    first_save, save, resume = saves.phases(cfg, ranks, min(ranks, RANKS_PER_HOST)).values()
    return {
        "start": started,
        "step": step,
        "log": logged,
        "first save, on top of each save": first_save,
        "save": save,
        "resume": resume,
        "stop (in a validation)": stopped,
        "retention": Phase(),  # a thread of rank 0 without waiting ranks
        "stop (in a step)": Phase(),  # travels with the loss
        # each launcher tells the others by the store
        "fault": Phase([Collective("store", -(-ranks // RANKS_PER_HOST), 64)]),
    }


def start(cfg: Config) -> train.Job:
    """Run the part of `train.train` before it opens the data and the checkpoints."""
    job = train.build(cfg)
    hosts(job.mesh)
    job.mesh.gather((-1, 0, ""))  # reliability/record.py::Start.fails_again_and_again
    contract.verify(
        job.model,
        job.optimizer,
        job.mesh,
        {"config": "x" * 6000, "code": "0" * 12, "torch": torch.__version__},
    )
    return job


STEPS, WARM = 24, 8  # of the loop that is measured; the first of them are left out


def loop(options: list[str], ranks: int) -> Phase:
    """Run a step of the whole loop of `train.train`, with its data and everything after a step
    except saves."""
    began = []
    train_step = train.train_step
    new_group = dist.new_group

    def noting(*args: object) -> train.StepResult:
        began.append(time.process_time())
        return train_step(*args)

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for i in range(40):
            (corpus / f"{i}.txt").write_text(f"document {i} " * 200)
        arguments = [
            *TINY,
            *mesh_options(ranks),
            f"--data.source={corpus}",
            f"--data.cache={folder}/cache",
            f"--run.folder={folder}/run",
            f"--training.steps={STEPS}",
            "--checkpoint.interval=0",
            "--validation.interval=0",
            "--metrics.tensorboard=false",
            "--metrics.progress=off",
            "--debug.sample_tokens=0",
            *options,
        ]
        with (
            pretend(ranks, min(ranks, RANKS_PER_HOST)),
            everyone_is_like_rank_0(),
            redirect_stdout(io.StringIO()),
            mock.patch.object(train, "train_step", noting),
            mock.patch.object(train.meshes, "close_mesh", lambda: None),
            mock.patch.object(CheckpointManager, "save", lambda *_: None),
            mock.patch.object(
                dist,
                "new_group",
                lambda *args, backend=None, **how: new_group(*args, backend="fake", **how),
            ),
        ):
            if code := train.main(arguments):
                raise RuntimeError(f"the run ended with exit code {code}")
    return Phase([], statistics.median(after - before for before, after in pairwise(began[WARM:])))


def hop_seconds(sizes: tuple[int, ...] = (2, 4, 6), rounds: int = 300) -> float:
    """Return the seconds that one more hop adds to a sum of one number over gloo, on this machine:
    median by number of ranks, and the slope of a line through them."""
    medians = [_sum_seconds(n, rounds) for n in sizes]
    hops = [2 * (n - 1) for n in sizes]
    return statistics.linear_regression(hops, medians).slope


def _sum_seconds(ranks: int, rounds: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
                )
                seconds = []
                number = torch.ones(())
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
        phases = phases_of(options, n)
        phases["loop, without the step's collectives"] = loop(options, n)
        for name, phase in phases.items():
            counts = Counter(c.kind for c in phase.collectives)
            kinds = [f"{counts[kind]} {kind}" for kind in ALGORITHMS if counts[kind]]
            rows.append(
                [
                    name,
                    f"{n:,}",
                    ", ".join(kinds) or "none",
                    f"{phase.messages:,}",
                    f"{phase.bytes / 1e3:,.1f} kB",
                    f"{phase.seconds * 1e3:,.1f} ms",
                    f"{phase.latency(hop) * 1e3:,.2f} ms",
                ]
            )
    return sorted(rows, key=lambda row: [other[0] for other in rows].index(row[0]))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[8, 512, 4096, 16384], help="numbers of ranks"
    )
    parser.add_argument(
        "--hop-us",
        type=float,
        default=0.0,
        help="microseconds of a hop over gloo; 0: measure it here",
    )
    args, options = parser.parse_known_args()
    hop = args.hop_us / 1e6 or hop_seconds()
    columns = [
        "phase",
        "ranks",
        "collectives",
        "messages of rank 0",
        "bytes of rank 0",
        "processor time of rank 0",
        "latency",
    ]
    notes = f"A hop over gloo takes {hop * 1e6:.0f} us; the step's collectives are of {DEVICE}s."
    harness.report(
        "What the ranks tell each other",
        columns,
        table(args.ranks, options, hop),
        notes,
        args.json,
    )
