"""Read and write a row of the ledger, and say which machine and corpus a result is of."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import urllib.request
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli

from configs.schema import InputError
from data import packages, sources
from lab.ledger import piqa

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent
RUNS = ROOT / "runs" / "ledger"
PUBLISHED = Path(os.environ.get("PLUMBLINE_PUBLISHED") or ROOT / ".published")
MARK = "# Below: written by python -m lab.ledger\n"


@dataclass
class LedgerRow:
    """A row: what was asked, how to train it, and what came out.

    arms: options of each arm, after `common`, in which {published} is the folder of what
    `python -m tests.published` fetches; measured: losses of arms that another program has trained;
    corpus: the name and SHA-256 of a text, and where it is from (url, or task: a folder of
    benchmark questions in {published}); target: a loss that arms of several lengths are to reach,
    or 0; results and replay: empty until the row has run."""

    name: str
    path: Path
    title: str
    question: str
    base: str
    seeds: list[int]
    common: list[str]
    arms: dict[str, list[str]]
    verdict: str = ""
    rival: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)
    corpus: dict[str, str] = field(default_factory=dict)
    target: float = 0.0
    rounding: float = 1e-3
    results: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, Any] = field(default_factory=dict)

    def options(self, arm: str, seed: int, folder: Path) -> list[str]:
        """Return the arguments of train.py for one run. InputError: a published file is missing."""
        source = [f"--data.source={self._text()}"] if self.corpus else []
        place = [f"--run.folder={folder}", f"--run.seed={seed}"]
        given = [self.base, *source, *self.common, *self.arms[arm], *place]
        return [option.replace("{published}", str(PUBLISHED)) for option in given]

    def missing(self) -> str:
        """Return the first published file that the row needs and that is not here, or ""."""
        named = re.findall(
            r"{published}/([\w/.-]+)", " ".join([*self.common, *sum(self.arms.values(), [])])
        )
        named += [self.corpus["task"]] if "task" in self.corpus else []
        return next((name for name in named if not (PUBLISHED / name).exists()), "")

    def corpus_digest(self) -> str:
        """Return the SHA-256 of the corpus's bytes (data/packages.py::digest where it is several
        files). Raises InputError where a text is another than the row's."""
        if self.corpus:
            return hashlib.sha256(self._text().read_bytes()).hexdigest()
        names = [option.split("=", 1)[1] for option in self.common if "data.source=" in option]
        files = sources.find(names[-1] if names else "stdlib")
        return packages.digest((file.name, file.path) for file in files)

    def _text(self) -> Path:
        """Return the file of a corpus, and make it if it is not there."""
        path = RUNS / self.corpus["name"]
        digest = self.corpus["sha256"]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._fetch(path))
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise InputError(f"{path} is not the text of this row (SHA-256 {digest}): remove it")
        return path

    def _fetch(self, path: Path) -> bytes:
        if "task" in self.corpus:
            return piqa.conversations(PUBLISHED / self.corpus["task"])
        url = self.corpus["url"]
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.read()
        except OSError as error:
            raise InputError(f"{url} cannot be read ({error}): put it at {path}") from error


def read(path: Path) -> LedgerRow:
    """Read a row. InputError: there is none, or a key is missing or unknown."""
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.toml")))
        raise InputError(f"{path.stem} is no row of the ledger: take one of {known}")
    try:
        return LedgerRow(name=path.stem, path=path, **tomli.loads(path.read_text(encoding="utf-8")))
    except (TypeError, tomli.TOMLDecodeError) as error:
        raise InputError(f"{path} is no row of the ledger: {error}") from error


def rows() -> list[LedgerRow]:
    return [read(path) for path in sorted(ROWS.glob("*.toml"))]


def write(row: LedgerRow) -> None:
    """Replace what the program has written below MARK; what was written by hand above it stays."""
    written = row.path.read_text(encoding="utf-8").split(MARK)[0].rstrip("\n")
    tables = [("results", row.results), ("replay", row.replay)]
    lines = []
    for name, table in tables:
        lines.append(f"\n[{name}]\n")
        lines += [f"{key} = {_value(value)}\n" for key, value in table.items()]
    row.path.write_text(f"{written}\n\n{MARK}{''.join(lines)}", encoding="utf-8")


def _value(value: Any) -> str:
    """Write a value in TOML. Floats are written with as many digits as give the same number back."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{k}" = {_value(v)}' for k, v in value.items()) + " }"
    if isinstance(value, list) and len(value) > 5:
        cells = [f"{_value(cell)}," for cell in value]
        return (
            "[\n"
            + "".join(f"    {' '.join(cells[i : i + 5])}\n" for i in range(0, len(cells), 5))
            + "]"
        )
    return json.dumps(value)


def machine() -> str:
    """Return the kind of this machine: processor and the vector instructions that decide in which
    order a sum is taken. Runs on one kind with one version of PyTorch are bitwise equal."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8")
        found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        model = found[1] if found else model
        listed = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
        flags = set(listed[1].split()) if listed else flags
    wide = sorted(flags & {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile"})
    return " ".join([model, *wide])


def torch_version() -> str:
    return metadata.version("torch")


def commit() -> str:
    """Return this checkout's commit, with "+" where files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!lab", ":!docs")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
