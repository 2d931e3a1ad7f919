"""Names by which a tokenizer is found, and the token that ends its texts."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import InputError
from data import hf_tokenizer, kept_proofs, rank_files, tokenizer
from data.open_tokenizer import open_tokenizer
from data.stores import kept
from tests.hub import GATED, running_hub
from tests.published import published
from tests.ranks import WORKERS
from tools import places

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "data" / "order.py").read_text()
ADDED = {600: "<pad>", 601: "<|endoftext|>", 602: "<|im_end|>", 603: "<s>", 604: "</s>"}


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe([TEXT], 601)


@pytest.fixture(scope="module")
def document(bpe) -> str:
    """Return a tokenizer.json with the added tokens ADDED."""
    tok = tokenizer.Tokenizer(bpe.ranks, bpe.split, list(ADDED.values()), "<|endoftext|>")
    return json.dumps(hf_tokenizer.files(tok, 64)["tokenizer.json"])


def write(folder: Path, document: str, **files: object) -> Path:
    """Write tokenizer.json and the files around it; a text is written as it is. Returns its path."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(document)
    for name, content in files.items():
        words = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(words)
    return folder / "tokenizer.json"


# ---- the token that ends a text

CONFIG, SPECIAL, GENERATION, MODEL = (
    "tokenizer_config",
    "special_tokens_map",
    "generation_config",
    "config",
)
FILES = {  # files next to tokenizer.json -> the token that ends a text
    "nothing": ({}, "<|endoftext|>"),
    "a name": ({CONFIG: {"eos_token": "</s>"}}, "</s>"),
    "an object": ({CONFIG: {"eos_token": {"content": "</s>", "lstrip": False}}}, "</s>"),
    "null": ({CONFIG: {"eos_token": None}}, "<|endoftext|>"),
    "the first says it": (
        {CONFIG: {"eos_token": "</s>"}, GENERATION: {"eos_token_id": 602}},
        "</s>",
    ),
    "only special_tokens_map": ({SPECIAL: {"eos_token": {"content": "</s>"}}}, "</s>"),
    "an id": ({GENERATION: {"eos_token_id": 604}, MODEL: {"eos_token_id": 602}}, "</s>"),
    "a list": ({GENERATION: {"eos_token_id": [604, 602]}}, "</s>"),
    "a list with unknown ids": ({GENERATION: {"eos_token_id": [9999, None, 604]}}, "</s>"),
    "config.json": ({MODEL: {"eos_token_id": 604}}, "</s>"),
    "text_config": ({MODEL: {"text_config": {"eos_token_id": [604]}}}, "</s>"),
    "the default of transformers": ({MODEL: {"eos_token_id": 2}}, "<|endoftext|>"),
    "an id that pads": ({MODEL: {"eos_token_id": 600}}, "<|endoftext|>"),
    "an id that begins": ({MODEL: {"eos_token_id": 603}}, "<|endoftext|>"),
    "no number": ({MODEL: {"eos_token_id": "</s>"}, GENERATION: {"eos_token_id": True}}, None),
}


@pytest.mark.parametrize("case", FILES)
def test_the_token_that_ends_a_text(case, document, tmp_path):
    files, end = FILES[case]
    assert open_tokenizer(str(write(tmp_path / "a", document, **files))).end_of_text == (
        end or "<|endoftext|>"
    )
    other = open_tokenizer(str(tmp_path / "a"), end="<|im_end|>")
    assert (other.end_of_text, other.eot_id) == ("<|im_end|>", 602)


@pytest.mark.parametrize(
    "name", ["<｜end▁of▁sentence｜>", "<eos>", "<|return|>", "<|im_end|>", "</s>"]
)
def test_a_known_name_is_taken_where_no_file_says_it(name, bpe, tmp_path):
    tok = tokenizer.Tokenizer(bpe.ranks, bpe.split, ["<pad>", name], name)
    alone = json.dumps(hf_tokenizer.files(tok, 64)["tokenizer.json"])
    assert open_tokenizer(str(write(tmp_path / "a", alone))).end_of_text == name


def test_what_cannot_be_known_is_one_sentence(bpe, document, tmp_path):
    def refused(*words: str, end: str = "", **files: object) -> None:
        with pytest.raises(InputError) as refusal:
            open_tokenizer(str(write(tmp_path / "a", document, **files)), end=end)
        said = str(refusal.value)
        assert all(word in said for word in words) and "None" not in said, said

    refused("no added token '<nope>'", "data.end_token", end="<nope>")
    refused(
        "the eos_token of tokenizer_config.json, '<gone>', is no",
        "data.end_token",
        **{CONFIG: {"eos_token": "<gone>"}},
    )
    refused("tokenizer_config.json is not a JSON object", **{CONFIG: "[1]"})
    refused("config.json cannot be read as JSON", **{CONFIG: {}, MODEL: "{"})
    odd = tokenizer.Tokenizer(bpe.ranks, bpe.split, ["<a>", "<b>"], "<a>")
    document = json.dumps(hf_tokenizer.files(odd, 64)["tokenizer.json"])
    refused("nothing says which token ends a text", "set data.end_token", "<a>, <b>", **{MODEL: {}})
    assert open_tokenizer(str(tmp_path / "a"), end="<b>").eot_id == 601


def test_the_token_that_begins_a_text(document, tmp_path):
    for config, begin in (
        ({CONFIG: {"bos_token": "<s>"}}, "<s>"),
        ({CONFIG: {"bos_token": {"content": "<s>"}, "add_bos_token": False}}, "<s>"),
        ({CONFIG: {"bos_token": None}}, None),
        ({CONFIG: {"bos_token": "<gone>"}}, None),
        ({SPECIAL: {"bos_token": "<s>"}}, "<s>"),
    ):
        folder = tmp_path / f"{config}".translate({ord(c): "" for c in "/<> '\":{},"})
        assert open_tokenizer(str(write(folder, document, **config))).begin_of_text == begin
    assert open_tokenizer(str(write(tmp_path / "alone", document))).begin_of_text == "<s>"


def test_end_token_reaches_a_run_and_saved_tokenizers(bpe, document, tmp_path):
    path = write(tmp_path / "a", document)
    cfg = load_config([f"--data.tokenizer={path}", "--data.end_token=</s>"])
    from data.open_tokenizer import open_named

    named = open_named(cfg.data)
    assert named.eot_id == 604
    named.save(str(tmp_path / "saved.json"))
    again = open_tokenizer(str(tmp_path / "saved.json"), end="<|endoftext|>")
    assert (again.eot_id, again.fingerprint) == (601, open_tokenizer(str(path)).fingerprint)
    for options in (["--data.end_token=</s>"], ["--data.tokenizer_pattern=llama3"]):
        with pytest.raises(InputError, match=r"has no effect with data.tokenizer = \"bpe\""):
            load_config(options)
    with pytest.raises(InputError, match="data.end_token: the tokenizer has no added token"):
        open_tokenizer("bytes", end="</s>")
    with pytest.raises(InputError, match="data.tokenizer_pattern has no effect with .*saved.json"):
        open_tokenizer(str(tmp_path / "saved.json"), pattern="llama3")


# ---- folders and names


def test_a_folder_is_opened_by_the_file_in_it(bpe, document, tmp_path):
    folder = tmp_path / "model"
    path = write(folder, document)
    rank_files.write_rank_file(bpe, str(folder / "tokenizer.tiktoken"))
    assert kept.tokenizer(str(folder), "") == str(path)
    path.unlink()
    assert open_tokenizer(str(folder), pattern="llama3").fingerprint == bpe.fingerprint
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    assert open_tokenizer(str(folder)).end_of_text == "</s>"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is a folder without a tokenizer: none of tokenizer.json"):
        open_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="nowhere cannot be read"):
        places.tokenizer_named(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["hf:Qwen", "hf:", "hf:a/b@", "hf:a b/c", "hf://a/b"])
def test_a_name_that_is_none_of_the_hub(name):
    with pytest.raises(InputError, match="must (name a model|be a URL)"):
        load_config([f"--data.tokenizer={name}"])


# ---- the hub

CHILD = """
import sys
from configs.schema import InputError
from data.open_tokenizer import open_tokenizer
for name in sys.argv[1:]:
    try:
        print("ids", open_tokenizer(name).fingerprint, open_tokenizer(name).end_of_text)
    except InputError as error:
        print(str(error).replace("\\n", " "))
"""


def child(home: Path, endpoint: str, *names: str, offline: str = "0") -> subprocess.Popen:
    """Return a process that opens these, one line for each: huggingface_hub reads the environment
    once."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline}
    environment = {**os.environ, **settings, "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_TOKEN", None)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *names],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=100 * WORKERS)
    assert process.returncode == 0, err
    return out.splitlines()


def test_a_tokenizer_of_the_hub(bpe, document, tmp_path):
    """The real client fetches once, from a server that answers as the hub does."""
    write(tmp_path / "new", document, tokenizer_config={"eos_token": "</s>"})
    write(tmp_path / "old", document, generation_config={"eos_token_id": [602]})
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral" / "tekken.json").write_text(json.dumps(tekken()))
    (tmp_path / "nothing").mkdir()
    home = tmp_path / "home"
    models = {
        "a/m": {"main": tmp_path / "new", "older": tmp_path / "old"},
        "a/mistral": {"main": tmp_path / "mistral"},
        "a/nothing": {"main": tmp_path / "nothing"},
        "a/gated": GATED,
    }
    asked = {
        "hf:a/m": open_tokenizer(str(tmp_path / "new")),
        "hf:a/m@older": open_tokenizer(str(tmp_path / "old")),
        "hf:a/m/tokenizer.json": open_tokenizer(str(tmp_path / "new")),
        "hf:a/mistral": open_tokenizer(str(tmp_path / "mistral")),
    }
    refused = {
        "hf:a/gated": "accept it on https://huggingface.co/a/gated, then log in with",
        "hf:a/none": "has no model a/none that you may read",
        "hf:a/m@nope": "a/m has no revision 'nope'",
        "hf:a/nothing": "hf:a/nothing has no tokenizer: none of tokenizer.json, tekken.json",
    }
    with running_hub(models) as hub:
        said = lines(child(home, hub.endpoint, *asked, *refused))
        gets = [path for method, path in hub.asked if method == "GET" and "resolve" in path]
        hub.asked.clear()
        again = lines(child(home, hub.endpoint, *asked))
        assert not [path for _, path in hub.asked if "resolve" in path]
    expected = [f"ids {tok.fingerprint} {tok.end_of_text}" for tok in asked.values()]
    assert said[: len(asked)] == again == expected
    assert len(gets) == len(set(gets)) and len([p for p in gets if "tokenizer.json" in p]) == 1
    for line, sentence in zip(said[len(asked) :], refused.values(), strict=True):
        assert sentence in line
    gone = child(home, hub.endpoint, "hf:a/m", "hf:a/other")  # tries for half a minute
    offline = lines(child(home, hub.endpoint, "hf:a/m", "hf:a/other", offline="1"))
    there, absent = lines(gone)
    assert offline[0] == there == expected[0]
    assert "hf:a/other is not in the cache" in offline[1] and "HF_HUB_OFFLINE" in offline[1]
    assert f"cannot be fetched from {hub.endpoint} (ConnectError" in absent


# ---- rank files

PATTERNS = ("llama3", "qwen2", "gpt2")


def test_a_rank_file_says_its_pattern_or_is_refused(bpe, tmp_path):
    path = str(tmp_path / "other.tiktoken")
    rank_files.write_rank_file(bpe, path)
    with pytest.raises(InputError, match="set data.tokenizer_pattern to one of llama3, llama4"):
        open_tokenizer(path)
    for name, known in rank_files.KNOWN_RANK_FILES.items():
        tok = open_tokenizer(path, pattern=name)
        right = tokenizer.Tokenizer(bpe.ranks, known.split, ["<|endoftext|>"], "<|endoftext|>")
        assert tok.encode(TEXT).tolist() == right.encode(TEXT).tolist()
    cut = open_tokenizer(path, pattern=r"\s+|\S+")
    assert cut.decode(cut.encode(TEXT)) == TEXT and cut.fingerprint != bpe.fingerprint
    for wrong, reason in (("lama3", "not match every"), (r"\w+", "not match"), ("[a-", "Pars")):
        with pytest.raises(InputError, match=f"is neither one of llama3, .*{reason}"):
            open_tokenizer(path, pattern=wrong)
    # another pattern gives other ids, and nothing else would tell
    numbers = [*bpe.ranks[:256], b"12", b"123", b"1234"]
    made = tokenizer.Tokenizer(numbers, tokenizer.SPLIT, ["<|endoftext|>"], "<|endoftext|>")
    rank_files.write_rank_file(made, path)
    ids = {name: open_tokenizer(path, pattern=name).encode("1234").tolist() for name in PATTERNS}
    assert ids == {"llama3": [257, 52], "qwen2": [49, 50, 51, 52], "gpt2": [258]}


def test_a_tokenizer_config_numbers_the_special_tokens_of_a_rank_file(bpe, tmp_path):
    """Kimi's folder is of this kind."""
    rank_files.write_rank_file(bpe, str(tmp_path / "tiktoken.model"))
    rows = {"600": {"content": "[BOS]"}, "601": {"content": "[EOS]"}, "650": {"content": "<|x|>"}}
    config = {"added_tokens_decoder": rows, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tok = open_tokenizer(str(tmp_path), pattern="o200k")
    assert (tok.bos_id, tok.eot_id, tok.n_vocab) == (600, 601, 651)
    assert open_tokenizer(str(tmp_path), pattern="o200k", end="<|x|>").eot_id == 650


def test_kimi_cuts_ideographs_from_other_letters(tmp_path):
    """The published file itself was compared with another implementation by hand."""
    letters = [bytes([byte]) for byte in range(256)]
    joined = "\u6587".encode()
    path = tmp_path / "tiktoken.model"
    merged = [*letters, joined[:2], joined, joined + b"e"]
    rank_files.write_rank_file(tokenizer.Tokenizer(merged, "", ["<e>"], "<e>"), str(path))
    assert open_tokenizer(str(path), pattern="o200k").encode("\u6587e").tolist() == [258]
    assert open_tokenizer(str(path), pattern="kimi").encode("\u6587e").tolist() == [257, 101]
    assert "kimi" in rank_files.DIGESTS.values()


def test_files_that_are_no_rank_files(bpe, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>")
    with pytest.raises(InputError, match="a SentencePiece model, .* the one published with"):
        open_tokenizer(str(path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=f"instead: {tmp_path}/tokenizer.json"):
        open_tokenizer(str(path))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 2183982\n"
    for name in (path.name, "tokenizer.json"):
        (tmp_path / name).write_bytes(pointer)
        with pytest.raises(InputError, match="git lfs pull"):
            open_tokenizer(str(tmp_path / name))


def test_merges_without_their_prefix_do_not_end_the_process(document, tmp_path):
    """tokenizers cuts the prefix off any text, and aborts inside a character."""
    damaged = json.loads(document)
    damaged["model"]["continuing_subword_prefix"] = "x"
    folder = write(tmp_path / "a", json.dumps(damaged))
    with pytest.raises(InputError, match="continuing_subword_prefix = 'x', and the merge .* with"):
        open_tokenizer(str(folder))


def test_a_published_rank_file_is_known_by_its_digest():
    name, other = "llama3", "llama4"
    path = published(name) / "tokenizer.model"
    tok = open_tokenizer(str(path))
    known = rank_files.KNOWN_RANK_FILES[name]
    assert (tok.split, len(tok.ranks)) == (known.split, known.ranks)
    assert (tok.end_of_text, tok.begin_of_text) == ("<|end_of_text|>", "<|begin_of_text|>")
    assert (tok.bos_id, tok.eot_id) == (known.ranks, known.ranks + 1)
    ids = dict(zip(tok.special_tokens, tok.special_ids))
    assert (tok.n_vocab, ids["<|eot_id|>"]) == (128_256, known.ranks + 9)
    with pytest.raises(InputError, match=f"whose pattern is {name}: leave the option out"):
        open_tokenizer(str(path), pattern=other)


# ---- Mistral


def tekken(special: list | None = None) -> dict:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"not in the vocabulary"]
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": tokenizer.SPLIT_O200K,
        "num_vocab_tokens": len(rows),
        "default_vocab_size": 288,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    return {"config": config, "vocab": rows} | ({"special_tokens": special} if special else {})


def test_tekken_numbers_special_tokens_first(tmp_path):
    """Compared once with mistral_common 1.13.1 on its own two files: all ids equal."""
    path = tmp_path / "mistral.json"  # known by its content
    path.write_text(json.dumps(tekken()))
    tok = open_tokenizer(str(path))
    assert tok.encode("abc ab a").tolist() == [287, 62, 286, 62, 127]
    assert (tok.bos_id, tok.eot_id, tok.n_vocab) == (1, 2, 288)
    assert tok.decode([1, 287, 3, 29]) == "<s>abc[INST]<SPECIAL_29>"
    assert open_tokenizer(str(path), end="[/INST]").eot_id == 4
    rows = [{"rank": i, "token_str": name} for i, name in enumerate(["<s>", "</s>", "<x>"])]
    path.write_text(json.dumps(tekken(rows)))
    tok = open_tokenizer(str(path))
    assert (tok.bos_id, tok.eot_id, tok.decode([2, 3])) == (0, 1, "<x><SPECIAL_3>")
    damaged = tekken()
    del damaged["vocab"][100]
    for content, words in (
        (json.dumps(damaged), "100 is missing"),
        ('{"config": {"default_num_special_tokens": 3}}', "is not a whole tekken.json"),
        (json.dumps(tekken([{"rank": 0, "token_str": "<s>"}])), "its special tokens are not 30"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=words):
            open_tokenizer(str(path))


# ---- what is kept of a large file


def test_a_large_file_is_proved_once(document, tmp_path, monkeypatch):
    """A file is proved again when anything that the proof depends on changes, or when the kept
    proof is damaged."""
    monkeypatch.setattr("data.kept_proofs.LEAST", 0)
    prove, proofs = hf_tokenizer.prove, []
    monkeypatch.setattr(hf_tokenizer, "prove", lambda *given: proofs.append(1) or prove(*given))
    path, cache = write(tmp_path / "a", document), tmp_path / "cache"
    fresh = hf_tokenizer.read_file(path, "<|im_end|>")

    def proved(end: str = "<|im_end|>") -> int:
        before = len(proofs)
        tok = open_tokenizer(str(path), str(cache), end=end)
        assert (tok.end_of_text, tok.engine) == (end, "tiktoken")
        assert (tok.fingerprint == fresh.fingerprint) == (end == "<|im_end|>")
        assert tok.document == json.loads(document)
        assert tok.encode(TEXT).tolist() == fresh.encode(TEXT).tolist()
        return len(proofs) - before

    assert [proved(), proved()] == [1, 0]
    assert [proved("</s>"), proved(), proved("</s>")] == [1, 0, 0]
    write(tmp_path / "a", document, **{CONFIG: {"bos_token": "<s>", "x": 1}})
    assert open_tokenizer(str(path), str(cache), end="</s>").companions[f"{CONFIG}.json"]["x"] == 1
    assert proved() == 0
    for kept_file in cache.iterdir():
        content = bytearray(kept_file.read_bytes())
        content[len(content) // 2] ^= 1
        kept_file.write_bytes(content)
    assert [proved(), proved()] == [1, 0]
    path.write_text(document + "\n")
    assert [proved(), proved()] == [1, 0]
    monkeypatch.setattr("data.kept_proofs.CODE", ("proved.py",))
    kept_proofs._code.cache_clear()
    assert [proved(), proved()] == [1, 0]
    kept_proofs._code.cache_clear()
    cache.rename(tmp_path / "away")
    cache.write_text("no folder")
    assert [proved(), proved()] == [1, 1]
