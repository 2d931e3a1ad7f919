"""Run what is missing of a ladder as tasks of a Ray cluster, as many at a time as it has room for.

The ladder's folder must be on storage that all nodes share. A run whose node is lost begins again on
another, at its newest checkpoint. What a run prints is in OUT/NAME.log.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import program
from configs.schema import InputError
from configs.words import number_of
from tools.ladder import runs
from tools.ladder.rungs import Rung
from tools.launch.ray_train import run_script

RETRIES = 3  # of a run whose node was lost


def run_missing(out: Path, rungs: Sequence[Rung]) -> int:
    """Run what is not done. SIGTERM and SIGINT stop all runs with a checkpoint. Returns 0, or the
    largest exit code of a run. Raises InputError where no node has room for a run."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    import ray

    left = runs.undone(out, rungs)
    if not left:
        return 0
    with ray.init():
        return run_tasks(out, left)


def run_tasks(out: Path, left: Sequence[Rung]) -> int:
    """Run tasks on the cluster to which this process is connected, the dearest first, so that none
    of these is alone at the end."""
    import ray

    task = ray.remote(max_retries=RETRIES, **room(ray.nodes()))(train)
    stop = (out / "stop").absolute()
    stop.unlink(missing_ok=True)
    codes = []
    with runs.signals_to(lambda _: stop.touch()):  # Ray's handler would end this process
        running = {task.remote(job_of(out, rung, stop)): rung.name for rung in left[::-1]}
        print(f"Ray: {number_of(len(left), 'run')}, in {out.absolute()}", flush=True)
        while running:
            (done, *_), _ = ray.wait(list(running))
            codes.append(exit_code(done, out / f"{running.pop(done)}.log"))
            print(f"{len(codes)} of {number_of(len(left), 'run')} ended", flush=True)
    if max(codes) == runs.STOPPED:
        print("start the ladder again to go on", file=sys.stderr)
    return max(codes)


def train(job: dict) -> int:
    """Run one configuration, as a Ray task, and return its exit code."""
    if Path(job["stop"]).exists():
        return runs.STOPPED
    with open(job["log"], "a", encoding="utf-8") as log:
        return program.exit_code_of(run_script(job, job["environment"], log))


def job_of(out: Path, rung: Rung, stop: Path) -> dict:
    return {
        "script": str(runs.ROOT / "run_train.sh"),
        "arguments": [str(runs.toml_of(out, rung).absolute())],
        "folder": str(runs.ROOT),
        # another node's environment is not this one's
        "environment": {"NGPU": ranks()},
        "stop": str(stop),
        "log": str((out / f"{rung.name}.log").absolute()),
    }


def room(nodes: list[dict]) -> dict[str, int]:
    """Return what a run takes of its node: as many GPUs as ranks, or cores where there are none."""
    kind = "GPU" if any(node["Resources"].get("GPU") for node in nodes) else "CPU"
    most = max((node["Resources"].get(kind, 0) for node in nodes if node["Alive"]), default=0)
    if most < ranks():
        raise InputError(f"--ray: NGPU={ranks()}, and no node has more than {most:.0f} {kind}s")
    return {f"num_{kind.lower()}s": ranks()}


def ranks() -> int:
    return int(os.environ.get("NGPU") or 1)


def exit_code(done: object, log: Path) -> int:
    """Return the exit code of a run that has ended, and name its log if it has failed."""
    import ray

    try:
        code = ray.get(done)
    except ray.exceptions.RayError as error:
        print(f"{log}: given up after {RETRIES} retries: {error}", file=sys.stderr)
        return 1
    if code not in (0, runs.STOPPED):
        print(f"{log}: exit code {code}", file=sys.stderr)
    return code
