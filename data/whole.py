"""Checks that a chat template has rendered every text of the conversation.

A template may leave out a part of a message without an error: a name, a system turn, the reasoning
before an answer, what comes after the first three characters. So the conversation is rendered once
more, with each of its texts between marks that occur in no text and differ for each. Where the
marks come out, in order and with the text between them unchanged, the text is there, and not by
chance. A template that looks at what it renders may answer the marks with another text; then the
texts themselves are searched for. Whitespace around a text may go, also around `<think>` and
`</think>` in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from data.conversation import UNSAID, Conversation

# never assigned by Unicode: the marks, and ten digits for the number of a text
FIRST, LAST, DIGITS = (
    "\ufdd2",
    "\ufdd3",
    "\ufdd4\ufdd5\ufdd6\ufdd7\ufdd8\ufdd9\ufdda\ufddb\ufddc\ufddd",
)
MARKS = re.compile(f"[{FIRST}{LAST}{DIGITS}]")
THOUGHTS = "think"  # in data.chat_may_drop: what a content has from <think> to </think>
# templates cut a text at these
SEAM = re.compile(r"(</?(?:think|tool_response)>)")


class SaidText(NamedTuple):
    """A text that must be in the rendering."""

    where: int  # the number of its message; 0: none
    key: str  # as data.chat_may_drop names it
    field: str  # the key of the message that it is in
    text: str  # without whitespace at its ends
    mark: str  # before it; "": it has none

    def __str__(self) -> str:
        name = f'"{self.key}"'
        if self.key == THOUGHTS:
            name = "<think>"
        elif self.field == "content":
            name = f"the text of role {self.key}"
        place = f" in message {self.where}" if self.where else ""
        return f"{name}{place} ({json.dumps(self.text[:40], ensure_ascii=False)})"


class SaidTexts:
    """All parts of a conversation, and their marks."""

    def __init__(self, may_drop: Collection[str]) -> None:
        self.may_drop = may_drop
        self.found: list[SaidText] = []

    def mark(self, conversation: Conversation) -> Conversation:
        """Add marks to the conversation. Its parts are kept."""
        given = {}
        for name, value in conversation.given.items():
            # variables have a meaning that marks would change
            listed = isinstance(value, list)
            given[name] = self._value(value, 0, name, name) if listed else value
        messages = [self._message(i, message) for i, message in enumerate(conversation.messages, 1)]
        return Conversation(messages, given)

    def _message(self, number: int, message: dict) -> dict:
        marked = {}
        for name, value in message.items():
            key = message["role"] if name == "content" else name
            marked[name] = value if name in UNSAID else self._value(value, number, key, name)
        return marked

    def _value(self, value: Any, where: int, key: str, field: str) -> Any:
        if key in self.may_drop:
            return value
        if isinstance(value, str):
            return self._text(value, where, key, field)
        if isinstance(value, list):
            return [self._value(item, where, key, field) for item in value]
        if isinstance(value, dict):
            marked = {}
            for name, item in value.items():
                said = name not in UNSAID
                marked[name] = self._value(item, where, key, field) if said else item
            return marked
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.found.append(SaidText(where, key, field, str(value), ""))
        return value

    def _text(self, text: str, where: int, key: str, field: str) -> str:
        marked = ""
        inside = False  # between <think> and </think>
        for i, piece in enumerate(SEAM.split(text)):
            of_thought = inside or piece in ("<think>", "</think>")
            named = THOUGHTS if of_thought and field == "content" else key
            core = piece.strip()
            if not core or named in self.may_drop:
                marked += piece
            elif i % 2:
                self.found.append(SaidText(where, named, field, core, ""))
                marked += piece
            else:
                mark = FIRST + "".join(DIGITS[int(digit)] for digit in str(len(self.found)))
                self.found.append(SaidText(where, named, field, core, mark))
                begin = piece.index(core)
                stop = begin + len(core)
                marked += piece[:begin] + mark + core + LAST + piece[stop:]
            if i % 2:
                inside = piece == "<think>"
        return marked


def sentence(lacking: list[SaidText]) -> str:
    """Name the parts that a rendering lacks."""
    return f"has {', '.join(map(str, lacking))}, which its template leaves out or changes"


def missing(parts: list[SaidText], text: str, marked: str) -> list[SaidText]:
    """Return the parts that a rendering lacks, of each key the first. Messages must be in order.
    marked: the rendering with marks, "" if that is not known."""
    with_marks = MARKS.sub("", marked) == text
    searched = marked if with_marks else text
    begin = end = number = 0
    reached = 0  # in the content of the message
    lacking: dict[str, SaidText] = {}
    for part in parts:
        if part.where != number:
            begin = reached = end
            number = part.where
        start = reached if part.field == "content" else begin
        stop = _stop(searched, part, start, with_marks)
        if stop < 0:
            lacking.setdefault(part.key, part)
            continue
        if part.field == "content":
            reached = stop
        if part.where:
            end = max(end, stop)
    return list(lacking.values())


def _stop(text: str, part: SaidText, start: int, with_marks: bool) -> int:
    """Find the end of a part in a text from `start` on, verbatim or as JSON; -1: not there."""
    before, after = (part.mark, LAST) if with_marks and part.mark else ("", "")
    quoted = json.dumps(part.text, ensure_ascii=False)[1:-1]
    forms = (part.text, quoted, json.dumps(part.text)[1:-1])
    for form in forms:
        found = text.find(before + form + after, start)
        if found >= 0:
            return found + len(before + form + after)
    return -1
