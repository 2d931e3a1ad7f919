"""Preparing a corpus against tiktoken alone: MB/s of the same text on the same number of threads.

    python -m lab.bench.prepare [--megabytes 300] [--rounds 3] [--source FILES] [--ranks FILE] [--json out.json]
    python -m lab.bench.prepare --tokenizers FOLDER [--megabytes 20] [--rounds 5]

The text is that of `--source` (the standard library), over and over until there is enough, as JSON
lines, so that many short documents and the parsing count. "tiktoken alone" is `encode_ordinary` of
strings that are in memory already, in batches of 256 kB, by as many threads as there are cores, and
nothing is kept. `prepare` reads, parses, hashes, tokenises by processes and writes shards that are
flushed to the disk. "streamed": one rank of `data.stream` reads, parses and tokenises as many
tokens by its one thread.

`--tokenizers` compares engines instead, for each folder in FOLDER that has a tokenizer.json: `encode`
as a preparation calls it, against `encode_batch` of Hugging Face's `tokenizers`, both on one thread, in processor
seconds.
"""

import argparse
import gzip
import json
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import tiktoken
from pyarrow import parquet

from configs import program
from configs.schema import Data
from data import rank_files, sources, stream, tokenizer
from data.open_tokenizer import open_tokenizer
from data.prepare import prepare
from data.prepare.encoding import BATCH_BYTES
from lab.bench import harness


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", default="stdlib")
    parser.add_argument(
        "--ranks", help="a tiktoken rank file; without it: 32,000 tokens trained on the text"
    )
    parser.add_argument("--tokenizers", type=Path)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.tokenizers:
        compare_engines(args)
        return
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = corpus(args.source, args.megabytes * 1e6)
        size = sum(len(text.encode()) for text in texts)
        ranks = args.ranks or str(folder / "ranks")
        if not args.ranks:
            rank_files.write_rank_file(tokenizer.train_bpe(texts[:500], 32_000), ranks)
        files = write(folder, texts)
        pattern = "" if args.ranks else "llama3"  # that of train_bpe
        tok = rank_files.from_rank_file(ranks, pattern)
        bare = tiktoken.Encoding(
            "bare",
            pat_str=tok.split,
            mergeable_ranks={t: i for i, t in enumerate(tok.ranks)},
            special_tokens={},
        )

        def alone() -> int:
            with ThreadPoolExecutor(threads) as pool:
                counts = pool.map(
                    lambda batch: sum(len(bare.encode_ordinary(text)) for text in batch),
                    batches(texts),
                )
                return sum(counts)

        made = iter(range(10**6))

        def prepared(source: Path) -> None:
            cfg = Data(source=str(source), tokenizer=ranks, tokenizer_pattern=pattern)
            prepare(cfg, log=lambda line: None, out=str(folder / f"out{next(made)}"))

        contenders = {"tiktoken alone": alone}
        n = alone()
        contenders |= {
            f"prepare {kind}": lambda path=path: prepared(path) for kind, path in files.items()
        }
        contenders["streamed .jsonl, one thread"] = lambda: streamed(
            Data(source=str(files[".jsonl"]), tokenizer=ranks, tokenizer_pattern=pattern), n
        )
        seconds = harness.alternate(contenders, args.rounds, warm_up=1)
    rows = []
    for name in contenders:
        rate = size / 1e6 / sorted(seconds[name])[args.rounds // 2]
        rows.append([name, f"{rate:.1f}", f"{harness.ratio(seconds, name, 'tiktoken alone'):.2f}"])
    memory = (
        max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        / 1e6
    )
    notes = (
        f"{len(texts):,} documents, {size / 1e6:.0f} MB of text, {threads} threads, "
        f"{tok.n_vocab:,} tokens; "
        f"peak memory of a process {memory:.1f} GB (this one holds the text)."
    )
    harness.report(
        "Preparing a corpus",
        ["what", "MB/s of text", "time, to tiktoken alone"],
        rows,
        notes,
        args.json,
    )


def compare_engines(args: argparse.Namespace) -> None:
    """Report MB/s of each published tokenizer, and its ratio to the library's."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # before the library makes its threads
    texts = corpus(args.source, args.megabytes * 1e6)
    size = sum(len(text.encode()) for text in texts) / 1e6
    rows = []
    for path in sorted(args.tokenizers.glob("*/tokenizer.json")):
        tok = open_tokenizer(str(path))
        seconds = harness.alternate(
            {
                "ours": lambda: tok.encode_batch(texts),
                "library": lambda: tok.in_text.encode_batch_fast(texts, add_special_tokens=False),
            },
            args.rounds,
            warm_up=1,
            clock=time.process_time,  # both have one thread
        )
        rates = [size / statistics.median(seconds[who]) for who in ("ours", "library")]
        ratio = 1 / harness.ratio(seconds, "ours", "library")
        rows.append([path.parent.name, tok.engine, *(f"{r:.2f}" for r in rates), f"{ratio:.1f}"])
    harness.report(
        "Tokenizers",
        ["tokenizer", "engine", "MB/s", "MB/s of `tokenizers`", "times"],
        rows,
        f"{len(texts):,} documents, {size:.0f} MB of text, one thread, {args.rounds} rounds in turn.",
        args.json,
    )


def streamed(cfg: Data, tokens: int) -> None:
    """Stream as many tokens as the batches of one rank that does nothing else."""
    source = stream.open_source(cfg, log=lambda line: None)
    order = stream.begin(stream.describe(source, 0, 1024, 8))
    batches = stream.StreamedBatches(
        source, order, range(tokens // (8 * 1024)), 8, 0, 1, gather=lambda one: [one]
    )
    for _ in range(tokens // (8 * 1024)):
        next(batches)
    batches.close()


def corpus(source: str, size: float) -> list[str]:
    once = [text for _, text in sources.documents(source) if text]
    texts: list[str] = []
    while sum(map(len, texts)) < size:
        texts += once
    return texts


def batches(texts: list[str]) -> list[list[str]]:
    groups = [[]]
    size = 0
    for text in texts:
        groups[-1].append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            groups.append([])
            size = 0
    return groups


def write(folder: Path, texts: list[str]) -> dict[str, Path]:
    """Write the same documents in three forms: one that many processes read, and one that only one
    can."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=200)
    return {f".{path.name.split('.', 1)[1]}": path for path in sorted(folder.glob("a.*"))}


if __name__ == "__main__":
    program.run(main)
