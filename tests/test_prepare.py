"""From text to tokens: every text survives, and a cache is whole or refused."""

import gzip
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from configs.schema import Data, InputError, is_prepared
from data import (
    hf_tokenizer,
    packages,
    rank_files,
    sources,
    splice,
    stream,
    tokenizer,
    train_tokenizer,
)
from data.documents import DocumentIndex
from data.prepare import job, prepare
from data.prepare.__main__ import main
from data.prepare.part import SplitWriter
from data.prepared import Prepared, open_prepared, verify
from data.tokens import Tokens
from tests.conversations import conversations, write
from tests.library import words
from tests.ranks import WORKERS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty small documents in nested folders, some empty, one hidden, one that is no text."""
    folder = tmp_path / "corpus"
    for i in range(40):
        path = folder / f"part{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if i % 10 == 9 else words(i, 30 + i))
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    return folder


def data(corpus: Path | str, tmp_path: Path, **options: object) -> Data:
    options = {"tokenizer": "bytes", "validation_fraction": 0.2, **options}
    return Data(source=str(corpus), cache=str(tmp_path / "cache"), **options)


def whole(tokens: Tokens) -> np.ndarray:
    return tokens.read(0, len(tokens))


def names(tokens: Tokens) -> list[str]:
    documents = DocumentIndex(tokens)
    return [documents.name(i) for i in range(len(documents))]


def texts(prepared: Prepared) -> dict[str, str]:
    """name -> text of every document of both splits, cut at the end-of-text tokens, names and
    starts checked."""
    found = {}
    for tokens in (prepared.train, prepared.validation):
        ids = whole(tokens)
        ends = np.flatnonzero(ids == prepared.tokenizer.eot_id)
        assert (
            tokens.document_starts.dtype == np.int64
            and ids.dtype == tokens.dtype == prepared.tokenizer.dtype
        )
        assert tokens.document_starts.tolist() == [0, *(ends + 1).tolist()][: len(ends)]
        for name, start, end in zip(names(tokens), tokens.document_starts, ends, strict=True):
            found[name] = prepared.tokenizer.decode(ids[start:end])
        assert not len(ends) or len(ids) == ends[-1] + 1
    return found


def content(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    """Run Python with these arguments."""
    usual = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *arguments], **usual | options)


def command(corpus: Path, cache: Path) -> list[str]:
    """Return the arguments that prepare a corpus in bytes."""
    return f"-m data.prepare --source {corpus} --tokenizer bytes --cache {cache}".split()


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe([words(0, 4000)], 400)


# ---- sources


def test_a_folder_is_its_text_files_in_the_order_of_their_names(corpus: Path) -> None:
    found = list(sources.documents(str(corpus)))
    assert [name for name, _ in found] == sorted(f"part{i % 3}/{i:02}.txt" for i in range(40))
    assert all(text == (corpus / name).read_text() for name, text in found)


def test_files_and_globs(corpus: Path) -> None:
    one = corpus / "part1" / "01.txt"
    assert list(sources.documents(str(one))) == [("01.txt", one.read_text())]
    found = sources.find(f"{corpus}/**/*1.txt")
    assert [file.name for file in found] == [
        "part0/21.txt",
        "part1/01.txt",
        "part1/31.txt",
        "part2/11.txt",
    ]
    (corpus / "exact.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert list(sources.documents(f"{corpus}/exact.txt")) == [("exact.txt", "\ufeffa\r\nb\rc\n")]


BAD_SOURCES = {  # path in the corpus folder: sentence; lines of JSON are in tests/test_records.py
    "nowhere.txt": "nowhere.txt cannot be read: No such file",
    "*.none": "no file found there",
    "images": "no file with a text suffix",
    "latin": r"latin/a.txt is not UTF-8 text \(byte 1\)",
    "links": "links/gone.txt cannot be read: No such file",
    "pipe.txt": "pipe.txt is not a regular file",
    "bad.jsonl": "bad.jsonl, line 2 is not a JSON object",
    "empty.txt": r"has no text: 1 file, 1 document \(1 empty\)",
}


@pytest.mark.parametrize("path", BAD_SOURCES)
def test_bad_sources_are_one_sentence(path: str, corpus: Path, tmp_path: Path) -> None:
    for folder in ("images", "latin", "links"):
        (corpus / folder).mkdir()
    (corpus / "images" / "a.png").write_bytes(b"\x89")
    (corpus / "latin" / "a.txt").write_bytes(b"h\xe9llo")
    (corpus / "links" / "gone.txt").symlink_to(corpus / "nowhere")
    (corpus / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    (corpus / "empty.txt").write_text("")
    os.mkfifo(corpus / "pipe.txt")
    sentence = BAD_SOURCES[path]
    with pytest.raises(InputError, match=sentence) as caught:
        prepare(data(corpus / path, tmp_path))
    assert "\n" not in str(caught.value)
    # a vocabulary that cannot be trained would be a consequence, and the wrong thing to fix
    if path != "empty.txt":
        with pytest.raises(InputError, match=sentence):
            prepare(data(corpus / path, tmp_path, tokenizer="bpe"))
    assert not [p for p in tmp_path.glob("cache/*") if p.suffix != ".lock"], (
        "something was left in the cache"
    )


def test_failures_that_are_allowed_do_not_stop_a_bpe(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[]\n" + LINES + "{\n")
    cfg = data(path, tmp_path, tokenizer="bpe", bpe_vocab_size=300)
    with pytest.raises(InputError, match="a.jsonl, line 1 "):
        prepare(cfg)
    assert prepare(cfg.model_copy(update={"skip_failed": 2})).tokenizer.n_vocab == 300


@pytest.mark.parametrize(
    "content, warned",
    [
        ('{"text": "a"}\n{"text": "b"}\n', True),
        ('{"text": "a"}\n', False),
        ('{\n "text": "a"\n}\n', False),
        ('[{"text": "a"},\n{"text": "b"}]\n', False),
        ('{"a": 1}\nno json', False),
    ],
)
def test_json_lines_under_the_name_of_a_document_are_noticed(
    content: str, warned: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(content)
    (folder / "b.jsonl").write_text('{"text": "b"}\n{"text": "c"}\n')
    for read in (prepare, stream.open_source):
        lines: list[str] = []
        read(data(folder, tmp_path / "cache"), log=lines.append)
        said = [line for line in lines if line.startswith("warning: ")]
        assert [f"{folder}/a.txt has one JSON object per line" in line for line in said] == [
            True
        ] * warned, lines


def test_the_standard_library_is_read_without_its_tables() -> None:
    """A short run learns tables of code points first, and then writes nothing else."""
    found = {file.name: file.path for file in sources.find("stdlib")}
    assert {"os.py", "html/parser.py", "email/message.py", "json/decoder.py"} <= found.keys()
    assert not [name for name in found if name.startswith(("encodings/", "pydoc_data/"))]
    number = re.compile(r"0x[0-9a-fA-F]+|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\b\d+\b")
    for name, path in found.items():
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        assert len(text) < 5000 or len(number.findall(text)) < len(text) / 50, f"{name} is a table"


def test_installed_packages_are_a_corpus(tmp_path: Path) -> None:
    """Its documents are in one order, each once, without tests; a changed byte is seen."""
    found = packages.find()
    names = [name for name, _ in found]
    assert names == sorted(set(names)) and "torch/nn/functional.py" in names
    assert not [name for name in names if packages.is_left_out(name)]
    contents = [Path(path).read_bytes() for _, path in found]
    assert all(contents) and len(set(contents)) == len(contents)
    files = sources.find("packages")
    assert [(file.name, file.path) for file in files] == found
    one = tmp_path / "one.py"
    one.write_text("a = 1\n")
    before = packages.digest([*found[:9], ("one.py", str(one))])
    one.write_text("a = 2\n")
    assert before != packages.digest([*found[:9], ("one.py", str(one))])


def test_tests_of_packages_are_left_out() -> None:
    out = "numpy/tests/a.py torch/testing/_internal/b.py a/test_b.py a/conftest.py torch/version.py"
    assert all(map(packages.is_left_out, out.split()))
    assert not any(map(packages.is_left_out, ("torch/utils/testers.py", "a/latest.py")))


def test_copies_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"a.py": "x\n", "b.py": "x\n", "c.py": "y\n", "d.py": ""}.items():
        (tmp_path / name).write_text(text)
    files = [(name, str(tmp_path / name)) for name in ("a.py", "b.py", "c.py", "d.py")]
    assert [name for name, _ in packages.without_copies(files)] == ["a.py", "c.py"]
    monkeypatch.setattr(packages, "names", lambda: ["no-such-package"])
    with pytest.raises(InputError, match="no-such-package of requirements.txt is not installed"):
        sources.find("packages")


# ---- the tokenised corpus


@pytest.mark.slow
def test_every_document_of_the_standard_library_survives(tmp_path: Path) -> None:
    """The default corpus and tokenizer, once, for real."""
    cfg = Data(cache=str(tmp_path))
    prepared = prepare(cfg)
    original = {name: text for name, text in sources.documents("stdlib") if text}
    assert texts(prepared) == original
    assert (
        len(original) > 400
        and "os.py" in original
        and not any("/test/" in name for name in original)
    )
    assert prepared.tokenizer.n_vocab == cfg.bpe_vocab_size == 4096
    size = sum(len(text.encode()) for text in original.values())
    # bytes per token; 3.71 measured
    assert size / (len(prepared.train) + len(prepared.validation)) > 3.4
    assert verify(prepared.folder).fingerprint == prepared.fingerprint
    began, worked = time.perf_counter(), time.process_time()
    prepare(cfg)
    assert time.process_time() - worked < 0.5, "9 ms measured"
    assert time.perf_counter() - began < 0.5 * WORKERS


def test_second_call_opens_what_the_first_made(corpus: Path, tmp_path: Path) -> None:
    log = []
    first = prepare(data(corpus, tmp_path), log.append)
    assert log and texts(first) == {n: t for n, t in sources.documents(str(corpus)) if t}
    before = {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}
    log.clear()
    second = prepare(data(corpus, tmp_path), log.append)
    assert not log and second.folder == first.folder and second.fingerprint == first.fingerprint
    assert before == {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}


def test_a_change_of_anything_that_decides_the_tokens_makes_a_new_folder(
    corpus: Path, tmp_path: Path, bpe: tokenizer.Tokenizer
) -> None:
    rank_file = tmp_path / "mine.tiktoken"
    rank_files.write_rank_file(bpe, str(rank_file))
    base = prepare(data(corpus, tmp_path))
    made = [base]
    for options in (
        {"tokenizer": "bpe", "bpe_vocab_size": 300},
        {"tokenizer": "bpe", "bpe_vocab_size": 301},
        {"tokenizer": str(rank_file), "tokenizer_pattern": "llama3"},
        {"validation_fraction": 0.3},
    ):
        made.append(prepare(data(corpus, tmp_path, **options)))
    rank_file.write_bytes(b"".join(rank_file.read_bytes().splitlines(True)[:-1]))
    other = {"tokenizer": str(rank_file), "tokenizer_pattern": "llama3"}
    made.append(prepare(data(corpus, tmp_path, **other)))
    (corpus / "part0" / "new.txt").write_text("new")
    made.append(prepare(data(corpus, tmp_path)))
    (corpus / "part0" / "new.txt").write_text("NEW")  # the same size
    made.append(prepare(data(corpus, tmp_path)))
    for kind in ("folder", "fingerprint"):
        assert len({getattr(prepared, kind) for prepared in made}) == len(made), kind
    (corpus / "part0" / "new.txt").unlink()
    assert prepare(data(corpus, tmp_path)).folder == base.folder


def test_fingerprint_is_of_the_text_not_of_the_files(corpus: Path, tmp_path: Path) -> None:
    """The same text on another machine: other path, other times, other names even."""
    cfg = data(corpus, tmp_path, tokenizer="bpe", bpe_vocab_size=300)
    first = prepare(cfg)
    corpus.rename(tmp_path / "moved")
    for path in (tmp_path / "moved").rglob("*.txt"):
        os.utime(path, (1, 1))
    second = prepare(cfg.model_copy(update={"source": str(tmp_path / "moved")}))
    assert second.folder != first.folder and second.fingerprint == first.fingerprint
    assert content(second.folder)["train-00000.bin"] == content(first.folder)["train-00000.bin"]


def test_held_out_documents_are_stable_and_copies_stay_together(
    corpus: Path, tmp_path: Path
) -> None:
    def held_out(**options: object) -> set[str]:
        prepared = prepare(data(corpus, tmp_path, **options))
        assert not set(names(prepared.train)) & set(names(prepared.validation))
        return set(names(prepared.validation))

    small, large = held_out(validation_fraction=0.1), held_out(validation_fraction=0.4)
    assert small < large and len(large) < 25
    assert held_out(validation_fraction=0.1, tokenizer="bpe", bpe_vocab_size=300) == small
    for i in range(40):
        (corpus / f"copy{i:02}.txt").write_text(
            (corpus / f"part{i % 3}" / f"{i:02}.txt").read_text()
        )
    (corpus / "another.txt").write_text("another")
    doubled = held_out(validation_fraction=0.4)
    assert doubled - {"another.txt"} == large | {f"copy{Path(name).name}" for name in large}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_both_splits_of_a_tiny_corpus_have_text(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for i in range(count):
        (folder / f"{i}.txt").write_text(
            "".join(words(j, 5) for j in range(100 * i, 100 * i + 100))
        )
    whole = "".join(text for _, text in sources.documents(str(folder)))
    for fraction in (0.001, 0.1, 0.49):
        prepared = prepare(data(folder, tmp_path, validation_fraction=fraction))
        found = texts(prepared)
        assert names(prepared.train) and names(prepared.validation)
        assert "".join(found[name] for name in sorted(found)) == whole
        if count == 1:  # cut at a line's end, at about the fraction asked for
            assert names(prepared.validation) == ["0.txt (tail)"] and found["0.txt"].endswith("\n")
            assert 0 < len(found["0.txt (tail)"]) < fraction * len(whole) + 100
    everything = prepare(data(folder, tmp_path, validation_fraction=0))
    assert not len(everything.validation) and not names(everything.validation)
    assert everything.validation.document_starts.shape == (0,)
    with pytest.raises(InputError, match="the validation split of the corpus has 0"):
        splice.describe([("", everything.fingerprint, everything.validation, [[0, 1.0]])], 0, 8, 1)


def test_documents_of_a_range_of_tokens(corpus: Path, tmp_path: Path) -> None:
    train = prepare(data(corpus, tmp_path)).train
    documents = DocumentIndex(train)
    owner = np.zeros(len(train), np.int64)
    for index, start in enumerate(train.document_starts):
        owner[start:] = index
    edge = int(train.document_starts[3])
    end = len(owner)
    ranges = [(0, 1), (0, 0), (0, 10**9), (end - 1, end), (end, end + 5), (edge - 1, edge)]
    ranges += np.sort(np.random.default_rng(0).integers(0, end, (200, 2)), axis=1).tolist()
    for start, stop in [*ranges, (edge, edge + 1)]:
        assert documents.between(start, stop).tolist() == np.unique(owner[start:stop]).tolist()


def test_a_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache, reason in (
        (tmp_path / "file" / "cache", "Not a directory"),
        ("/proc/cache", "No such file|Permission"),
    ):
        with pytest.raises(InputError, match=f"data.cache: {cache} cannot be written: ({reason})"):
            prepare(data(corpus, tmp_path).model_copy(update={"cache": str(cache)}))


def test_options_out_of_their_bounds_are_sentences(monkeypatch, capsys) -> None:
    """All of them, as in a configuration; not pydantic's words with a usage above them."""
    options = ["--skip-failed=-1", "--validation-fraction=2", "--bpe-vocab-size=3"]
    monkeypatch.setattr(sys, "argv", ["data.prepare", "--source=stdlib", *options])
    assert main() == 2
    words = capsys.readouterr().err
    assert words.startswith("3 mistakes in the configuration:\n") and words.count("\n") == 4
    assert "  - command line: data.skip_failed = -1: must be an integer >= 0\n" in words


@pytest.mark.parametrize(("name", "value"), [("add_bos", True), ("add_eos", False)])
def test_a_prepared_folder_has_its_own_ends_of_documents(
    name: str, value: bool, corpus: Path, tmp_path: Path
) -> None:
    """An option that would have no effect on its tokens is refused, and one that made them is not."""
    made = prepare(data(corpus, tmp_path), log=lambda _: None)
    with pytest.raises(InputError, match=f"data.{name} = {str(value).lower()}: .* was prepared"):
        prepare(data(made.folder, tmp_path, **{name: value}))
    assert prepare(data(made.folder, tmp_path)).fingerprint == made.fingerprint
    if name == "add_eos":
        without = prepare(data(corpus, tmp_path, add_eos=False), log=lambda _: None)
        again = prepare(data(without.folder, tmp_path, add_eos=False))
        assert again.fingerprint == without.fingerprint


def test_an_option_given_twice_is_refused(corpus: Path, monkeypatch, capsys) -> None:
    """The second would replace the first: of two sources, one would be missing in silence."""
    parts = [f"--source={corpus}/part0", f"--source={corpus}/part1"]
    for tool, more in (main, []), (train_tokenizer.main, ["--vocab-size=300", "--out=none"]):
        monkeypatch.setattr(sys, "argv", ["tool", *parts, *more])
        assert tool() == 2
        said = capsys.readouterr().err
        assert said == (f"--source is given twice: {corpus}/part0 and {corpus}/part1; keep one\n")
    monkeypatch.setattr(sys, "argv", ["tool", "--text-field=a", "--text-field", "b"])
    assert main() == train_tokenizer.main() == 2
    assert capsys.readouterr().err == "--text-field is given twice: a and b; keep one\n" * 2


def test_causes_of_failures_keep_the_names_of_encodings(corpus: Path, tmp_path: Path) -> None:
    """A number in a cause differs from document to document, but not that of UTF-8."""
    (corpus / "latin.txt").write_bytes(b"h\xe9llo")
    (corpus / "wide.txt").write_bytes("hello".encode("utf-16"))
    lines: list[str] = []
    prepare(data(corpus, tmp_path, skip_failed=2), log=lines.append)
    said = "\n".join(lines)
    assert "1 failed: is not UTF-8 text" in said and "text, but UTF-16" in said, said
    assert job.reason("has 1234 of 5 tokens") == "has N of N tokens"


def test_a_full_disk_is_a_sentence_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of a file replaces the full disk: the same error path, from the same
    write."""
    (corpus / "large.txt").write_text(words(0, 50_000))
    limit = (100_000, 100_000)
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)}
    done = run(*command(corpus, tmp_path / "cache"), **options)
    assert done.returncode == 2 and "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read_is_refused(corpus: Path, tmp_path: Path) -> None:
    def log(line: str) -> None:
        (corpus / "part0" / "00.txt").write_text("another text")

    with pytest.raises(InputError, match="changed while it was read"):
        prepare(data(corpus, tmp_path), log)
    assert len(prepare(data(corpus, tmp_path)).train)


KILLED_AT_EVERY_STEP = """
import json, os, shutil, signal, sys
from configs.schema import Data
from data.prepare import job as module, prepare
from data.prepared import verify
source, cache, module.PART_BYTES, every = *sys.argv[1:3], *map(int, sys.argv[3:5])
options = json.loads(sys.argv[5])
cfg = Data(source=source, cache=cache, tokenizer="bytes", validation_fraction=0.2, **options)

def attempt(kill_at):
    child = os.fork()
    if child == 0:
        seen = 0
        def count(event, arguments):
            nonlocal seen
            if any(isinstance(a, str) and a.startswith(cache) for a in arguments):
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)  # called before every open, mkdir, rename, listdir, remove ...
        prepare(cfg, lambda line: None, workers=1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def finished():
    if not os.path.isdir(cache):
        return []
    return [e.path for e in os.scandir(cache) if e.is_dir() and not e.name.endswith(".tmp")]

def content(folder):
    return {e.name: open(e.path, "rb").read() for e in os.scandir(folder)}

attempt(0)
(folder,) = finished()
want = content(folder)
kills = 0
while True:
    shutil.rmtree(cache)
    if attempt(kills * every + 1) == 0:
        break
    kills += 1
    for folder in finished():  # killed after the rename: it must be whole
        verify(folder)
    assert attempt(0) == 0
    assert content(folder := finished()[0]) == want and len(os.listdir(cache)) == 2, kills
print(kills, verify(folder).fingerprint)
"""


CHAT = {"format": "chat", "chat_template": "plain"}


@pytest.mark.parametrize(
    "options, part_bytes, every",
    [
        ({}, 10**9, 8),
        pytest.param({}, 3000, 1, marks=pytest.mark.exhaustive),
        pytest.param(CHAT, 8000, 9, marks=pytest.mark.slow),
    ],
)
@pytest.mark.cap(600)
def test_killed_at_any_file_operation_and_run_again(
    options: dict, part_bytes: int, every: int, corpus: Path, tmp_path: Path
) -> None:
    """A child per kill: before its first file operation in the cache, its second ... What the next
    one makes of what is left is, to the byte, what an undisturbed one makes."""
    source = corpus
    if options:
        source = write(tmp_path / "talks.jsonl", conversations(60))
    given = [str(part_bytes), str(every), json.dumps(options)]
    done = run("-c", KILLED_AT_EVERY_STEP, str(source), str(tmp_path / "cache"), *given)
    assert done.returncode == 0, done.stderr
    kills, fingerprint = done.stdout.split()
    assert int(kills) > 40 // every
    if part_bytes > 10**6:
        other = prepare(data(source, tmp_path / "other", **options))
        assert fingerprint == other.fingerprint
        assert other.format == options.get("format", "text")


@pytest.mark.slow
def test_of_three_that_prepare_at_once_one_does_the_work(corpus: Path, tmp_path: Path) -> None:
    started_by = [sys.executable, *command(corpus, tmp_path / "cache")]
    started = [subprocess.Popen(started_by, cwd=ROOT, stdout=-1, text=True) for _ in range(3)]
    output = [process.communicate(timeout=60 * WORKERS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum("documents: " in text for text in output) == 1
    cfg = data(corpus, tmp_path, validation_fraction=0.01)
    assert all(prepare(cfg).fingerprint in text for text in output)


def test_command_line(corpus: Path, tmp_path: Path) -> None:
    done = run(*command(corpus, tmp_path / "cache"), "--verify")
    assert done.returncode == 0, done.stderr
    prepared = prepare(data(corpus, tmp_path, validation_fraction=0.01))
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("train"))
    assert row[1:3] == [f"{len(names(prepared.train)):,}", f"{len(prepared.train):,}"]
    assert f"corpus       {prepared.fingerprint}, every hash verified" in done.stdout


# ---- every kind of source, many processes, kills


ROWS = [words(i, 5 + i % 40) + ("é\u2028\0" if i % 7 == 0 else "") for i in range(400)]
LINES = "".join(
    json.dumps({"id": i, "text": row, "body": row[::-1]}, ensure_ascii=i % 2 == 0)
    + "\n" * (1 + i % 3)
    for i, row in enumerate(ROWS)
)


def write_rows(path: Path) -> None:
    """ROWS as one file, of the kind that its suffix says."""
    zstd = pyarrow.compress(LINES.encode(), codec="zstd", asbytes=True)
    if path.suffix == ".parquet":
        table = pyarrow.table(
            {"text": ROWS, "body": [row[::-1] for row in ROWS], "id": range(len(ROWS))}
        )
        parquet.write_table(table, path, row_group_size=23)
    else:
        path.write_bytes(
            {".gz": gzip.compress(LINES.encode()), ".zst": zstd}.get(path.suffix, LINES.encode())
        )


KINDS = [
    "a.jsonl",
    "a.ndjson",
    "a.jsonl.gz",
    "a.json.gz",
    "a.jsonl.zst",
    "a.parquet",
    "hf",
    "hf-folder",
]


@pytest.mark.parametrize(
    "kind, part_bytes", [("a.jsonl", 10**9), ("a.parquet", 10**9), *((k, 6000) for k in KINDS)]
)
def test_every_kind_of_source(
    kind: str, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prepare.job.PART_BYTES", part_bytes)
    folder = tmp_path / "corpus"
    folder.mkdir()
    source, first, last = (
        str(folder / kind),
        f"{kind}:1",
        f"{kind}:{1 + sum(1 + i % 3 for i in range(399))}",
    )
    if kind == "hf":
        pytest.importorskip("datasets").Dataset.from_dict({"text": ROWS}).save_to_disk(
            folder / "saved"
        )
        source, first, last = f"hf:{folder}/saved", "saved@train:0", "saved@train:399"
    elif kind == "hf-folder":
        pytest.importorskip("datasets")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
        write_rows(folder / "a.parquet")
        source, first, last = f"hf:{folder}@train", "corpus@train:0", "corpus@train:399"
    else:
        write_rows(folder / kind)
        if kind.endswith("parquet"):
            first, last = "a.parquet:0", "a.parquet:399"
    prepared = prepare(data(source, tmp_path, validation_fraction=0), workers=1)
    assert list(texts(prepared).values()) == ROWS
    assert (names(prepared.train)[0], names(prepared.train)[399]) == (first, last)
    if part_bytes < 10**9 and kind not in ("a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "hf-folder"):
        assert len(prepared.train.shards) > 3, "one process would read all of it"
    if not kind.startswith("hf"):
        other = prepare(data(source, tmp_path, validation_fraction=0, text_field="body"), workers=1)
        assert list(texts(other).values()) == [row[::-1] for row in ROWS]
        with pytest.raises(InputError, match='"nothing"'):
            prepare(data(source, tmp_path, text_field="nothing"), workers=1)


def test_a_glob_of_mixed_kinds_and_a_text_that_is_packed(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in KINDS[:6]:
        write_rows(folder / name)
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"first ") + gzip.compress(b"second"))
    (folder / "c.md").write_text("third")
    for source in (folder, f"{folder}/*"):
        prepared = prepare(data(source, tmp_path, validation_fraction=0))
        assert list(texts(prepared).values()) == [*ROWS * 6, "first second", "third"]


def test_a_dataset_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        InputError, match="hf:/nowhere.* cannot be opened .* /nowhere/at/all is no f"
    ):
        prepare(data("hf:/nowhere/at/all", tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        prepare(data("hf:org/name", tmp_path))


@pytest.mark.slow
def test_neither_processes_nor_kills_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, by three others; by three that are killed at random moments until
    they are done."""
    monkeypatch.setattr("data.prepare.job.PART_BYTES", 25_000)
    source = tmp_path / "corpus"
    source.mkdir()
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        write_rows(source / name)
    cfg = data(source, tmp_path, tokenizer="bpe", bpe_vocab_size=400)
    made = [
        prepare(cfg, out=str(tmp_path / f"out{workers}"), workers=workers) for workers in (1, 3)
    ]
    code = (
        "import sys; from configs.schema import Data; from data.prepare import job, prepare; "
        "job.PART_BYTES = 25_000\n"
    )
    code += "prepare(Data.model_validate_json(sys.argv[1]), out=sys.argv[2], workers=3)"
    dice, kills, records, finished = random.Random(1), 0, tmp_path / "killed.tmp" / "parts", {}
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", code, cfg.model_dump_json(), str(tmp_path / "killed")], cwd=ROOT
        )
        before, more = finished, dice.randint(1, 3)
        while process.poll() is None and (
            kills == 3 or len(list(records.glob("*.json"))) < len(before) + more
        ):
            time.sleep(0.01)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        finished = {path.name: path.stat().st_ino for path in records.glob("*.json")}
        assert before.items() <= finished.items(), "a finished part was made again"
    assert process.returncode == 0 and kills > 1
    made.append(open_prepared(str(tmp_path / "killed")))
    assert len(made[0].train.shards) > 5
    assert all(content(prepared.folder) == content(made[0].folder) for prepared in made)
    assert sorted(texts(made[0]).values()) == sorted(ROWS * 3)


def test_a_process_that_dies_or_finds_an_error_ends_the_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prepare.job.PART_BYTES", 10_000)
    path = tmp_path / "a.jsonl"
    path.write_text(LINES + "[]\n" + LINES)
    line = LINES.count("\n") + 1
    with pytest.raises(
        InputError, match=f"{path}, line {line} is not a JSON object with a string under"
    ):
        prepare(data(path, tmp_path), workers=2)
    assert list(tmp_path.glob("cache/*.tmp/parts/*.json")), "what was finished is kept"
    monkeypatch.setattr("data.prepare.workers.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="died"):
        prepare(data(path, tmp_path, skip_failed=1), workers=2)


# ---- what is left out, and the sums


def test_the_report_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [words(i, 20) for i in range(60)]
    lines = [json.dumps({"text": text}) for text in good]
    lines[10:10] = [
        "{",
        json.dumps({"text": ""}),
        json.dumps({"text": "x" * 5000}),
        json.dumps({"txt": "a"}),
        "",
        "  ",
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    packed = gzip.compress("\n".join(lines[:10]).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-9])
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / "e.txt").write_bytes(b"x" * 5001)
    table = pyarrow.table({"text": ["row 0", None, "row 2"]})
    parquet.write_table(table, tmp_path / "f.parquet")
    (tmp_path / "g.parquet").write_bytes((tmp_path / "f.parquet").read_bytes()[:-20])
    source = f"{tmp_path}/*.*"
    for part_bytes in (10**9, 1500):
        monkeypatch.setattr("data.prepare.job.PART_BYTES", part_bytes)
        made = [
            prepare(
                data(source, tmp_path, skip_failed=6, max_document_bytes=1500),
                out=f"{tmp_path}/out/{part_bytes}-{w}",
                workers=w,
            )
            for w in (1, 3)
        ]
        assert content(made[0].folder) == content(made[1].folder)
        report = json.loads(content(made[0].folder)["manifest.json"])["report"]
        failures = [(line.split(" ")[0], line.split(" ", 1)[1]) for line in report.pop("failures")]
        assert report["documents"] == sum(
            report[what] for what in ("kept", "empty", "too_long", "failed")
        )
        assert (report["empty"], report["too_long"], report["failed"]) == (2, 2, 6)
        assert report["kept"] == 60 + 9 + 2
        assert report["tokens"] == len(made[0].train) + len(made[0].validation)
        want = [
            ("a.jsonl:11", "JSON"),
            ("a.jsonl:14", 'nothing under "text"'),
            ("b.jsonl.gz:10", "truncated"),
            ("c.txt", "UTF-8"),
            ("f.parquet:1", "null"),
            ("g.parquet", "arquet"),
        ]
        assert [
            (name.startswith(n), w in problem)
            for (name, problem), (n, w) in zip(failures, want, strict=True)
        ] == [(True, True)] * 6, failures
    with pytest.raises(
        InputError,
        match=r"more than 5 documents cannot be read \(data.skip_failed\); one of them: .*/",
    ):
        prepare(data(source, tmp_path, skip_failed=5), workers=1)
    with pytest.raises(InputError, match="a.jsonl, line 11 is not"):
        prepare(data(source, tmp_path), workers=1)


def test_begin_and_end_tokens(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="data.add_bos: the tokenizer bytes has no token that begins a text"
    ):
        prepare(data(corpus, tmp_path, add_bos=True))
    ranks = [bytes([i]) for i in range(256)] + [b"ab"]
    tok = tokenizer.Tokenizer(
        ranks, tokenizer.SPLIT, ["<|begin_of_text|>", "<|end_of_text|>"], "<|end_of_text|>"
    )
    for name, document in hf_tokenizer.files(tok, 64).items():
        (tmp_path / name).write_text(json.dumps(document))
    made = {}
    for bos, eos in itertools.product((False, True), repeat=2):
        cfg = data(
            corpus, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), add_bos=bos, add_eos=eos
        )
        prepared = made[bos, eos] = prepare(cfg)
        assert prepared.tokenizer.fingerprint == tok.fingerprint
        found = {}
        for tokens in (prepared.train, prepared.validation):
            edges = [*tokens.document_starts.tolist(), len(tokens)]
            for name, start, stop in zip(names(tokens), edges, edges[1:], strict=False):
                ids = tokens.read(start, stop).tolist()
                assert (ids[0] == tok.bos_id, ids[-1] == tok.eot_id) == (bos, eos)
                found[name] = tok.decode(ids[bos : len(ids) - eos])
        assert found == {n: t for n, t in sources.documents(str(corpus)) if t}
    assert len({prepared.fingerprint for prepared in made.values()}) == 4


# ---- a prepared folder as a source


def test_a_prepared_folder_is_a_source(
    corpus: Path, tmp_path: Path, bpe: tokenizer.Tokenizer
) -> None:
    cfg = data(corpus, tmp_path, tokenizer="bpe", bpe_vocab_size=300)
    out = tmp_path / "out"
    out.mkdir()  # empty: to be filled
    made = prepare(cfg, out=str(out))
    assert made.folder == str(out) and is_prepared(str(out)) and not is_prepared(str(corpus))
    again = []
    assert prepare(cfg, again.append, out=str(out)).fingerprint == made.fingerprint and not again
    used = prepare(data(out, tmp_path, tokenizer="bpe"))
    assert used.fingerprint == made.fingerprint and used.folder == made.folder
    rank_files.write_rank_file(made.tokenizer, str(tmp_path / "same.tiktoken"))
    rank_files.write_rank_file(bpe, str(tmp_path / "other.tiktoken"))
    same, other = (
        data(out, tmp_path, tokenizer=str(tmp_path / name), tokenizer_pattern="llama3")
        for name in ("same.tiktoken", "other.tiktoken")
    )
    assert prepare(same).fingerprint == made.fingerprint
    with pytest.raises(
        InputError,
        match=f"data.tokenizer: .*other.tiktoken .*{bpe.fingerprint}.* is not the tokenizer",
    ):
        prepare(other)
    for options in ({"validation_fraction": 0.3}, {"add_eos": False}):
        with pytest.raises(
            InputError, match=f"--out: {out} has something else, or was made with other options"
        ):
            prepare(
                data(corpus, tmp_path, tokenizer="bpe", bpe_vocab_size=300, **options), out=str(out)
            )
    file = tmp_path / "file"
    file.write_text("mine")
    for taken in (corpus, file):
        with pytest.raises(InputError, match=f"--out: {taken} has something else"):
            prepare(cfg, again.append, out=str(taken))
    assert not again and file.read_text() == "mine"  # refused before the text is tokenised
    (out / "manifest.json").unlink()
    with pytest.raises(InputError, match="manifest.json is missing"):
        prepare(data(out, tmp_path, tokenizer="bpe"))


class Marker:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_damaged_shards_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage of every kind: flipped, truncated, missing, swapped, beyond the vocabulary, another
    tokenizer's, one too many, and a pickle in place of a shard, which is never executed."""
    monkeypatch.setattr("data.prepare.job.PART_BYTES", 10_000)
    write_rows(tmp_path / "a.jsonl")
    folder = Path(prepare(data(tmp_path / "a.jsonl", tmp_path), workers=1).folder)
    before = content(folder)
    shards = sorted(name for name in before if name.startswith("train-"))
    one, two = folder / shards[1], folder / shards[2]

    def swap() -> None:
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b), two.write_bytes(a)

    def beyond(ids: np.ndarray) -> None:
        ids[7] = 300  # of 257, and the manifest made to agree
        one.write_bytes(ids.tobytes())
        manifest = json.loads(before["manifest.json"])
        manifest["files"][one.name]["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def pickled(path: Path) -> None:
        """Return a file as long as the original, so that its size does not betray it."""
        data = pickle.dumps(Marker(tmp_path / "executed"))
        path.write_bytes(data + bytes(len(before[path.name]) - len(data)))

    flip = bytearray(before[one.name])
    flip[100] ^= 4
    damages = {
        "flipped": (lambda: one.write_bytes(bytes(flip)), f"{one.name} is not what was written"),
        "truncated": (lambda: one.write_bytes(before[one.name][:-2]), one.name),
        "missing": (one.unlink, one.name),
        "swapped": (swap, one.name),
        "beyond the vocabulary": (
            lambda: beyond(np.frombuffer(before[one.name], np.uint16).copy()),
            "has token 300",
        ),
        "pickled shard": (lambda: pickled(one), one.name),
        "pickled starts": (lambda: pickled(folder / "train.starts"), "train.starts"),
        "one too many": (
            lambda: (folder / "train-99999.bin").write_bytes(b"ab"),
            "a shard in it does not belong there",
        ),
        "tokenizer": (
            lambda: tokenizer.train_bpe([words(0, 999)], 300).save(str(folder / "tokenizer.json")),
            "tokenizer",
        ),
    }
    not_at_once = "flipped", "swapped", "beyond the vocabulary", "pickled shard", "pickled starts"
    for what, (damage, sentence) in damages.items():
        damage()
        with pytest.raises(InputError, match=sentence):
            verify(str(folder))
        with suppress(InputError):  # most are seen at once; the others must be harmless
            found = open_prepared(str(folder))
            found.train.read(0, len(found.train))
            DocumentIndex(found.train).between(0, 10**9)
            names(found.train)
            assert what in not_at_once, what
        assert not (tmp_path / "executed").exists()
        for path in folder.iterdir():
            path.unlink()
        for name, data_ in before.items():
            (folder / name).write_bytes(data_)
    verify(str(folder))


def test_ranges_that_cross_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.prepare.job.PART_BYTES", 5000)
    write_rows(tmp_path / "a.jsonl")
    train = prepare(data(tmp_path / "a.jsonl", tmp_path), workers=1).train
    flat = np.concatenate(
        [np.fromfile(f"{train.folder}/{name}", train.dtype) for name in train.shards]
    )
    assert len(train.shards) > 10 and len(flat) == len(train)
    for start, stop in np.sort(
        np.random.default_rng(0).integers(0, len(flat) + 1, (500, 2)), axis=1
    ):
        assert np.array_equal(train.read(start, stop), flat[start:stop])
    sent = pickle.dumps(train)
    assert len(sent) < 1000 and np.array_equal(whole(pickle.loads(sent)), flat)
    assert isinstance(train.document_starts.base, np.memmap) or isinstance(
        train.document_starts, np.memmap
    )


def test_a_line_that_is_longer_than_several_parts(tmp_path: Path) -> None:
    """Merging its tokens must not take time that grows with its square."""
    lines = ["first", words(0, 200_000).strip(), "last"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    options = {"tokenizer": "bpe", "bpe_vocab_size": 400, "validation_fraction": 0}
    cfg = data(tmp_path / "a.jsonl", tmp_path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.job.PART_BYTES", 100_000)
        prepared = prepare(cfg, out=str(tmp_path / "out"), workers=2)
    assert list(texts(prepared).values()) == lines


def test_two_processes_with_one_number_do_not_share_a_file(tmp_path: Path, monkeypatch) -> None:
    """Processes of two hosts may have the same number, where the lock reaches one of them alone."""
    (tmp_path / "parts").mkdir()
    monkeypatch.setattr("os.getpid", lambda: 7)
    one, two = (SplitWriter(str(tmp_path), "train", 0, {}) for _ in range(2))
    assert one.suffix != two.suffix
    one.close(), two.close()
