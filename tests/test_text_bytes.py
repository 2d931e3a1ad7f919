"""Bits per byte count the bytes of the documents, for every tokenizer."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Data, InputError
from data import splice, text_bytes
from data.loader import Batches
from data.prepare import prepare
from tests.library import added, byte_fallback, unigram, word_piece
from tests.ranks import run_ranks
from tests.runs import run, tiny_run
from training.validate import scores

TEXTS = [
    f"the  caf\u00e9s\u2581 {i}! \u65e5\u672c\U0001f600 the\n ab. " * (i + 3) for i in range(40)
]


def written(made: object, folder: Path) -> Path:
    usual = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    document = usual | {"added_tokens": [added("</s>", 1, special=True)]} | made()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder / "tokenizer.json"


def corpus(made: object, folder: Path, fraction: float) -> Data:
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines))
    return Data(
        source=str(folder / "a.jsonl"),
        tokenizer=str(written(made, folder)),
        cache=str(folder / "cache"),
        validation_fraction=fraction,
    )


@pytest.mark.parametrize(
    "made, fraction", [(unigram, 0.4), (word_piece, 0.4), (byte_fallback, 0.4), (word_piece, 0.0)]
)
def test_every_byte_of_a_document_is_counted_once(made, fraction, tmp_path):
    said = []
    prepared = prepare(corpus(made, tmp_path, fraction), log=said.append)
    assert any("tokenised by `tokenizers`, as" in line for line in said)
    tokens = prepared.validation if fraction else prepared.train
    sizes = text_bytes.of_split(tokens)
    by_document = np.add.reduceat(sizes, tokens.document_starts).tolist()
    numbers = np.fromfile(f"{prepared.folder}/{tokens.split}.numbers", "<i8") - 1
    assert by_document == [len(TEXTS[number].encode()) for number in numbers]
    order = splice.begin(splice.describe([("", "x", tokens, [[0, 1.0]])], 0, 16, 1))
    rows = Batches([tokens], order, 1, 0, 1)
    windows = order.last.sources[0].windows
    read = (rows[step] for step in range(windows))
    batches = list(text_bytes.sized(read, rows, prepared.tokenizer))
    assert sum(int(batch["sizes"].sum()) for batch in batches) == sizes[1 : windows * 16 + 1].sum()
    assert all(batch["sizes"].shape == batch["labels"].shape for batch in batches)


def test_a_split_without_the_table_is_named(tmp_path):
    prepared = prepare(corpus(word_piece, tmp_path, 0.4), log=lambda line: None)
    with pytest.raises(InputError, match="does not say how many bytes each train token"):
        text_bytes.of_split(prepared.train)


def test_a_run_reports_bits_per_byte_of_the_text(tmp_path):
    """Tokenized with a Metaspace, whose first token is a space that is not in the text."""
    options = tiny_run(tmp_path)
    path = written(byte_fallback, tmp_path)
    more = [f"--data.tokenizer={path}", "--training.steps=3", "--validation.interval=3"]
    more += ["--model.vocab_size=300", "--data.validation_fraction=0.4", "--validation.steps=1"]
    code, said = run_ranks(1, run, [*options, *more], tmp_path / "run")[0]
    assert code == 0, said
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if "validation_bits_per_byte" in row][-1]
    # digits, letters and spaces without a token: each byte is one
    bits = last["validation_loss"] / math.log(2)
    assert bits < last["validation_bits_per_byte"] < bits * 1.2


def test_the_score_over_several_sets_is_weighted_by_their_tokens():
    sums = {"short": torch.tensor([30.0, 10.0, 40.0]), "long": torch.tensor([10.0, 90.0, 90.0])}
    found = scores(sums)
    assert found["validation_loss"] == pytest.approx(40 / 100), "1.56 is the mean of the two"
    assert found["validation_perplexity"] == pytest.approx(math.exp(0.4))
    assert found["validation_bits_per_byte"] == pytest.approx(40 / math.log(2) / 130)
    assert found["validation/short/loss"] == 3.0
    assert found["validation/long/perplexity"] == pytest.approx(math.exp(1 / 9))
