"""Start a run on a Ray cluster.

    python -m tools.launch.ray_train --nodes 4 --gpus 8 configs/llama_70b.toml [--table.key=value]

Ray Train finds the nodes and starts one worker on each; the worker runs run_train.sh there, as one
would by hand. So a rank under Ray is a separate process too, with its own signals, log and exit
code. When a worker or its node fails, Ray starts all of them again, at most --max-failures times,
and the run resumes from its newest checkpoint.

SIGTERM to this command stops the run with a checkpoint. run.folder must be on storage that all
nodes share. Exit code: 0 done; 2 wrong configuration; 75 stopped with a checkpoint; 76 one step
fails again and again; otherwise that of the last failure. Ray is optional: pip install
"ray[default,train]". (Without "default" it works too, but Ray Train then complains once a second.)
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from configs import program
from configs.load import load_config
from configs.schema import InputError
from tools.launch.rank import end_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
WRONG_INPUT = 2
STOPPED = 75
CRASH_LOOP = 76  # exit codes of train.py


def node(job: dict) -> None:
    """Run one node's share of the run. Raises RuntimeError for an end that Ray should retry."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        mine = (ray.util.get_node_ip_address(), free.getsockname()[1])
    address, port = broadcast_from_rank_zero(mine)
    environment = {
        "NGPU": job["ranks"],
        "NNODES": context.get_world_size(),
        "NODE_RANK": context.get_world_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    code = run_script(job, environment)
    Path(job["codes"], str(context.get_world_rank())).write_text(str(code))
    if code not in (0, WRONG_INPUT, STOPPED, CRASH_LOOP):
        node_rank = context.get_world_rank()
        raise RuntimeError(f"run_train.sh on node {node_rank} ended with exit code {code}")


def run_script(job: dict, environment: dict) -> int:
    """Run the script in a Ray worker. It gets SIGTERM as soon as the file job["stop"] exists."""
    process = subprocess.Popen(
        [job["script"], *job["arguments"]],
        cwd=job["folder"],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        # a worker that Ray kills leaves nothing behind
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )
    asked = False
    while process.poll() is None:
        time.sleep(0.5)
        if not asked and Path(job["stop"]).exists():
            asked = True
            process.terminate()
    return process.returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch.ray_train", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes, each of them one Ray worker")
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs of each node, and ranks on it; 0: none"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks on each node, where --gpus is 0"
    )
    parser.add_argument(
        "--max-failures", type=int, default=3, help="how often to start again after a failure"
    )
    options, arguments = parser.parse_known_args(argv)
    ranks = options.gpus or options.ranks
    try:
        cfg = load_config(arguments, options.nodes * ranks, ranks)
        if cfg.run.mirror:
            raise InputError(
                f"run.mirror = {cfg.run.mirror}: Ray's nodes need a run.folder that they share; put "
                f"python -m tools.mirror {cfg.run.mirror} FOLDER before this command to copy it"
            )
        folder = Path(cfg.run.folder)
        folder = folder if folder.is_absolute() else ROOT / folder
        return run(options, arguments, ranks, folder)
    except InputError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT


def run(options: argparse.Namespace, arguments: list[str], ranks: int, folder: Path) -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError:
        raise InputError('Ray Train is not installed: pip install "ray[default,train]"') from None

    codes = folder / "ray" / "exit-codes"
    codes.mkdir(parents=True, exist_ok=True)
    # a file, because Ray gives a driver's end to its workers as SIGKILL
    stop = folder / "ray" / "stop"
    for old in (*codes.iterdir(), stop):
        old.unlink(missing_ok=True)
    job = {
        "script": str(ROOT / "run_train.sh"),
        "arguments": arguments,
        "folder": str(ROOT),
        "ranks": ranks,
        "codes": str(codes),
        "stop": str(stop),
    }
    ray.init()
    # Ray's own handler would end the driver
    signal.signal(signal.SIGTERM, lambda number, frame: stop.touch())
    each = {"GPU": options.gpus} if options.gpus else {"CPU": 1}
    trainer = DataParallelTrainer(
        node,
        train_loop_config=job,
        scaling_config=ScalingConfig(
            num_workers=options.nodes, resources_per_worker=each, use_gpu=options.gpus > 0
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    failed = 0
    try:
        trainer.fit()
    except TrainingFailedError as error:
        print(f"Ray gave up: {error}", file=sys.stderr)
        failed = 1
    # a node that was lost has left none, or an old one
    ended = [int(file.read_text()) for file in codes.iterdir()]
    return max(ended, default=1) or failed


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
