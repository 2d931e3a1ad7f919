"""Provides the chat template of a run after training: to chat with its model, and for exports.

A run records in data.json the template of its conversations (data/too_long.py::record). So a
question gets the tokens that it would have had in training, and an export carries the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import Data, InputError
from data import formats, hf_tokenizer
from data.tokenizer import Tokenizer

if TYPE_CHECKING:  # jinja2 is imported for conversations alone
    from data.chat import Chat

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"  # transformers prefers it to the one in tokenizer_config.json


def of_run(run: Path, tok: Tokenizer) -> Chat | None:
    """Return the format of a run's conversations; None without. Raises InputError."""
    path = run / "data.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8")).get("chat", {})
        found: Any = formats.build(described, tok)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error!r})") from None
    return found


def find(folder: Path, tok: Tokenizer, template: str) -> Chat:
    """Return the chat template of the model in a folder, a run's or one of Hugging Face's.
    template: as data.chat_template; "": the one of the run, or of the tokenizer's files. Raises
    InputError if there is none."""
    from data import chat

    of_tokenizer = folder / "tokenizer.json"
    found = None if template else of_run(folder, tok)
    if found is not None:
        return found
    if not template and not chat.has_template(of_tokenizer):
        raise InputError(
            f"{folder} has no chat template: it was not trained on conversations, and its tokenizer "
            "has none. Name one with --chat-template (plain, chatml, or a Jinja file), or continue "
            "a text with --prompt"
        )
    options = {"format": "chat", "tokenizer": str(of_tokenizer), "chat_template": template}
    return chat.Chat(tok, chat.find_template(Data.model_validate(options), tok))


# --------------------------------------------------------------------------------------------------
# exports


def files(run: Path, tok: Tokenizer, longest: int) -> dict[str, Any]:
    """Return data/hf_tokenizer.py::files, with the run's chat template. Raises InputError."""
    return with_template(hf_tokenizer.files(tok, longest), of_run(run, tok))


def with_template(given: Mapping[str, dict | Path], asked: Chat | None) -> dict[str, Any]:
    """Change the files of a tokenizer so that transformers renders a conversation as training did,
    and so that `generate` ends an answer where it ended there. A path is of a file that is copied.
    asked: None changes nothing. Raises InputError."""
    if asked is None:
        return dict(given)
    from data.chat import NAMES

    template = asked.template
    config = dict(_content(given.get(CONFIG, {})))
    config["chat_template"] = for_transformers(template.source)
    for name in NAMES:
        in_template = name in template.source
        if name in template.tokens and (in_template or template.tokens[name] in asked.id_of):
            config[name] = template.tokens[name]
        elif in_template:
            # it was empty in training
            config.pop(name, None)
    generation = dict(_content(given.get(GENERATION, {})))
    end = asked.end_of_turn()
    ends = generation.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    if end is not None and end not in ends:
        generation["eos_token_id"] = [*ends, end]
    kept = {name: file for name, file in given.items() if name != TEMPLATE}
    return kept | {CONFIG: config, GENERATION: generation}


def for_transformers(source: str) -> str:
    """Hide `strftime_now` from the template, since the day was unknown in training too: a template
    tests whether the function exists."""
    if "strftime_now" not in source:
        return source
    # the line break belongs to the block (trim_blocks)
    return "{% set strftime_now = undefined %}\n" + source


def _content(file: dict | Path) -> dict:
    if isinstance(file, dict):
        return file
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error!r})") from None
