"""Count how much there is to read, and how dense it is.

    python -m lab.reading [PATH ...]

Without paths: the reading core, which is what one reads to know a training step of a dense Llama on
a mesh, data included. A token is a name, an operator, a number or a string, as Python's tokenizer
counts them, without docstrings and comments. A dense line has 30 tokens or more.
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

from configs import program
from configs.words import number_of

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    "train.py",
    "data/tokens.py",
    "data/order.py",
    "data/loader.py",
    "training/microbatches.py",
    "models/llama.py",
    "models/layers.py",
    "training/loss.py",
    "training/optim.py",
    "training/init.py",
    "parallelisms/__init__.py",
    "parallelisms/mesh.py",
    "parallelisms/tp.py",
    "parallelisms/blocks.py",
    "parallelisms/dp.py",
)
DENSE = 30
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.comprehension, ast.BoolOp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Reading(NamedTuple):
    """Counts of one source file or of several together."""

    tokens: int = 0
    lines: int = 0  # that have a token
    dense: int = 0  # lines of DENSE tokens or more
    branches: int = 0  # of the function that has the most

    def __add__(self, other: "Reading") -> "Reading":
        sums = [mine + theirs for mine, theirs in zip(self, other, strict=True)]
        return Reading(*sums)._replace(branches=max(self.branches, other.branches))

    @property
    def dense_share(self) -> float:
        return self.dense / max(self.lines, 1)


def tokens_by_line(source: str) -> dict[int, int]:
    """Number of a line -> its tokens."""
    counts: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in COUNTED and not token.string.startswith('"""'):
            line = token.start[0]
            counts[line] = counts.get(line, 0) + 1
    return counts


def branches(function: ast.AST) -> int:
    """Conditions, loops and handlers of a function, without those of functions inside it."""
    count = 0
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, FUNCTIONS):
            count += isinstance(node, BRANCHES) + branches(node)
    return count


def read(source: str) -> Reading:
    by_line = tokens_by_line(source)
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    return Reading(
        tokens=sum(by_line.values()),
        lines=len(by_line),
        dense=sum(count >= DENSE for count in by_line.values()),
        branches=max(map(branches, functions), default=0),
    )


def read_file(name: str) -> Reading:
    return read((ROOT / name).read_text(encoding="utf-8"))


def check_source(parser: argparse.ArgumentParser, name: str) -> None:
    """End with a sentence for a path that is no file of Python's."""
    try:
        ast.parse((ROOT / name).read_bytes(), name)
    except OSError as error:
        parser.error(f"{name} cannot be read: {error.strerror}")
    except (SyntaxError, ValueError) as error:
        parser.error(f"{name} is not Python: {error}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.reading", description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(CORE))
    names = parser.parse_args(argv).paths
    for name in names:
        check_source(parser, name)
    print(f"{'':28}{'tokens':>8}{'lines':>7}{'dense':>7}{'branches':>10}")
    total = Reading()
    for name in names:
        of_file = read_file(name)
        total += of_file
        print(_row(name, of_file))
    print(_row(number_of(len(names), "file"), total))
    print(f"lines with {DENSE} tokens or more: {total.dense_share:.1%}")


def _row(name: str, r: Reading) -> str:
    return f"{name:28}{r.tokens:8,}{r.lines:7,}{r.dense:7}{r.branches:10}"


if __name__ == "__main__":
    program.run(main)
