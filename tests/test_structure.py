"""The house stays as README draws it: who may import whom, and every `path::symbol` in the documents exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("checkpoint", "configs", "data", "models", "parallelisms", "reliability", "tools", "training", "train", "tests")
ALLOWED = {  # package -> what of ours it may import (besides itself)
    "configs": {"models"},  # the registry, which imports no torch; test_config.py::test_command_line runs it without
    "models": set(),
    "data": {"configs.schema", "reliability.disk"},
    "parallelisms": {"configs.schema"},
    "training": {"configs", "configs.schema", "parallelisms.mesh"},
    "reliability": {"configs", "configs.schema", "parallelisms.mesh"},
    "checkpoint": {"configs", "configs.schema", "parallelisms.mesh", "reliability.disk"},
}


def imports(path: Path) -> set[str]:
    """Dotted names of our own modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {n if (ROOT / (n.replace(".", "/") + ".py")).exists() else node.module for n in names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", ALLOWED)
def test_who_imports_whom(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        foreign = {name for name in imports(path) if name.split(".")[0] != package}
        assert foreign <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {foreign - ALLOWED[package]}"


def test_models_import_torch_and_models_alone():
    for path in sorted((ROOT / "models").rglob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in {"torch", "math", "collections", "dataclasses", "typing", "models"}, f"{path.name} imports {name}"


def test_no_test_file_imports_another_one():
    """What several files share stands in a file of its own (tests/runs.py, ranks.py, checkpoints.py, ...)."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        tests = {name for name in imports(path) if name.startswith("tests.test_")}
        assert not tests, f"tests/{path.name} imports {tests}"


def symbols(path: Path) -> set[str]:
    """Top-level names of a Python file, and Class.member."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_symbol_that_a_document_names_exists(document):
    text = document.read_text(encoding="utf-8")
    for path, symbol in re.findall(r"`([\w/.]+\.py)::([\w.]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}, which does not exist"
        assert symbol in symbols(ROOT / path), f"{document.name} names {path}::{symbol}, which does not exist"
    for path in re.findall(r"\]\((?!http)([\w/.]+)\)", text):
        assert (document.parent / path).exists(), f"{document.name} links to {path}, which does not exist"


def test_the_readme_names_every_file_of_the_tree():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text[text.index("## The tree") : text.index("## Where is")]
    for package in ALLOWED:
        for path in sorted((ROOT / package).glob("*.py")):
            if path.stat().st_size and package != "models" and path.name != "__init__.py":
                assert path.name in tree, f"README's tree does not name {package}/{path.name}"


# What a newcomer reads to know how training works: it has to stay readable from top to bottom.
READING_CORE = sorted([
    ROOT / "train.py", *(ROOT / "models").rglob("*.py"), *(ROOT / "parallelisms").rglob("*.py"),
    *(ROOT / "training" / f"{name}.py" for name in ("init", "loss", "optim")), *(ROOT / "data" / f"{name}.py" for name in ("order", "loader")),
])  # fmt: skip
MOST_LINES, SCREEN = 100, 50


def line_counts(source: str, kinds: tuple[type, ...]) -> dict[str, int]:
    """Lines of each node of these kinds in Python source, by "its name or kind at line n"."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return {f"{getattr(node, 'name', type(node).__name__)} at line {node.lineno}": node.end_lineno - node.lineno + 1 for node in nodes}


@pytest.mark.parametrize("path", READING_CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_function_of_the_reading_core_is_long(path):
    counts = line_counts(path.read_text(encoding="utf-8"), (ast.FunctionDef, ast.AsyncFunctionDef))
    long = {name: count for name, count in counts.items() if count > MOST_LINES}
    assert not long, f"{path.relative_to(ROOT)} has functions of more than {MOST_LINES} lines: {long}"


def test_the_body_of_the_training_loop_fits_on_a_screen():
    """One `while`, and each thing that it does now and then is a line in it that a reader sees."""
    loops = line_counts((ROOT / "train.py").read_text(encoding="utf-8"), (ast.While,))
    assert len(loops) == 1 and max(loops.values()) <= SCREEN, loops


def test_negative_control_a_line_too_many_is_counted():
    for lines in MOST_LINES, MOST_LINES + 1:
        source = "def f():\n" + "    x = 1\n" * (lines - 1) + "while x:\n    pass\n"
        assert line_counts(source, (ast.FunctionDef,)) == {"f at line 1": lines}
        assert line_counts(source, (ast.While,)) == {f"While at line {lines + 1}": 2}


def test_the_loop_does_not_ask_whether_the_data_is_streamed():
    """data/open.py answers that once, for everything that differs."""
    asked = [
        node.lineno for node in ast.walk(ast.parse((ROOT / "train.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "stream" and getattr(node.value, "attr", "") == "data"
    ]  # fmt: skip
    assert not asked, f"train.py asks for data.stream in lines {asked}"
