"""A resumed run prints what it does differently than before; a branch continues in its own folder;
and exit code 2 means that nothing was started."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint import changes, ended, verify
from configs.load import dump, load_config
from configs.schema import Config, InputError
from tests.programs import PYTHON, finished
from tests.ranks import run_ranks
from tests.runs import printed, run, series, signal_at, tiny_run
from tools.replay import __main__ as tool

WSD = ["--lr_schedule.kind=wsd", "--lr_schedule.decay_fraction=0.25"]


def said(folder: Path) -> str:
    return (folder / "logs" / "rank-00000.log").read_text()


def replayed(folder: Path, steps: str) -> tuple[int, str]:
    """Return the exit code of tools.replay, and what it prints."""

    def compute(ranks: int, seconds: float, work: Callable, *args: Any) -> list:
        return run_ranks(ranks, work, *args)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = tool.replay([str(folder), f"--steps={steps}"], compute=compute)
    return code, printed.getvalue()


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> tuple[list[str], Path]:
    """Train 12 steps, with saves at 5, 10 and 12; return the run and its options."""
    place = tmp_path_factory.mktemp("parent")
    options = [*tiny_run(place), *WSD, "--training.steps=12"]
    folder = place / "run"
    folder.mkdir()
    assert run_ranks(1, run, options, folder) == [(0, "")]
    return options, folder


def test_a_branch_is_bitwise_the_parents_next_steps(parent, tmp_path):
    """Compare a branch with its parent, and check that its origin is recorded, in starts/ and in
    the manifest."""
    options, folder = parent
    branch = [*options, f"--checkpoint.branch_from={folder}@5"]
    assert run_ranks(1, run, branch, tmp_path) == [(0, "")]
    want = {step: loss for step, loss in series(folder).items() if step > 5}
    assert series(tmp_path) == want
    origin = str(folder / "checkpoints" / "step-00000005")
    assert json.loads((tmp_path / "starts" / "0001" / "start.json").read_text())["origin"] == origin
    manifest = verify.read_manifest(tmp_path / "checkpoints" / "step-00000010")
    assert manifest["parent"] == origin and manifest["ancestors"] == []
    assert f"a branch of {origin}" in said(tmp_path) and "changed since" not in said(tmp_path)
    # started again it goes on with its own checkpoints
    again = run_ranks(1, printed, branch, tmp_path)
    assert again[0][0] == 0 and again[0][1].startswith("nothing to do")
    assert "branch_from is not used" not in again[0][1]
    other = [*options, f"--checkpoint.branch_from={folder}@10"]  # and says so of another parent
    assert run_ranks(1, run, other, tmp_path) == [(0, "")]
    unused = f"checkpoint.branch_from is not used: {tmp_path / 'checkpoints'} has checkpoints of"
    assert f"{unused} its own, and goes on from step 12" in said(tmp_path)
    # its first steps are replayed from its parent's checkpoint, and those before are none of its own
    code, text = replayed(tmp_path, "6:7")
    assert code == 0 and "from the state after step 5" in text and "equal to " in text, text
    with pytest.raises(InputError, match="began with the weights of another: name later steps"):
        replayed(tmp_path, "5:6")
    record = tmp_path / "starts" / "0001" / "start.json"
    record.write_text("{}")  # the parent is unknown: refused, never begun from initial values
    with pytest.raises(InputError, match="began with the weights of another: name later steps"):
        replayed(tmp_path, "6:7")


def test_a_branch_has_its_own_schedule_and_says_so(parent, tmp_path):
    options, folder = parent
    decay = ["--training.steps=8", "--optimizer.lr=0.02", f"--checkpoint.branch_from={folder}@5"]
    assert run_ranks(1, run, [*options, *decay], tmp_path) == [(0, "")]
    rates, before = series(tmp_path, "lr"), series(folder, "lr")
    assert list(rates) == [6, 7, 8] and rates[8] < rates[6] == pytest.approx(0.02)
    (line,) = [line for line in said(tmp_path).splitlines() if "changed since" in line]
    assert f"learning rate of step 6 {before[6]:.3g} -> {rates[6]:.3g}" in line
    assert "optimizer.lr 0.01 -> 0.02" in line and "training.steps 12 -> 8" in line
    assert "data." not in line and "run." not in line


@pytest.mark.parametrize(
    ("given", "words"),
    [("{}@7", "holds only steps [5, 10, 12]"), ("{}-no@5", '-no@5": there is no checkpoint in')],
)
def test_a_branch_of_nothing_is_a_sentence(given, words, parent, tmp_path):
    options, folder = parent
    more = [f"--checkpoint.branch_from={given.format(folder)}"]
    code, said = run_ranks(1, run, [*options, *more], tmp_path)[0]
    assert code == 2 and words in said


@pytest.mark.slow
def test_another_model_or_tokenizer_is_named_by_its_option(parent, tmp_path):
    options, folder = parent
    for option, words in (
        ("--model.family=qwen3", 'model.family is "llama" in the checkpoint and "qwen3" here.'),
        ("--model.n_layers=3", "model.n_layers is 2 in the checkpoint and 3 here."),
    ):
        more = [option, f"--checkpoint.branch_from={folder}"]
        code, said = run_ranks(1, run, [*options, *more], tmp_path)[0]
        assert code == 2 and words in said
    facts = [{"config": f'[data]\ntokenizer = "{name}"\n'} for name in ("bytes", "a.json")]
    for i, facts_of in enumerate(facts):
        facts_of["must_match"] = {"tokenizer": f"90b3{i}", "model": {}}
    assert changes.refused(*facts) == [
        'data.tokenizer is "bytes" in the checkpoint and "a.json" here'
    ]
    facts[1]["config"] = facts[0]["config"]
    (line,) = changes.refused(*facts)
    assert "bytes" in line and "has other tokens now" in line and "90b3" not in line
    assert changes.refused(facts[0], facts[0]) == []


def test_what_changed_is_one_line(parent):
    options, folder = parent
    manifest = verify.read_manifest(folder / "checkpoints" / "step-00000005")

    def line(*more: str, mesh: dict = manifest["mesh"]) -> str:
        cfg = load_config([f"--run.folder={folder}", *options, *more])
        return changes.line(manifest, {"config": dump(cfg)}, mesh)

    assert line() == ""
    assert line("--metrics.interval=3", "--data.workers=1", "--run.folder=x") == ""
    assert line("--lr_schedule.kind=cosine").count("\n") == 0
    assert "learning rate of step 6 " in line("--lr_schedule.kind=cosine")
    assert "optimizer.weight_decay 0.1 -> 0.3" in line("--optimizer.weight_decay=0.3")
    assert "mesh tp 1 -> 2" in line(mesh={**manifest["mesh"], "tp": 2})
    assert "learning rate" not in line("--training.steps=5", "--lr_schedule.kind=constant")
    ended = {**manifest, "step": 12}  # its schedule has no next step: the last one is compared
    longer = {"config": dump(load_config([*options, "--training.steps=24"]))}
    assert "learning rate of step 12 " in changes.line(ended, longer, manifest["mesh"])
    old = {**manifest, "facts": {"config": '[optimizer]\nlr = "strange"\n[gone]\nx = 1\n'}}
    assert "optimizer.lr" in changes.line(old, {"config": dump(load_config([]))}, manifest["mesh"])
    assert changes.options({}) == changes.options({"config": 3}) == {}


def test_a_run_ends_early_on_its_schedule_and_goes_on(parent, tmp_path):
    """training.stop_after: code 0, a checkpoint, and what follows is bitwise the run that never
    stopped. Negative control: fewer training.steps bend the schedule."""
    options, folder = parent
    assert run_ranks(1, run, [*options, "--training.stop_after=7"], tmp_path) == [(0, "")]
    assert list(series(tmp_path)) == list(range(1, 8))
    assert (tmp_path / "checkpoints" / "step-00000007").is_dir()
    again = run_ranks(1, printed, [*options, "--training.stop_after=7"], tmp_path)
    assert again[0][0] == 0
    assert again[0][1].endswith("raise or leave out training.stop_after to go on\n")
    assert run_ranks(1, run, options, tmp_path) == [(0, "")]
    assert series(tmp_path) == series(folder)
    bent = tmp_path / "bent"
    bent.mkdir()
    assert run_ranks(1, run, [*options, "--training.steps=7"], bent) == [(0, "")]
    assert series(bent)[7] != series(folder)[7]


def test_fewer_steps_than_are_done_is_nothing_to_do(parent):
    options, folder = parent
    before = series(folder)
    [first] = run_ranks(1, printed, [*options, "--training.steps=9"], folder)
    assert series(folder) == before
    state = "has trained 12 steps, and training.steps asks for 9; raise training.steps to go on"
    assert first == (0, f"nothing to do: {folder} {state}\n")


def test_an_option_that_a_done_run_left_out_is_no_nothing_to_do(tmp_path, monkeypatch):
    """Such as a number of layers: loading says what differs. Negative control: without it."""
    cfg = Config()
    monkeypatch.setattr(verify, "read_manifest", lambda path: {"facts": {"config": dump(cfg)}})
    assert ended._is_of_this_run(tmp_path, cfg)
    for table in ended.TABLES:
        options = getattr(cfg, table)
        for name, field in type(options).model_fields.items():
            if field.default is None and f"{table}.{name}" not in ended.FREE:
                value = True if "bool" in str(field.annotation) else 2
                other = cfg.model_copy(update={table: options.model_copy(update={name: value})})
                assert not ended._is_of_this_run(tmp_path, other), name


def _last_save_fails(options: list[str], folder: Path, stopped: bool) -> tuple[int, str]:
    """The disk fills up after the first step. stopped: so is the run, by a signal in its second."""
    from checkpoint import storage

    def full(*_: object) -> list:
        raise OSError(28, "No space left on device")

    storage.write = full
    if stopped:
        signal_at(2)
    return run(options, folder)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_no_room_for_the_last_checkpoint_is_1(stopped, parent, tmp_path):
    """A launcher starts nothing again after 2, which means that nothing was started; a second try
    finds the room that was made meanwhile. Training does not go on, and no sentence says so."""
    options, _ = parent
    few = [*options, "--training.steps=4", "--checkpoint.interval=3"]
    few += ["--checkpoint.async_save=false"] * stopped
    [(code, words)] = run_ranks(1, _last_save_fails, few, tmp_path, stopped)
    assert code == 1 and "No space left" in words and "Traceback" not in words
    assert words.endswith(
        "the run has ended without it: mend that, and the same command begins anew\n"
    )
    failed = [line for line in said(tmp_path).splitlines() if "could not be written" in line]
    assert len(failed) == (not stopped) and all("Training goes on" in line for line in failed)
    ended = json.loads((tmp_path / "starts" / "0001" / "end.json").read_text())
    assert (ended["exit_code"], ended["step"]) == (1, 2 if stopped else 4)
    assert run_ranks(1, run, few, tmp_path) == [(0, "")]


@pytest.mark.slow
def test_an_option_is_typed_once():
    words = [
        "--optimizer.lr=1e-3",
        "--training.steps",
        "5",
        "--optimizer.lr=2e-3",
        "--training.steps=5",
    ]
    for program in "configs.load", "tools.check":
        done = finished(PYTHON, "-m", program, *words)
        assert done.returncode == 2
        assert "--optimizer.lr is given 2 times: 0.001 and 0.002; keep one" in done.stderr
        assert "--training.steps is given 2 times; keep one" in done.stderr
    assert load_config(words).optimizer.lr == 2e-3  # programs put options over others
