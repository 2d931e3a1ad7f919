"""Opens any tokenizer.json: the ids are those of Hugging Face's `tokenizers`, for every text.

It differs from the library in two ways, on purpose. The names of special tokens are ordinary text
in `encode` (its `encode_special_tokens`), and nothing is added, cut off or padded: post-processor,
truncation and padding of the file are not run. Added tokens that are not special (`<think>` in Qwen
3's file) are one token in every text, as in the library.

tiktoken makes the ids where data/hf_tokenizer.py has proved that they are the same: `engine` says
which of the two does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers

from configs.schema import InputError
from data.proved import Added, Proof, Proved
from data.tokenizer import CannotEncode, Encoded, Tokenizer, letters_of_bytes

# What of a tokenizer.json decides the ids.
DECIDES = ("normalizer", "pre_tokenizer", "model", "added_tokens")
NOT_RUN = {"post_processor": None, "truncation": None, "padding": None}
A_TEXT = "a"  # to see what is put before it
# What a proof is tried on: scripts, marks, digits, spaces, controls, code, names of tokens.
MANY_KINDS = (
    "Don't stop: it's 1,234,567 steps, 'ſo WE'LL\tgo\r\n\n  \n x žluťoučký İ straße ǅ съеш"
    "ь 42 ψυχή نص حكيم\u064c ١٢٣ ש\u05c1לום ऋष\u093fय\u094b\u0902 क़ १२ ประเทศ 色は匂へどか\u3099"
    "\u30fb ｶ\uff9e３ 天地玄黄\u3002二〇 한한국 e\u0301 a\u0308\u0323 ﬁ Ω ½²Ⅷ 👩\u200d👧 ❤\ufe0f\nde"
    "f f(x):\n\treturn {'a': x[0] ** 2}  # ok\n\n\n!abc --__==\u00a0\u2028\u0085\u200b"
    "\u0000\u007f\ufeff <|endoftext|><think>a</s> ▁ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "aa          z   "
)


class LibraryTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json."""

    def __init__(
        self,
        document: dict,
        added: list[Added],
        ends: tuple[str | None, str],
        companions: Mapping[str, Any],
        proof: Proof | None,
        reason: str = "",
        fingerprint: str = "",
    ) -> None:
        """document: the parsed file. ends: the names of the tokens that begin and end a text.
        companions: as `Tokenizer.companions`. reason: why there is no proof. fingerprint: if it is
        known (half a second otherwise). Raises KeyError if one of the ends is no added token."""
        self.document = document
        self.added = added
        self.companions = companions
        self.reason = reason
        self.proved = Proved(proof, added) if proof else None
        self.engine = "tiktoken" if proof else "tokenizers"
        vocabulary = document["model"]["vocab"]
        highest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        ids = [row.id for row in added]
        names = [row.name for row in added]
        begin, end = ends
        self._name(names, ids, end, begin, max([highest, *ids]) + 1)
        self.is_byte_level = is_byte_level(document)
        self.exact_lengths = self.is_byte_level and not loses_text(
            document, added, proof is not None
        )
        if fingerprint:
            self.fingerprint = fingerprint
        elif proof and proof.plain:  # what came of the same file before the library was there
            same = Tokenizer(proof.ranks, proof.split, names, end, [*proof.ids, *ids], begin)
            self.fingerprint = same.fingerprint
        else:
            self.fingerprint = fingerprint_of(document, end)

    # ----------------------------------------------------------------------------------------------
    # the library

    @cached_property
    def in_text(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for ordinary text."""
        made = build(self.document)
        made.encode_special_tokens = True
        return made

    @cached_property
    def in_rendered(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for text in which special tokens are named."""
        return build(self.document)

    @cached_property
    def put_before(self) -> list[int]:
        """The ids that the file's post-processor puts before a text, Llama 3.1's
        `<|begin_of_text|>` say. transformers 5 uses it too, not `add_bos_token`."""
        kept = {"post_processor": self.document.get("post_processor")}
        library = build(self.document, kept)
        plain = library.encode(A_TEXT, add_special_tokens=False).ids
        whole = library.encode(A_TEXT).ids
        for begin in range(len(whole) - len(plain) + 1):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin]
        return []

    def named_only(self) -> dict[int, str]:
        """Leave out of `Tokenizer.named_only` the added tokens that are found in ordinary text, or
        that its vocabulary makes of it."""
        model = self.document["model"]
        words = model["vocab"]
        if not isinstance(words, dict):  # a unigram's [word, score]
            made = {word for word, _ in words}
        elif "merges" not in model or model.get("ignore_merges"):
            made = set(words)
        else:
            made = {"".join(_as_pair(pair)) for pair in model["merges"]}
        made.add(model.get("unk_token"))
        hidden = {row.id for row in self.added if row.special and row.name not in made}
        return {id: name for id, name in super().named_only().items() if id in hidden}

    def library_ids(self, text: str) -> np.ndarray:
        """Encode a text by the library, proof or not. Raises CannotEncode."""
        return np.array(self._ask(self.in_text, text).ids, self.dtype)

    def has_other_ids(self, made: tokenizers.Tokenizer) -> bool:
        """Return whether tiktoken gives other ids for MANY_KINDS than the library, against the
        proof. made: the library's tokenizer of the document."""
        made.encode_special_tokens = True
        try:
            return self.encode(MANY_KINDS).tolist() != self._ask(made, MANY_KINDS).ids
        except CannotEncode:
            return False

    def _ask(self, library: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        text.encode()  # raises UnicodeEncodeError for lone surrogates
        try:
            return library.encode(text, add_special_tokens=False)
        except Exception as error:  # a vocabulary without a token for what it does not know
            raise CannotEncode(f"tokenizers: {error}") from error

    def by_library(self, reason: str) -> LibraryTokenizer:
        """Return the same tokenizer without tiktoken."""
        ends = (self.begin_of_text, self.end_of_text)
        return LibraryTokenizer(self.document, self.added, ends, self.companions, None, reason)

    # ----------------------------------------------------------------------------------------------
    # text to ids

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids [n] of `dtype`: names of special tokens are ordinary text. Raises
        UnicodeEncodeError for lone surrogates, and CannotEncode."""
        text.encode()
        made = self.proved.ranks(text) if self.proved else None
        if made is None:
            return self.library_ids(text)
        return self.proved.ids[made[0]].astype(self.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text by the library, on its own threads. Raises as `encode` does."""
        for text in texts:
            text.encode()
        try:
            made = self.in_text.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise CannotEncode(f"tokenizers: {error}") from error
        return [np.array(one.ids, self.dtype) for one in made]

    def encode_rendered(self, text: str) -> Encoded:
        """Encode a rendered conversation, as `Tokenizer.encode_rendered` does. The bytes of a
        character that several tokens share are counted to the first of them."""
        text.encode()
        made = self.proved.ranks(text, rendered=True) if self.proved else None
        if made is None or made[1]:  # the offsets are those of the text, not of what NFC made
            encoding = self._ask(self.in_rendered, text)
            ids = np.array(encoding.ids, self.dtype)
            starts, stops = byte_offsets(text, encoding.offsets)
            sizes = shares(stops, len(text.encode()))
        else:
            ids = self.proved.ids[made[0]].astype(self.dtype)
            sizes = self.proved.lengths[made[0]]
            stops = np.cumsum(sizes)
            starts = stops - sizes
        return Encoded(ids, starts, stops, np.maximum(sizes - self._names[ids], 0))

    @cached_property
    def _names(self) -> np.ndarray:
        """Bytes of the name of each special token, int64 [n_vocab], 0 for other ids."""
        lengths = np.zeros(self.n_vocab, np.int64)
        for row in self.added:
            if row.special:
                lengths[row.id] = len(row.name.encode())
        return lengths

    # ----------------------------------------------------------------------------------------------
    # bytes

    @property
    def byte_lengths(self) -> list[int]:
        """List the bytes of text of each id, as `Tokenizer.byte_lengths` does. Raises ValueError
        where they depend on the text (`encode_with_bytes`)."""
        if not self.is_byte_level:
            raise ValueError("the tokens of this tokenizer have no length of their own")
        lengths = [0] * self.n_vocab
        special = {row.id for row in self.added if row.special}
        for id, token in self._bytes_of_id.items():
            lengths[id] = 0 if id in special else len(token)
        return lengths

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text and count the bytes of each token, as `Tokenizer.encode_with_bytes` does.
        Where the bytes of the tokens are not those of the text, the library's offsets count: a
        token gets the bytes between the end of the token before it and its own end, and the last
        one also those that follow it."""
        total = len(text.encode())
        if self.is_byte_level:
            ids = self.encode(text)
            lengths = self._lengths[ids]
            if self.exact_lengths or lengths.sum() == total:
                return ids, lengths
        encoding = self._ask(self.in_text, text)
        _, stops = byte_offsets(text, encoding.offsets)
        return np.array(encoding.ids, self.dtype), shares(stops, total)

    # ----------------------------------------------------------------------------------------------
    # ids to text

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        """Map the ids of a byte-level vocabulary to bytes, as the library's decoder reads it: a
        token with a letter that stands for no byte is taken literally."""
        byte_of = {letter: byte for byte, letter in enumerate(letters_of_bytes())}

        def content(word: str) -> bytes:
            known = all(letter in byte_of for letter in word)
            return bytes(byte_of[letter] for letter in word) if known else word.encode()

        made = {id: content(word) for word, id in self.document["model"]["vocab"].items()}
        return made | {row.id: content(row.name) for row in self.added}

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids by the library. Ids that it does not know become U+FFFD, as in `Tokenizer`."""
        if self.is_byte_level:
            return super().decode(ids)
        library = self.in_text

        def is_known(id: int) -> bool:
            return library.id_to_token(id) is not None

        text = ""
        for known, group in groupby(np.asarray(ids).tolist(), is_known):
            run = list(group)
            replaced = "\ufffd" * len(run)
            text += library.decode(run, skip_special_tokens=False) if known else replaced
        return text

    # ----------------------------------------------------------------------------------------------
    # the saved file

    def found(self) -> dict:
        """Describe as JSON what was found when the document was opened."""
        proof = self.proved.proof if self.proved else None
        ranks = [base64.b64encode(token).decode() for token in proof.ranks] if proof else []
        return {
            "split": proof.split if proof else None,  # first, as data/open_tokenizer.py looks
            "end_of_text": self.end_of_text,
            "begin_of_text": self.begin_of_text,
            "reason": self.reason,
            "proof": proof and proof._asdict() | {"ranks": ranks},
            "added": self.added,
        }

    def save(self, path: str) -> None:
        """Save the document, its companion files and the proof, for `Tokenizer.save`."""
        saved = self.found() | {"beside": dict(self.companions), "document": self.document}
        with open(path, "w", encoding="ascii") as file:
            file.write(json.dumps(saved))


def restored(saved: dict) -> LibraryTokenizer:
    """Restore what `save` or kept_proofs.py wrote. Raises KeyError, TypeError or ValueError."""
    proof = None
    if saved["proof"]:
        proof = Proof(**saved["proof"])
        proof = proof._replace(ranks=[binascii.a2b_base64(token) for token in proof.ranks])
    added = [Added(*row) for row in saved["added"]]
    ends = (saved["begin_of_text"], saved["end_of_text"])
    why = (proof, saved["reason"], saved.get("fingerprint", ""))
    return LibraryTokenizer(saved["document"], added, ends, saved["beside"], *why)


def build(document: dict, more: Mapping[str, Any] = MappingProxyType({})) -> tokenizers.Tokenizer:
    """Build the library's tokenizer of a document, without its processing around a text, but for
    `more`. Raises InputError for an invalid document."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document | NOT_RUN | more))
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"it is no tokenizer.json that `tokenizers` reads: {error}") from None


def added_by(library: tokenizers.Tokenizer) -> list[Added]:
    """Return the added tokens, in the order of the ids that the library gives them."""
    added = []
    for id, row in sorted(library.get_added_tokens_decoder().items()):
        greedy = row.lstrip or row.rstrip or row.single_word
        added.append(Added(row.content, id, row.special, greedy, row.normalized))
    return added


# --------------------------------------------------------------------------------------------------
# bytes and offsets


def byte_offsets(text: str, offsets: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Turn offsets in characters into those in the text's UTF-8: int64 [n] each."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    if text.isascii():
        return places[:, 0], places[:, 1]
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes)])
    return before[places[:, 0]], before[places[:, 1]]


def shares(stops: np.ndarray, total: int) -> np.ndarray:
    """Divide the `total` bytes of a text among tokens that end at `stops`, int64 [n]. Together they
    get all of it, if there is a token."""
    if not len(stops):
        return np.zeros(0, np.int64)
    ends = np.maximum.accumulate(stops)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def is_byte_level(document: dict) -> bool:
    """Return whether tokens are bytes as letters (data/tokenizer.py::letters_of_bytes)."""
    decoder = document.get("decoder") or {}
    is_bpe = document["model"].get("type", "BPE") == "BPE"
    steps = steps_of(document.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in steps]
    return is_bpe and decoder.get("type") == "ByteLevel" and "ByteLevel" in kinds


def loses_text(document: dict, added: list[Added], is_proved: bool) -> bool:
    """Return whether the bytes of a byte-level tokenizer's tokens may differ from those of the
    text. is_proved: tiktoken makes its ids, so its cuts remove nothing
    (data/hf_tokenizer.py::prove)."""
    steps = steps_of(document.get("pre_tokenizer"), "pretokenizers")
    removes = not is_proved and any(step.get("behavior") == "Removed" for step in steps)
    prefixes = any(step.get("add_prefix_space") for step in steps)
    normalizes = bool(steps_of(document.get("normalizer"), "normalizers"))
    letters = document["model"]["vocab"]
    lacks = any(letter not in letters for letter in letters_of_bytes())
    takes = any(row.greedy and not row.special for row in added)
    return removes or prefixes or normalizes or lacks or takes


def steps_of(part: dict | None, key: str) -> list[dict]:
    """List the steps of a normalizer or pre-tokenizer, which may be a Sequence in a Sequence."""
    if not part:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[key] for step in steps_of(inner, key)]


# --------------------------------------------------------------------------------------------------
# identity


def fingerprint_of(document: dict, end: str) -> str:
    """Hash everything that decides the ids. Another spelling of the same (merges as pairs, a field
    that is null) has the same hash."""
    parts = {key: document.get(key) for key in DECIDES}
    model = {key: value for key, value in parts["model"].items() if not _says_nothing(value)}
    if "merges" in model:
        model["merges"] = [_as_pair(pair) for pair in model["merges"]]
    parts["model"] = model
    parts["added_tokens"] = sorted(parts["added_tokens"] or [], key=lambda row: row["id"])
    canonical = json.dumps(["tokenizer.json", end, parts], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == ""


def _as_pair(pair: str | list) -> list:
    return pair.split(" ") if isinstance(pair, str) else list(pair)
