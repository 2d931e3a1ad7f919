"""The commands in README.md, AGENTS.md and docs/*.md, run literally, in a copy of the repository.

A command may be shortened here (fewer steps, a smaller model), but nothing is added that would make
an illegal one legal. A new command in a document needs no change of this file, unless the command
takes a machine or a download that a test does not have: then NEEDS lists it with what it takes.
Every `run_train.sh` command is checked as a configuration, for the number of processes it would
have, wherever it can run.

A process that imports torch costs seconds before it does anything. So a shell runs one command of
each kind (TYPED). The others run the program in forked processes, with the same arguments.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

import train
from configs.load import load_config
from tests import fork_server
from tests.published import first_layers, published
from tests.ranks import WORKERS, run_ranks
from tools.plan.arguments import arguments as plan_arguments
from tools.plan.command import read_inputs

ROOT = Path(__file__).resolve().parent.parent
AGENTS = ROOT / "AGENTS.md"
DOCUMENTS = [ROOT / "README.md", AGENTS, *sorted((ROOT / "docs").glob("*.md"))]

# The commands on the user's own model, which have a separate test.
OWN_MODEL = r"\bmodels/SmolLM2\b|\bruns/smol\b|\bsmol\.toml\b"
# Rows: a pattern of commands that are not run here, and what they take. The first row that matches
# counts.
NEEDS = (
    (r"^\./run_tests\.sh", "the time of this whole suite"),
    (r"^ruff ", "a tree that may change (tests/test_repo_files.py runs it)"),
    (r"^git apply ", "a tree that may change (tests/test_forking.py applies each diff to a copy)"),
    (r"^tensorboard ", "a user who stops it: it serves for ever"),
    (r"^(srun|sbatch) ", "Slurm (tests/test_launchers.py runs the real thing)"),
    (r"\bNNODES=", "several hosts (tests/test_restarts.py, tests/test_two_hosts.py)"),
    (r"run_train\.sh .*configs/(?!\w*_debug(_lora)?\.)\w+\.toml", "GPUs and a corpus"),
    (
        r"^(export .*; )?python -m lab\.bench ",
        "an idle machine for minutes, or GPUs: it measures",
    ),
    (r"run_train\.sh .*--checkpoint\.branch_from=", "a longer run (tests/test_branches.py)"),
    (
        r"^python -m tools\.plan .*--routing runs/x",
        "a run of this model (tests/test_plan_experts.py)",
    ),
    (
        r"^python -m tools\.plan .*(--device cpu|--search|--trace|--days|128k|30b)",
        "processor time; its arguments are read (tests/test_plan*.py have smaller models)",
    ),
    (
        r"\bruns/(try|before|after|mlp)\b|^\./run_train\.sh configs/(llama|deepseek_v3)_debug\.toml$",
        "processor time: README.md has such runs, and such a comparison",
    ),
    (
        r"^NGPU=4 .*(qwen3_moe|fault_tolerant)",
        "processor time (tests/test_experts.py, tests/test_rounds.py)",
    ),
    (r"^python -m tools\.prove .*llama_70b", "processor time (tests/test_prove.py)"),
    (
        r"^python -m tools\.ladder (?!.*--dry-run)",
        "an hour of processor time (tests/test_ladder.py)",
    ),
    (r"^python -m tools\.fetch_task ", "a download (tests/test_tasks.py)"),
    (r"^python -m lab\.simulate ", "the CUDA build of torch (tests/test_simulate.py)"),
    (
        r"^python -m tools\.parity CONFIG",
        "a configuration of one's own (tests/test_parity_tool.py)",
    ),
    (
        r"^python -m tools\.convert from-dcp ",
        "a checkpoint of TorchTitan's (tests/test_dcp.py)",
    ),
    (OWN_MODEL, "a published model (test_your_own_model_in_five_commands)"),
    (r"\bs3://bucket/", "a bucket (tests/test_stores.py, tests/test_stored_corpora.py)"),
    (r"^export \w+=", "a shell that goes on"),
    (r"^pip ", "a download"),
    (r"\bmodels/[\w.-]*(Llama|Qwen)", "published weights (tests/test_convert.py makes small ones)"),
    (r"\bmodels/[\w.-]*tokenizer", "a published tokenizer (tests/test_prepare.py)"),
    (
        r"^python -m data\.audit .*--find web:",
        "a run on a mixture with a source called web (tests/test_audit.py)",
    ),
)

# Rows: a pattern, the exit code (0 otherwise) and what must be in the output of commands that it
# matches.
SAYS = (
    (r"^\./run_train\.sh$", 0, "loss 8."),
    (r"^\./run_train\.sh --help", 0, "--table.key=value"),
    (r"^NGPU=4 .*tensor_parallel=2", 0, "dp_shard 2 x tp 2 = 4 processes"),
    (r"^NGPU=2 .*pipeline_parallel=2", 0, "loss 8."),
    (
        r"^\./run_train\.sh configs/llama_debug\.toml --training\.steps=400$",
        0,
        "resumed after step 12 of 20",
    ),
    (r"--checkpoint\.load_step=200", 0, "resumed after step 10 of 12"),
    (r"^python -m tools\.generate .*--prompt \"class \"", 0, "class "),
    (r"^python -m tools\.evaluate runs/llama_debug", 0, "acc_norm"),
    (r"^python -m checkpoint\.verify ", 0, "  ok"),
    (r"^python -m data\.audit runs/llama_debug --steps", 0, ".py"),
    (r"^python -m tools\.goodput runs/llama_debug$", 0, "goodput"),
    # the sums of bfloat16 are not associative
    (r"^python -m tools\.compare_runs runs/llama_debug runs/mesh", 1, ""),
    (r"^python -m tools\.plan ", 0, "tokens/s"),
    (r"^python -m tools\.replay ", 0, "equal to"),
    (r"^python -m tools\.prove ", 0, "types          holds"),
)

# Patterns of commands that a shell runs: `run_train.sh` by itself and without a run (with its
# launcher: tests/test_security.py); a tool by its module's name; one that forks ranks itself; and all
# that a shell has to read.
TYPED = (
    r"^\./run_train\.sh$",
    r"^\./run_train\.sh --help",
    r"^python -m checkpoint\.verify ",
    r"^python -m tools\.(parity|prove) configs/\w+_debug\.",
    r"^python -m tools\.replay ",
    r"[$`|<>&;~]",
)

# A shortened run has a twentieth of the steps, and so of everything that is counted in steps, of a
# smaller model.
STEPS = 240  # of configs/llama_debug.toml
SHARE = 20
COUNTED = ("training.steps", "checkpoint.load_step", "checkpoint.interval", "validation.interval")
CORPUS = "--data.source='corpus/*.py'"
SMALLER = [
    "--model.n_layers=2",
    "--training.seq_len=64",
    "--validation.steps=1",
    "--debug.sample_tokens=8",
    "--checkpoint.interval=5",
]


def commands(document: Path) -> list[str]:
    """Return the commands of the document's blocks of bash, without remarks."""
    blocks = re.findall(
        r"```(?:bash|sh|shell)\n(.*?)```", document.read_text(encoding="utf-8"), re.S
    )
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [
        re.sub(r"\s+#.*$| {2,}(?=\S)", lambda gap: "" if "#" in gap[0] else " ", line).strip()
        for line in lines
    ]
    return [line for line in lines if line and not line.startswith("#")]


def need(command: str) -> str:
    """Return what the command takes that a test does not have; empty if it can be run."""
    return next((takes for pattern, takes in NEEDS if re.search(pattern, command)), "")


def shortened(command: str) -> str:
    """With a small corpus instead of Python's library, whose preparation takes 30 seconds of
    processor time; the whole library is prepared by
    tests/test_prepare.py::test_every_document_of_the_standard_library_survives."""
    command = re.sub(r"--vocab-size \d+", "--vocab-size 2000", command)  # as small as the corpus
    if "tools.parity " in command:
        return " ".join([command, *SMALLER[:2]])
    if "tools.prove " in command:
        return f"{command} {SMALLER[0]}" if "debug" in command else f"{command} --only types"
    if "run_train.sh" not in command or "--help" in command or "--preflight" in command:
        return command
    short = re.sub(
        rf"--({'|'.join(COUNTED)})=(\d+)",
        lambda option: f"--{option[1]}={int(option[2]) // SHARE}",
        command,
    )
    steps = [] if "--training.steps=" in short else [f"--training.steps={STEPS // SHARE}"]
    if "_lora.toml" in short:  # its conversations come with it, and do not fit shorter windows
        smaller = [option for option in SMALLER if "seq_len" not in option]
        return " ".join([short, *steps, *smaller])
    source = [CORPUS] if "--data." not in short else []
    return " ".join([short, *steps, *source, *SMALLER])


FIRST = "./run_train.sh"  # the README's first command
ALL = [(document, command) for document in DOCUMENTS for command in commands(document)]
# no test runs any other command of a document
RUNNABLE = re.compile(r"^((\w+=\S+) )*(\./run_train\.sh|python -m )")


@pytest.mark.parametrize("command", dict.fromkeys(command for _, command in ALL))
def test_a_command_is_run_or_listed(command):
    documents = ", ".join(sorted({document.name for document, other in ALL if other == command}))
    assert need(command) or RUNNABLE.match(command), (
        f"{documents}: `{command}` is neither run by this test nor listed in NEEDS in "
        f"{Path(__file__).name}: give it a row "
        "there that says what it takes"
    )


def test_agents_md_has_a_row_for_every_folder():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    text = AGENTS.read_text(encoding="utf-8")
    assert {name for name in folders if f"| `{name}/` |" not in text} == set()
    names = re.findall(r"`([\w.-]+/[\w./-]*|\w+\.(?:py|md|sh))`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("pattern", [*(row[0] for row in (*NEEDS, *SAYS)), *TYPED[:-1]])
def test_a_row_has_a_command(pattern):
    assert any(re.search(pattern, command) for _, command in ALL), (
        f"no document has such a command: delete the row {pattern!r}"
    )


@pytest.mark.parametrize(
    "command",
    dict.fromkeys(
        command
        for _, command in ALL
        if re.search(r"run_train\.sh|slurm\.sh|lab\.simulate|tools\.plan configs", command)
        # a file is written by the command before
        and not re.search(rf"{OWN_MODEL}|--routing runs/x|--device cpu", command)
    ),
)
def test_the_configuration_of_a_command_is_legal(command, monkeypatch):
    """On as many processes as it asks for; on the preset's own number of GPUs where it does not
    say."""
    monkeypatch.chdir(ROOT)
    command = re.sub(r"^python -m lab\.simulate --gpus (\d+)", r"NGPU=\1 ./run_train.sh", command)
    words = shlex.split(re.sub(r"\[--.*?\]", "", command))
    if words[:3] == ["python", "-m", "tools.plan"]:
        read_inputs(*plan_arguments(words[3:]))
        return
    start = next(i for i, word in enumerate(words) if word.endswith(("run_train.sh", "slurm.sh")))
    arguments = [word for word in words[start + 1 :] if word not in ("--help", "--preflight")]
    preset = ROOT / next(
        (word for word in arguments if word.endswith(".toml")), "configs/llama_debug.toml"
    )
    [(world, local)] = re.findall(
        r"^# world size: (\d+) \(\d+ hosts? of (\d+)\)$", preset.read_text(encoding="utf-8"), re.M
    )
    before = dict(re.findall(r"(NGPU|NNODES|-N)[= ](\d+)", " ".join(words[:start])))
    local = int(before.get("NGPU", local))
    nodes = before.get("NNODES", before.get("-N"))
    load_config(
        arguments, int(nodes) * local if nodes else local if "NGPU" in before else int(world), local
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a copy of the repository, as an empty clone is, with a small corpus, after the first
    command of the README."""
    house = copy_of_repository(tmp_path_factory.mktemp("house"))
    corpus = house / "corpus"
    corpus.mkdir()
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy(path, corpus)
    lines = "".join(
        json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n" for path in DOCUMENTS
    ).encode()
    (corpus / "documents.jsonl.zst").write_bytes(
        pyarrow.compress(lines, codec="zstd", asbytes=True)
    )
    (house / "said.txt").write_text(type_in(house, FIRST))
    return house


def copy_of_repository(house: Path) -> Path:
    """Copy the repository as an empty clone."""
    for path in ROOT.iterdir():
        if (path / "__init__.py").exists() or path.name == "docs":
            shutil.copytree(path, house / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file() and path.suffix in (".py", ".sh", ".toml", ".txt", ".md"):
            shutil.copy(path, house / path.name)
    return house


def type_in(house: Path, command: str) -> str:
    """Run it as a user would, in a shell or in forked processes. Files for the home folder go into
    the copy."""
    pattern, expected, words = next(
        (row for row in SAYS if re.search(row[0], command)), ("", 0, "")
    )
    line = shortened(command)
    typed = any(re.search(pattern, command) for pattern in TYPED)
    code, said = in_a_shell(house, line) if typed else in_forks(house, line)
    assert code == expected, (
        f"`{line}` ended with {code}\n{said}\n"
        "Fix the command in the document, or list in NEEDS what it takes"
    )
    assert words in said, f"`{line}`:\n{said}\nwhich lacks {words!r}"
    return said


def in_a_shell(house: Path, line: str) -> tuple[int, str]:
    """Return the exit code, and what was printed. `python` is this environment's."""
    places = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(house),
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        line,
        shell=True,
        cwd=house,
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=300 * WORKERS,
    )
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def in_forks(house: Path, line: str) -> tuple[int, str]:
    """Run like in_a_shell: the program that the line names, with the same arguments, in as many
    forked processes as it asks for."""
    words = shlex.split(line)
    ranks = int(words.pop(0).removeprefix("NGPU=")) if words[0].startswith("NGPU=") else 1
    if words[:2] == ["python", "-m"]:
        return fork_server.call(module, house, *words[2:])
    program, *arguments = words
    assert program == "./run_train.sh", f"`{line}` needs a row in TYPED"
    sizes = [f"--world-size={ranks}", f"--local-world-size={ranks}"]
    code, said = fork_server.call(module, house, "tools.check", *arguments, *sizes)
    if code:
        return code, said
    if ranks == 1:
        return fork_server.call(trains, house, *arguments)
    results = run_ranks(ranks, trains, house, *arguments, timeout=200)
    return max(code for code, _ in results), "\n".join(said for _, said in results)


def module(house: Path, name: str, *arguments: str) -> tuple[int, str]:
    """`python -m name arguments` in this process."""

    def run() -> int:
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0

    return printed(house, run)


def trains(house: Path, *arguments: str) -> tuple[int, str]:
    """`train.py arguments` in this process."""
    return printed(house, lambda: train.main(list(arguments)))


def printed(house: Path, run: Callable[[], int]) -> tuple[int, str]:
    """Return the exit code of a program that this process runs in the copy, and what it prints."""
    os.chdir(house)
    os.environ["HOME"] = str(house)
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            code = run()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return code, output.read()


def unlike(shown: str, said: str) -> list[str]:
    """Return the lines of a sample that no program has printed, whatever their numbers."""
    lines = []
    for line in shown.splitlines():
        words = re.sub(r"\d[\d,.]*", "0", line.replace("bfloat16", "dtype"))
        pattern = re.escape(words).replace("0", r"[\d,.]+").replace("dtype", r"(bf|f)loat\d+")
        if not re.search(pattern.replace(r"\.\.\.", ".*") + "$", said, re.MULTILINE):
            lines.append(line)
    return lines


@pytest.mark.slow
@pytest.mark.cap(300)
def test_the_readme_shows_what_its_first_command_prints(trained):
    said = (trained / "said.txt").read_text()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(model: .*?)```", readme, re.S)[1]
    assert not unlike(shown, said), said
    assert unlike("step 1/9  los 5.1 ...", said), "a word that it does not say"


@pytest.mark.slow
@pytest.mark.cap(300)
def test_commands_of_the_readme(trained, tmp_path):
    """In their order: the later ones use what the first made."""
    house = Path(shutil.copytree(trained, tmp_path / "house"))
    first, *rest = (
        command for command in dict.fromkeys(commands(ROOT / "README.md")) if not need(command)
    )
    assert first == FIRST
    for command in rest:
        type_in(house, command)


def commands_here(document: Path) -> list[str]:
    """Return the commands of a document that no test of the README's runs, and that run here."""
    known = set(commands(ROOT / "README.md"))
    known.discard(
        "./run_train.sh configs/llama_debug_lora.toml"
    )  # docs/finetuning.md goes on with it
    return [one for one in commands(document) if one not in known and not need(one)]


# pages whose commands take long, and use nothing that another page made
LONG = ("ledger.md", "scaling.md", "experts.md")
OTHERS = [one for one in DOCUMENTS if one.name not in LONG]


@pytest.mark.slow
@pytest.mark.cap(300)
@pytest.mark.parametrize(
    "documents", [OTHERS, *([ROOT / "docs" / name] for name in LONG)], ids=["others", *LONG]
)
def test_commands_of_documents(documents, trained, tmp_path):
    """After the README's first command, which several of them build on."""
    house = Path(shutil.copytree(trained, tmp_path / "house"))
    for command in dict.fromkeys(command for one in documents for command in commands_here(one)):
        type_in(house, command)


@pytest.mark.slow
@pytest.mark.cap(900)
def test_your_own_model_in_five_commands(tmp_path):
    """On the real model's first layers. What they read is shorter, a few lines of each file, and the
    run has two steps. tests/test_smollm2.py has the whole model."""
    transformers = pytest.importorskip("transformers")
    source = first_layers(published("smollm2"), tmp_path / "hf", 3)
    house = copy_of_repository(tmp_path)
    (house / "models" / "SmolLM2").symlink_to(source)
    for name in "chat.jsonl", "next_line.jsonl":
        file = house / "data" / "examples" / name
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(True)[:12]))
    page = ROOT / "docs" / "huggingface.md"
    lines = [line for line in commands(page) if re.search(OWN_MODEL, line)]
    assert len(lines) == 5
    said = []
    for line in lines:
        line += " --training.steps=2" if "run_train" in line else ""
        code, words = in_forks(house, line)
        assert code == 0, f"`{line}`:\n{words}"
        said.append(words)
    assert "its own chat template" in said[0] and "step 2/2" in said[1]
    assert said[2].strip() and "acc_norm" in said[3]
    load = transformers.AutoModelForCausalLM.from_pretrained
    before, after = load(source, dtype="float32"), load(house / "smol", dtype="float32")
    theirs, ours = before.generation_config.to_dict(), after.generation_config.to_dict()
    assert theirs == ours and after.config.tie_word_embeddings
    changed = before.state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert not changed.equal(after.state_dict()["model.layers.0.mlp.up_proj.weight"])
    words = [transformers.AutoTokenizer.from_pretrained(each) for each in (source, house / "smol")]
    talk = [{"role": "user", "content": "hello"}]
    first, second = (each.apply_chat_template(talk, tokenize=False) for each in words)
    assert first == second and "<|im_start|>system" in first


def test_a_mistake_costs_a_sentence_and_exit_code_2(tmp_path):
    mistakes = "--training.step=50 --parallelism.tensor_parallel=3 --optimizer.lr=-1"
    code, said = in_a_shell(ROOT, f"./run_train.sh {mistakes} --run.folder={tmp_path}/none")
    assert code == 2
    assert all(w in said for w in ("8 mistakes", "training.steps", "optimizer.lr", "n_heads"))
    assert not (tmp_path / "none").exists()
