"""Whole runs of train.py: what they write, how they stop, and that a resumed run is the run that
was not interrupted."""

import contextlib
import io
import json
import math
import resource
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import train
from configs.load import load_config
from tests import fork_server
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks
from tests.runs import (
    MESHES,
    STEPS,
    killed_at,
    run,
    samples,
    series,
    tiny_run,
)
from tools import generate


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the uninterrupted run, on one process: its folder and its options. Read it only; its
    corpus and its cache are next to the folder."""
    place = tmp_path_factory.mktemp("uninterrupted")
    options = tiny_run(place)
    folder = place / "oracle"
    folder.mkdir()
    assert run_ranks(1, run, options, folder) == [(0, "")]
    return folder, options


@pytest.fixture
def options(uninterrupted, tmp_path: Path) -> list[str]:
    """Return the same corpus, and a copy of the cache."""
    folder, made = uninterrupted
    shutil.copytree(folder.parent / "cache", tmp_path / "cache")
    kept = [option for option in made if not option.startswith("--data.cache=")]
    return [*kept, f"--data.cache={tmp_path / 'cache'}"]


@pytest.fixture
def oracle(uninterrupted, tmp_path: Path) -> Path:
    """Return a copy of the uninterrupted run."""
    return Path(shutil.copytree(uninterrupted[0], tmp_path / "oracle"))


def test_a_run_leaves_what_the_readme_says(uninterrupted):
    oracle, options = uninterrupted
    assert (oracle / "config.toml").exists() and (oracle / "tokenizer.json").exists()
    assert "step 16/16" in (oracle / "logs" / "rank-00000.log").read_text()
    assert [p.name for p in sorted((oracle / "checkpoints").glob("step-*"))] == [
        "step-00000010",
        "step-00000015",
        "step-00000016",
    ]
    again = load_config([str(oracle / "config.toml")])
    assert again == load_config([f"--run.folder={oracle}", *options])
    line = json.loads((oracle / "metrics.jsonl").read_text().splitlines()[-1])
    assert {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "tokens_seen",
        "data_wait",
        "memory_gib",
    } <= line.keys()
    assert line["tokens_seen"] == STEPS * 8 * 16
    losses = series(oracle)
    assert list(losses) == list(range(1, STEPS + 1))
    assert abs(losses[1] - math.log(263)) < 0.2 and losses[STEPS] < losses[1] - 1


def test_kill_9_and_resume_on_the_same_mesh_is_bitwise(oracle, options, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    killed_at(8, options, folder)
    assert 8 <= max(series(folder)) < STEPS
    assert run_ranks(1, run, options, folder) == [(0, "")]
    assert series(folder) == series(oracle)  # floats round-trip: equal is bitwise
    assert series(folder, "grad_norm") == series(oracle, "grad_norm")
    assert samples(folder, 1)[-6:] == samples(oracle, 1)[-6:]


def validated(options: list[str], folder: Path) -> tuple[int, bool]:
    """Do a run with validation; return whether every parameter is a shard afterwards."""
    jobs, real = [], train.build

    def build(cfg):
        jobs.append(real(cfg))
        return jobs[0]

    train.build = build
    code, _ = run(
        [
            *options,
            "--validation.interval=5",
            "--validation.steps=2",
            "--data.validation_fraction=0.2",
        ],
        folder,
    )
    return code, all(type(p.data).__name__ == "DTensor" for p in jobs[0].model.parameters())


@pytest.mark.slow
def test_validation_leaves_the_shards_in_place(options, tmp_path):
    """Validation gives the same number on every mesh, at steps 5, 10, 15 and the last."""
    seen = {}
    for name in "one", "fsdp2", "fsdp2xtp2":
        ranks, extra, _ = (1, [], 1) if name == "one" else MESHES[name]
        folder = tmp_path / name
        folder.mkdir()
        assert run_ranks(ranks, validated, [*options, *extra], folder) == [(0, ranks > 1)] * ranks
        seen[name] = series(folder, "validation_loss")
    assert list(seen["one"]) == [5, 10, 15, 16]
    for name in "fsdp2", "fsdp2xtp2":
        assert max(abs(seen[name][s] / seen["one"][s] - 1) for s in seen["one"]) <= 1e-5


@pytest.mark.slow
def test_sample_and_generated_text_are_the_same_on_every_mesh(options, tmp_path):
    texts, folder = {}, tmp_path
    for name in "one", "fsdp2xtp2":
        ranks, extra, _ = (1, [], 1) if name == "one" else MESHES[name]
        folder = tmp_path / name
        folder.mkdir()
        more = ["--debug.sample_tokens=12", "--debug.sample_prompt=document 3: 1"]
        assert run_ranks(ranks, run, [*options, *extra, *more], folder) == [(0, "")] * ranks
        log = (folder / "logs" / "rank-00000.log").read_text()
        assert "tensorboard --logdir" not in log  # it draws no curves
        texts[name] = log[log.index("a sample from") :].split("checkpoints in")[0]
    assert texts["one"] == texts["fsdp2xtp2"]
    assert "document 3: 1" in texts["one"]
    more = ["--tokens", "8", "--temperature", "0"]
    code, text, said = fork_server.call(generated, str(folder), "--prompt", "document 1", *more)
    assert code == 0 and text.startswith("document 1"), said
    code, _, said = fork_server.call(generated, str(tmp_path / "none"))
    assert code == 2 and "no checkpoint" in said and "Traceback" not in said


def generated(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code of tools.generate, its text, and what it says."""
    text, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(said):
        code = generate.main(list(arguments))
    return code, text.getvalue(), said.getvalue()


# --------------------------------------------------------------------------------------------------
# bad input


def refused(options: list[str], folder: Path, *words: str, ranks: int = 2) -> None:
    """Every rank ends with exit code 2 and a sentence that has these words, which the first rank
    says alone where all have the same; nothing hangs."""
    extra = MESHES["fsdp2"][1] if ranks == 2 else []
    ends = run_ranks(ranks, run, [*options, *extra], folder, timeout=30)
    assert ends[0][1]
    for code, error in ends:
        assert code == 2, error
        assert "Traceback" not in error
        assert not error or all(word in error for word in words), error


def test_a_missing_corpus_is_a_sentence(options, tmp_path):
    refused([*options, "--data.source=/no/such/corpus"], tmp_path, "data.source", "/no/such/corpus")


def test_a_tokenizer_that_disagrees_with_the_cached_tokens_is_a_sentence(oracle, options, tmp_path):
    (cached,) = (tmp_path / "cache").glob("*/tokenizer.json")
    saved = json.loads(cached.read_text())
    saved["ranks"][65], saved["ranks"][66] = saved["ranks"][66], saved["ranks"][65]
    cached.write_text(json.dumps(saved, indent=0))
    before = sorted(p.name for p in (oracle / "checkpoints").iterdir())
    refused([*options, "--training.steps=20"], oracle, "remove", ranks=1)
    assert sorted(p.name for p in (oracle / "checkpoints").iterdir()) == before


def test_a_checkpoint_of_another_run_is_a_sentence_and_stays(oracle, options):
    before = {
        p: p.stat().st_mtime_ns
        for p in (oracle / "checkpoints").rglob("*")
        if p.is_file() and "lease" not in p.name
    }
    refused([*options, "--run.seed=1", "--training.steps=20"], oracle, "run.seed")
    assert before == {
        p: p.stat().st_mtime_ns
        for p in (oracle / "checkpoints").rglob("*")
        if p.is_file() and "lease" not in p.name
    }


def with_room_for(size: int, options: list[str], folder: Path) -> tuple[int, str]:
    """Do a run whose files cannot grow beyond `size` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return run(options, folder)


def test_no_room_for_metrics_and_logs_does_not_end_a_run(oracle, options):
    """Metrics and logs cannot be written, and checkpoints can (whose own failures are in
    test_checkpoint.py)."""
    metrics = oracle / "metrics.jsonl"
    metrics.write_text(
        json.dumps({"step": 0, "padding": "x" * 2_000_000}) + "\n" + metrics.read_text()
    )
    log = oracle / "logs" / "rank-00000.log"
    log.write_text("x" * metrics.stat().st_size)
    size = metrics.stat().st_size + 10
    more = [*options, "--training.steps=18", "--metrics.tensorboard=true"]
    code, error = run_ranks(1, with_room_for, size, more, oracle)[0]
    assert code == 0 and error.count("\n") == 1, error
    assert error.startswith(f"{log} cannot be written (File too large): the run goes on")
    assert (oracle / "checkpoints" / "step-00000018").exists()
    assert metrics.read_text().endswith("\n") and max(series(oracle)) == 16


def test_metrics_are_logged_at_the_first_step_every_few_and_at_the_last(options, tmp_path):
    assert run_ranks(
        1, run, [*options, "--metrics.interval=3", "--training.steps=5"], tmp_path
    ) == [(0, "")]
    assert list(series(tmp_path)) == [1, 3, 5]


def test_the_last_step_has_the_lowest_learning_rate(options, tmp_path):
    more = ["--training.steps=5", "--lr_schedule.warmup_steps=2", "--lr_schedule.min_ratio=0.25"]
    assert run_ranks(1, run, [*options, *more, "--lr_schedule.kind=linear"], tmp_path) == [(0, "")]
    assert list(series(tmp_path, "lr").values()) == pytest.approx(
        [0.005, 0.01, 0.0075, 0.005, 0.0025]
    )


def test_damaged_tokens_end_a_run_in_a_sentence(options, tmp_path):
    """A token beyond the vocabulary is met when it is read. `data.prepare --verify`, which the
    sentence names, finds it beforehand."""
    assert run_ranks(1, run, options, tmp_path)[0][0] == 0
    (shard,) = (tmp_path / "cache").glob("*/train-*.bin")
    tokens = np.fromfile(shard, np.uint16)
    tokens[:] = 60_000
    tokens.tofile(shard)
    code, said = run_ranks(1, run, [*options, f"--run.folder={tmp_path}/a"], tmp_path)[0]
    assert (
        code == 1 and "step 1 cannot be read" in said and f"{shard.parent} has token 60000" in said
    )
    words = shlex.split(said.partition("(python -m ")[2].partition(" finds where)")[0])
    checked = finished(PYTHON, "-m", *words)
    assert checked.returncode == 2 and f"{shard} is not what was written" in checked.stderr
