"""Reads the tasks of an evaluation from files, and builds the sequences that a model scores for
them.

A file has one JSON object per line, of one of two kinds:

    multiple_choice   {"context": "The sky is", "choices": ["blue", "square"], "answer": 0}
    perplexity        {"text": "..."}, or with a "context" that is not scored

A question may have a list of contexts, one per choice, and a "group", whose accuracy is then found
too.

Tokenisation, and the choice of scored tokens, follow lm-evaluation-harness 0.4.13, so that both
give the same scores:

- A choice, or a text with a context, follows the context and the task's `delimiter`. Whitespace at
  the end of the context is scored too, as words begin with their space in most vocabularies. Then
  context and choice are encoded together, and the tokens after those of the context alone are scored
  (lm_eval/api/model.py, `_encode_pair`).
- An empty context is the token that begins a text, or ends one if the vocabulary has no such token.
  Other contexts get the tokens that the post-processor of a published tokenizer.json puts before a
  text, such as Llama 3.1's <|begin_of_text|>. Texts in windows have the first of these tokens,
  unscored.
- Sequences longer than the window lose their beginning (lm_eval/models/huggingface.py,
  `_loglikelihood_tokens`). These lines are counted (`EncodedTask.truncated`).
- A text is scored in windows, each token once. The last window reaches back, so that it is full too
  (lm_eval/utils.py, `get_rolling_token_windows`).

Nothing here imports torch: tools/check.py reads the files before a rank starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import EvaluationTask, InputError
from data.records import Twice, once
from data.stores import places
from data.tokenizer import Tokenizer
from reliability.objects import location

SHOWN = 5  # lines that a sentence names


class Question(NamedTuple):
    line: int  # of the file, from 1
    context: str | list[str]  # a list: of each choice
    choices: list[str]
    answer: int  # index of the right choice
    group: str = ""  # of questions that have a score of their own too

    def context_of(self, choice: int) -> str:
        return self.context if isinstance(self.context, str) else self.context[choice]


class Text(NamedTuple):
    line: int
    text: str
    context: str | None = None  # None: the text is scored from its beginning, in windows


class ScoreRequest(NamedTuple):
    """A sequence for the model to score. It reads all tokens but the last one, and the
    log-likelihood of the last `scored` tokens is its score."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class EncodedTask:
    """A task in the tokens of one model."""

    name: str
    kind: str
    rows: list  # of Question or of Text
    # one per choice of each question, or one per window of each text, in the order of the rows
    requests: list[ScoreRequest] = field(default_factory=list)
    row_of_request: list[int] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)  # lines that are longer than the window

    def describe(self, window: int) -> str:
        """Describe the rows that will be scored and those whose context is cut, for the log."""
        text = f"evaluation {self.name}: {len(self.rows)} {UNITS[self.kind]}"
        if not self.truncated:
            return text
        lines = ", ".join(map(str, self.truncated[:SHOWN]))
        more = ", ..." if len(self.truncated) > SHOWN else ""
        return (
            f"{text}; {len(self.truncated)} of them are longer than {window} tokens, and the "
            f"beginning of the context is left out (line {lines}{more})"
        )


UNITS = {"multiple_choice": "questions", "perplexity": "texts"}


def read(task: EvaluationTask) -> list:
    """Read the rows of a task's file. Raises InputError, with file and line."""
    path = os.path.expanduser(task.file)
    parse = PARSERS[task.kind]
    rows = []
    for number, line in _lines(path):
        try:
            rows.append(parse(number, _fields(line)))
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
    if not rows:
        raise InputError(f"{path}: the file of an evaluation has no line")
    return rows


def kind_of(path: str) -> str:
    """Return the kind of a task's file, by its first line. If that is wrong, `read` says why."""
    for _, line in _lines(path):
        with contextlib.suppress(ValueError):
            return "perplexity" if "text" in _fields(line) else "multiple_choice"
        break
    return "multiple_choice"


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a task's file: one row per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, and their numbers."""
    try:
        content = places.read(location(path))
    except OSError as error:
        raise InputError(
            f"{path}: the file of an evaluation cannot be read ({error.strerror}): name a JSONL "
            "file in evaluation.tasks (docs/evaluation.md)"
        ) from None
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield number, line


def _fields(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of the line is not UTF-8") from None
    except Twice as error:
        raise ValueError(f"the line {error}") from None
    except (ValueError, RecursionError):
        raise ValueError("the line is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    return row


def _question(line: int, row: dict[str, Any]) -> Question:
    choices = row.get("choices")
    if isinstance(row.get("context"), list):
        context = _contexts(row["context"], choices)
    else:
        context = _string(row, "context", may_be_empty=True)
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError('"choices" must be a list of two strings or more')
    for number, choice in enumerate(choices):
        _check_string(choice, f"choice {number}")
    group = row.get("group", "")
    if not isinstance(group, str) or not GROUP.fullmatch(group):
        raise ValueError(
            f'"group" must be a name of letters, digits, ".", "_" and "-", and is '
            f"{json.dumps(group)}"
        )
    answer = row.get("answer")
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_index or not 0 <= answer < len(choices):
        raise ValueError(
            f'"answer" must be the index of the right choice, 0 to {len(choices) - 1}, and is '
            f"{json.dumps(answer)}"
        )
    return Question(line, context, choices, answer, group)


GROUP = re.compile(r"[A-Za-z0-9_.-]{0,60}")  # a part of a metric's name


def _contexts(contexts: list, choices: object) -> list[str]:
    """Return one context per choice."""
    if not isinstance(choices, list) or len(contexts) != len(choices):
        raise ValueError('"context" is a list, and must have one context for each choice')
    for number, context in enumerate(contexts):
        if context != "":
            _check_string(context, f"context {number}")
    return contexts


def _text(line: int, row: dict[str, Any]) -> Text:
    if "choices" in row:
        raise ValueError('the line has "text" and "choices": it is a text or a question')
    context = _string(row, "context", may_be_empty=True) if "context" in row else None
    return Text(line, _string(row, "text"), context)


def _string(row: dict[str, Any], key: str, may_be_empty: bool = False) -> str:
    if key not in row:
        found = ", ".join(list(row)[:SHOWN]) or "nothing"
        raise ValueError(f'"{key}" is missing, the line has {found}')
    value = row[key]
    if may_be_empty and value == "":
        return value
    _check_string(value, f'"{key}"')
    return value


def _check_string(value: object, what: str) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has half of a surrogate pair, which is no character") from None


PARSERS = {"multiple_choice": _question, "perplexity": _text}


def open_task(task: EvaluationTask, tokenizer: Tokenizer, window: int) -> EncodedTask:
    """Read and encode a task. window: positions that the model sees at most. Raises InputError for
    a file that is wrong, and for a choice that is longer than the window or has no token of its
    own."""
    opened = EncodedTask(task.name, task.kind, read(task))
    for number, row in enumerate(opened.rows):
        try:
            requests = list(_requests(row, tokenizer, task.delimiter, window))
        except ValueError as error:
            raise InputError(f"{os.path.expanduser(task.file)}:{row.line}: {error}") from None
        if any(len(request.tokens) > window + 1 for request in requests):
            opened.truncated.append(row.line)
        for tokens, scored in requests:
            opened.requests.append(ScoreRequest(tokens[-(window + 1) :], scored))
            opened.row_of_request.append(number)
    return opened


def first(tokenizer: Tokenizer) -> int:
    """Return the token before a text."""
    return tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id


def _requests(
    row: Question | Text, tokenizer: Tokenizer, delimiter: str, window: int
) -> Iterator[ScoreRequest]:
    """Yield the requests of a row, with contexts of any length."""
    if isinstance(row, Question):
        for number, choice in enumerate(row.choices):
            context = row.context_of(number)
            yield _continued(f"choice {number}", context, delimiter + choice, tokenizer, window)
    elif row.context is not None:
        yield _continued("the text", row.context, delimiter + row.text, tokenizer, window)
    else:
        yield from windows(tokenizer.encode(row.text).tolist(), first(tokenizer), window)


def _continued(
    what: str, context: str, continuation: str, tokenizer: Tokenizer, window: int
) -> ScoreRequest:
    before, scored = encode_pair(tokenizer, context, continuation)
    if not scored:
        raise ValueError(
            f"the tokenizer joins {what} with the context, so that none of its tokens is separate: "
            "begin it at a space"
        )
    if len(scored) > window:
        raise ValueError(
            f"{what} has {len(scored)} tokens, and the model sees {window}: shorten it"
        )
    return ScoreRequest(before + scored, len(scored))


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Encode a context, and the continuation that is scored after it."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        return [first(tokenizer)], tokenizer.encode(continuation).tolist()
    before = tokenizer.encode(kept).tolist()
    whole = tokenizer.encode(kept + continuation).tolist()
    return [*tokenizer.put_before, *before], whole[len(before) :]


def windows(tokens: list[int], before: int, window: int) -> Iterator[ScoreRequest]:
    """Yield requests that score each of these tokens once. before: the token before the text."""
    sequence = [before, *tokens]
    for begin in range(0, len(tokens), window):
        stop = min(begin + window, len(tokens))
        earliest = max(0, stop - window)
        yield ScoreRequest(sequence[earliest : stop + 1], stop - begin)
