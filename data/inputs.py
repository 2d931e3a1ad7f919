"""Checks that a run's inputs exist and that its tokenizer fits the model.

`tools/check.py` runs the checks on each node before the ranks start, `data/open.py` when they open
their text. So nothing here imports torch, and connections are opened only for URLs that an option
names.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from functools import partial

from configs.schema import Config, Data, InputError, is_prepared
from data import fim, formats, sources, tasks
from data.open_tokenizer import load_saved, open_named
from data.packing import PackedTokens
from data.prepare import prepare
from data.stores import places
from data.tokenizer import Tokenizer


def sources_of(cfg: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sources to train on and those of [[validation.sets]], as name -> source each. The
    source of a run without a mixture is called ""."""
    rows = {row.name: row.source for row in cfg.data.mixture} or {"": cfg.data.source}
    return rows, {row.name: row.source for row in cfg.validation.sets}


def check_bpe(cfg: Config) -> None:
    """Raise InputError if several sources would each get a BPE trained on it."""
    rows, further = sources_of(cfg)
    # a store is read when the run opens it
    here = [source for source in (rows | further).values() if not places.is_url(source)]
    unprepared = [source for source in here if not is_prepared(source)]
    if cfg.data.tokenizer == "bpe" and len(rows | further) > 1 and unprepared:
        raise InputError(
            'data.tokenizer = "bpe" is trained on one source, but there are several, and '
            f"{unprepared[0]} is not prepared "
            "yet: give the path of a tokenizer (python -m data.train_tokenizer makes one), or "
            '"bytes"'
        )


def check_vocabulary(tokenizer: Tokenizer, data: Data, vocab_size: int) -> None:
    """Raise InputError if texts, or the template of conversations, become ids that a model of
    `vocab_size` tokens does not know. Special tokens that neither uses need no row."""
    if problem := tokens_without_row(tokenizer, data, vocab_size):
        raise InputError(f"{problem}: set model.vocab_size to at least {tokenizer.n_vocab}")


def tokens_without_row(tokenizer: Tokenizer, data: Data, vocab_size: int) -> str:
    """Return which used tokens a model of `vocab_size` rows lacks, as a clause; "": none."""
    if tokenizer.n_rows > vocab_size:
        return (
            f"the tokenizer {data.tokenizer!r} has {tokenizer.n_rows} tokens that texts "
            f"may have, the model's vocabulary only {vocab_size}"
        )
    if problem := fim.token_without_row(data, tokenizer, vocab_size):
        return problem
    if tokenizer.n_vocab > vocab_size:
        named_only = tokenizer.named_only()
        for id in formats.always_written(data, tokenizer):
            if id >= vocab_size:
                return (
                    f"the chat template writes {named_only[id]}, the token {id} of the tokenizer "
                    f"{data.tokenizer!r}, and the model's vocabulary has only {vocab_size}"
                )
    return ""


def beyond(folder: str, token: int, vocab_size: int) -> str:
    """Return what is wrong with a prepared corpus that has a token without a row in the model."""
    has = f"{folder} has token {token}, the model's vocabulary {vocab_size}"
    try:
        name = load_saved(f"{folder}/tokenizer.json").named_only().get(token)
    except InputError:
        name = None
    if name is None:
        return (
            f"{has}: this tokenised corpus is damaged (python -m data.prepare --source "
            f"{shlex.quote(folder)} --verify finds where)"
        )
    return (
        f"{has}: it is {name}, which its chat template has written for a conversation; leave such "
        "conversations out, or give another template (data.chat_template)"
    )


def check_masking(corpus: object, cfg: Config) -> None:
    """Raise InputError if attention would go from one conversation to the next."""
    if isinstance(getattr(corpus, "train", None), PackedTokens) and not cfg.data.mask_documents:
        raise InputError(
            f"{corpus.folder} has conversations, of which a window holds several: set "
            "data.mask_documents = true, so that attention stays inside each"
        )


def problems(cfg: Config, vocab_size: int) -> Iterator[str]:
    """List the problems of a run's text and tokenizer as seen from this machine, one sentence for
    each.

    vocab_size: of the model. A tokenizer that is yet to be trained is not looked at: its size is an
    option, which `configs/check.py` compares with the model's.
    """
    rows, further = sources_of(cfg)
    checks = [partial(check_bpe, cfg)]
    if cfg.data.tokenizer != "bpe":
        checks.append(partial(_check_tokenizer, cfg, vocab_size))
    for source in (rows | further).values():
        checks.append(partial(_check_source, cfg, source, vocab_size))
    checks += [partial(tasks.read, task) for task in cfg.evaluation.tasks]
    for check in checks:
        try:
            check()
        except InputError as error:
            yield str(error)


def _check_tokenizer(cfg: Config, vocab_size: int) -> None:
    tokenizer = open_named(cfg.data)
    check_vocabulary(tokenizer, cfg.data, vocab_size)
    formats.describe(cfg.data, tokenizer)  # is there a template?


def _check_source(cfg: Config, source: str, vocab_size: int) -> None:
    if places.is_url(source):  # read by the run, not by each node
        places.key_of(source)
    elif is_prepared(source):  # then `prepare` opens it, and makes nothing
        prepared = prepare(cfg.data.model_copy(update={"source": source}))
        check_masking(prepared, cfg)
        # otherwise the tokenizer is the one that is named, which is looked at by itself
        if cfg.data.tokenizer == "bpe":
            named = cfg.data.model_copy(update={"tokenizer": source})
            check_vocabulary(prepared.tokenizer, named, vocab_size)
    elif cfg.data.format != "text" or not source.startswith(sources.HUGGING_FACE):
        formats.find(cfg.data.model_copy(update={"source": source}))
    elif importlib.util.find_spec("datasets") is None:
        raise InputError(
            f'data.source = "{source}" needs the package datasets: pip install datasets'
        )
