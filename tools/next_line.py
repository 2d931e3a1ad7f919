"""Make a multiple-choice task from source code: which line comes next?

    python -m tools.next_line data/examples/next_line.jsonl

The file in data/examples was made so from the standard library of CPython 3.11. The documents are
those that a run with the same Python holds out (data.validation_fraction). A question is an
indented line of code and some lines before it; the wrong choices are lines of the same file. Equal
text and numbers make the same file.
"""

import argparse
import hashlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import configs.cpu  # noqa: F401

from configs import program
from configs.schema import Data, InputError
from data import sources, tasks
from tools import outbound

CHOICES = 4
LENGTHS = range(16, 61)  # characters of a line that may be a choice
CODE = re.compile(r"[a-z_@].*[a-z)\]:]", re.IGNORECASE)  # neither a comment nor the end of a string


def held_out(source: str, fraction: float) -> Iterator[tuple[str, str]]:
    """(name, text) of the documents whose hash is below `fraction`, as data/prepare/encoding.py
    holds them out."""
    for name, text in sources.documents(source):
        digest = hashlib.sha256(text.encode()).digest()
        if int.from_bytes(digest[:6], "big") / 2**48 < fraction:
            yield name, text


def candidates(text: str) -> list[int]:
    """Return the numbers of the lines that may be a choice: code of medium length, no duplicates."""
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines()):
        code = line.strip()
        if len(code) in LENGTHS and CODE.fullmatch(code):
            seen.setdefault(code, number)
    return list(seen.values())


def question(name: str, text: str, number: int, others: list[int], most: int) -> dict:
    """Return the question for line `number`. others: the wrong choices; most: characters of the
    context.

    The delimiter of a task is the last space of the line's indentation, so all choices have the
    same indentation.
    """
    lines = text.splitlines()
    indentation = lines[number][: -len(lines[number].lstrip())]
    begin = number
    while begin and sum(map(len, lines[begin - 1 : number])) + number - begin < most:
        begin -= 1
    context = "\n".join([*lines[begin:number], indentation[:-1]])
    choices = [lines[other].strip() for other in others]
    return {"context": context, "choices": choices, "name": f"{name}:{number + 1}"}


def questions(source: str, fraction: float, count: int, most: int, seed: int) -> list[dict]:
    """Return the questions, the same number from each document as far as it has them, in random
    order."""
    generator = random.Random(seed)
    piles = []
    for name, text in held_out(source, fraction):
        lines = text.splitlines()
        known = candidates(text)
        indented = [number for number in known if number and lines[number].startswith("    ")]
        if len(known) >= 2 * CHOICES:
            generator.shuffle(indented)
            piles.append((name, text, known, indented))
    rows: list[dict] = []
    while len(rows) < count and any(pile[3] for pile in piles):
        for name, text, known, indented in piles:
            if indented and len(rows) < count:
                number = indented.pop()
                others = generator.sample(
                    [other for other in known if other != number], CHOICES - 1
                )
                answer = generator.randrange(CHOICES)
                others.insert(answer, number)
                row = question(name, text, number, others, most)
                rows.append(row | {"answer": answer})
    generator.shuffle(rows)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.next_line", description="A task: which line of code comes next?"
    )
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    parser.add_argument("--source", default="stdlib", help="as data.source [%(default)s]")
    parser.add_argument(
        "--fraction",
        type=float,
        default=Data().validation_fraction,
        help="of the documents, as data.validation_fraction [%(default)s]",
    )
    parser.add_argument("--count", type=int, default=50, help="questions [%(default)s]")
    parser.add_argument(
        "--context", type=int, default=240, help="characters of a context [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    args = parser.parse_args(argv)
    try:
        outbound.check_file("OUT", args.out)
        rows = questions(args.source, args.fraction, args.count, args.context, args.seed)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    tasks.write(args.out, rows)
    print(f"{len(rows)} questions in {args.out}")
    return 0


if __name__ == "__main__":
    program.run(main)
