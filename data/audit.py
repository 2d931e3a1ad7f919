"""Tells which documents a run saw, and when: from the order of its data, which is a function, not
from a log.

    python -m data.audit runs/mine --steps 1:10        what the rows of steps 1 to 10 were made of
                                                       (--json: as JSON)
    python -m data.audit runs/mine --show 3:0          row 0 of step 3 as text, with the labels that
                                                       count in colour
    python -m data.audit runs/mine --prove             prove that no epoch has repeated or skipped
                                                       a sample so far
    python -m data.audit runs/mine --find web:1234     the steps in which a document is seen
    python -m data.audit runs/mine --find "some text"  the same for every document with this text

Steps are counted as in the log: the first is 1. A document is given as SOURCE:NUMBER, as printed
here (without a mixture as NUMBER), or by its name. Anything else is searched as text in all
documents. The run's `data.json` says which order it used. The tokens are read from where they were
prepared, and must not have changed. Exit code 1: the proof failed.
"""

import argparse
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs import program
from configs.schema import InputError
from configs.words import number_of
from data import splice
from data.documents import DocumentIndex
from data.order import BLOCK, Order, Segment, Source
from data.packing import extents, holding
from data.prepared import Prepared, open_prepared
from data.shuffle import unpermute
from data.stores import places
from data.tokens import Tokens
from reliability.objects import Key, checkpoint_places, location

CHUNK = 1 << 16  # samples that are computed at once


@dataclass(frozen=True)
class Audited:
    order: Order
    done: int  # steps up to the newest checkpoint
    steps: int  # of the whole run
    corpora: dict[str, Prepared]  # by fingerprint
    mask_documents: bool = False
    dropped: tuple[str, ...] = ()  # of documents that are in no window, a sentence each
    # of the last start, by the name of the source; 1 where it has none
    loss_weights: dict[str, float] = field(default_factory=dict)
    skip: dict[int, int] = field(default_factory=dict)  # data.skip: batches left out after a step

    def train_of(self, source: Source) -> Tokens:
        """Return the tokens to train on of a source. Raises InputError if they are not known."""
        if source.fingerprint not in self.corpora:
            raise InputError(
                f"the tokens of source {source.name} are not known any more: a splice has ended it"
            )
        return self.corpora[source.fingerprint].train


def open_run(folder: str) -> Audited:
    """Raise InputError if this is not the folder or the URL of a run, or if its data is gone or has
    changed."""
    place = location(folder)
    path = place / "data.json"
    try:
        record = json.loads(places.read(path))
        if "streams" in record:
            raise InputError(
                f"{folder} streams its text (data.stream), and what a step of a stream sees "
                "depends on all steps before: only a run on a prepared corpus can be audited"
            )
        order, steps, folders = splice.restore(record), record["steps"], record["folders"]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}. Give the folder of a run that has started"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} does not say what a run has seen ({error!r}): give the folder of a run that "
            "has started"
        ) from error
    corpora = {}
    for source in sources_of(order):
        prepared_folder = folders.get(source.fingerprint)
        if prepared_folder is None:  # a source that an earlier splice has ended
            continue
        if not places.is_url(prepared_folder) and not os.path.isdir(prepared_folder):
            raise InputError(
                f"the tokens of source {source.name or 'data.source'} are gone from "
                f"{prepared_folder}: prepare them there again"
            )
        corpora[source.fingerprint] = corpus = open_prepared(prepared_folder)
        if corpus.fingerprint != source.fingerprint:
            raise InputError(
                f"{prepared_folder} has changed since this run read it ({source.fingerprint} then, "
                f"{corpus.fingerprint} now): what the run saw can no longer be told"
            )
    return Audited(
        order,
        max(saved_steps(place), default=0),
        steps,
        corpora,
        record.get("mask_documents", False),
        tuple(record.get("left_out", ())),
        record.get("loss_weights", {}),
        dict(record.get("description", {}).get("skip", [])),
    )


def sources_of(order: Order) -> list[Source]:
    """List the sources of all segments, each text once."""
    every = [source for segment in order.segments for source in segment.sources]
    return list({source.fingerprint: source for source in every}.values())


def saved_steps(run: Path | Key) -> list[int]:
    """List the steps of the run's checkpoints, on disk or in a store. Raises InputError."""
    saved = []
    for folder in checkpoint_places(run):
        for name in places.folders_in(folder):
            match = re.fullmatch(r"step-(\d{8,})(\.\d+)?", name)
            if match:
                saved.append(int(match[1]))
    return saved


# --------------------------------------------------------------------------------------------------
# what was seen


def seen(run: Audited, first: int, last: int) -> Iterator[dict]:
    """List the steps `first` to `last` (counted from 1) as one dict for each row: step, row,
    source, epoch, window, documents. Each document has number, name, and [start, stop): which of
    its tokens are in the window, as inputs or labels."""
    for step in range(first - 1, last):
        segment = run.order.segment(step)
        for row, (s, window, epoch) in enumerate(
            zip(*run.order.rows(step, 0, segment.global_batch_size), strict=True)
        ):
            source = segment.sources[s]
            yield {
                "step": step + 1,
                "row": row,
                "source": source.name,
                "epoch": int(epoch),
                "window": int(window),
                "documents": documents(run, segment, source, int(window)),
            }


def documents(run: Audited, segment: Segment, source: Source, window: int) -> list[dict]:
    tokens = run.train_of(source)
    split = DocumentIndex(tokens)
    starts, stops = extents([tokens], np.array([0]), np.array([window]), segment.seq_len)
    begin, end = int(starts[0]), int(stops[0])
    pieces = []
    for number in split.between(begin, end).tolist():
        start, stop = split.extent(number)
        inside = {"start": max(begin, start) - start, "stop": min(end, stop) - start}
        pieces.append({"number": number, "name": split.name(number)} | inside)
    return pieces


# --------------------------------------------------------------------------------------------------
# the proof


def prove(order: Order, steps: int, skip: dict[int, int] | None = None) -> list[str]:
    """Walk through every sample of the first `steps` steps, and return a sentence for each problem.

    A problem is a window that comes twice in an epoch of its source, an epoch that begins before
    every window of the previous one was seen, or a block that does not have exactly its shares. It
    takes one bool of memory per window. skip: data.skip; what it leaves out counts as seen."""
    problems = []
    # seen in this epoch, of the windows of each text and length: a splice may give a source another
    # text under the same key
    passes: dict[tuple[str, int, int], _Pass] = {}
    for segment in order.segments:
        for s in segment.sources:
            passes[s.fingerprint, s.key, segment.seq_len] = _Pass(np.zeros(s.windows, bool))
    for number, segment in enumerate(order.segments):
        G = segment.global_batch_size
        end = min(order.end(segment), steps)
        hop, owners = max(1, CHUNK // G), np.zeros(0, np.int64)
        if (left_out := (skip or {}).get(segment.step)) and 0 < segment.step < end:
            before = Order(order.segments[:number])  # deals the batches that are left out
            rows = before.rows(segment.step, 0, before.last.global_batch_size, left_out)
            stretch = f"the batches that data.skip leaves out after step {segment.step}"
            problems += _mark_all(before.last, rows, passes, stretch)
        for step in range(segment.step, end, hop):
            count = min(hop, end - step)
            rows = order.rows(step, 0, G, count)
            stretch = f"steps {step + 1} to {step + count}"
            problems += _mark_all(segment, rows, passes, stretch)
            owners = np.concatenate((owners, rows[0]))
            while len(owners) >= BLOCK:
                block, owners = owners[:BLOCK], owners[BLOCK:]
                counts = np.bincount(block, minlength=len(segment.sources)).tolist()
                if counts != [s.share for s in segment.sources]:
                    problems.append(f"{stretch}: a block has {counts} samples of its sources")
            if len(problems) > 20:
                return problems
    return problems


def _mark_all(segment: Segment, rows: tuple, passes: dict, stretch: str) -> Iterator[str]:
    """Mark rows of a segment in the passes of their sources; yields a sentence per problem."""
    source, window, epoch = rows
    for i, s in enumerate(segment.sources):
        mine = source == i
        seen = passes[s.fingerprint, s.key, segment.seq_len]
        for line in _mark(s, window[mine], epoch[mine], seen):
            yield f"{stretch}, source {s.name or 'data.source'}: {line}"


def shares(order: Order, steps: int) -> list[tuple[str, int, int, float]]:
    """Return name, samples, tokens and epochs of every text that the first `steps` steps saw."""
    goes_on = {source.fingerprint for source in order.segment(steps).sources}
    rows: dict[str, tuple[str, int, int, float]] = {}
    for segment in order.segments:
        if segment.step > steps:
            break
        end = min(order.end(segment), steps)
        consumed = segment.consumed((end - segment.step) * segment.global_batch_size)
        for s, count in zip(segment.sources, consumed, strict=True):
            _, samples, tokens, epochs = rows.get(s.fingerprint, ("", 0, 0, 0.0))
            now = count - s.consumed
            name = s.name or "data.source"
            if s.fingerprint not in goes_on:
                name += " (its text until a splice)"
            tokens += now * segment.seq_len
            rows[s.fingerprint] = name, samples + now, tokens, epochs + now / s.windows
    return list(rows.values())


@dataclass
class _Pass:
    """Windows of a source that were seen in the epoch that has begun."""

    bits: np.ndarray
    epoch: int = 0


def _mark(source: Source, window: np.ndarray, epoch: np.ndarray, seen: _Pass) -> Iterator[str]:
    """Mark the next samples of a source, in order, in `seen`; yields a sentence per problem."""
    bits = seen.bits
    for part in np.split(np.arange(len(epoch)), np.flatnonzero(np.diff(epoch)) + 1):
        if not len(part):
            continue
        e, windows = int(epoch[part[0]]), window[part]
        if not (0 <= windows.min() and windows.max() < source.windows):
            yield f"a window of epoch {e} is beyond the {source.windows} that there are"
            return
        if e != seen.epoch:
            if e != seen.epoch + 1 or not bits.all():
                yield (
                    f"epoch {e} follows {seen.epoch}, of which {np.count_nonzero(~bits)} "
                    "windows were not seen"
                )
            bits[:] = False
            seen.epoch = e
        if repeated := int(bits[windows].sum()) + len(windows) - len(np.unique(windows)):
            yield f"{repeated} windows of epoch {e} come again"
        bits[windows] = True


# --------------------------------------------------------------------------------------------------
# finding


def find(run: Audited, wanted: str) -> list[tuple[Source, int]]:
    """Find the documents that `wanted` means, a number, a name or a text: [(source, number)]."""
    sources = [source for source in sources_of(run.order) if source.fingerprint in run.corpora]
    name, _, number = wanted.rpartition(":")
    documents = []
    for source in sources:
        split = DocumentIndex(run.train_of(source))
        if number.isdecimal() and name == source.name:
            if int(number) >= len(split):
                raise InputError(f"{wanted}: the source has {len(split):,} documents, from 0")
            return [(source, int(number))]
        documents += [(source, i) for i in range(len(split)) if split.name(i) == wanted]
    return documents or [(source, i) for source in sources for i in _with_text(run, source, wanted)]


def _with_text(run: Audited, source: Source, text: str) -> Iterator[int]:
    """Return the numbers of the documents that contain the text. They are decoded, because the
    tokens of a piece of text depend on what is around it."""
    corpus = run.corpora[source.fingerprint]
    split = DocumentIndex(corpus.train)
    for number in range(len(split)):
        start, stop = split.extent(number)
        if text in corpus.tokenizer.decode(corpus.train.read(start, stop)):
            yield number


def occurrences(run: Audited, source: Source, number: int) -> list[dict]:
    """List the steps (from 1) and rows of the run whose windows have a token of this document."""
    tokens = run.train_of(source)
    start, stop = DocumentIndex(tokens).extent(number)
    rows = []
    for segment in run.order.segments:
        end = min(run.order.end(segment), max(run.steps, segment.step))
        for i, s in enumerate(segment.sources):
            if s.fingerprint != source.fingerprint:
                continue
            windows = holding(tokens, start, stop, segment.seq_len)
            windows = windows[windows < s.windows]
            consumed = segment.consumed((end - segment.step) * segment.global_batch_size)[i]
            for epoch in range(s.consumed // s.windows, -(-consumed // s.windows)):
                sample = epoch * s.windows + unpermute(windows, epoch, s.windows, s.key)
                for window, k in zip(windows.tolist(), sample.tolist(), strict=True):
                    if s.consumed <= k < consumed:
                        place = position(segment, i, k - s.consumed)
                        step, row = divmod(place, segment.global_batch_size)
                        seen = {"step": segment.step + step + 1, "row": row}
                        rows.append(seen | {"epoch": epoch, "window": window})
    return sorted(rows, key=lambda entry: (entry["step"], entry["row"]))


def position(segment: Segment, source: int, sample: int) -> int:
    """Return the number in this segment of sample `sample` (from 0) of those of `source`."""
    if len(segment.sources) == 1:
        return sample
    block, rank = divmod(sample, segment.sources[source].share)
    owner, before = segment.slots(block)
    (slot,) = np.flatnonzero((owner == source) & (before == rank))
    return block * BLOCK + int(slot)


def _id(source: str, number: int) -> str:
    return f"{source}:{number}" if source else str(number)


def _steps(text: str, run: Audited) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match:
        raise InputError(f"--steps {text}: write FIRST:LAST, both included, as in --steps 1:10")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= run.steps:
        raise InputError(f"--steps {text}: the run has steps 1 to {run.steps}")
    return first, last


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="a run's folder, or its URL")
    parser.add_argument("--steps", help="FIRST:LAST, both included: list what they saw")
    parser.add_argument(
        "--show", metavar="STEP[:ROW]", help="show a row as text, with the labels that count marked"
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="of --show; otherwise labels are in [[ ]] (default: on a terminal)",
    )
    parser.add_argument(
        "--prove", action="store_true", help="check all samples so far (the default)"
    )
    parser.add_argument(
        "--find", metavar="TEXT|DOCUMENT", help="tell when a document was or will be seen"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of tables"
    )
    args = parser.parse_args(argv)
    run = open_run(args.run)
    if args.steps:
        _print_steps(run, *_steps(args.steps, run), args.json)
    if args.show:
        _print_row(run, args.show, args.color, args.json)
    if args.find is not None:
        _print_found(run, args.find, args.json)
    asked = args.steps or args.show or args.find is not None
    return _print_proof(run) if args.prove or not asked else 0


def _print_steps(run: Audited, first: int, last: int, as_json: bool) -> None:
    if as_json:
        for entry in seen(run, first, last):
            print(json.dumps(entry))
        return
    columns = "{:>8} {:>6} {:<16} {:>5} {:>10}  "
    print(columns.format("step", "row", "source", "epoch", "window") + "document [tokens of it]")
    for entry in seen(run, first, last):
        source = entry["source"] or "data.source"
        place = (entry["step"], entry["row"], source, entry["epoch"], entry["window"])
        head = columns.format(*place)
        for piece in entry["documents"]:
            document = _id(entry["source"], piece["number"])
            print(f"{head}{document} [{piece['start']}:{piece['stop']}] {piece['name']}")
            head = " " * len(head)


def _print_row(run: Audited, which: str, color: str, as_json: bool) -> None:
    from data import show  # it reads as training does, and so imports torch

    match = re.fullmatch(r"(\d+)(?::(\d+))?", which)
    if not match:
        raise InputError(f"--show {which}: write STEP or STEP:ROW, as in --show 3:0")
    step, _ = _steps(match[1], run)
    shown = show.row(run, step, int(match[2] or 0))
    if as_json:
        print(show.as_json(shown))
        return
    tokenizer = next(iter(run.corpora.values())).tokenizer
    print(show.as_text(shown, tokenizer, show.colours(color)))


def _print_found(run: Audited, wanted: str, as_json: bool) -> None:
    documents = find(run, wanted)
    every = sources_of(run.order)
    if not documents and not as_json:
        searched = [s.name or "data.source" for s in every if s.fingerprint in run.corpora]
        print(
            f"no training document is called or contains {wanted!r} (sources: "
            f"{', '.join(searched)}; held-out text is in no step)"
        )
    ended = [s.name or "data.source" for s in every if s.fingerprint not in run.corpora]
    if ended and not as_json:
        print(f"not searched, since a splice has ended that text: {', '.join(ended)}")
    for source, number in documents:
        name = DocumentIndex(run.train_of(source)).name(number)
        rows = occurrences(run, source, number)
        if as_json:
            found = {"source": source.name, "number": number, "name": name}
            print(json.dumps(found | {"done": run.done, "seen": rows}))
            continue
        print(f"{_id(source.name, number)} {name}: " + ("seen in no step" if not rows else ""))
        for row in rows:
            when = "seen" if row["step"] <= run.done else "to come"
            print(
                f"    step {row['step']}, row {row['row']}, window {row['window']} of epoch "
                f"{row['epoch']}: {when}"
            )


def _print_proof(run: Audited) -> int:
    problems = prove(run.order, run.done, run.skip)
    proved = (
        f"steps 1 to {run.done}, {number_of(run.order.samples(run.done), 'sample')}: none is "
        "repeated or skipped within an epoch of its source, and every block has its exact shares"
    )
    print("\n".join(problems) or proved)
    for line in run.dropped:
        print(f"in no window: {line}")
    for step, count in run.skip.items():
        if step < run.done:
            print(f"data.skip leaves out {number_of(count, 'batch', 'batches')} after step {step}")
    for name, samples, tokens, epochs in shares(run.order, run.done):
        print(
            f"    {name}: {number_of(samples, 'sample')}, {number_of(tokens, 'token')}, "
            f"{epochs:.3f} epochs"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends quietly
    program.run(main)
