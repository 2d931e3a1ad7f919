"""Saving and loading a checkpoint: ours, PyTorch's as shipped, and the limits that nothing can
beat.

    python -m lab.bench.checkpoint [--folder DIR] [--gigabytes 1.5] [--rounds 5] [--threads N] [--json out.json]

One process holds weights and AdamW state of about the size asked for, and in turn: copies the bytes
(the limit of a blocked time without overlap), writes and fsyncs them (the limit of a save),
`dcp.save`s them, saves them with our manager and waits for it, and saves them while it trains:
`blocked` is how long `save` and the optimizer's wait for the copy take together, `durable` how long
until the checkpoint counts. `--threads`: of the training; by default all cores but one, which the
save can have.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from checkpoint import state, verify
from checkpoint.manager import CheckpointManager
from configs import program
from configs.schema import Checkpoint, Parallelism, Run
from lab.bench import harness
from parallelisms.mesh import close_mesh, open_mesh
from training.optimizers import materialise


def timed(run: Callable[[], object]) -> float:
    os.sync()  # what the contender before left unwritten is not this one's to wait for
    return timed_alone(run)


def timed_alone(run: Callable[[], object]) -> float:
    """Time without emptying the disk's queue first, since writes in flight are to be measured."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def write_and_sync(path: Path, tensors: list[torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for t in tensors:
            file.write(memoryview(t.detach().flatten().view(torch.uint8).numpy()))
        os.fsync(file.fileno())


def rss_gib() -> float:
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="on the disk to measure [a temporary folder]")
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument(
        "--tokens", type=int, default=256, help="of the step that trains during the save"
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = Path(tempfile.mkdtemp(prefix="plumbline-bench-", dir=args.folder))
    mesh = open_mesh(Run(), Parallelism(), 1)
    width, layers = 1024, 30  # weight, exp_avg and exp_avg_sq of each: 90 large tensors
    rows = int(args.gigabytes * 1e9 / (3 * 4 * width * layers))
    model = nn.ModuleList(
        nn.Linear(width, rows, bias=False, device=mesh.device) for _ in range(layers)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    materialise(optimizer)
    live = state.tensors(model, optimizer)
    for t in live.values():
        t.detach().copy_(torch.rand(t.shape))
    on_host = [t.detach().cpu() for t in live.values()]
    size = sum(t.nbytes for t in on_host) / 1e9
    copies = [torch.empty_like(t) for t in on_host]
    buffers = state.buffers(live)
    x = torch.rand(args.tokens, width, device=mesh.device)
    before = rss_gib()

    def manager(name: str, **options: object) -> CheckpointManager:
        return CheckpointManager(
            Checkpoint(keep_last=0, **options), base / name, mesh, {"must_match": {}}
        )

    def forward_and_backward() -> None:
        optimizer.zero_grad(set_to_none=False)
        for layer in model:
            layer(x).sum().backward()

    sync = manager("sync", async_save=False)
    overlapped = manager("async", async_save=True)
    # nothing is there yet; as in every run, this makes and touches the buffers
    overlapped.load(model, optimizer)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        if i > 0:  # in the round before, memory and page cache are touched for the first time
            seconds.setdefault(name, []).append(value)

    for i in range(args.rounds + 1):
        note("memory copy", timed(lambda: [c.copy_(t) for c, t in zip(copies, on_host)]))
        note("raw write + fsync", timed(lambda: write_and_sync(base / "raw", on_host)))
        os.unlink(base / "raw")
        shutil.rmtree(base / "dcp", ignore_errors=True)
        note("dcp.save, as shipped", timed(lambda: dcp.save(live, checkpoint_id=base / "dcp")))
        note("ours, waiting", timed(lambda: (sync.save(i, model, optimizer, {}), sync.poll())))
        note("forward and backward, no save", timed(forward_and_backward))
        os.sync()
        began = time.perf_counter()
        overlapped.save(i, model, optimizer, {})
        blocked = time.perf_counter() - began
        during = timed_alone(forward_and_backward)
        blocked += timed_alone(overlapped.wait_for_copy)
        note("ours, overlapped: blocked", blocked)
        overlapped.wait(600)
        note("ours, overlapped: durable", time.perf_counter() - began)
        note("forward and backward during the copy and the save", during)
        overlapped.poll()
        note(
            "dcp.load, verifies nothing", timed(lambda: dcp.load(live, checkpoint_id=base / "dcp"))
        )
        for name, check in (
            ("ours, load and verify every byte", True),
            ("ours, load without", False),
        ):
            path = verify.newest(base / "sync")
            note(
                name,
                timed(
                    lambda: state.read(path, verify.read_manifest(path), live, buffers, check, None)
                ),
            )
        for name in "sync", "async":  # keep_last would remove within the time that is measured
            shutil.rmtree(verify.newest(base / name))
    memory = rss_gib() - before
    sync.close(), overlapped.close()
    close_mesh()
    shutil.rmtree(base)

    save, load = (
        statistics.median(seconds[name])
        for name in ("dcp.save, as shipped", "dcp.load, verifies nothing")
    )
    table = []
    for name, times in seconds.items():
        median = statistics.median(times)
        baseline = load if "load" in name else save
        rate = "" if "forward" in name or "blocked" in name else f"{size / median:.2f} GB/s"
        table.append(
            [name, f"{median:.3f} s", f"{min(times):.3f} s", rate, f"{median / baseline:.4f}"]
        )
    notes = (
        f"{size:.2f} GB in {len(live)} tensors, {args.rounds} rounds in turn. The two managers "
        f"keep {memory:.2f} GiB resident "
        "(staging buffers); peak of the process "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB."
    )
    harness.report(
        "Checkpoints",
        ["what", "median", "fastest", "rate", "median / dcp's"],
        table,
        notes,
        args.json,
    )


if __name__ == "__main__":
    program.run(main)
