"""The ledger: statistics against SciPy's numbers, a row from training to page, and a replay that fails
when a number or the corpus is another."""

import math
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import InputError
from lab.ledger import __main__ as program
from lab.ledger import page
from lab.ledger import row as ledger

ROWS = ledger.rows()
DONE = [row for row in ROWS if row.results and not row.corpus]
# The second shortest that needs no text from the network: the shortest is replayed by a command of
# docs/ledger.md (tests/test_readme.py).
REPLAYED = sorted(DONE, key=lambda row: max(row.results["minutes"].values()))[1:2]
SMALL = """\
title = "Small"
question = "Is it the same?"
base = "configs/llama_debug.toml"
seeds = [0, 1]
common = [
    "--data.tokenizer=bytes", "--model.dim=16", "--model.n_layers=1", "--model.n_heads=2",
    "--model.n_kv_heads=2", "--model.hidden_dim=16", "--model.vocab_size=272",
    "--training.seq_len=16", "--training.global_batch_size=2", "--training.steps=STEPS",
    "--checkpoint.interval=0", "--validation.interval=STEPS", "--debug.sample_tokens=0",
    "--metrics.interval=1", "--run.device=cpu", "--data.source=SOURCE",
]
[arms]
untied = []
tied = ["--model.tied_embeddings=true"]
"""


def test_bands_are_those_of_students_t() -> None:
    """The numbers are scipy.stats' (1.16): t.interval(0.95, 4, mean, sem)."""
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert page.band(losses) == pytest.approx(1.963243, abs=1e-3)
    assert math.isnan(page.band([1.0]))
    shifted = [x + 0.1 for x in losses]
    assert page.difference(losses, shifted, paired=True) == pytest.approx((0.1, 0.0), abs=1e-9)
    change, width = page.difference(losses, shifted, paired=False)
    assert (change, width) == pytest.approx((0.1, 2.776), abs=1e-3)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_legal(row: ledger.LedgerRow, tmp_path: Path, monkeypatch) -> None:
    """Each arm is a configuration, and results that are there are whole."""
    monkeypatch.setattr(ledger.LedgerRow, "_text", lambda self: tmp_path / "text.txt")
    if row.missing():
        pytest.skip(f"{row.missing()} was not fetched: python -m tests.published")
    steps = []
    for arm in row.arms:
        steps.append(load_config(row.options(arm, row.seeds[0], tmp_path)).training.steps)
        if row.results:
            assert len(row.results["losses"][arm]) == len(row.seeds) >= 5
    if row.results:
        assert row.verdict and len(row.replay["losses"]) == min(program.STEPS, steps[-1])


def test_the_page_is_that_of_the_rows() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.split(page.MARK)[1] == "\n" + "\n".join(map(page.section, ROWS))


def test_a_row_that_has_its_results_is_not_trained_again(monkeypatch, capsys) -> None:
    monkeypatch.setattr(program, "train", lambda arguments: pytest.fail("it trains"))
    assert program.main(["tied"]) == 0
    assert "tied is trained already. To train it again, remove" in capsys.readouterr().out


@pytest.mark.parametrize("row", REPLAYED, ids=lambda row: row.name)
@pytest.mark.slow
def test_a_row_is_replayed(row: ledger.LedgerRow) -> None:
    if row.corpus_digest() != row.results["corpus"]:
        pytest.skip("other versions of the packages are installed, so the corpus is another")
    assert program.check(row) == ""


@pytest.mark.slow
def test_a_row_is_trained_written_and_replayed(tmp_path: Path, monkeypatch, capsys) -> None:
    """Negative controls: another number, and another corpus, are seen."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n * n} is the square of {n}.\n" for n in range(3000)))
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("STEPS", "5").replace("SOURCE", str(text)))
    monkeypatch.setattr(program, "STEPS", 5)
    monkeypatch.setattr(ledger, "RUNS", tmp_path / "runs")
    program.run(ledger.read(path))
    capsys.readouterr()
    row = ledger.read(path)
    assert (
        row.results["tokens"] == {"untied": 160, "tied": 160}
        and len(row.results["losses"]["tied"]) == 2
    )
    assert "tied - untied" in page.section(row)
    program.run(row)
    assert capsys.readouterr().out == "", "what has ended is not trained again"
    path_of = tmp_path / "runs" / "small" / "tied" / "1" / "metrics.jsonl"
    ended = path_of.read_text()
    path_of.write_text(ended.replace('"step": 5', '"step": 4'))
    program.run(row)
    assert "tied, seed 1" in capsys.readouterr().out, "what has validated before its end goes on"
    assert program.check(row) == ""
    found = list(row.replay["losses"])
    row.replay["losses"][3] += 1e-6
    assert "small: step 4 has loss" in program.compare(row, found)
    row.results["machine"] = "another"
    assert program.compare(row, found) == "", "within rounding on another machine"
    assert "step 4" in program.compare(row, [*found[:3], math.nan, found[4]])
    row.replay["losses"][3] += 0.1
    assert "small: step 4 has loss" in program.compare(row, found)
    assert "4 steps instead of 5" in program.compare(row, found[:4])
    text.write_text("another text\n" * 3000)
    with pytest.raises(InputError, match="corpus is another"):
        program.check(row)


def test_a_target_is_reached_by_the_rule_of_a_one_sided_test() -> None:
    """The numbers are scipy.stats' (1.16): t.ppf(0.99, 4) = 3.74695, of a mean of 3 with an error
    of sqrt(0.5)."""
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    threshold = 3 + 3.74695 * math.sqrt(0.5)
    assert page.reaches(losses, threshold + 1e-3)
    assert not page.reaches(losses, threshold - 1e-3)


def test_a_row_names_the_published_file_that_is_not_here(tmp_path: Path, monkeypatch) -> None:
    row = next(row for row in ROWS if row.name == "lora")
    monkeypatch.setattr(ledger, "PUBLISHED", tmp_path)
    assert row.missing() == "smollm2"
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "tokenizer.json").touch()
    assert row.missing() == row.corpus["task"]
