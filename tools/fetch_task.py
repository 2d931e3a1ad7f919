"""Writes a published benchmark as a file of an evaluation, by the package `datasets`.

    python -m tools.fetch_task hellaswag
    python -m tools.fetch_task arc_easy arc.jsonl --from FOLDER --split validation
    python -m tools.fetch_task mmlu --from FOLDER --shots 5

Rows come from the hub, or with --from of a folder that `save_to_disk` wrote. Questions, choices and
examples are put as lm-evaluation-harness 0.4.13 puts them (tools/benchmarks.py), so that scores can
be compared with published ones.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import configs.cpu  # noqa: F401

from configs import program
from configs.schema import InputError
from configs.words import number_of
from data import tasks
from tools import outbound, saved_datasets
from tools.benchmarks import BENCHMARKS, MMLU, Benchmark, Row, parts_of

SEED = 1234  # of the harness, for examples
BETWEEN = "\n\n"  # examples
HIDDEN = ("", "-1", "None")  # answers of a test set that is for leaderboards
# without MMLU's subjects, which are 57
SHOWN = ", ".join(name for name in [*BENCHMARKS, MMLU] if not name.startswith("mmlu_"))


def known(name: str) -> str:
    """Return the name of a benchmark as it is. Raises InputError for another."""
    names = [*BENCHMARKS, MMLU]
    if name in names:
        return name
    near = get_close_matches(name.lower().replace("-", "_"), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it is one of {SHOWN}"
    raise InputError(f"{name!r} is no benchmark that is known here: {hint}")


def from_hub(benchmark: Benchmark, split: str) -> Sequence[Row]:
    """Download the rows of a split from the hub. Raises InputError."""
    datasets = saved_datasets.library()
    try:
        return datasets.load_dataset(benchmark.path, benchmark.config, split=split)
    except Exception as error:  # of many libraries
        raise InputError(f"{benchmark.path} cannot be loaded: {error}") from error


def lines(
    benchmark: Benchmark,
    rows: Sequence[Row],
    pool: Sequence[Row],
    shots: int,
    where: str,
) -> Iterator[Row]:
    """Return the lines of a task's file. pool: the rows that few-shot examples come from; where:
    names the rows in an error. Raises InputError for a row without the published fields."""
    generator = random.Random(SEED)
    for number, row in enumerate(rows):
        found = line(benchmark, row, f"row {number} of {where}")
        kind = "multiple_choice" if "choices" in found else "perplexity"
        try:
            tasks.PARSERS[kind](number, found)
        except ValueError as error:
            raise _unlike(f"row {number} of {where}", error) from None
        before = benchmark.description
        for example in drawn(benchmark, row, pool, shots, generator):
            before += with_answer(line(benchmark, example, f"an example for {where}"))
        context = found["context"]
        if isinstance(context, list):
            found["context"] = [before + each for each in context]
        else:
            found["context"] = before + context
        yield found


def line(benchmark: Benchmark, row: Row, where: str) -> Row:
    if benchmark.answer:
        answer = next(row[name] for name in benchmark.answer.split("|") if name in row)
        if str(answer).strip() in HIDDEN:
            raise InputError(
                f"{where} has no answer ({benchmark.answer} is {answer!r}), as in a test set that is "
                "for leaderboards: name another split with --split"
            )
    try:
        found = benchmark.convert(row)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _unlike(where, error) from None
    if benchmark.group:
        found["group"] = benchmark.group
    return found


def _unlike(where: str, error: Exception) -> InputError:
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{where} is not as it is published: {text}")


def drawn(
    benchmark: Benchmark, row: Row, pool: Sequence[Row], count: int, generator: random.Random
) -> Sequence[Row]:
    """Draw the few-shot examples before a question as the harness does (lm_eval/api/samplers.py):
    never the question itself where both may come from one split."""
    if benchmark.in_order or not count:
        return pool[:count]
    if not benchmark.also_drawn:
        return generator.sample(pool, count)
    chosen = [other for other in generator.sample(pool, count + 1) if other != row][:count]
    if len(chosen) < count:
        chosen = generator.sample([other for other in pool if other != row], count)
    return chosen


def with_answer(found: Row) -> str:
    """Format a few-shot example: question, right answer, and what separates it from the next."""
    if "choices" not in found:  # the harness has the text begin with a space, behind the delimiter
        return f"{found['context']}  {found['text']}{BETWEEN}"
    context = found["context"]
    if isinstance(context, list):
        context = context[found["answer"]]
    return f"{context} {found['choices'][found['answer']]}{BETWEEN}"


def checked(benchmark: Benchmark, rows: Sequence[Row], where: str) -> Sequence[Row]:
    """Return the rows, whose columns must be those of the benchmark. Raises InputError."""
    if not len(rows):
        raise InputError(f"{where} has no row")
    has = list(rows[0])
    missing = [columns for columns in benchmark.columns if not {*columns.split("|")} & {*has}]
    if missing:
        lacks = ", ".join(missing).replace("|", " or ")
        raise InputError(
            f"{where} has no column {lacks} (it has {', '.join(has)}): is it another benchmark?"
        )
    return rows


def part(benchmark: Benchmark, args: argparse.Namespace) -> list[Row]:
    split = args.split or benchmark.split

    def rows_of(name: str, instead: str) -> tuple[Sequence[Row], str]:
        if args.folder is None:
            where = f"{benchmark.path}, split {name}"
            return checked(benchmark, from_hub(benchmark, name), where), where
        place = saved_datasets.place_of(benchmark, args.folder)
        where = str(saved_datasets.split_of(place, name, instead))
        return checked(benchmark, saved_datasets.read(Path(where)), where), where

    rows, where = rows_of(split, "name one that is there with --split")
    pool: Sequence[Row] = ()
    if args.shots:
        advice = f"examples are drawn from {benchmark.examples}: leave --shots out"
        found, of_pool = rows_of(benchmark.examples, advice)
        pool = list(found)
        if len(pool) < args.shots + benchmark.also_drawn:
            raise InputError(f"--shots {args.shots}: {of_pool} has only {len(pool)} rows")
    if args.limit:
        rows = list(rows)[: args.limit]
    return list(lines(benchmark, rows, pool, args.shots, where))


def fetch(args: argparse.Namespace) -> list[Row]:
    parts = parts_of(known(args.name))
    if args.shots < 0 or args.limit < 0:
        raise InputError("--shots and --limit are numbers from 0 on")
    if args.folder is not None and len(parts) > 1:
        parts = _present(parts, args.folder)
    return [row for each in parts for row in part(each, args)]


def _present(parts: list[Benchmark], folder: Path) -> list[Benchmark]:
    """Return the subjects that a folder has, and name those that it lacks."""
    there = [each for each in parts if saved_datasets.has(each, folder)]
    if not there:
        saved_datasets.place_of(parts[0], folder)  # which raises
    lacking = [each.group for each in parts if each not in there]
    if lacking:
        shown = ", ".join(map(str, lacking[: tasks.SHOWN]))
        more = ", ..." if len(lacking) > tasks.SHOWN else ""
        print(
            f"warning: {folder} lacks {len(lacking)} of {len(parts)} subjects ({shown}{more}): the "
            "mean is of the others",
            file=sys.stderr,
        )
    return there


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fetch_task", description="A benchmark as a file of an evaluation."
    )
    parser.add_argument("name", help=f"{SHOWN}, or mmlu_SUBJECT")
    parser.add_argument("out", type=Path, nargs="?", help="the file to write [NAME.jsonl]")
    parser.add_argument(
        "--from", dest="folder", type=Path, help="what datasets' save_to_disk wrote [the hub]"
    )
    parser.add_argument("--split", help="what to score [the harness's]")
    parser.add_argument(
        "--shots", type=int, default=0, help="examples before each question [%(default)s]"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="take this many questions, of each subject [all]"
    )
    args = parser.parse_args(argv)
    out = args.out or Path(f"{args.name}.jsonl")
    outbound.check_file("OUT", out)
    rows = fetch(args)
    try:
        tasks.write(out, rows)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror})") from None
    shots = f", {number_of(args.shots, 'example')} before each" if args.shots else ""
    print(f"{number_of(len(rows), 'row')} of {args.name} in {out}{shots}")
    return 0


if __name__ == "__main__":
    program.run(main)
