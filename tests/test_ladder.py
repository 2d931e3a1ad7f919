"""Ladders: the law, their rungs, forecasts, and runs that are judged by them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.load import load_config
from configs.schema import Config, InputError
from tools.ladder import __main__ as command
from tools.ladder import budget, forecast, law, page, rungs, runs
from tools.plan import command as plan
from training import forecast as registered

SIZES = np.repeat(np.geomspace(1e5, 2e6, 5), 3)
TOKENS = SIZES * np.tile([5.0, 10.0, 20.0], 5)


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(law, "DRAWS", 40)


def published(n, d):
    """The law of Hoffmann et al., arXiv:2203.15556, section D.3."""
    return 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28


def test_the_law_that_made_the_losses_is_found():
    found = law.fit(SIZES, TOKENS, published(SIZES, TOKENS))
    loss, low, high = found.predict(5e6, 1e8)
    assert loss == pytest.approx(published(5e6, 1e8), rel=1e-4) and low <= loss <= high
    assert (found.law.a, found.law.b) == pytest.approx((0.34, 0.28), abs=0.01)
    entropy, size, a, data, b = map(float, re.findall(r"[\d.]+(?:e[+-]\d+)?", found.law.words()))
    assert entropy + size / 1e6**a + data / 1e7**b == pytest.approx(published(1e6, 1e7), rel=2e-3)


@pytest.mark.slow
def test_the_band_holds_the_truth_under_noise_and_one_outlier_moves_little():
    truth = published(5e6, 1e8)
    inside = 0
    for seed in range(4):
        noise = np.random.default_rng(seed).normal(0, 3e-3, len(SIZES))
        losses = published(SIZES, TOKENS) * (1 + noise)
        found = law.fit(SIZES, TOKENS, losses)
        loss, low, high = found.predict(5e6, 1e8)
        inside += low <= truth <= high
        assert loss == pytest.approx(truth, rel=0.015)
    assert inside >= 3
    losses = published(SIZES, TOKENS)
    losses[4] *= 1.05  # a run that diverged for a while
    assert law.fit(SIZES, TOKENS, losses).predict(5e6, 1e8)[0] == pytest.approx(truth, rel=5e-3)


def test_no_term_is_below_zero():
    """Losses that fall faster than by the law would make an entropy below zero. Without the limit
    this is what a short ladder gives."""
    losses = 9 - 0.4 * np.log(SIZES) - 0.1 * np.log(TOKENS)
    found = law.fit(SIZES, TOKENS, losses)
    for one in (found.law, *found.draws):
        assert min(one.entropy, one.size, one.data) >= 0
    assert found.law.entropy == 0


@pytest.mark.parametrize(
    "sizes, ratios, words",
    [
        ([1e5, 1e6], [1, 5, 20], "2 sizes"),
        ([1e5, 3e5, 1e6, 2e6, 4e6, 8e6], [20], "several --ratio"),
    ],
)
def test_runs_that_cannot_tell_the_terms_apart_are_refused(sizes, ratios, words):
    n = np.repeat(sizes, len(ratios))
    d = n * np.tile(ratios, len(sizes))
    with pytest.raises(ValueError, match=words):
        law.fit(n, d, published(n, d))


def test_the_best_size_of_a_budget_is_that_of_the_law():
    found = law.fit(SIZES, TOKENS, published(SIZES, TOKENS))
    rows = budget.front(found, 1e12, 1e3)
    for row in rows:
        flops = row.usd * 1e12
        assert 6 * row.parameters * row.tokens == pytest.approx(flops)
        sizes = row.parameters * np.geomspace(0.5, 2, 101)
        losses = found.law(sizes, flops / 6 / sizes)
        assert losses.argmin() == 50 and row.low <= row.loss <= row.high
    assert [row.loss for row in rows] == sorted((row.loss for row in rows), reverse=True)
    lines = budget.words(rows, 2e6)
    assert "1,000" in lines[4]


def test_a_law_without_one_of_its_terms_has_no_best_size():
    flat = law.Law(1.0, 0.0, 1.0, 0.3, 0.3, 1.0, 1.0)
    with pytest.raises(InputError, match="no size is the best"):
        budget.best_size(flat, 1e15)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo2"])
def test_rungs_keep_the_proportions(family, tmp_path):
    argv = [f"--model.family={family}", "--model.flavor=debug", "--training.steps=100"]
    argv += ["--validation.interval=10", "--lr_schedule.warmup_steps=10"]
    base = load_config(argv)
    whole = rungs.parameters_of(base)
    made = rungs.ladder(argv, [whole / 12, whole / 3, whole], [5, 20], tmp_path)
    assert [rung.parameters for rung in made[::2]] == sorted({rung.parameters for rung in made})
    for rung in made:
        assert rung.tokens == pytest.approx(rung.parameters * rung.ratio, rel=0.02)
        assert rung.cfg.lr_schedule.warmup_steps is None
        assert rung.cfg.lr_schedule.warmup_fraction == pytest.approx(0.1)
    last = made[-1]
    assert last.parameters == whole  # the configuration itself, at its own rate and batch
    assert last.cfg.optimizer.lr == pytest.approx(base.optimizer.lr, rel=1e-3)
    assert last.cfg.training.global_batch_size == base.training.global_batch_size
    assert made[0].cfg.optimizer.lr > last.cfg.optimizer.lr


def test_every_rank_has_whole_sequences_and_every_run_its_own_place(tmp_path):
    argv = ["configs/llama_debug.toml", "--checkpoint.store=s3://bucket/a"]
    argv += ["--parallelism.tensor_parallel=2", "--training.stop_after=100"]
    for rung in rungs.ladder(argv, [2e5, 6e5], [5, 20], tmp_path, ranks=8):
        assert rung.cfg.training.global_batch_size % 4 == 0
        assert rung.cfg.checkpoint.store == f"s3://bucket/a/{rung.name}"
        assert not rung.cfg.training.stop_after


@pytest.mark.parametrize("preset", ["llama_1b", "qwen3_0.6b"])
def test_a_preset_with_a_microbatch_and_a_warmup_of_its_own_has_a_ladder(preset, tmp_path):
    """Its numbers are those of its size: each rung has divisors of its batch, and the same share."""
    argv = [f"configs/{preset}.toml"]
    base = load_config(argv)
    share = base.lr_schedule.warmup_steps / base.training.steps
    whole = rungs.parameters_of(base)
    for rung in rungs.ladder(argv, [whole / 40, whole / 7, whole / 3], [2, 20], tmp_path):
        training = rung.cfg.training
        assert training.local_batch_size <= base.training.local_batch_size
        assert training.global_batch_size % training.local_batch_size == 0
        assert rung.cfg.lr_schedule.warmup_fraction == pytest.approx(share, rel=1e-3)


def test_a_budget_makes_the_models_smaller(tmp_path):
    argv = ["configs/llama_debug.toml"]
    sizes = rungs.spaced(2e5, 2e6, 3)
    before = sum(rung.flops for rung in rungs.ladder(argv, sizes, [5, 20], tmp_path))
    smaller = rungs.within_budget(argv, sizes, [5, 20], before / 4)
    after = sum(rung.flops for rung in rungs.ladder(argv, smaller, [5, 20], tmp_path))
    assert before / 40 < after <= before / 4


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--rungs", "2"], "needs 3 or more"),
        (["--ratio", "5", "5"], "twice"),
        (["--smallest", "2e6", "--largest", "1e6"], "the first below the second"),
        (["--validation.interval=0"], "validation.interval"),
        (["--checkpoint.load_path=somewhere"], "leave checkpoint.load_path out"),
        (["--smallest", "1.5e6", "--largest", "1.6e6"], "would be the same model"),
        (["--no.option=1"], "no.option"),
    ],
)
def test_a_mistake_is_a_sentence_and_nothing_is_written(argv, words, tmp_path, capsys):
    argv = ["configs/llama_debug.toml", f"--out={tmp_path / 'ladder'}", *argv]
    assert command.main(argv) == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "ladder").exists()


def made_up(out: Path, argv: list[str], sizes: list[float]) -> list[rungs.Rung]:
    """Write a ladder whose runs have the losses of the published law."""
    made = rungs.ladder(argv, sizes, [5, 10, 20], out)
    runs.write(out, argv, made)
    for rung in made:
        facts = {"name": rung.name, "parameters": rung.parameters, "tokens": rung.tokens}
        make_up(out, facts, rung.cfg)
    return made


def make_up(out: Path, facts: dict, cfg: Config) -> None:
    """Write the metrics of one run."""
    folder = out / facts["name"]
    folder.mkdir(exist_ok=True)
    last = float(published(facts["parameters"], facts["tokens"]))
    steps = cfg.training.steps
    lines = []
    for step in sorted({*range(cfg.validation.interval, steps, steps // 20), steps}):
        loss = 1.69 + (last - 1.69) * (step / steps) ** -0.3
        lines.append(json.dumps({"step": step, "validation_loss": loss}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_ladder_that_is_done_gives_a_page_and_a_forecast(tmp_path):
    argv = ["configs/llama_debug.toml"]
    made = made_up(tmp_path, argv, [1.4e5, 3e5, 6e5, 2e6])
    said = page.write(tmp_path)
    assert "in the band" in said and said.count("yes") == 3
    html = (tmp_path / page.PAGE).read_text()
    assert html.count("<circle") == len(made) and html.count("<svg") == 4
    cfg = load_config([*argv, "--training.steps=20000", f"--run.folder={tmp_path / 'run'}"])
    found = forecast.forecast(cfg, tmp_path)
    truth = float(published(found.parameters, found.tokens))
    assert found.loss == pytest.approx(truth, rel=2e-3)
    for share in (0.2, 0.55, 1.0):
        expected = 1.69 + (truth - 1.69) * share**-0.3
        assert found.at(share)[0] == pytest.approx(expected, rel=0.01)
    assert found.at(0.01) is None
    assert found.larger == pytest.approx(found.parameters / made[-1].parameters)


def test_a_ladder_with_a_missing_run_is_told_so(tmp_path):
    made = made_up(tmp_path, ["configs/llama_debug.toml"], [2e5, 6e5, 2e6])
    (tmp_path / made[4].name / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=f"1 of 9 runs are not done .{made[4].name}."):
        forecast.fitted(tmp_path)
    with pytest.raises(InputError, match="no ladder's folder"):
        forecast.fitted(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="another ladder"):
        runs.write(tmp_path, ["configs/llama_debug.toml"], made[:3])


def test_a_slurm_array_has_every_run(tmp_path):
    made = made_up(tmp_path, ["configs/llama_debug.toml"], [2e5, 6e5, 2e6])
    script = runs.array_script(tmp_path, made)
    assert "#SBATCH --array=0-8" in script and "--signal=B:USR1" in script
    assert all(str(runs.toml_of(tmp_path, rung)) in script for rung in made)
    for rung in made:
        assert load_config([str(runs.toml_of(tmp_path, rung))]).training == rung.cfg.training


def flat(cfg, low: float, high: float) -> registered.Forecast:
    """A forecast of one band for the whole run."""
    curve = [(0.0, (low + high) / 2, low, high), (1.0, (low + high) / 2, low, high)]
    return registered.Forecast(1, 1, curve[0][1], low, high, curve, "", 9, 1.0, 1.0, "ladder")


@pytest.mark.parametrize(
    "low, high, side", [(0.0, 99.0, ""), (0.0, 1.0, "above"), (90, 99, "below")]
)
def test_a_run_says_whether_it_is_inside_its_forecast(low, high, side, tmp_path, caplog):
    """And for other options it says that it is not judged."""
    argv = [f"--run.folder={tmp_path}", "--training.steps=20", "--validation.interval=10"]
    cfg = load_config(argv)
    registered.write(flat(cfg, low, high), cfg)
    metrics = registered.judged(cfg, 10, 5.0)
    assert metrics == {
        "forecast_loss": (low + high) / 2,
        "forecast_low": low,
        "forecast_high": high,
    }
    assert caplog.text.count("its forecast") == bool(side) and side in caplog.text
    other = load_config([*argv, "--optimizer.lr=0.5"])
    assert registered.judged(other, 10, 5.0) == {} and "another optimizer.lr" in caplog.text


def test_a_forecast_is_registered_before_the_run(tmp_path):
    cfg = load_config([f"--run.folder={tmp_path}"])
    assert registered.judged(cfg, 10, 5.0) == {}  # it has none
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match="has begun"):
        registered.write(flat(cfg, 1.0, 2.0), cfg)
    (tmp_path / registered.FILE).write_text("{}")
    with pytest.raises(InputError, match="is no forecast"):
        registered.read(tmp_path)


def test_a_ladder_runs_what_is_missing_and_a_plan_registers_its_forecast(tmp_path, monkeypatch):
    """The runs are made up here. Stopped in the second one, it goes on there."""
    started: list[str] = []
    wanted = ["configs/llama_debug.toml", "--rungs", "3", "--smallest", "2e5", "--largest", "2e6"]
    wanted += ["--out", str(tmp_path)]

    def stops_once(config: Path) -> int:
        started.append(config.stem)
        if len(started) == 2:
            return runs.STOPPED
        record = next(
            row for row in runs.read_record(tmp_path)["rungs"] if row["name"] == config.stem
        )
        make_up(tmp_path, record, load_config([str(config)]))
        return 0

    monkeypatch.setattr(runs, "_run", stops_once)
    assert command.main(wanted) == runs.STOPPED and len(started) == 2
    assert command.main(wanted) == 0
    assert len(started) == 10 and len(set(started)) == 9
    run = tmp_path / "run"
    cfg = load_config([f"--run.folder={run}", "--training.steps=20000"])
    assert "90% band" in plan.forecast_of(cfg, tmp_path)
    assert registered.read(run)[0].ladder == str(tmp_path)
    hours = SimpleNamespace(usd_per_gpu_hour=2.0)
    made = SimpleNamespace(cfg=cfg, inputs=hours, gpu_hours=lambda: 10.0)
    of_budget = plan.best_for(made, tmp_path, 20).splitlines()[4].split()
    size, tokens = float(of_budget[1]), float(of_budget[2])
    spent = rungs.parameters_of(cfg) * rungs.tokens_of(cfg)
    assert size * tokens == pytest.approx(spent, rel=0.02)  # the same dollars buy the same FLOPs
