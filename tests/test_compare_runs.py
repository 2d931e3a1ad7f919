"""tools/compare_runs.py on real runs: bitwise equal, equal to rounding, or from which step and by
how much they part, and why."""

import json
import math
import shutil
from argparse import ArgumentTypeError
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.checkpoints import rewrite_header, set_hash
from tests.ranks import run_ranks
from tests.runs import MESHES, lines_of, run, tiny_run
from tools import compare_runs
from tools.compare_runs import compare
from tools.differences import parse_tolerance, relative
from training.lines import GROUPS

RUNS = {  # name -> ranks, options that differ from the first's
    "first": (1, []),
    "same": (1, ["--data.workers=1"]),
    "lr": (1, ["--optimizer.lr=0.011"]),
    "mesh": (2, MESHES["fsdp2"][1]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    options = [*tiny_run(place), "--training.steps=11", "--data.validation_fraction=0.2"]
    options += ["--validation.interval=5", "--validation.steps=1"]
    for name, (ranks, extra) in RUNS.items():
        (place / name).mkdir()
        assert run_ranks(ranks, run, [*options, *extra], place / name) == [(0, "")] * ranks
    return {name: place / name for name in RUNS}


def rows(found: compare_runs.Comparison) -> dict[str, compare_runs.MetricRow]:
    return {row.metric: row for row in found.rows}


def test_the_same_run_is_bitwise_equal_with_other_data_workers(runs):
    found = compare(runs["first"], runs["same"])
    assert found.code == 0 and found.verdict == "bitwise equal (steps 1 to 11)"
    assert {"loss", "grad_norm", "lr", "validation_loss"} <= rows(found).keys()
    assert not any(name.startswith(GROUPS["perf"]) for name in rows(found))
    assert rows(found)["loss"].steps == 11 and rows(found)["validation_loss"].steps == 3
    assert found.checkpoint.startswith("step 11: all ") and "bitwise equal" in found.checkpoint
    assert found.config == {"data.workers": [0, 1]} and not found.environment


def test_another_mesh_is_equal_to_rounding(runs):
    found = compare(runs["first"], runs["mesh"])
    assert found.code == 1 and found.verdict.startswith("equal to 1e-05: not bitwise from step ")
    assert all(row.first_beyond is None for row in found.rows)
    assert 0 < rows(found)["loss"].largest < 1e-5
    assert compare(runs["first"], runs["mesh"], tolerance=1e-5).code == 0
    assert compare(runs["first"], runs["mesh"], tolerance=1e-12).code == 1
    assert found.environment["mesh"] == [
        f"pp 1, dp_replicate 1, dp_shard {shard}, cp 1, tp 1, ep 1" for shard in (1, 2)
    ]
    assert found.environment["devices"] == ["cpu 1", "cpu 2"]
    assert "the mesh or the tensors differ" in found.checkpoint


def two_runs(place: Path, differences: list[float]) -> compare_runs.Comparison:
    """Write two runs whose losses differ by so much in each step, relatively."""
    for name, factor in ("a", 0.0), ("b", 1.0):
        (place / name).mkdir()
        lines = [
            json.dumps({"step": step, "loss": 5.0 * (1 + factor * size), "lr": 0.1})
            for step, size in enumerate(differences, 1)
        ]
        (place / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return compare(place / "a", place / "b")


@pytest.mark.parametrize(
    "differences, says",
    [
        ([0, 8.5e-8, 1e-6, 2e-5, 2e-4, 1e-3], True),  # a model that amplifies rounding
        # meshes that agree, until one of them makes a mistake
        ([0, 8.5e-8, 8.5e-8, 9e-8, 1e-3, 2e-3], False),
        ([0, 2e-5, 3e-5, 3e-5, 4e-5, 4e-5], False),  # it began at 2e-5
        ([0, 0, 0, 1e-3, 1e-3, 1e-3], False),
    ],
)
def test_it_says_rounding_where_a_difference_began_small_and_grew(tmp_path, differences, says):
    found = two_runs(tmp_path, differences)
    assert found.code == 1 and found.verdict.startswith("they part at step ")
    assert ("like rounding" in found.verdict) == says, found.verdict


def test_another_learning_rate_shows_one_step_later_than_in_the_metric_itself(runs):
    """1.1 times the rate: lr differs by 1/11 at the first step, the first loss is the same, the
    second is not."""
    found = compare(runs["first"], runs["lr"])
    by = rows(found)
    assert found.code == 1 and by["lr"].first_beyond == 1
    assert by["loss"].first_difference == by["grad_norm"].first_difference == 2
    assert by["lr"].first_size == pytest.approx(1 / 11)
    assert "they part at step 1 (lr by 9.1e-02, relative)" in found.verdict
    assert found.config == {"optimizer.lr": [0.01, 0.011]} and "rounding" not in found.verdict
    assert "tensors differ" in found.checkpoint
    assert by["lr"].last_tenth == pytest.approx(0.1 * 0.01 * 0.1, rel=1)


# Runs that were altered by hand -------------------------------------------------------------------


@pytest.fixture
def altered(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs["first"], tmp_path / "altered"))


def test_weights_that_differ_under_equal_metrics_are_seen(runs, altered):
    path = altered / "checkpoints" / "step-00000011"

    def change(header: dict) -> None:
        (name,) = (name for name in header if name.startswith("model.norm.weight["))
        set_hash(header, name, "0" * 16)

    rewrite_header(path, change)
    found = compare(runs["first"], altered)
    assert found.code == 1 and found.verdict.startswith("metrics bitwise equal, checkpoints not")
    assert "1 of " in found.checkpoint and "model.norm.weight" in found.checkpoint
    assert compare(runs["first"], runs["same"]).code == 0, "the control"


def test_one_bit_of_one_loss_is_seen(runs, altered):
    lines = lines_of(altered)
    line = next(line for line in lines if line["step"] == 7)
    line["loss"] = math.nextafter(line["loss"], 0)
    line["new_metric"] = 1.0
    cut = '{"step": 12, "lo'
    (altered / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), cut]))
    found = compare(runs["first"], altered)
    loss = rows(found)["loss"]
    assert found.code == 1 and loss.first_difference == loss.largest_at == 7
    assert found.verdict.startswith("equal to 1e-05: not bitwise from step 7 on")
    assert rows(found)["new_metric"].steps == 0


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("content", [None, b"{"])
def test_a_checkpoint_that_cannot_be_read_is_not_equal(name, content, runs, altered):
    path = altered / "checkpoints" / "step-00000011" / name
    path.unlink()
    if content:
        path.write_bytes(content)
    found = compare(runs["first"], altered)
    assert found.code == 1 and found.checkpoint.startswith("cannot be compared: "), found
    assert name in found.checkpoint and found.verdict.startswith("metrics bitwise equal, check")
    lines = lines_of(altered)
    lines[0]["loss"] *= 1 + 1e-6
    (altered / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert compare(runs["first"], altered, tolerance=1e-3).code == 1, "metrics are within"


def test_runs_without_a_common_checkpoint_are_equal_in_metrics_alone(runs, altered):
    shutil.rmtree(altered / "checkpoints")
    found = compare(runs["first"], altered)
    assert found.code == 0 and found.checkpoint == "no checkpoint of the same step"
    assert found.verdict.startswith("metrics bitwise equal; no checkpoints were compared")


def test_changed_code_data_and_versions_are_named(runs, altered):
    start, data = altered / "starts" / "0001" / "start.json", altered / "data.json"
    about = json.loads(start.read_text())
    about["code"]["files"]["models/llama.py"] = "0" * 12
    about["versions"]["torch"] = "1.0"
    # differs between any two starts, and says nothing
    about["environment"]["MASTER_PORT"] = "12345"
    start.write_text(json.dumps(about))
    described = json.loads(data.read_text())
    described["description"]["sources"][0]["fingerprint"] = "another"
    data.write_text(json.dumps(described))
    found = compare(runs["first"], altered)
    assert found.environment.keys() == {"code models/llama.py", "version of torch", "data source"}
    text = compare_runs.table(runs["first"], altered, found, 1e-5)
    for words in "code: differs in models/llama.py", 'B "1.0"', "options: the same":
        assert words in text


def test_a_longer_run_is_compared_as_far_as_the_shorter_goes(runs, altered):
    path = altered / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] < 10))
    found = compare(runs["first"], altered)
    assert found.steps == [1, 9] and "A goes on to 11" in found.verdict
    assert rows(found)["loss"].steps == 9


def test_runs_without_a_record_are_compared_by_what_there_is(runs, altered):
    for name in ("starts", "checkpoints"):
        shutil.rmtree(altered / name)
    (altered / "config.toml").unlink()
    found = compare(runs["first"], altered)
    assert found.code == 0 and "no checkpoint" in found.checkpoint


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (1.0, 1.0, 0),
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
        (0.0, 0.0, 0),
        (1.0, 2.0, 0.5),
        (-1.0, 1.0, 2),
        (1.0, math.nan, math.inf),
        (math.inf, -math.inf, math.inf),
        (0.0, 1e-300, 1),
    ],
)
def test_difference(a, b, expected):
    assert relative(a, b) == relative(b, a) == expected


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "small"])
def test_a_tolerance_that_means_nothing_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="a number, not negative"):
        parse_tolerance(text)


@pytest.mark.parametrize(
    "metrics, words",
    [
        (None, "not the folder of a run"),
        ('{"step": 99, "loss": 1.0}\n', "no logged step in common"),
        ("nonsense\n" * 2, "line 1"),
    ],
)
def test_folders_that_cannot_be_compared_are_a_sentence(metrics, words, runs, tmp_path, capsys):
    if metrics:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    assert compare_runs.main([str(runs["first"]), str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_json_is_json(runs, capsys):
    assert compare_runs.main([str(runs["first"]), str(runs["same"]), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["code"] == 0 and {row["metric"] for row in about["rows"]} >= {"loss", "grad_norm"}


def test_a_picture_of_the_differences(runs, tmp_path, capsys):
    words = {}
    for other in "same", "mesh", "lr":
        place = tmp_path / f"{other}.svg"
        compare_runs.main([str(runs["first"]), str(runs[other]), f"--picture={place}"])
        drawn = ElementTree.parse(place).getroot()
        words[other] = [text.text for text in drawn.findall("{*}text")]
        lines = drawn.findall("{*}polyline")
        assert ("loss" in words[other]) == bool(lines) == (other != "same")
    assert any("bitwise equal" in text for text in words["same"])
    capsys.readouterr()
    for place in "no/such.svg", "differences.png":
        asked = [str(runs["first"]), str(runs["same"]), f"--picture={tmp_path / place}"]
        assert compare_runs.main(asked) == 2 and "--picture" in capsys.readouterr().err
