"""Scores a checkpoint, or a folder of Hugging Face's, on tasks as a run does (docs/evaluation.md).

    python -m tools.evaluate runs/llama_debug --task data/examples/next_line.jsonl
    python -m tools.evaluate runs/hf --task questions.jsonl --task texts.jsonl --json scores.json

Without --task a run's own tasks are scored. A file is of the kind that its first line has. One
process computes in float32.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import configs.cpu  # noqa: F401  how threads wait: it must be known before torch is loaded

from pydantic import ValidationError

from checkpoint import verify
from configs import program
from configs.load import load_config
from configs.schema import EvaluationTask, InputError, Parallelism, Run
from configs.words import aligned
from data import tasks
from reliability.objects import Key, location
from tools import outbound, places
from training.scores import CHANCE, ERROR, by_row, scores

if TYPE_CHECKING:
    from parallelisms.mesh import Mesh
    from tools.sampling import Loaded

CHUNK_TOKENS = 1024  # logits in memory, as training.loss_chunk_tokens
BATCH_TOKENS = 8192  # of a forward


def wanted(folder: Path | Key, files: list[str], delimiter: str) -> list[EvaluationTask]:
    """Return the tasks of these files, or those of the run. Reads the files before the weights are
    loaded, so a mistake in one shows at once. Raises InputError."""
    chosen = [_task(file, delimiter) for file in files] if files else _of_run(folder)
    for task in chosen:
        tasks.read(task)
    return chosen


def _task(file: str, delimiter: str) -> EvaluationTask:
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(file).stem)[:60]
    kind = tasks.kind_of(file)
    try:
        return EvaluationTask(name=name, file=file, kind=kind, delimiter=delimiter)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{first['loc'][0]} of the task {file!r}: {first['msg']}") from None


def _of_run(folder: Path | Key) -> list[EvaluationTask]:
    if isinstance(folder, Key):
        folders = [places.run_of(verify.newest(folder))]
    else:
        folders = [folder, places.run_of(folder)]
    for config in (each / "config.toml" for each in folders):
        if config.is_file() and (found := load_config([str(config)]).evaluation.tasks):
            return list(found)
    raise InputError(f"{folder} has no tasks: name a file with --task")


def evaluate(loaded: Loaded, mesh: Mesh, task: tasks.EncodedTask, file: str, window: int) -> dict:
    """Score one task. Returns its scores; for each row the log-likelihoods, and the number of
    tokens that are not the likeliest."""
    from training.evaluate import score_requests  # here, because it imports torch

    print(task.describe(window), file=sys.stderr)
    model = loaded.model.to(mesh.device)
    found = score_requests(model, mesh, task.requests, BATCH_TOKENS, CHUNK_TOKENS)
    of_rows = (by_row(task, numbers) for numbers in found)
    samples = [
        {"line": row.line, "log_likelihoods": each, "mistakes": mistakes}
        for row, each, mistakes in zip(task.rows, *of_rows, strict=True)
    ]
    return {
        "name": task.name,
        "kind": task.kind,
        "file": file,
        "window": window,
        "scores": scores(task, *found),
        "truncated_lines": task.truncated,
        "samples": samples,
    }


def evaluated(args: argparse.Namespace) -> list[dict]:
    """Raises InputError, for a mistake in the call before torch is imported."""
    folder = location(args.checkpoint)
    if args.json:
        outbound.check_file("--json", args.json)
    if not args.task:
        places.check_checkpoint(folder)
    chosen = wanted(folder, args.task, args.delimiter)
    places.check_checkpoint(folder)
    from parallelisms import mesh as meshes
    from tools import sampling

    loaded = sampling.load(folder, args.tokenizer)
    window = args.window or loaded.context
    reason = "--window" if args.window else loaded.reason
    print(f"window: {window:,} tokens ({reason})", file=sys.stderr)
    opened = [tasks.open_task(task, loaded.tokenizer, window) for task in chosen]
    mesh = meshes.open_mesh(Run(), Parallelism(), 1, False)
    results = [
        evaluate(loaded, mesh, task, of.file, window)
        for task, of in zip(opened, chosen, strict=True)
    ]
    meshes.close_mesh()
    return results


def table(results: list[dict]) -> str:
    """Format task, score, value, standard error and the level of chance in columns."""
    lines = [("task", "score", "value", "stderr", "chance")]
    for result in results:
        lines += _lines(result["name"], result["scores"])
    return "\n".join(aligned(lines, right=(2, 3, 4)))


def _lines(name: str, values: dict[str, float]) -> Iterator[tuple[str, ...]]:
    """Format the scores of a task, one line each; scores of a group are named TASK/GROUP."""
    for key, value in values.items():
        group, _, score = key.rpartition("/")
        if score == CHANCE or score.endswith(ERROR):
            continue
        error = values.get(key + ERROR)
        chance = values.get(f"{group}/{CHANCE}" if group else CHANCE)
        yield (
            f"{name}/{group}" if group else name,
            score,
            f"{value:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{chance:.4f}" if chance is not None and score.startswith("acc") else "",
        )


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate", description="The scores of a checkpoint on tasks."
    )
    places.add_checkpoint(parser)
    parser.add_argument(
        "--task", action="append", default=[], help="a JSONL file [the run's tasks]"
    )
    parser.add_argument(
        "--delimiter", default=" ", help="between a context and its choices [one space]"
    )
    parser.add_argument(
        "--window",
        type=int,
        help="tokens that the model sees [those of its training; of a folder, the model's positions]",
    )
    parser.add_argument("--json", type=Path, help="also write the scores and each row's to a file")
    args = parser.parse_args(argv)
    results = evaluated(args)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    program.run(main)
