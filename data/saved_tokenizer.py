"""Reads the tokenizer.json of a run's folder or of a prepared folder, which `Tokenizer.save` wrote."""

from __future__ import annotations

import binascii
import json

from configs.schema import InputError
from data import library
from data.tokenizer import Tokenizer


def load(path: str) -> Tokenizer:
    """Load a saved tokenizer. Raises InputError if the file is missing or something else."""
    try:
        with open(path, encoding="ascii") as file:
            saved = json.load(file)
        if "document" in saved:
            return library.restored(saved)
        # b64decode takes three times as long
        ranks = [binascii.a2b_base64(token) for token in saved["ranks"]]
        names = (saved["split"], saved["special_tokens"], saved["end_of_text"])
        return Tokenizer(ranks, *names, saved.get("ids"), saved.get("begin_of_text"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a saved tokenizer ({error!r})") from error


def is_saved(path: str) -> bool:
    """Return whether `Tokenizer.save` wrote the file, as into a run's folder. Its first key is one
    that no other tokenizer.json begins with."""
    try:
        with open(path, "rb") as file:
            return b'"split"' in file.read(20)
    except OSError:
        return False
