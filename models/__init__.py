"""The registry of model families. A family is one file of this folder; `models/family.py` says what
the file must have.

`configs/` checks a configuration in a fraction of a second, which is less than the import of torch
takes. So this file and `models/dense.py` import no torch, a family is imported when it is first
asked for, and `tables` reads what a check needs.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.family import Family

FAMILIES = ("llama", "qwen3", "deepseek_v3")
HERE = Path(__file__).resolve().parent


class Registry(Mapping):
    """Family name -> its module, which is imported when it is asked for."""

    def __getitem__(self, name: str) -> "Family":
        if name not in FAMILIES:
            raise KeyError(name)
        return import_module(f"models.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


MODELS: Mapping[str, "Family"] = Registry()

# models/family.py explains them
WITHOUT_TORCH = ("FLAVORS", "OPTIONS", "FOLLOWS", "QUERY_WIDTH", "RULES")


@cache
def tables(family: str, folder: Path = HERE) -> SimpleNamespace:
    """The tables WITHOUT_TORCH of a family, evaluated without the rest of its file.

    A family stays one file in this way, with its network beside the rules about it; the other
    choice was a second file without torch for each family. The price: these tables may use Python's
    builtins and what the file imports from `models.dense`, and nothing else. Raises ValueError for
    a family that lacks one of them.
    """
    source = folder / f"{family}.py"
    wanted = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        and node.module == "models.dense"
        or isinstance(node, ast.Assign)
        and {getattr(target, "id", "") for target in node.targets} & set(WITHOUT_TORCH)
    ]
    names: dict = {}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), names)
    if missing := [name for name in WITHOUT_TORCH if name not in names]:
        raise ValueError(f"{source} has no table {missing[0]}")
    return SimpleNamespace(**{name: names[name] for name in WITHOUT_TORCH})
