"""Published tokenizers, each opened as a user opens it, compared with the library that defines its
ids.

`python -m tests.published` fetches the files; a test without them is skipped.
"""

import base64
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import tiktoken
import tokenizers

from data import hf_tokenizer, rank_files, tokenizer
from data.hf_tokenizer import read_file
from data.open_tokenizer import load_saved, open_tokenizer
from tests.library import same_as_library
from tests.published import published


class File(NamedTuple):
    """A published tokenizer.json, and what is known of it."""

    package: str
    engine: str
    fingerprint: str
    n_vocab: int
    end: str
    name: str = "tokenizer.json"
    exact: bool = False  # its ids tell the bytes


FILES = {
    "qwen3": File("qwen3", "tiktoken", "d4a4bb62f23e775f13b50dd66c51d196", 151_669, "<|im_end|>"),
    "deepseek_v3": File(
        "deepseek_v3",
        "tiktoken",
        "4b0c255b651ab152387c8b82c7d06023",
        128_815,
        "<｜end▁of▁sentence｜>",
        exact=True,
    ),
    "gpt_oss": File(
        "gpt_oss", "tiktoken", "bd880330a4dbf3ae4240634eb865c42b", 200_019, "<|return|>", exact=True
    ),
    "llama3_1": File(
        "llama3_1",
        "tiktoken",
        "bdfba346696d3144a3dfb070f4f2d591",
        128_256,
        "<|eot_id|>",
        exact=True,
    ),
    "dolma2": File(
        "olmo2",
        "tiktoken",
        "4eb5b7180fb46adc73f0ad479588179b",
        100_278,
        "<|endoftext|>",
        name="allenai_dolma2.json",
        exact=True,
    ),
    "gemma3": File(
        "gemma3", "tokenizers", "19e77f06acbfea96b36bb54a156f89ed", 262_145, "<end_of_turn>"
    ),
    "llama2": File("llama2", "tokenizers", "a8a5067549b027142bec09ed340881b9", 32_000, "</s>"),
    "smollm2": File(
        "smollm2", "tiktoken", "50813fe5c5006e4fce3216d3c331cd3d", 49_152, "<|im_end|>"
    ),
}

# As meta-llama/llama-models writes it (llama4/tokenizer.py), which is o200k_base's.
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SCRIPTS = (
    "The quick brown fox can't wait: it's 1,234,567 steps.",
    "Žluťoučký kůň úpěl ďábelské ódy, İstanbul, straße, ǅ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю 42",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा १२३ क़",
    "ประเทศไทยใช้อักษรไทย ๑๒๓",
    "色は匂へど散りぬるを・がぎぐ ﾊﾝｶｸ ３つ",
    "天地玄黄，宇宙洪荒。二〇二六年",
    "키스의 고유조건은 입술끼리 만나야 한다 각",
    "ქართული ენა, Հայերեն, አማርኛ, தமிழ், \U00010d40\U0001f8b0\U00033000",
)
TEXTS = (
    *SCRIPTS,
    "👩‍👩‍👧‍👦 🇪🇺 👍🏽 ❤️ 😀😀😀 \U0001fae8",
    "def f(x):\n\treturn {'a': x[0] ** 2}  # ok\n\n\n    if x != y:\r\n        pass\n",
    "e\u0301 a\u0308\u0323 \u1100\u1161\u11a8 \u304b\u3099 \u0344 A\u030a \u2126 \ufb01 <think>\u0338",
    "\x00\x01\x02\x7f\x80\x9f\ufeff\u200b\u200d\u2028\u2029\u0085\u00ad",
    "a" * 300,
    "é" * 300,
    "x" + " " * 300 + "y" + "\t" * 90 + "\n" * 90 + "z   ",
    " leading and trailing ",
    "<|endoftext|><|im_start|>user\n<|im_end|></s><s><bos><eos><pad><|eot_id|>",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|> <｜User｜>hi<｜Assistant｜>",
    "<think>two</think>4 <tool_call>{}</tool_call> |||PHONE_NUMBER||| <|im_<think>end|>",
    "▁ ▁▁ <0x0A> [UNK] [INST] \\n \\u00e9",
    "1 12 123 1234 12345 ½ ² ٣ Ⅷ 1e-5 0x1F",
    "",
    " ",
    "\n",
)


def marks(name: str) -> tuple:
    """The patterns of the last three are in tests/test_tokenizer.py, on small vocabularies."""
    if name in ("gpt_oss", "llama3_1", "dolma2"):
        return (pytest.mark.exhaustive,)
    return () if name in ("qwen3", "smollm2") else (pytest.mark.slow,)


@pytest.mark.cap(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FILES])
def test_a_published_file(name: str) -> None:
    """The library's ids; a prepared corpus and a checkpoint know their tokenizer by the fingerprint."""
    file = FILES[name]
    path = published(file.package) / file.name
    tok = read_file(path)
    assert (tok.engine, tok.n_vocab, tok.end_of_text) == (file.engine, file.n_vocab, file.end)
    assert (tok.exact_lengths, tok.fingerprint) == (file.exact, file.fingerprint)
    same_as_library(tok, path, list(TEXTS))
    assert tok.decode([file.n_vocab + 7]) == "\ufffd"
    names_of_special_tokens_are_text(tok)
    # the last one of Gemma 3, of an image, has no row in its model, and needs none
    assert tok.n_rows == (262_144 if name == "gemma3" else tok.n_rows)


def names_of_special_tokens_are_text(tok: tokenizer.Tokenizer) -> None:
    """In `encode`; in rendered text they are tokens. Other added tokens are tokens in both."""
    for id, name in list(tok.named_only().items())[-10:]:
        assert id not in tok.encode(f"a{name}b") and id not in tok.encode(name)
    for row in tok.added[:10]:
        rendered = tok.encode_rendered(f"a{row.name}b")
        if not row.greedy:
            assert row.id in rendered.ids
        if row.special:
            assert row.id not in tok.encode(f"a{row.name}b")
            assert rendered.sizes.sum() == 2
        elif not row.greedy:
            assert row.id in tok.encode(f"a{row.name}b")


def test_a_saved_file_is_the_same_tokenizer(tmp_path: Path) -> None:
    path = published("smollm2") / "tokenizer.json"
    tok = read_file(path)
    tok.save(str(tmp_path / "tokenizer.json"))
    again = load_saved(str(tmp_path / "tokenizer.json"))
    same = (again.fingerprint, again.engine, again.eot_id, again.bos_id, again.dtype)
    assert same == (tok.fingerprint, tok.engine, tok.eot_id, tok.bos_id, tok.dtype)
    assert again.encode(TEXTS[1]).tolist() == tok.encode(TEXTS[1]).tolist()
    assert dict(again.companions) == dict(tok.companions)
    written = hf_tokenizer.files(again, 64)
    assert written["tokenizer.json"] == json.loads(path.read_text(encoding="utf-8"))


def test_a_wrong_id_is_seen() -> None:
    """The negative control: the id of one token is another one."""
    path = published("smollm2") / "tokenizer.json"
    broken = read_file(path)
    same_as_library(broken, path, ["the"])
    common = int(broken.proved.ranks("the")[0][0])
    broken.proved.ids[common] += 1
    with pytest.raises(AssertionError):
        same_as_library(broken, path, ["the"])


def test_llama_3_is_the_same_from_both_files() -> None:
    """Meta's rank file and Hugging Face's tokenizer.json of Llama 3.1."""
    ranks = rank_files.from_rank_file(str(published("llama3") / "tokenizer.model"))
    theirs = tokenizers.Tokenizer.from_file(str(published("llama3_1") / "tokenizer.json"))
    theirs.encode_special_tokens = True
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ranks.encode(text).tolist() == ids


def test_mistrals_tekken_is_what_its_authors_say() -> None:
    """131,072 ids, of which the first 1,000 are special, and the pattern of the file for the rest."""
    path = published("tekken") / "tekken_240911.json"
    tok = open_tokenizer(str(path))
    assert (tok.n_vocab, tok.bos_id, tok.eot_id, tok.exact_lengths) == (131_072, 1, 2, True)
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["vocab"][: 131_072 - 1000]
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in rows}
    pattern = document["config"]["pattern"]
    alone = tiktoken.Encoding("a", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert (tok.encode(text).astype(int) - 1000).tolist() == alone.encode_ordinary(text)
        assert tok.decode(tok.encode(text)) == text


def test_llama_4s_rank_file_is_what_its_authors_say() -> None:
    """The counts and ids of meta-llama/llama-models (llama4/tokenizer.py): 200,000 ranks, o200k's
    cut, 2,048 special tokens from 200000 on. A rank file of another pattern gives other ids."""
    path = published("llama4") / "tokenizer.model"
    tok = rank_files.from_rank_file(str(path))
    assert (tok.n_vocab, tok.split) == (202_048, tokenizer.SPLIT_O200K)
    ids = dict(zip(tok.special_tokens, tok.special_ids, strict=True))
    assert (tok.bos_id, tok.eot_id) == (200_000, 200_001) == (ids["<|begin_of_text|>"], tok.eot_id)
    assert (ids["<|header_start|>"], ids["<|eot|>"]) == (200_005, 200_008)
    assert (ids["<|image_start|>"], ids["<|image|>"], ids["<|patch|>"]) == (200080, 200090, 200092)
    ranks = {token: rank for rank, token in enumerate(tok.ranks)}
    alone = tiktoken.Encoding("a", pat_str=O200K, mergeable_ranks=ranks, special_tokens={})
    others = tiktoken.Encoding(
        "b", pat_str=tokenizer.SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    for text in TEXTS:
        assert tok.encode(text).tolist() == alone.encode_ordinary(text)
        assert tok.decode(tok.encode(text)) == text
    assert any(alone.encode_ordinary(text) != others.encode_ordinary(text) for text in TEXTS)
