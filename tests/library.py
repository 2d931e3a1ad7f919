"""Compares a `Tokenizer` with Hugging Face's `tokenizers`, and makes small documents of each kind."""

import random
from pathlib import Path

import tokenizers

from data import tokenizer

WORDS = ["".join(random.Random(i).choices("abcdefghijklm", k=2 + i % 7)) for i in range(300)]


def words(seed: int, n: int) -> str:
    """Return a line of n made-up words."""
    return " ".join(random.Random(seed).choices(WORDS, k=n)) + "\n"


def hard_texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)
    letters = (
        "abstABSdlLvVrRmM  "
        "\n\n\t\r019.,;/'ſKéßÅDžʰ日本語한국어\u0301\u00a0\u2028\u0085\u200b\u0660½\U0001f600"
    )
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 30))) for _ in range(n)]
    points = [c for c in rng.sample(range(0x110000), n) if not 0xD800 <= c < 0xE000]
    texts += [
        f"a{chr(c)}b {chr(c)}1 '{chr(c)} \n{chr(c)}  {chr(c).upper()}x"
        for c in [*range(0x300), *points]
    ]
    return texts + [
        "",
        " " * 5000,
        "a" + "\n" * 3000,
        "x" * 5000,
        "  \n \n  a",
        "a\n ",
        "a \n\n  ",
        "don't DON'T we'LL",
        "1234567 1234",
    ]


def added(name: str, id: int, **fields: bool) -> dict:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": name, "special": False} | usual | fields


def same_as_library(tok: tokenizer.Tokenizer, path: Path, texts: list[str]) -> None:
    """Check that ids of text, of rendered text and decoded text are the library's, and every byte
    is counted."""
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    for text in texts:
        theirs.encode_special_tokens = True
        ids = tok.encode(text)
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ids.tolist() == wanted, repr(text[:60])
        assert tok.decode(ids) == theirs.decode(wanted, skip_special_tokens=False)
        again, sizes = tok.encode_with_bytes(text)
        assert again.tolist() == wanted
        assert len(sizes) == len(ids) and sizes.min(initial=0) >= 0
        assert sizes.sum() == (len(text.encode()) if len(ids) else 0), repr(text[:60])
        made = tok.encode_rendered(text)
        theirs.encode_special_tokens = False
        assert made.ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert (made.starts <= made.stops).all() and len(made.sizes) == len(made.ids)
    batch = tok.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tok.encode(text).tolist() for text in texts]


def unigram() -> dict:
    pieces = ["<unk>", "</s>", "\u2581", "\u2581the", "\u2581a", *"abcdefthe", "the", "\u00e9"]
    vocab = [[piece, -float(i)] for i, piece in enumerate(dict.fromkeys(pieces))]
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    return {
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": spaces | {"split": True},
        "decoder": spaces | {"split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False},
    }


def word_piece() -> dict:
    words = ["[UNK]", "</s>", "the", "##s", "a", "##b", "cafe", "!", "."]
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(words)},
        },
    }


def byte_fallback() -> dict:
    """Return a byte-fallback tokenizer like Llama 2's."""
    letters = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "t",
        "h",
        "e",
    ]
    words = [*letters, "th", "the", "\u2581the"]
    pairs = [["t", "h"], ["th", "e"], ["\u2581", "the"]]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": pairs,
        },
    }
