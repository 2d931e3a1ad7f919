"""The registry of model families. `models/family.py` says what a family has.

`configs/` checks a configuration in a fraction of a second, which is less than the import of torch
takes. So this file, models/options.py and models/flavors/ import no torch, a family is imported
when it is first asked for, and `tables` reads what a check needs.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.family import Family, Formats

FAMILIES = ("llama", "qwen3", "deepseek_v3")
HERE = Path(__file__).resolve().parent


class Registry(Mapping):
    """Family name -> its module in one package, which is imported when it is asked for."""

    def __init__(self, package: str):
        self.package = package

    def __getitem__(self, name: str):
        if name not in FAMILIES:
            raise KeyError(name)
        return import_module(f"{self.package}.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


MODELS: Mapping[str, "Family"] = Registry("models")
FORMATS: Mapping[str, "Formats"] = Registry("models.formats")

# models/family.py explains them
WITHOUT_TORCH = ("FLAVORS", "OPTIONS", "FOLLOWS", "QUERY_WIDTH", "RULES")
TABLES_MAY_IMPORT = ("models.options", "models.flavors")  # and the modules of these


@cache
def tables(family: str, folder: Path = HERE) -> SimpleNamespace:
    """The tables WITHOUT_TORCH of a family, evaluated without the rest of its file.

    So a family's file may have its network beside these tables. The price: they may use Python's
    builtins and what the file imports from TABLES_MAY_IMPORT, and nothing else. Raises ValueError
    for a family that lacks one of them.
    """
    source = folder / f"{family}.py"
    statements = ast.parse(source.read_text(encoding="utf-8")).body
    wanted = [statement for statement in statements if _is_needed(statement)]
    names: dict = {}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), names)
    missing = [name for name in WITHOUT_TORCH if name not in names]
    if missing:
        raise ValueError(f"{source} has no table {missing[0]}")
    return SimpleNamespace(**{name: names[name] for name in WITHOUT_TORCH})


def _is_needed(statement: ast.stmt) -> bool:
    """Whether a statement of a family's file makes one of the tables."""
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        return any(f"{module}.".startswith(f"{allowed}.") for allowed in TABLES_MAY_IMPORT)
    if isinstance(statement, ast.Assign):
        targets = {getattr(target, "id", "") for target in statement.targets}
        return not targets.isdisjoint(WITHOUT_TORCH)
    return False
