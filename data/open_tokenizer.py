"""Opens the tokenizer that an option names."""

from __future__ import annotations

from pathlib import Path

from data import hf_tokenizer, rank_files, saved_tokenizer, tokenizer
from data.stores import kept


def open_tokenizer(name: str, cache: str = "") -> tokenizer.Tokenizer:
    """The tokenizer that `data.tokenizer` names, which must not be "bpe". cache: data.cache, for one
    in a store. InputError: it cannot be read."""
    if name == "bytes":
        return tokenizer.byte_tokenizer()
    path = kept.tokenizer(name, cache)
    if not path.endswith(".json"):
        return rank_files.from_rank_file(path)
    if saved_tokenizer.is_saved(path):
        return saved_tokenizer.load(path)
    return hf_tokenizer.read_file(Path(path))
