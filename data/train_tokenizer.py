"""Trains a tokenizer: `python -m data.train_tokenizer --source corpus/ --vocab-size 32000 --out
tokenizer/`.

rustbpe trains it (data/tokenizer.py) on the first BPE_CHARACTERS of the source. It is written in
the two forms that others read: `tokenizer.tiktoken` (ranks, for data.tokenizer and tiktoken) and
Hugging Face's `tokenizer.json` with the files that belong to it. Then both are read back. Both must
give the same ids, and the ids must give the text back, on a sample of the texts it was trained on
and on hard text: all planes of Unicode, long runs, no text at all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from configs import program
from configs.load import Once
from configs.schema import Data, InputError
from data import hf_tokenizer, rank_files, sources, tokenizer
from data.prepare.job import BPE_CHARACTERS
from data.stores import places

RANKS = "tokenizer.tiktoken"
SAMPLE = 5_000_000  # characters of the source that the forms are compared on
HARD = (
    "",
    "".join(chr(c) for c in range(0x110000) if c % 61 == 0 and not 0xD800 <= c < 0xE000),
    "a\0b\0\0 \r\n\t\u00a0\u2028\ufeff\ufffd x" * 50,
    " " * 200_000 + "\n" * 3000,
    "x" * 20_000 + "é" * 20_000 + "1234567" * 1000,
)


def train(
    source: str,
    vocab_size: int,
    out: Path,
    field: str = "text",
    characters: int = BPE_CHARACTERS,
    json_files: str = sources.RECORDS,
) -> tokenizer.Tokenizer:
    """Train the tokenizer, write it to the folder `out` and verify it. Raises InputError if the
    source cannot be read or is too small, or if `out` has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out: {out} exists already: give another folder, or remove it")
    sources.warn_of_lines(sources.find(source), print)
    tok = tokenizer.train_bpe(_texts(source, field, characters, json_files), vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    rank_files.write_rank_file(tok, str(out / RANKS))
    for name, document in hf_tokenizer.files(tok, 1 << 20).items():
        (out / name).write_text(
            json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8"
        )
    verify(tok, out, [*_texts(source, field, SAMPLE, json_files), *HARD])
    return tok


def _texts(source: str, field: str, characters: int, json_files: str) -> Iterator[str]:
    """Yield the first texts of the source, up to `characters` characters; the last text is cut."""
    for _, text in sources.documents(source, field=field, json_files=json_files):
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def verify(tok: tokenizer.Tokenizer, out: Path, texts: list[str]) -> None:
    """Raise InputError if a written form does not give the ids of `tok`, or if ids do not give the
    text back. `tokenizers` has to give them too."""
    forms = {
        RANKS: rank_files.from_rank_file(str(out / RANKS), "llama3"),
        "tokenizer.json": hf_tokenizer.read(out),
    }
    for name, form in forms.items():
        if form.fingerprint != tok.fingerprint:
            raise InputError(
                f"{out / name} is not the tokenizer that was trained: please report this as a bug"
            )
    reference = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in texts:
        ids = tok.encode(text)
        if tok.decode(ids) != text:
            raise InputError(
                f"a text of {len(text)} characters does not survive the tokenizer: please report "
                "this as a bug"
            )
        # tokenizers differs in two cases, names of special tokens and very long whitespace: see
        # data/hf_tokenizer.py::files.
        plain = tokenizer.END_OF_TEXT not in text and len(list(tokenizer._pieces(text))) == 1
        if plain and reference.encode(text, add_special_tokens=False).ids != ids.tolist():
            raise InputError(
                f"tokenizers gives different ids for a text of {len(text)} characters: please "
                "report this as a bug"
            )


@program.refuses
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.train_tokenizer", description="Train a byte-level BPE."
    )
    parser.register("action", None, Once)
    parser.add_argument("--source", default=Data().source, help="as data.source [stdlib]")
    parser.add_argument("--text-field", default=Data().text_field, help="as data.text_field [text]")
    parser.add_argument(
        "--json-files",
        default=Data().json_files,
        choices=(sources.RECORDS, sources.AS_TEXT),
        help=f"as data.json_files [{Data().json_files}]",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="ids, the end of a text included"
    )
    parser.add_argument(
        "--characters",
        type=int,
        default=BPE_CHARACTERS,
        help=f"to train on at most [{BPE_CHARACTERS}]",
    )
    parser.add_argument("--out", type=places.out_folder, required=True, help="folder to make")
    args = parser.parse_args()
    began = time.monotonic()
    if args.vocab_size < 257:
        raise InputError("--vocab-size: 256 bytes and the end of a text make at least 257")
    how = args.text_field, args.characters, args.json_files
    try:
        tok = train(args.source, args.vocab_size, args.out, *how)
    except OSError as error:  # a disk that is full, say
        raise InputError(str(error)) from error
    print(
        f"{tok.n_vocab:,} tokens in {time.monotonic() - began:.1f} s (fingerprint "
        f"{tok.fingerprint}), verified"
    )
    print(f"use it with   --data.tokenizer={os.path.join(args.out, RANKS)}")
    return 0


if __name__ == "__main__":
    program.run(main)
