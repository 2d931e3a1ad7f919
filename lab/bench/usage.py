"""Say what a benchmark measures and which options it takes, from its source: to import it takes
seconds, as all of them import torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent


def usage(name: str, module: str) -> str:
    """Return the help of a benchmark. module: where it is in this package."""
    tree = _parsed(module)
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    rows = list(_arguments(tree))
    for node in ast.walk(_parsed("harness")):
        # the options that several have: harness.shapes_parser adds to harness.parser
        is_shared = isinstance(node, ast.FunctionDef) and node.name.endswith("parser")
        if is_shared and (node.name in called or "shapes_parser" in called):
            rows += _arguments(node)
    width = max((len(flag) for flag, _ in rows), default=0)
    options = [f"  {flag:{width}}  {about}".rstrip() for flag, about in rows]
    head = f"usage: python -m lab.bench {name} [options]"
    return "\n".join([head, "", ast.get_docstring(tree) or "", "", *options])


def _parsed(module: str) -> ast.Module:
    path = HERE / f"{module.replace('.', '/')}.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def _arguments(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of each argument that the code adds to a parser."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument" or not isinstance(node.args[0], ast.Constant):
            continue
        about = [word.value for word in node.keywords if word.arg == "help"]
        text = about[0].value if about and isinstance(about[0], ast.Constant) else ""
        yield node.args[0].value, str(text).partition("%(")[0].rstrip(" [(")
