"""Starts that cannot work, by hand or by a script: each is one sentence before anything runs."""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import train
from checkpoint.storage import local
from configs.schema import InputError
from parallelisms import mesh
from tests.checkpoints import build
from tests.programs import PYTHON, finished
from tests.ranks import WORKERS, run_ranks
from tools.launch.arguments import parse
from training import room

ROOT = Path(__file__).resolve().parent.parent
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--max-restarts=-1", "at least 0"),
        ("--max-restarts=two", "whole number"),
        ("--nproc-per-node=0", "at least 1"),
        ("--nnodes=0", "number of nodes"),
        ("--nnodes=3:2", "number of nodes"),
        ("--nnodes=2: --master-addr=here", "number of nodes"),
        ("--node-rank=-1", "at least 0"),
        ("--node-rank=1", "must be below --nnodes, 1"),
        ("--nnodes=2 --node-rank=2 --master-addr=here", "must be below --nnodes, 2"),
        ("--nnodes=2", "needs --master-addr"),
        ("--nnodes=2 --master-addr=", "needs --master-addr"),
        ("--master-port=70000", "1 to 65535"),
        ("--join-timeout=0", "at least 1"),
        ("nowhere.py", "there is no script nowhere.py"),
    ],
)
def test_an_argument_of_the_launcher_that_cannot_be_meant(argument, words, capsys):
    with pytest.raises(SystemExit) as refused:
        parse([*argument.split(), "train.py"], "")
    usage, sentence = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and words in sentence and usage.startswith("usage:")


def test_arguments_that_can_be_meant():
    options = parse(["--nnodes=1:3", "--node-rank=2", "--master-addr=a", "train.py", "--x=1"], "")
    assert (options.nnodes, options.node_rank) == ((1, 3), 2)
    assert options.script == ["train.py", "--x=1"]


@pytest.mark.parametrize(
    "address, node",
    [("nowhere.invalid", "0"), pytest.param("127.0.0.1", "1", marks=pytest.mark.slow)],
)
def test_an_address_where_no_other_node_is_found_is_two_sentences(address, node):
    where = ["--nnodes=2", f"--master-addr={address}", "--master-port=1", f"--node-rank={node}"]
    more = *where, "--join-timeout=1", "train.py"
    done = finished(PYTHON, "-m", "tools.launch", *more, seconds=300)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and 1 <= len(lines) <= 2, done.stderr
    assert f"could not meet the others at {address}:1: " in lines[-1]
    assert all(line.startswith("launch: ") for line in lines)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"RANK": "0"}, "RANK is set .* WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set .* RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 .* below WORLD_SIZE = 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, "LOCAL_RANK = '-1'"),
    ],
)
def test_half_a_world_is_a_sentence(settings, words, monkeypatch):
    for name in WORLD:
        monkeypatch.delenv(name, raising=False)
    assert mesh.world().size == 1
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        mesh.world()


@pytest.mark.slow
def test_train_says_what_is_missing_of_the_world(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name not in WORLD}
    done = subprocess.run(
        [sys.executable, "train.py", "--run.device=cpu", f"--run.folder={tmp_path}/run"],
        cwd=ROOT,
        env=clean | {"RANK": "0"},
        text=True,
        capture_output=True,
        timeout=300 * WORKERS,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "./run_train.sh or torchrun" in done.stderr and not (tmp_path / "run").exists()


def test_a_model_without_room_is_refused_before_its_text_is_read(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("a few words")
    code, said = run_ranks(1, start_405b, text, tmp_path / "run")[0]
    assert code == 2, said
    assert "weights, gradients and optimizer state need 6,0" in said, said
    assert not list((tmp_path / "run").rglob("*.npy")) and "tokens" not in said, said


def start_405b(text: Path, folder: Path) -> tuple[int, str]:
    argv = ["configs/llama_debug.toml", f"--run.folder={folder}", "--run.device=cpu"]
    argv += ["--model.flavor=405B", f"--data.source={text}", "--data.tokenizer=bytes"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main(argv)
    return code, said.getvalue()


STATES = (
    "--optimizer.kind=adamw",
    "--optimizer.kind=sgd",
    "--optimizer.kind=sgd --optimizer.momentum=0.9",
    "--optimizer.kind=muon",
    '--lora.rank=4 --lora.targets=["wq","w1"] --checkpoint.load_path=/a/base',
)


def test_the_state_of_a_step_is_counted_exactly():
    """Muon's vectors keep two averages, and are counted with one."""
    for options, (counted, held) in zip(STATES, run_ranks(1, counted_and_held)[0], strict=True):
        largest = held if "muon" in options else counted + 1000
        assert counted <= held <= largest, options


def counted_and_held() -> list[tuple[int, int]]:
    """Return the bytes of the state of a step, counted before and then really held."""
    found = []
    for options in STATES:
        job = build(*options.split())
        family, args = train.architecture(job.cfg)
        parameters = list(job.model.parameters())
        held = parameters + [p for p in parameters if p.requires_grad]  # their gradients
        for state in job.optimizer.state.values():
            held += [tensor for tensor in state.values() if tensor.ndim]
        size = sum(local(tensor).nbytes for tensor in held)
        counted = room.state_bytes(job.cfg, family, args)
        room.check_room(job.cfg, family, args, memory=lambda: counted)
        with pytest.raises(InputError, match="this machine has"):
            room.check_room(job.cfg, family, args, memory=lambda: counted - 1)
        found.append((counted, size))
    return found


ASKED = {  # arguments -> exit code, and what is said
    ("checkpoint.verify", "nope"): (2, "there is no checkpoint in 'nope'"),
    ("data.audit", "nope"): (2, "nope/data.json cannot be read: No such file"),
    ("lab.bench", "nope"): (2, "nope: no such benchmark"),
    ("tools.parity.proved", "--now"): (2, "unrecognized arguments: --now"),
    ("lab.reading", "nope"): (2, "nope cannot be read: No such file"),
    ("lab.simulate", "--gpus=99"): (2, "--gpus 99: between 1 and 16"),
    ("tools.compare_runs", "nope", "nope"): (2, "nope is not the folder of a run"),
    ("tools.convert", "to-hf", "nope", "out"): (2, "there is no checkpoint in 'nope'"),
    ("tools.convert", "from-dcp", "docs", "out"): (2, "docs has no .metadata: give a folder"),
    ("tools.convert", "config", "README.md", "LICENSE"): (2, "LICENSE exists already: give"),
    ("tools.evaluate", "nope"): (2, "there is no checkpoint in 'nope'"),
    ("tools.generate", "nope"): (2, "there is no checkpoint in 'nope'"),
    ("tools.goodput", "nope"): (2, "nope is not the folder of a run"),
    ("tools.hang", "nope"): (2, "nope has no positions of ranks"),
    ("tools.launch", "nope.py"): (2, "there is no script nope.py"),
    ("tools.parity", "nope.toml"): (2, "nope.toml: no such file"),
    ("data.prepare", "--on=ray"): (2, "--on is gone: each machine prepares"),
    ("tools.ladder", "--ray"): (2, "--ray is gone: --slurm writes a job array"),
    ("tools.plan", "--compare=x.toml"): (2, "--compare is gone: plan each"),
    ("tools.plan", "--html=x.html"): (2, "--html is gone: --trace OUT.json"),
    ("tools.plan", "--peers=1"): (2, "--peers is gone: docs/reliability.md"),
    ("tools.plan", "--device=h10"): (2, 'did you mean "h100"?'),
    ("tools.plan", "--stack=nemmo"): (2, "--stack nemmo: unknown; known are"),
    ("tools.preflight", "--only=sleep"): (2, "--only=sleep: no such check"),
    ("tools.prove", "--gpus=8", "nope.toml"): (2, "nope.toml: no such file"),
    ("tools.replay", "nope", "--steps=3"): (2, "nope is neither the folder of a run nor"),
    ("tools.report", "nope"): (2, "nope is not the folder of a run"),
    ("train.py", "--trainin.steps=3"): (2, "did you mean training.steps?"),
}
HELP = {
    "lab.bench": "Run a benchmark",
    "configs.load": "--table.key=value",
    "tools.check": "--table",
}
# started by other programs of ours, with arguments that they alone know
SERVANTS = ("data.rendering", "lab.simulate.server", "tools.launch.rank")
ASK_ALL = """
import json, os, runpy, sys
def refuse(event, about):
    if event == "import" and about[0] == "torch":
        raise ImportError("torch is imported")
sys.addaudithook(refuse)
asked, folder = json.loads(sys.argv[1]), sys.argv[2]
for number, words in enumerate(asked):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if number + 1 == len(asked) or asked[number + 1][0] != "train.py":
            import configs.load  # once for all children; train.py looks at its call in the import
        continue
    sys.argv = words
    for stream in (1, 2):
        os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if words[0] == "train.py":
        runpy.run_path("train.py", run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit(0)
"""


def programs() -> list[str]:
    """Return what one may start: modules for `python -m`, and train.py."""
    found = subprocess.run(
        ["git", "grep", "--untracked", "-l", 'if __name__ == "__main__"', "--", "*.py", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = [name.removesuffix(".py").removesuffix("/__main__").replace("/", ".") for name in found]
    return ["train.py" if name == "train" else name for name in names if name not in SERVANTS]


@pytest.mark.slow
def test_help_and_mistakes_in_a_call_are_answered_before_torch_is_imported(tmp_path):
    """Importing it takes 3 s on an idle machine and 15 s on a busy one."""
    asked = ASKED | {(name, "--help"): (0, HELP.get(name, "usage: ")) for name in programs()}
    asked["train.py", "--help"] = (0, "--table.key=value")
    calls = sorted(asked, key=lambda words: words[0] != "train.py")
    done = finished(PYTHON, "-c", ASK_ALL, json.dumps(calls), tmp_path, seconds=300)
    assert done.returncode == 0, done.stderr
    for number, (words, code) in enumerate(zip(calls, done.stdout.split(), strict=True)):
        said = (tmp_path / str(number)).read_text()
        wanted, sentence = asked[words]
        assert int(code) == wanted and sentence in said, (words, code, said)
        assert "Traceback" not in said, (words, said)
    assert len(calls) > len(ASKED) + 20


def test_negative_control_a_program_that_imports_torch_first_is_seen(tmp_path):
    done = finished(PYTHON, "-c", ASK_ALL, '[["lab.simulate.server", "--help"]]', tmp_path)
    assert done.stdout.split() == ["1"] and "torch is imported" in (tmp_path / "0").read_text()


@pytest.mark.parametrize(
    "limits, wanted", [((64, 1024), 1024), ((64, resource.RLIM_INFINITY), 65536)]
)
def test_a_process_may_open_what_the_system_allows(limits, wanted, monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: given.append(pair))
    room.allow_files()
    assert given == [(wanted, limits[1])]


def test_a_process_that_may_open_few_files_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    with pytest.raises(InputError, match="40 files open"):
        room.allow_files()
