"""Text in an object store is read as from a disk: the same batches, bitwise, on every mesh and
after a resume, even if the store fails meanwhile.

The store is tests/s3.py, a real server in another process.
"""

import gzip
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

pytest.importorskip("obstore")

from configs.load import load_config
from configs.schema import Config, Data, InputError
from data import audit, inputs, prepared, sources, stream, train_tokenizer
from data.loader import loader
from data.open import open_corpora
from data.prepare import __main__ as prepare_command
from data.prepare import job, prepare
from data.stores import ahead, blocks, places, text
from data.stores import corpus as corpus_in_store
from data.workers import LoaderError
from reliability import objects
from tests import ranks
from tests.ranks import run_ranks
from tests.runs import data_rank, run, samples, series, tiny_run
from tests.runs import same_batches as same
from tests.s3 import Server
from tests.stores import (
    emptied,
    running_store,  # noqa: F401  a fixture
)

URL = "s3://bucket/corpora/a"
AT = "corpora/a/"
T, G = 13, 12


HURRY = (  # no test waits as long as a run does
    (objects, "RETRIES", 5),
    (objects, "BACKOFF", 0.02),
    (objects, "PAUSE", 0.05),
    (objects, "SOON_SECONDS", 2.0 * ranks.WORKERS),
    (blocks, "BLOCK", 1 << 9),  # so that a small corpus has many
    (text, "FIRST", 1 << 9),
    (text, "LARGEST", 1 << 11),
    (text, "BUFFER", 1 << 8),
)


@pytest.fixture
def store(running_store, monkeypatch) -> Server:
    return emptied(running_store, monkeypatch, HURRY)


def there(fn: Callable, *args: Any) -> Any:
    """On a rank."""
    for module, name, value in HURRY:
        setattr(module, name, value)
    return fn(*args)


def quiet(line: str) -> None:
    pass


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        words = " ".join(str(n * (i + 7) % 97) for n in range(20 + 3 * i))
        (folder / f"{i:02}.txt").write_text(f"document {i}: {words}\n")
    return folder


@pytest.fixture
def folder(corpus, tmp_path) -> str:
    """Return the corpus, prepared on the disk."""
    cfg = Data(source=str(corpus), cache=str(tmp_path / "disk"), tokenizer="bytes")
    return prepare(cfg, quiet).folder


@pytest.fixture
def uploaded(folder, store, tmp_path) -> str:
    """Return the corpus, prepared in the store too."""
    prepare(Data(source=folder, cache=str(tmp_path / "disk")), quiet, out=URL)
    store.ask("clear", b"")
    return folder


def config(source: str, cache: Path, *more: str) -> Config:
    return load_config(
        [
            f"--data.source={source}",
            f"--data.cache={cache}",
            f"--training.seq_len={T}",
            f"--training.global_batch_size={G}",
            "--training.steps=200",
            "--data.timeout_seconds=100",
            *more,
        ]
    )


def read(cfg: Config, first: int, steps: int, where: object = None) -> list[dict]:
    """Batches of a rank, as a run reads them."""
    corpora = open_corpora(cfg, quiet)
    order = corpora.order({})
    rows = corpora.training_batches(order, where or data_rank(), 1 << 16)
    return list(loader(rows, first, first + steps, cfg.data))


# A prepared corpus


PLACES = {
    "dp 3": [data_rank(r, 3) for r in range(3)],
    "cp 2": [data_rank(own=[range(3), range(10, T)]), data_rank(own=[range(3, 10)])],
}


@pytest.mark.parametrize("where, masked", [("dp 3", "false"), ("cp 2", "true")])
def test_batches_are_bitwise_those_of_a_disk(where, masked, uploaded, tmp_path):
    """From the first step and from a later one, in which the second epoch begins."""
    more = ["--training.local_batch_size=2", f"--data.mask_documents={masked}"]
    here = config(uploaded, tmp_path / "disk", *more)
    stored = config(URL, tmp_path / "cache", *more)
    for ranks_own in PLACES[where]:
        for first in (0, 90):
            wanted = read(here, first, 7, ranks_own)
            assert same(read(stored, first, 7, ranks_own), wanted)
            assert wanted[0]["tokens"].shape[2] == sum(map(len, ranks_own.token_ranges(T)))


@pytest.mark.slow
def test_batches_of_several_shards_are_too(corpus, store, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "PART_BYTES", 4000)
    disk = Data(source=str(corpus), cache=str(tmp_path / "disk"), tokenizer="bytes")
    made = prepare(disk, quiet)
    assert len(made.train.shards) > 3
    prepare(Data(source=made.folder, cache=str(tmp_path / "disk")), quiet, out=URL)
    wanted = read(config(made.folder, tmp_path / "disk"), 0, 7)
    assert same(read(config(URL, tmp_path / "cache"), 0, 7), wanted)


def test_a_mixture_may_have_some_of_its_sources_in_a_store(uploaded, corpus, tmp_path):
    other = prepare(Data(source=f"{corpus}/0*.txt", tokenizer="bytes", cache=str(tmp_path)), quiet)

    def mixture(first: str) -> Config:
        rows = [("a", first, 0.7), ("b", other.folder, 0.3)]
        text = ", ".join(f'{{name="{n}", source="{at}", weight={w}}}' for n, at, w in rows)
        return config("stdlib", tmp_path / "cache", f"--data.mixture=[{text}]")

    assert same(read(mixture(URL), 3, 5), read(mixture(uploaded), 3, 5))


def test_conversations_are_too(store, tmp_path):
    file = tmp_path / "talks.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?", "completion": f"{2 * i}"} for i in range(90)]
    file.write_text("\n".join(map(json.dumps, rows)))
    cfg = Data(source=str(file), format="completion", tokenizer="bytes", cache=str(tmp_path))
    disk = prepare(cfg, quiet, out=str(tmp_path / "made"))
    prepare(Data(source=disk.folder), quiet, out=URL)
    more = ["--data.mask_documents=true", "--training.seq_len=64"]
    wanted = read(config(disk.folder, tmp_path, *more), 0, 5)
    assert same(read(config(URL, tmp_path / "cache", *more), 0, 5), wanted)
    assert (wanted[0]["labels"] == -100).any()


def test_what_is_fetched_is_what_is_read_and_once(uploaded, store, tmp_path):
    """Ranges, not objects; and an epoch later nothing, while the cache is large enough."""
    cfg = config(URL, tmp_path / "cache", "--validation.interval=0")
    read(cfg, 3, 1)
    log = [key for _, key, wanted in store.status()["log"] if wanted and key.endswith(".bin")]
    # including requests ahead: BLOCKS_AHEAD are more than the corpus has
    shards = {name: len(store.object(AT + name)) for name in os.listdir(uploaded) if "bin" in name}
    assert 0 < len(log) <= sum(-(-size // blocks.BLOCK) for size in shards.values())
    read(cfg, 0, 100)
    store.ask("clear", b"")
    read(cfg, 0, 200)
    assert not [key for _, key, _ in store.status()["log"] if key.endswith(".bin")]


def test_the_cache_is_bounded_and_its_damage_is_noticed(uploaded, store, tmp_path):
    cache = tmp_path / "cache"
    slots = 7
    limit = slots * blocks.BLOCK / 1e9
    more = f"--data.cache_gb={limit}"
    wanted = read(config(uploaded, tmp_path / "disk"), 0, 40)
    assert same(read(config(URL, cache, more), 0, 40), wanted)
    (local,) = cache.glob("*/blocks")
    assert local.stat().st_size <= slots * blocks.BLOCK
    assert same(read(config(URL, cache), 0, 40), wanted)
    assert local.stat().st_size > slots * blocks.BLOCK
    content = bytearray(local.read_bytes())
    for at in range(100, len(content), blocks.BLOCK):
        content[at] ^= 4
    local.write_bytes(content)
    assert same(read(config(URL, cache), 0, 40), wanted)
    assert local.read_bytes() != content  # it was written again
    assert same(read(config(URL, cache, more), 0, 40), wanted)
    assert local.stat().st_size <= slots * blocks.BLOCK


def test_a_cache_on_a_full_disk_ends_nothing(uploaded, store, tmp_path, monkeypatch, caplog):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    wanted = read(config(uploaded, tmp_path / "disk"), 0, 9)
    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        assert same(read(config(URL, tmp_path / "cache"), 0, 9), wanted)
    assert caplog.text.count("No space left on device") >= 1


def test_later_steps_are_asked_for_while_the_first_is_used(uploaded, store, tmp_path):
    cfg = config(URL, tmp_path / "cache", "--validation.interval=0")
    corpora = open_corpora(cfg, quiet)
    rows = corpora.training_batches(corpora.order({}), data_rank(), 300)
    stream_of = loader(rows, 0, 200, cfg.data)
    next(stream_of)
    wanted = -(-len(store.object(AT + "train-00000.bin")) // blocks.BLOCK)

    def fetched() -> set[str]:
        return {row[2] for row in store.status()["log"] if row[1].endswith("train-00000.bin")}

    ranks.wait_until(lambda: len(fetched()) == wanted, 20)
    stream_of.close()


@pytest.mark.slow
def test_workers_open_the_store_themselves(uploaded, tmp_path, monkeypatch):
    """After this process has used it, whose threads they would not have."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 16)  # workers are fresh, and so are their constants
    prepare(Data(source=uploaded), quiet, out=URL + "-large")
    wanted = read(config(uploaded, tmp_path / "disk"), 0, 6)
    cfg = config(URL + "-large", tmp_path / "cache", "--data.workers=2")
    assert same(read(cfg, 0, 6), wanted)


def forked(url: str) -> str:
    """Return the output of a process that was forked from one that uses stores."""
    places.key_of(url).exists()
    pipe = os.pipe()
    if not os.fork():
        try:
            said = str(places.key_of(url).exists())
        except InputError as error:
            said = str(error)
        os.write(pipe[1], said.encode())
        os._exit(0)
    os.wait()
    return os.read(pipe[0], 1000).decode()


def test_a_forked_process_is_refused_and_does_not_hang(store):
    assert "was forked from one that uses stores" in run_ranks(1, forked, URL)[0]


def test_a_whole_run_is_bitwise_that_of_a_disk(store, tmp_path, monkeypatch, capsys):
    """With validation, stopped and resumed on the way. The audit reads the store, too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = [*tiny_run(tmp_path), "--lr_schedule.kind=constant", "--validation.interval=8"]
    source = next(option for option in options if "data.source" in option).partition("=")[2]
    cfg = Data(source=source, tokenizer="bytes", validation_fraction=0.1, cache=str(tmp_path))
    disk = prepare(cfg, quiet, out=str(tmp_path / "made")).folder
    prepare(Data(source=disk), quiet, out=URL)
    for name, where in (("disk", disk), ("store", URL)):
        folder = tmp_path / name
        folder.mkdir()
        own = [*options, f"--data.source={where}", f"--data.cache={tmp_path / name}"]
        for steps in (8, 16):
            part = [*own, f"--training.steps={steps}"]
            assert run_ranks(1, there, run, part, folder) == [(0, "")]
    assert series(tmp_path / "store") == series(tmp_path / "disk")
    assert len(series(tmp_path / "store")) == 16
    key = "validation_loss"
    assert series(tmp_path / "store", key) == series(tmp_path / "disk", key) != {}
    assert samples(tmp_path / "store", 1) == samples(tmp_path / "disk", 1)
    no_secrets(tmp_path / "store")
    assert audit.main([str(tmp_path / "store"), "--steps=1"]) == 0
    assert ".txt" in capsys.readouterr().out
    assert json.loads((tmp_path / "store" / "data.json").read_text())["folders"].popitem()[1] == URL


def no_secrets(folder: Path) -> None:
    """No file of a run has a credential in it."""
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 5
    for content in written:
        assert not any(os.environ[name].encode() in content for name in names)


# Faults


FAULTS = {
    "truncated": {"rate": 0.2},
    "flipped": {"rate": 0.2},
    "stall": {"rate": 0.1, "seconds": 2.2 * ranks.WORKERS, "count": 3},
}


# test_of_many_faults_none_reaches_a_batch has the others
@pytest.mark.parametrize("kind", ["flipped", pytest.param("stall", marks=pytest.mark.slow)])
def test_no_fault_reaches_a_batch(kind, uploaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr(objects.Key, "tries", 6)  # of 16 blocks in flight, one in 5 is damaged
    wanted = read(config(uploaded, tmp_path / "disk"), 0, 40)
    store.rules({"kind": kind, **FAULTS[kind]})
    assert same(read(config(URL, tmp_path / "cache"), 0, 40), wanted)
    assert store.status()["counts"].get(kind, 0) > 0


@pytest.mark.slow
def test_control_without_the_hashes_a_flipped_byte_reaches_the_batch(
    uploaded, store, tmp_path, monkeypatch
):
    wanted = read(config(uploaded, tmp_path / "disk"), 0, 40)
    store.rules(
        {"kind": "flipped", "key": "bin"}
    )  # at a lower rate a batch may miss what is damaged
    with monkeypatch.context() as patch:
        patch.setattr(blocks.Blocks, "is_whole", lambda self, number, content: bool(content))
        patch.setattr(blocks.Blocks, "_kept", lambda self, number, size: b"")
        assert not same(read(config(URL, tmp_path / "careless"), 0, 40), wanted)
    assert store.status()["counts"]["flipped"] > 0


def test_a_failed_read_ahead_is_retried_when_it_is_needed(uploaded, store, tmp_path):
    tokens = open_corpora(config(URL, tmp_path / "cache"), quiet).sources[""].train
    of_corpus = tokens.corpus.blocks
    store.rules({"kind": "gone"})
    assert tokens.ask(0, 500) == 2
    asked = list(of_corpus.recent.values())
    assert [isinstance(future.exception(), objects.Unreachable) for future in asked] == [True] * 2
    with pytest.raises(objects.Unreachable):
        tokens.read(0, 500)
    store.rules()
    wanted = prepared.open_prepared(uploaded).train.read(0, 500)
    assert tokens.read(0, 500).tolist() == wanted.tolist()


def test_a_store_that_does_not_answer_ends_the_run(uploaded, tmp_path, monkeypatch):
    cfg = config(URL, tmp_path / "cache", "--data.timeout_seconds=1")
    monkeypatch.setattr(blocks.Blocks, "_load", lambda *_: time.sleep(5))
    with pytest.raises(LoaderError, match=r"did not come within 1 s \(data.timeout_seconds\)"):
        read(cfg, 0, 1)


MANY = [
    {"kind": "500", "rate": 0.1},
    {"kind": "slow", "rate": 0.1},
    {"kind": "reset", "rate": 0.03},
    {"kind": "truncated", "rate": 0.05},
    {"kind": "flipped", "rate": 0.05},
    {"kind": "stale", "rate": 0.1},
]


@pytest.mark.slow
def test_of_many_faults_none_reaches_a_batch(uploaded, store, tmp_path, monkeypatch):
    """Epochs without a local copy, until 100 requests have failed."""
    for module, name, value in ((objects, "RETRIES", 12), (objects.Key, "tries", 8)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(blocks.Blocks, "_keep", lambda *_: None)
    objects._open.cache_clear()
    wanted = read(config(uploaded, tmp_path / "disk"), 0, 90)
    store.rules(*MANY)
    epochs = 0
    while sum((counts := store.status()["counts"]).values()) < 100 or len(counts) < len(MANY):
        assert same(read(config(URL, tmp_path / f"{epochs}"), 0, 90), wanted)
        epochs += 1


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_object_is_named(how, uploaded, store, tmp_path):
    read(config(URL, tmp_path / "cache"), 0, 1)  # what was cached does not hide it
    shutil.rmtree(tmp_path / "cache")
    cfg = config(URL, tmp_path / "cache")
    corpora = open_corpora(cfg, quiet)
    key = AT + "train-00000.bin"
    if how == "flipped":
        store.flip(key, 700)
    elif how == "cut":
        store.put(key, store.object(key)[:-600])
    else:
        store.remove(key)
    rows = corpora.training_batches(corpora.order({}), data_rank(), 300)
    with pytest.raises(LoaderError, match=r"^step \d+ cannot be read: .*train-00000.bin") as said:
        list(loader(rows, 0, 200, cfg.data))
    assert ("upload" in str(said.value)) == (how != "cut")
    if how != "flipped":  # its size is seen at once
        size = len(store.object(key)) if how == "cut" else 0
        with pytest.raises(InputError, match=rf"train-00000.bin has {size} bytes instead of \d+"):
            open_corpora(cfg, quiet)
    else:
        with pytest.raises(InputError, match="train-00000.bin: bytes 512 to 1024 came"):
            prepared.verify(URL, cfg.data)


def test_a_damaged_table_or_manifest_is_named(uploaded, store, tmp_path):
    store.flip(AT + "hashes", 9)
    with pytest.raises(InputError, match="hashes is not what was written"):
        read(config(URL, tmp_path / "cache"), 0, 1)
    store.flip(AT + "hashes", 9)
    content = store.object(AT + "manifest.json")
    store.put(AT + "manifest.json", content.replace(b'"tokens": ', b'"tokens": 1', 1))
    with pytest.raises(InputError, match=r"manifest.json is damaged; upload it again"):
        read(config(URL, tmp_path / "cache"), 0, 1)
    store.put(AT + "manifest.json", (Path(uploaded) / "manifest.json").read_bytes())
    with pytest.raises(InputError, match="was not written by `python -m data.prepare --out`"):
        read(config(URL, tmp_path / "cache"), 0, 1)
    store.remove(AT + "manifest.json")
    with pytest.raises(InputError, match="the upload of this corpus did not end"):
        read(config(URL, tmp_path / "cache"), 0, 1)


@pytest.mark.parametrize("name", ["../out", "/etc/out", ".lock"])
def test_no_manifest_leads_out_of_its_folder(name, uploaded, store, tmp_path):
    manifest = corpus_in_store.read_manifest(URL)
    manifest["files"][name] = {"bytes": 3, "sha256": "0" * 64}
    store.put(AT + "manifest.json", corpus_in_store.manifest_text(manifest))
    with pytest.raises(InputError, match="names files that no corpus has"):
        read(config(URL, tmp_path / "cache"), 0, 1)


def test_a_cache_that_cannot_be_written_is_named(uploaded, store, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="data.cache: .* cannot be written: Not a directory"):
        read(config(URL, tmp_path / "file" / "cache"), 0, 1)


def test_a_store_that_is_gone_ends_the_run_with_a_sentence(store, tmp_path):
    options = [*tiny_run(tmp_path), "--validation.interval=0", "--data.cache_gb=1e-6"]
    source = next(option for option in options if "data.source" in option).partition("=")[2]
    cfg = Data(source=source, cache=str(tmp_path), tokenizer="bytes", validation_fraction=0)
    prepare(cfg, quiet, out=URL)
    folder = tmp_path / "run"
    folder.mkdir()
    options += [f"--data.source={URL}", f"--data.cache={tmp_path / 'c'}"]
    code, said = run_ranks(1, there, gone_when_opened, store.port, options, folder)[0]
    assert code == 1 and "cannot be read" in said
    assert f"{URL}/train-00000.bin: no connection, or no answer (3 tries" in said
    code, said = run_ranks(1, there, run, options, folder)[0]
    assert code == 2 and f"{URL}/manifest.json: no connection, or no answer" in said
    no_secrets(folder)


def gone_when_opened(port: int, options: list[str], folder: Path) -> tuple[int, str]:
    real = blocks.Blocks.__init__

    def opened(self: blocks.Blocks, *arguments: Any) -> None:
        real(self, *arguments)
        Server(port, None).rules({"kind": "gone"})

    blocks.Blocks.__init__ = opened
    return run(options, folder)


# Raw text


def raw(store: Server, folder: Path, prefix: str = "raw") -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://bucket/{prefix}"


def write_all_kinds(folder: Path) -> None:
    """Lines, plain and compressed, a table, and whole files in folders, some of them hidden."""
    folder.mkdir()
    texts = {kind: [f"<{kind} {i}> " + "ab " * (i % 41) for i in range(80)] for kind in "lgzt"}
    lines = {kind: "\n".join(json.dumps({"text": t}) for t in texts[kind]) for kind in texts}
    (folder / "a.jsonl").write_text(lines["l"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines["g"].encode()))
    packed = pyarrow.compress(lines["z"].encode(), codec="zstd", asbytes=True)
    (folder / "c.jsonl.zst").write_bytes(packed)
    table = pyarrow.table({"text": texts["t"], "other": ["x" * 50] * 80})
    parquet.write_table(table, folder / "d.parquet", row_group_size=17)
    for name in ("in/one.txt", "in/deep/two.txt", "in/.hidden.txt", ".no/three.txt", "in/x.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the whole of {name}\n" * 9)


@pytest.fixture
def kinds(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(stream, "LEAST", 500)  # so that the lines are cut into ranges
    write_all_kinds(tmp_path / "kinds")
    return tmp_path / "kinds"


@pytest.mark.parametrize(
    "pattern",
    ["", "/*.jsonl*", "/**/*.txt", "/in/**", "/i[mn]/*", "/*/deep/t?o.txt", "/in/one.txt"],
)
def test_names_are_those_of_a_disk(pattern, kinds, store):
    url = raw(store, kinds)
    if "?" in pattern:  # in a URL it would begin a query
        with pytest.raises(InputError, match="data.source"):
            load_config([f"--data.source={url}{pattern}"])
        return
    here = sources.find(f"{kinds}{pattern}")
    stored = sources.find(f"{url}{pattern}")
    assert [(f.name, f.size) for f in stored] == [(f.name, f.size) for f in here]
    texts = [list(sources.documents(f"{place}{pattern}")) for place in (url, kinds)]
    assert texts[0] == texts[1] and texts[0]
    in_bucket = sources.find("s3://bucket/**/*.txt")
    assert [file.name for file in in_bucket] == ["raw/in/deep/two.txt", "raw/in/one.txt"]


def test_what_is_prepared_from_a_url_is_what_is_prepared_from_a_disk(kinds, store, tmp_path):
    url = raw(store, kinds)
    folders = []
    for source in (str(kinds), url):
        cfg = Data(source=source, tokenizer="bpe", bpe_vocab_size=300, cache=str(tmp_path))
        folders.append(prepare(cfg, quiet))
    assert folders[0].fingerprint == folders[1].fingerprint
    assert folders[0].folder != folders[1].folder


def streamed(source: str, first: int, steps: int, dp: int = 1, saved: dict | None = None) -> tuple:
    """Batches of all ranks, and the state after them."""
    few = {"streams": 12, "validation_fraction": 0.1}
    cfg = Data(source=source, tokenizer="bytes", stream=True, **few)
    opened = stream.open_source(cfg, quiet)
    description = stream.describe(opened, 3, T, G)
    order = stream.begin(description)
    if saved:
        order = stream.resume({"step": first, "data": saved}, description)
    shares = []
    everywhere = []
    for rank in range(dp):
        steps_of = range(first, first + steps)
        rows = stream.StreamedBatches(opened, order, steps_of, 1, data_rank(rank, dp))
        shares.append([next(rows) for _ in steps_of])
        if rows.problem:
            raise rows.problem
        rows.close()
        everywhere += rows.places
    whole = []
    for parts in zip(*shares):
        whole.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return whole, stream.state(stream.StreamOrder(description, everywhere), description)


def test_a_stream_is_bitwise_that_of_a_disk(kinds, store):
    """On other ranks too, and where a stream from a disk goes on in the store."""
    url = raw(store, kinds)
    wanted, end = streamed(str(kinds), 0, 30)
    stored, end_stored = streamed(url, 0, 30, dp=3)
    assert same(stored, wanted) and end_stored == end
    _, middle = streamed(str(kinds), 0, 11)
    rest, end_rest = streamed(url, 11, 19, saved=middle)
    assert same(rest, wanted[11:]) and end_rest == end


def test_no_fault_reaches_a_stream(kinds, store, monkeypatch):
    monkeypatch.setattr(objects.Key, "tries", 12)
    url = raw(store, kinds)
    wanted, _ = streamed(str(kinds), 0, 12)
    store.rules({"kind": "truncated", **FAULTS["truncated"]})
    assert same(streamed(url, 0, 12)[0], wanted)
    assert store.status()["counts"].get("truncated", 0) > 0


@pytest.mark.slow
def test_control_of_text_that_is_read_once_a_flipped_byte_arrives(kinds, store, monkeypatch):
    url = raw(store, kinds)
    file = next(file for file in sources.find(url) if file.name == "in/one.txt")
    store.rules({"kind": "flipped", "key": "one.txt", "count": 1})
    whole = (kinds / "in" / "one.txt").read_bytes()
    with sources.open_file(file) as content:
        assert content.read() == whole
    store.rules({"kind": "flipped", "key": "one.txt", "count": 1})
    monkeypatch.setattr(objects.Key, "is_protected", True)
    with sources.open_file(file) as content:
        assert content.read() != whole


def test_text_that_differs_at_every_read_is_named(kinds, store):
    url = raw(store, kinds)
    store.rules({"kind": "flipped", "key": "one.txt"})
    with pytest.raises(InputError, match=r"one.txt: bytes 0 to \d+ came differently 4 times"):
        list(sources.documents(f"{url}/in/one.txt"))


@pytest.mark.parametrize("name", ["b.jsonl.gz", "d.parquet"])
def test_a_store_that_is_gone_is_no_failed_document(name, kinds, store, tmp_path, monkeypatch):
    """Not even where documents that cannot be read are left out."""
    url = f"{raw(store, kinds)}/{name}"
    cfg = Data(source=url, tokenizer="bytes", cache=str(tmp_path), skip_failed=1000)
    files = sources.find(url)
    store.rules({"kind": "gone"})
    with pytest.raises(InputError, match=r"no connection, or no answer \(3 tries"):
        list(sources.read(sources.pieces(files[0])[0], cfg.text_field))
    monkeypatch.setattr(sources, "find", lambda source: files)
    monkeypatch.setattr(stream, "is_tokenised", lambda source: False)
    kind = InputError if "parquet" in name else LoaderError  # its row groups are counted first
    with pytest.raises(kind, match="no connection"):
        streamed(cfg.source, 0, 1)


# Uploads


def test_an_upload_is_checked_and_not_replaced(folder, store, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 40)
    own = ["--tokenizer=bytes", f"--cache={tmp_path / 'c'}"]
    assert command([f"--source={folder}", f"--out={URL}", "--verify", *own[1:]]) == 0
    assert "every hash verified" in capsys.readouterr().out
    store.ask("clear", b"")
    assert command([f"--source={folder}", f"--out={URL}", *own[1:]]) == 0  # it is there already
    assert not [row for row in store.status()["log"] if row[0] != "GET" and row[0] != "HEAD"]
    capsys.readouterr()
    assert command([f"--source={other}", f"--out={URL}", *own]) == 2
    assert "has another corpus" in capsys.readouterr().err
    assert command([f"--source={URL}", f"--out={URL}-2", *own[1:]]) == 2
    assert "is prepared already" in capsys.readouterr().err
    assert command([f"--source={other}", "--out=s3://bucket", *own]) == 2
    assert "is a whole bucket" in capsys.readouterr().err


def command(options: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["data.prepare", *options])
        return prepare_command.main()


def test_a_damaged_folder_is_not_uploaded(folder, store, tmp_path):
    shard = Path(folder) / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[999] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match="train-00000.bin is not what was written"):
        prepare(Data(source=folder, cache=str(tmp_path)), quiet, out=URL)
    assert f"{AT}manifest.json" not in store.keys()


# What is refused


def test_without_the_package_a_url_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(objects.importlib.util, "find_spec", lambda name: None)
    cfg = config(URL, tmp_path)
    (problem,) = [line for line in inputs.problems(cfg, 300) if "obstore" in line]
    assert "s3://bucket/corpora/a needs the package obstore: pip install obstore==" in problem
    with pytest.raises(InputError, match="needs the package obstore"):
        open_corpora(cfg, quiet)


@pytest.mark.parametrize(
    ("program", "place", "said"),
    [
        (prepare_command, "http://host/a", "names no place in a store"),
        (prepare_command, "s3://bucket/a?x=1", "names no place in a store"),
        (train_tokenizer, "s3://bucket/a", "name a folder of this machine"),
    ],
)
def test_an_out_that_is_no_place_is_refused(program, place, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--vocab-size=300", f"--out={place}"])
    if program is prepare_command:
        monkeypatch.setattr("sys.argv", ["program", f"--out={place}"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert said in capsys.readouterr().err


def test_a_file_url_is_a_path(corpus):
    assert Data(source=f"file://{corpus}").source == str(corpus)


def test_an_empty_prefix_is_named(store):
    with pytest.raises(InputError, match='"s3://bucket/none": no object with a text suffix'):
        sources.find("s3://bucket/none")


def test_reading_ahead_goes_on_however_many_blocks_were_read(monkeypatch):
    """Only blocks of steps that are not read count, not those of the whole run."""
    asked: list[int] = []
    ahead_of: list[int] = []

    def ask(batches: object, step: int) -> int:
        asked.append(step)
        return ahead.BLOCKS_AHEAD // 4

    monkeypatch.setattr(ahead, "ask", ask)
    steps = range(40)
    for step in ahead.asked(None, steps):
        ahead_of.append(len(asked) - step)
    assert ahead_of == [min(4, len(steps) - step) for step in steps]
