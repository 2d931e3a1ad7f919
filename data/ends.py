"""Finds which tokens begin and end a text, in the files of a published tokenizer.

For pretraining, the end of a text is what `eos_token` of tokenizer_config.json names. The other files
are read only where it names none. In a chat model's folder they often name the end of a turn too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from configs.schema import InputError

CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, MODEL = "generation_config.json", "config.json"
# Tokens that may end or begin a text if no file says which one does, in this order.
ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|end▁of▁sentence|>",
    "<|endofsentence|>",
    "[EOS]",
    "<|eos|>",
    "<EOS>",
    "<|im_end|>",
    "<|return|>",
    "<|eot_id|>",
    "<|eot|>",
    "[SEP]",
)
BEGINS = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<｜begin▁of▁sentence｜>",
    "<|begin▁of▁sentence|>",
    "[BOS]",
    "<|bos|>",
    "<BOS>",
    "<|startoftext|>",
)
# Tokens that the ids of a config.json cannot mean. A config without such ids has transformers'
# defaults (eos_token_id = 2), which are the ids of something else in most tokenizers.
NEVER_ENDS = (*BEGINS, "<unk>", "<pad>", "<mask>", "[UNK]", "[PAD]", "[CLS]", "[MASK]")


def begin_and_end(folder: Path, added: dict[int, str], end: str = "") -> tuple[str | None, str]:
    """Return the names of the tokens that begin (None: none does) and end a text.

    folder: of the tokenizer, whose other files are asked. added: id -> name of its added tokens.
    end: data.end_token, which comes before all files. InputError: nothing says which token ends a
    text, or what says it cannot be right.
    """
    return _begin(folder, added), check_end(end, added.values()) if end else _end(folder, added)


def check_end(end: str, names: object) -> str:
    """Return data.end_token. Raises InputError if it names no added token."""
    names = list(names)
    if end not in names:
        raise InputError(
            f"data.end_token: the tokenizer has no added token {end!r}: name one of {_some(names)}"
        )
    return end


def files_that_decide(folder: Path) -> list[Path]:
    """List the files on which the result of `begin_and_end` depends."""
    config = _read(folder / CONFIG)
    names = [CONFIG, MODEL]
    if not name_of(config.get("eos_token")) or "bos_token" not in config:
        names += [SPECIAL, GENERATION]
    return [folder / name for name in names if (folder / name).is_file()]


def added_tokens(folder: Path) -> dict[int, str]:
    """Map ids to names for the tokens that tokenizer_config.json numbers; {} if it numbers none."""
    rows = _read(folder / CONFIG).get("added_tokens_decoder")
    if not isinstance(rows, dict):
        return {}
    named = {int(id): name_of(row) for id, row in rows.items() if id.isdecimal()}
    return {id: name for id, name in named.items() if name}


def _begin(folder: Path, added: dict[int, str]) -> str | None:
    """Return the name of bos_token; a value of null says that there is none."""
    for file in (CONFIG, SPECIAL):
        said = _read(folder / file)
        if "bos_token" in said:
            begin = name_of(said["bos_token"])
            return begin if begin in added.values() else None
    if (folder / CONFIG).is_file():
        return None
    return next((name for name in BEGINS if name in added.values()), None)


def _end(folder: Path, added: dict[int, str]) -> str:
    for file in (CONFIG, SPECIAL):
        end = name_of(_read(folder / file).get("eos_token"))
        if end in added.values():
            return end
        if end:
            raise InputError(
                f"the eos_token of {file}, {end!r}, is no added token of the tokenizer: "
                f"set data.end_token to one of {_some(list(added.values()))}"
            )
    generation, model = _read(folder / GENERATION), _read(folder / MODEL)
    for said in (generation, model, model.get("text_config")):
        for id in _ids(said):
            if id in added and added[id] not in NEVER_ENDS:
                return added[id]
    for name in ENDS:
        if name in added.values():
            return name
    raise InputError(
        f"nothing says which token ends a text ({CONFIG} has no eos_token): set "
        f"data.end_token to one of {_some(list(added.values()))}"
    )


def _ids(said: object) -> Iterator[int]:
    """Return the ids of eos_token_id, which may be one, a list or null."""
    found = said.get("eos_token_id") if isinstance(said, dict) else None
    for id in found if isinstance(found, list) else [found]:
        if isinstance(id, int) and not isinstance(id, bool):
            yield id


def name_of(token: object) -> str:
    """Return the name of a token: a string, or an object with its properties; "": none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read(path: Path) -> dict:
    """Read the object of a JSON file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object: copy it again, or remove it")
    return found


def _some(names: list[str]) -> str:
    """Name a few of the tokens, those first that look like an end, for an error message."""
    if not names:
        return "its added tokens, of which it has none"
    likely = [name for name in names if "end" in name.lower() or "eo" in name.lower()]
    shown = [*likely, *(name for name in names if name not in likely)][:8]
    return ", ".join(shown) + (f" ({len(names)} in all)" if len(names) > len(shown) else "")
