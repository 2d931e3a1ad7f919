"""Puts a prepared folder into a store, with the hashes of its blocks, and its manifest last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

import numpy as np

from configs.schema import InputError
from configs.words import number_of
from data.prepared import Prepared, file_sha256, read_manifest
from data.stores import corpus
from data.stores.blocks import hashes_of
from data.stores.places import key_of

PIECE = 1 << 22  # bytes that are read at a time


def upload(prepared: Prepared, url: str, log: Callable[[str], object] = print) -> None:
    """Upload a prepared folder. Raises InputError if something else is there, if a file is not what
    was written, or if the store does not take it. An upload that was killed is repeated."""
    key = key_of(url, soon=False)
    if not key.path:
        raise InputError(f"--out: {url} is a whole bucket: name a prefix in it")
    manifest = read_manifest(prepared.folder)
    if (key / corpus.MANIFEST).exists():
        if corpus.read_manifest(url)["fingerprint"] != manifest["fingerprint"]:
            raise InputError(f"--out: {url} has another corpus: give another prefix, or remove it")
        return
    files = manifest["files"]
    total = sum(file["bytes"] for file in files.values())
    log(f"{url}: {number_of(len(files), 'file')}, {total / 1e6:,.1f} MB")
    tables = []
    first = {"names.starts": 1, "tokenizer.json": 2}  # lest the rest look like text
    for name in sorted(files, key=lambda name: (first.get(name, 3), name)):
        path = os.path.join(prepared.folder, name)
        if file_sha256(path) != files[name]["sha256"]:
            raise InputError(f"{path} is not what was written: this tokenised corpus is damaged")
        if name in corpus.shards(files):
            tables.append(hashes_of(np.fromfile(path, np.uint8).data))
        (key / name).upload(lambda: _pieces(path), files[name]["bytes"])
    hashes = np.concatenate(tables).tobytes()
    (key / corpus.HASHES).upload(lambda: [memoryview(hashes)], len(hashes))
    row = {"bytes": len(hashes), "sha256": hashlib.sha256(hashes).hexdigest()}
    manifest = {**manifest, "files": {**files, corpus.HASHES: row}}
    if (key / corpus.MANIFEST).create(corpus.manifest_text(manifest)) is None:
        raise InputError(f"--out: another process has prepared {url} meanwhile")


def _pieces(path: str) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            yield memoryview(piece)
