"""`python -m data.prepare`: tokenise a corpus and print a report."""

from __future__ import annotations

import argparse
import sys
from typing import Any, get_args

from configs import dropped, load, program
from configs.schema import Data
from data import formats
from data.prepare import prepare
from data.prepare.job import COUNTS, PrepareJob
from data.prepare.workers import work
from data.prepared import Prepared, read_manifest, verify
from data.stores import places

OPTIONS = (
    "source",
    "format",
    "chat_template",
    "tokenizer",
    "tokenizer_pattern",
    "end_token",
    "bpe_vocab_size",
    "text_field",
    "json_files",
    "validation_fraction",
    "fim_rate",
    "max_document_bytes",
    "skip_failed",
    "cache",
    "add_bos",
    "add_eos",
)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the options that are several names."""
    parser.add_argument(
        "--chat-may-drop",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=Data.model_fields["chat_may_drop"].description,
    )
    parser.add_argument(
        "--fim-tokens",
        nargs=3,
        default=[],
        metavar=("PREFIX", "SUFFIX", "MIDDLE"),
        help=Data.model_fields["fim_tokens"].description,
    )


@program.refuses
def main() -> int:
    if sys.argv[1:2] == ["--work"]:  # started by workers.Processes
        # the parent answers Ctrl-C (configs/program.py); without one the pipe ends this process
        return work(PrepareJob.load(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare", description="Tokenise a corpus."
    )
    parser.register("action", None, load.Once)
    for name in OPTIONS:
        field = Data.model_fields[name]
        names = get_args(field.annotation) or None
        kind: dict[str, Any] = {"type": type(field.default), "choices": names}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=field.default,
            help=f"{field.description.replace('%', '%%')} [{field.default}]",
            **kind,
        )
    add_names(parser)
    parser.add_argument(
        "--out",
        default="",
        type=places.out_place,
        help="the folder or s3:// prefix to make, for data.source; default: one in the cache",
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes to use at most; 0: one per core [0]"
    )
    dropped.flag(
        parser, "--on", "each machine prepares some of the files, and a run mixes the folders"
    )
    dropped.flag(parser, "--fim-spm-rate", dropped.DROPPED["data.fim_spm_rate"].sentence)
    parser.add_argument(
        "--verify", action="store_true", help="read every byte again and compare the hashes"
    )
    arguments = vars(parser.parse_args())
    check, out, workers = (arguments.pop(name) for name in ("verify", "out", "workers"))
    arguments["fim_tokens"] = tuple(arguments["fim_tokens"])
    arguments["chat_may_drop"] = tuple(arguments["chat_may_drop"])
    cfg = load.table_of("data", arguments)
    prepared = prepare(cfg, out=out, workers=workers)
    if check:
        verify(prepared.folder, cfg)
    _print_report(prepared, check)
    return 0


def _print_report(prepared: Prepared, checked: bool) -> None:
    manifest = read_manifest(prepared.folder)
    report = manifest["report"]
    print("\n" + "".join(f"{count.replace('_', ' '):>14}" for count in (*COUNTS, "tokens")))
    print("".join(f"{report[count]:>14,}" for count in (*COUNTS, "tokens")))
    print(f"\n{'split':<12}{'documents':>12}{'tokens':>16}{'MB of text':>14}{'bytes/token':>14}")
    for split, row in manifest["splits"].items():
        ratio = row["bytes"] / max(row["tokens"], 1)
        print(
            f"{split:<12}{row['documents']:>12,}{row['tokens']:>16,}{row['bytes'] / 1e6:>14,.2f}{ratio:>14.3f}"
        )
    print(
        f"\nvocabulary   {prepared.tokenizer.n_vocab:,} (fingerprint "
        f"{prepared.tokenizer.fingerprint}), run by {manifest.get('tokenizer_engine', 'tiktoken')}"
    )
    print(f"corpus       {prepared.fingerprint}{', every hash verified' if checked else ''}")
    print(f"folder       {prepared.folder}")
    for line in report["failures"]:
        print(f"failed       {line}")
    warning = formats.warning(prepared.train.folder, prepared.tokenizer)
    if warning:
        print(warning, file=sys.stderr)


if __name__ == "__main__":
    program.run(main)
