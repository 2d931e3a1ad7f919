"""Plans and merges one preparation: divides the source into parts, tracks which are finished, and
merges them into one folder.

While the work goes on, the folder has a subfolder `parts`. It holds `plan` (the job as JSON) and,
for each finished part, its tables and its record (`00000.json`, written last). It is removed when
all parts are merged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.schema import Data, InputError
from configs.words import number_of
from data import fim, formats, library, sources, tokenizer
from data.open_tokenizer import load_saved, open_named
from data.prepare import workers
from data.prepare.encoding import check_tokens
from data.prepare.part import PartMaker
from data.prepared import FORMAT, FORMAT_OF_ANSWERS, SPLITS, file_sha256, tables
from reliability.disk import sync, write_whole

# a BPE is trained on the first documents, up to here: more text hardly changes its merges
BPE_CHARACTERS = 64_000_000
# of the first documents, whose ids by tiktoken are compared with those of `tokenizers`
COMPARED_CHARACTERS = 250_000
# of the source: a core tokenises this in some seconds, which is what a kill costs
PART_BYTES = 64_000_000
PLAN = "parts/plan"
MOST_PARTS = 4096  # a corpus that would have more of them has larger parts
# in a report; the first is the sum of the others
COUNTS = ("documents", "kept", "empty", "too_long", "failed")
QUOTED = re.compile(r' \("(?:[^"\\]|\\.)*"\)')  # in a problem: what a document says there
ASIDE = re.compile(r" ?\([^()]*(?:\([^()]*\)[^()]*)*\)")  # a line, an error's own words
NUMBER = re.compile(r"(?<!UTF-)(?<!\d)\d+")

Log = Callable[[str], object]


@dataclass
class PrepareJob:
    """Everything that the processes which prepare one folder share."""

    folder: str
    cfg: Data
    files: list[sources.File]
    parts: list[list]  # the pieces of each part: [index of the file, start, stop, bytes]
    tokenizer: tokenizer.Tokenizer
    format: dict  # data/formats.py::describe; {} for text

    @staticmethod
    def open(folder: str, key: str, cfg: Data, files: list[sources.File], log: Log) -> PrepareJob:
        """Open the job that a killed process left in this folder, or a new one."""
        with suppress(OSError, ValueError, KeyError):
            with open(os.path.join(folder, PLAN), encoding="ascii") as file:
                if json.load(file)["key"] == key:
                    job = PrepareJob.load(folder)
                    job.cfg = cfg  # skip_failed is not part of the key and may have changed
                    job.save(key)
                    for path in Path(folder).rglob("*.tmp*"):
                        path.unlink()  # of an unfinished part
                    return job
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, "parts"))
        total = sum(file.size for file in files)
        parts = _divide(files, max(PART_BYTES, total // MOST_PARTS))
        log(
            f"{cfg.source}: {number_of(len(files), 'file')}, {total / 1e6:,.1f} MB, {number_of(len(parts), 'part')}"
        )
        sources.warn_of_lines(files, log)
        sources.warn_of_others(cfg.source, log)
        tok = checked(cfg, _make_tokenizer(cfg, files, log), files, log)
        job = PrepareJob(folder, cfg, files, parts, tok, formats.describe(cfg, tok))
        tok.save(os.path.join(folder, "tokenizer.json"))
        sync(os.path.join(folder, "tokenizer.json"))
        if job.format:
            write_whole(os.path.join(folder, formats.FILE), json.dumps(job.format).encode("ascii"))
        job.save(key)
        return job

    def save(self, key: str) -> None:
        plan = {
            "key": key,
            "cfg": self.cfg.model_dump(mode="json"),
            "files": self.files,
            "parts": self.parts,
        }
        write_whole(os.path.join(self.folder, PLAN), json.dumps(plan).encode("ascii"))

    @staticmethod
    def load(folder: str) -> PrepareJob:
        with open(os.path.join(folder, PLAN), encoding="ascii") as file:
            plan = json.load(file)
        files = [sources.File(*row) for row in plan["files"]]
        tok = load_saved(os.path.join(folder, "tokenizer.json"))
        cfg = Data.model_validate_json(json.dumps(plan["cfg"]))
        return PrepareJob(folder, cfg, files, plan["parts"], tok, formats.load(folder))

    # ----------------------------------------------------------------------------------------------
    # making the parts

    def run(self, processes: workers.Processes, log: Log) -> list[dict]:
        """Make the missing parts and return the records of all. Documents change sides if a split
        would be empty."""
        records = self._run({}, (), processes, log)
        change = change_of_sides(records, self.cfg.validation_fraction)
        if change:
            score = change.get("low", change.get("high"))
            ends = [(record["lowest"], record["highest"]) for record in records]
            touched = [part for part, scores in enumerate(ends) if score in scores]
            records = self._run(change, touched, processes, log)
        return records

    def _run(
        self, change: dict, touched: Iterable[int], processes: workers.Processes, log: Log
    ) -> list[dict]:
        """Make the parts without a record, and those of `touched` made without this change."""
        records = {part: self.record(part) for part in range(len(self.parts))}
        todo = [
            part
            for part, record in records.items()
            if record is None or (part in touched and record["change"] != change)
        ]
        finished = sorted(records.keys() - set(todo))
        sizes = [sum(size for *_, size in pieces) for pieces in self.parts]
        progress = workers.Progress(sum(sizes), sum(sizes[part] for part in finished), log)
        failures: list[list] = []

        def add(part: int, record: dict) -> None:
            records[part] = record
            failures.extend(record["failures"])
            if len(failures) > self.allowed:
                raise self.too_many_failures(failures[0])

        for part in finished:
            add(part, records[part])
        with progress:
            processes.make(self, todo, change, progress.add, add)
        return list(records.values())

    def make(
        self, part: int, change: dict, threads: int, progress: Callable[[int], object]
    ) -> dict:
        """Make one part: its files, and then its record, which says that it is finished."""
        record = PartMaker(self, part, change, progress).make(threads)
        write_whole(self._record_path(part), json.dumps(record).encode("ascii"))
        return record

    def record(self, part: int) -> dict | None:
        """Return the record of a finished part, None if it is not finished."""
        try:
            with open(self._record_path(part), encoding="ascii") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def _record_path(self, part: int) -> str:
        return os.path.join(self.folder, "parts", f"{part:05}.json")

    @property
    def allowed(self) -> float:
        return allowed_failures(self.cfg)

    @property
    def tables(self) -> dict[str, np.dtype]:
        return tables(self.format, self.tokenizer)

    def too_many_failures(self, example: list) -> InputError:
        piece, number, problem = example
        piece = sources.Piece(self.files[piece[0]], *piece[1:])
        error = sources.failure(piece, sources.Document(number, "", problem, 0))
        if not self.allowed:
            return error
        return InputError(
            f"more than {self.allowed} documents cannot be read (data.skip_failed); one of them: "
            f"{error}"
        )

    # ----------------------------------------------------------------------------------------------
    # merging the parts

    def finish(self, records: list[dict], key: str, log: Log) -> None:
        """Write the tables, and the manifest last. InputError: no document has a text."""
        report = {count: sum(record[count] for record in records) for count in COUNTS}
        if not report["kept"]:
            shutil.rmtree(self.folder)
            counted = [count for count in COUNTS[2:] if report[count]]
            others = ", ".join(f"{report[count]} {count.replace('_', ' ')}" for count in counted)
            raise InputError(
                f"data.source: {self.cfg.source} has no text: {number_of(len(self.files), 'file')}, "
                f"{number_of(report['documents'], 'document')} ({others or 'none'})"
            )
        continued = self._continued(records)
        files = self._write_tables(records, continued)
        for name in os.listdir(self.folder):  # what a killed process left
            if name not in files and name != "parts":
                os.remove(os.path.join(self.folder, name))
        counts = ("documents", "tokens", "bytes")
        splits = {
            s: {count: sum(record["splits"][s][count] for record in records) for count in counts}
            for s in SPLITS
        }
        report["tokens"] = sum(row["tokens"] for row in splits.values())
        report["failures"] = self._failures(records, continued)
        cut = any(record["change"].get("cut") for record in records)
        manifest = self._manifest(key, cut, report, splits, files)
        log(
            f"{number_of(report['documents'], 'document')}: {report['kept']:,} kept, {report['empty']:,} "
            f"empty, {report['too_long']:,} too long, {report['failed']:,} failed; "
            f"{number_of(report['tokens'], 'token')} "
            f"({sum(row['bytes'] for row in splits.values()) / report['tokens']:.2f} bytes each)"
        )
        failed = Counter(reason(row[2]) for record in records for row in record["failures"])
        for why, count in failed.most_common():
            log(f"{count:,} failed: {why}")
        write_whole(
            os.path.join(self.folder, "manifest.json"),
            json.dumps(manifest, indent=1).encode("ascii"),
        )

    def _continued(self, records: list[dict]) -> list[tuple[int, int]]:
        """Return the file that the first piece of each part continues, and the number of lines of
        it that earlier parts have; (-1, 0) if the part begins with a new file. A part numbers the
        lines of a continued file from its own first line."""
        before: dict[int, int] = {}  # file -> lines in the parts so far
        continued = []
        for pieces, record in zip(self.parts, records, strict=True):
            first, start, *_ = pieces[0]
            continued.append((first, before.get(first, 0)) if start else (-1, 0))
            for (file, *_), lines in zip(pieces, record["lines"], strict=True):
                before[file] = before.get(file, 0) + lines
        return continued

    def _write_tables(
        self, records: list[dict], continued: list[tuple[int, int]]
    ) -> dict[str, dict]:
        """Write every file but the manifest and the shards, which are there already. Returns {name:
        {bytes, sha256}} of all files."""
        files = {}
        written = []
        for split in SPLITS:
            for table in self.tables:
                self._merge(split, table, records, continued)
                written.append(f"{split}.{table}")
            for part, record in enumerate(records):
                row = record["splits"][split]
                if row["tokens"]:
                    files[f"{split}-{part:05}.bin"] = {
                        "bytes": row["token_bytes"],
                        "sha256": row["sha256"],
                    }
        names = [file.name.encode("utf-8", errors="surrogateescape") for file in self.files]
        write_whole(os.path.join(self.folder, "names"), b"".join(names))
        starts = np.cumsum([0, *map(len, names)]).astype("<i8")
        write_whole(os.path.join(self.folder, "names.starts"), starts.tobytes())
        if self.format:
            written.append(formats.FILE)
        for name in (*written, "names", "names.starts", "tokenizer.json"):
            path = os.path.join(self.folder, name)
            files[name] = {"bytes": os.path.getsize(path), "sha256": file_sha256(path)}
        return files

    def _merge(
        self, split: str, table: str, records: list[dict], continued: list[tuple[int, int]]
    ) -> None:
        """Merge one table of all parts, so that starts, answers and lines count from the first."""
        path = os.path.join(self.folder, f"{split}.{table}")
        tokens = 0
        with open(f"{path}.tmp", "wb") as out:
            for part, record in enumerate(records):
                file, lines = continued[part]
                column = self._part_table(split, part, table)
                if table in ("starts", "answers"):
                    column += tokens
                    tokens += record["splits"][split]["tokens"]
                elif table == "numbers" and lines:
                    files = self._part_table(split, part, "files")
                    column[(files == file) & (column != sources.WHOLE)] += lines
                column.tofile(out)
        sync(f"{path}.tmp")
        os.rename(f"{path}.tmp", path)

    def _part_table(self, split: str, part: int, table: str) -> np.ndarray:
        path = os.path.join(self.folder, "parts", f"{split}-{part:05}.{table}")
        return np.fromfile(path, self.tables[table])

    def _failures(self, records: list[dict], continued: list[tuple[int, int]]) -> list[str]:
        """Write a line for each document that was dropped because it cannot be read."""
        failures = []
        for record, (continued_file, lines) in zip(records, continued, strict=True):
            for (file, *_), number, problem in record["failures"]:
                number += lines if file == continued_file and number != sources.WHOLE else 0
                failures.append(f"{sources.name(self.files[file].name, number)} {problem}")
        return failures

    def _manifest(
        self, key: str, cut: bool, report: dict, splits: dict, files: dict[str, dict]
    ) -> dict:
        tok, cfg = self.tokenizer, self.cfg
        content = [tok.fingerprint, *(files[f"{split}.starts"]["sha256"] for split in SPLITS)]
        content += [
            f"{name[:5]}{file['sha256']}" for name, file in files.items() if name.endswith(".bin")
        ]
        of_answers = {}
        if self.format:
            content += [files[f"{split}.answers"]["sha256"] for split in SPLITS]
            of_answers = {"data_format": self.format["format"]}
        of_fim = {"fim": fim.options(cfg, tok)} if cfg.fim_rate else {}
        return {
            "format": FORMAT_OF_ANSWERS if self.format else FORMAT,
            "key": key,
            "source": cfg.source,
            "tokenizer": cfg.tokenizer,
            "tokenizer_fingerprint": tok.fingerprint,
            "tokenizer_engine": tok.engine,
            "fingerprint": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32],
            "dtype": tok.dtype.name,
            "n_vocab": tok.n_vocab,
            "eot_id": tok.eot_id,
            "add_bos": cfg.add_bos,
            "add_eos": cfg.add_eos,
            "validation_fraction": cfg.validation_fraction,
            "cut": cut,
            "report": report,
            "splits": splits,
            "files": files,
            **of_answers,
            **of_fim,
        }


def reason(problem: str) -> str:
    """Cut from a problem what differs from document to document, and the advice: of 900 failures in
    a corpus, 880 may have one cause."""
    said = QUOTED.sub("", problem)
    said = ASIDE.sub("", said)
    said = said.split(": ")[0].split("; ")[0]
    return NUMBER.sub("N", said).strip()


def allowed_failures(cfg: Data) -> float:
    """Return the number of unreadable documents that are tolerated."""
    return float("inf") if cfg.source in sources.INSTALLED else cfg.skip_failed


def _make_tokenizer(cfg: Data, files: list[sources.File], log: Log) -> tokenizer.Tokenizer:
    """Open the tokenizer of data.tokenizer, or train it first if it is a BPE of this source."""
    if cfg.tokenizer == "bpe":
        if cfg.tokenizer_pattern or cfg.end_token not in ("", tokenizer.END_OF_TEXT):
            raise InputError(
                "data.tokenizer_pattern and data.end_token have no effect with data.tokenizer = "
                '"bpe", which ends texts with <|endoftext|>: remove them'
            )
        began = time.monotonic()
        tok = tokenizer.train_bpe(_first_texts(cfg, files), cfg.bpe_vocab_size)
        log(f"trained a BPE of {tok.n_vocab:,} tokens in {time.monotonic() - began:.1f} s")
    else:
        tok = open_named(cfg)
    check_tokens(cfg, tok)
    return tok


def checked(
    cfg: Data, tok: tokenizer.Tokenizer, files: list[sources.File], log: Log
) -> tokenizer.Tokenizer:
    """Return the tokenizer, run by the library alone if tiktoken gives other ids than it for the
    first documents. This is decided before a part is made, so that all processes do the same."""
    if not isinstance(tok, library.LibraryTokenizer):
        return tok
    if tok.engine == "tokenizers":
        log(f"tokenised by `tokenizers`, as tiktoken may give other ids: {tok.reason}")
        return tok
    compared = 0
    field = cfg.text_field if cfg.format == "text" else ""
    for _, document in _first_documents(cfg, files, field, COMPARED_CHARACTERS):
        text = document.text[:COMPARED_CHARACTERS]
        with suppress(ValueError):  # what no tokenizer takes is reported with its document
            if not np.array_equal(tok.encode(text), tok.library_ids(text)):
                reason = f"document {compared + 1} has other ids in `tokenizers`"
                log(f"warning: tokenised by `tokenizers`, not by tiktoken: {reason}")
                return tok.by_library(reason)
        compared += 1
    documents = number_of(compared, "document")
    log(f"tokenised by tiktoken, with the ids of `tokenizers` (compared in {documents})")
    return tok


def _first_texts(cfg: Data, files: list[sources.File]) -> Iterator[str]:
    """Return the first texts, until they have BPE_CHARACTERS together (the last one is not cut).
    InputError: more documents than allowed cannot be read. Too few texts would make a vocabulary
    that is too small, and hide that mistake."""
    failed = 0
    for piece, document in _first_documents(cfg, files, cfg.text_field, BPE_CHARACTERS):
        failed += document.problem not in ("", sources.TOO_LONG)
        if failed > allowed_failures(cfg):
            raise sources.failure(piece, document)
        yield document.text


def _first_documents(
    cfg: Data, files: list[sources.File], field: str, characters: int
) -> Iterator[tuple[sources.Piece, sources.Document]]:
    """Yield the first documents, and the piece of each, until they have so many characters
    together."""
    taken = 0
    for file in files:
        for piece in sources.pieces(file):
            for document in sources.read(piece, field, cfg.max_document_bytes, cfg.json_files):
                if taken >= characters:
                    return
                taken += len(document.text)
                yield piece, document


def _divide(files: list[sources.File], size: int) -> list[list[tuple]]:
    """Gather the pieces of all files (index of the file, start, stop, bytes), in order, into parts
    of about `size` bytes."""
    parts: list[list[tuple]] = [[]]
    filled = 0
    for index, of_file in enumerate(sources.cut(files, size)):
        for piece in of_file:
            if filled and filled + piece.size > size:
                parts.append([])
                filled = 0
            parts[-1].append((index, *piece[1:]))
            filled += piece.size
    return [part for part in parts if part]


def change_of_sides(records: list[dict], fraction: float) -> dict:
    """Move documents between the splits so that neither is empty. {"low": score} ("high"): the text
    with this score is held out (trained on) although its hash says otherwise. "cut": all documents
    are the same text, which is cut in two."""
    if not records:  # files without a line or a row
        return {}
    lowest, highest = min(r["lowest"] for r in records), max(r["highest"] for r in records)
    if not fraction or lowest > highest:  # nothing is to be held out, or there is no text at all
        return {}
    if lowest == highest:
        return {"cut": True, "low": lowest}
    return (
        {"low": lowest} if lowest >= fraction else {"high": highest} if highest < fraction else {}
    )
