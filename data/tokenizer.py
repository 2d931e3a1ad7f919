"""Turns text into token ids and back. One class serves bytes, a BPE trained on the corpus, or
anyone's byte-level BPE.

A byte-level BPE is fully defined by a list of byte strings (the position of each is its rank), the
pattern that splits text before merging, special tokens, and the ids of all these (mostly the ranks,
and then the special tokens in order). `Tokenizer` holds this definition, and tiktoken runs it.
`fingerprint` is its hash, so that tokens and tokenizer can be checked against each other.

rustbpe does the training. It has wheels for CPython 3.10 to 3.14, is four times as fast as Hugging
Face's `tokenizers` (4096 tokens from 11 MB in 0.9 s on two cores) with the same compression, gives
the same result on any number of threads, and tiktoken takes its ranks as they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from configs.schema import InputError

# How text is cut before merging: the pattern of cl100k_base when Llama 3 took it
# (meta-llama/llama3, llama/tokenizer.py): contractions | words | up to 3 digits | punctuation |
# line breaks | other whitespace.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns of openai/tiktoken (tiktoken_ext/openai_public.py). That file writes the first two
# with possessive quantifiers. These cut the same, but they take longer here (1.4 times, tiktoken
# 0.14) and mean something else in `tokenizers`. cl100k_base has since gained an alternative:
# whitespace up to the end of the text, where SPLIT would end after a line break. `\z` is what `$`
# means in tiktoken; in `tokenizers` `$` would be the end of a line.
SPLIT_CL100K = SPLIT.replace(r"|\s*[\r\n]+", r"|\s++\z|\s*[\r\n]+")
SPLIT_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT_O200K = (  # o200k_base's: words begin at a change from lower to upper case
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# digits one by one (Qwen/Qwen2-7B, tokenizer.json)
SPLIT_QWEN2 = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# letters with their marks (Qwen/Qwen3.5-27B, tokenizer.json)
SPLIT_QWEN35 = SPLIT_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
# o200k's, with ideographs cut from other letters first (moonshotai/Kimi-K2-Base, tokenization_kimi.py)
SPLIT_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NO_SPLIT = ""  # every byte is a token: nothing to split, nothing to merge
END_OF_TEXT = "<|endoftext|>"
# of Llama 3; begins a text in every vocabulary that has this special token
BEGIN_OF_TEXT = "<|begin_of_text|>"

# tiktoken's and rustbpe's regular expressions keep one stack entry per whitespace character (the
# lookahead may have to go back): 300,000 in a row work, 1,000,000 raise (tiktoken) or panic
# (rustbpe). Longer runs are cut at this length.
LONGEST_WHITESPACE = 100_000
_LONG_WHITESPACE = re.compile(rf"(?<!\s)\s{{{LONGEST_WHITESPACE + 1},}}")


class Encoded(NamedTuple):
    """A rendered text as tokens, and the part of the text that each of them stands for."""

    ids: np.ndarray  # [n], of the tokenizer's dtype
    starts: np.ndarray  # int64 [n]: the token's first byte in the text's UTF-8
    stops: np.ndarray  # int64 [n]: the byte after its last
    sizes: np.ndarray  # int64 [n]: bytes of text; 0 for the name of a special token


class CannotEncode(ValueError):
    """A text that its tokenizer has no ids for."""


class Tokenizer:
    """The tokenizer that all other code sees: this one, a byte-level BPE that tiktoken runs, or
    data/library.py::LibraryTokenizer, which has the same members.

    Here every text survives `decode(encode(text))`: bytes are tokens, so nothing is unknown."""

    engine = "tiktoken"  # what makes the ids; data/library.py has others
    # the other files of a published tokenizer's folder: {name: JSON, or the text of others}
    companions: Mapping[str, Any] = MappingProxyType({})
    # ids that a published tokenizer puts before a text on its own: by these a harness scores it
    put_before: Sequence[int] = ()
    # True: the bytes of a text are the sum of `byte_lengths` of its ids; else `encode_with_bytes`
    # tells
    exact_lengths = True

    def __init__(
        self,
        ranks: list[bytes],
        split: str,
        special_tokens: list[str],
        end_of_text: str,
        ids: list[int] | None = None,
        begin_of_text: str | None = None,
    ) -> None:
        """ids: those of the ranks, then those of the special tokens; None: 0, 1, 2, ...
        begin_of_text: one of the special tokens; None: that of Llama 3, if it is one of them."""
        count = len(ranks) + len(special_tokens)
        self.ranks = ranks
        self.split = split
        self.ids = None if ids == list(range(count)) else ids
        special_ids = ids[len(ranks) :] if ids else list(range(len(ranks), count))
        highest = max(ids) if ids else count - 1  # some ids below may stand for nothing
        if begin_of_text is None and BEGIN_OF_TEXT in special_tokens:
            begin_of_text = BEGIN_OF_TEXT
        self._name(special_tokens, special_ids, end_of_text, begin_of_text, highest + 1)
        definition = [split, special_tokens, end_of_text, [len(token) for token in ranks]]
        if self.ids:
            definition.append(self.ids)
        digest = hashlib.sha256(json.dumps(definition).encode() + b"".join(ranks))
        self.fingerprint = digest.hexdigest()[:32]

    def _name(
        self,
        special_tokens: list[str],
        special_ids: list[int],
        end_of_text: str,
        begin_of_text: str | None,
        n_vocab: int,
    ) -> None:
        """Set what depends on names and ids. special_tokens: all that a rendered text may name."""
        id_of = dict(zip(special_tokens, special_ids, strict=True))
        self.special_tokens = special_tokens
        self.special_ids = special_ids
        self.end_of_text = end_of_text
        self.begin_of_text = begin_of_text
        self.eot_id = id_of[end_of_text]
        self.bos_id = id_of[begin_of_text] if begin_of_text else None
        self.n_vocab = n_vocab
        self.dtype = np.dtype(np.uint16 if n_vocab <= 2**16 else np.uint32)

    @cached_property
    def _bpe(self) -> tiktoken.Encoding:
        """Built at first use: 128,000 ranks take a tenth of a second, and reading cached tokens
        encodes nothing."""
        return tiktoken.Encoding(
            self.fingerprint,
            pat_str=self.split,
            mergeable_ranks={token: rank for rank, token in enumerate(self.ranks)},
            special_tokens={},
        )

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        tokens = self.ranks + [token.encode() for token in self.special_tokens]
        return dict(zip(self.ids or range(len(tokens)), tokens, strict=True))

    @cached_property
    def _id_of_rank(self) -> np.ndarray:
        return np.array(self.ids[: len(self.ranks)], self.dtype)

    @property
    def byte_lengths(self) -> list[int]:
        """List the bytes of text of each id, 0 for special tokens: needed for a loss per byte."""
        lengths = [0] * self.n_vocab
        for id, token in zip(self.ids or range(len(self.ranks)), self.ranks):
            lengths[id] = len(token)
        return lengths

    def named_only(self) -> dict[int, str]:
        """Map to their names the special tokens that no ordinary text becomes, and that stand neither
        before nor after one: a model needs a row for them only if a chat template names them."""
        kept = {self.eot_id, self.bos_id, *self.put_before}
        named = zip(self.special_ids, self.special_tokens, strict=True)
        return {id: name for id, name in named if id not in kept}

    @cached_property
    def n_rows(self) -> int:
        """The rows that a model needs for ordinary text, without the last of `named_only`."""
        count = self.n_vocab
        named_only = self.named_only()
        while count - 1 in named_only:
            count -= 1
        return count

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids [n] of `dtype`. "<|endoftext|>" in a text is ordinary text: only
        code that knows a document's end makes special tokens. The GIL is released, so threads
        encode in parallel. Lone surrogates: UnicodeEncodeError."""
        data = text.encode()  # raises for what tiktoken would replace by a different character
        if self.split == NO_SPLIT:  # a hundred times faster than tiktoken with 256 ranks
            return np.frombuffer(data, np.uint8).astype(self.dtype)
        # With tiktoken 0.14 a list is twice as fast as its encode_to_numpy, which looks for special
        # tokens. And Python's array reads a list in a third of the time that NumPy takes.
        pieces = [
            np.frombuffer(array("I", self._bpe.encode_ordinary(piece)), np.uint32)
            for piece in _pieces(text)
        ]
        ranks = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return self._id_of_rank[ranks] if self.ids else ranks.astype(self.dtype)

    def encode_rendered(self, text: str) -> Encoded:
        """Encode a text in which the name of a special token is that token, as a chat template
        renders it. `encode` takes such names as ordinary text. Raises as `encode` does."""
        pieces, lengths, sizes = [], [], []
        id_of = dict(zip(self.special_tokens, self.special_ids, strict=True))
        for i, piece in enumerate(self.names_in_text.split(text)):
            is_name = i % 2 == 1
            ids = np.array([id_of[piece]], self.dtype) if is_name else self.encode(piece)
            length = np.array([len(piece.encode())]) if is_name else self._lengths[ids]
            pieces.append(ids)
            lengths.append(length)
            sizes.append(np.zeros(1, np.int64) if is_name else length)
        counts = np.concatenate(lengths)
        stops = np.cumsum(counts)
        return Encoded(np.concatenate(pieces), stops - counts, stops, np.concatenate(sizes))

    @cached_property
    def names_in_text(self) -> re.Pattern:
        """Match the name of a special token."""
        return names_pattern(self.special_tokens)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.array(self.byte_lengths, np.int64)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (`encode(text)`, the bytes of the text that each id stands for, int64 [n]). Their
        sum is the size of the text in UTF-8, if it has a token at all."""
        ids = self.encode(text)
        return ids, self._lengths[ids]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids. Special tokens appear by name. Bytes that are not UTF-8 (half a character)
        and ids beyond the vocabulary (a model may have more rows than the tokenizer has tokens)
        become U+FFFD, so that any sample can be shown."""
        unknown = "\ufffd".encode()
        tokens = (self._bytes_of_id.get(i, unknown) for i in np.asarray(ids).tolist())
        return b"".join(tokens).decode("utf-8", errors="replace")

    def save(self, path: str) -> None:
        """Write one JSON file, from which data/open_tokenizer.py makes the same tokenizer."""
        with open(path, "w", encoding="ascii") as file:
            json.dump(
                {
                    "split": self.split,
                    "special_tokens": self.special_tokens,
                    "end_of_text": self.end_of_text,
                    "begin_of_text": self.begin_of_text,
                    "ids": self.ids,
                    "ranks": [base64.b64encode(token).decode() for token in self.ranks],
                },
                file,
                indent=0,
            )


def names_pattern(names: Iterable[str]) -> re.Pattern:
    """Match one of these names, as a group, the longest where several begin."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def byte_tokenizer() -> Tokenizer:
    """Build the tokenizer of 256 bytes and the end of text: 257 ids."""
    return Tokenizer([bytes([i]) for i in range(256)], NO_SPLIT, [END_OF_TEXT], END_OF_TEXT)


def gpt2_bytes() -> list[bytes]:
    """List the 256 bytes in GPT-2's order: those that are printable in Latin-1, then the others
    (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [bytes([byte]) for byte in (*printable, *sorted(set(range(256)) - set(printable)))]


def letters_of_bytes() -> list[str]:
    """Return the printable character that stands for each byte in a vocabulary of `tokenizers`: the
    byte itself if it is printable in Latin-1, otherwise the next character from U+0100 on (as in
    GPT-2: openai/gpt-2, encoder.py)."""
    order = [token[0] for token in gpt2_bytes()]
    letter_of = {byte: chr(byte) if i < 188 else chr(256 + i - 188) for i, byte in enumerate(order)}
    return [letter_of[byte] for byte in range(256)]


def train_bpe(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """Train a BPE of exactly `n_vocab` ids, including the end of text. The same texts give the same
    BPE on any number of threads."""
    import rustbpe  # imported only here, so that everything else works without it

    trainer = rustbpe.Tokenizer()
    pieces = (piece for text in texts for piece in _pieces(text))
    trainer.train_from_iterator(pieces, n_vocab - 1, pattern=SPLIT)
    ranks = [bytes(token) for token, _ in trainer.get_mergeable_ranks()]
    if len(ranks) < n_vocab - 1:
        raise InputError(
            f"data.bpe_vocab_size is {n_vocab}, but the corpus has text for {len(ranks) + 1} "
            "tokens only: "
            f'set it to {len(ranks) + 1} or less, or use tokenizer = "bytes"'
        )
    return Tokenizer(ranks, SPLIT, [END_OF_TEXT], END_OF_TEXT)


def has_long_whitespace(text: str) -> bool:
    """Return whether a run of whitespace is longer than tiktoken's regular expressions can take."""
    return len(text) > LONGEST_WHITESPACE and bool(_LONG_WHITESPACE.search(text))


def _pieces(text: str) -> Iterator[str]:
    """Cut the text inside runs of more than LONGEST_WHITESPACE whitespace characters alone."""
    start = 0
    if len(text) > LONGEST_WHITESPACE:
        for run in _LONG_WHITESPACE.finditer(text):
            for cut in range(run.start() + LONGEST_WHITESPACE, run.end(), LONGEST_WHITESPACE):
                yield text[start:cut]
                start = cut
    yield text[start:]
