"""Writes a published benchmark as a file of an evaluation, by the package `datasets`.

    python -m tools.fetch_task hellaswag hellaswag.jsonl

Questions and choices are put as lm-evaluation-harness 0.4.13 puts them without examples
(lm_eval/tasks, the file of each name), so that scores can be compared with published ones.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import configs.cpu  # noqa: F401

from configs.schema import InputError
from data import tasks

Row = dict[str, Any]


def asked(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def hellaswag(row: Row) -> Row:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [without_marks(ending) for ending in row["endings"]]
    return choice(without_marks(context), endings, int(row["label"]))


def without_marks(text: str) -> str:
    """Without what WikiHow's pages have left in square brackets."""
    sentences = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", sentences).replace("  ", " ")


def arc(row: Row) -> Row:
    answer = row["choices"]["label"].index(row["answerKey"])
    return choice(asked(row["question"]), row["choices"]["text"], answer)


def piqa(row: Row) -> Row:
    return choice(asked(row["goal"]), [row["sol1"], row["sol2"]], row["label"])


def openbookqa(row: Row) -> Row:
    answer = row["choices"]["label"].index(row["answerKey"].strip())
    return choice(row["question_stem"], row["choices"]["text"], answer)


def sciq(row: Row) -> Row:
    choices = [row[f"distractor{number}"] for number in (1, 2, 3)] + [row["correct_answer"]]
    return choice(f"{row['support'].lstrip()}\n{asked(row['question'])}", choices, 3)


def boolq(row: Row) -> Row:
    return choice(f"{row['passage']}\n{asked(row['question'] + '?')}", ["no", "yes"], row["label"])


def lambada(row: Row) -> Row:
    """word_perplexity is the harness's perplexity."""
    context, _, last = row["text"].rpartition(" ")
    return {"context": context, "text": last}


def choice(context: str, choices: list[str], answer: int) -> Row:
    return {"context": context, "choices": choices, "answer": answer}


class Benchmark(NamedTuple):
    path: str  # of the hub
    config: str | None
    split: str  # that the harness scores
    convert: Callable[[Row], Row]


BENCHMARKS = {
    "hellaswag": Benchmark("Rowan/hellaswag", None, "validation", hellaswag),
    "arc_easy": Benchmark("allenai/ai2_arc", "ARC-Easy", "test", arc),
    "arc_challenge": Benchmark("allenai/ai2_arc", "ARC-Challenge", "test", arc),
    "piqa": Benchmark("baber/piqa", None, "validation", piqa),
    "openbookqa": Benchmark("allenai/openbookqa", "main", "test", openbookqa),
    "sciq": Benchmark("allenai/sciq", None, "test", sciq),
    "boolq": Benchmark("aps/super_glue", "boolq", "validation", boolq),
    "lambada_openai": Benchmark("EleutherAI/lambada_openai", "default", "test", lambada),
}


def published(name: str) -> Iterable[Row]:
    """The rows of a benchmark, from the hub. Raises InputError."""
    benchmark = BENCHMARKS[name]
    try:
        import datasets
    except ImportError:
        raise InputError(
            "benchmarks are read by the package datasets: pip install datasets"
        ) from None
    try:
        return datasets.load_dataset(benchmark.path, benchmark.config, split=benchmark.split)
    except Exception as error:  # of many libraries
        raise InputError(f"{benchmark.path} cannot be loaded: {error}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fetch_task", description="A benchmark as a file of an evaluation."
    )
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    args = parser.parse_args(argv)
    convert = BENCHMARKS[args.name].convert
    try:
        rows = [convert(row) for row in published(args.name)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    tasks.write(args.out, rows)
    print(f"{len(rows)} rows of {args.name} in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
