"""Text that is tokenised while the run trains: the same batches on every mesh, each document once
per epoch, exact resume, and a stream that fails or ends takes the run to a checkpoint on all
ranks."""

import gzip
import json
import logging
import random
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from configs.load import load_config
from configs.schema import Data, InputError
from data import audit, sources, splice, stream
from data.prepare import prepare
from data.stream import Stream, StreamedBatches, StreamOrder
from data.workers import LoaderError
from tests.ranks import run_ranks
from tests.runs import MESHES, TINY, data_rank, killed_at, run, samples, series
from tests.runs import same_batches as same

T, G, STREAMS = 13, 24, 12


def words(kind: str, i: int) -> str:
    return f"<{kind}:{i}>" + "".join(
        chr(97 + (i * k + len(kind)) % 26) for k in range(i * 31 % 143)
    )


def write(folder: Path, count: int = 60) -> list[str]:
    """A source of every kind; its texts."""
    folder.mkdir()
    texts = {
        kind: [words(kind, i) for i in range(count)] for kind in ("lines", "gz", "zst", "table")
    }

    def lines(kind: str) -> bytes:
        rows = [json.dumps({"text": text}) for text in texts[kind]]
        return "\n".join([*rows[:20], "", '{"text": ""}', *rows[20:]]).encode()

    (folder / "a.jsonl").write_bytes(lines("lines"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines("gz")))
    (folder / "c.jsonl.zst").write_bytes(pyarrow.compress(lines("zst"), codec="zstd", asbytes=True))
    parquet.write_table(
        pyarrow.table({"text": texts["table"]}), folder / "d.parquet", row_group_size=17
    )
    (folder / "e.txt").write_text(words("whole", 77))
    return [*sum(texts.values(), []), words("whole", 77)]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> tuple[Path, list[str]]:
    monkeypatch.setattr(stream, "LEAST", 500)  # so that the lines are cut into ranges
    monkeypatch.setattr(stream, "FIRST_PAUSE", 0.001)
    return tmp_path / "corpus", write(tmp_path / "corpus")


def options(place: Path, **more) -> Data:
    few = {"streams": STREAMS, "validation_fraction": 0.0, "timeout_seconds": 20}
    return Data(source=str(place), tokenizer="bytes", stream=True, **few | more)


class Over(Exception):
    """A stream has read all epochs that a test wants."""


def end_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stream._read

    def read(self, unit, place):
        if self.number + place.unit * self.streams >= epochs * len(self.source.units):
            raise Over
        return real(self, unit, place)

    monkeypatch.setattr(Stream, "_read", read)


def opened(cfg: Data, seed: int = 3) -> tuple[stream.StreamSource, dict]:
    source = stream.open_source(cfg, log=lambda line: None)
    return source, stream.describe(source, seed, T, G)


def take(
    source, order: StreamOrder, first: int, steps: int, dp: int = 1, local: int = 1
) -> tuple[list[dict], StreamOrder]:
    """Return the global batches of some steps, put together from the shares of dp ranks, and where
    the streams then are."""
    ranks = [
        StreamedBatches(source, order, range(first, first + steps), local, data_rank(r, dp))
        for r in range(dp)
    ]
    shares = [[batch for _, batch in zip(range(steps), rank)] for rank in ranks]
    for rank in ranks:
        rank.close()
        if rank.problem:
            raise rank.problem
    joined = []
    for parts in zip(*shares, strict=True):
        rows = [{k: x.flatten(0, 1) if x.dim() > 1 else x for k, x in b.items()} for b in parts]
        joined.append({k: torch.cat([b[k] for b in rows]) for k in rows[0]})
    return joined, StreamOrder(order.description, sum((rank.places for rank in ranks), []))


# --------------------------------------------------------------------------------------------------
# what a stream is


def test_a_rank_may_have_parts_of_windows_alone(corpus):
    """Context parallelism: tokens and labels are those of the whole windows at these positions."""
    source, description = opened(options(corpus[0], mask_documents=True))
    places = [range(1, 3), range(T - 2, T)]
    rows = [
        StreamedBatches(source, stream.begin(description), range(2), G, data_rank(own=own))
        for own in (None, places)
    ]
    for want, got in zip(*rows, strict=True):
        here = [position for own in places for position in own]
        assert all(torch.equal(got[key], want[key][..., here]) for key in ("tokens", "labels"))
        assert torch.equal(got["positions"], want["positions"]) and torch.equal(
            got["window"], want["window"]
        )
        if (got["window"] >= STREAMS).any():
            break
    for batches in rows:
        batches.close()


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_an_epoch_has_every_document_once_and_none_that_is_held_out(
    corpus, fraction, tmp_path, monkeypatch
):
    place, texts = corpus
    end_after(1, monkeypatch)
    source, description = opened(options(place, validation_fraction=fraction))
    assert {unit.every for unit in source.units} == {1} and len(source.units) >= STREAMS
    found = []
    for number in range(STREAMS):
        one = Stream(source, stream.begin(description), number, threading.Event())
        tokens = []
        with pytest.raises(Over):
            while True:
                window, begins = one.window()
                tokens += window[:T].tolist()
                # after each end of a text
                assert not begins[1:].any() or set(window[:-1][begins[1:]].tolist()) == {256}
        left = [i for _, ids in one.waiting for i in ids.tolist()][one.place.token :]
        parts = bytes(i if i < 256 else 0 for i in tokens + left).decode().split("\0")
        assert parts.pop() == ""
        found += parts
    assert len(found) == len(set(found)) and set(found) <= set(texts)
    if not fraction:
        assert sorted(found) == sorted(texts)
    else:  # the same that preparation holds out
        cfg = options(place, validation_fraction=fraction, cache=str(tmp_path / "cache"))
        prepared = prepare(cfg, log=lambda line: None)
        held_out = (
            bytes(i if i < 256 else 0 for i in prepared.validation.read(0, 10**6).tolist())
            .decode()
            .split("\0")[:-1]
        )
        assert len(held_out) > 20 and sorted(held_out + found) == sorted(texts)


def test_every_epoch_distributes_the_units_again(corpus, monkeypatch):
    """Each epoch has every unit once, and no two epochs have them in one order."""
    source, description = opened(options(corpus[0]))
    order, read, units = stream.begin(description), {}, len(source.units)

    def nothing(one: Stream, unit: stream.Unit, place: stream.Place) -> list:
        read[one.number + place.unit * STREAMS] = source.units.index(unit)
        return []

    monkeypatch.setattr(Stream, "_read", nothing)
    end_after(3, monkeypatch)
    for number in range(STREAMS):
        with pytest.raises(Over):
            Stream(source, order, number, threading.Event()).window()
    epochs = [[read[epoch * units + i] for i in range(units)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(units)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_are_the_same_on_any_ranks_and_microbatches(corpus):
    source, description = opened(options(corpus[0], mask_documents=True))
    whole, end = take(source, stream.begin(description), 0, 60, local=G)
    assert whole[0]["tokens"].shape == (G, T) and "positions" in whole[0]
    for dp in 2, 3, 12:
        for local in {1, G // dp}:
            parts, there = take(source, stream.begin(description), 0, 60, dp, local)
            assert same(parts, whole) and there.places == end.places, (dp, local)
    # some streams are in the second epoch
    assert max(place.unit for place in end.places) * STREAMS > len(source.units)


@pytest.mark.parametrize("rows", [8, 9])
def test_every_window_of_every_stream_comes_once_in_its_turn(corpus, rows):
    description = opened(options(corpus[0]))[1] | {"global_batch_size": rows}
    order = stream.begin(description)
    seen = [order.row(step, row) for step in range(36) for row in range(rows)]
    for number in range(STREAMS):
        assert [w for s, w in seen if s == number] == list(range(36 * rows // STREAMS))


def schedules(corpus, seed: int) -> bool:
    """A run that is killed and goes on with another number of ranks, again and again, is the run
    that is not."""
    source, description = opened(options(corpus[0], mask_documents=True), seed)
    whole, _ = take(source, stream.begin(description), 0, 36)
    rng, order, step, got = random.Random(seed), stream.begin(description), 0, []
    for dp in 1, 2, 4, 1, 12, 3:
        saved = json.loads(json.dumps({"step": step, "data": stream.state(order, description)}))
        order = stream.resume(saved, description)
        steps = rng.randint(1, 6)
        take(source, order, step, rng.randint(1, 3), dp)  # what a kill loses
        parts, order = take(source, order, step, steps, dp)
        got, step = got + parts, step + steps
    return same(got, whole[:step])


def test_a_resume_on_other_ranks_repeats_and_skips_nothing(corpus):
    assert all(schedules(corpus, seed) for seed in range(2))


def test_a_state_without_the_token_would_be_noticed(corpus, monkeypatch):
    monkeypatch.setattr(stream, "asdict", lambda place: vars(replace(place, token=0)))
    assert not schedules(corpus, 0)


def test_a_hugging_face_dataset_streams(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "streamed").mkdir()
    for shard in range(5):
        lines = [json.dumps({"text": words("hf", i)}) for i in range(shard, 80, 5)]
        (tmp_path / "streamed" / f"{shard}.jsonl").write_text("\n".join(lines))
    source, description = opened(options(f"hf:{tmp_path / 'streamed'}"))
    whole, _ = take(source, stream.begin(description), 0, 8)
    first, order = take(source, stream.begin(description), 0, 3, dp=2)
    rest, _ = take(source, order, 3, 5, dp=4)
    assert same(first + rest, whole)


# --------------------------------------------------------------------------------------------------
# what can go wrong


def failing(monkeypatch, fails) -> None:
    """sources.read, which asks fails(piece, number) before each document: an error to raise, a
    document instead, or None."""
    real = sources.read

    def read(piece, *more):
        for number, document in enumerate(real(piece, *more)):
            error = fails(piece, number)
            if isinstance(error, Exception):
                raise error
            if error:
                yield error
                return
            yield document

    monkeypatch.setattr(sources, "read", read)


@pytest.mark.slow
def test_what_fails_is_read_again_without_repeat_or_skip(corpus, monkeypatch, caplog):
    # the second with pieces that several streams share
    monkeypatch.setattr(stream, "RETRIES", 9)
    for place in corpus[0], corpus[0] / "b.jsonl.gz":
        source, description = opened(options(place))
        whole, _ = take(source, stream.begin(description), 0, 12)
        rng, seen, lost = random.Random(1), set(), []

        def fails(piece, number):
            first_time = (piece, number) not in seen
            seen.add((piece, number))
            if first_time and rng.random() < 0.2:
                lost.append(number)
                truncated = sources.Document(
                    number, "", f"{sources.UNREADABLE}the archive ends too early", 0
                )
                return [OSError(5, "Input/output error"), ConnectionError("reset"), truncated][
                    len(lost) % 3
                ]

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "plumbline"):
            caplog.clear()
            failing(patch, fails)
            again, _ = take(source, stream.begin(description), 0, 12)
        assert same(again, whole)
        assert (
            len(lost) > 5
            and len(caplog.records) == len(lost)
            and "attempt 1 of 10; the next in 0.001 s" in caplog.text
        )


def test_the_last_attempt_is_an_error_that_names_the_place(corpus, monkeypatch):
    monkeypatch.setattr(stream, "RETRIES", 1)
    source, description = opened(options(corpus[0]))
    failing(
        monkeypatch,
        lambda piece, number: (
            OSError(5, "gone") if piece.file.name == "b.jsonl.gz" and number == 9 else None
        ),
    )
    sentence = (
        r"data stream \d+: .*/b.jsonl.gz, after document 9, cannot be read: OSError.*gone "
        r"\(attempt 2 of 2\)"
    )
    with pytest.raises(LoaderError, match=sentence):
        take(source, stream.begin(description), 0, 40)


@pytest.mark.slow
def test_a_read_that_hangs_is_an_error(corpus, monkeypatch):
    source, description = opened(options(corpus[0], timeout_seconds=1))
    release = threading.Event()
    failing(monkeypatch, lambda piece, number: release.wait(30) and None)
    with pytest.raises(
        LoaderError,
        match=r"data streams 0 to 11 gave nothing for 1 s \(data.timeout_seconds\): reading hangs",
    ):
        take(source, stream.begin(description), 0, 2)
    release.set()


def test_documents_that_cannot_be_read_count_for_their_stream(tmp_path, caplog, monkeypatch):
    end_after(1, monkeypatch)
    rows = [json.dumps({"text": words("t", i)}) for i in range(40)]
    rows[7] = rows[23] = '{"other": 1}'
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    for allowed in 0, 1, 2:
        source, description = opened(options(tmp_path / "x.jsonl", streams=1, skip_failed=allowed))
        one = Stream(source, stream.begin(description), 0, threading.Event())
        error, words_of_it = (
            (Over, None)
            if allowed == 2
            else (LoaderError, "x.jsonl, line (8|24) (is not|has nothing under)")
        )
        with pytest.raises(error, match=words_of_it):
            while True:
                one.window()
        assert one.place.failed <= allowed
    assert "left out: data.source:" in caplog.text and "line 24" in caplog.text


def test_a_changed_text_or_option_is_refused(corpus):
    place, _ = corpus
    source, description = opened(options(place))
    _, order = take(source, stream.begin(description), 0, 9)
    saved = {"step": 9, "data": stream.state(order, description)}
    for change, word in (
        ({"seed": 4}, "run.seed was 3 and is 4"),
        ({"streams": 24}, "data.streams was 12 and is 24"),
        ({"seq_len": 5}, "training.seq_len"),
        ({"tokenizer": "x"}, "data.tokenizer"),
    ):
        with pytest.raises(InputError, match=word):
            stream.resume(saved, description | change)
    with pytest.raises(InputError, match="how they are read"):
        stream.resume(saved, opened(options(place, add_eos=False))[1])
    with pytest.raises(InputError, match="data.stream = true goes on with it"):
        splice.resume(saved, {}, False)
    with pytest.raises(InputError, match="did not stream"):
        stream.resume({"step": 9, "data": {"stages": []}}, description)
    for file in place.glob("*.jsonl*"):  # as large as before: seen when it is read again
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        if file.suffix != ".zst":
            changed = text.replace(b"a", b"b")
            file.write_bytes(gzip.compress(changed) if file.suffix == ".gz" else changed)
    with pytest.raises(InputError, match="is not what data stream"):
        take(source, stream.resume(saved, description), 9, 9)


def test_what_cannot_be_streamed_is_refused(corpus, tmp_path):
    prepared = prepare(options(corpus[0], cache=str(tmp_path / "cache")), log=lambda _: None)
    with pytest.raises(InputError, match="is prepared already"):
        opened(options(prepared.folder))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 5)
    source, description = opened(options(tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="no text to train on"):
        take(source, stream.begin(description), 0, 1)


# --------------------------------------------------------------------------------------------------
# whole runs


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(3):
        lines = "\n".join(json.dumps({"text": words(f"{file}", i)}) for i in range(120))
        (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return [*TINY, f"--data.source={folder}", "--data.stream=true", "--data.streams=16"]


def test_killed_and_resumed_it_is_bitwise_the_same_run(tiny, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert run_ranks(1, run, tiny, whole) == [(0, "")]
    killed_at(8, tiny, killed)
    assert 8 <= max(series(killed)) < 16
    assert run_ranks(1, run, tiny, killed) == [(0, "")]
    assert series(killed) == series(whole) and samples(killed, 1)[-6:] == samples(whole, 1)[-6:]
    with pytest.raises(InputError, match="only a run on a prepared corpus can be audited"):
        audit.open_run(str(whole))


def failing_at(step: int, kind: str, options: list[str], folder: Path) -> tuple[int, str]:
    """Do a run of which rank 1's streams fail while the batch of `step` is made."""
    real = StreamedBatches._batch

    def batch(self, at, streams):
        if at == step - 1 and self.mine.start:
            if kind == "hangs":
                threading.Event().wait(30)
            gone = sources.Piece(sources.File("gone", "/nowhere/gone.jsonl", 1, 0), 0, 1, 1)
            list(streams[self.mine.start]._read(stream.Unit(gone, 0, 1), stream.Place()))
        return real(self, at, streams)

    StreamedBatches._batch = batch
    stream.RETRIES = 1
    return run(options, folder)


@pytest.mark.slow
@pytest.mark.cap(90)
def test_a_stream_that_fails_on_one_rank_saves_and_ends_all(tiny, tmp_path):
    """Two attempts, then a checkpoint of step 6 and exit code 1 on both; a restart goes on as if
    nothing had been."""
    more = [*tiny, *MESHES["fsdp2"][1], "--data.timeout_seconds=3"]
    kinds = {
        "fails": "/nowhere/gone.jsonl, after document 0, cannot be read",
        "hangs": "8 to 15 gave nothing for 3 s",
    }
    for name in "whole", *kinds:
        (tmp_path / name).mkdir()
    whole = tmp_path / "whole"
    assert run_ranks(2, run, more, whole) == [(0, "")] * 2
    for kind, word in kinds.items():
        failed = tmp_path / kind
        results = run_ranks(2, failing_at, 7, kind, more, failed)
        assert [code for code, _ in results] == [1, 1] and all(
            word in error for _, error in results
        ), results
        assert (failed / "checkpoints" / "step-00000006").is_dir() and max(series(failed)) == 6
        assert (
            "everything up to step 6 is saved" in (failed / "logs" / "rank-00000.log").read_text()
        )
    assert run_ranks(2, run, more, failed) == [(0, "")] * 2
    assert series(failed) == series(whole) and samples(failed, 2) == samples(whole, 2)


@pytest.mark.slow
def test_validation_is_on_sets_that_were_prepared(tiny, tmp_path):
    """A prepared part of the source holds out the documents that the stream holds out."""
    cfg = load_config([f"--run.folder={tmp_path}", *tiny])
    held = {"validation_fraction": 0.2, "cache": f"{tmp_path}/cache"}
    part = prepare(cfg.data.model_copy(update=held), log=lambda line: None)
    sets = f'--validation.sets=[{{name = "part", source = "{part.folder}"}}]'
    more = [
        *tiny,
        sets,
        "--data.validation_fraction=0.2",
        "--validation.interval=8",
        "--validation.steps=1",
    ]
    assert run_ranks(1, run, more, tmp_path) == [(0, "")]
    assert list(series(tmp_path, "validation_loss")) == [8, 16]
