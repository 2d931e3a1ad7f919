"""Runs a tokenizer.json by tiktoken, where data/hf_tokenizer.py has proved that the ids are the same.

`tokenizers` finds added tokens in a text, normalises what is between them, cuts it and merges. Here
the first two are done as it does them, and tiktoken does the rest. A text that the proof does not
cover gets None, and the library encodes it (data/library.py).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import tiktoken
import tokenizers

from data.tokenizer import NO_SPLIT, has_long_whitespace, names_pattern


class Added(NamedTuple):
    """An added token of a tokenizer.json."""

    name: str
    id: int
    special: bool  # found in rendered text alone
    greedy: bool  # depends on the characters around it (lstrip, rstrip, single_word)
    normalized: bool  # looked for after the normalizer


class Proof(NamedTuple):
    """Ranks and regular expression with which tiktoken gives the ids of a tokenizer.json."""

    ranks: list[bytes]
    ids: list[int]  # of the ranks
    split: str
    nfc: bool  # text is normalised before it is cut
    plain: bool  # data/tokenizer.py::Tokenizer can say all of it


class Proved:
    """The engine: tiktoken with the added tokens, whose ranks come after all others."""

    def __init__(self, proof: Proof, added: list[Added]) -> None:
        self.proof = proof
        self.added = added
        present = set(proof.ranks)
        every = [bytes([byte]) for byte in range(256)]
        lacking = [byte for byte in every if byte not in present]
        # tiktoken needs all bytes; the library drops a character that has no token
        self.tokens = [*proof.ranks, *lacking]
        self.first_lacking = len(proof.ranks)
        self.first_added = len(self.tokens)
        self.rank_of_name = {row.name: self.first_added + i for i, row in enumerate(added)}
        self.any_greedy = any(row.greedy for row in added)
        self.before = [row for row in added if not row.normalized]
        self.after = [row for row in added if row.normalized]

    @cached_property
    def bpe(self) -> tiktoken.Encoding:
        """Build tiktoken's encoding, at first use: reading cached tokens encodes nothing."""
        return tiktoken.Encoding(
            "tokenizer.json",
            pat_str=self.proof.split,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens={},
        )

    @cached_property
    def ids(self) -> np.ndarray:
        """Ids of all ranks, int64; 0 for the bytes that have none."""
        lacking = [0] * (self.first_added - self.first_lacking)
        return np.array([*self.proof.ids, *lacking, *(row.id for row in self.added)], np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Bytes that each rank stands for in a rendered text, int64."""
        names = [row.name.encode() for row in self.added]
        return np.array([len(token) for token in (*self.tokens, *names)], np.int64)

    @cached_property
    def rank_of_byte(self) -> np.ndarray:
        ranks = np.zeros(256, np.uint32)
        for rank, token in enumerate(self.tokens):
            if len(token) == 1:
                ranks[token[0]] = rank
        return ranks

    def ranks(self, text: str, rendered: bool = False) -> tuple[np.ndarray, bool] | None:
        """Return (ranks uint32 [n], whether the normalizer has changed the text), or None where the
        library has to make the ids. rendered: also recognise special tokens."""
        if has_long_whitespace(text) or (rendered and self.any_greedy):
            return None
        made = array("I")
        changed = False
        for part in self.cut(text, self.before, rendered):
            if isinstance(part, int):
                made.append(part)
                continue
            normal = nfc(part) if self.proof.nfc else part
            changed = changed or normal != part
            for piece in self.cut(normal, self.after, rendered):
                made.extend([piece] if isinstance(piece, int) else self.merged(piece))
        ranks = np.frombuffer(made, np.uint32) if made else np.zeros(0, np.uint32)
        if self.first_lacking < self.first_added:
            unknown = (ranks >= self.first_lacking) & (ranks < self.first_added)
            if unknown.any():
                return None
        return ranks, changed

    def merged(self, text: str) -> Iterable[int]:
        """Merge a text without added tokens into ranks."""
        if self.proof.split == NO_SPLIT:
            return self.rank_of_byte[np.frombuffer(text.encode(), np.uint8)].tolist()
        return array("I", self.bpe.encode_ordinary(text))

    def cut(self, text: str, rows: list[Added], rendered: bool) -> Iterator[str | int]:
        """Yield the text between these added tokens, and their ranks. As in the library, the name
        of a special token hides what begins inside it, also where it is ordinary text."""
        if not any(rendered or not row.special for row in rows):
            yield text
            return
        done = 0
        for match in self.patterns[rows is self.after].finditer(text):
            rank = self.rank_of_name[match.group()]
            if self.added[rank - self.first_added].special and not rendered:
                continue
            if match.start() > done:
                yield text[done : match.start()]
            yield rank
            done = match.end()
        if done < len(text):
            yield text[done:]

    @cached_property
    def patterns(self) -> tuple[re.Pattern, re.Pattern]:
        """Compile the patterns that find the added tokens before and after the normalizer."""
        before, after = ([row.name for row in rows] for rows in (self.before, self.after))
        return names_pattern(before), names_pattern(after)


def nfc(text: str) -> str:
    """Return the text in Unicode's NFC, by the library, whose version of Unicode is not Python's."""
    return text if is_nfc(text) else tokenizers.normalizers.NFC().normalize_str(text)


def is_nfc(text: str) -> bool:
    """Return whether Python knows that a text is in NFC (twenty times as fast as the library). If it
    knows all characters, that holds in all versions (Unicode's policy of stability)."""
    if text.isascii():
        return True
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return not are_unknown()[points].any() and unicodedata.is_normalized("NFC", text)


@functools.cache
def are_unknown() -> np.ndarray:
    """Mark the characters that Python does not know: bool [code points]. A look-up in a table is
    four times as fast as a regular expression."""
    unknown = [unicodedata.category(chr(point)) == "Cn" for point in range(0x110000)]
    return np.array(unknown)
