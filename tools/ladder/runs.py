"""Run what is missing of a ladder, one run after another, and read what the runs have measured."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from configs.load import dump
from configs.schema import InputError
from configs.words import number_of
from tools import compare_runs
from tools.ladder.law import Array
from tools.ladder.rungs import Rung

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = "ladder.json"
FORMAT = 1
OF_RUN = {"name", "parameters", "steps", "tokens", "flops"}  # what the record says of each
STOPPED = 75  # exit code of a run that was asked to stop


@dataclass(frozen=True)
class Measured:
    """A run of the ladder that is done. A curve has fractions of the run [K] and the validation
    losses there [K], in nats per token."""

    name: str
    parameters: int
    tokens: int
    flops: float
    loss: float  # the last of the curve
    fractions: Array
    curve: Array


def toml_of(out: Path, rung: Rung) -> Path:
    return out / f"{rung.name}.toml"


def write(out: Path, argv: list[str], rungs: Sequence[Rung]) -> None:
    """Raises InputError where the folder holds another ladder."""
    record = {
        "format": FORMAT,
        "arguments": argv,
        "rungs": [
            {
                "name": rung.name,
                "parameters": rung.parameters,
                "steps": rung.cfg.training.steps,
                "tokens": rung.tokens,
                "flops": rung.flops,
            }
            for rung in rungs
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    before = read_record(out)
    if before and before != record:
        raise InputError(
            f"{out} holds another ladder ({RECORD}: {number_of(len(before['rungs']), 'run')} of "
            f"{' '.join(before['arguments'])}): give another --out"
        )
    for rung in rungs:
        toml_of(out, rung).write_text(dump(rung.cfg), encoding="utf-8")
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(out: Path) -> dict:
    """Return a folder's ladder; {} where there is none. Raises InputError for a damaged file."""
    path = out / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] == FORMAT and all(row.keys() >= OF_RUN for row in record["rungs"]):
            return record
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InputError(f"{path} is damaged: remove it, and start the ladder again")


def measured(out: Path) -> tuple[list[Measured], list[str]]:
    """Return the runs of a ladder that are done, and the names of those that are not. Raises
    InputError where the folder has no ladder."""
    record = read_record(out)
    if not record:
        raise InputError(
            f"{out} is no ladder's folder (it has no {RECORD}): python -m tools.ladder CONFIG --out "
            f"{out}"
        )
    done, missing = [], []
    for row in record["rungs"]:
        curve = _curve(out / row["name"])
        steps = row["steps"]
        if not curve or max(curve) < steps:
            missing.append(row["name"])
            continue
        at = sorted(curve)
        losses = np.array([curve[step] for step in at])
        fractions = np.array(at) / steps
        numbers = (row["parameters"], row["tokens"], row["flops"], float(losses[-1]))
        done.append(Measured(row["name"], *numbers, fractions, losses))
    return done, missing


def _curve(run: Path) -> dict[int, float]:
    """Return step -> validation loss of a run; {} where it has not begun."""
    if not (run / "metrics.jsonl").exists():
        return {}
    return compare_runs.series(run).get("validation_loss", {})


def table(done: Sequence[Measured]) -> Array:
    """Return the weights, tokens and losses of runs, [3, P]."""
    return np.array([(run.parameters, run.tokens, run.loss) for run in done], dtype=float).T


def run_missing(out: Path, rungs: Sequence[Rung]) -> int:
    """Run what is not done, the cheapest first; a run that was killed goes on at its newest
    checkpoint. Returns 0, or the exit code of the first run that fails."""
    _, missing = measured(out)
    left = sorted((rung for rung in rungs if rung.name in missing), key=attrgetter("flops"))
    for number, rung in enumerate(left, 1):
        print(f"run {number} of {len(left)}: {toml_of(out, rung)}", flush=True)
        code = _run(toml_of(out, rung))
        if code:
            again = "start the ladder again to go on" if code == STOPPED else f"exit code {code}"
            print(f"{toml_of(out, rung)}: {again}", file=sys.stderr)
            return code
    return 0


def _run(config: Path) -> int:
    """Run one configuration. A signal to this process goes to the run, which saves."""
    # run_train.sh finds this Python first
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    process = subprocess.Popen([ROOT / "run_train.sh", config], env=os.environ | {"PATH": path})

    def pass_on(number: int, _: object) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def array_script(out: Path, rungs: Sequence[Rung]) -> str:
    """Return a batch script that runs the ladder as a Slurm array: `sbatch -N 1 SCRIPT`. It has the
    options of tools/launch/slurm.sh, which does the rest."""
    launcher = ROOT / "tools" / "launch" / "slurm.sh"
    options = [
        line
        for line in launcher.read_text(encoding="utf-8").splitlines()
        if line.startswith("#SBATCH") and "--output" not in line
    ]
    files = " ".join(str(toml_of(out, rung)) for rung in rungs)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Runs a ladder as a Slurm array, from the repository's folder: sbatch -N 1 THIS_FILE",
            *options,
            f"#SBATCH --array=0-{len(rungs) - 1}",
            "#SBATCH --output=slurm-%A-%a.log",
            f"files=({files})",
            'cd "$SLURM_SUBMIT_DIR" || exit 2',
            'exec bash tools/launch/slurm.sh "${files[SLURM_ARRAY_TASK_ID]}"',
            "",
        ]
    )
