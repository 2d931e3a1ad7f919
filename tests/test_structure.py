"""The house stays as README draws it: who may import whom, and everything that documents,
docstrings and comments point to exists."""

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from configs.schema import Config
from lab import reading
from models import FAMILIES
from tests.programs import PYTHON, finished

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "checkpoint",
    "configs",
    "data",
    "models",
    "parallelisms",
    "reliability",
    "tools",
    "lab",
    "training",
    "train",
    "tests",
)
ALLOWED = {  # package -> what of ours it may import (besides itself); x.*: its modules
    # the registry, which imports no torch, as tests/test_started_wrongly.py sees of every program
    "configs": {"models", "models.options"},
    "models": set(),
    "data": {"configs.*", "reliability.disk", "reliability.objects"},
    # functions of tensors, no model
    "parallelisms": {
        "configs.*",
        "models.cores",  # which modules are cores of mixers
        "models.delta_net",  # what its core must have
        "models.kernels.*",
        "models.local",  # this rank's part of a weight
        "models.lora",  # adds adapters to modules
        "models.moe",  # which modules are routers
        "models.mtp",
        "models.qk_clip",  # which weights it scales
        "models.recurrent",  # what a state's core must have
        "training.optimizer_check",  # a part of the contract
    },
    "training": {
        "configs.*",
        "models.cores",  # which modules are cores of mixers
        "models.kernels.*",
        "models.mtp",
        "models.terms",
        "parallelisms.*",
        "data.loader",  # validation reads batches
        "data.text_bytes",
        "data.tasks",  # evaluation reads these
    },
    "reliability": {
        "configs.*",
        "parallelisms.boxes",  # this rank's shard of a weight
        "parallelisms.cp",
        "parallelisms.mesh",
        "parallelisms.p2p_warmup",
    },
    "checkpoint": {
        "configs.*",
        "models.lora",  # which parameters are adapters
        "parallelisms.boxes",  # which box of a tensor this rank holds
        "parallelisms.mesh",
        "reliability.*",
        "training.init",  # the global index of an element, and a hash of it
        "training.optim",  # the learning rate, before and after a change of options
        "training.optimizers",  # what each optimizer keeps
    },
}


@pytest.fixture(scope="module", autouse=True)
def _on_one_worker() -> None:
    """Keep the tests of this file together: what they parse is kept."""


@cache
def import_statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return a file's imports, and which of them only annotations need. Expressions, of which a
    file mostly consists, are not looked into."""
    found = []

    def visit(node: ast.AST, for_annotations: bool) -> None:
        is_guard = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.append((child, for_annotations or is_guard))
            elif not isinstance(child, ast.expr):
                visit(child, for_annotations or is_guard)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def imports(path: Path, at_run_time: bool = False) -> set[str]:
    """Dotted names of our own modules that a file imports; `at_run_time`: without those that only
    annotations need."""
    names = set()
    for node, for_annotations in import_statements(path):
        if at_run_time and for_annotations:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                n if (ROOT / (n.replace(".", "/") + ".py")).exists() else node.module
                for n in members
            }
    return {name for name in names if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", ALLOWED)
def test_who_imports_whom(package):
    allowed = package, f"{package}.*", *ALLOWED[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in imports(path):
            is_allowed = any(fnmatch(name, pattern) for pattern in allowed)
            assert is_allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_nothing_that_runs_imports_the_lab():
    """lab/ proves and measures this repository; a run and its tools do without it."""
    packages = [name for name in PACKAGES if name not in ("lab", "tests", "train")]
    paths = [path for name in packages for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(paths) > 200
    importers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "train.py", *paths)
        if any(name.split(".")[0] == "lab" for name in imports(path))
    }
    assert not importers


def imported_by(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


IMPORTED_BY_MODELS = {"models", "torch", "math", "typing"}
IMPORTED_BY_MODELS |= {"collections", "dataclasses", "fnmatch", "functools"}


def test_models_import_torch_and_models_alone():
    for path in sorted((ROOT / "models").rglob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_by(node):
                assert name.split(".")[0] in IMPORTED_BY_MODELS, f"{path.name} imports {name}"


@pytest.mark.slow
def test_no_test_file_imports_another_one():
    """Shared parts of several files have their own file (tests/runs.py, ranks.py, checkpoints.py,
    ...)."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        tests = {name for name in imports(path) if name.startswith("tests.test_")}
        assert not tests, f"tests/{path.name} imports {tests}"


def first_imports(path: Path) -> list[str]:
    """Return the modules that a file imports at its top level, in its order."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return [name for node in nodes for name in imported_by(node)]


def test_every_program_knows_how_threads_wait_before_it_loads_torch():
    """OpenMP reads its settings once, when torch loads it. `python -m tools.x` runs
    tools/__init__.py first."""
    programs = [
        ROOT / name
        for name in tracked()
        if name.endswith(".py")
        and not name.startswith("tests/")
        and '__name__ == "__main__"' in (ROOT / name).read_text(encoding="utf-8")
    ]
    assert len(programs) > 20
    for path in programs:
        package = ROOT / path.relative_to(ROOT).parts[0] / "__init__.py"
        order = (first_imports(package) if package.exists() else []) + first_imports(path)
        torch_at = next(
            (i for i, name in enumerate(order) if name.split(".")[0] == "torch"), len(order)
        )
        assert "configs.cpu" in order[:torch_at] or path.parts[-2] == "configs", (
            f"{path.relative_to(ROOT)}: import configs.cpu first"
        )


@pytest.fixture
def no_settings_of_threads(monkeypatch) -> None:
    for name in os.environ:
        if name.startswith(("OMP_", "GOMP_")):
            monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP shows what it has read")
def test_a_tool_has_the_settings_of_threads(no_settings_of_threads):
    """The settings are those that OpenMP itself prints when it is loaded."""
    done = finished(PYTHON, "-c", "import tools.evaluate, torch", OMP_DISPLAY_ENV="VERBOSE")
    assert done.returncode == 0 and "GOMP_SPINCOUNT = '1000'" in done.stderr, done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr, done.stderr


def test_what_the_environment_chooses_for_threads_counts(no_settings_of_threads):
    code = "import configs.cpu, os; print(os.environ['GOMP_SPINCOUNT'])"
    done = finished(PYTHON, "-c", code, GOMP_SPINCOUNT="77")
    assert done.stdout == "77\n", done.stderr


def test_no_modules_import_each_other_in_a_circle():
    modules = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path
        for package in PACKAGES
        for path in (*(ROOT / package).rglob("*.py"), *ROOT.glob(f"{package}.py"))
    }
    graph = {
        name: imports(path, at_run_time=True) & modules.keys() for name, path in modules.items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' <- '.join(error.args[1])}") from None


OUTSIDE_MODELS = (
    "train.py",
    "configs/check.py",
    "configs/schema.py",
    "training",
    "checkpoint",
    "parallelisms",
    "tools/convert.py",
    "tools/conversions.py",
    "tools/generate.py",
    "tools/sampling.py",
    "tools/plan",
    "tools/preflight",
)
# The layers' names and the numbers that only some families have. `configs/` reads the latter from
# models/, as words.
OF_A_FAMILY = re.compile(
    r"\b(wq|wk|wv|wo|w[123](?!\.org)|n_heads|n_kv_heads|head_dim|hidden_dim|rope_theta|rope_scaling|feed_forward|attention_norm"
    r"|ffn_norm|q_norm|k_norm|q_proj|k_proj|lm_head|self_attn)\b"
)


def names_of_a_family(source: str) -> set[str]:
    """Return the names that code uses: identifiers, attributes, and strings that are no
    docstring."""
    tree, words = ast.parse(source), set()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = (
            getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        )
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value
        words |= set(OF_A_FAMILY.findall(text)) if isinstance(text, str) else set()
    return words


def test_only_models_know_the_names_of_a_familys_layers():
    """Another family is then one file of models/ and a name in its registry."""
    paths = [
        path
        for name in OUTSIDE_MODELS
        for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]
    assert len(paths) > 40
    known = {
        str(path.relative_to(ROOT)): names_of_a_family(path.read_text(encoding="utf-8"))
        for path in paths
    }
    assert not {path: words for path, words in known.items() if words}


def test_negative_control_a_family_name_outside_models_is_seen():
    assert names_of_a_family('flops = args.n_kv_heads * sizes["head_dim"]') == {
        "n_kv_heads",
        "head_dim",
    }
    assert names_of_a_family("layer.attention.wq.weight") == {"wq"}
    assert not names_of_a_family('"""The gradient of wq."""\nheads = 3')


# `block.forward`: recomputed and compiled, as PyTorch does it
REPLACED = {"parallelisms/blocks.py": {"forward"}}


TABLES = {name: field.annotation for name, field in Config.model_fields.items()}
BY_CLASS = {table.__name__: table for table in TABLES.values()}


def wrong_options(source: str) -> list[str]:
    """List what is read of the configuration and is no option: of an argument whose annotation is a
    table's class, and behind a table's name, as in cfg.data.prefetch."""
    wrong = []
    if "cfg." not in source and "configs.schema" not in source:
        return wrong
    nodes = list(ast.walk(ast.parse(source)))
    classes = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "configs.schema":
            classes |= {alias.name: BY_CLASS.get(alias.name) for alias in node.names}
    for function in nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        tables = {}
        for argument in (*function.args.args, *function.args.kwonlyargs):
            tables[argument.arg] = classes.get(getattr(argument.annotation, "id", ""))
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (table := table_read(node.value, tables)):
                if node.attr not in table.model_fields and not hasattr(table, node.attr):
                    wrong.append(f"{node.lineno}: {ast.unparse(node)}")
    return wrong


def table_read(node: ast.expr, arguments: dict[str, type | None]) -> type | None:
    """Return the table of options that an expression is, if it is one."""
    if isinstance(node, ast.Name):
        return arguments.get(node.id)
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "cfg":
        return TABLES.get(node.attr)
    return None


@pytest.mark.slow
def test_every_option_that_is_read_exists():
    for package in PACKAGES:
        for path in (*(ROOT / package).rglob("*.py"), *ROOT.glob(f"{package}.py")):
            assert not wrong_options(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    "source",
    [
        "def read(batches, cfg: Data):\n    return cfg.prefetch",
        "def read(cfg: Config):\n    return cfg.data.prefetch + cfg.data.workers",
    ],
)
def test_negative_control_an_option_that_was_dropped_is_seen(source):
    source = f"from configs.schema import Config, Data\n{source}"
    assert [line.partition(".")[2][-8:] for line in wrong_options(source)] == ["prefetch"]


def methods_of(*packages: str) -> set[str]:
    """Return the names of the methods of all classes in these packages."""
    names = set()
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    names |= {
                        child.name for child in node.body if isinstance(child, ast.FunctionDef)
                    }
    return names


def replaced_methods(source: str, methods: set[str]) -> set[str]:
    """Return the methods that code assigns to objects other than `self`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for target in getattr(node, "targets", []):
            is_self = getattr(getattr(target, "value", None), "id", "") == "self"
            if isinstance(target, ast.Attribute) and target.attr in methods and not is_self:
                found.add(target.attr)
    return found


def test_no_method_is_replaced_on_an_instance():
    """A parallelism that computes something else puts another module in the place, which
    `print(model)` shows and one grep finds (parallelisms/__init__.py)."""
    packages = "models", "parallelisms", "training"
    methods = methods_of(*packages)
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            found = replaced_methods(path.read_text(encoding="utf-8"), methods)
            assert found <= REPLACED.get(name, set()), f"{name} replaces {found}"


def test_negative_control_a_replaced_method_is_seen():
    methods = methods_of("models")
    assert replaced_methods("core.forward = compute", methods) == {"forward"}
    assert replaced_methods("mixture.experts.weights = partial(f)", methods) == {"weights"}
    assert not replaced_methods("attention.core = GatheredKV(core)\nself.weights = 3", methods)


@cache
def symbols(path: Path) -> set[str]:
    """Top-level names of a Python file, and Class.member."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for child in node.body for member in defined(child)}
    return names


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment gives."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    }


# A pointer: the path of a file of ours, then perhaps `::symbol`. A file without a folder counts
# only with a symbol.
POINTER = re.compile(
    r"(?<![\w./*<>{}-])((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|toml|md|yaml))(?:::(\w+(?:\.\w+)*))?(?![\w/*])"
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says to a reader: a document whole, of code the comments and
    docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for number, line in enumerate(node.value.value.splitlines(), node.lineno):
                    yield number, line
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield (
                number,
                line if path.suffix == ".md" else line[line.index("#") :] if "#" in line else "",
            )


def stale(path: Path, root: Path, folders: set[str]) -> list[str]:
    """Return the pointers of a file to files of ours that do not exist, or that lack the symbol.
    `folders`: those of the root."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    if not wrong_pointers(path, lines, root, folders):
        return []  # without the seconds that tokens take
    return wrong_pointers(path, prose(path), root, folders)


def wrong_pointers(
    path: Path, lines: Iterable[tuple[int, str]], root: Path, folders: set[str]
) -> list[str]:
    problems = []
    for number, line in lines:
        for name, symbol in POINTER.findall(line):
            if not symbol and ("/" not in name or name.split("/")[0] not in folders):
                continue  # another project's file, or one that a run makes
            target = next(
                (place for place in (root / name, path.parent / name) if place.exists()), None
            )
            if target is None:
                problems.append(
                    f"{path.relative_to(root)}:{number} names {name}, which does not exist"
                )
            elif symbol and symbol not in symbols(target):
                problems.append(
                    f"{path.relative_to(root)}:{number} names {name}::{symbol}, which does not "
                    "exist"
                )
    return problems


def tracked() -> list[str]:
    listing = finished("git", "ls-files")
    if listing.returncode:
        pytest.skip("not a checkout of git, which knows the files")
    return [name for name in listing.stdout.splitlines() if (ROOT / name).exists()]


def test_everything_that_is_pointed_to_exists():
    names = tracked()
    folders = {name.split("/")[0] for name in names if "/" in name}
    files = [ROOT / name for name in names if name.endswith((".py", ".sh", ".toml", ".md"))]
    problems = [problem for path in files for problem in stale(path, ROOT, folders)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "See `tools/here.py::Thing.gone`."),
        ("a.py", "x = 1  # tools/gone.py says why"),
        ("a.py", 'def f():\n    """As (tools/here.py::gone)."""'),
        ("a.toml", "# see tools/gone.toml\n[table]"),
    ],
)
def test_negative_control_a_stale_pointer_is_found(name, text, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "here.py").write_text(
        "class Thing:\n    size: int = 1\nKINDS, COLORS = 1, 2\n"
    )
    path = tmp_path / name
    path.write_text(
        "# `tools/here.py`, tools/here.py::Thing.size, tools/here.py::COLORS, other/project.py, "
        "config.toml\n"
    )
    assert stale(path, tmp_path, {"tools"}) == []
    path.write_text(text)
    assert len(stale(path, tmp_path, {"tools"})) == 1


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_link_of_a_document_leads_somewhere(document):
    for path in re.findall(r"\]\((?!http)([\w/.]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / path).exists(), (
            f"{document.name} links to {path}, which does not exist"
        )


@pytest.mark.parametrize("package", [*ALLOWED, "tools", "lab"])
def test_every_file_opens_with_a_sentence_about_itself(package):
    """So a list of a folder's files, which docs/map.md says how to print, cannot become stale."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert path.name == "__init__.py" or text.startswith('"""'), path


# What a newcomer reads to know a training step has to stay short and quiet. The caps are on tokens
# and branches, not on lines: a cap on lines rewards packing.
MOST_TOKENS, MOST_DENSE, MOST_BRANCHES = 18_300, 0.005, 20


def test_the_reading_core_is_short_and_quiet():
    total = sum(map(reading.read_file, reading.CORE), reading.Reading())
    assert total.tokens <= MOST_TOKENS, "see `python -m lab.reading`"
    assert total.dense_share <= MOST_DENSE, "see `python -m lab.reading`"


@pytest.mark.parametrize("name", reading.CORE)
def test_no_function_of_the_reading_core_has_many_branches(name):
    assert reading.read_file(name).branches <= MOST_BRANCHES


def test_negative_control_density_is_counted():
    packed = "x = " + " + ".join("abcdefghijklmnopq") + "\n"
    assert reading.read(packed).dense == 1
    quiet = "x = (\n" + "".join(f"    + {name}\n" for name in "abcdefghijklmnopq") + ")\n"
    assert reading.read(quiet).dense == 0
    assert reading.read('"""Many words."""\n# and more\nx = 1\n').tokens == 3
    source = "def f(x):\n    if x:\n        return [a for a in x if a]\n"
    assert reading.read(source).branches == 2


# A family's own numbers and attention: each family is a module with these members.
FILES_OF_FAMILIES = {
    f"models/{family}.py" for family in FAMILIES
}  # each has its own Block and so on


THROWN_AWAY = re.compile(r"""patch\.dict\(\s*sys\.modules|\(\s*sys,\s*["']modules["']""")


def test_no_test_takes_back_what_was_imported_meanwhile():
    """A copy of sys.modules that is put back loses what was imported since. Parts of PyTorch register
    operators, which fails the second time, in every later test of the worker."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        assert not THROWN_AWAY.search(path.read_text(encoding="utf-8")), path.name
    assert THROWN_AWAY.search("mock.patch." + "dict(sys.modules, made)")
    assert THROWN_AWAY.search("monkeypatch.setattr(" + "sys, 'modules', {})")


def test_each_name_of_a_class_means_one_thing():
    places: dict[str, list[str]] = {}
    for name in tracked():
        if not name.endswith(".py") or name.startswith("tests/") or name in FILES_OF_FAMILIES:
            continue
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice
