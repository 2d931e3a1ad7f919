"""Turns a line into an `Example`: tokens of which only answers are labels. A `Format` makes it.

The format of completions is here, that of conversations in data/chat.py. data/formats.py chooses
one.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

import numpy as np

from data.records import Twice, once
from data.tokenizer import CannotEncode, Tokenizer


class InvalidExample(ValueError):
    """A record that cannot be trained on. The message goes on after "FILE, line N "."""


class Example(NamedTuple):
    """A record as tokens."""

    text: str  # what decides whether it is held out: the record without what is not read
    bytes: int  # of the text that became tokens
    ids: np.ndarray  # [n], of the tokenizer's dtype
    answers: np.ndarray  # bool [n]: the tokens of answers
    sizes: np.ndarray  # int64 [n]: the bytes of text that each token stands for


class Format(Protocol):
    """Interface of a format: turn the record of a line into tokens."""

    def encode(self, record: dict) -> Example: ...  # raises InvalidExample


class Completions:
    """`prompt` and `completion`. They are tokenised separately, so the prompt has the same tokens
    as at inference."""

    def __init__(self, tok: Tokenizer, add_bos: bool, add_eos: bool) -> None:
        self.tok = tok
        self.begin = np.array([tok.bos_id] if add_bos else [], tok.dtype)
        self.end = np.array([tok.eot_id] if add_eos else [], tok.dtype)

    def encode(self, record: dict) -> Example:
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise InvalidExample('has no text under "prompt" and "completion"')
        if not completion.strip():
            raise InvalidExample("has an empty completion")
        if not prompt:
            raise InvalidExample(
                'has an empty prompt: data.format = "text" is for text without one'
            )
        asked, bytes_asked = self.tok.encode_with_bytes(prompt)
        answer, bytes_answered = self.tok.encode_with_bytes(completion)
        ids = np.concatenate([self.begin, asked, answer, self.end]).astype(self.tok.dtype)
        plain = json.dumps([prompt, completion], ensure_ascii=False)
        size = len((prompt + completion).encode())
        none = (len(self.begin), len(self.end))
        sizes = np.pad(np.concatenate([bytes_asked, bytes_answered]), none)
        is_answer = np.arange(len(ids)) >= len(self.begin) + len(asked)
        return Example(plain, size, ids, is_answer, sizes)


def example(form: Format, line: str) -> Example | str:
    """Encode a line, or return the reason why it cannot be used, as in data/pieces.py::Document."""
    try:
        record = json.loads(line, object_pairs_hook=once)
        if not isinstance(record, dict):
            return "is not a JSON object"
        made = form.encode(record)
    except (InvalidExample, Twice) as error:
        return str(error)
    except CannotEncode as error:
        return f"cannot be tokenised: {error}"
    except (ValueError, RecursionError) as error:
        # not JSON, or half a character (a lone surrogate), which is no text
        return f"is not JSON of text ({error!r:.200})"
    # the first token of a document is never a label
    if not made.answers[1:].any():
        return "has an answer without a token to learn"
    return made
