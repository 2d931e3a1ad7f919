"""Turns the lines of a source into tokens as `data.format` says: plain text, conversations, or
pairs of prompt and completion. In the last two only answers are trained on (data/answers.py).

A format is described as JSON and written into the prepared folder (`format.json`), so that the
folder explains itself and every process that makes a part does the same.
"""

from __future__ import annotations

import json
import os
from typing import Any

from configs.schema import Data, InputError
from data import sources
from data.answers import Completions, Format
from data.tokenizer import Tokenizer

FILE = "format.json"


def describe(cfg: Data, tok: Tokenizer) -> dict:
    """Describe as JSON how `cfg` turns lines into tokens, apart from the tokenizer; {} for
    text. Raises InputError if a conversation cannot be rendered at all."""
    if cfg.format == "text":
        return {}
    if cfg.format == "completion":
        return {"format": cfg.format, "add_bos": cfg.add_bos, "add_eos": cfg.add_eos}
    if cfg.add_bos or not cfg.add_eos:
        raise InputError(
            'data.add_bos and data.add_eos have no effect with data.format = "chat": its template '
            "says how a conversation begins and ends. Remove them"
        )
    from data import chat  # jinja2 is imported for conversations alone

    template = chat.find_template(cfg, tok)
    chat.Chat(tok, template)  # raises InputError for what is no template
    described = {"format": cfg.format} | template._asdict()
    if not template.may_drop:  # corpora keep the names that they had before there was this option
        del described["may_drop"]
    return described


def build(described: dict, tok: Tokenizer) -> Format | None:
    """Build the format that `describe` has described; None for text."""
    if not described:
        return None
    if described["format"] == "completion":
        return Completions(tok, described["add_bos"], described["add_eos"])
    from data import chat

    fields = {name: value for name, value in described.items() if name != "format"}
    return chat.Chat(tok, chat.Template(**fields))


def always_written(cfg: Data, tok: Tokenizer) -> list[int]:
    """Return the ids that any conversation becomes by the template of `cfg`."""
    form: Any = build(describe(cfg, tok), tok)
    return form.probe_ids() if hasattr(form, "probe_ids") else []


def warning(folder: str, tok: Tokenizer) -> str:
    """Warn of conversations in a prepared folder that do not teach a model to stop; "": none."""
    form: Any = build(load(folder), tok)
    return form.warning() if hasattr(form, "warning") else ""


def load(folder: str) -> dict:
    """Read the description from a prepared folder; {} for text."""
    try:
        with open(os.path.join(folder, FILE), encoding="ascii") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def find(cfg: Data) -> list[sources.File]:
    """Find the files of `cfg.source`, as data/sources.py::find does. Raises InputError if one of
    them has no JSON records, where the format needs these."""
    if cfg.format == "text":
        return sources.find(cfg.source)
    if cfg.tokenizer == "bpe":
        raise InputError(
            f'data.format = "{cfg.format}" needs a tokenizer that is there already, since a BPE '
            "would be trained on the lines of this source: give data.tokenizer the path of one, "
            'such as the tokenizer.json of the run that is continued, or "bytes"'
        )
    lines = f'data.format = "{cfg.format}" reads JSON records (.jsonl, .json)'
    if cfg.source.startswith(sources.HUGGING_FACE):
        raise InputError(
            f"data.source: {lines}, not {cfg.source}: export a split of the dataset first, by "
            'to_json("talks.jsonl") of what datasets.load_dataset returns'
        )
    files = sources.find(cfg.source)
    others = [file.path for file in files if not sources.has_records(file, cfg.json_files)]
    if others:
        raise InputError(f"data.source: {lines}, not {others[0]}: name the files that are")
    return files
