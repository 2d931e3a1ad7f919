"""Scores of a model on published benchmarks, by tools.evaluate and by lm-evaluation-harness.

    python -m lab.bench tasks MODEL FOLDER --questions 200

MODEL is a folder of Hugging Face's, FOLDER what `datasets` saved (tools/fetch_task.py). Both sides
read the same questions; the harness makes its requests of them by its own files. Printed for each
benchmark: accuracies of both, and the largest relative difference between log-likelihoods of a choice.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import configs.cpu  # noqa: F401

from configs.schema import EvaluationTask, InputError, Parallelism, Run
from data import tasks
from parallelisms import mesh as meshes
from tools import evaluate, fetch_task, saved_datasets
from tools.benchmarks import BENCHMARKS, MMLU, Benchmark, parts_of
from tools.sampling import Loaded, load

WINDOW = 2048
SCORED = ("acc", "acc_norm")
POOL = 40  # rows kept to draw examples from, where the folder has no split for them
# all that ask which choice is right
NAMES = [*(name for name, each in BENCHMARKS.items() if each.answer and not each.group), MMLU]


class ChoiceScores(NamedTuple):
    """Scores by name, and for each question the log-likelihoods of its choices."""

    scores: dict[str, float]
    of_choices: list[list[float]]


def save(name: str, source: Path, out: Path, questions: int, subjects: int | None = None) -> None:
    """Save the first questions of a benchmark under the split that is scored, and the rows behind
    them under the one that examples are drawn from, unless the folder has that. questions: of all
    subjects together; subjects: take so many of them only."""
    parts = parts_of(name)[:subjects]
    for benchmark in parts:
        place = saved_datasets.place_of(benchmark, source)
        there = saved_datasets.splits(place)
        rows = saved_datasets.read(there.get(benchmark.split) or there["validation"])
        count = min(-(-questions // len(parts)), len(rows))
        behind = list(range(count, min(count + POOL, len(rows))))
        pool = rows.select(behind) if behind else rows
        if benchmark.examples in there:
            pool = saved_datasets.read(there[benchmark.examples])
        found = {benchmark.split: rows.select(range(count)), benchmark.examples: pool}
        target = out / benchmark.path / (benchmark.config or "none")
        saved_datasets.library().DatasetDict(found).save_to_disk(str(target))


def harness_tasks(names: Sequence[str], folder: Path, shots: int = 0) -> list[Any]:
    """Return the harness's own tasks of these benchmarks, on rows of such a folder; of MMLU their
    group."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    manager = harness_manager()
    index = manager.task_index
    wanted = []
    for name in names:
        found = []
        for benchmark in parts_of(name):
            if saved_datasets.has(benchmark, folder):
                of = f"mmlu_{benchmark.group}" if benchmark.group else name
                rows = {"custom_dataset": _rows_for_harness(benchmark, folder)}
                more = rows | {"num_fewshot": shots}
                found.append(manager._factory.build(index[of], overrides=more, registry=index))
                found[-1].set_fewshot_seed(fetch_task.SEED)
        if name == MMLU:
            mean = AggMetricConfig(metric="acc", weight_by_size=True)
            group = Group(MMLU, aggregate_metric_list=[mean])
            for task in found:
                group.add(task)
            found = [group]
        wanted += found
    return wanted


@cache
def harness_manager() -> Any:
    """Return the harness's files of all benchmarks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    home = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_path=[str(home / each) for each in HOMES], include_defaults=False)


HOMES = (  # of the harness's files, under lm_eval/tasks: reading all of them takes 15 s
    "arc",
    "commonsense_qa",
    "hellaswag",
    "lambada",
    "mmlu/default",
    "openbookqa",
    "piqa",
    "sciq",
    "siqa",
    "super_glue",
    "winogrande",
)


def _rows_for_harness(benchmark: Benchmark, folder: Path) -> Callable[..., Any]:
    """Return the saved rows, with SuperGLUE's name for the answer of BoolQ."""

    def rows(**_: Any) -> Any:
        place = str(saved_datasets.place_of(benchmark, folder))
        found = saved_datasets.library().load_from_disk(place)
        if benchmark.answer == "label|answer" and "answer" in found[benchmark.split].column_names:
            return found.map(lambda row: {"label": int(row["answer"])}, keep_in_memory=True)
        return found

    return rows


def by_harness(
    model: Any, names: Sequence[str], folder: Path, shots: int = 0
) -> dict[str, ChoiceScores]:
    """Return the scores of an lm_eval model, by name."""
    from lm_eval import simple_evaluate

    wanted = harness_tasks(names, folder, shots)
    seed = fetch_task.SEED
    found = simple_evaluate(
        model, tasks=wanted, bootstrap_iters=0, log_samples=True, fewshot_random_seed=seed
    )
    results = {}
    for name, samples in found["samples"].items():
        of_choices = []
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            of_choices.append([value for value, _ in sample["filtered_resps"]])
        results[name] = ChoiceScores(_scores(found["results"][name]), of_choices)
    if MMLU in names:
        subjects = [name for name in results if name.startswith("mmlu_")]
        all_choices = [row for name in subjects for row in results[name].of_choices]
        results[MMLU] = ChoiceScores(_scores(found["groups"][MMLU]), all_choices)
    return results


def _scores(values: dict[str, Any]) -> dict[str, float]:
    """Return the harness's scores, without the names of its filters."""
    return {
        key.partition(",")[0]: value for key, value in values.items() if isinstance(value, float)
    }


def by_us(
    loaded: Loaded, names: Sequence[str], folder: Path, scratch: Path, shots: int = 0
) -> dict[str, ChoiceScores]:
    """Return the scores of tools.evaluate, by name."""
    mesh = meshes.open_mesh(Run(), Parallelism(), 1, False)
    results = {}
    try:
        for name in names:
            file = scratch / f"{name}.jsonl"
            options = ["--from", str(folder), f"--shots={shots}"]
            if fetch_task.main([name, str(file), *options]):
                raise InputError(f"{name} cannot be had of {folder}")
            task = tasks.open_task(
                EvaluationTask(name=name, file=str(file)), loaded.tokenizer, WINDOW
            )
            found = evaluate.evaluate(loaded, mesh, task, str(file), WINDOW)
            of_choices = [sample["log_likelihoods"] for sample in found["samples"]]
            results[name] = ChoiceScores(found["scores"], of_choices)
    finally:
        meshes.close_mesh()
    return results


def largest(ours: ChoiceScores, theirs: ChoiceScores) -> float:
    """Return the largest difference between log-likelihoods of a choice, relative to them."""
    differences = [0.0]
    for mine, others in zip(ours.of_choices, theirs.of_choices, strict=True):
        differences += [abs(a - b) / abs(b) for a, b in zip(mine, others, strict=True)]
    return max(differences)


def row(name: str, ours: ChoiceScores, theirs: ChoiceScores) -> str:
    """Return a line of the table."""
    cells = [name, f"{len(ours.of_choices)}"]
    for key in SCORED:
        both = [
            f"{found.scores[key]:.4f}" if key in found.scores else "–" for found in (ours, theirs)
        ]
        cells += both
    cells += [f"{ours.scores['chance']:.4f}", f"{largest(ours, theirs):.1e}"]
    return f"| {' | '.join(cells)} |"


HEAD = "| benchmark | questions | acc | harness | acc_norm | harness | chance | largest relative difference |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench tasks")
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=200, help="of each [%(default)s]")
    parser.add_argument("--shots", type=int, default=0, help="examples before each [%(default)s]")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    args = parser.parse_args(argv)
    from lm_eval.models.huggingface import HFLM

    loaded = load(args.model)
    model = HFLM(str(args.model), device="cpu", dtype="float32", max_length=WINDOW, batch_size=8)
    print(HEAD, "|" + " --- |" * (HEAD.count("|") - 1), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            saved = Path(scratch) / name
            save(name, args.folder, saved, args.questions)
            ours = by_us(loaded, [name], saved, Path(scratch), args.shots)[name]
            theirs = by_harness(model, [name], saved, args.shots)[name]
            print(row(name, ours, theirs), flush=True)
    return 0
