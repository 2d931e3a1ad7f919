"""Finds the conversations that do not fit into a window, and reports them."""

from __future__ import annotations

from collections.abc import Callable

from configs.schema import Config, InputError
from configs.words import number_of
from data import formats
from data.documents import DocumentIndex
from data.packing import PackedTokens
from data.tokens import Tokens

NAMED = 20  # conversations that a message names


def dropped(tokens: Tokens, seq_len: int) -> list[str]:
    """Write a sentence about each document that is too long for any window."""
    if not isinstance(tokens, PackedTokens):
        return []
    documents = DocumentIndex(tokens)
    lines = []
    for number in tokens.too_long(seq_len).tolist():
        start, stop = documents.extent(number)
        size = int(tokens.are_answers(start, stop).sum())
        lines.append(
            f"{documents.name(number)} has {stop - start} tokens ({size} of answers), a window "
            f"{seq_len + 1}"
        )
    return lines


def check(
    name: str, tokens: Tokens, seq_len: int, allowed: int, log: Callable[[str], object]
) -> list[str]:
    """Say how full the windows of a split are, and which documents are in none; returns the
    sentences about these. Raises InputError if they are more than `allowed`."""
    if not isinstance(tokens, PackedTokens):
        return []
    lines = dropped(tokens, seq_len)
    shown = "; ".join(lines[:NAMED])
    if len(lines) > NAMED:
        shown += f"; and {len(lines) - NAMED} more"
    if len(lines) > allowed:
        raise InputError(
            f"{name}: {len(lines)} conversations of the {tokens.split} split are longer than a "
            f"window, and none is cut: {shown}. Raise training.seq_len, or leave them out with "
            f"data.skip_failed = {len(lines)}"
        )
    if lines:
        said = number_of(len(lines), "conversation")
        log(f"{name}: {said} left out, longer than a window: {shown}")
    windows = tokens.windows(seq_len)
    if not len(windows):
        raise InputError(
            f"{name}: no conversation of the {tokens.split} split fits into a window of "
            f"{seq_len + 1} tokens: raise training.seq_len, or give more conversations"
        )
    used = int((windows[:, 1] - windows[:, 0]).sum())
    log(
        f"{name}: {number_of(len(windows), 'window')} of whole conversations in the {tokens.split} split, "
        f"{used / (len(windows) * (seq_len + 1)):.0%} full"
    )
    return lines


def record(sources: dict, cfg: Config) -> dict:
    """Return the part of data.json about conversations: those that were dropped, for the audit, and
    their format, for data/turns.py."""
    lines = []
    chat: dict = {}
    for source in sources.values():
        lines += dropped(source.train, cfg.training.seq_len)
        described = formats.load(source.train.folder) if isinstance(source.train, Tokens) else {}
        if described.get("format") == "chat":
            chat = chat or described
    return {"mask_documents": cfg.data.mask_documents, "left_out": lines, "chat": chat}
