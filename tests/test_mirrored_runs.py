"""A run whose folder is a URL: it goes on, with its metrics, on a machine that has nothing of it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from configs.load import dump, load_config
from configs.schema import InputError
from reliability import objects
from tests.programs import ROOT, environment
from tests.ranks import WORKERS, run_ranks, wait_until
from tests.runs import as_typed, logged, run, series, tiny_run
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)
from tools import goodput, mirror, places

URL = "s3://bucket/debug"
NAME = "debug-60c6b659"  # of its folder in data.cache: the hash is the URL's
LONG = ["--training.steps=120", "--checkpoint.interval=40", f"--run.folder={URL}"]
AFTER_STEP = 20  # the first machine is asked to stop


@pytest.fixture
def store(running_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    places._copied.cache_clear()
    return emptied(running_store, monkeypatch, ((objects, "PAUSE", 0.05), (objects, "TRIES", 1)))


def start(options: list[str], ranks: int) -> subprocess.Popen:
    command = [str(ROOT / "run_train.sh"), *as_typed(options)]
    return subprocess.Popen(
        command, env=environment(NGPU=str(ranks)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process: subprocess.Popen) -> tuple[int, str]:
    said, _ = process.communicate(timeout=90 * WORKERS)
    return process.returncode, said.decode()


def alone(options: list[str], folder: Path, asked: str = "") -> tuple[int, str]:
    """Run a rank without tools.mirror around it, which yet believes that it has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(objects.MIRRORED, URL)
        patch.setenv(objects.ASKED, asked)
        return run(options, folder)


@pytest.mark.slow
@pytest.mark.waits
def test_a_run_goes_on_on_an_empty_machine_with_all_its_metrics(store, tmp_path):
    """On another mesh. It is stopped by SIGTERM, so that the last lines of the first machine are
    sent. Negative control: a machine that does not fetch has metrics with a hole."""
    options = [*tiny_run(tmp_path), *LONG]
    first, second = (tmp_path / machine / "runs" / NAME for machine in ("first", "second"))
    assert run_ranks(1, run, options[:-1], tmp_path / "disk") == [(0, "")]
    unbroken = series(tmp_path / "disk")

    running = start([*options, f"--data.cache={tmp_path / 'first'}"], 1)
    wait_until(lambda: logged(first, AFTER_STEP), over=lambda: running.poll() is not None)
    running.send_signal(signal.SIGTERM)
    code, said = ended(running)
    assert code == 75 and f"{first} is copied to {URL}" in said, said
    reached = max(series(first))
    assert AFTER_STEP <= reached < 120 and not (first / "checkpoints").exists()

    assert goodput.main([URL]) == 0  # tools read the copy

    code, said = ended(start([*options, f"--data.cache={tmp_path / 'second'}"], 2))
    assert code == 0 and f"resumed after step {reached} of 120" in said, said
    losses = series(second)
    assert losses.keys() == unbroken.keys()
    assert {n: losses[n] for n in range(1, reached + 1)}.items() <= unbroken.items(), "bitwise"
    apart = {n: abs(losses[n] / unbroken[n] - 1) for n in losses}
    assert max(apart[n] for n in range(1, reached + 5)) < 1e-5 and max(apart.values()) < 1e-2
    names = {key.removeprefix("debug/") for key in store.keys()}
    assert {"metrics.jsonl", "logs/rank-00001.log", "starts/0002/end.json"} <= names
    assert "checkpoints/step-00000120/manifest.json" in names
    assert store.object("debug/metrics.jsonl") == (second / "metrics.jsonl").read_bytes()

    both = [f"--run.mirror={URL}", f"--checkpoint.store={URL}/checkpoints"]
    longer = [*options[:-1], *both, "--training.steps=122"]
    assert run_ranks(1, alone, longer, tmp_path / "third") == [(0, "")]
    assert set(series(tmp_path / "third")) == {121, 122}


def test_a_published_checkpoint_asks_for_the_copy_of_its_metrics(store, tmp_path):
    """Each one does, and one that failed does not. That it cannot ask fails no checkpoint."""
    asked, lost = tmp_path / "asked", tmp_path / "no folder" / "asked"
    store.rules({"kind": "denied", "methods": ["PUT"], "key": "one/step-00000005/manifest"})
    options = [*tiny_run(tmp_path), "--training.steps=6"]
    for name, file in ("one", asked), ("two", lost):
        folder = tmp_path / name
        folder.mkdir()
        of_store = f"--checkpoint.store=s3://bucket/{name}"
        assert run_ranks(1, alone, [*options, of_store], folder, str(file)) == [(0, "")]
    manifests = [key for key in store.keys() if key.endswith("manifest.json")]
    steps = ["one/step-00000006", "two/step-00000005", "two/step-00000006"]
    assert manifests == [f"{step}/manifest.json" for step in steps]
    assert asked.read_bytes() == b"." and not lost.exists()  # at step 6


def test_a_url_becomes_a_folder_a_mirror_and_a_store(tmp_path):
    cache = f"--data.cache={tmp_path}"
    cfg = load_config([f"--run.folder={URL}/", cache])
    assert cfg.run.folder == f"{tmp_path}/runs/{NAME}" and cfg.run.mirror == URL
    assert cfg.checkpoint.store == f"{URL}/checkpoints"
    again = tmp_path / "config.toml"
    again.write_text(dump(cfg))
    assert load_config([str(again)]) == cfg
    given = [f"--run.folder={URL}", "--run.mirror=gs://b/m", "--checkpoint.store=az://c/x", cache]
    cfg = load_config(given)
    assert (cfg.run.mirror, cfg.checkpoint.store) == ("gs://b/m", "az://c/x")
    other = load_config([f"--run.folder={URL}2", cache])
    assert Path(other.run.folder).name != NAME
    cfg = load_config(["--run.folder=file:///data/run"])
    assert (cfg.run.folder, cfg.run.mirror, cfg.checkpoint.store) == ("/data/run", "", "")


@pytest.mark.parametrize("url", ["http://host/x", "s3://bucket/x?y"])
def test_what_is_no_place_in_a_store_is_a_sentence(url):
    for option in ("folder", "mirror"):
        with pytest.raises(InputError, match=f"run.{option} = .*must be a URL such as s3://"):
            load_config([f"--run.{option}={url}"])


def test_a_url_with_one_slash_is_no_folder():
    with pytest.raises(InputError, match="must have two slashes after the colon"):
        load_config(["--run.folder=s3:/bucket/x"])


@pytest.mark.slow
def test_a_run_that_nothing_copies_is_refused(tmp_path, monkeypatch):
    """train.py by itself, or below the mirror of another run: a sentence, and nothing is written."""
    monkeypatch.delenv(objects.MIRRORED, raising=False)
    for url in ("", "s3://bucket/other"):
        monkeypatch.setenv(objects.MIRRORED, url)
        with pytest.raises(InputError, match="nothing copies the run's folder there: start"):
            objects.check_mirrored(URL)
    monkeypatch.setenv(objects.MIRRORED, URL)
    objects.check_mirrored(URL)
    options = [f"--run.folder={URL}", f"--data.cache={tmp_path}", "--data.tokenizer=bytes"]
    command = [sys.executable, "train.py", *options]
    environ = environment()
    environ.pop(objects.MIRRORED)
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 2 and "start the run with ./run_train.sh" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_store_that_does_not_answer_is_a_sentence_before_anything_starts(
    store, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(objects, "RETRIES", 0)
    objects._open.cache_clear()
    started = tmp_path / "started"
    assert mirror.main([URL, str(tmp_path / "run"), "touch", str(started)]) == 2
    assert "s3://bucket" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        goodput.main([URL])


def test_tools_say_that_a_url_has_no_run(store, capsys):
    with pytest.raises(SystemExit, match="2"):
        goodput.main(["s3://bucket/nothing"])
    assert "s3://bucket/nothing has no files of a run" in capsys.readouterr().err
