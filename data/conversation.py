"""Reads the conversation of a line: its messages, and what comes with them.

A line may have more keys than `messages`. Those that `apply_chat_template` of transformers takes go
to the template (`tools`, `documents`, the variables in `chat_template_kwargs`). Those that carry
content for the model and would be lost are refused, unless data.chat_may_drop names them. All
others (an id, a source, a score) only describe the line.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from data.answers import InvalidExample

MESSAGES, SHARE_GPT = "messages", "conversations"
EMPTY = (None, [], {})  # what a key of a message may have that says nothing; 0 and false do
GIVEN = ("tools", "documents")
VARIABLES = "chat_template_kwargs"
SAYING = (
    *("system", "system_prompt", "system_message", "developer", "instruction", "instructions"),
    *("prompt", "context", "functions", "function_call", "tool_choice", "response_format"),
    *("image", "images", "audio", "audios", "video", "videos"),
    *("reasoning", "reasoning_content", "thinking", "enable_thinking"),
)
# keys whose values name a kind or link things, which templates render in words of their own or not
UNSAID = ("role", "type", "id", "index", "tool_call_id")
# of ShareGPT's "from"
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Conversation(NamedTuple):
    """A conversation, as its template gets it."""

    messages: list[dict]
    given: dict[str, Any]  # further variables of the template


def read(
    record: dict, reads: Collection[str], tokens: Collection[str], may_drop: Collection[str]
) -> Conversation:
    """Read the conversation of a line. reads: the variables that its template reads; tokens: those
    of them that are special tokens; may_drop: data.chat_may_drop. Raises InvalidExample."""
    messages = messages_of(record, may_drop)
    given = {key: list_of_objects(record[key], key) for key in GIVEN if record.get(key)}
    own = {"messages", "add_generation_prompt", *GIVEN, *tokens}
    given |= _variables(record, reads, own, may_drop)
    for key in record.keys() & (set(reads) - own):
        if key != VARIABLES and record[key] is not None and key not in may_drop:
            raise InvalidExample(
                f'has "{key}" outside of its messages, which its template reads: put it under '
                f'"{VARIABLES}"'
            )
    _check_the_rest(record, messages, may_drop)
    return Conversation(messages, given)


def _variables(
    record: dict, reads: Collection[str], own: Collection[str], may_drop: Collection[str]
) -> dict:
    variables = record.get(VARIABLES) or {}
    if not isinstance(variables, dict):
        raise InvalidExample(f'has "{VARIABLES}" that are no object')
    # a table of lines with other variables has null here
    found = {name: value for name, value in variables.items() if value is not None}
    for name in found:
        if name in own:
            raise InvalidExample(
                f'has "{name}" in "{VARIABLES}", which every conversation has already'
            )
        if name not in reads and VARIABLES not in may_drop:
            raise InvalidExample(
                f'has "{name}" in "{VARIABLES}", which its template does not read: '
                f"{advice(VARIABLES)}"
            )
    return found


def _check_the_rest(record: dict, messages: list[dict], may_drop: Collection[str]) -> None:
    """Raise InvalidExample for a key that says something to the model which no message says."""
    said = " ".join(text for message in messages for text in texts_of(message))
    for key in SAYING:
        value = record.get(key)
        is_copy = isinstance(value, str) and value.strip() in said
        if value and not is_copy and key not in may_drop:
            raise InvalidExample(
                f'has "{key}" outside of its messages, which no template gets: say it in a message, '
                f"or {advice(key)}"
            )


def messages_of(record: dict, may_drop: Collection[str] = ()) -> list[dict]:
    """Return the messages of a line, in ShareGPT's form too. Raises InvalidExample for messages
    that no template could report: an answer that is empty, or a part of a message that is no
    text."""
    messages = _named_messages(_rows(record), may_drop)
    others = record.get(SHARE_GPT)
    if MESSAGES in record and others and SHARE_GPT not in may_drop:
        if not isinstance(others, list) or _named_messages(others, may_drop) != messages:
            raise InvalidExample(
                f'has other messages under "{SHARE_GPT}" than under "{MESSAGES}": keep one of both, '
                f"or {advice(SHARE_GPT)}"
            )
    return messages


def _rows(record: dict) -> list:
    """Return the list of messages. Raises InvalidExample if there is none."""
    rows = record.get(MESSAGES, record.get(SHARE_GPT))
    if isinstance(rows, list) and rows:
        return rows
    keys = ", ".join(f'"{key}"' for key in list(record)[:10] if key != MESSAGES)
    there = f", but {keys}" if keys else ""
    raise InvalidExample(f'has no list of messages under "{MESSAGES}"{there}')


def _named_messages(rows: list, may_drop: Collection[str]) -> list[dict]:
    messages = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InvalidExample(
                f"has a message ({number}) that is not an object with role and content"
            )
        message = _named(row, number)
        _check_message(message, number, may_drop)
        messages.append(message)
    return messages


def _named(row: dict, number: int) -> dict:
    """Rename ShareGPT's `from` and `value` to `role` and `content`."""
    if "role" in row or not ("from" in row and "value" in row):
        return row
    speaker = row["from"]
    if speaker not in ROLES:
        raise InvalidExample(
            f"has a message ({number}) from {speaker!r}, not from {', '.join(ROLES)}"
        )
    others = {key: value for key, value in row.items() if key not in ("from", "value")}
    return {"role": ROLES[speaker], "content": row["value"]} | others


def _check_message(message: dict, number: int, may_drop: Collection[str]) -> None:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if calls:
        list_of_objects(calls, "tool_calls")
    if isinstance(content, list):
        for part in list_of_objects(content, "content"):
            _check_part(part, number)
    has_content = isinstance(content, (str, list)) or (calls and content is None)
    if not isinstance(role, str) or not has_content:
        raise InvalidExample(f"has a message ({number}) without a role and a content that are text")
    for key, value in message.items():
        known = key in ("content", "tool_calls", *UNSAID, *may_drop)
        if not known and value not in EMPTY and not isinstance(value, str):
            raise InvalidExample(
                f'has "{key}" in a message ({number}), which is no text and not supported: '
                f"{advice(key)}"
            )
    if role == "assistant" and not calls and not "".join(texts_of(message)).strip():
        raise InvalidExample(f"has an empty answer (message {number})")


def _check_part(part: dict, number: int) -> None:
    kind = part.get("type")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidExample(f'has a part of the type "{kind}" in a message ({number}): only text')


def texts_of(message: dict) -> list[str]:
    """Return the texts of a message's content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def list_of_objects(value: Any, key: str) -> list[dict]:
    """Return the value of a key that must be a list of objects. Raises InvalidExample."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidExample(f'has "{key}" that is not a list of objects')
    return value


def advice(*keys: str) -> str:
    """Say how parts are allowed to be lost."""
    return f"allow it with data.chat_may_drop = {json.dumps(keys)}"
