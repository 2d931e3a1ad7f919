"""Caches the result of opening a large tokenizer.json in data.cache, so that every rank and every
later start reads it instead of proving it again (data/hf_tokenizer.py).

The name of a kept file is a hash of all that decides its content: the bytes of the tokenizer.json,
the tokens that begin and end a text, the code that proves, and the version of `tokenizers`. Its
first line is a hash of the rest. A damaged file is written again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from configs.schema import CACHE
from data import library
from reliability.disk import write_whole

LEAST = 2_000_000  # bytes; a smaller tokenizer.json is proved in a tenth of a second
CODE = ("hf_tokenizer.py", "library.py", "proved.py", "tokenizer.py")  # decides what is kept


def path_of(content: bytes, begin: str | None, end: str, cache: str) -> Path:
    """Name the kept file. content: of the tokenizer.json. cache: data.cache."""
    decides = [hashlib.sha256(content).hexdigest(), begin, end, _code(), tokenizers.__version__]
    name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
    folder = os.path.abspath(os.path.expanduser(cache or CACHE))
    return Path(folder, f"tokenizer-{name}.proof")


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for name in CODE:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def opened(
    path: Path, parts: Mapping[str, Any], make: Callable[[], library.LibraryTokenizer]
) -> library.LibraryTokenizer:
    """Return the tokenizer that is cached at `path`, or else build it with `make` and cache it.

    parts: `document` and `beside`, which the file does not hold, as in `library.restored`. A cache
    that cannot be written costs time alone: `make` is called again by the next rank."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == digest:
            return library.restored(json.loads(body) | parts)
    tok = make()
    with suppress(OSError):
        _write(path, tok)
    return tok


def _write(path: Path, tok: library.LibraryTokenizer) -> None:
    body = json.dumps(tok.found() | {"fingerprint": tok.fingerprint}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(str(path), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
