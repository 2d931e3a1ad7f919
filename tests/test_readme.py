"""The README's commands, run as they stand there. What takes minutes or other machines is shortened, visibly, by a row here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # `python` is this environment's
SHORT = (
    "--training.steps=24 --model.n_layers=2 --training.seq_len=64 --validation.steps=1 --checkpoint.interval=20 "
    "--run.folder={runs}/llama_debug --data.cache={cache} --debug.sample_tokens=8"
)
# command as in the README (without its comment) -> options added, words its output must have; None: cannot be run here
COMMANDS = {
    "./run_train.sh": (SHORT, "loss 8."),
    "./run_train.sh configs/llama_debug.toml --training.steps=400": (SHORT.replace("=24", "=30"), "resumed after step 24 of 30"),
    'python -m tools.generate runs/llama_debug --prompt "class "': ("--tokens=5", "class "),
    "python -m checkpoint.verify runs/llama_debug --all": ("", "  ok"),
    "python -m data.audit runs/llama_debug --steps 1:2": ("", ".py"),
    "python -m tools.convert dcp-to-hf runs/llama_debug runs/hf": ("", ""),
    "NGPU=4 ./run_train.sh --parallelism.tensor_parallel=2 --run.folder=runs/mesh": (
        SHORT.replace("/llama_debug", "/mesh"), "dp_shard 2 x tp 2 = 4 processes"),
    "python -m tools.goodput runs/llama_debug": ("", "goodput"),
    "python -m tools.compare_runs runs/llama_debug runs/mesh": None,  # exit code 1: these two differ; test_compare_runs.py
    "python -m tools.plan configs/llama_70b.toml --gpus 256 --device h100": ("", "tokens/s"),
    "./run_train.sh --help": ("", "--table.key=value"),
    "tensorboard --logdir runs": None,  # serves until it is stopped
    "./run_tests.sh": None,  # this suite
    "./run_train.sh configs/llama_8b.toml": None,  # needs GPUs and a corpus; the presets are checked in test_config.py
    "RESTARTS=3 ./run_train.sh configs/llama_8b.toml": None,  # test_restarts.py runs the real thing
    "NNODES=32 NODE_RANK=$RANK MASTER_ADDR=node0 ./run_train.sh configs/llama_70b.toml": None,
    "srun --ntasks-per-node=1 ./run_train.sh configs/llama_70b.toml": None,
    "srun --ntasks-per-node=1 ./run_train.sh --preflight configs/llama_70b.toml": None,  # test_preflight.py runs the real thing
    "sbatch -N 32 tools/launch/slurm.sh configs/llama_70b.toml": None,
}  # fmt: skip


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_every_command_of_the_readme_has_a_row():
    assert set(commands()) == set(COMMANDS)


@pytest.mark.cap(240)
def test_commands_of_the_readme(tmp_path):
    """In the order of the table: the later ones use what the first made."""
    for command, row in COMMANDS.items():
        if row is None:
            continue
        added, words = row
        line = f"{command} {added}".format(runs=tmp_path, cache=tmp_path / "cache")
        line = re.sub(r" runs/(llama_debug|hf)\b", rf" {tmp_path}/\1", line)
        done = subprocess.run(line, shell=True, cwd=ROOT, env=os.environ | HERE, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert words in done.stdout, f"{line}\n{done.stdout}"


def test_a_mistake_costs_a_sentence_and_exit_code_2(tmp_path):
    line = f"./run_train.sh --training.step=50 --parallelism.tensor_parallel=3 --optimizer.lr=-1 --run.folder={tmp_path}/none"
    done = subprocess.run(line, shell=True, cwd=ROOT, env=os.environ | HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and all(word in done.stderr for word in ("8 mistakes", "training.steps", "optimizer.lr", "n_heads"))
    assert not (tmp_path / "none").exists()
