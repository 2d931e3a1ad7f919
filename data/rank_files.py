"""Reads and writes tiktoken rank files: one line for each token, of its bytes and its rank.

A rank file is the form of Llama 3's and OpenAI's tokenizers. It does not say the pattern that cuts
text, nor the special tokens: KNOWN_RANK_FILES has both for the published ones.
"""

from __future__ import annotations

import base64
import os
from typing import NamedTuple

from configs.schema import InputError
from data.tokenizer import (
    END_OF_TEXT,
    SPLIT,
    SPLIT_CL100K,
    SPLIT_GPT2,
    SPLIT_O200K,
    Tokenizer,
    gpt2_bytes,
)

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


class RankFile(NamedTuple):
    """What a published rank file does not say. Source, except for Llama 3: openai/tiktoken,
    tiktoken_ext/openai_public.py."""

    name: str
    split: str
    special_tokens: dict[str, int]  # name -> id
    end_of_text: str


# By number of ranks. All four number the 256 bytes as GPT-2 did, the printable ones first
# (`gpt2_bytes`). A file of another origin that happens to have as many ranks does not (those of
# rustbpe and `tokenizers` begin with byte 0).
KNOWN_RANK_FILES = {
    50_256: RankFile("GPT-2 (r50k_base)", SPLIT_GPT2, {END_OF_TEXT: 50_256}, END_OF_TEXT),
    100_256: RankFile(
        "cl100k_base",
        SPLIT_CL100K,
        {
            END_OF_TEXT: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        END_OF_TEXT,
    ),
    128_000: RankFile(
        "Llama 3",
        SPLIT,
        {token: 128_000 + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS)},
        "<|end_of_text|>",
    ),
    199_998: RankFile(
        "o200k_base", SPLIT_O200K, {END_OF_TEXT: 199_999, "<|endofprompt|>": 200_018}, END_OF_TEXT
    ),
}

# The files of a published model's folder that are its tokenizer: Hugging Face's, Meta's,
# data/train_tokenizer.py's.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    os.path.join("original", "tokenizer.model"),
    "tokenizer.tiktoken",
)


def read_rank_file(path: str) -> bytes:
    """The content of the file, not parsed: enough to tell whether this file made the tokens in a
    cache."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except IsADirectoryError:
        found = (
            os.path.join(path, name) for name in FILES if os.path.isfile(os.path.join(path, name))
        )
        inside = next(found, "")
        advice = (
            f"name the file in it, {inside}"
            if inside
            else "and none of the files in it is a tokenizer that is known here"
        )
        raise InputError(f"data.tokenizer: {path} is a folder: {advice}") from None
    except OSError as error:
        raise InputError(
            f'data.tokenizer: {path} cannot be read ({error.strerror}); give "bpe", "bytes" or '
            "the path "
            "of a tiktoken rank file or of a tokenizer.json"
        ) from error


def from_rank_file(path: str) -> Tokenizer:
    """The tokenizer of a tiktoken rank file, which has one `<base64 of the token> <rank>` per line.
    Raises InputError if it is not one. KNOWN_RANK_FILES has what the file does not say; any other
    file gets Llama 3's pattern and one special token."""
    lines = [line.split() for line in read_rank_file(path).splitlines() if line.strip()]
    try:
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except ValueError as error:
        raise InputError(
            f"data.tokenizer: {path} is not a tiktoken rank file (lines of base64 and rank); a "
            "SentencePiece model cannot be used"
        ) from error
    ranks = [tokens.get(rank, b"") for rank in range(len(lines))]
    if len(set(ranks) - {b""}) != len(lines) or not {bytes([i]) for i in range(256)} <= set(ranks):
        raise InputError(
            f"data.tokenizer: {path} is damaged: {len(lines)} ranks must be 0 to {len(lines) - 1}, "
            "each of a different token, all 256 single bytes among them"
        )
    known = KNOWN_RANK_FILES.get(len(ranks))
    if not known or ranks[:256] != gpt2_bytes():
        return Tokenizer(ranks, SPLIT, [END_OF_TEXT], END_OF_TEXT)
    ids = [*range(len(ranks)), *known.special_tokens.values()]
    return Tokenizer(ranks, known.split, list(known.special_tokens), known.end_of_text, ids)


def write_rank_file(tok: Tokenizer, path: str) -> None:
    """Write the ranks as a tiktoken file. If the tokenizer was trained here, `from_rank_file` reads
    the same one back."""
    with open(path, "wb") as file:
        file.writelines(
            b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tok.ranks)
        )
