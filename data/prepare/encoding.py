"""Turns one document into tokens, and many documents with several threads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from configs.schema import Data, InputError
from data import answers, fim, sources, tokenizer
from data.prepared import SPLITS

# text that a thread gets at a time; at this size handing it over costs nothing measurable
BATCH_BYTES = 256_000


def encode(
    cfg: Data,
    tok: tokenizer.Tokenizer,
    text: str,
    change: dict,
    form: answers.Format | None = None,
    ids: np.ndarray | None = None,
) -> tuple[int, float, list | str]:
    """Encode a document as (bytes of the document, its score in [0, 1), [(split, token ids,
    answers, sizes), ...]). A document that cannot be used has, in place of the list, a problem as
    in sources.Document. answers: bool, which tokens are of one; None for text. sizes: bytes of each
    token, or None (see `is_sized`). `change`: see job.change_of_sides. form: None for text;
    otherwise `text` is a line in that format. ids: of the text, if they are known."""
    if form is not None:
        return _encode_answers(cfg, tok, text, change, form)
    data = text.encode()
    if cfg.max_document_bytes and len(data) > cfg.max_document_bytes:
        return len(data), 0.0, sources.TOO_LONG
    score = _score(data)
    split = _side(cfg, score, change)
    texts = [(split, text)]
    if change.get("cut"):
        ids = None
        texts = list(zip(SPLITS, _cut(text, cfg.validation_fraction)))
    try:
        rows = [_row(cfg, tok, split, text, ids) for split, text in texts]
    except tokenizer.CannotEncode as error:
        return len(data), score, f"cannot be tokenised: {error}"
    except BaseException as error:  # a panic of tiktoken is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return len(data), score, f"cannot be tokenised: {error}"
    return len(data), score, rows


def check_tokens(cfg: Data, tok: tokenizer.Tokenizer) -> None:
    """Raise InputError if the options need tokens that the tokenizer does not have."""
    if cfg.add_bos and tok.bos_id is None:
        raise InputError(
            f"data.add_bos: the tokenizer {cfg.tokenizer} has no token that begins a text"
        )
    fim.options(cfg, tok)


def is_sized(cfg: Data, tok: tokenizer.Tokenizer, split: str) -> bool:
    """Return whether the split gets a table of the bytes of each token: where a run may validate on
    it and the ids alone do not tell them."""
    return not tok.exact_lengths and (split == "validation" or not cfg.validation_fraction)


def _row(
    cfg: Data, tok: tokenizer.Tokenizer, split: str, text: str, ids: np.ndarray | None
) -> tuple:
    """Build one row of `encode`. ids: of the text, if they are known and nothing is cut."""
    sizes = None
    sized = is_sized(cfg, tok, split)
    rearranged = fim.pieces(cfg, tok, text) if split == "train" else None
    if rearranged:
        ids, sizes = fim.encode(tok, rearranged)
    elif sized:
        ids, sizes = tok.encode_with_bytes(text)
    elif ids is None:
        ids = tok.encode(text)
    sizes = np.pad(sizes, (int(cfg.add_bos), int(cfg.add_eos))) if sized else None
    begin = np.array([tok.bos_id] if cfg.add_bos else [], tok.dtype)
    end = np.array([tok.eot_id] if cfg.add_eos else [], tok.dtype)
    return split, np.concatenate([begin, ids, end]), None, sizes


def _encode_answers(
    cfg: Data, tok: tokenizer.Tokenizer, line: str, change: dict, form: answers.Format
) -> tuple[int, float, list | str]:
    """Encode a line of conversations, as `encode` does a text."""
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
    split = _side(cfg, score, change)
    sizes = made.sizes if is_sized(cfg, tok, split) else None
    return made.bytes, score, [(split, made.ids, made.answers, sizes)]


def _score(data: bytes) -> float:
    """Return a number in [0, 1) that depends on the text of a document alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48


def _side(cfg: Data, score: float, change: dict) -> str:
    """Return the split of a document."""
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
    """Yield (file, document, *encode(document)) for each (file, document), in order. Encoding
    releases the GIL, so `threads` threads share the work. Few documents are in memory at a time."""
    with suppress(tokenizer.CannotEncode):
        tok.encode("a")  # builds, once, what the threads share

    def encoded(batch: list) -> list[tuple]:
        known = _ids_of_batch(cfg, tok, batch) if form is None else [None] * len(batch)
        return [
            (file, document, *encode(cfg, tok, document.text, change, form, ids))
            for (file, document), ids in zip(batch, known, strict=True)
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


def _ids_of_batch(cfg: Data, tok: tokenizer.Tokenizer, batch: list) -> Sequence[np.ndarray | None]:
    """Encode a batch at once by the library; None for what is encoded one by one."""
    none = [None] * len(batch)
    if tok.engine == "tiktoken" or is_sized(cfg, tok, "train"):
        return none
    limit = cfg.max_document_bytes or float("inf")
    if any(len(document.text) > limit for _, document in batch):
        return none
    try:
        return tok.encode_batch([document.text for _, document in batch])
    except (tokenizer.CannotEncode, UnicodeEncodeError):
        return none  # `encode` says which


def _batches(documents: Iterator[tuple[int, sources.Document]]) -> Iterator[list]:
    """Group the documents into lists of about BATCH_BYTES of text."""
    batch, size = [], 0
    for item in documents:
        batch.append(item)
        size += len(item[1].text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch
