"""tools/report: the page shows what the runs wrote, hides no spike and no failure, and stays small."""

import json
import re
import shutil
from datetime import datetime
from html.parser import HTMLParser
from itertools import combinations_with_replacement
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from reliability import goodput
from tests.ranks import run_ranks
from tests.runs import ends, killed, lines_of, run, run_that_reports, said, series, tiny_run
from tools.report import __main__ as report
from tools.report import charts, numbers
from tools.report.run import Points, read_run
from tools.report.thin import thin

SAMPLED = ["--debug.sample_tokens=12", "--validation.interval=4", "--validation.steps=1"]
EXPERTS = (
    "--model.family=deepseek_v3 --model.dim=32 --model.n_layers=3 --model.n_dense_layers=1 "
    "--model.n_heads=2 --model.hidden_dim=36 --model.n_experts=8 --model.experts_per_token=2 "
    "--model.expert_dim=12 --model.vocab_size=263"
).split()
SEVEN_DIGITS = 5e-7  # as the page's data are rounded


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """plain and faster: two learning rates; killed: done after step 5, killed after step 7, refused,
    then done; experts: a mixture of experts, of fewer steps."""
    place = tmp_path_factory.mktemp("runs")
    options = [*tiny_run(place), "--training.steps=12", "--data.validation_fraction=0.2"]
    paths = {name: place / name for name in ("plain", "faster", "killed", "experts")}
    for path in paths.values():
        path.mkdir()
    assert run_ranks(1, run, [*options, *SAMPLED], paths["plain"]) == [(0, "")]
    with_tensorboard = [*options, "--optimizer.lr=0.02", "--metrics.tensorboard=true"]
    assert run_ranks(1, run, with_tensorboard, paths["faster"]) == [(0, "")]
    assert run_ranks(1, run, [*options, "--training.steps=5"], paths["killed"]) == [(0, "")]
    assert ends(1, place / "ends", killed, options, paths["killed"], 3) == [-9]  # after step 7
    ((code, _),) = run_ranks(1, run, [*options, "--model.n_layers=1"], paths["killed"])
    assert code == 2  # the checkpoint is of another model
    assert run_ranks(1, run, options, paths["killed"]) == [(0, "")]
    of_experts = [option for option in options if not option.startswith("--model.")]
    of_experts = [*of_experts, *EXPERTS, "--training.steps=6"]
    assert run_ranks(1, run_that_reports, of_experts, paths["experts"]) == [(0, "")]
    return paths


class Page(HTMLParser):
    """The text of a page, the attributes of its elements, and the numbers that it carries."""

    def __init__(self, text: str):
        super().__init__()
        self.source = text
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        (data,) = re.findall(r"<script type=application/json id=data>(.*?)</script>", text)
        self.data = json.loads(data)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "path", "td", "th", "tr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, text: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.words.setdefault(tag, []).append(text)

    @property
    def text(self) -> str:
        shown = [texts for tag, texts in self.words.items() if tag not in ("script", "style")]
        return " ".join(" ".join(text.split()) for texts in shown for text in texts)

    def drawn(self, metric: str, run: int) -> dict[int, float]:
        rows = self.data["panels"][metric]["series"]
        (row,) = [row for row in rows if row["run"] == run]
        return dict(zip(row["steps"], row["mean"], strict=True))

    def titles(self) -> list[str]:
        """Return the titles of the marks on the time line."""
        return [a["title"] for tag, a in self.elements if "mark" in a.get("class", "").split()]


def page(*folders: Path) -> Page:
    out = folders[0].parent / "report.html"
    assert report.main([*map(str, folders), f"--out={out}"]) == 0
    return Page(out.read_text(encoding="utf-8"))


def refused(capsys, *arguments: object) -> str:
    """Return the one sentence of a call that ends with code 2."""
    capsys.readouterr()
    assert report.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    return printed.err.strip()


def copy(source: Path, to: Path) -> Path:
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("checkpoints"))
    return to


# What the page shows ------------------------------------------------------------------------------


def test_the_page_has_the_numbers_that_the_runs_logged(runs):
    shown = page(runs["plain"], runs["faster"], runs["experts"])
    assert shown.data["runs"] == ["plain", "faster", "experts"] and shown.data["lastStep"] == 12
    for metric in ("loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "goodput"):
        for number, name in enumerate(shown.data["runs"]):
            logged = series(runs[name], metric)
            assert len(logged) == (6 if name == "experts" else 12)
            assert shown.drawn(metric, number) == pytest.approx(logged, rel=SEVEN_DIGITS)
    validation = series(runs["plain"], "validation_loss")
    assert sorted(validation) == [4, 8, 12]
    assert shown.drawn("validation_loss", 0) == pytest.approx(validation, rel=SEVEN_DIGITS)
    assert shown.drawn("lr", 0) != pytest.approx(shown.drawn("lr", 1), rel=0.1)
    # every chart is drawn, and each run's line in it
    panels = [a["data-panel"] for _, a in shown.elements if "data-panel" in a]
    assert panels == list(shown.data["panels"])
    lines = sum(a.get("class") == "line" for _, a in shown.elements)
    assert lines == sum(len(panel["series"]) for panel in shown.data["panels"].values())


def test_negative_control_a_number_that_differs_is_seen(runs, tmp_path):
    changed = copy(runs["plain"], tmp_path / "changed")
    lines = (changed / "metrics.jsonl").read_text().splitlines()
    third = json.loads(lines[2])
    third["loss"] *= 1 + 3e-6
    lines[2] = json.dumps(third)
    (changed / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    logged = series(runs["plain"])
    assert page(changed).drawn("loss", 0) != pytest.approx(logged, rel=SEVEN_DIGITS)


def test_failures_and_refused_starts_stand_on_the_time_line(runs):
    marks = page(runs["killed"]).titles()
    assert [title.partition(".")[0] for title in marks] == [
        "start 1: done",
        "start 2: failed",
        "start 3: refused its input",
        "start 4: done",
    ]
    assert "n_layers is 2 in the checkpoint and 1 here" in marks[2]
    shown = page(runs["killed"])
    assert "failed: killed, without an exit code" in shown.text
    assert any("detecting" == a.get("class") for _, a in shown.elements)
    assert re.findall(r'data-label="redone">(\d+)', shown.source) == ["0", "2", "0", "0"]
    steps = re.findall(r'data-label="steps">([^<]+)', shown.source)
    assert steps == ["0 to 5", "5 to 7", "none", "5 to 12"]


def test_copies_in_the_memory_of_hosts_and_where_a_start_came_from(runs, tmp_path):
    copied = copy(runs["killed"], tmp_path / "copied")
    memory = "/dev/shm/plumbline-0-0123-4567/step-00000005"
    changes = {"0001": {"began": "2020-01-01 00:00:00+00:00"}, "0004": {"loaded": memory}}
    for start, changed in changes.items():
        about = copied / "starts" / start / "start.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | changed))
    first = datetime.fromisoformat(changes["0001"]["began"]).timestamp()
    fourth = goodput.read(copied)[-1].lines[-1]["time"]
    rows = [
        {"time": first, "source": "new", "held": {}, "unused": []},
        {"time": first, "step": 4, "seconds": 0.25, "bytes": 78_000_000},
        {"time": first, "step": 5, "seconds": 0.75, "bytes": 78_000_000},
        {"time": first, "step": 6, "failed": "OSError: no <room>"},
        {"time": fourth, "source": "memory", "step": 5, "seconds": 0.21, "sent": [[0, 1, 2, 52e6]]}
        | {"held": {"step-00000005": [2, 0, 2]}, "unused": ["step-00000006: gone"]},
    ]
    lines = [json.dumps(row) for row in rows]
    (copied / "copies.jsonl").write_text("\n".join([*lines, '{"time": 1}', '{"ti']))
    shown = page(copied)
    found = re.findall(r'data-label="state from">([^<]*)', shown.source)
    assert found == ["new", "disk", "–", "memory of hosts"]
    assert "2 made, 1 failed; 1 start from them" in shown.text
    assert shown.drawn("copy_seconds", 0) == {4: 0.25, 5: 0.75}
    table = shown.source[shown.source.index("<h2>Copies in the memory") :]
    cells = re.findall(r'data-label="(?:copies|seconds|size)">([^<]*)', table)
    assert cells == ["2", "0.50", "78.00 MB", "0", "–", "–"]
    assert re.findall(r'data-label="start">([^<]*)', table) == ["1", "4"]
    for words in (
        "a new run<br>step 6 was not copied: OSError: no &lt;room&gt;",
        "went on from step 5 (memory of hosts), in 0.21 s",
        "step-00000005: files on 2 of 3 hosts, none on host 1",
        "sent 52.00 MB: host 0 to 1",
        "not used: step-00000006: gone",
    ):
        assert words in table
    assert "memory of hosts" not in page(runs["killed"]).text


def test_negative_control_a_run_that_never_failed_shows_no_failure(runs):
    shown = page(runs["plain"])
    assert [title.partition(".")[0] for title in shown.titles()] == ["start 1: done"]
    assert "1, 0 failed" in shown.text and "killed" not in shown.text


def test_a_run_that_goes_on_is_not_called_failed(runs, tmp_path):
    going = copy(runs["plain"], tmp_path / "going")
    (going / "starts" / "0001" / "end.json").unlink()
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 5.')  # it is being written
    shown = page(going)
    assert "running, or killed; last sign of life 20" in shown.text
    assert shown.titles() == ["start 1: no end recorded. "]
    assert shown.drawn("loss", 0) == pytest.approx(series(runs["plain"]), rel=SEVEN_DIGITS)


def test_a_run_that_has_logged_nothing_yet_has_a_page(runs, tmp_path):
    begun = copy(runs["plain"], tmp_path / "begun")
    for name in ("metrics.jsonl", "config.toml"):
        (begun / name).unlink()
    shown = page(begun)
    assert "No metrics are logged yet." in shown.text and shown.data["panels"] == {}
    both = page(runs["plain"], begun)
    assert both.drawn("loss", 0) == pytest.approx(series(runs["plain"]), rel=SEVEN_DIGITS)


def test_options_that_differ_and_only_these_are_in_the_table(runs, tmp_path):
    shown = page(runs["plain"], runs["faster"])
    section = shown.source[shown.source.index("<h2>Configuration") :]
    table = section[: section.index("</table>")]
    keys = re.findall(r"<th scope=row><code>([^<]*)</code>", table)
    assert "optimizer.lr" in keys and "run.seed" not in keys and "run.folder" not in keys
    row = table[table.index("optimizer.lr") :]
    assert re.findall(r"<td[^>]*><code>([^<]*)</code>", row)[:2] == ["0.01", "0.02"]
    same = copy(runs["plain"], tmp_path / "same")
    assert "Every option is the same." in page(runs["plain"], same).text


def test_tensorboard_has_the_configuration_as_text(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs["faster"] / "tensorboard")).Reload()
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    config = (runs["faster"] / "config.toml").read_text().splitlines()
    assert shown.splitlines() == [f"    {line}" if line else "" for line in config]
    assert "lr = 0.02" in shown and text.step == 0


def test_the_sample_is_the_one_that_was_logged(runs):
    run_of = read_run(runs["plain"], "plain")
    after = said(runs["plain"]).split("a sample from the final weights:\n")[1]
    logged = after.split("\ntensorboard")[0]
    assert run_of.sample
    assert "\n".join(f"    {line}" for line in run_of.sample.split("\n")) in logged
    assert "<h2>Samples" in page(runs["plain"]).source
    assert "<h2>Samples" not in page(runs["faster"]).source


def test_the_map_of_experts_has_the_last_record(runs):
    shown = page(runs["experts"])
    record = json.loads((runs["experts"] / "experts.jsonl").read_text().splitlines()[-1])
    of_experts = shown.source[shown.source.index("<h2>Expert load by layer") :]
    of_experts = of_experts[: of_experts.index("</section>")]
    found = {}
    for level, path in re.findall(r'<path class=l(\d) d="([^"]*)"', of_experts):
        for column, row, count in re.findall(r"M(\d+) (\d+)h(\d+)", path):
            for expert in range(int(column), int(column) + int(count)):
                found[int(row), expert] = int(level)
    wanted = {}
    for row, counts in enumerate(record["counts"].values()):
        for expert, count in enumerate(counts):
            load = count * len(counts) / sum(counts)
            ends = (0.1, 0.5, 0.8, 1.25, 2.0, 4.0)
            wanted[row, expert] = sum(load >= end for end in ends)
    assert found == wanted and len(found) == 2 * 8
    assert shown.drawn("expert_load", 0) == pytest.approx(
        series(runs["experts"], "expert_load"), rel=SEVEN_DIGITS
    )
    assert not page(runs["plain"]).source.count("<h2>Expert load by layer")
    # the metrics of layers are one chart: their mean, and their range
    (entropy,) = shown.data["panels"]["router_entropy/layer"]["series"]
    layers = [series(runs["experts"], f"router_entropy/layer-{layer}")[6] for layer in (1, 2)]
    assert entropy["steps"] == [3, 6]
    assert entropy["low"][-1] == pytest.approx(min(layers), rel=SEVEN_DIGITS)
    assert entropy["high"][-1] == pytest.approx(max(layers), rel=SEVEN_DIGITS)


def test_values_that_are_not_finite_are_marked_and_counted(runs, tmp_path):
    damaged = copy(runs["plain"], tmp_path / "damaged")
    lines = lines_of(damaged)
    for line in lines:
        if line["step"] in (5, 6) and "loss" in line:
            line["loss"] = "nan"
        if line["step"] == 7:
            line.pop("grad_norm", None)
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = page(damaged)
    (loss,) = shown.data["panels"]["loss"]["series"]
    assert loss["notFinite"] == [5, 6] and loss["steps"] == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    assert "2 values are not finite, the first at step 5 (red marks)." in shown.text
    assert sorted(shown.drawn("grad_norm", 0)) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert "not finite" not in page(runs["plain"]).text
    for line in lines:
        line |= {"loss": "inf", "lr": 0.0} if "loss" in line else {}
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = page(damaged)  # a chart with nothing but infinity, and a log scale with nothing but 0
    assert shown.data["panels"]["loss"]["series"][0]["steps"] == []


# One file ------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere_and_every_element_is_closed(runs):
    shown = page(*runs.values())
    for tag, attributes in shown.elements:
        assert tag not in ("link", "img", "iframe", "base", "object", "embed", "image", "use")
        assert not attributes.keys() & {"src", "href", "xlink:href", "srcset", "action", "data"}
        assert not any(name.startswith("on") for name in attributes)
    assert shown.open == []
    styles = "".join(shown.words["style"])
    assert "url(" not in styles and "@import" not in styles
    assert "://" not in "".join(shown.words["script"])
    policy = [a["content"] for _, a in shown.elements if "http-equiv" in a]
    assert len(policy) == 1 and policy[0].startswith("default-src 'none';")
    assert str(Path(report.__file__).parents[2]) not in shown.source


def test_what_a_run_says_is_never_read_as_html(runs, tmp_path):
    evil = copy(runs["plain"], tmp_path / "<script>alert(1)<")
    log = evil / "logs" / "rank-00000.log"
    text = "</pre></script><img src=x onerror=alert(2)>"
    log.write_text(f"a sample from the final weights:\n    {text}\n")
    lines = (evil / "metrics.jsonl").read_text()
    (evil / "metrics.jsonl").write_text(lines.replace('"loss"', f'"{text}"'))
    shown = page(evil)
    assert sum(tag == "script" for tag, _ in shown.elements) == 2
    assert not any(tag == "img" for tag, _ in shown.elements) and shown.open == []
    assert text in shown.data["panels"] and read_run(evil, "evil").sample == text


# Long runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_million_steps_make_a_small_page_that_hides_no_spike(runs, tmp_path):
    count = 1_000_000
    long = copy(runs["plain"], tmp_path / "long")
    rows = [f', "loss": {2 + i / 977:.3f}}}\n' for i in range(977)]
    special = {123_456: ', "loss": 4321.5}\n', 654_321: ', "loss": 1.5}\n'}
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            file.write(f'{{"step": {step}' + special.get(step, rows[step % 977]))
    shown = page(long)
    assert len(shown.source) < 2_000_000
    (loss,) = shown.data["panels"]["loss"]["series"]
    assert len(loss["steps"]) <= 2 * charts.PIXELS and loss["width"] * charts.PIXELS >= count
    spike, dip = int(np.argmax(loss["high"])), int(np.argmin(loss["low"]))
    assert loss["high"][spike] == 4321.5 and loss["low"][dip] == 1.5
    assert abs(loss["steps"][spike] - 123_456) <= loss["width"]
    assert abs(loss["steps"][dip] - 654_321) <= loss["width"]
    assert sorted(loss["high"])[-2] == pytest.approx(2 + 976 / 977, abs=1e-3)
    assert f"Mean (line) and range (band) of every {loss['width']:,} steps." in shown.text


EXTREMES = (0.0, 5e-324, 1e-300, 1.0, 1 + 2**-52, 61.25, 1e300, 1.7e308, np.nan, np.inf)


@pytest.mark.parametrize("scale", ["auto", "linear", "zero", "log"])
def test_any_two_numbers_can_be_drawn(scale):
    numbers_and_negatives = [*EXTREMES, *(-value for value in EXTREMES)]
    panel = charts.Panel("x", "x", "", scale)
    across = charts.Axis(0.0, 2.0)
    for one, other in combinations_with_replacement(numbers_and_negatives, 2):
        points = Points(np.array([1, 2]), np.array([one, other]))
        html, carried = charts.chart((panel, [points]), ["run"], across, 10)
        json.dumps(carried, allow_nan=False)
        assert "nan" not in html and "inf" not in html.replace("not finite", ""), (one, other)
        coordinates = re.findall(r"<path class=line d=\"([^\"]*)\"", html)[0]
        for y in re.findall(r"[ML]\d+ (-?\d+)", coordinates):
            assert 0 <= int(y) <= charts.SCALE


def test_a_bucket_has_the_mean_and_the_range_of_its_steps():
    draw = np.random.default_rng(0)
    steps = draw.permutation(np.arange(7, 7 + 3 * 1001, 3))
    values = draw.normal(size=1001)
    values[:5] = (np.nan, np.inf, -np.inf, 1e308, 1e308)
    found = thin(Points(steps, values), 50)
    assert found.width > 1 and len(found.steps) <= 100 and (np.diff(found.steps) > 0).all()
    assert found.not_finite.tolist() == sorted(steps[:3].tolist())
    finite = np.isfinite(values)
    first = steps[finite].min()
    for i, bucket in enumerate(np.unique((steps[finite] - first) // found.width)):
        inside = values[finite][(steps[finite] - first) // found.width == bucket]
        assert found.low[i] == inside.min() and found.high[i] == inside.max()
        if inside.max() < 1e300:
            assert found.mean[i] == pytest.approx(inside.mean(), rel=1e-9, abs=1e-12)
    assert np.isfinite(found.mean).all()


# Bad input -----------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(capsys, runs, tmp_path):
    out = f"--out={tmp_path / 'page.html'}"
    assert refused(capsys, tmp_path, out) == (
        f"{tmp_path} is not the folder of a run: it has no starts/0001"
    )
    assert refused(capsys, runs["plain"], tmp_path / "gone", out).startswith(str(tmp_path / "gone"))
    assert refused(capsys, runs["plain"], runs["plain"], out).endswith("is given twice")
    assert not (tmp_path / "page.html").exists()
    no_folder = f"--out={tmp_path / 'gone' / 'page.html'}"
    assert "its folder does not exist" in refused(capsys, runs["plain"], no_folder)


@pytest.mark.parametrize("line", ["{", '{"step": 1.5}', '{"step": 3, "loss": "x"}', "\xff"])
def test_damaged_metrics_are_refused_by_line(capsys, line, runs, tmp_path):
    damaged = copy(runs["plain"], tmp_path / "damaged")
    path = damaged / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n", encoding="latin-1")
    sentence = refused(capsys, damaged, f"--out={tmp_path / 'page.html'}")
    assert sentence == f"{path}: line 4 is not an object with a step"


def test_a_picture_has_a_curve_for_each_logged_loss(runs, tmp_path):
    place = tmp_path / "loss.svg"
    out = tmp_path / "page.html"
    both = [str(runs["plain"]), str(runs["faster"])]
    assert report.main([*both, "--out", str(out), "--picture", str(place)]) == 0
    drawn = ElementTree.fromstring(place.read_text(encoding="utf-8"))
    curves = [one.get("points").split() for one in drawn.findall("{*}polyline")]
    logged = [read_run(runs[name], name).metrics for name in ("plain", "faster")]
    keys = ("loss", "validation_loss")
    lengths = [len(metrics[key].steps) for metrics in logged for key in keys if key in metrics]
    assert [len(points) for points in curves] == lengths and len(lengths) == 3
    words = [text.text for text in drawn.findall("{*}text")]
    assert "plain: validation loss" in words
    assert numbers.short(float(logged[1]["loss"].values[-1])) in words
    heights = [float(point.split(",")[1]) for point in curves[0]]
    losses = logged[0]["loss"].values
    assert np.corrcoef(heights, losses)[0, 1] < -0.999  # SVG counts from the top


@pytest.mark.parametrize(
    "name, words", [("loss.png", "must end in .svg"), ("none/loss.svg", "cannot be written")]
)
def test_a_picture_that_cannot_be_drawn_is_a_sentence(name, words, runs, tmp_path, capsys):
    place = tmp_path / name
    assert report.main([str(runs["plain"]), "--picture", str(place)]) == 2
    assert f"--picture={place} {words}" in capsys.readouterr().err and not place.exists()
