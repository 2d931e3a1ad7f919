"""Starts the ranks of a tiny real run over gloo, and returns what each saw in its first step."""

import contextlib
import io
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import train
from configs.program import deaf_children
from lab.tour.shards import OwnedShard, elements, positions, shard_of
from lab.tour.watch import PhaseSpan, Routes, StepWatch

# Every 16 letters are one row of a batch.
TEXT = (
    "one row of text is cut from the long file, then two ranks share its tokens, and "
    "two others read other rows of a batch. The step ends when every rank is updated."
)
TINY = (
    "--model.dim=32 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=64 --model.vocab_size=264 --data.tokenizer=bytes "
    "--data.validation_fraction=0 --training.param_dtype=float32 --training.steps=1 "
    "--training.seq_len=16 --training.global_batch_size=4 --training.local_batch_size=2 "
    "--lr_schedule.warmup_steps=0 --validation.interval=0 --checkpoint.interval=0 "
    "--metrics.tensorboard=false --metrics.progress=off --debug.sample_tokens=0"
).split()
DENSE = ["--parallelism.tensor_parallel=2"]  # on four ranks: dp_shard 2 x tp 2
EXPERTS = (
    "--model.family=qwen3 --model.flavor=debug_moe --model.n_layers=1 --model.n_experts=4 "
    "--model.experts_per_token=2 --model.expert_dim=16 --training.seq_len=8 "
    "--training.global_batch_size=2 --training.local_batch_size=1 --parallelism.expert_parallel=2"
).split()
WEIGHTS = (
    "tok_embeddings.weight",
    "layers.0.attention_norm.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wo.weight",
    "output.weight",
)
SECONDS = 120  # for a run


@dataclass(frozen=True)
class Seen:
    """Record of one rank's first step."""

    rank: int
    mesh: dict[str, tuple[int, int]]  # dimension -> this rank's coordinate, and the size
    rows: list[str]  # the text of its rows of the batch
    positions: range  # of a row, between blocks
    shards: list[OwnedShard]
    held: int  # elements of all weights
    total: int
    stretches: list[PhaseSpan]
    routes: Routes


def run(ranks: int, options: list[str]) -> list[Seen]:
    """Train for one step. Returns what each rank saw, by rank. Raises RuntimeError if one fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.tour.run"])
    with deaf_children():
        ensure_running()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT, encoding="ascii")
        processes = []
        for rank in range(ranks):
            process = context.Process(target=train_and_report, args=(folder, rank, ranks, options))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(SECONDS)
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(ranks)]


def train_and_report(folder: Path, rank: int, ranks: int, options: list[str]) -> None:
    """Be one rank of the run, as torchrun would start it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    real = train.train_step

    def watched(job: train.Job, batch: dict[str, Tensor], *rest: Any) -> train.StepResult:
        seen, result = watch_step(job, batch, partial(real, job, batch, *rest))
        (folder / f"{rank}").write_bytes(pickle.dumps(seen))
        return result

    train.train_step = watched
    places = [f"--run.folder={folder}/run", f"--data.cache={folder}/cache"]
    places.append(f"--data.source={folder}/text.txt")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = train.main([*TINY, *options, *places])
    if code:
        raise SystemExit(f"rank {rank} ended with {code}: {said.getvalue()}")


def watch_step(job: train.Job, batch: dict[str, Tensor], step: Callable) -> tuple[Seen, Any]:
    """Return this rank's record of a step, and the step's result."""
    model = job.model
    weights = dict(model.named_parameters())
    table = weights["tok_embeddings.weight"].full_tensor()  # before the optimizer changes it
    shards = [shard_of(name, weights[name]) for name in WEIGHTS]
    held, total = elements(model)
    first_inputs = []
    model.get_submodule("layers.0").register_forward_pre_hook(
        lambda _, inputs: first_inputs.append(inputs[0].detach())
    )
    with StepWatch(model) as watch:
        result = step()
    tokens = batch["tokens"][0]  # [b, T]: the first microbatch
    seen = Seen(
        rank=dist.get_rank(),
        mesh=coordinates(weights["tok_embeddings.weight"].device_mesh),
        rows=[bytes(row).decode("ascii") for row in tokens.tolist()],
        positions=positions(first_inputs[0], tokens, table),
        shards=shards,
        held=held,
        total=total,
        stretches=watch.stretches,
        routes=watch.routes,
    )
    return seen, result


def coordinates(mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    names = mesh.mesh_dim_names
    return {name: (mesh.get_local_rank(name), mesh.size(i)) for i, name in enumerate(names)}
