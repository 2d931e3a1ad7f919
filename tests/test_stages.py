"""A run with stages is the run whose options are changed by hand, after any stop and on any mesh."""

import json
from pathlib import Path

import pytest

from configs import stages
from configs.load import dump, load_config
from configs.schema import InputError
from tests.ranks import run_ranks
from tests.runs import killed_at, printed, run, series, stopped_at, tiny_run

LONGER = "{begin=5, seq_len=24, lr=0.005}"
SMALLER = "{begin=11, global_batch_size=4, weights=[['b', 3.0]]}"
EXACT = ["--training.param_dtype=float64", "--lr_schedule.kind=constant"]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Return a tiny run over two sources, without stages."""
    place = tmp_path_factory.mktemp("stages")
    tiny = tiny_run(place)
    corpus = next(option for option in tiny if option.startswith("--data.source="))
    rest = [option for option in tiny if option != corpus]
    folder = corpus.partition("=")[2]
    rows = []
    for name, files in ("a", "[0-2]*.txt"), ("b", "3*.txt"):
        rows.append(f"{{name='{name}', source='{folder}/{files}', weight=1.0}}")
    return [*rest, *EXACT, f"--data.mixture=[{', '.join(rows)}]"]


def in_stages(*rows: str) -> str:
    return f"--training.stages=[{', '.join(rows)}]"


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory) -> Path:
    """Do the run with its three stages on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(1, run, [*options, in_stages(LONGER, SMALLER)], folder) == [(0, "")]
    return folder


@pytest.mark.slow
def test_stages_are_the_options_changed_by_hand(options, whole, tmp_path):
    """The same steps as three starts whose options are changed, each allowed to splice the data."""
    second = ["--training.seq_len=24", "--optimizer.lr=0.005", "--data.allow_splice=true"]
    mixture = next(option for option in options if option.startswith("--data.mixture"))
    at_11 = mixture.replace("weight=1.0}]", "weight=1.0, schedule=[[11, 3.0]]}]")
    third = ["--training.global_batch_size=4", at_11]
    rest = [option for option in options if option != mixture]
    for more in (
        [mixture, "--training.stop_after=5"],
        [at_11, *second, "--training.stop_after=11"],
        [*second, *third],
    ):
        assert run_ranks(1, run, [*rest, *more], tmp_path) == [(0, "")]
    assert series(tmp_path) == series(whole)
    assert series(tmp_path, "lr") == series(whole, "lr")
    samples = (tmp_path / "samples-0.jsonl").read_text().splitlines()
    assert samples == (whole / "samples-0.jsonl").read_text().splitlines()
    assert [len(json.loads(line)) for line in samples] == [8] * 11 + [4] * 5


def test_control_the_stages_change_the_run(options, whole, tmp_path):
    assert run_ranks(1, run, options, tmp_path) == [(0, "")]
    plain, staged = series(tmp_path), series(whole)
    assert [step for step in plain if plain[step] == staged[step]] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor_parallel", "pipeline_parallel", "data_parallel_shard"])
def test_a_killed_run_goes_on_in_its_stage_on_another_mesh(options, whole, mesh, tmp_path):
    """Killed in the first stage, stopped in the second, and ended on two ranks."""
    staged = [*options, in_stages(LONGER, SMALLER)]
    killed_at(3, staged, tmp_path)
    assert run_ranks(1, stopped_at, 8, staged, tmp_path) == [75]
    on_two = [*staged, f"--parallelism.{mesh}=2"]
    assert run_ranks(2, run, on_two, tmp_path) == [(0, ""), (0, "")]
    assert series(tmp_path) == pytest.approx(series(whole), rel=1e-12, abs=0)
    code, text = run_ranks(1, printed, staged, tmp_path)[0]
    assert code == 0 and "nothing to do" in text


def test_a_stop_in_the_last_step_of_a_stage_is_heard(options, whole, tmp_path):
    """By one of two ranks: no rank goes on, and the same command does."""
    staged = [*options, in_stages(LONGER, SMALLER)]
    assert run_ranks(2, stopped_at, 5, staged, tmp_path, 1) == [75, 75]
    assert max(series(tmp_path)) == 5
    assert run_ranks(2, run, staged, tmp_path) == [(0, "")] * 2
    assert series(tmp_path) == pytest.approx(series(whole), rel=1e-12, abs=0)


@pytest.mark.slow
def test_an_older_checkpoint_opens_its_own_stage(options, whole, tmp_path):
    """The newest, of stage 2, is damaged: the run goes on in stage 1. load_step goes back as far."""
    keeping = ["--checkpoint.interval=3", "--checkpoint.keep_last=0"]
    staged = [*options, in_stages(LONGER, SMALLER), *keeping]
    assert run_ranks(1, stopped_at, 7, staged, tmp_path) == [75]
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-00000005", "step-00000006", "step-00000007"):
        for file in (checkpoints / name).glob("rank-*"):
            file.write_bytes(file.read_bytes()[:-1])
    [(code, text)] = run_ranks(1, printed, staged, tmp_path)
    assert code == 0, text
    assert "the checkpoint of step 3 is in stage 1 of the run" in text
    assert series(tmp_path) == series(whole)
    back = [*staged, "--checkpoint.load_step=9"]
    assert run_ranks(1, run, back, tmp_path) == [(0, "")]
    assert series(tmp_path) == series(whole)


def test_what_is_done_at_the_end_is_done_once(options, tmp_path):
    """The export and the sample come after the last stage; what cannot be exported is refused before
    the first."""
    staged = [*options, in_stages(LONGER), "--training.steps=6", "--debug.sample_tokens=3"]
    exporting = [*staged, "--checkpoint.export_hf=float32", "--training.param_dtype=float32"]
    [(code, text)] = run_ranks(1, printed, exporting, tmp_path)
    assert code == 0, text
    assert text.count("a sample from the final weights") == 1
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-00000006"]
    starts = sorted((tmp_path / "starts").iterdir())
    ended = [json.loads((start / "end.json").read_text()) for start in starts]
    assert [(end["exit_code"], end["step"]) for end in ended] == [(0, 5), (0, 6)]


def learning_rates(*arguments: str) -> list[float]:
    from training.optim import learning_rate

    cfg = load_config([*arguments])
    return [learning_rate(step, stages.at(cfg, step)) for step in range(cfg.training.steps)]


def test_a_stage_has_the_schedule_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text("[run]\n")
    base = ["x.toml", "--training.steps=10", "--optimizer.lr=1.0", "--lr_schedule.min_ratio=0.0"]
    linear = [*base, "--lr_schedule.kind=linear"]
    plain = learning_rates(*linear)
    assert plain == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    peak = learning_rates(*linear, in_stages("{begin=4, lr=2.0}"))
    assert peak == pytest.approx([*plain[:4], *(2 * rate for rate in plain[4:])])
    rows = (
        "{begin=2, lr_schedule='linear', lr_warmup_steps=1, lr_min_ratio=0.5}",
        "{begin=5, global_batch_size=16}",
        "{begin=6, lr_schedule='constant', lr=3.0}",
    )
    cycles = learning_rates(*base, "--lr_schedule.kind=constant", in_stages(*rows))
    assert cycles == pytest.approx([1, 1, 1, 1 - 1 / 6, 1 - 2 / 6, 0.5, 3, 3, 3, 3])


def test_what_a_row_leaves_out_stays(tmp_path, monkeypatch):
    """Rows add up; the file of a run has all of them, whichever stage writes it."""
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text("[run]\n")
    rows = in_stages("{begin=4, seq_len=64}", "{begin=6, global_batch_size=2}")
    cfg = load_config(["x.toml", "--training.steps=9", rows])
    sizes = []
    for step in (0, 3, 4, 5, 6, 9, 99):
        stage = stages.at(cfg, step)
        assert dump(stage) == dump(cfg)
        sizes.append((stage.training.seq_len, stage.training.global_batch_size))
    assert sizes == [(256, 8)] * 2 + [(64, 8)] * 2 + [(64, 2)] * 3
    Path("again.toml").write_text(dump(cfg))
    assert dump(load_config(["again.toml"])) == dump(cfg)
    early = load_config(["x.toml", "--training.steps=9", "--training.stop_after=5", rows])
    assert stages.steps_of(early) == [range(4), range(4, 5)]


def test_a_stage_that_breaks_a_rule_is_refused_before_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text("[run]\n")
    too_long = in_stages("{begin=4, seq_len=100000}", "{begin=5, global_batch_size=3}")
    with pytest.raises(
        InputError, match=r"in stage 2 \(from step 4 on\).*training.seq_len"
    ) as error:
        load_config(["x.toml", too_long], 2, 2)
    assert "in stage 3 (from step 5 on)" in str(error.value)
    with pytest.raises(InputError, match=r"in stage 2 \(from step 4 on\).*training.seq_len"):
        load_config(["x.toml", "--training.stop_after=3", too_long], 2, 2)
    twice = in_stages("{begin=4, lr=1.0}", "{begin=4, seq_len=64}")
    with pytest.raises(InputError, match="ascending order of begin, each step once"):
        load_config(["x.toml", twice])
