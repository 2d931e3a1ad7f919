"""Opens the tokenizer that an option names.

| name                                  | opened by                                          |
|---------------------------------------|----------------------------------------------------|
| `bytes`                               | tokenizer.py                                       |
| `hf:OWNER/NAME[/FILE][@REVISION]`     | as the file, which stores/hub.py fetches           |
| `s3://...`, `gs://...`, `az://...`    | as the file, which stores/kept.py fetches          |
| a folder                              | as the first of stores/kept.py::FILES in it        |
| a run's or prepared `tokenizer.json`  | `load_saved`                                       |
| `tekken.json`                         | tekken.py                                          |
| any other `.json`                     | hf_tokenizer.py                                    |
| any other file                        | rank_files.py                                      |
"""

from __future__ import annotations

import binascii
import json
from pathlib import Path

from configs.schema import Data, InputError
from data import ends, hf_tokenizer, library, rank_files, tekken, tokenizer
from data.stores import kept


def open_named(cfg: Data) -> tokenizer.Tokenizer:
    """Open the tokenizer of a run's options, but "bpe". InputError: it cannot be read."""
    return open_tokenizer(cfg.tokenizer, cfg.cache, cfg.tokenizer_pattern, cfg.end_token)


def open_tokenizer(
    name: str, cache: str = "", pattern: str = "", end: str = ""
) -> tokenizer.Tokenizer:
    """Open the tokenizer that `data.tokenizer` names, which must not be "bpe".

    cache: data.cache, for one in a store. pattern, end: data.tokenizer_pattern and data.end_token.
    InputError: it cannot be read, or an option does not fit it.
    """
    if name == "bytes":
        return _ending(tokenizer.byte_tokenizer(), end)
    path = kept.tokenizer(name, cache)
    if not path.endswith(".json"):
        return rank_files.from_rank_file(path, pattern, end)
    if pattern:
        raise InputError(
            f"data.tokenizer_pattern has no effect with {path}, which says how it cuts text: leave "
            "the option out"
        )
    if _is_saved(path):
        return _ending(load_saved(path), end)
    if tekken.is_tekken(Path(path)):
        return tekken.read_file(Path(path), end)
    return hf_tokenizer.read_file(Path(path), end, cache)


def _ending(tok: tokenizer.Tokenizer, end: str) -> tokenizer.Tokenizer:
    """Return the same tokenizer with another token that ends a text, if one is named."""
    if not end or ends.check_end(end, tok.special_tokens) == tok.end_of_text:
        return tok
    if isinstance(tok, library.LibraryTokenizer):
        return hf_tokenizer.opened(tok.document, (tok.begin_of_text, end), tok.companions)
    ids = tok.ids or list(range(tok.n_vocab))
    return tokenizer.Tokenizer(
        tok.ranks, tok.split, tok.special_tokens, end, ids, tok.begin_of_text
    )


def load_saved(path: str) -> tokenizer.Tokenizer:
    """Load what `Tokenizer.save` wrote. Raises InputError if it is missing or something else."""
    try:
        with open(path, encoding="ascii") as file:
            saved = json.load(file)
        if "document" in saved:
            return library.restored(saved)
        # b64decode takes three times as long
        ranks = [binascii.a2b_base64(token) for token in saved["ranks"]]
        names = (saved["split"], saved["special_tokens"], saved["end_of_text"])
        return tokenizer.Tokenizer(ranks, *names, saved.get("ids"), saved.get("begin_of_text"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a saved tokenizer ({error!r})") from error


def _is_saved(path: str) -> bool:
    """Tell whether `Tokenizer.save` wrote a file: no other tokenizer.json begins with this key."""
    try:
        with open(path, "rb") as file:
            return b'"split"' in file.read(20)
    except OSError:
        return False
