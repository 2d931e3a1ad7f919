"""Text to token ids and back, through one class: bytes, a BPE trained on the corpus, or anyone's tiktoken rank file.

A byte-level BPE is fully defined by a list of byte strings (the position of each is its rank and its id), the pattern
that splits text before merging, and special tokens numbered after the ranks. `Tokenizer` holds these four things,
tiktoken runs them, and `fingerprint` is their hash, so that tokens and tokenizer can be checked against each other.

Training is rustbpe's: wheels for CPython 3.10 to 3.14, four times as fast as Hugging Face's `tokenizers` (4096 tokens
from 11 MB in 0.9 s on two cores) with the same compression, the same result on any number of threads, and its ranks
are tiktoken's as they stand.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import tiktoken

from configs.schema import InputError

# The pattern of cl100k_base (openai/tiktoken, tiktoken_ext/openai_public.py), which Llama 3 kept (meta-llama/llama3,
# llama/tokenizer.py): contractions | words | up to 3 digits | punctuation | line breaks | other whitespace.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NO_SPLIT = ""  # every byte is a token: nothing to split, nothing to merge
END_OF_TEXT = "<|endoftext|>"

# Llama 3's 256 special tokens, in the order of their ids from 128000 (meta-llama/llama3, llama/tokenizer.py).
# Llama 3.1 gave names to some of the reserved ones; their ids, and the meaning of all others, stayed.
LLAMA3_SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
]

# Number of ranks in a file -> (special tokens that follow them, the one that ends a document).
KNOWN_RANK_FILES = {128_000: (LLAMA3_SPECIAL_TOKENS, "<|end_of_text|>")}

# tiktoken's and rustbpe's regular expressions keep one stack entry per whitespace character (the lookahead may have to
# go back): 300,000 in a row work, 1,000,000 raise (tiktoken) or panic (rustbpe). Longer runs are cut at this length.
LONGEST_WHITESPACE = 100_000
_LONG_WHITESPACE = re.compile(rf"(?<!\s)\s{{{LONGEST_WHITESPACE + 1},}}")


class Tokenizer:
    """A byte-level BPE. Every text survives `decode(encode(text))`: bytes are tokens, so nothing is unknown."""

    def __init__(self, ranks: list[bytes], split: str, special_tokens: list[str], end_of_text: str) -> None:
        self.ranks = ranks
        self.split = split
        self.special_tokens = special_tokens
        self.end_of_text = end_of_text
        self.n_vocab = len(ranks) + len(special_tokens)
        self.eot_id = len(ranks) + special_tokens.index(end_of_text)
        self.dtype = np.dtype(np.uint16 if self.n_vocab <= 2**16 else np.uint32)
        definition = json.dumps([split, special_tokens, end_of_text, [len(token) for token in ranks]])
        self.fingerprint = hashlib.sha256(definition.encode() + b"".join(ranks)).hexdigest()[:32]

    @cached_property
    def _bpe(self) -> tiktoken.Encoding:
        """Built at first use: 128,000 ranks take a tenth of a second, and reading cached tokens encodes nothing."""
        return tiktoken.Encoding(
            self.fingerprint,
            pat_str=self.split,
            mergeable_ranks={token: rank for rank, token in enumerate(self.ranks)},
            special_tokens={token: len(self.ranks) + i for i, token in enumerate(self.special_tokens)},
        )

    @cached_property
    def _bytes_of_id(self) -> list[bytes]:
        return self.ranks + [token.encode() for token in self.special_tokens]

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of `dtype`. "<|endoftext|>" in a text is ordinary text: only code that knows a document's end makes
        special tokens. The GIL is released, so threads encode in parallel. Lone surrogates: UnicodeEncodeError."""
        if self.split == NO_SPLIT:  # a hundred times faster than tiktoken with 256 ranks
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        pieces = [self._bpe.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(text)]
        return np.concatenate(pieces).astype(self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Special tokens appear by name. Bytes that are not UTF-8 (half a character) and ids beyond the vocabulary (a
        model may have more rows than the tokenizer has tokens) become U+FFFD: a sample is shown, not refused."""
        unknown = "\ufffd".encode()
        tokens = (self._bytes_of_id[i] if 0 <= i < self.n_vocab else unknown for i in np.asarray(ids).tolist())
        return b"".join(tokens).decode("utf-8", errors="replace")

    def save(self, path: str) -> None:
        """One JSON file; `load_saved` makes the same tokenizer of it, fingerprint included."""
        with open(path, "w", encoding="ascii") as file:
            json.dump(
                {
                    "split": self.split,
                    "special_tokens": self.special_tokens,
                    "end_of_text": self.end_of_text,
                    "ranks": [base64.b64encode(token).decode() for token in self.ranks],
                },
                file,
                indent=0,
            )


def load_saved(path: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote. InputError when the file is missing or something else."""
    try:
        with open(path, encoding="ascii") as file:
            saved = json.load(file)
        ranks = [binascii.a2b_base64(token) for token in saved["ranks"]]  # b64decode takes three times as long
        return Tokenizer(ranks, saved["split"], saved["special_tokens"], saved["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a saved tokenizer ({error!r})") from error


def byte_tokenizer() -> Tokenizer:
    """256 bytes and the end of text: 257 ids, nothing to train, and the slowest sequences to learn from."""
    return Tokenizer([bytes([i]) for i in range(256)], NO_SPLIT, [END_OF_TEXT], END_OF_TEXT)


def read_rank_file(path: str) -> bytes:
    """Its content, not looked at yet: enough to tell whether it is the file that made the tokens in a cache."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f'data.tokenizer: {path} cannot be read ({error.strerror}); give "bpe", "bytes" or the path '
                         "of a tiktoken rank file") from error


def from_rank_file(path: str) -> Tokenizer:
    """A tiktoken rank file: one `<base64 of the token> <rank>` per line. InputError when it is not one."""
    lines = [line.split() for line in read_rank_file(path).splitlines() if line.strip()]
    try:
        tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except ValueError as error:
        raise InputError(f"data.tokenizer: {path} is not a tiktoken rank file (lines of base64 and rank); a "
                         "SentencePiece model or a tokenizer.json cannot be used") from error
    ranks = [tokens.get(rank, b"") for rank in range(len(lines))]
    if len(set(ranks) - {b""}) != len(lines) or not {bytes([i]) for i in range(256)} <= set(ranks):
        raise InputError(f"data.tokenizer: {path} is damaged: {len(lines)} ranks must be 0 to {len(lines) - 1}, each "
                         "of another token, all 256 single bytes among them")
    return Tokenizer(ranks, SPLIT, *KNOWN_RANK_FILES.get(len(ranks), ([END_OF_TEXT], END_OF_TEXT)))


def train_bpe(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A BPE of exactly `n_vocab` ids, the end of text included: the same for the same texts, whatever the threads."""
    import rustbpe  # here alone, so that every other use of this package works without it

    trainer = rustbpe.Tokenizer()
    pieces = (piece for text in texts for piece in _pieces(text))
    trainer.train_from_iterator(pieces, n_vocab - 1, pattern=SPLIT)
    ranks = [bytes(token) for token, _ in trainer.get_mergeable_ranks()]
    if len(ranks) < n_vocab - 1:
        raise InputError(f"data.bpe_vocab_size is {n_vocab}, but the corpus has text for {len(ranks) + 1} tokens only: "
                         f"set it to {len(ranks) + 1} or less, or use tokenizer = \"bytes\"")
    return Tokenizer(ranks, SPLIT, [END_OF_TEXT], END_OF_TEXT)


def _pieces(text: str) -> Iterator[str]:
    """The text, cut inside runs of more than LONGEST_WHITESPACE whitespace characters and nowhere else."""
    start = 0
    if len(text) > LONGEST_WHITESPACE:
        for run in _LONG_WHITESPACE.finditer(text):
            for cut in range(run.start() + LONGEST_WHITESPACE, run.end(), LONGEST_WHITESPACE):
                yield text[start:cut]
                start = cut
    yield text[start:]
