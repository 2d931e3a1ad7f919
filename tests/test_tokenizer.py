"""Every text survives every tokenizer, and what others made of one is read exactly or refused."""

import base64
import itertools
import json
import random
import subprocess
import unicodedata
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import tokenizers

from configs.schema import InputError
from data import (
    hf_tokenizer,
    library,
    proved,
    rank_files,
    tokenizer,
    train_tokenizer,
)
from data.open_tokenizer import load_saved
from tests.library import (
    added,
    byte_fallback,
    hard_texts,
    same_as_library,
    unigram,
    word_piece,
    words,
)
from tests.programs import PYTHON, finished

ROOT = Path(__file__).parents[1]
# ---- text to ids and back

ADVERSARIAL = {
    "empty": "",
    "nul": "a\0b\0\0",
    "planes": "".join(chr(c) for c in range(1, 0x110000, 97) if not 0xD800 <= c < 0xE000),
    "edges": "\ufeff\ufffd\uffff\U0010ffff\x7f\x80\u2028\u00a0",
    "spaces": " " * 1_000_000,
    "one line": "x" * 300_000 + "é" * 100_000,
    "special": "<|endoftext|><|begin_of_text|><|end_of_text|>",
}


def made_up(count: int) -> list[bytes]:
    """So many ranks of made-up tokens: all bytes in GPT-2's order, all pairs, the first triples."""
    longer = (bytes(t) for n in (2, 3) for t in itertools.product(range(256), repeat=n))
    return [*tokenizer.gpt2_bytes(), *itertools.islice(longer, count - 256)]


def write_ranks(path: Path, ranks: list[bytes]) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(ranks)))
    return path


@pytest.fixture(scope="module")
def like_llama3(tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    """Read a file of as many ranks as Llama 3's."""
    path = write_ranks(tmp_path_factory.mktemp("llama3") / "tokenizer.model", made_up(128_000))
    return rank_files.from_rank_file(str(path), "llama3")


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe([words(0, 4000)], 400)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_round_trip_of_adversarial_text(
    name: str, bpe: tokenizer.Tokenizer, like_llama3: tokenizer.Tokenizer
) -> None:
    for tok in (tokenizer.byte_tokenizer(), bpe, like_llama3):
        ids = tok.encode(ADVERSARIAL[name])
        assert ids.dtype == tok.dtype
        assert tok.decode(ids) == ADVERSARIAL[name]
        assert not np.any(ids >= len(tok.ranks)), "ordinary text made a special token"


def test_whitespace_is_cut_only_beyond_the_limit(bpe: tokenizer.Tokenizer) -> None:
    limit = tokenizer.LONGEST_WHITESPACE
    for text in (" " * limit, "a" + "\n \t" * (limit // 3) + "b" + words(1, 30_000)):
        assert list(tokenizer._pieces(text)) == [text]
    text = "a" + " " * (2 * limit + 1) + "b"
    assert [len(piece) for piece in tokenizer._pieces(text)] == [limit + 1, limit, 2]
    assert "".join(tokenizer._pieces(text)) == text
    tokenizer.train_bpe([" " * 1_000_000, words(0, 100)], 300)  # rustbpe panics on the whole run


def test_byte_tokenizer() -> None:
    tok = tokenizer.byte_tokenizer()
    assert (tok.n_vocab, tok.eot_id, tok.dtype) == (257, 256, np.uint16)
    assert tok.encode("hé").tolist() == [0x68, 0xC3, 0xA9]
    assert tok.decode([0x68, 256, 0xC3, 9999]) == "h<|endoftext|>\ufffd\ufffd"


def test_bpe_has_the_vocabulary_asked_for_and_compresses(bpe: tokenizer.Tokenizer) -> None:
    assert (bpe.n_vocab, bpe.eot_id, len(bpe.ranks)) == (400, 399, 399)
    text = words(7, 1000)
    assert len(bpe.encode(text)) < len(text) / 1.7  # 1.85 measured; made-up words
    assert bpe.decode([bpe.eot_id]) == "<|endoftext|>"
    with pytest.raises(
        InputError, match="data.bpe_vocab_size is 4096, but the corpus has text for"
    ):
        tokenizer.train_bpe(["too little"], 4096)


def test_bpe_is_the_same_in_another_process_with_other_threads(bpe: tokenizer.Tokenizer) -> None:
    code = "from data import tokenizer; from tests.library import words\n"
    code += "print(tokenizer.train_bpe([words(0, 4000)], 400).fingerprint)"
    said = finished(PYTHON, "-c", code, RAYON_NUM_THREADS="5")
    assert said.stdout.strip() == bpe.fingerprint


def test_fingerprint_follows_everything_that_defines_a_tokenizer(
    bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    bpe.save(str(tmp_path / "saved.json"))
    saved = load_saved(str(tmp_path / "saved.json"))
    assert saved.fingerprint == bpe.fingerprint
    assert saved.encode(words(1, 50)).tolist() == bpe.encode(words(1, 50)).tolist()
    same = (bpe.ranks, bpe.split, ["<|endoftext|>"], "<|endoftext|>")
    others = [
        (bpe.ranks[:-1], *same[1:]),
        ([*bpe.ranks[:-2], bpe.ranks[-1], bpe.ranks[-2]], *same[1:]),
        ([*bpe.ranks[:-2], bpe.ranks[-2] + bpe.ranks[-1][:1], bpe.ranks[-1][1:]], *same[1:]),
        (bpe.ranks, bpe.split + "|x", *same[2:]),
        (bpe.ranks, bpe.split, ["<|endoftext|>", "<|pad|>"], "<|endoftext|>"),
    ]
    prints = {tokenizer.Tokenizer(*definition).fingerprint for definition in [same, *others]}
    assert len(prints) == 1 + len(others) and bpe.fingerprint in prints


def test_other_rank_files_get_one_special_token(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "mine.tiktoken", bpe.ranks)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(reversed(lines)))  # any order of the lines
    assert rank_files.from_rank_file(str(path), "llama3").fingerprint == bpe.fingerprint
    for damage, sentence in (
        (b"not a rank file at all\n", "is not a tiktoken rank file"),
        (b'{"model": {}}', "is not a tiktoken rank file"),
        (b"\x00\xff\xfe binary\n", "is not a tiktoken rank file"),
        (b"", "is damaged: 0 ranks"),
        (b"".join(lines[:100] + lines[101:]), "is damaged"),  # a byte is missing
        (b"".join([*lines[:-1], lines[-2]]), "is damaged"),  # a rank twice
    ):
        path.write_bytes(damage)
        with pytest.raises(InputError, match=sentence):
            rank_files.from_rank_file(str(path))
    with pytest.raises(InputError, match="data.tokenizer: .*/absent cannot be read"):
        rank_files.from_rank_file(str(tmp_path / "absent"))


# ---- published rank files


def published(name: str, ranks: list[bytes]) -> tiktoken.Encoding:
    """tiktoken's own encoding of that name, with these ranks in place of the file that it would
    download."""
    from tiktoken_ext import openai_public

    with mock.patch.object(
        openai_public, "load_tiktoken_bpe", lambda *a, **k: {t: i for i, t in enumerate(ranks)}
    ):
        fields = openai_public.ENCODING_CONSTRUCTORS[name]()
    fields.pop("explicit_n_vocab", None)
    return tiktoken.Encoding(**fields)


@pytest.mark.slow
def test_a_published_rank_file(tmp_path: Path) -> None:
    """tiktoken cannot download here, so the ranks are made up; pattern, special tokens and ids are
    tiktoken's own."""
    name, pattern, count, n_vocab = ("cl100k_base", "cl100k", 100_256, 100_277)
    ranks = made_up(count)
    tok = rank_files.from_rank_file(str(write_ranks(tmp_path / "ranks", ranks)), pattern)
    theirs = published(name, ranks)
    assert tok.eot_id == theirs.eot_token and tok.n_vocab == theirs.n_vocab == n_vocab
    assert dict(zip(tok.special_tokens, tok.special_ids)) == theirs._special_tokens
    assert tok.decode([tok.eot_id, n_vocab + 5]) == "<|endoftext|>\ufffd"
    assert len(tok.byte_lengths) == n_vocab and tok.byte_lengths[tok.eot_id] == 0
    tok.save(str(tmp_path / "saved"))
    saved = load_saved(str(tmp_path / "saved"))
    assert (saved.fingerprint, saved.special_ids) == (tok.fingerprint, tok.special_ids)
    for text in hard_texts(1, 500):
        ids = saved.encode(text)
        assert ids.tolist() == theirs.encode_ordinary(text) and saved.decode(ids) == text, repr(
            text
        )


# ---- Hugging Face's tokenizer.json


def as_theirs(tok: tokenizer.Tokenizer, change: object = None) -> dict:
    document = json.loads(json.dumps(hf_tokenizer.files(tok, 64)["tokenizer.json"]))
    if change:
        change(document)
    return document


def gpt2(document: dict) -> None:
    """Return a tokenizer like GPT-2's: the pattern is ByteLevel's, no look-up of whole pieces, the
    special token in the vocabulary too."""
    document["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    document["model"].update(ignore_merges=False)
    document["model"]["vocab"]["<|endoftext|>"] = document["added_tokens"][0]["id"]


def special_first(document: dict) -> None:
    """Return a tokenizer as `tokenizers` trains them, like GPT-NeoX's: the special tokens have the
    first ids."""
    document["model"]["vocab"] = {word: id + 2 for word, id in document["model"]["vocab"].items()}
    document["model"]["vocab"] |= {"<|endoftext|>": 0, "<|padding|>": 1}
    document["added_tokens"][0]["id"] = 0
    document["added_tokens"].append(
        {**document["added_tokens"][0], "id": 1, "content": "<|padding|>"}
    )
    document["model"].update(ignore_merges=False)


def ids_shuffled(document: dict) -> None:
    """Ids that have nothing to do with the order of the merges."""
    ids = list(document["model"]["vocab"].values())
    random.Random(3).shuffle(ids)
    document["model"]["vocab"] = dict(zip(document["model"]["vocab"], ids, strict=True))


def never_made(document: dict) -> None:
    """Return a token that no merge makes and no look-up finds."""
    document["model"].update(ignore_merges=False)
    looked_up(document)


def looked_up(document: dict) -> None:
    document["model"]["vocab"] |= {"Ġqqqqq": 1199}
    document["added_tokens"][0]["id"] = 1200


def pattern(document: dict) -> dict:
    return document["pre_tokenizer"]["pretokenizers"][0]["pattern"]


@pytest.fixture(scope="module")
def code_bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe(
        [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))], 1200
    )


CHANGES = {
    "llama 3": None,
    **{f.__name__: f for f in (gpt2, special_first, ids_shuffled, never_made, looked_up)},
    "qwen2": lambda d: pattern(d).update(Regex=tokenizer.SPLIT_QWEN2),
    "cl100k": lambda d: pattern(d).update(Regex=tokenizer.SPLIT_CL100K),
    "o200k": lambda d: pattern(d).update(Regex=tokenizer.SPLIT_O200K),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_json_gives_the_ids_of_tokenizers(
    change: object, code_bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(as_theirs(code_bpe, change)))
    tok, theirs = hf_tokenizer.read_file(path), tokenizers.Tokenizer.from_file(str(path))
    texts = hard_texts(2, 500) + [
        p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("data/*.py"))
    ]
    texts += [" qqqqq qqqqqq", " qqqqq"]
    for text in (text for text in texts if "<|" not in text):
        ids = tok.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, repr(text[:60])
        assert tok.decode(ids) == text
    assert tok.eot_id == theirs.token_to_id("<|endoftext|>")
    (tmp_path / "again").mkdir()
    again = tmp_path / "again/tokenizer.json"
    again.write_text(json.dumps(hf_tokenizer.files(tok, 64)["tokenizer.json"]))
    assert (
        hf_tokenizer.read_file(again).encode(texts[-3]).tolist() == tok.encode(texts[-3]).tolist()
    )


BY_LIBRARY = {  # what changes a document, and why tiktoken does not run it
    "NFKC": (lambda d: d.update(normalizer={"type": "NFKC"}), "changes texts first"),
    "unknown pattern": (lambda d: pattern(d).update(Regex=r"\S+"), "cuts mean the same"),
    "punctuation": (
        lambda d: d["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Punctuation", "behavior": "Isolated"}
        ),
        "cuts texts by Punctuation",
    ),
    "prefix space": (
        lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "puts a space before",
    ),
    "merges reversed": (lambda d: d["model"]["merges"].reverse(), "merges are not in the order"),
    "greedy": (
        lambda d: d["added_tokens"].append(added("<x>", 1200, lstrip=True)),
        "depends on the characters around it",
    ),
}


NAMED = [
    "<|endoftext|>",
    "a <x>  b<x>",
    "a <|endoftext|>\n<think>two</think>4",
    "<|endo<think>ftext|>",
]


@pytest.mark.parametrize("what", BY_LIBRARY)
def test_what_is_not_proved_is_left_to_the_library(
    what: str, code_bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    change, reason = BY_LIBRARY[what]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(as_theirs(code_bpe, change)))
    tok = hf_tokenizer.read_file(path)
    assert tok.engine == "tokenizers" and reason in tok.reason
    same_as_library(tok, path, hard_texts(4, 200) + NAMED)


def cuts(*steps: dict) -> object:
    def change(document: dict) -> None:
        to_bytes = document["pre_tokenizer"]["pretokenizers"][-1]
        document["pre_tokenizer"]["pretokenizers"] = [*steps, to_bytes]

    return change


def split_by(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def digits_then_gpt2(individual: bool) -> object:
    def change(document: dict) -> None:
        digits = {"type": "Digits", "individual_digits": individual}
        cuts(digits)(document)
        document["pre_tokenizer"]["pretokenizers"][-1]["use_regex"] = True

    return change


def think(document: dict) -> None:
    names = ("<think>", "</think>", "  ", "\u00e9\u00e9")
    document["added_tokens"] += [added(n, 1200 + i) for i, n in enumerate(names)]
    document["added_tokens"].append(added("\u00e0 la", 1204, normalized=True))
    document["normalizer"] = {"type": "NFC"}


def lacks_bytes(document: dict) -> None:
    """Return a tokenizer like SmolLM2's: letters that its training text lacks are in no token."""
    for byte in (0x00, 0xE2, 0xF0):
        del document["model"]["vocab"][tokenizer.letters_of_bytes()[byte]]
    document["model"]["vocab"]["<|endoftext|>"] = 1199
    document["model"]["ignore_merges"] = False


PROVED = {
    "NFC": lambda d: d.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
    "empty normalizer": lambda d: d.update(normalizer={"type": "Sequence", "normalizers": []}),
    "DeepSeek": cuts(*map(split_by, hf_tokenizer.CUTS_DEEPSEEK)),
    "dolma2": cuts(split_by(tokenizer.SPLIT, "Removed", True)),
    "tekken": cuts(split_by(hf_tokenizer.SPLIT_TEKKEN)),
    "digits": digits_then_gpt2(True),
    "numbers": digits_then_gpt2(False),
    "think": think,
    "bytes are missing": lacks_bytes,
}


@pytest.mark.parametrize("what", PROVED)
def test_what_is_proved_is_run_by_tiktoken(
    what: str, code_bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(as_theirs(code_bpe, PROVED[what])))
    tok = hf_tokenizer.read_file(path)
    assert tok.engine == "tiktoken", tok.reason
    east = [f"a{chr(c)}b {chr(c)}1 \n{chr(c)}  {chr(c)} 12{chr(c)}" for c in range(0x3000, 0x3100)]
    hard = [
        "e\u0301\u0327 \u1100\u1161\u11a8 <think>\u0338 \u304b\u3099",
        "\u00e9\u00e9 a\u0300 la",
    ]
    same_as_library(tok, path, hard_texts(5, 400) + NAMED + east + hard)
    tok.save(str(tmp_path / "saved"))
    again = load_saved(str(tmp_path / "saved"))
    assert (again.fingerprint, again.engine) == (tok.fingerprint, tok.engine)
    assert again.by_library("for a test").fingerprint != "" and again.companions == tok.companions


def test_a_wrong_proof_is_seen(code_bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    """Without the gaps as pieces, DeepSeek's pattern loses text: opening the file sees it, for
    streamed text and prompts too. The negative control tries the proof on too little."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(as_theirs(code_bpe, PROVED["DeepSeek"])))
    without = hf_tokenizer.SPLIT_DEEPSEEK.partition("|(?:(?!")[0]
    with mock.patch.dict(hf_tokenizer.CUTS, {hf_tokenizer.CUTS_DEEPSEEK: without}):
        seen = hf_tokenizer.read_file(path)
        with mock.patch.object(library, "MANY_KINDS", "a"):
            tok = hf_tokenizer.read_file(path)
    assert (seen.engine, tok.engine) == ("tokenizers", "tiktoken")
    assert "has other ids in `tokenizers`" in seen.reason
    same_as_library(seen, path, hard_texts(5, 400))
    with pytest.raises(AssertionError):
        same_as_library(tok, path, hard_texts(5, 400))


@pytest.mark.parametrize("made", [unigram, word_piece, byte_fallback], ids=lambda f: f.__name__)
def test_other_models_are_the_librarys(made: object, tmp_path: Path) -> None:
    end = added("</s>", 1, special=True)
    usual = {"version": "1.0", "padding": None, "post_processor": None, "added_tokens": [end]}
    cut_off = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(usual | made() | {"truncation": cut_off}))
    tok = hf_tokenizer.read_file(path)
    assert (tok.engine, tok.eot_id, tok.exact_lengths) == ("tokenizers", 1, False)
    with pytest.raises(ValueError, match="no length"):
        print(tok.byte_lengths)
    path.write_text(json.dumps(usual | made() | {"truncation": None}))  # never cut off here
    texts = [
        "the the",
        " the  \u2581 caf\u00e9s! ab. ",
        "\u65e5\u672c\U0001f600 the",
        "",
        "  ",
        "a</s>the",
    ]
    same_as_library(tok, path, texts + hard_texts(6, 100))
    tok.save(str(tmp_path / "saved"))
    again = load_saved(str(tmp_path / "saved"))
    assert again.fingerprint == tok.fingerprint == hf_tokenizer.read_file(path).fingerprint
    assert tok.decode([10_000]) == "\ufffd"


REFUSED = {
    "half an added token": (
        lambda d: d["added_tokens"].append({"id": 1200, "content": "    ", "special": False}),
        "it is no tokenizer.json that .*missing field",
    ),
    "a byte is missing": (lambda d: d["model"]["vocab"].pop("a"), "`a` out of vocabulary"),
    "dropout": (lambda d: d["model"].update(dropout=0.1), "dropout = 0.1"),
    "no end": (lambda d: d["added_tokens"].clear(), "token ends a text"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_library_reads_is_refused_with_the_reason(
    what: str, code_bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    change, reason = REFUSED[what]
    (tmp_path / "tokenizer.json").write_text(json.dumps(as_theirs(code_bpe, change)))
    with pytest.raises(InputError, match=reason):
        hf_tokenizer.read_file(tmp_path / "tokenizer.json")


def test_the_fingerprint_is_of_what_decides_the_ids(
    code_bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    """Another spelling is the same tokenizer; another merge, name or normalizer is another one."""

    def fingerprint(change: object) -> str:
        document = as_theirs(code_bpe, PROVED["NFC"])
        change(document)
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        return hf_tokenizer.read_file(tmp_path / "tokenizer.json").fingerprint

    def pairs(document: dict) -> None:
        model = document["model"]
        model["merges"] = [pair.split(" ") for pair in model["merges"]]
        model["unk_token"] = None
        document["post_processor"] = {"type": "ByteLevel"} | dict.fromkeys(
            ("add_prefix_space", "trim_offsets", "use_regex"), True
        )

    same = fingerprint(lambda d: None)
    assert fingerprint(pairs) == same
    others = [think, lambda d: d["model"]["merges"].pop(), lambda d: d.update(normalizer=None)]
    assert len({same, *map(fingerprint, others)}) == 4


# starters and what joins them: accents, Jamo, nukta, exclusions, marks of other planes
JOINING = (
    "Ae\u0301\u0327\u1100\u1161\u11a8\uac00 \u00e9\u212b\u0915\u093c\u0958\ufb1d\u05b4"
    "\U0001d15e\U0002f801\U000110ba\U00011099"
)


def test_text_is_normalised_as_the_library_does_it() -> None:
    """The part that the library gets begins and ends where NFC joins nothing."""
    theirs = tokenizers.normalizers.NFC()
    rng = random.Random(0)
    texts = ["".join(rng.choices(JOINING, k=rng.randrange(1, 9))) for _ in range(5_000)]
    assert [proved.nfc(text) for text in texts] == [theirs.normalize_str(text) for text in texts]
    assert sum(proved.nfc(text) != text for text in texts) > 1_250
    unknown = [chr(point) for point in range(0x20000) if unicodedata.category(chr(point)) == "Cn"]
    assert unknown and not any(map(proved.is_nfc, unknown))
    with mock.patch.object(proved, "is_nfc", lambda text: True):
        assert any(proved.nfc(text) != theirs.normalize_str(text) for text in texts)


# ---- one's own


def test_training_on_the_command_line(tmp_path: Path) -> None:
    def run(source: object, out: str, *more: str) -> subprocess.CompletedProcess:
        words = f"-m data.train_tokenizer --source {source} --vocab-size 900 --out {tmp_path / out}"
        return finished(PYTHON, *words.split(), *more)

    done = run("training", "out")
    assert done.returncode == 0, done.stderr
    made = rank_files.from_rank_file(str(tmp_path / "out" / train_tokenizer.RANKS))
    assert made.n_vocab == 900 and f"fingerprint {made.fingerprint}" in done.stdout
    assert hf_tokenizer.read(tmp_path / "out").fingerprint == made.fingerprint
    again = run("training", "out")
    assert again.returncode == 2 and "exists already" in again.stderr
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"body": Path(train_tokenizer.__file__).read_text()}) + "\n")
    few = run(lines, "few", "--text-field=body", "--json-files=records", "--characters=400")
    assert few.returncode == 2 and "tokens only" in few.stderr and "Traceback" not in few.stderr


def test_training_verifies_what_it_wrote(code_bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    """Put wrong on purpose: ranks that are swapped in the file, a merge less for `tokenizers`."""
    out = tmp_path / "out"
    train_tokenizer.train("training", 900, out)
    made = rank_files.from_rank_file(str(out / train_tokenizer.RANKS), "llama3")
    ranks = made.ranks
    train_tokenizer.verify(made, out, ["def f(x):"])
    write_ranks(out / train_tokenizer.RANKS, [*ranks[:-2], ranks[-1], ranks[-2]])
    with pytest.raises(
        InputError, match="tokenizer.tiktoken is not the tokenizer that was trained"
    ):
        train_tokenizer.verify(made, out, [])
    with pytest.raises(InputError, match="set data.tokenizer_pattern"):
        rank_files.from_rank_file(str(out / train_tokenizer.RANKS))
