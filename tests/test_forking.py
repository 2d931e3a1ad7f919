"""The examples of docs/forking.md work: each is applied to a copy of the tree, which then trains on
one process and on meshes, with the same losses.

The examples are diffs (docs/forking/), so they break when the code that they change moves. Then
change the copy of the tree by hand and write a new diff: `git diff > docs/forking/NAME.diff`.
"""

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.examples import fork
from tests.programs import PYTHON, ROOT, finished
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run

STEPS = "--training.steps=6"
MOST_LINES = 80  # that a diff adds or takes away
ONE = "1:"
FSDP2 = "2:"
TP2 = "2:--parallelism.tensor_parallel=2"
CP2 = "2:--parallelism.context_parallel=2"
PP2 = "2:--parallelism.pipeline_parallel=2"
FROM_FSDP2_TO_TP2 = "2:--training.stop_after=3;2:--parallelism.tensor_parallel=2"  # resumed


@dataclass(frozen=True)
class Example:
    options: list[str] = field(default_factory=list)
    meshes: list[str] = field(default_factory=lambda: [FSDP2])  # those that it may break
    prepare: Callable[[Path], object] = lambda tree: None  # gets the copy of the tree


def write_database(tree: Path) -> None:
    with closing(sqlite3.connect(tree / "corpus.sqlite")) as database, database:
        database.execute("CREATE TABLE documents (text TEXT)")
        for i in range(40):
            row = (f"row {i}: " + " ".join(str(n * (i + 7) % 97) for n in range(60)),)
            database.execute("INSERT INTO documents VALUES (?)", row)


EXAMPLES = {
    "mlp": Example(meshes=[TP2]),
    "attention": Example(meshes=[CP2, TP2]),
    "family": Example(["--model.family=parallel"], meshes=[PP2]),
    "term": Example(meshes=[PP2]),
    # no export for Hugging Face: models/formats/llama.py does not know its layer
    "multi_token": Example(meshes=[CP2, PP2]),
    "optimizer": Example(["--optimizer.kind=lion", "--optimizer.lr=1e-3"], [FROM_FSDP2_TO_TP2]),
    "convolution": Example(meshes=[CP2]),
    "recurrence": Example(["--data.mask_documents=true"], meshes=[CP2]),
    "schedule": Example(["--lr_schedule.kind=wsd_sqrt", "--lr_schedule.decay_fraction=0.6"]),
    "data_source": Example(["--data.source=corpus.sqlite"], prepare=write_database),
}


def train(tree: Path, meshes: list[str], options: list[str]) -> dict[str, dict]:
    words = "-m", "tests.examples", tree.parent / "runs", *meshes, "--", STEPS, *options
    done = finished(PYTHON, *words, cwd=tree, seconds=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_example_is_tried() -> None:
    diffs = {path.stem for path in (ROOT / "docs" / "forking").glob("*.diff")}
    assert diffs == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_fits_the_tree(name: str) -> None:
    diff = ROOT / "docs" / "forking" / f"{name}.diff"
    subprocess.run(["git", "apply", "--check", diff], cwd=ROOT, check=True)
    lines = diff.read_text().splitlines()
    changed = [line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    assert len(changed) <= MOST_LINES


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the losses of the tree as it is."""
    place = tmp_path_factory.mktemp("unchanged")
    options = [*tiny_run(place), STEPS]
    assert run_ranks(1, run, options, place / "run") == [(0, "")]
    return series(place / "run")


@pytest.mark.slow
@pytest.mark.cap(180)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_on_meshes(name: str, tmp_path: Path, unchanged: dict) -> None:
    example = EXAMPLES[name]
    tree = fork(tmp_path, name)
    example.prepare(tree)
    results = train(tree, [ONE, *example.meshes], example.options)
    for result in results.values():
        assert result["code"] == 0, result["said"]
    losses = results[ONE]["losses"]
    assert losses != unchanged, "the example changes nothing"
    for mesh in example.meshes:
        assert results[mesh]["losses"] == pytest.approx(losses, rel=1e-5)
