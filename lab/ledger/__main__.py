"""`python -m lab.ledger ROW` trains what a row of the ledger lacks, writes its results into the row,
and docs/ledger.md anew. `--check` replays the first 50 steps of one run: bitwise on a machine of the
same kind with the same PyTorch, elsewhere within the row's rounding. `--list` names the rows."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from configs import program
from configs.load import load_config
from configs.schema import InputError
from lab.ledger import page
from lab.ledger import row as ledger
from lab.ledger.row import LedgerRow

STEPS = 50  # of a replay
DIFFERS = 1  # exit code


def train(arguments: list[str]) -> None:
    """Train in another process, on one thread, since the number of threads decides the order of
    sums. InputError: it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(
        command, cwd=ledger.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-600:]}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def outcome(row: LedgerRow, arm: str, seed: int) -> dict[str, float]:
    """Return loss, tokens and minutes of a run, which is trained or resumed first if it has not
    ended. Minutes are those of its steps at the mean rate of its log lines."""
    folder = ledger.RUNS / row.name / arm / str(seed)
    arguments = row.options(arm, seed, folder)
    steps = load_config(arguments).training.steps
    has_ended = any("validation_loss" in line and line["step"] == steps for line in metrics(folder))
    if not has_ended or not (folder / "checkpoints").exists():
        print(f"{row.name}: {arm}, seed {seed}", flush=True)
        train(arguments)
    lines = metrics(folder)
    loss = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:]
    tokens = max(line.get("tokens_seen", 0) for line in lines)
    return {"loss": loss, "tokens": tokens, "minutes": tokens / (sum(rates) / len(rates)) / 60}


def first_losses(row: LedgerRow, arm: str, seed: int) -> list[float]:
    """Return the losses of the first STEPS steps of a run, or of all if there are fewer, trained
    anew."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        options = row.options(arm, seed, folder)
        steps = min(STEPS, load_config(options).training.steps)
        short = [
            f"--training.stop_after={steps}",
            "--metrics.interval=1",
            "--validation.interval=0",
        ]
        train([*options, *short])
        return [line["loss"] for line in metrics(folder) if "loss" in line][:STEPS]


def run(row: LedgerRow) -> None:
    """Fill the results of a row, and the numbers that `check` compares."""
    losses, minutes, tokens = {}, {}, {}
    for arm in row.arms:
        found = [outcome(row, arm, seed) for seed in row.seeds]
        losses[arm] = [one["loss"] for one in found]
        minutes[arm] = round(sum(one["minutes"] for one in found) / len(found), 2)
        tokens[arm] = int(found[0]["tokens"])
    here = {"machine": ledger.machine(), "torch": ledger.torch_version()}
    of = {"commit": ledger.commit(), "corpus": row.corpus_digest()}
    row.results = {"losses": losses, "minutes": minutes, "tokens": tokens, **here, **of}
    arm = list(row.arms)[-1]
    row.replay = {"arm": arm, "seed": row.seeds[0]}
    row.replay["losses"] = first_losses(row, arm, row.seeds[0])
    ledger.write(row)


def check(row: LedgerRow) -> str:
    """Replay a row. Return the difference in a sentence, or "" if there is none. InputError: it has
    not run yet, or this machine has another corpus."""
    if not row.replay:
        raise InputError(f"{row.name} has not run yet: python -m lab.ledger {row.name}")
    if row.corpus_digest() != row.results["corpus"]:
        raise InputError(
            f"{row.name}: this machine's corpus is another than the row's (SHA-256 "
            f"{row.results['corpus'][:16]}): the versions of Python or of packages differ"
        )
    return compare(row, first_losses(row, row.replay["arm"], row.replay["seed"]))


def compare(row: LedgerRow, found: list[float]) -> str:
    """Return how losses of a replay differ from the row's, or "" if they do not."""
    here = (ledger.machine(), ledger.torch_version())
    same = (row.results["machine"], row.results["torch"]) == here
    allowed = 0.0 if same else row.rounding
    wanted = row.replay["losses"]
    if len(found) != len(wanted):
        return f"{row.name}: {len(found)} steps instead of {len(wanted)}"
    for step, (old, new) in enumerate(zip(wanted, found, strict=True), 1):
        if not abs(new - old) <= allowed * abs(old):
            return (
                f"{row.name}: step {step} has loss {new!r}, and the ledger {old!r} "
                f"(allowed: {allowed:g} of it)"
            )
    print(f"{row.name}: {len(found)} steps are equal" + ("" if same else f" to {allowed:g}"))
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.ledger", description=__doc__)
    parser.add_argument("row", nargs="?", default="", help="name of a row; without: the page alone")
    parser.add_argument("--check", action="store_true", help="replay 50 steps")
    parser.add_argument("--list", action="store_true", help="name the rows")
    args = parser.parse_args(argv)
    if args.list:
        for row in ledger.rows():
            print(f"{row.name:24}{row.title}" + ("" if row.results else " (not run yet)"))
        return 0
    if args.check and not args.row:
        parser.error("--check needs the name of a row")
    try:
        row = ledger.read(ledger.ROWS / f"{args.row}.toml") if args.row else None
        if row and row.missing():
            raise InputError(
                f"{row.name} needs {ledger.PUBLISHED / row.missing()}: python -m tests.published fetches it"
            )
        if row and args.check:
            problem = check(row)
            print(problem or "", end="\n" if problem else "", file=sys.stderr)
            return DIFFERS if problem else 0
        if row and row.results:
            print(
                f"{row.name} is trained already. To train it again, remove the results that {row.path} ends with"
            )
        elif row:
            run(row)
    except InputError as error:
        parser.error(str(error))
    page.write(ledger.rows())
    return 0


if __name__ == "__main__":
    program.run(main, sys.argv[1:])
