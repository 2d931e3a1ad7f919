"""Shared parts of several test files: meshes, small models, whole runs of train.py, and readers of
a run's folder."""

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from models import NUMBERS
from tests import fork_server, ranks

MESHES = {  # name: (ranks, options, data-parallel ranks)
    "one": (1, [], 1),
    "fsdp2": (2, [], 2),
    "ddp2": (2, ["--parallelism.data_parallel_replicate=2"], 2),
    "tp2": (2, ["--parallelism.tensor_parallel=2"], 1),
    "fsdp3": (3, [], 3),
    "hsdp2x2": (4, ["--parallelism.data_parallel_replicate=2"], 4),
    "tp4": (4, ["--parallelism.tensor_parallel=4"], 1),
    "fsdp2xtp2": (4, ["--parallelism.tensor_parallel=2"], 2),
    "hsdp2x2xtp2": (
        8,
        ["--parallelism.tensor_parallel=2", "--parallelism.data_parallel_replicate=2"],
        4,
    ),
    "cp2": (2, ["--parallelism.context_parallel=2"], 1),
    "pp2": (2, ["--parallelism.pipeline_parallel=2"], 1),
    "pp4": (4, ["--parallelism.pipeline_parallel=4", "--model.n_layers=4"], 1),
    "pp2xfsdp2": (4, ["--parallelism.pipeline_parallel=2"], 2),
    "pp2xtp2": (4, ["--parallelism.pipeline_parallel=2", "--parallelism.tensor_parallel=2"], 1),
    "pp2xhsdp2x2": (
        8,
        ["--parallelism.pipeline_parallel=2", "--parallelism.data_parallel_replicate=2"],
        4,
    ),
    "pp2xfsdp2xtp2": (
        8,
        ["--parallelism.pipeline_parallel=2", "--parallelism.tensor_parallel=2"],
        2,
    ),
}
CP2, ULYSSES = "--parallelism.context_parallel=2", "--parallelism.context_parallel_method=ulysses"
CONTEXT_MESHES = {  # as MESHES
    "cp2": MESHES["cp2"],
    "cp3": (3, ["--parallelism.context_parallel=3"], 1),
    "fsdp2xcp2": (4, [CP2], 2),
    "cp2xtp2": (4, [CP2, "--parallelism.tensor_parallel=2"], 1),
    "pp2xcp2": (4, [CP2, "--parallelism.pipeline_parallel=2"], 1),
}
EP2 = "--parallelism.expert_parallel=2"
EXPERT_MESHES = {  # as MESHES
    "ep2": (2, [EP2], 2),
    "ep2xfsdp2": (4, [EP2], 4),
    "ep2xhsdp2": (4, [EP2, "--parallelism.data_parallel_replicate=2"], 4),
    "ep2xpp2": (4, [EP2, "--parallelism.pipeline_parallel=2"], 2),
    "ep2 of cp2": (2, [EP2, CP2], 1),
    "ep2xcp2": (4, [EP2, CP2], 2),
    "ep2xpp2xcp2": (8, [EP2, "--parallelism.pipeline_parallel=2", CP2], 2),
}
# Two ranks of these are on each host: what tests/parity.py makes of the marker.
BY_HOST = ["--parallelism.expert_exchange=hierarchical", "two ranks on a host"]
EXPERT_MESHES |= {"ep4 by host": (4, ["--parallelism.expert_parallel=4", *BY_HOST], 4)}
# The same with tensor parallelism, which splits the hidden units of shared experts evenly.
EXPERT_MESHES |= {
    f"experts on {name}": (
        ranks,
        [*options, "--parallelism.tensor_parallel=2", "--model.expert_dim=12"],
        dp_size,
    )
    for name, (ranks, options, dp_size) in {
        "tp2": (2, [], 1),
        "ep2 of tp2": (2, [EP2], 1),
        "ep2xtp2": (4, [EP2], 2),
        "ep4 of cp2xtp2": (4, [CP2, "--parallelism.expert_parallel=4"], 1),
        "ep4xtp2 by host": (4, ["--parallelism.expert_parallel=4", *BY_HOST], 2),
    }.items()
}
SMALL_MODEL = (  # sizes that meshes do not divide evenly, in float32, with sequences of 16 tokens
    "--model.dim=50 --model.n_layers=3 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=6 "
    "--model.hidden_dim=44 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16 "
    "--training.loss_chunk_tokens=40"
).split()
# with eps 1e-8 Adam amplifies rounding where gradients are near 0
ADAMW = ["--optimizer.lr=0.01", "--optimizer.eps=1e-4"]
# traced and partitioned for real; fast enough for tests
COMPILED = ["--compile.enabled=true", "--compile.backend=aot_eager"]
STEPS = 16  # of a tiny run
TINY = (
    "--model.dim=32 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=4 --model.head_dim=8 "
    "--model.hidden_dim=36 "
    "--model.vocab_size=263 --data.tokenizer=bytes --training.param_dtype=float32 "
    "--training.seq_len=16 "
    f"--training.global_batch_size=8 --training.local_batch_size=2 --training.steps={STEPS} "
    "--lr_schedule.warmup_steps=3 "
    "--optimizer.lr=0.01 --optimizer.eps=1e-5 --checkpoint.interval=5 --metrics.interval=1 "
    "--metrics.tensorboard=false "
    "--validation.interval=0 --debug.sample_tokens=0"
).split()


def tiny_run(place: Path) -> list[str]:
    """Prepare a tiny run over a corpus of 40 small documents, with its own cache."""
    corpus = place / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02d}.txt").write_text(
            f"document {i}: " + " ".join(str(n * (i + 7) % 97) for n in range(60)) + "\n"
        )
    return [*TINY, f"--data.source={corpus}", f"--data.cache={place / 'cache'}"]


def of_family(family: str, options: Sequence[str]) -> list[str]:
    """Return the options without those of a model that the family does not have."""
    known = {f"--model.{name}" for name in NUMBERS[family].options}
    return [o for o in options if not o.startswith("--model.") or o.partition("=")[0] in known]


def as_typed(options: Sequence[str]) -> list[str]:
    """Keep the last of each option: a command line may give each only once."""
    return list({option.partition("=")[0]: option for option in options}.values())


def run(options: list[str], folder: Path) -> tuple[int, str]:
    """Run train.main on this rank; return its exit code, and what it printed as an error. Notes
    which samples each step saw."""
    real = train.train_step

    def noting(job, batch, *options):
        result = real(job, batch, *options)
        if (
            job.mesh.pp_rank == job.mesh.cp_rank == job.mesh.device_mesh.get_local_rank("tp") == 0
            and not result.flags.no_data
        ):
            with open(folder / f"samples-{job.mesh.dp_rank}.jsonl", "a") as file:
                file.write(json.dumps(batch["window"].tolist()) + "\n")
        return result

    train.train_step = noting
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = train.main([f"--run.folder={folder}", *options])
    return code, errors.getvalue()


def run_that_reports(options: list[str], folder: Path) -> tuple[int, str]:
    """As `run`, with a report of the load of experts every three steps."""
    train.EXPERT_STEPS = 3
    return run(options, folder)


def printed(options: list[str], folder: Path) -> tuple[int, str]:
    """Run train.main on this rank; return its exit code, and all that it printed."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = train.main([f"--run.folder={folder}", *options])
    return code, said.getvalue()


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def series(folder: Path, key: str = "loss") -> dict[int, float]:
    return {line["step"]: line[key] for line in lines_of(folder) if key in line}


def logged(folder: Path, step: int) -> bool:
    """Return True if a run that logs every step has logged that one."""
    path = folder / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= step


def in_mid_run(folder: Path, step: int) -> bool:
    """Return True if the run has logged that step and published a checkpoint: only then does a
    start after a kill resume. A save is published while the next steps run, on a busy disk many
    steps later."""
    return logged(folder, step) and any((folder / "checkpoints").glob("step-*"))


def samples(folder: Path, dp_size: int) -> list[list[int]]:
    """Return the global batch of every step that was trained, in order, put together from the
    ranks' shares."""
    shares = [
        [json.loads(line) for line in (folder / f"samples-{r}.jsonl").read_text().splitlines()]
        for r in range(dp_size)
    ]
    return [sum(rows, []) for rows in zip(*shares, strict=True)]


def killed_at(step: int, options: list[str], folder: Path) -> None:
    """Start a run in separate processes, and kill it with -9 as soon as it has logged `step`."""
    process = fork_server.start(_on_one_thread, options, folder)
    try:
        deadline = time.monotonic() + 60 * ranks.WORKERS
        while time.monotonic() < deadline and not logged(folder, step):
            time.sleep(0.005)
    finally:
        fork_server.end(process)


def _on_one_thread(options: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(BaseException):
        run(options, folder)


def stopped_at(step: int, options: list[str], folder: Path, signalled_rank: int = 0) -> int:
    """Run with one rank that gets SIGTERM during `step`; returns the exit code."""
    signal_at(step, signalled_rank)
    return run(options, folder)[0]


def signal_at(step: int, signalled_rank: int = 0) -> None:
    """Let one rank get SIGTERM during `step` of the run that follows."""
    at_step(step, partial(os.kill, os.getpid(), signal.SIGTERM), signalled_rank)


def at_step(step: int, act: Callable[[], Any], rank: int = 0) -> None:
    """Call `act` on one rank as its step of this number begins, in the runs that follow. rank: -1 is
    the last."""
    real, steps = train.train_step, itertools.count(1)

    def acting(job, batch, *rest):
        if next(steps) == step and job.mesh.rank == rank % job.mesh.size:
            act()
        return real(job, batch, *rest)

    train.train_step = acting


def killed(options: list[str], folder: Path, calls: int) -> tuple[int, str]:
    """Run with a last rank that dies of kill -9 as its step number `calls` begins."""
    at_step(calls, partial(os.kill, os.getpid(), signal.SIGKILL), -1)
    return run(options, folder)


def said(folder: Path) -> str:
    return (folder / "logs" / "rank-00000.log").read_text()


def trained(folder: Path, dp_size: int) -> tuple[int, list[list[int]]]:
    """Return the step after which the newest start of this run went on, and the samples of each
    step since. Removes the notes."""
    first = said(folder).split("resumed after step ")[1:]
    rows = samples(folder, dp_size)
    for path in folder.glob("samples-*"):
        path.unlink()
    return int(first[-1].split()[0]) if first else 0, rows


def ends(
    n: int, folder: Path, fn: Callable, *args: object, seconds: float = 60, last_hangs: bool = False
) -> list[int | None]:
    """Run ranks that may end at once, as run_ranks does: return the exit code of each, or minus the
    signal it died of. None for one that has not ended in time. last_hangs: so the last rank is not
    waited for when the others have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[ForkServerProcess] = []
    codes = []
    try:
        for rank in range(n):
            processes.append(fork_server.start(ranks.child, folder, rank, n, _and_exit, (fn, args)))
        deadline = time.monotonic() + seconds * ranks.WORKERS
        for rank, process in enumerate(processes):
            if last_hangs and rank == n - 1:
                deadline = time.monotonic() + ranks.WORKERS
            process.join(max(deadline - time.monotonic(), 0))
            codes.append(process.exitcode)
    finally:
        for process in processes:
            fork_server.end(process)
    return codes


def _and_exit(fn: Callable, args: tuple) -> None:
    os._exit(fn(*args)[0])


def losses_of_four(folder: Path, options: list[str]) -> dict[int, float]:
    """Return the loss of each step of four undisturbed ranks on one host. They are forked, since
    separate programs would take 25 s of processor time more, and compute the same bits."""
    folder.mkdir()
    assert ranks.run_ranks(4, run, options, folder, timeout=200) == [(0, "")] * 4
    return series(folder)


def data_rank(
    dp_rank: int = 0, dp_size: int = 1, own: list[range] | None = None
) -> SimpleNamespace:
    """Return a rank as the data sees it (data/loader.py::Ranks), without others to gather from. own:
    the positions of a sequence that are its; None: all."""
    return SimpleNamespace(
        dp_rank=dp_rank,
        dp_size=dp_size,
        token_ranges=lambda seq_len: own or [range(seq_len)],
        gather=lambda value: [value],
    )


def same_batches(one: list[dict], other: list[dict]) -> bool:
    """Return whether two lists of batches are equal, bitwise."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(one, other, strict=True)
    )


def free_port() -> int:
    """Return a free TCP port from a range of this test worker's own, below the ports that the
    system gives to outgoing connections."""
    for port in _PORTS:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = iter(
    range(12_000 + 1000 * (_WORKER % 16) + os.getpid() % 500, 12_000 + 1000 * (_WORKER % 16 + 1))
)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the CPU, gathered where it is a DTensor (a
    collective)."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().to("cpu", copy=True)


class Count(TorchDispatchMode):
    """Count of a step's matmuls, attention calls, and SiLUs (which represent the cheap rest)."""

    def __init__(self):
        super().__init__()
        self.seen = {"mm": 0, "attention": 0, "silu": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kind = {
            "mm": "mm",
            "silu": "silu",
            "_scaled_dot_product_flash_attention_for_cpu": "attention",
            "document_attention": "attention",
        }.get(name)
        if kind:
            self.seen[kind] += 1
        return func(*args, **(kwargs or {}))
