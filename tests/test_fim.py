"""Documents that are rearranged to fill in the middle: what is written and how often, prepared and
streamed alike; and what is refused."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.schema import Data, InputError
from data import fim, hf_tokenizer, inputs
from data.open_tokenizer import open_tokenizer
from data.prepare import prepare
from data.prepare.encoding import encode
from data.tokenizer import Tokenizer, train_bpe
from tests.published import published

NAMES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TEXTS = [f"document {i}: " + " ".join(str(n * (i + 7) % 97) for n in range(20)) for i in range(200)]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    bpe = train_bpe(TEXTS, 300)
    return Tokenizer(bpe.ranks, bpe.split, ["<|endoftext|>", *NAMES], "<|endoftext|>")


def restored(tok: Tokenizer, ids: list[int]) -> tuple[str, str]:
    """Return the text that a rearranged document was, and the order of its pieces."""
    prefix, suffix, middle = (tok.special_ids[tok.special_tokens.index(name)] for name in NAMES)
    at = {token: ids.index(token) for token in (prefix, suffix, middle)}
    before = tok.decode(ids[at[prefix] + 1 : at[suffix]])
    after = tok.decode(ids[at[suffix] + 1 : at[middle]])
    rest = tok.decode(ids[at[middle] + 1 :])
    if at[suffix] == at[prefix] + 1 and at[prefix] == 0:
        return rest + after, "spm"
    return before + rest + after, "psm"


@pytest.mark.parametrize("spm, orders", [(0.0, {"psm"}), (1.0, {"spm"})])
def test_a_rearranged_document_has_all_of_its_text(tok, spm, orders, monkeypatch):
    monkeypatch.setattr(fim, "SPM_RATE", spm)
    cfg = Data(fim_rate=1, validation_fraction=0)
    for text in [*TEXTS[:50], "é漢🙂 a", "x"]:
        _, _, rows = encode(cfg, tok, text, {})
        (split, ids, _, _), *others = rows
        assert split == "train" and not others and ids[-1] == tok.eot_id
        found, order = restored(tok, ids[:-1].tolist())
        assert found == text
        assert order in orders or spm == 0  # of a document with an empty prefix both look the same


def test_the_rates_are_kept_and_the_rest_and_what_is_held_out_stay(tok):
    cfg = Data(fim_rate=0.3, validation_fraction=0.2)
    plain = Data(validation_fraction=0.2)
    orders = []
    for text in TEXTS:
        (split, ids, _, _), *_ = encode(cfg, tok, text, {})[2]
        (same_split, as_it_is, _, _), *_ = encode(plain, tok, text, {})[2]
        assert split == same_split
        if ids.tolist() == as_it_is.tolist():
            continue
        assert split == "train"
        orders.append(restored(tok, ids[:-1].tolist())[1])
    trained = sum(encode(plain, tok, text, {})[2][0][0] == "train" for text in TEXTS)
    assert 0.15 < len(orders) / trained < 0.45
    assert 0.25 < orders.count("spm") / len(orders) < 0.75


def test_bytes_of_tokens_are_those_of_the_text(tok):
    cfg = Data(fim_rate=1)
    parts = fim.pieces(cfg, tok, TEXTS[0])
    ids, sizes = fim.encode(tok, parts)
    assert len(sizes) == len(ids)
    assert sizes.sum() == len(TEXTS[0].encode())


def written(tok: Tokenizer, folder: Path) -> Path:
    """Write a corpus and the tokenizer; returns the tokenizer's path."""
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03d}.txt").write_text(text)
    path = folder.parent / "tokenizer.json"
    path.write_text(json.dumps(hf_tokenizer.files(tok, 64)["tokenizer.json"]))
    return path


def test_a_prepared_corpus_has_them_and_another_rate_is_another_corpus(tok, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    path = written(tok, corpus)
    options = {"source": str(corpus), "tokenizer": str(path), "cache": str(tmp_path / "cache")}
    plain = prepare(Data(**options), log=lambda line: None, workers=1)
    half = prepare(Data(**options, fim_rate=0.5), log=lambda line: None, workers=1)
    assert plain.folder != half.folder and plain.fingerprint != half.fingerprint
    middle = half.tokenizer.special_ids[half.tokenizer.special_tokens.index(NAMES[2])]
    count = int((half.train.read(0, len(half.train)) == middle).sum())
    assert 0.35 * len(TEXTS) < count < 0.65 * len(TEXTS)
    assert len(half.train) >= len(plain.train) + 3 * count
    with pytest.raises(InputError, match="is prepared already, and keeps its documents"):
        prepare(Data(source=half.folder, fim_rate=0.5), log=lambda line: None)
    lacks = inputs.tokens_without_row(half.tokenizer, Data(**options, fim_rate=0.5), middle)
    assert "data.fim_rate writes the token" in lacks or "tokens that texts may have" in lacks


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"fim_tokens": ("a", "b", "c")}, "has no special token 'a'"),
        ({"tokenizer": "bytes"}, "has no tokens to fill in the middle"),
        ({"tokenizer": "bpe"}, "has no tokens to fill in the middle"),
        ({"format": "completion"}, "rearranges texts"),
    ],
)
def test_what_cannot_be_rearranged_is_refused(tok, tmp_path, options, sentence):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    path = written(tok, corpus)
    given = {"tokenizer": str(path), "source": str(corpus), "cache": str(tmp_path), "fim_rate": 0.5}
    with pytest.raises(InputError, match=sentence):
        prepare(Data(**given | options), log=lambda line: None, workers=1)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_published_tokenizers_have_their_own_tokens(name, monkeypatch):
    monkeypatch.setattr(fim, "SPM_RATE", 0.0)
    tok = open_tokenizer(str(published(name)))
    cfg = Data(fim_rate=1)
    parts = fim.pieces(cfg, tok, "def f(x):\n    return x + 1\n")
    names = [
        tok.special_tokens[tok.special_ids.index(part)]
        for part in parts
        if part in fim.tokens(cfg, tok)
    ]
    assert tuple(names) in fim.NAMES
    assert tok.decode(fim.encode(tok, parts)[0].tolist()).startswith(names[0])


@pytest.mark.parametrize("names", [["<a>", "<b>"], ["<a>", "<b>", "<a>"]])
def test_names_that_are_not_three_tokens_are_refused(names):
    with pytest.raises(ValidationError, match="must name three different tokens"):
        Data(fim_rate=0.5, fim_tokens=names)
