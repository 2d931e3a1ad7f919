"""Finds which tokens begin and end a text, in the files of a published tokenizer."""

import json
from pathlib import Path

# Tokens that may end a text if no file says which one does, in this order.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


def begin_and_end(folder: Path, document: dict) -> tuple[str | None, str]:
    """The names of the tokens that begin and end a text, from tokenizer_config.json, from the ids
    in config.json, or from ENDS."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    begin, end = (
        token["content"] if isinstance(token := config.get(key), dict) else token
        for key in ("bos_token", "eos_token")
    )
    names = {row["id"]: row["content"] for row in document["added_tokens"]}
    if end is None and (folder / "config.json").is_file():
        ids = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        end = names[ids[0] if isinstance(ids, list) else ids]
    if end is None:
        end = next((name for name in ENDS if name in names.values()), None)
    if end is None:
        raise ValueError(
            "nothing says which token ends a text (eos_token in tokenizer_config.json)"
        )
    return begin if begin in names.values() else None, end
