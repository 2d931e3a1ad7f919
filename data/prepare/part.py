"""Makes one part of a corpus: reads and tokenises its documents, and writes one shard with its
tables for each split."""

from __future__ import annotations

import hashlib
import os
import uuid
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from data import formats, sources
from data.prepare.encoding import encode_all
from data.prepared import OF_BYTES, SPLITS
from reliability.disk import sync

if TYPE_CHECKING:
    from data.prepare.job import PrepareJob


class PartMaker:
    """Makes one part of a job. `make` returns the part's record, which the job keeps as JSON."""

    def __init__(
        self, job: PrepareJob, part: int, change: dict, progress: Callable[[int], object]
    ) -> None:
        """`change`: see job.change_of_sides; `progress` is called with the bytes of the source read
        since its last call."""
        self.job, self.pieces, self.change, self.progress = job, job.parts[part], change, progress
        self.counts = dict.fromkeys(("kept", "empty", "too_long", "failed"), 0)
        self.failures: list[list] = []  # [piece, number of the document in it, problem]
        self.lines: list[int] = []  # how many lines each piece has; 0 unless it is JSON lines
        self.lowest, self.highest = 2.0, -1.0  # scores of the documents that are kept
        self.writers = {split: SplitWriter(job.folder, split, part, job.tables) for split in SPLITS}

    def make(self, threads: int) -> dict:
        """Write the part's files. Raises InputError if more documents than allowed cannot be read."""
        job = self.job
        form = formats.build(job.format, job.tokenizer)
        try:
            for file, document, size, score, rows in encode_all(
                job.cfg, job.tokenizer, self._documents(), self.change, threads, form
            ):
                if isinstance(rows, str):
                    piece = next(piece for piece in self.pieces if piece[0] == file)
                    self._leave_out(piece, document.number, rows)
                    continue
                self.counts["kept"] += 1
                self.lowest, self.highest = min(self.lowest, score), max(self.highest, score)
                for split, *tokens in rows:
                    self.writers[split].add(file, document.number, size, *tokens)
        finally:
            splits = {split: writer.close() for split, writer in self.writers.items()}
        for writer in self.writers.values():
            writer.publish()
        counts = self.counts | {"documents": sum(self.counts.values())}
        return {
            **counts,
            "failures": self.failures,
            "lines": self.lines,
            "lowest": self.lowest,
            "highest": self.highest,
            "change": self.change,
            "splits": splits,
        }

    def _documents(self) -> Iterator[tuple[int, sources.Document]]:
        """Yield (index of the file, document) for each document that has a text."""
        field = "" if self.job.format else self.job.cfg.text_field
        for piece in self.pieces:
            file, *extent = piece
            source_piece = sources.Piece(self.job.files[file], *extent)
            cfg = self.job.cfg
            reader = sources.read(source_piece, field, cfg.max_document_bytes, cfg.json_files)
            done = 0  # bytes of the piece
            while True:
                try:
                    document = next(reader)
                except StopIteration as end:
                    self.lines.append(end.value or 0)
                    break
                if document.done > done:
                    self.progress(document.done - done)
                    done = document.done
                if document.problem:
                    self._leave_out(piece, document.number, document.problem)
                elif not document.text:
                    self.counts["empty"] += 1
                else:
                    yield file, document
            self.progress(max(source_piece.size - done, 0))

    def _leave_out(self, piece: tuple, number: int, problem: str) -> None:
        """Count a document with a problem."""
        if problem == sources.TOO_LONG:
            self.counts["too_long"] += 1
            return
        self.counts["failed"] += 1
        self.failures.append([piece, number, problem])
        if self.counts["failed"] > self.job.allowed:
            raise self.job.too_many_failures(self.failures[-1])


class SplitWriter:
    """The files of one split of one part, under temporary names until `publish`."""

    def __init__(self, folder: str, split: str, part: int, columns: dict[str, np.dtype]) -> None:
        """columns: as data/prepared.py::tables returns them."""
        self.shard = os.path.join(folder, f"{split}-{part:05}.bin")
        self.paths = {"tokens": self.shard}
        for table in columns:
            self.paths[table] = os.path.join(folder, "parts", f"{split}-{part:05}.{table}")
        # on a network file system another host may write the same part, in a process of this number
        self.suffix = f".tmp{uuid.uuid4().hex[:8]}"
        self.files = {
            name: open(f"{path}{self.suffix}", "wb", 1 << 20) for name, path in self.paths.items()
        }
        # in machine order: little-endian
        self.columns = {table: array(dtype.char) for table, dtype in columns.items()}
        self.sha256 = hashlib.sha256()
        self.documents = self.tokens = self.bytes = self.token_bytes = 0

    def add(
        self,
        file: int,
        number: int,
        size: int,
        ids: np.ndarray,
        of_answers: np.ndarray | None,
        sizes: np.ndarray | None,
    ) -> None:
        """Add a document. file: the index of its file; number: its number in there; size: its bytes
        of text; ids: its tokens; of_answers: which of them are, bool, or None for text; sizes:
        the bytes of each, or None where its id tells."""
        data = ids.tobytes()
        self.files["tokens"].write(data)
        self.sha256.update(data)
        self.columns["starts"].append(self.tokens)
        self.columns["files"].append(file)
        self.columns["numbers"].append(number)
        if of_answers is not None:
            # where the mask changes: the beginning and the end of each answer
            changes = np.flatnonzero(np.diff(of_answers, prepend=False, append=False))
            self.columns["answers"].extend((changes + self.tokens).tolist())
        if sizes is not None:
            self.columns["sizes"].frombytes(sizes.astype(OF_BYTES["sizes"]).tobytes())
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += size
        self.token_bytes += len(data)
        if max(map(len, self.columns.values())) >= 65536:
            self._write_columns()

    def _write_columns(self) -> None:
        for table, column in self.columns.items():
            self.files[table].write(column.tobytes())
            del column[:]

    def close(self) -> dict:
        """Close the files. Returns what the record says about the split."""
        try:
            self._write_columns()
        finally:
            for file in self.files.values():
                file.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "token_bytes": self.token_bytes,
            "sha256": self.sha256.hexdigest(),
        }

    def publish(self) -> None:
        """Put the files in place, flushed to the disk. A shard without a token is removed."""
        for path in self.paths.values():
            sync(f"{path}{self.suffix}")
            os.rename(f"{path}{self.suffix}", path)
        if not self.tokens:
            os.remove(self.shard)
