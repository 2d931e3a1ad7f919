"""Rearrange a share of the documents so that a model learns to fill in the middle (`data.fim_rate`):
Bavarian et al., arXiv:2207.14255.

A document is cut at two random characters into prefix, middle and suffix, before it is tokenised, and
written as <prefix token> prefix <suffix token> suffix <middle token> middle; or, for half of them, as
<prefix token> <suffix token> suffix <middle token> prefix middle (the paper's
second variant of SPM, which has nothing between prefix and middle). Cuts are a hash of the text. So a
corpus is the same wherever it is prepared, and a document is rearranged in the same way in each epoch.
Documents that are held out stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from configs.schema import Data, InputError
from data.tokenizer import Tokenizer

# Tokens before prefix, suffix and middle, as published tokenizers name them.
NAMES = (
    (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ),  # Qwen 2.5 and later, Llama 4, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
NUMBERS = 4  # of a text: is it rearranged, two cuts, in which order
BYTES = 6  # of the hash, for each number
SPM_RATE = 0.5  # share of rearranged documents in which the suffix comes first

Pieces = list[str | int]  # of a document: text, or the id of a token


def check(cfg: Data) -> None:
    """Raise InputError where no tokenizer could rearrange the documents."""
    if not cfg.fim_rate:
        return
    if cfg.format != "text":
        raise InputError(
            f'data.fim_rate rearranges texts, and data.format = "{cfg.format}": set it to 0'
        )
    if cfg.tokenizer == "bpe":
        raise InputError(
            'data.fim_rate: a trained BPE (data.tokenizer = "bpe") has no tokens to fill in the middle: '
            "name a tokenizer that has some"
        )


def tokens(cfg: Data, tok: Tokenizer) -> list[int]:
    """Return the ids of the tokens before prefix, suffix and middle. Raises InputError for a tokenizer
    without them."""
    there = tok.special_tokens
    for names in [cfg.fim_tokens] if cfg.fim_tokens else NAMES:
        if all(name in there for name in names):
            return [tok.special_ids[there.index(name)] for name in names]
    if cfg.fim_tokens:
        lacking = next(name for name in cfg.fim_tokens if name not in there)
        raise InputError(
            f"data.fim_tokens: the tokenizer {cfg.tokenizer} has no special token {lacking!r}"
        )
    known = ", ".join(names[0] for names in NAMES)
    raise InputError(
        f"data.fim_rate: the tokenizer {cfg.tokenizer} has no tokens to fill in the middle that are "
        f"known here ({known}, ...): name three of its special tokens in data.fim_tokens, those before "
        "prefix, suffix and middle"
    )


def pieces(cfg: Data, tok: Tokenizer, text: str) -> Pieces | None:
    """Return the pieces of a document that is rearranged; None for one that stays as it is."""
    if not cfg.fim_rate:
        return None
    digest = hashlib.sha256(b"fill in the middle " + text.encode()).digest()
    chosen, one, other, order = (
        int.from_bytes(digest[BYTES * i : BYTES * (i + 1)], "big") / 2 ** (8 * BYTES)
        for i in range(NUMBERS)
    )
    if chosen >= cfg.fim_rate:
        return None
    first, last = sorted(int(share * (len(text) + 1)) for share in (one, other))
    prefix, middle, suffix = text[:first], text[first:last], text[last:]
    before_prefix, before_suffix, before_middle = tokens(cfg, tok)
    if order < SPM_RATE:
        return [before_prefix, before_suffix, suffix, before_middle, prefix + middle]
    return [before_prefix, prefix, before_suffix, suffix, before_middle, middle]


def encode(tok: Tokenizer, parts: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Encode the pieces of a document: ids [n], and their bytes of text, int64 [n]."""
    ids, sizes = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(np.array([part], tok.dtype))
            sizes.append(np.zeros(1, np.int64))
        else:
            found = tok.encode_with_bytes(part)
            ids.append(found[0])
            sizes.append(found[1])
    return np.concatenate(ids), np.concatenate(sizes)


def options(cfg: Data, tok: Tokenizer) -> list:
    """Return what decides how documents are rearranged, as JSON. Raises what `tokens` raises."""
    return [cfg.fim_rate, SPM_RATE, *tokens(cfg, tok)] if cfg.fim_rate else []


def token_without_row(cfg: Data, tok: Tokenizer, vocab_size: int) -> str:
    """Return which token a model of so many rows lacks, as a clause; "" if it has all."""
    used: Sequence[int] = tokens(cfg, tok) if cfg.fim_rate else []
    lacking = [token for token in used if token >= vocab_size]
    if not lacking:
        return ""
    return (
        f"data.fim_rate writes the token {lacking[0]} of the tokenizer {cfg.tokenizer!r}, and the "
        f"model's vocabulary has only {vocab_size}"
    )
