"""Whole runs of train.py on a mixture: the same numbers on every mesh, nothing held out is trained
on, what changes on resume is refused or recorded, and a data worker that fails ends the run on
every rank."""

import contextlib
import io
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import train
from configs.load import load_config
from data import audit
from data.documents import DocumentIndex
from data.loader import Batches
from data.open import open_corpora
from tests.ranks import run_ranks
from tests.runs import MESHES, TINY, data_rank, lines_of, run, series


def text(i: int, kind: str) -> str:
    return f"{kind} {i}: " + " ".join(str(n * (i + 7) % 97) for n in range(60)) + "\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return two sources that share 25 texts, and a third set to validate on."""
    place = tmp_path_factory.mktemp("mixture")
    for kind, count in ("web", 40), ("code", 30), ("further", 3):
        folder = place / kind
        folder.mkdir()
        for i in range(count):
            (folder / f"{i:02d}.txt").write_text(text(i, kind))
        for i in range(25 if kind != "further" else 0):
            (folder / f"shared-{i}.txt").write_text(text(i, "shared"))
    return place


@pytest.fixture
def options(place) -> list[str]:
    rows = ", ".join(
        f'{{name = "{name}", source = "{place / name}", weight = {weight}, schedule = {schedule}}}'
        for name, weight, schedule in (("web", 0.75, "[[7, 0.5]]"), ("code", 0.25, "[]"))
    )
    sets = f'[{{name = "further", source = "{place / "further"}"}}]'
    return [
        *TINY,
        f"--data.mixture=[{rows}]",
        f"--validation.sets={sets}",
        f"--data.cache={place / 'cache'}",
        "--data.validation_fraction=0.2",
        "--validation.interval=5",
        "--validation.steps=2",
        "--training.steps=10",
    ]


@pytest.mark.slow
def test_a_mixture_is_the_same_run_on_every_mesh(options, tmp_path):
    seen = {}
    for name in "one", "tp2":
        ranks, extra, _ = MESHES[name]
        folder = tmp_path / name
        folder.mkdir()
        assert run_ranks(ranks, run, [*options, *extra], folder) == [(0, "")] * ranks
        seen[name] = lines_of(folder)
    steps = [line for line in seen["one"] if "loss" in line]
    order = audit.open_run(str(tmp_path / "one")).order
    assert [segment.step for segment in order.segments] == [0, 7]
    for line in steps:
        tokens = [line[f"tokens_seen/{name}"] for name in ("web", "code")]
        assert (
            tokens == [count * 16 for count in order.consumed(line["step"])]
            and sum(tokens) == line["tokens_seen"]
        )
        assert line["epochs/web"] == tokens[0] / 16 / order.last.sources[0].windows
    # metrics.interval = 1: a line's losses are those of one step
    for before, line in zip(steps, steps[1:]):
        parts = [
            (line.get(f"loss/{n}", 0.0), line[f"tokens_seen/{n}"] - before[f"tokens_seen/{n}"])
            for n in ("web", "code")
        ]
        assert math.isclose(
            sum(loss * count for loss, count in parts) / (8 * 16), line["loss"], rel_tol=1e-5
        )
    validations = [line for line in seen["one"] if "validation_loss" in line]
    assert [line["step"] for line in validations] == [5, 10]
    for line in validations:
        losses = [line[f"validation/{name}/loss"] for name in ("web", "code", "further")]
        assert math.isclose(line["validation_loss"], np.mean(losses), rel_tol=1e-6)
        assert math.isclose(
            line["validation_perplexity"], math.exp(line["validation_loss"]), rel_tol=1e-6
        )
        # tokens are bytes, but a document's end is no byte
        bits = line["validation_loss"] / math.log(2)
        assert bits < line["validation_bits_per_byte"] < bits * 1.02
    for line, want in zip(seen["tp2"], seen["one"], strict=True):
        exact = {key for key in want if key.startswith(("tokens_seen", "epochs"))}
        close = {key for key in want if "loss" in key or "bits" in key or "perplexity" in key}
        assert exact <= line.keys() and close <= line.keys()
        assert all(line[key] == want[key] for key in exact)
        apart = {key for key in close if not math.isclose(line[key], want[key], rel_tol=1e-5)}
        assert not apart, (line, want)


def test_no_held_out_text_is_in_a_training_window_of_any_source(options, tmp_path):
    """Held out is by the hash of the text: of the 25 texts in both sources, each is on the same
    side in both."""
    cfg = load_config([f"--run.folder={tmp_path}", *options])
    corpora = open_corpora(cfg, log=lambda _: None)
    sources, sets = corpora.sources, corpora.sets
    assert list(sources) == ["web", "code"] and list(sets) == ["web", "code", "further"]

    def texts(tokens) -> set[bytes]:
        documents = DocumentIndex(tokens)
        extents = (documents.extent(i) for i in range(len(documents)))
        return {tokens.read(start, stop - 1).astype(np.uint8).tobytes() for start, stop in extents}

    held_out = texts(sets["web"]) | texts(sets["code"])
    shared = {text(i, "shared").encode() for i in range(25)}
    assert held_out & shared and texts(sets["web"]) & shared == texts(sets["code"]) & shared
    assert not held_out & (texts(sources["web"].train) | texts(sources["code"].train))
    batches = corpora.training_batches(corpora.order({}), data_rank(), 263)
    for step in range(200):
        for window in batches[step]["tokens"].flatten(0, 1):
            piece = bytes(i if i < 256 else 0 for i in window.tolist()).split(b"\0")[0][:12]
            assert not any(whole.startswith(piece) for whole in held_out) or len(piece) < 12


def test_every_seed_is_validated_on_the_same_sequences_in_the_same_order(options):
    """Or the losses of two seeds would differ by the choice of text."""
    alone = data_rank()
    seen, trained = [], []
    for seed in 0, 1:
        corpora = open_corpora(load_config([*options, f"--run.seed={seed}"]), log=lambda _: None)
        sets = corpora.held_out(alone, 263)
        assert list(sets) == ["web", "code", "further"]
        seen.append(
            {name: [rows[i]["tokens"].tolist() for i in range(2)] for name, rows in sets.items()}
        )
        trained.append(
            corpora.training_batches(corpora.order({}), alone, 263)[0]["tokens"].tolist()
        )
    assert seen[0] == seen[1]
    assert trained[0] != trained[1], "the control: the order of the training data follows the seed"


def test_a_source_read_too_often_is_refused_before_the_run(options, tmp_path):
    limited = [
        option.replace("weight = 0.25,", "weight = 0.25, max_epochs = 0.01,") for option in options
    ]
    ((code, error),) = run_ranks(1, run, limited, tmp_path)
    assert (
        code == 2
        and "source code of data.mixture would be read" in error
        and "max_epochs = 0.01" in error
    )


def test_a_bpe_of_several_new_sources_is_refused(options, tmp_path):
    more = ["--data.tokenizer=bpe", "--data.bpe_vocab_size=260"]
    ((code, error),) = run_ranks(1, run, [*options, *more], tmp_path)
    assert code == 2 and "data.train_tokenizer" in error


# --------------------------------------------------------------------------------------------------
# W1: the workers


def with_failing_worker(how: str, options: list[str], folder: Path) -> tuple[object, str, float]:
    """Do a run of which rank 1's worker fails at step 6; return (exit code or error, what was
    printed, seconds since then)."""
    real, failed = Batches.__getitem__, folder / "failed"

    def failing(self, step):
        if step == 5 and self.share.first:
            # a worker reads ahead, and its death ends the run at once: first the save of step 3
            for _ in range(200):
                if (folder / "checkpoints" / "step-00000003").is_dir():
                    break
                time.sleep(0.1)
            failed.write_text("")
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return real(self, step)

    Batches.__getitem__ = failing
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = train.main([f"--run.folder={folder}", *options])
        except Exception as error:
            code = type(error).__name__
    return code, errors.getvalue(), time.time() - failed.stat().st_mtime


WORDS = {
    "killed": "died (SIGKILL), while it read step 6 (of sources",
    "stopped": "sent nothing for 5 s (data.timeout_seconds), while it read step 6 (of sources",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WORDS)
@pytest.mark.cap(60)
def test_a_worker_that_fails_ends_the_run_on_all_ranks(options, tmp_path, how):
    """The rank says which worker, step and sources in one line and ends with 1; the other does not
    wait for it."""
    more = [
        "--data.workers=2",
        "--data.timeout_seconds=5",
        "--checkpoint.interval=3",
        "--checkpoint.async_save=false",
        *MESHES["fsdp2"][1],
    ]  # a save in the background may outlast two quick steps
    (other, _, first), (code, error, second) = run_ranks(
        2, with_failing_worker, how, [*options, *more], tmp_path, timeout=45
    )
    assert (
        code == 1
        and error.startswith("rank 1: data worker ")
        and WORDS[how] in error
        and error.count("\n") == 1
    ), error
    assert other in (1, "RuntimeError", "DistBackendError")
    # measured: under a second after a kill, timeout_seconds and one after a stop
    assert max(first, second) < 20
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()
    if how == "killed":
        assert run_ranks(2, run, [*options, *more], tmp_path) == [(0, "")] * 2
        assert list(series(tmp_path)) == list(range(1, 11))
