"""Counts why documents were dropped, by kind of reason: of 900 failures in a corpus, 880 may have
one cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

QUOTED = re.compile(r' \("(?:[^"\\]|\\.)*"\)')  # what a document says there
ASIDE = re.compile(r" ?\([^()]*(?:\([^()]*\)[^()]*)*\)")  # a line, an error's own words
NUMBER = re.compile(r"\d+")


def counts(problems: Iterable[str]) -> list[tuple[int, str]]:
    """Return (how many, reason), the most frequent first. problems: as in data/pieces.py::Document."""
    found = Counter(map(reason, problems))
    return [(count, name) for name, count in found.most_common()]


def reason(problem: str) -> str:
    """Cut from a problem what differs from document to document, and the advice."""
    said = QUOTED.sub("", problem)
    said = ASIDE.sub("", said)
    said = said.split(": ")[0].split("; ")[0]
    return NUMBER.sub("N", said).strip()
