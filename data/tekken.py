"""Reads Mistral's tekken.json, a byte-level BPE.

Source: mistral_common, tokens/tokenizers/tekken.py. `config` has the pattern and three sizes, `vocab`
the ranks with their bytes. Of these only as many count as default_vocab_size leaves after the special
tokens, which have the ids before them: rank 0 is the id default_num_special_tokens.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from configs.schema import InputError
from data.ends import check_end
from data.tokenizer import Tokenizer

NAME = "tekken.json"
BEGIN, END = "<s>", "</s>"
# Of files without `special_tokens` (up to version v7), in the order of their ids.
SPECIAL_TOKENS = (
    "<unk>",
    BEGIN,
    END,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)


def is_tekken(path: Path) -> bool:
    """Return whether a .json file is one of Mistral's, by its name or its first lines."""
    try:
        with open(path, "rb") as file:
            return "tekken" in path.name or b'"default_num_special_tokens"' in file.read(4096)
    except OSError:
        return False


def read_file(path: Path, end: str = "") -> Tokenizer:
    """Read the tokenizer of a tekken.json. end: data.end_token. InputError: it is damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return _read(document, end)
    except OSError as error:
        raise InputError(f"data.tokenizer: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"data.tokenizer: {path} is not a whole tekken.json: {reason}") from None


def _read(document: dict, end: str) -> Tokenizer:
    config = document["config"]
    first = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - first
    tokens = {row["rank"]: base64.b64decode(row["token_bytes"]) for row in document["vocab"]}
    missing = next((rank for rank in range(count) if rank not in tokens), None)
    if missing is not None:
        raise ValueError(f"of its {count} ranks, {missing} is missing")
    ranks = [tokens[rank] for rank in range(count)]
    if len(set(ranks)) != count or not {bytes([i]) for i in range(256)} <= set(ranks):
        raise ValueError("two ranks have the same bytes, or one of the 256 bytes has none")
    names = _special_tokens(document, first)
    end = check_end(end, names) if end else END
    ids = [*range(first, first + count), *range(first)]
    begin = BEGIN if BEGIN in names else None
    return Tokenizer(ranks, config["pattern"], names, end, ids, begin)


def _special_tokens(document: dict, count: int) -> list[str]:
    """List the names of the special tokens, whose ids are below `count`."""
    rows = document.get("special_tokens")
    if rows is None:
        named = dict(enumerate(SPECIAL_TOKENS))
    else:
        named = {row["rank"]: row["token_str"] for row in rows}
    names = [named.get(id, f"<SPECIAL_{id}>") for id in range(count)]
    if len(set(names)) != count or len(named) > count or END not in names:
        raise ValueError(f"its special tokens are not {count} different ones with {END} in them")
    return names
