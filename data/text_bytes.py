"""Counts the bytes of text behind the labels of a held-out set, where the ids alone do not tell.

Bits per byte compares models of different tokenizers, so it counts the bytes of the documents. In
most tokenizers each id has a fixed length (`Tokenizer.byte_lengths`). Where a normalizer changes
the text, or a token stands for dropped bytes, the preparation has written the table `sizes` next to
the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from configs.schema import InputError
from data import packing
from data.loader import Batch, Batches, at
from data.prepared import OF_BYTES
from data.tokenizer import Tokenizer
from data.tokens import Tokens, map_file


def of_ids(tokenizer: Tokenizer) -> torch.Tensor:
    """Return the bytes of each id, int64 [n_vocab]; 0 where `sized` gives those of each label."""
    if tokenizer.exact_lengths:
        return torch.tensor(tokenizer.byte_lengths)
    return torch.zeros(tokenizer.n_vocab, dtype=torch.int64)


def sized(batches: Iterable[Batch], rows: Batches, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Add `sizes` to the batches of `rows` where ids do not tell: int64 [A, b, t], the bytes of
    each label. Raises InputError for a corpus without the table."""
    if tokenizer.exact_lengths:
        yield from batches
        return
    tables = [of_split(tokens) for tokens in rows.sources]
    for batch in batches:
        yield batch | {"sizes": of_labels(batch, rows, tables)}


def of_split(tokens: Tokens) -> np.ndarray:
    """Map the bytes of each token of a split, uint32. Raises InputError if the folder has none."""
    try:
        table = map_file(tokens.path(f"{tokens.split}.sizes"), OF_BYTES["sizes"])
    except OSError:
        table = np.zeros(0)
    if len(table) != len(tokens):
        raise InputError(
            f"{tokens.folder} does not say how many bytes each {tokens.split} token stands for: "
            "prepare it again"
        )
    return table


def of_labels(batch: Batch, rows: Batches, tables: list[np.ndarray]) -> torch.Tensor:
    source = batch["source"].numpy()
    window = batch["window"].numpy()
    start, stop = packing.extents(rows.sources, source, window, rows.seq_len)
    sizes = np.zeros((len(source), rows.seq_len + 1), np.int64)
    for row, i in enumerate(source):
        part = tables[i][start[row] : stop[row]]
        sizes[row, : len(part)] = part
    labels = torch.from_numpy(at(rows.token_ranges, sizes, shift=1))
    return labels.view(batch["labels"].shape)
