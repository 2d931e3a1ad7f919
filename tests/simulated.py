"""Functions that ranks with simulated GPUs run in tests/test_simulate.py. Ranks import them by
name."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable

import train
from lab.bench.device import checks, rival
from lab.simulate.job import in_steps, train_here
from models.kernels.ruled_attention import AttentionSpec
from models.layers import AttentionCore, Documents
from parallelisms.progress import record_flights
from reliability.position import Position
from tests import parity
from tests.runs import at_step, signal_at
from training.sample import sample

PATIENCE = timedelta(seconds=60)


def trajectories(runs: list[list[str]], dp_size: int) -> list[dict]:
    """Run those of tests/parity.py on this rank's GPU; the host waits inside train_step are
    recorded."""
    real = in_steps(train.train_step)

    def step(job, batch, *rest):
        """With a batch as a run's loader makes it."""
        if job.mesh.device.type == "cuda":
            batch = {name: x.pin_memory() for name, x in batch.items()}
        return real(job, batch, *rest)

    train.train_step = step
    return parity.trajectories([[*run, f"--run.device={device()}"] for run in runs], dp_size)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def runs(each: list[list[str]]) -> list[dict]:
    """Several runs of train.py, one after another in the same processes."""
    real = train.build, train.train_step
    seen = []
    for argv in each:
        train.build, train.train_step = real
        seen.append(train_here(argv))
    return seen


def stopped(argv: list[str], step: int) -> dict:
    """Run with a rank 0 that gets SIGTERM as a step begins."""
    signal_at(step)
    return train_here(argv)


def fail() -> None:
    raise ValueError("a mistake of this rank alone")


def raising(argv: list[str]) -> None:
    """Run with a last rank that raises in its second step."""
    at_step(2, fail, rank=-1)
    os._exit(train.main(argv))


def check_errors(names: list[str], folder: Path) -> dict[str, dict[str, float]]:
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return {name: checks.CHECKS[name].run(gpu, folder / name) for name in names}


def rivals_attention() -> float:
    return rival.attention_error(torch.device("cuda", int(os.environ["LOCAL_RANK"])))


# ------------------------------------------------------------------ mistakes that a GPU would show


def open_group() -> int:
    """Open NCCL and gloo, as a run opens them; returns this rank."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    return rank


def with_mistake(argv: list[str], mistake: str) -> dict:
    """Run with a mistake in train_step."""
    real = train.train_step

    def step(job, batch, *rest):
        MISTAKES[mistake](job, batch)
        return real(job, batch, *rest)

    train.train_step = step
    return train_here(argv)


def reads_a_number(job, batch) -> None:
    next(job.model.parameters()).sum().item()


def multiplies_with_the_host(job, batch) -> None:
    weight = next(job.model.parameters())
    torch.mul(weight, torch.ones(weight.shape))


def copies_from_pageable_memory(job, batch) -> None:
    torch.arange(7).to(job.mesh.device, non_blocking=True)


MISTAKES: dict[str, Callable] = {
    "item": reads_a_number,
    "host tensor": multiplies_with_the_host,
    "pageable": copies_from_pageable_memory,
}


def reads_on_another_stream() -> None:
    x = torch.ones(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul_(2)
    x.sum()


def waits_for_the_stream() -> None:
    x = torch.ones(1000, device="cuda")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(other)
    x.sum()


def writes_pinned_memory(waits: bool) -> None:
    host = torch.ones(1000).pin_memory()
    host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    host.fill_(3)
    torch.cuda.synchronize()


def reads_before_it_arrives(waits: bool) -> float:
    host = torch.full((10,), 5.0, device="cuda").to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    return host.sum().item()


def uses_a_result_too_early(waits: bool) -> float:
    """Take the result of an all-reduce of another stream without waiting for it."""
    open_group()
    x = torch.ones(4, device="cuda")
    out = torch.zeros(8, device="cuda")
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    if waits:
        work.wait()
    total = out.sum()
    work.wait()
    torch.cuda.synchronize()
    return total.item()


def leaves_one_out() -> None:
    rank = open_group()
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    if rank == 0:
        dist.all_reduce(x)
    dist.barrier(group=dist.new_group(backend="gloo"))
    torch.cuda.synchronize()


def other_order() -> None:
    rank = open_group()
    small, large = torch.ones(4, device="cuda"), torch.ones(8, device="cuda")
    for x in (small, large) if rank == 0 else (large, small):
        dist.all_reduce(x)
    torch.cuda.synchronize()


def sends_at_the_same_time() -> None:
    """Make each rank create the two-rank communicator of its own send first, which blocks until the
    other one joins it."""
    rank = open_group()
    other = 1 - rank
    first, second = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    works = [dist.isend(first, other, group=groups[rank])]
    works.append(dist.irecv(second, other, group=groups[other]))
    for work in works:
        work.wait()
    torch.cuda.synchronize()


def host_memory() -> None:
    open_group()
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(3), group=group)


def closes_alone() -> None:
    """Go on without closing the groups, on rank 1."""
    rank = open_group()
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
    if rank == 0:
        dist.destroy_process_group()
    else:
        dist.barrier(group=dist.new_group([1], backend="gloo"))
        os._exit(0)


def ruled_attention(dtype: torch.dtype) -> dict[str, float]:
    """Attention with a window, a scale and sinks on this rank's GPU, in whole windows and in
    documents: how far output and gradients are from those of the CPU in float64, relative to the
    largest number of each."""
    spec = AttentionSpec(window=5, scale=0.6, sinks=True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), (4,), (2, 20, 4, 8)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    positions = torch.arange(20).remainder(torch.tensor([[7], [20]]))
    found = {}
    for masked in False, True:
        seen = []
        for place, kind in ((device(), dtype), ("cpu", torch.float64)):
            documents = Documents.of(positions, torch.device(place)) if masked else None
            *tensors, grad = (x.to(place, kind) for x in given)
            q, k, v, sinks = (x.requires_grad_() for x in tensors)
            out = AttentionCore(spec)(q, k, v, documents, sinks)
            grads = torch.autograd.grad(out, (q, k, v, sinks), grad)
            seen.append([x.detach().cpu().double() for x in (out, *grads)])
        for name, mine, right in zip(("out", "q", "k", "v", "sinks"), *seen, strict=True):
            error = (mine - right).abs().max() / right.abs().max()
            found[f"{name}{' in documents' * masked}"] = error.item()
    return found


# ------------------------------------------------------------------------------------- ways to hang


def hangs_in_backward(argv: list[str]) -> None:
    """Run with a rank 1 that sleeps in its second step, in the backward of the first block."""
    real_step, real_attention, calls = train.train_step, AttentionCore.forward, []

    def step(*args):
        calls.append([])
        return real_step(*args)

    def attention(*args):
        out = real_attention(*args)
        calls[-1].append(1)
        if os.environ["RANK"] == "1" and (len(calls), len(calls[-1])) == (2, 1):
            out.register_hook(lambda gradient: time.sleep(600))
        return out

    train.train_step, AttentionCore.forward = step, attention
    # the frame of the one in tests/fork_server.py would be the innermost
    Variable._execution_engine = type(Variable._execution_engine).__base__()
    train.main(argv)


def hangs_without_one(folder: Path) -> None:
    """Leave out a collective on rank 1, which waits for the next one of the CPU. The other one's
    times out, and NCCL's flight recorder dumps."""
    global PATIENCE
    PATIENCE = timedelta(seconds=3)
    record_flights(folder / "logs")
    (folder / "logs").mkdir(exist_ok=True)
    rank = int(os.environ["RANK"])
    position = Position(folder / "logs" / f"rank-{rank:05d}.position", rank)
    position.open()
    open_group()
    position.begin("forward")
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    if rank == 0:
        dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier(group=dist.new_group(backend="gloo"))


def in_bfloat16() -> train.Job:
    """Build the model of the checks in bfloat16."""
    return train.build(checks.config(torch.device("cuda"), "--training.param_dtype=bfloat16"))


def sampled() -> list[int]:
    """Sample tokens from it, with keys and values kept."""
    job = in_bfloat16()
    return sample(job.model, checks.PROMPT, 4, checks.CONTEXT, job.mesh.device, temperature=0)


def one_step() -> float:
    """Return the loss of a step of it."""
    return train.train_step(in_bfloat16(), checks.batches()[0]).loss
