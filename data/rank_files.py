"""Reads and writes tiktoken rank files: one line for each token, of its bytes and its rank.

A rank file contains neither the pattern that cuts text nor the special tokens, and another pattern
gives other ids without any error. So a file is read only if its pattern is known from one of these,
in this order: its digest, for the published ones (DIGESTS); a `tokenizer.json` of the same ranks in
the same folder, as data/train_tokenizer.py writes; `data.tokenizer_pattern`.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from pathlib import Path
from typing import NamedTuple

import tiktoken

from configs.schema import InputError
from data import ends, hf_tokenizer
from data.tokenizer import (
    END_OF_TEXT,
    SPLIT,
    SPLIT_CL100K,
    SPLIT_GPT2,
    SPLIT_KIMI,
    SPLIT_O200K,
    SPLIT_QWEN2,
    Tokenizer,
    gpt2_bytes,
)
from reliability.disk import LFS_POINTER

# Llama 3's 256 special tokens, in the order of their ids from 128000 (meta-llama/llama3,
# llama/tokenizer.py). Llama 3.1 gave names to some of the reserved ones; their ids, and the meaning
# of all others, stayed.
LLAMA3_SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
]


def _reserved(count: int, room: str = "", first: int = 0) -> list[str]:
    return [f"<|{room}reserved_special_token_{i}|>" for i in range(first, first + count)]


def _llama4_special_tokens() -> list[str]:
    """Return the 2,048 special tokens of Llama 4, in the order of their ids from 200000
    (meta-llama/llama-models)."""
    text, vision, reasoning = "text_post_train_", "vision_", "reasoning_"
    named = [
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
        *_reserved(6, text),
        *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
        *_reserved(61, text, 8),
        *("<|image_start|>", "<|image_end|>"),
        *_reserved(2, vision),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        *_reserved(4, vision, 2),
        "<|image|>",
        *_reserved(1, vision, 6),
        "<|patch|>",
        *_reserved(1041, vision, 7),
        *_reserved(8, reasoning),
        *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
    ]
    return [*named, *_reserved(2048 - len(named))]


class RankFile(NamedTuple):
    """Facts about a published rank file that the file itself does not contain."""

    split: str
    ranks: int
    special_tokens: dict[str, int]  # name -> id
    end_of_text: str
    nfc: bool = False  # text is normalised before it is cut
    # the special tokens are those of the tokenizer_config.json in its folder: other models of these
    # ranks have others
    named_in_config: bool = False


def _numbered(names: list[str], first: int) -> dict[str, int]:
    return {name: first + i for i, name in enumerate(names)}


# The names that data.tokenizer_pattern knows. Sources: meta-llama/llama3, meta-llama/llama-models,
# QwenLM/Qwen (tokenization_qwen.py), moonshotai/Kimi-K2-Base (tokenization_kimi.py), and openai/tiktoken
# (tiktoken_ext/openai_public.py).
KNOWN_RANK_FILES = {
    "llama3": RankFile(
        SPLIT, 128_000, _numbered(LLAMA3_SPECIAL_TOKENS, 128_000), "<|end_of_text|>"
    ),
    "llama4": RankFile(
        SPLIT_O200K, 200_000, _numbered(_llama4_special_tokens(), 200_000), "<|end_of_text|>"
    ),
    "qwen2": RankFile(
        SPLIT_QWEN2,
        151_643,
        _numbered(
            [END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))],
            151_643,
        ),
        END_OF_TEXT,
        nfc=True,
    ),
    "gpt2": RankFile(SPLIT_GPT2, 50_256, {END_OF_TEXT: 50_256}, END_OF_TEXT),
    "cl100k": RankFile(
        SPLIT_CL100K,
        100_256,
        {
            END_OF_TEXT: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        END_OF_TEXT,
    ),
    "o200k": RankFile(
        SPLIT_O200K, 199_998, {END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018}, END_OF_TEXT
    ),
    "kimi": RankFile(
        SPLIT_KIMI,
        163_584,
        _numbered(["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"], 163_584),
        "[EOS]",
        named_in_config=True,
    ),
}
# SHA-256 of the published files. tiktoken's are those that it compares downloads with.
DIGESTS = {
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": "llama3",
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": "llama4",
    # the ranks of Qwen3's tokenizer.json, which are Qwen's of the first day
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": "qwen2",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": "gpt2",
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": "cl100k",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": "o200k",
    "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103": "kimi",
}


def read_rank_file(path: str) -> bytes:
    """Read the file, without parsing it. InputError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(
            f'data.tokenizer: {path} cannot be read ({error.strerror}); give "bpe", "bytes", '
            '"hf:OWNER/NAME", or the path of a folder, of a tokenizer.json or of a tiktoken rank file'
        ) from error


def from_rank_file(path: str, pattern: str = "", end: str = "") -> Tokenizer:
    """Build the tokenizer of a tiktoken rank file, which has one `<base64 of the token> <rank>` per
    line.

    pattern, end: data.tokenizer_pattern and data.end_token. InputError: it is no rank file, or
    nothing says its pattern.
    """
    content = read_rank_file(path)
    ranks = _ranks(path, content)
    name = DIGESTS.get(_digest(content)) or DIGESTS.get(_digest(b"".join(_lines(ranks))))
    if name:
        if pattern not in ("", name, KNOWN_RANK_FILES[name].split):
            raise InputError(
                f"data.tokenizer_pattern: {path} is the published file whose pattern is {name}: "
                "leave the option out"
            )
        known = KNOWN_RANK_FILES[name]
        if known.named_in_config and ends.added_tokens(Path(path).parent):
            return _with_added_tokens(path, ranks, known.split, end)
        return _with_special_tokens(ranks, known, end)
    if not pattern:
        return _from_tokenizer_json(path, ranks, end)
    known = KNOWN_RANK_FILES.get(pattern)
    if known and len(ranks) == known.ranks and ranks[:256] == gpt2_bytes():
        return _with_special_tokens(ranks, known, end)
    split = known.split if known else _checked_pattern(pattern)
    return _with_added_tokens(path, ranks, split, end)


def _ranks(path: str, content: bytes) -> list[bytes]:
    lines = [line.split() for line in content.splitlines() if line.strip()]
    try:
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except ValueError as error:
        raise InputError(f"data.tokenizer: {path} is {_instead(path, content)}") from error
    ranks = [tokens.get(rank, b"") for rank in range(len(lines))]
    if len(set(ranks) - {b""}) != len(lines) or not {bytes([i]) for i in range(256)} <= set(ranks):
        raise InputError(
            f"data.tokenizer: {path} is damaged: {len(lines)} ranks must be 0 to {len(lines) - 1}, "
            "each of a different token, all 256 single bytes among them"
        )
    return ranks


def _instead(path: str, content: bytes) -> str:
    """Name the kind of file that was given as a rank file, with advice."""
    if content.startswith(LFS_POINTER):
        return "a pointer of Git LFS in place of the file: fetch it with git lfs pull"
    if content[:1] != b"\n" or b"<unk>" not in content[:1000]:
        return (
            "not a tiktoken rank file (lines of base64 and rank); give the tokenizer.json of the "
            "same model"
        )
    document = Path(path).parent / "tokenizer.json"
    found = str(document) if document.is_file() else "the one published with this model"
    return f"a SentencePiece model, which is not read; give its tokenizer.json instead: {found}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _lines(ranks: list[bytes]) -> list[bytes]:
    """Format ranks as the lines of a published file, in their order."""
    return [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]


def _with_special_tokens(ranks: list[bytes], known: RankFile, end: str) -> Tokenizer:
    names = list(known.special_tokens)
    ids = [*range(len(ranks)), *known.special_tokens.values()]
    end = ends.check_end(end, names) if end else known.end_of_text
    tok = Tokenizer(ranks, known.split, names, end, ids)
    if not known.nfc:
        return tok
    document = hf_tokenizer.files(tok, 0)["tokenizer.json"] | {"normalizer": {"type": "NFC"}}
    return hf_tokenizer.opened(document, (None, end), {})


def _from_tokenizer_json(path: str, ranks: list[bytes], end: str) -> Tokenizer:
    """Read a tokenizer.json of the same ranks. Raises InputError if there is none."""
    document = Path(path).parent / "tokenizer.json"
    found = hf_tokenizer.read_file(document, end) if document.is_file() else None
    if found and found.proved and found.proved.proof.ranks == ranks:
        return found
    raise InputError(
        f"data.tokenizer: {path} ({len(ranks):,} ranks) does not say how it cuts text, and is none "
        f"of the known files: set data.tokenizer_pattern to one of {', '.join(KNOWN_RANK_FILES)}, "
        "or to a regular expression (llama3 is that of python -m data.train_tokenizer)"
    )


def _with_added_tokens(path: str, ranks: list[bytes], split: str, end: str) -> Tokenizer:
    """Build the tokenizer with the special tokens of the tokenizer_config.json in the same folder
    (added_tokens_decoder, as Kimi's), or else with <|endoftext|> alone."""
    folder = Path(path).parent
    added = ends.added_tokens(folder)
    added = {id: name for id, name in sorted(added.items()) if id >= len(ranks)}
    if not added:
        names = [END_OF_TEXT]
        return Tokenizer(ranks, split, names, ends.check_end(end or END_OF_TEXT, names))
    begin, end = ends.begin_and_end(folder, added, end)
    ids = [*range(len(ranks)), *added]
    return Tokenizer(ranks, split, list(added.values()), end, ids, begin)


def _checked_pattern(pattern: str) -> str:
    """Check the regular expression of data.tokenizer_pattern. tiktoken drops the text between two
    matches, so a pattern that leaves characters out would lose text. Raises InputError for such a
    one."""
    letters = [chr(code) for code in range(0x11000) if not 0xD800 <= code < 0xE000]
    text = "".join(letter for letter in letters if unicodedata.category(letter) != "Cn")
    texts = [text, " ".join(text), "a1  \n\n b's \t\r\n--__ 12345 \u65e5\u672c\n "]
    try:
        ranks = {bytes([byte]): byte for byte in range(256)}
        bpe = tiktoken.Encoding(
            "pattern", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        kept = all(bytes(bpe.encode_ordinary(text)) == text.encode() for text in texts)
        reason = "it does not match every character of a text"
    except ValueError as error:
        kept, reason = False, str(error)
    if not kept:
        raise InputError(
            f"data.tokenizer_pattern: {pattern!r} is neither one of {', '.join(KNOWN_RANK_FILES)} "
            f"nor a regular expression that cuts text: {reason}"
        )
    return pattern


def write_rank_file(tok: Tokenizer, path: str) -> None:
    """Write the ranks as a tiktoken file. It does not say the pattern."""
    Path(path).write_bytes(b"".join(_lines(tok.ranks)))
