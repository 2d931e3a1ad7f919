"""Finds the file of the tokenizer that an option names: on this host, in a folder, on the hub
(hub.py), or in a store: `data.tokenizer = "s3://bucket/llama/tokenizer.json"`.

One in a store is fetched into a folder of `data.cache`, with the companion files that say how a
text begins and ends, and what its chat template is. The folder's name is a hash of the stored
files, so a file that is replaced there is another tokenizer here, and a file that is here is used
without hashing its content. `tools/check.py` fetches it once for a host, before the ranks start.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from configs.schema import CACHE, InputError
from data.stores import hub
from data.stores.places import is_url, key_of, not_writable
from reliability.disk import new_folder

# In the folder of a published model, its tokenizer: Hugging Face's, Mistral's, Meta's,
# data/train_tokenizer.py's, Moonshot's, Qwen's.
FILES = (
    "tokenizer.json",
    "tekken.json",
    "original/tokenizer.model",
    "tokenizer.tiktoken",
    "tiktoken.model",
    "qwen.tiktoken",
    "tokenizer.model",
)
# Its companion files (data/ends.py, data/chat.py).
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)


def tokenizer(name: str, cache: str) -> str:
    """Return the file of the tokenizer that an option names, fetching it. Raises InputError."""
    if name.startswith(hub.PREFIX):
        return hub.fetched(name, FILES, COMPANIONS)
    if is_url(name):
        return _fetched(name, cache)
    path = os.path.expanduser(name)
    return _in_folder(path) if os.path.isdir(path) else path


def _in_folder(folder: str) -> str:
    for name in FILES:
        if os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise InputError(
        f"data.tokenizer: {folder} is a folder without a tokenizer: none of {', '.join(FILES)} is in it"
    )


@functools.cache
def _fetched(url: str, cache: str) -> str:
    """Fetch once for a process, so that it sees one version."""
    key = key_of(url)
    try:
        found = {key: key.stat()}
    except FileNotFoundError:
        raise InputError(
            f"data.tokenizer: {url} is not there: name a file of a tokenizer"
        ) from None
    for name in COMPANIONS if url.endswith(".json") else ():
        try:
            found[key.parent / name] = (key.parent / name).stat()
        except FileNotFoundError:
            continue
    decides = repr([(str(each), *stat) for each, stat in found.items()])
    name = f"tokenizer-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"
    folder = Path(os.path.abspath(os.path.expanduser(cache or CACHE)), name)
    try:
        if not folder.is_dir():
            with new_folder(folder) as made:
                for each, stat in found.items():
                    if each.download(made / each.name, stat) != stat:
                        raise InputError(
                            f"data.tokenizer: {each} was replaced meanwhile: start again"
                        )
    except OSError as error:
        if not folder.is_dir():  # else another rank was faster
            raise not_writable(folder, error) from error
    return str(folder / key.name)
