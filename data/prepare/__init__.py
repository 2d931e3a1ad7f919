"""Tokenises a corpus once: `prepare(cfg)` makes the folder that data/prepared.py describes, or
opens the one in the cache.

`python -m data.prepare --out FOLDER` makes one at a path of your choice, for data.source.

**The work is done in parts.** The source is divided into parts of about job.PART_BYTES, by names
and sizes alone. Each part becomes one shard of each split, made by the next free process (by
several threads when there are fewer parts than cores). So neither the number of processes nor a
kill can change a token or the order. The files of a part are flushed to the disk before its record
is put in place, so no finished part is made again after a kill. Each core holds a few documents in
memory.

**A document is held out** when its hash, as a number in [0, 1), is below validation_fraction. The
hash is of the text alone. So the choice stays when other documents come and go, and copies of one
text land in the same split. There is one exception: when a split would be empty, the text with the
lowest (or highest) hash changes sides and the parts that contain it are made again. A corpus of a
single text is cut in two.

**A folder appears whole or not at all.** It is written under a temporary name in the same
directory, flushed to the disk and then renamed, by one process at a time (the kernel frees the lock
when all processes that hold it are dead).

job.py plans the parts and merges them, part.py makes one, encoding.py turns a document into tokens,
workers.py runs several processes, and __main__.py is the command.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs.schema import CACHE, Data, InputError, is_prepared
from data import ends, fim, formats, rank_files, sources
from data.open_tokenizer import open_named
from data.prepare.job import BPE_CHARACTERS, PrepareJob
from data.prepare.workers import Processes
from data.prepared import (
    FORMAT,
    FORMAT_OF_ANSWERS,
    Prepared,
    open_prepared,
    read_manifest,
)
from data.stores import kept, places
from data.stores.corpus import is_prepared_there
from data.stores.upload import upload
from reliability.disk import sync

Log = Callable[[str], object]


def prepare(cfg: Data, log: Log = print, out: str = "", workers: int = 0) -> Prepared:
    """Return the tokenised corpus of `cfg`, from the cache or from the folder `out`. It is made
    first if it is not there.

    Any number of processes may call this at once. A source that is a prepared folder is opened as
    it is. `log` receives progress messages. `workers` is the largest number of processes to use; 0
    means one per core. InputError: the source, the tokenizer or the cache cannot be used."""
    if places.is_url(out):
        made = prepare(cfg, log, "", workers)
        if places.is_url(made.folder):
            raise InputError(f"data.source: {cfg.source} is prepared already")
        upload(made, out, log)
        return open_prepared(out, cfg)
    if is_tokenised(cfg.source):
        if out:
            raise InputError(f"data.source: {cfg.source} is prepared already")
        return _open_source(cfg)
    fim.check(cfg)
    files = formats.find(cfg)
    key = _key(cfg, files)
    folder = os.path.abspath(os.path.expanduser(out or _cached(cfg, key)))
    parent = os.path.dirname(folder)
    if not _is_there(folder):
        try:
            os.makedirs(parent, exist_ok=True)
            with _lock(f"{folder}.lock", log) as lock:
                if not _is_there(folder):  # no other process made it meanwhile
                    most = workers or len(os.sched_getaffinity(0))
                    _make(folder, key, cfg, files, log, Processes(most, lock))
        except OSError as error:
            option = "--out" if out else "data.cache"
            raise places.not_writable(parent, error, option) from error
    if out and (not is_prepared(folder) or read_manifest(folder)["key"] != key):
        raise InputError(
            f"--out: {folder} has something else, or was made with other options or from files "
            "that have changed since: give another folder, or remove it"
        )
    return open_prepared(folder)


def is_tokenised(source: str) -> bool:
    """Return whether a source is a prepared folder, here or in a store, which gets a request."""
    return is_prepared_there(source) if places.is_url(source) else is_prepared(source)


def kept_in(cfg: Data) -> str:
    """Return the folder that `prepare(cfg)` would open, making nothing. InputError as there."""
    if is_prepared(cfg.source):
        return os.path.abspath(os.path.expanduser(cfg.source))
    return os.path.abspath(os.path.expanduser(_cached(cfg, _key(cfg, formats.find(cfg)))))


def _cached(cfg: Data, key: str) -> str:
    return os.path.join(cfg.cache or CACHE, key)


def _is_there(folder: str) -> bool:
    """Return whether something is there: a file, or a folder with content. An empty one was created
    in order to be filled."""
    return os.path.isfile(folder) or (os.path.isdir(folder) and bool(os.listdir(folder)))


def _open_source(cfg: Data) -> Prepared:
    """Open a prepared folder. InputError: options name what did not make its tokens."""
    is_stored = places.is_url(cfg.source)
    folder = cfg.source if is_stored else os.path.abspath(os.path.expanduser(cfg.source))
    prepared = open_prepared(folder, cfg)
    if cfg.format not in ("text", prepared.format):  # the default accepts the folder's format
        raise InputError(
            f"data.format = {cfg.format}: {prepared.folder} was prepared as {prepared.format}, and "
            "keeps its format: leave the option out"
        )
    if cfg.fim_rate:
        raise InputError(
            f"data.fim_rate: {prepared.folder} is prepared already, and keeps its documents as they "
            "are: leave the option out, and give it to data.prepare"
        )
    for name in ("add_bos", "add_eos"):
        wanted = getattr(cfg, name)
        if wanted == Data.model_fields[name].default:  # which accepts the folder's documents
            continue
        if read_manifest(folder).get(name) != wanted:
            raise InputError(
                f"data.{name} = {str(wanted).lower()}: {prepared.folder} was prepared with "
                f"{str(not wanted).lower()}, and keeps its documents as they are: leave the option "
                "out, or prepare the corpus with it"
            )
    if cfg.tokenizer != "bpe":  # the default, which accepts the folder's tokenizer
        named = open_named(cfg)
        if named.fingerprint != prepared.tokenizer.fingerprint:
            raise InputError(
                f"data.tokenizer: {cfg.tokenizer} ({named.fingerprint}) is not the tokenizer that "
                f"made the tokens in {prepared.folder} ({prepared.tokenizer.fingerprint}): leave "
                "the option out, or prepare the corpus with this one"
            )
    return prepared


def _key(cfg: Data, files: list[sources.File]) -> str:
    """Return the name of the folder: a readable part and a hash of everything that decides its
    content. Of the files, path, size and time are hashed, as `make` does: to read their content
    would take as long as to read the tokens."""
    kind = cfg.tokenizer
    if kind == "bpe":
        kind = f"bpe{cfg.bpe_vocab_size}"
    elif kind != "bytes":
        path = Path(kept.tokenizer(kind, cfg.cache))
        content = rank_files.read_rank_file(str(path))
        if re.search(rb'"special"\s*:\s*false', content):
            # such tokens are found in text; in a folder that older code has made they are not
            content += b"found"
        if path.suffix == ".json":  # its companion files say how a text begins and ends
            companions = ends.files_that_decide(path.parent)
            content += b"".join(file.read_bytes() for file in companions)
        kind = hashlib.sha256(content).hexdigest()
    options = [
        cfg.validation_fraction,
        cfg.text_field,
        cfg.add_bos,
        cfg.add_eos,
        cfg.max_document_bytes,
        *sources.json_reading(cfg, files),
    ]
    described = formats.describe(cfg, open_named(cfg)) if cfg.format != "text" else {}
    if described:
        options += [FORMAT_OF_ANSWERS, described]
    if cfg.fim_rate:
        options += [cfg.fim_rate, fim.SPM_RATE, cfg.fim_tokens]
    if cfg.tokenizer_pattern or cfg.end_token:
        options += [cfg.tokenizer_pattern, cfg.end_token]
    decides = json.dumps(
        [FORMAT, cfg.source in sources.INSTALLED, files, kind, BPE_CHARACTERS, options]
    )
    readable = re.sub(
        r"[^A-Za-z0-9]+", "-", f"{os.path.basename(cfg.source.rstrip('/'))}-{kind[:8]}"
    ).strip("-")
    return f"{readable[:60]}-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"


@contextmanager
def _lock(path: str, log: Log) -> Iterator[int]:
    """Let one process work at a time, and the processes that inherit the descriptor. On a network
    file system that supports flock this holds across hosts. The file stays: if it were removed, a
    third process could lock a new file while the second still holds the old one."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process that is preparing this corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _make(
    folder: str,
    key: str,
    cfg: Data,
    files: list[sources.File],
    log: Log,
    processes: Processes,
) -> None:
    """Make the folder. The caller holds the lock, so the temporary folder is ours, and so are the
    finished parts that a killed process left in it. (Where the lock does not reach another host,
    both write the same bytes to the same names.)"""
    temporary = f"{folder}.tmp"
    try:
        if not _is_finished(temporary, key):
            job = PrepareJob.open(temporary, key, cfg, files, log)
            records = job.run(processes, log)
            job.finish(records, key, log)
        if sources.find(cfg.source) != files:
            shutil.rmtree(temporary)
            raise InputError(
                f"data.source: {cfg.source} changed while it was read: run again when nothing "
                "changes it"
            )
        shutil.rmtree(os.path.join(temporary, "parts"), ignore_errors=True)
        os.rename(temporary, folder)
        sync(os.path.dirname(folder))
    except OSError:
        if not _is_there(folder):  # otherwise another host was faster and made the same folder
            raise
    finally:
        if not any(Path(temporary, "parts").glob("*.json")):  # no finished part is worth keeping
            shutil.rmtree(temporary, ignore_errors=True)


def _is_finished(temporary: str, key: str) -> bool:
    """Return whether an earlier process was killed between writing the manifest, which comes last,
    and the rename."""
    with suppress(InputError):
        return read_manifest(temporary)["key"] == key
    return False
