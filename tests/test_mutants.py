"""The driver of mutation testing: its own mutants, its verdicts, and the tests that it names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants

SOURCE = '''"""A module."""
def half(x, log=print):
    log(f"é {x}", end="", flush=True)
    x += 1
    return round(x / 2, ndigits=1)
'''


def test_statements_and_arguments_are_left_out():
    made = {(line, kind): make() for line, _, kind, make in mutants.left_out(SOURCE)}
    assert len(list(mutants.left_out(SOURCE))) == 5
    assert all(mutants.changes_code(source, SOURCE) for source in made.values())
    assert made[4, "statement left out"] == SOURCE.replace("x += 1", "pass")
    assert "    pass\n    x += 1" in made[3, "statement left out"]
    assert ast.unparse(ast.parse(made[5, "argument left out"])).endswith("return round(x / 2)")
    assert not mutants.changes_code(SOURCE + "# a comment\n", SOURCE) and not mutants.changes_code(
        "x = (", SOURCE
    )


VERDICTS = """
import sys
from pathlib import Path
from tools import mutants
mutants.ROOT, copy, source = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2], "half.py").read_text()
print(mutants.outcome(None, copy, ["test_half.py"], 100)[0])
for old, new, limit in ("x += 1", "pass", 100), (", ndigits=1", "", 100), ("x += 1", "while True: pass", 3):
    mutant = mutants.Mutant(0, "half.py", 1, "", source.replace(old, new))
    print(mutants.outcome(mutant, copy, ["test_half.py"], limit)[0])
"""


def test_a_mutant_is_killed_by_a_test_that_fails_or_does_not_end(tmp_path):
    """In the copy, which has the file as it was afterwards."""
    for name in "original", "copy":
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.py").write_text(SOURCE)
        (tmp_path / name / "test_half.py").write_text(
            "from half import half\n\ndef test_half():\n    assert half(3) == 2\n"
        )
    done = subprocess.run(
        [sys.executable, "-c", VERDICTS, tmp_path / "original", tmp_path / "copy"],
        cwd=mutants.ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.split("\n") == ["lived", "killed", "lived", "killed (time)", ""], (
        done.stdout + done.stderr
    )
    assert (tmp_path / "copy" / "half.py").read_text() == SOURCE


def test_a_sample_is_that_of_its_seed_and_every_mutant_is_a_program_of_its_own():
    pytest.importorskip("cosmic_ray")
    files = ["parallelisms/blocks.py", "training/optim.py"]
    first, second, third = (mutants.sample(files, 30, seed) for seed in (0, 0, 1))
    assert first == second and first != third and len(first) == 30
    assert {mutant.path for mutant in first} == set(files)
    for mutant in first:
        assert (
            mutants.changes_code(mutant.source, (mutants.ROOT / mutant.path).read_text())
            and mutant.difference()
        )


def test_every_model_and_parallelism_has_its_tests():
    files = [
        "train.py",
        *(
            str(path.relative_to(mutants.ROOT))
            for folder in ("models", "parallelisms")
            for path in (mutants.ROOT / folder).rglob("*.py")
            if path.stat().st_size
        ),
    ]
    assert set(files) <= set(mutants.TESTS)


def test_every_test_that_is_named_exists():
    for path, tests in mutants.TESTS.items():
        assert (mutants.ROOT / path).exists()
        for argument in mutants.arguments_of(tests):
            name, _, function = argument.partition("::")
            text = Path(mutants.ROOT / name).read_text()
            assert f"def {function.partition('[')[0]}" in text, argument
