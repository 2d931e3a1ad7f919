"""Mutation testing: does a test notice when a line of the reading core is wrong?

    pip install cosmic-ray                                        # its operators make most of the mutants
    python -m tools.mutants [--count 200] [--seed 0] [--part 1/4] [--list] [--only NUMBER,...] [--results results.jsonl]

A mutant is one small mistake in one file: a comparison turned round, a number off by one, a call or an argument left out. The
seed draws `--count` places of TESTS' files, each place with the same chance, and one mistake for each. Every mutant is run
against the tests that TESTS names for its file, in a copy of this repository. It is killed when a test fails, or does not end
in time. docs/mutants.md has the score, and an explanation of each mutant that lived.

Torch is imported once, and every mutant gets a fork of this process: a mutant costs the seconds of its tests and no more.
`--results` appends a line for each mutant and leaves out those that the file has already, so that a run can be continued.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("checkpoint", "configs", "data", "models", "parallelisms", "reliability", "tests", "tools", "train", "training")
LIMIT = 60, 3  # a mutant's tests may take so many seconds more than this multiple of what they take without a mutant
UNHARMED = 600  # seconds that they may take without one

MODEL = "tests/test_models.py tests/test_hf_parity.py tests/test_training.py::test_every_parameter_of_llama_is_filled_and_norms_are_ones"
CONVERT = "tests/test_config.py tests/test_convert.py::test_metas_files tests/test_convert.py::test_in_and_out_again " \
          "tests/test_convert.py::test_bad_hugging_face_folder tests/test_convert.py::test_bad_folder_of_meta " \
          "tests/test_convert.py::test_what_transformers_does_not_read_either_is_left_out"
MESH = "tests/test_parallelisms.py tests/test_contract.py"
MATRIX = "tests/test_parallel.py::test_mesh_equals_the_plain_model[fsdp2] tests/test_parallel.py::test_mesh_equals_the_plain_model[tp2]"
# File -> arguments of pytest, the quickest tests first. A test stops the run of its mutant when it fails.
TESTS = {
    "models/__init__.py": f"{MODEL} tests/test_config.py",
    "models/dense.py": f"{MODEL} {CONVERT}",
    "models/layers.py": f"{MODEL} tests/test_masking.py::test_equals_hugging_face_on_each_document {MATRIX}",
    "models/llama.py": f"{MODEL} {CONVERT}",
    "models/qwen3.py": f"{MODEL} {CONVERT}",
    "models/kernels/causal_attention.py": "tests/test_hf_parity.py tests/test_speed.py",
    "models/kernels/document_attention.py": "tests/test_masking.py",
    "parallelisms/__init__.py": f"{MESH} tests/test_speed.py::test_float8_learns_what_bfloat16_learns {MATRIX}",
    "parallelisms/ac.py": "tests/test_parallel.py::test_checkpointing_recomputes_what_it_says_and_keeps_less "
                          "tests/test_masking.py::test_selective_checkpointing_keeps_attention_and_full_recomputes_it "
                          f"tests/test_masking.py::test_the_names_that_selective_checkpointing_keeps_exist {MATRIX}",
    "parallelisms/attention.py": "tests/test_parallelisms.py tests/test_parallel.py::test_what_needs_a_gpu_says_so",
    "parallelisms/compile.py": MESH,
    "parallelisms/contract.py": "tests/test_contract.py tests/test_health.py::test_c3_ranks_that_are_not_alike_do_not_start",
    "parallelisms/dp.py": f"{MESH} tests/test_speed.py {MATRIX} tests/test_parallel.py::test_mesh_equals_the_plain_model[hsdp2x2]",
    "parallelisms/float8.py": "tests/test_parallelisms.py tests/test_speed.py",
    "parallelisms/mesh.py": f"{MESH} {MATRIX} tests/test_parallel.py::test_mesh_equals_the_plain_model[hsdp2x2]",
    "parallelisms/tp.py": f"{MESH} {MATRIX} tests/test_parallel.py::test_compiled_mesh_equals_the_plain_model",
    "training/init.py": "tests/test_training.py tests/test_models.py",
    "training/loss.py": f"tests/test_training.py {MATRIX}",
    "training/optim.py": "tests/test_training.py tests/test_speed.py",
    "data/order.py": "tests/test_loader.py tests/test_mixture.py",
    "data/loader.py": "tests/test_loader.py tests/test_mixture.py",
    "checkpoint/state.py": "tests/test_checkpoint.py tests/test_golden.py tests/test_resume.py",
    "checkpoint/verify.py": "tests/test_checkpoint.py tests/test_golden.py",
}  # fmt: skip


class Mutant(NamedTuple):
    number: int
    path: str  # of the file, in the repository
    line: int
    kind: str  # what was done, in the words of cosmic-ray or of `left_out`
    source: str  # the whole file with the mistake in it

    @property
    def name(self) -> str:
        return f"{self.number} {self.path}:{self.line} {self.kind}"

    def difference(self) -> str:
        """The lines that changed, as a diff without its head."""
        old, new = (ROOT / self.path).read_text(encoding="utf-8"), self.source
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def sample(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these files, fewer if there are not as many places. A place is drawn first, then one of the mistakes
    that can be made there: otherwise an operator that can be replaced in twelve ways would be drawn twelve times as often."""
    places: dict[tuple[str, int, int, str], list] = {}
    for path in files:
        source = (ROOT / path).read_text(encoding="utf-8")
        for line, column, kind, make in [*left_out(source), *by_cosmic_ray(source)]:
            places.setdefault((path, line, column, kind.split("_")[0]), []).append((kind, make))
    generator, mutants, order = random.Random(seed), [], sorted(places)
    generator.shuffle(order)
    for place in order:
        if len(mutants) == count:
            break
        kind, make = generator.choice(places[place])
        source = make()
        if source is not None and changes_code(source, (ROOT / place[0]).read_text(encoding="utf-8")):
            mutants.append(Mutant(len(mutants), place[0], place[1], kind, source))
    return mutants


def changes_code(mutant: str, original: str) -> bool:
    """Whether the mutant is Python, and another program than the original."""
    try:
        return ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(original))
    except SyntaxError:
        return False


def left_out(source: str) -> Iterator[tuple]:
    """(line, column, kind, function that makes the source) for every statement that is a call or adds to a variable, which is
    replaced by `pass`, and for every keyword argument of a call, which is removed. cosmic-ray has neither."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def cut(node: ast.AST, instead: bytes, after: bytes = b"") -> str:
        text = b"".join(lines)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        rest = text[end:]
        return (text[:begin] + instead + (rest.lstrip()[1:] if after and rest.lstrip().startswith(after) else rest)).decode()

    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or isinstance(node, ast.AugAssign):
            yield node.lineno, node.col_offset, "statement left out", lambda node=node: cut(node, b"pass")
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg:
                    yield keyword.lineno, keyword.col_offset, "argument left out", lambda node=keyword: cut(node, b"", b",")


def by_cosmic_ray(source: str) -> Iterator[tuple]:
    """The same for the operators of cosmic-ray, but not inside annotations, which no run evaluates."""
    try:
        from cosmic_ray import plugins
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.mutating import mutate_code
    except ImportError:
        sys.exit("tools.mutants needs cosmic-ray: pip install cosmic-ray")
    annotations = set()
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                annotations |= {(inner.lineno, inner.col_offset) for inner in ast.walk(part) if hasattr(inner, "lineno")}
                annotations |= {(part.lineno, column) for column in range(part.col_offset, part.end_col_offset)}
    tree = get_ast(source)
    for name in sorted(plugins.operator_names()):
        if name.startswith("core/Variable"):  # they need arguments
            continue
        operator, occurrence = plugins.get_operator(name)(), 0
        for node in ast_nodes(tree):
            for (line, column), _ in operator.mutation_positions(node):
                if (line, column) not in annotations:
                    make = lambda operator=operator, occurrence=occurrence: mutate_code(source, operator, occurrence)  # noqa: E731
                    yield line, column, name.removeprefix("core/"), make
                occurrence += 1


# Running them ---------------------------------------------------------------------------------------------------------


def import_heavy() -> None:
    """What every mutant's tests import and no mutant can change."""
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.utils.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def copied(place: Path) -> Path:
    """A copy of the files that git knows."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place


def outcome(mutant: Mutant | None, place: Path, arguments: list[str], limit: float) -> tuple[str, float, str]:
    """Whether the tests killed the mutant, their seconds, and the last lines of what pytest said. None: without a mutant."""
    path = place / mutant.path if mutant else None
    if path:
        path.write_text(mutant.source, encoding="utf-8")
    began, log = time.monotonic(), place / "pytest.log"
    if (pid := os.fork()) == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os._exit(tests_pass(place, arguments))
    code = None
    while code is None and time.monotonic() < began + limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.01)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(pid, 0)
    if path:
        shutil.copy(ROOT / mutant.path, path)
    said = log.read_text(errors="replace").splitlines()
    verdict = {0: "lived", None: "killed (time)"}.get(code, "killed")
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    return verdict, time.monotonic() - began, (failed or said or [""])[-1][:200]


def tests_pass(place: Path, arguments: list[str]) -> int:
    """pytest's exit code, in this process, with the modules of the copy."""
    import pytest

    for name in list(sys.modules):
        if name.split(".")[0] in PACKAGES:
            del sys.modules[name]
    os.chdir(place)
    sys.path[:] = [str(place), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return int(pytest.main(["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *arguments]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=list(TESTS), help="files of TESTS")
    parser.add_argument("--only", default="", help="numbers of mutants, with commas")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th mutant, from the I-th")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    parser.add_argument("--results", default="", help="append the results to this file; those it has are not run again")
    parser.add_argument("--most", type=int, default=10**9, help="run at most this many mutants now")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    mutants = [mutant for mutant in sample(options.files, options.count, options.seed) if mutant.number % parts == part - 1]
    if options.only:
        mutants = [mutant for mutant in mutants if str(mutant.number) in options.only.split(",")]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}\n{mutant.difference()}")
        return 0
    results = Path(options.results) if options.results else None
    done = {row["name"]: row for row in map(json.loads, results.read_text().splitlines())} if results and results.exists() else {}

    def keep(row: dict) -> None:
        done[row["name"]] = row
        print(f"{row['name']}: {row['verdict']} in {row['seconds']:.0f} s  {row['said']}", flush=True)
        if results:
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")

    import_heavy()
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        for mutant in [mutant for mutant in mutants if mutant.name not in done][: options.most]:
            if mutant.path not in done:  # the tests must pass without a mutant, or they would kill every one
                verdict, seconds, said = outcome(None, place, TESTS[mutant.path].split(), UNHARMED)
                keep({"name": mutant.path, "verdict": verdict, "seconds": seconds, "said": said})
            if done[mutant.path]["verdict"] != "lived":
                sys.exit(f"the tests of {mutant.path} fail without a mutant: {done[mutant.path]['said']}")
            limit = LIMIT[0] + LIMIT[1] * done[mutant.path]["seconds"]
            verdict, seconds, said = outcome(mutant, place, TESTS[mutant.path].split(), limit)
            keep({"name": mutant.name, "verdict": verdict, "seconds": seconds, "said": said, "difference": mutant.difference()})
    verdicts = [row["verdict"] for name, row in done.items() if name not in TESTS]
    killed = len(verdicts) - verdicts.count("lived")
    print(f"{killed} of {len(verdicts)} mutants killed" + (f": {killed / len(verdicts):.1%}" if verdicts else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
