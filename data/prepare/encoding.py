"""Turns one document into tokens, and many documents with several threads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configs.schema import Data, InputError
from data import answers, sources, tokenizer
from data.prepared import SPLITS

# text that a thread gets at a time; at this size handing it over costs nothing measurable
BATCH_BYTES = 256_000


def encode(
    cfg: Data,
    tok: tokenizer.Tokenizer,
    text: str,
    change: dict,
    form: answers.Format | None = None,
) -> tuple[int, float, list | str]:
    """(bytes of the document, its score in [0, 1), [(split, token ids, answers), ...]). A document
    that cannot be used has, in place of the list, a problem as in sources.Document. answers: bool,
    which tokens are of one; None for text. `change`: see job.change_of_sides. form: None for text;
    otherwise `text` is a line in that format."""
    if form is not None:
        return _encode_answers(cfg, text, change, form)
    data = text.encode()
    if cfg.max_document_bytes and len(data) > cfg.max_document_bytes:
        return len(data), 0.0, sources.TOO_LONG
    score = _score(data)
    split = _side(cfg, score, change)
    texts = (
        [(split, text)]
        if not change.get("cut")
        else list(zip(SPLITS, _cut(text, cfg.validation_fraction)))
    )
    begin = np.array([tok.bos_id] if cfg.add_bos else [], tok.dtype)
    end = np.array([tok.eot_id] if cfg.add_eos else [], tok.dtype)
    try:
        rows = [
            (split, np.concatenate([begin, tok.encode(text), end]), None) for split, text in texts
        ]
    except tokenizer.CannotEncode as error:
        return len(data), score, f"cannot be tokenised: {error}"
    except BaseException as error:  # a panic of tiktoken is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return len(data), score, f"cannot be tokenised: {error}"
    return len(data), score, rows


def _encode_answers(
    cfg: Data, line: str, change: dict, form: answers.Format
) -> tuple[int, float, list | str]:
    """`encode` of a line of conversations."""
    made = answers.example(form, line)
    if isinstance(made, str):
        return len(line), 0.0, made
    if cfg.max_document_bytes and made.bytes > cfg.max_document_bytes:
        return made.bytes, 0.0, sources.TOO_LONG
    if change.get("cut"):
        raise InputError(
            "data.source: all its conversations are the same, so none can be held out: set "
            "data.validation_fraction = 0"
        )
    score = _score(made.text.encode())
    return made.bytes, score, [(_side(cfg, score, change), made.ids, made.answers)]


def _score(data: bytes) -> float:
    """A number in [0, 1) that follows from the text of a document alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48


def _side(cfg: Data, score: float, change: dict) -> str:
    """The split of a document."""
    held_out = score < cfg.validation_fraction or score == change.get("low")
    return SPLITS[held_out and score != change.get("high")]


def _cut(text: str, fraction: float) -> tuple[str, str]:
    """Cut the only text of a corpus in two: about 1 - fraction of it, up to the end of a line, and
    the held-out tail."""
    if len(text) < 2:
        raise InputError("data.source: its only text has 1 character: too little to train on")
    wanted = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    end = text.rfind("\n", 0, wanted) + 1 or wanted
    return text[:end], text[end:]


def encode_all(
    cfg: Data,
    tok: tokenizer.Tokenizer,
    documents: Iterator[tuple[int, sources.Document]],
    change: dict,
    threads: int,
    form: answers.Format | None = None,
) -> Iterator[tuple]:
    """(file, document, *encode(document)) for each (file, document), in order. Encoding releases
    the GIL, so `threads` threads share the work. Few documents are in memory at a time."""
    tok.encode("")  # builds, once, what the threads share

    def encoded(batch: list) -> list[tuple]:
        return [
            (file, document, *encode(cfg, tok, document.text, change, form))
            for file, document in batch
        ]

    if threads <= 1:
        for batch in _batches(documents):
            yield from encoded(batch)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque()
        try:
            for batch in _batches(documents):
                waiting.append(pool.submit(encoded, batch))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(documents: Iterator[tuple[int, sources.Document]]) -> Iterator[list]:
    """The documents, in lists of about BATCH_BYTES of text."""
    batch, size = [], 0
    for item in documents:
        batch.append(item)
        size += len(item[1].text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch
