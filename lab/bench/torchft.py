"""Measure what a kill -9 costs torchft (pip install torchft-nightly): of three replicas of a small
model over gloo, one is killed and started again at once.

    python -m lab.bench torchft [--rounds 5] 2>/dev/null     # its own log goes there

Prints the seconds until the others commit a step, the steps that they then do with fewer replicas,
each on a smaller global batch, and the seconds until the third takes part again.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import nn

from configs.schema import InputError

REPLICAS = 3
WIDTH, LAYERS, BATCH = 256, 8, 16
STEP_SECONDS = 0.05  # of waiting in each step, so that three processes share the cores
FIRST = 60  # steps before the kill
PORT = 29519


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replica", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        raise InputError("torchft is not installed: pip install torchft-nightly")
    if args.replica >= 0:
        train(args.replica, args.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.rounds)
    return 0


def measure(folder: Path, rounds: int) -> None:
    here = os.environ | {"OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": f"http://localhost:{PORT}"}
    from torchft.coordination import LighthouseServer

    # the defaults of its command, but a second instead of a minute for replicas that come late
    lighthouse = LighthouseServer(
        bind=f"[::]:{PORT}",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=5000,
    )
    commands = []
    for replica in range(REPLICAS):
        out = folder / f"{replica}.jsonl"
        words = [f"--replica={replica}", f"--out={out}"]
        commands.append([sys.executable, "-m", "lab.bench", "torchft", *words])
    replicas = [start(command, here) for command in commands]
    first = folder / "0.jsonl"
    found = []
    try:
        for _ in range(rounds):
            enough = last(first)["step"] + FIRST
            until(lambda: last(first)["replicas"] == REPLICAS and last(first)["step"] > enough)
            killed = time.time()
            replicas[1].kill()
            replicas[1].wait()
            replicas[1] = start(commands[1], here)
            until(lambda: any(row["replicas"] < REPLICAS for row in after(first, killed)))
            until(lambda: last(first)["replicas"] == REPLICAS)
            rows = [row for row in after(first, killed) if row["committed"]]
            fewer = [row for row in rows if row["replicas"] < REPLICAS]
            found.append((fewer[0]["time"] - killed, len(fewer), rows[-1]["time"] - killed))
            print(
                "{:.2f} s to the next step, {} with fewer replicas, whole after {:.2f} s".format(
                    *found[-1]
                )
            )
    finally:
        for process in replicas:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    print(
        "medians: {:.2f} s, {:.0f} steps, {:.2f} s".format(*map(median, zip(*found, strict=True)))
    )


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=nothing, stderr=nothing)


def until(true) -> None:
    deadline = time.monotonic() + 120
    while not true():
        if time.monotonic() > deadline:
            raise InputError("torchft did not come back within 120 s")
        time.sleep(0.02)


def after(path: Path, moment: float) -> list[dict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["time"] > moment]


def last(path: Path) -> dict:
    return (after(path, 0.0) or [{"step": 0, "replicas": 0}])[-1]


def train(replica: int, out: Path) -> None:
    """Be a replica, until this process is killed. Writes a row for each step."""
    import torchft

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    adamw = torch.optim.AdamW(model.parameters())

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
        replica_id=f"replica-{replica}",
        timeout=timedelta(seconds=10),
    )
    shared = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adamw)
    with open(out, "a", buffering=1, encoding="utf-8") as file:
        while True:
            optimizer.zero_grad()
            shared(torch.randn(BATCH, WIDTH)).square().mean().backward()
            time.sleep(STEP_SECONDS)
            before = manager.current_step()
            optimizer.step()
            step = manager.current_step()
            row = {"time": time.time(), "step": step, "committed": step > before}
            file.write(json.dumps(row | {"replicas": manager.num_participants()}) + "\n")
