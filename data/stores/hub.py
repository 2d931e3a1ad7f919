"""Fetches a tokenizer of the Hugging Face Hub: `data.tokenizer = "hf:Qwen/Qwen3-8B"`.

huggingface_hub fetches it into its own cache, which it shares with transformers (HF_HOME), with the
token that `hf auth login` has stored. A file in the cache is not requested again: a run reads the
version that was fetched first, `@REVISION` another one. `tools/check.py` fetches it once for a host,
before the ranks start.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from configs.schema import HUB_NAME, InputError

PREFIX = "hf:"
LOG_IN = "log in with   hf auth login   (or set HF_TOKEN)"


class Named(NamedTuple):
    """A repository of models, a file in it ("": its tokenizer) and a revision ("": main)."""

    repo: str
    file: str
    revision: str

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f"@{self.revision}" if self.revision else "")


def fetched(name: str, files: Sequence[str], companions: Sequence[str]) -> str:
    """Return the path of the tokenizer that `hf:...` names.

    files: the names that it may have in a repository, the first that is there counts. companions:
    those that are fetched with it, if they exist. InputError: it cannot be had."""
    found = _fetched(name, tuple(files), tuple(companions))
    if isinstance(found, InputError):
        raise found
    return found


@functools.cache
def _fetched(name: str, files: tuple[str, ...], companions: tuple[str, ...]) -> str | InputError:
    """Fetch once for a process, also where it fails: a hub that does not answer takes its time."""
    parts = HUB_NAME.fullmatch(name)
    if not parts:
        return InputError(
            f"data.tokenizer: {name} names no model of the Hugging Face Hub: write "
            "hf:OWNER/NAME, as in hf:Qwen/Qwen3-8B, or hf:OWNER/NAME@REVISION"
        )
    asked = Named(parts["repo"], parts["file"] or "", parts["revision"] or "")
    try:
        return _fetch(asked, (asked.file,) if asked.file else files, companions)
    except InputError as error:
        return error


def _fetch(asked: Named, files: tuple[str, ...], companions: tuple[str, ...]) -> str:
    for file in files:
        path = _file(asked, file)
        if path:
            break
    else:
        raise InputError(_without_tokenizer(asked, files))
    # all files of one version, even if another is pushed meanwhile
    parts = PurePath(file)
    commit = PurePath(path).parents[len(parts.parts) - 1].name
    for name in companions:
        _file(asked._replace(revision=commit), str(parts.parent / name))
    return path


def _file(asked: Named, name: str) -> str:
    """Return the path of a file in the cache, fetching it if need be; "": there is none."""
    import huggingface_hub as hub  # here, because it takes half a second to import
    from huggingface_hub import constants, errors

    revision = asked.revision or constants.DEFAULT_REVISION
    try:
        known = hub.try_to_load_from_cache(asked.repo, name, revision=revision)
        if known is None:
            return hub.hf_hub_download(asked.repo, name, revision=revision)
        return known if isinstance(known, str) else ""
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            return ""
        reason = error.__cause__ or error
    except errors.GatedRepoError:
        raise InputError(
            f"data.tokenizer: {asked} is given to those who accept its licence: accept it on "
            f"https://huggingface.co/{asked.repo}, then {LOG_IN}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"data.tokenizer: the Hugging Face Hub has no model {asked.repo} that you may read: "
            f"correct the name, or, if it is private, {LOG_IN}"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"data.tokenizer: {asked.repo} has no revision {asked.revision!r}: name a branch, a tag "
            "or a commit after the @, or none"
        ) from None
    except errors.EntryNotFoundError:
        return ""
    except errors.HFValidationError as error:
        raise InputError(f"data.tokenizer: {asked} is no name of a model: {error}") from None
    except PermissionError as error:
        raise InputError(
            f"data.tokenizer: {asked} cannot be kept in {constants.HF_HUB_CACHE} "
            f"({error.strerror}): set HF_HOME to another folder"
        ) from None
    except Exception as error:  # of the HTTP library, whichever huggingface_hub uses
        reason = error
    words = str(reason).partition("\n")[0]
    raise InputError(
        f"data.tokenizer: {asked} cannot be fetched from {constants.ENDPOINT} "
        f"({type(reason).__name__}: {words}): try again, or set HF_HUB_OFFLINE=1 to take what the "
        f"cache has of it, or name a folder with its files"
    ) from None


def _without_tokenizer(asked: Named, files: tuple[str, ...]) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"data.tokenizer: {asked} is not in the cache ({constants.HF_HUB_CACHE}), and "
            "HF_HUB_OFFLINE forbids to fetch it: unset that, or run   hf download "
            f"{asked.repo} tokenizer.json tokenizer_config.json   where there is a network"
        )
    return f"data.tokenizer: {asked} has no tokenizer: none of {', '.join(files)} is there"
