"""Shows a row of a step as training saw it, with the labels that count in colour.

`python -m data.audit RUN --show STEP[:ROW]`. The row is read by the code that training uses
(data/loader.py::Batches), so it shows the tokens that the loss was computed of. A token that counts
as a label is green, on a terminal, or in double brackets; all others are context.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import InputError
from data.documents import DocumentIndex
from data.loader import IGNORE, Batches
from data.order import Order
from data.packing import extents
from data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from data.audit import Audited

GREEN, DIM, PLAIN = "\033[32m", "\033[2m", "\033[0m"
BRACKETS = ("[[", "]]")


def colours(when: str) -> bool:
    """Return whether to write in colour. when: auto, always or never."""
    if when == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return when == "always"


def row(run: Audited, step: int, number: int) -> dict:
    """Return a row of a step (counted from 1) of a run: step, row, source, loss_weight, window;
    tokens (int64
    [n]); counts (bool [n]): which of them count as labels; names: by position, of the documents
    that begin there (a document from before the window begins at 0); padding: positions that have
    none. Raises InputError if there is no such row, or if its text is not known any more."""
    segment = run.order.segment(step - 1)
    size = segment.global_batch_size
    if not 0 <= number < size:
        raise InputError(f"--show: step {step} has rows 0 to {size - 1}")
    splits = [run.train_of(source) for source in segment.sources]
    batches = Batches(splits, Order([segment]), 1, number, size, run.mask_documents)
    batch = batches[step - 1]
    tokens = batch["tokens"].flatten().numpy()
    labels = batch["labels"].flatten().numpy()
    source, window = batch["source"].numpy(), batch["window"].numpy()
    start, stop = extents(splits, source, window, segment.seq_len)
    begin, end = int(start[0]), int(stop[0])
    split = splits[int(source[0])]
    documents = DocumentIndex(split)
    names = {}
    for document in documents.between(begin, end).tolist():
        first, _ = documents.extent(document)
        names[max(first - begin, 0)] = documents.name(document)
    kept = end - begin
    name = segment.sources[int(source[0])].name
    # the last label is no input, and the first input no label
    last = split.read(end - 1, end).astype(np.int64)
    return {
        "step": step,
        "row": number,
        "source": name,
        "loss_weight": run.loss_weights.get(name, 1.0),
        "window": int(window[0]),
        "tokens": np.append(tokens, last)[:kept] if kept > len(tokens) else tokens[:kept],
        "counts": np.concatenate(([False], labels != IGNORE))[:kept],
        "names": names,
        "padding": segment.seq_len + 1 - kept,
    }


def as_text(shown: dict, tokenizer: Tokenizer, coloured: bool) -> str:
    """Format the result of `row` for a terminal."""
    tokens, counts = shown["tokens"], shown["counts"]
    source = f"source {shown['source']}, " if shown["source"] else ""
    lines = [
        f"step {shown['step']}, row {shown['row']}: {source}window {shown['window']}, "
        f"{int(counts.sum())} of {len(tokens)} tokens count as labels"
    ]
    if shown["loss_weight"] != 1:
        lines[0] += f", each {shown['loss_weight']:g} times in the loss"
    borders = set(shown["names"]) | {len(tokens)}
    borders |= set((np.flatnonzero(np.diff(counts)) + 1).tolist())
    places = sorted(borders)
    text = ""
    begin = 0  # of the document
    for first, stop in zip(places, places[1:]):
        if first in shown["names"]:
            begin = first
            lines += [text] if text else []
            lines.append(f"--- {shown['names'][first]}")
            text = ""
        piece = _in_its_place(tokenizer, tokens, begin, first, stop)
        if coloured:
            text += f"{GREEN if counts[first] else DIM}{piece}{PLAIN}"
        elif counts[first]:
            text += f"{BRACKETS[0]}{piece}{BRACKETS[1]}"
        else:
            text += piece
    lines.append(text)
    if shown["padding"]:
        lines.append(f"--- {shown['padding']} positions of padding")
    return "\n".join(lines)


def _in_its_place(
    tokenizer: Tokenizer, tokens: np.ndarray, begin: int, first: int, stop: int
) -> str:
    """Decode tokens [first, stop) of the document that begins at `begin`, in their context: alone,
    they would lose their first space where a decoder takes that from a text (Llama 2's,
    Metaspace)."""
    before = tokenizer.decode(tokens[begin:first])
    whole = tokenizer.decode(tokens[begin:stop])
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(tokens[first:stop])  # half a character, which is shown as such


def as_json(shown: dict) -> str:
    """Format the result of `row` as one line of JSON."""
    lists = {key: shown[key].tolist() for key in ("tokens", "counts")}
    return json.dumps(shown | lists)
