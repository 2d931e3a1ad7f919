"""The data package: text survives, a cache is whole or refused, and a batch is a function of (seed, step) alone."""

import base64
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Data, InputError
from data import sources, tokenizer
from data.loader import Batches, loader, permute
from data.prepare import SPLITS, Prepared, Tokens, open_prepared, prepare, verify

ROOT = Path(__file__).parents[1]
WORDS = ["".join(random.Random(i).choices("abcdefghijklm", k=2 + i % 7)) for i in range(300)]


def words(seed: int, n: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n)) + "\n"


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


def texts(prepared: Prepared) -> dict[str, str]:
    """name -> text of every document of both splits, cut at the end-of-text tokens, names and starts checked."""
    found = {}
    for tokens in (prepared.train, prepared.validation):
        ends = np.flatnonzero(tokens.tokens == prepared.tokenizer.eot_id)
        assert tokens.document_starts.dtype == np.int64 and len(tokens.names) == len(tokens.document_starts)
        assert tokens.document_starts.tolist() == [0, *(ends + 1).tolist()][: len(ends)]
        for name, start, end in zip(tokens.names, tokens.document_starts, ends, strict=True):
            found[name] = prepared.tokenizer.decode(tokens.tokens[start:end])
    return found


def content(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def run(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, **options
    )


# ---- tokenizers

ADVERSARIAL = {
    "empty": "",
    "nul": "a\0b\0\0",
    "planes": "".join(chr(c) for c in range(1, 0x110000, 97) if not 0xD800 <= c < 0xE000),
    "edges": "\ufeff\ufffd\uffff\U0010ffff\x7f\x80\u2028\u00a0",
    "spaces": " " * 1_000_000,
    "tabs between words": "a" + "\t" * 700_000 + "b" + " \t" * 350_000,
    "line breaks": "\r\n" * 500_000,
    "one line": "x" * 300_000 + "é" * 100_000,
    "special": "<|endoftext|><|begin_of_text|><|end_of_text|>",
}


@pytest.fixture(scope="module")
def llama3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128000 ranks, like Llama 3's file, but of made-up tokens: all bytes, all pairs, the first triples."""
    tokens = [bytes(t) for n in (1, 2, 3) for t in itertools.islice(itertools.product(range(256), repeat=n), 70_000)]
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens[:128_000])))
    return path


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe([words(0, 4000)], 400)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_round_trip_of_adversarial_text(name: str, bpe: tokenizer.Tokenizer, llama3_file: Path) -> None:
    for tok in (tokenizer.byte_tokenizer(), bpe, tokenizer.from_rank_file(str(llama3_file))):
        ids = tok.encode(ADVERSARIAL[name])
        assert ids.dtype == tok.dtype
        assert tok.decode(ids) == ADVERSARIAL[name]
        assert not np.any(ids >= len(tok.ranks)), "ordinary text made a special token"


def test_whitespace_is_cut_only_beyond_the_limit(bpe: tokenizer.Tokenizer) -> None:
    limit = tokenizer.LONGEST_WHITESPACE
    for text in (" " * limit, "a" + "\n \t" * (limit // 3) + "b" + words(1, 30_000)):
        assert list(tokenizer._pieces(text)) == [text]
    text = "a" + " " * (2 * limit + 1) + "b"
    assert [len(piece) for piece in tokenizer._pieces(text)] == [limit + 1, limit, 2]
    assert "".join(tokenizer._pieces(text)) == text
    tokenizer.train_bpe([" " * 1_000_000, words(0, 100)], 300)  # rustbpe panics on the whole run


def test_byte_tokenizer() -> None:
    tok = tokenizer.byte_tokenizer()
    assert (tok.n_vocab, tok.eot_id, tok.dtype) == (257, 256, np.uint16)
    assert tok.encode("hé").tolist() == [0x68, 0xC3, 0xA9]
    assert tok.decode([0x68, 256, 0xC3, 9999]) == "h<|endoftext|>\ufffd\ufffd"


def test_bpe_has_the_vocabulary_asked_for_and_compresses(bpe: tokenizer.Tokenizer) -> None:
    assert (bpe.n_vocab, bpe.eot_id, len(bpe.ranks)) == (400, 399, 399)
    text = words(7, 1000)
    assert len(bpe.encode(text)) < len(text) / 1.7  # 1.85 measured; made-up words
    assert bpe.decode([bpe.eot_id]) == "<|endoftext|>"
    with pytest.raises(InputError, match="data.bpe_vocab_size is 4096, but the corpus has text for"):
        tokenizer.train_bpe(["too little"], 4096)


def test_bpe_is_the_same_in_another_process_with_other_threads(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(words(0, 4000))
    code = "import sys; from data import tokenizer; text = open(sys.argv[1]).read()\n"
    code += "print(tokenizer.train_bpe([text], 400).fingerprint)"
    for threads in ("1", "5"):
        done = run(code, str(tmp_path / "text"), env={**os.environ, "RAYON_NUM_THREADS": threads})
        assert done.stdout.strip() == bpe.fingerprint


def test_fingerprint_follows_everything_that_defines_a_tokenizer(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    bpe.save(str(tmp_path / "saved.json"))
    saved = tokenizer.load_saved(str(tmp_path / "saved.json"))
    assert saved.fingerprint == bpe.fingerprint
    assert saved.encode(words(1, 50)).tolist() == bpe.encode(words(1, 50)).tolist()
    same = (bpe.ranks, bpe.split, ["<|endoftext|>"], "<|endoftext|>")
    others = [
        (bpe.ranks[:-1], *same[1:]),
        ([*bpe.ranks[:-2], bpe.ranks[-1], bpe.ranks[-2]], *same[1:]),
        ([*bpe.ranks[:-2], bpe.ranks[-2] + bpe.ranks[-1][:1], bpe.ranks[-1][1:]], *same[1:]),
        (bpe.ranks, bpe.split + "|x", *same[2:]),
        (bpe.ranks, bpe.split, ["<|endoftext|>", "<|pad|>"], "<|endoftext|>"),
    ]
    prints = {tokenizer.Tokenizer(*definition).fingerprint for definition in [same, *others]}
    assert len(prints) == 1 + len(others) and bpe.fingerprint in prints


def test_llama3_rank_file(llama3_file: Path) -> None:
    tok = tokenizer.from_rank_file(str(llama3_file))
    assert (tok.n_vocab, tok.eot_id, tok.dtype) == (128_256, 128_001, np.uint32)
    names = {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>", 128_006: "<|start_header_id|>"}
    names |= {128_007: "<|end_header_id|>", 128_009: "<|eot_id|>", 128_255: "<|reserved_special_token_250|>"}
    assert {i: tok.decode([i]) for i in names} == names
    assert tok.encode("12345").tolist() == [*tok.encode("123").tolist(), *tok.encode("45").tolist()]  # \p{N}{1,3}


def test_other_rank_files_get_one_special_token(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    lines = [b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(bpe.ranks)]
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"".join(reversed(lines)))  # any order of the lines
    assert tokenizer.from_rank_file(str(path)).fingerprint == bpe.fingerprint
    for damage, sentence in (
        (b"not a rank file at all\n", "is not a tiktoken rank file"),
        (b'{"model": {}}', "is not a tiktoken rank file"),
        (b"\x00\xff\xfe binary\n", "is not a tiktoken rank file"),
        (b"", "is damaged: 0 ranks"),
        (b"".join(lines[:100] + lines[101:]), "is damaged"),  # a byte is missing
        (b"".join([*lines[:-1], lines[-2]]), "is damaged"),  # a rank twice
    ):
        path.write_bytes(damage)
        with pytest.raises(InputError, match=sentence):
            tokenizer.from_rank_file(str(path))
    with pytest.raises(InputError, match="data.tokenizer: .*/absent cannot be read"):
        tokenizer.from_rank_file(str(tmp_path / "absent"))


# ---- sources


def test_a_folder_is_its_text_files_in_the_order_of_their_names(corpus: Path) -> None:
    found = list(sources.documents(str(corpus)))
    assert [name for name, _ in found] == sorted(f"part{i % 3}/{i:02}.txt" for i in range(40))
    assert all(text == (corpus / name).read_text() for name, text in found)


def test_file_glob_and_json_lines(corpus: Path) -> None:
    one = corpus / "part1" / "01.txt"
    assert list(sources.documents(str(one))) == [("01.txt", one.read_text())]
    found = sources.find(f"{corpus}/**/*1.txt")
    assert [file.name for file in found] == ["part0/21.txt", "part1/01.txt", "part1/31.txt", "part2/11.txt"]
    (corpus / "image.jsonl").write_text('{"text": "a\\r\\n\\u00e9", "id": 3}\n\n  \n{"text": ""}\n{"text": "b"}')
    assert list(sources.documents(f"{corpus}/*.jsonl")) == [
        ("image.jsonl:1", "a\r\né"), ("image.jsonl:4", ""), ("image.jsonl:5", "b"),
    ]  # fmt: skip
    (corpus / "exact.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert list(sources.documents(f"{corpus}/exact.txt")) == [("exact.txt", "\ufeffa\r\nb\rc\n")]


def bad_sources() -> dict[str, tuple[str, str]]:
    """what -> (path in the corpus folder, sentence)"""
    return {
        "missing": ("nowhere.txt", "nowhere.txt cannot be read: No such file"),
        "no match": ("*.none", "no file found there"),
        "folder without text": ("images", "no file with a text suffix"),
        "not UTF-8": ("latin1.txt", r"latin1.txt is not UTF-8 text \(byte 1\)"),
        "not UTF-8, in a folder": ("latin", r"latin/a.txt is not UTF-8 text \(byte 0\)"),
        "dangling link": ("links", "links/gone.txt cannot be read: No such file"),
        "pipe": ("pipe.txt", "pipe.txt is not a regular file"),
        "not JSON": ("bad.jsonl", "bad.jsonl, line 2 is not a JSON object"),
        "no text": ("field.jsonl", "field.jsonl, line 1 is not a JSON object with a string under"),
        "no string": ("number.jsonl", "number.jsonl, line 1 is not"),
        "half a character": ("surrogate.jsonl", "surrogate.jsonl, line 1 is not"),
        "empty": ("empty.txt", "has no text: 1 files, all empty"),
    }


@pytest.mark.parametrize("what", bad_sources())
def test_bad_sources_are_one_sentence(what: str, corpus: Path, tmp_path: Path) -> None:
    for folder in ("images", "latin", "links"):
        (corpus / folder).mkdir()
    (corpus / "images" / "a.png").write_bytes(b"\x89")
    (corpus / "latin1.txt").write_bytes(b"h\xe9llo")
    (corpus / "latin" / "a.txt").write_bytes(b"\xff")
    (corpus / "links" / "gone.txt").symlink_to(corpus / "nowhere")
    (corpus / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    (corpus / "field.jsonl").write_text('{"txt": "a"}\n')
    (corpus / "number.jsonl").write_text('{"text": 1}\n')
    (corpus / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    (corpus / "empty.txt").write_text("")
    os.mkfifo(corpus / "pipe.txt")
    path, sentence = bad_sources()[what]
    with pytest.raises(InputError, match=sentence) as caught:
        prepare(data(corpus / path, tmp_path))
    assert "\n" not in str(caught.value)
    assert not [p for p in tmp_path.glob("cache/*") if p.suffix != ".lock"], "something was left in the cache"


# ---- the tokenised corpus


def test_every_document_of_the_standard_library_survives(tmp_path: Path) -> None:
    """The default corpus and tokenizer, once, for real."""
    cfg = Data(cache=str(tmp_path))
    prepared = prepare(cfg)
    original = {name: text for name, text in sources.documents("stdlib") if text}
    assert texts(prepared) == original
    assert len(original) > 400 and "os.py" in original and not any("/test/" in name for name in original)
    assert prepared.tokenizer.n_vocab == cfg.bpe_vocab_size == 4096
    size = sum(len(text.encode()) for text in original.values())
    assert size / (len(prepared.train.tokens) + len(prepared.validation.tokens)) > 3.2  # bytes per token; 3.47 measured
    assert verify(prepared.folder).fingerprint == prepared.fingerprint
    began = time.perf_counter()
    prepare(cfg)
    assert time.perf_counter() - began < 0.5, "9 ms measured"


def test_second_call_opens_what_the_first_made(corpus: Path, tmp_path: Path) -> None:
    log = []
    first = prepare(data(corpus, tmp_path), log.append)
    assert log and texts(first) == {n: t for n, t in sources.documents(str(corpus)) if t}
    before = {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}
    log.clear()
    second = prepare(data(corpus, tmp_path), log.append)
    assert not log and second.folder == first.folder and second.fingerprint == first.fingerprint
    assert before == {path: path.stat().st_mtime_ns for path in Path(first.folder).iterdir()}


def test_whatever_decides_the_tokens_makes_a_new_folder(
    corpus: Path, tmp_path: Path, bpe: tokenizer.Tokenizer
) -> None:
    rank_file = tmp_path / "mine.tiktoken"
    rank_file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(bpe.ranks)))
    base = prepare(data(corpus, tmp_path))
    made = [base]
    for options in (
        {"tokenizer": "bpe", "bpe_vocab_size": 300},
        {"tokenizer": "bpe", "bpe_vocab_size": 301},
        {"tokenizer": str(rank_file)},
        {"validation_fraction": 0.3},
    ):
        made.append(prepare(data(corpus, tmp_path, **options)))
    rank_file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(bpe.ranks[:-1])))
    made.append(prepare(data(corpus, tmp_path, tokenizer=str(rank_file))))
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
    assert content(second.folder)["train.bin"] == content(first.folder)["train.bin"]


def test_held_out_documents_are_stable_and_copies_stay_together(corpus: Path, tmp_path: Path) -> None:
    def held_out(**options: object) -> set[str]:
        prepared = prepare(data(corpus, tmp_path, **options))
        assert not set(prepared.train.names) & set(prepared.validation.names)
        return set(prepared.validation.names)

    small, large = held_out(validation_fraction=0.1), held_out(validation_fraction=0.4)
    assert small < large and len(large) < 25
    assert held_out(validation_fraction=0.1, tokenizer="bpe", bpe_vocab_size=300) == small
    for i in range(40):
        (corpus / f"copy{i:02}.txt").write_text((corpus / f"part{i % 3}" / f"{i:02}.txt").read_text())
    (corpus / "another.txt").write_text("another")
    doubled = held_out(validation_fraction=0.4)
    assert doubled - {"another.txt"} == large | {f"copy{Path(name).name}" for name in large}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_both_splits_of_a_tiny_corpus_have_text(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for i in range(count):
        (folder / f"{i}.txt").write_text("".join(words(j, 5) for j in range(100 * i, 100 * i + 100)))
    whole = "".join(text for _, text in sources.documents(str(folder)))
    for fraction in (0.001, 0.1, 0.49):
        prepared = prepare(data(folder, tmp_path, validation_fraction=fraction))
        found = texts(prepared)
        assert prepared.train.names and prepared.validation.names
        assert "".join(found[name] for name in sorted(found)) == whole
        if count == 1:  # cut at a line's end, at about the fraction asked for
            assert prepared.validation.names == ["0.txt (tail)"] and found["0.txt"].endswith("\n")
            assert 0 < len(found["0.txt (tail)"]) < fraction * len(whole) + 100
    everything = prepare(data(folder, tmp_path, validation_fraction=0))
    assert not len(everything.validation.tokens) and not everything.validation.names
    assert everything.validation.document_starts.shape == (0,)
    with pytest.raises(InputError, match="the validation split of the corpus has 0"):
        Batches(everything.validation, 8, 1, 1, 0, 1, 0)


def test_neither_split_is_empty_however_the_hashes_fall(tmp_path: Path) -> None:
    """Two documents at 0.49: by their hashes alone, every other corpus would have both or none held out."""
    folder = tmp_path / "two"
    folder.mkdir()
    for i in range(12):
        (folder / "a.txt").write_text(words(2 * i, 5))
        (folder / "b.txt").write_text(words(2 * i + 1, 5))
        prepared = prepare(data(folder, tmp_path, validation_fraction=0.49))
        assert len(prepared.train.names) == len(prepared.validation.names) == 1


def test_documents_of_a_range_of_tokens(corpus: Path, tmp_path: Path) -> None:
    train = prepare(data(corpus, tmp_path)).train
    owner = np.zeros(len(train.tokens), np.int64)
    for index, start in enumerate(train.document_starts):
        owner[start:] = index
    for start, stop in [(0, 1), (0, 0), (0, 10**9), (len(owner) - 1, len(owner)), (len(owner), len(owner) + 5)]:
        assert train.documents(start, stop).tolist() == np.unique(owner[start:stop]).tolist()
    for start, stop in np.sort(np.random.default_rng(0).integers(0, len(owner), (200, 2)), axis=1):
        assert train.documents(start, stop).tolist() == np.unique(owner[start:stop]).tolist()
    edge = int(train.document_starts[3])
    assert train.documents(edge - 1, edge).tolist() == [2] and train.documents(edge, edge + 1).tolist() == [3]


def test_damage_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    cfg = data(corpus, tmp_path)
    folder = Path(prepare(cfg).folder)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InputError, match=f"{path.name}.*(damaged|missing).*remove {folder}"):
            prepare(cfg)
        path.unlink()
        with pytest.raises(InputError, match=f"{path.name}.*(damaged|missing).*remove {folder}"):
            prepare(cfg)
        path.write_bytes(whole)
    path = folder / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])  # one bit: sizes agree, the hash does not
    open_prepared(str(folder))
    with pytest.raises(InputError, match="train.bin is not what was written"):
        verify(str(folder))
    path.write_bytes(whole)
    verify(str(folder))
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(InputError, match="is of format 0, this code reads 1"):
        prepare(cfg)


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(corpus: Path, tmp_path: Path) -> None:
    cfg = data(corpus, tmp_path, tokenizer="bpe", bpe_vocab_size=300)
    prepared = prepare(cfg)
    ranks = list(prepared.tokenizer.ranks)
    ranks[-1], ranks[-2] = ranks[-2], ranks[-1]
    other = tokenizer.Tokenizer(ranks, tokenizer.SPLIT, ["<|endoftext|>"], "<|endoftext|>")
    other.save(os.path.join(prepared.folder, "tokenizer.json"))
    with pytest.raises(InputError) as caught:
        prepare(cfg)
    assert other.fingerprint in str(caught.value) and prepared.tokenizer.fingerprint in str(caught.value)


def test_a_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache, reason in ((tmp_path / "file" / "cache", "Not a directory"), ("/proc/cache", "No such file|Permission")):
        with pytest.raises(InputError, match=f"data.cache: {cache} cannot be written: ({reason})"):
            prepare(data(corpus, tmp_path).model_copy(update={"cache": str(cache)}))


def test_a_full_disk_is_a_sentence_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk: the same error path, from the same write."""
    (corpus / "large.txt").write_text(words(0, 50_000))
    command = [sys.executable, "-m", "data.prepare", "--source", str(corpus), "--tokenizer", "bytes"]
    done = subprocess.run(
        [*command, "--cache", str(tmp_path / "cache")], cwd=ROOT, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert done.returncode == 2 and "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_source_that_changes_while_it_is_read_is_refused(corpus: Path, tmp_path: Path) -> None:
    def log(line: str) -> None:
        (corpus / "part0" / "00.txt").write_text("another text")

    with pytest.raises(InputError, match="changed while it was read"):
        prepare(data(corpus, tmp_path), log)
    assert prepare(data(corpus, tmp_path)).train.names


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from configs.schema import Data, InputError
from data.prepare import prepare, verify
source, cache = sys.argv[1:]
cfg = Data(source=source, cache=cache, tokenizer="bytes", validation_fraction=0.2)

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
        prepare(cfg, lambda line: None)
        os._exit(0)
    return os.waitpid(child, 0)[1]

kills = whole = 0
os.makedirs(cache)
while attempt(kills + 1):
    kills += 1
    folders = [entry.path for entry in os.scandir(cache) if entry.is_dir() and ".tmp-" not in entry.name]
    for folder in folders:  # killed after the rename: it must be whole
        verify(folder)
        whole += 1
        os.rename(folder, f"{cache}-done{kills}")
(folder,) = [entry.path for entry in os.scandir(cache) if entry.is_dir()]
print(kills, whole, verify(folder).fingerprint)
"""


def test_killed_at_any_file_operation_a_cache_is_whole_or_absent(corpus: Path, tmp_path: Path) -> None:
    """A child per kill: before its first file operation in the cache, its second ... Each finds what the last left."""
    done = run(KILLED_AT_EVERY_STEP, str(corpus), str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    kills, whole, fingerprint = done.stdout.split()
    assert int(kills) > 20 and int(whole) >= 1
    assert fingerprint == prepare(data(corpus, tmp_path / "other")).fingerprint


def test_killed_at_random_times_and_all_at_once(corpus: Path, tmp_path: Path) -> None:
    """Three processes at once, killed at a random moment, four times over; then three that are left alone: all succeed,
    one of them made the corpus, and it is what an undisturbed process makes."""
    (corpus / "large.txt").write_text(words(0, 200_000))
    options = ["--source", str(corpus), "--tokenizer", "bpe", "--bpe-vocab-size", "300", "--validation-fraction", "0.2"]
    command = [sys.executable, "-m", "data.prepare", *options, "--cache", str(tmp_path / "cache")]
    dice = random.Random(0)
    finished = 0
    for delay in [dice.uniform(0.3, 0.8) for _ in range(4)] + [None]:
        processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        if delay is not None:
            time.sleep(delay)
            for process in processes:
                process.send_signal(signal.SIGKILL)
        output = [process.communicate(timeout=60)[0] for process in processes]
        for folder in (tmp_path / "cache").glob("*"):
            if folder.is_dir() and ".tmp-" not in folder.name:
                verify(str(folder))
                finished += delay is not None
                if delay is not None:
                    shutil.rmtree(folder)
    assert finished < 4, "no kill came in the middle"
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("trained a BPE" in text for text in output) == 1
    cfg = data(corpus, tmp_path / "other", tokenizer="bpe", bpe_vocab_size=300)
    assert all(prepare(cfg).fingerprint in text for text in output)


def test_command_line(corpus: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", "--source", str(corpus), "--tokenizer", "bytes", "--verify"]
    done = subprocess.run([*command, "--cache", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    prepared = prepare(data(corpus, tmp_path, validation_fraction=0.01).model_copy(update={"cache": str(tmp_path)}))
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("train"))
    assert row[1:3] == [f"{len(prepared.train.names):,}", f"{len(prepared.train.tokens):,}"]
    assert f"corpus       {prepared.fingerprint}, every hash verified" in done.stdout


# ---- batches


def tokens_of(folder: Path, n: int) -> Tokens:
    """n tokens, each its own position, so that a batch tells where it is from."""
    folder.mkdir(exist_ok=True)
    np.arange(n, dtype=np.uint32).tofile(folder / "train.bin")
    return Tokens(str(folder), "train", np.dtype(np.uint32))


def test_permutation_is_a_bijection() -> None:
    for size in range(1, 1001):
        index = np.arange(size)
        assert np.array_equal(np.sort(permute(index, np.full(size, size % 3), size, seed=size)), index), size
    index = np.arange(1_000_000)
    assert np.array_equal(np.sort(permute(index, np.zeros(1_000_000, np.int64), 1_000_000, 1)), index)


PINNED = [
    [7, 0, 2, 6, 9, 8, 1, 3, 5, 4],
    [4, 5, 2, 9, 7, 1, 6, 0, 3, 8],
    [210973089991, 1004628295449, 589215988311, 619073520393, 452120419976],
]


def test_permutation_is_pinned_forever() -> None:
    """Another order here is another order in every run that resumes."""
    index, epoch = np.arange(10), np.zeros(10, np.int64)
    assert permute(index, epoch, 10, 0).tolist() == PINNED[0]
    assert permute(index, epoch + 7, 10, 2**63 - 1).tolist() == PINNED[1]
    assert permute(index[:5] * 10**11, epoch[:5] + 1, 2**40, 3).tolist() == PINNED[2]


def test_permutation_looks_like_a_shuffle() -> None:
    size = 100_003
    index, epoch = np.arange(size), np.zeros(size, np.int64)
    orders = [permute(index, epoch + e, size, s) for e, s in ((0, 0), (1, 0), (0, 1), (1, 1))]
    for order in orders:
        distinct = len(np.unique(np.diff(order) % size)) / size
        assert abs(distinct - (1 - np.exp(-1))) < 0.01  # 0.632 of the differences, as for a random order
        assert abs(np.corrcoef(index, order)[0, 1]) < 0.02
    for one, other in itertools.combinations(orders, 2):  # epochs and seeds: one equal place expected, by chance
        assert np.count_nonzero(one == other) < 10
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_batches_are_the_same_for_any_ranks_and_micro_batches(tmp_path: Path) -> None:
    """Order included, across epochs: 37 windows, 48 per step, so every step wraps; T prime."""
    tokens, T, G = tokens_of(tmp_path, 37 * 13 + 5), 13, 48
    reference = [Batches(tokens, T, G, G, 0, 1, seed=5)[step] for step in range(6)]
    for batch in reference:
        starts = batch["sample"] * T
        assert torch.equal(batch["tokens"][0], starts[:, None] + torch.arange(T))
        assert torch.equal(batch["labels"], batch["tokens"] + 1)
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())
    for dp in (1, 2, 3, 4, 6, 8, 12, 48):
        for local in {1, 2, G // dp} if G // dp % 2 == 0 else {1, G // dp}:
            ranks = [Batches(tokens, T, G, local, rank, dp, seed=5) for rank in range(dp)]
            for step in (5, 0, 3):
                parts = [rank[step] for rank in ranks]
                assert all(part["tokens"].shape == (G // dp // local, local, T) for part in parts)
                for name, whole in reference[step].items():
                    joined = torch.cat([part[name].flatten() for part in parts])
                    assert torch.equal(joined, whole.flatten()), (dp, local)


def test_every_window_is_seen_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    windows, G, steps = 101, 7, 100
    batches = Batches(tokens_of(tmp_path, windows * 4 + 1), 4, G, G, 0, 1, seed=9)
    assert batches.samples == windows
    seen = torch.cat([batches[step]["sample"] for step in range(steps)])
    counts = torch.bincount(seen, minlength=windows)
    assert set(counts.tolist()) <= {G * steps // windows, G * steps // windows + 1}
    epochs = seen[: windows * 6].view(6, windows)
    assert torch.equal(epochs.sort().values, torch.arange(windows).expand(6, -1))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 6
    other = Batches(batches.tokens, 4, G, G, 0, 1, seed=10)
    assert not torch.equal(other[0]["sample"], batches[0]["sample"])


def test_loaders_agree_for_any_workers_and_resume_anywhere(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, 1000)
    for dp, rank in ((1, 0), (3, 1)):
        batches = Batches(tokens, 11, 12, 2, rank, dp, seed=1)
        whole = [batches[step] for step in range(9)]
        for workers, start in ((0, 0), (0, 4), (2, 0), (2, 5)):
            before = torch.get_rng_state()
            found = list(loader(batches, start, 9, Data(workers=workers)))
            assert torch.equal(before, torch.get_rng_state()), "reading data drew from the global generator"
            assert len(found) == 9 - start
            for one, other in zip(found, whole[start:], strict=True):
                assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def test_a_late_step_needs_no_replay(tmp_path: Path) -> None:
    batches = Batches(tokens_of(tmp_path, 100_000), 16, 512, 8, 3, 8, seed=0)
    began = time.perf_counter()
    batch = next(loader(batches, 10**12, 10**12 + 1, Data()))
    assert time.perf_counter() - began < 0.5, "under a millisecond measured"
    assert torch.equal(batch["labels"], batch["tokens"] + 1)


def test_a_spawned_worker_gets_the_file_not_the_corpus(tmp_path: Path) -> None:
    batches = Batches(tokens_of(tmp_path, 1_000_000), 100, 4, 2, 1, 2, seed=0)
    sent = pickle.dumps(batches)
    assert len(sent) < 2000
    assert all(torch.equal(a, b) for a, b in zip(pickle.loads(sent)[7].values(), batches[7].values(), strict=True))


def test_what_batches_cannot_do_is_a_sentence(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, 100)
    Batches(tokens, 99, 4, 2, 0, 2, seed=0)[0]
    with pytest.raises(InputError, match="training.seq_len = 100 needs 101 .* the train split of the corpus has 100"):
        Batches(tokens, 100, 4, 2, 0, 2, seed=0)
    with pytest.raises(InputError, match="training.global_batch_size = 6 .* multiple of 2 data-parallel ranks x 2"):
        Batches(tokens, 10, 6, 2, 0, 2, seed=0)


class _Failing(torch.utils.data.Dataset):
    """In place of Batches: step 2 dies, or never comes."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "dies" else time.sleep(60)
        return {"sample": torch.tensor([step])}


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_worker_that_dies_or_hangs_ends_the_run(how: str) -> None:
    message = {"dies": "exited unexpectedly|killed by signal", "hangs": "timed out after 1 s"}[how]
    began = time.perf_counter()
    stream = loader(_Failing(how), 0, 10, Data(workers=2, timeout_seconds=1))
    with pytest.raises(RuntimeError, match=message):
        list(stream)
    assert time.perf_counter() - began < 15


def test_splits_are_named_as_their_files(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(data(corpus, tmp_path))
    manifest = json.loads(content(prepared.folder)["manifest.json"])
    assert set(manifest["files"]) | {"manifest.json"} == set(content(prepared.folder))
    for split in SPLITS:
        tokens = getattr(prepared, split)
        row = manifest["splits"][split]
        assert (row["documents"], row["tokens"]) == (len(tokens.names), len(tokens.tokens))
        assert row["bytes"] == len(tokens.tokens) - len(tokens.names)  # a token per byte, one per end
