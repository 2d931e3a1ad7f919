"""Audit of the data that a run saw, derived from its order alone: checked against the real batches,
and with broken orders, which must be found."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from configs.schema import Data, InputError
from data import audit, splice
from data.documents import DocumentIndex
from data.loader import Batches
from data.order import BLOCK, Order
from data.prepare import prepare

STEPS, T, G = 90, 16, 24


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the folder of a run of 90 steps on two sources, of which 60 are in a checkpoint, with
    a schedule and a splice."""
    place = tmp_path_factory.mktemp("audit")
    corpora = {}
    for name, count in ("web", 30), ("code", 7):
        folder = place / name
        folder.mkdir()
        for i in range(count):
            numbers = " ".join(str(n * (i + 3) % 89) for n in range(40))
            (folder / f"{name}-{i:02d}.txt").write_text(f"{name} document {i}: {numbers}")
        corpora[name] = prepare(
            Data(source=str(folder), tokenizer="bytes", cache=str(place / "cache")),
            log=lambda _: None,
        )

    def described(G: int, web: list, code: list) -> dict:
        weights = {"web": web, "code": code}
        return splice.describe(
            [(n, c.fingerprint, c.train, weights[n]) for n, c in corpora.items()], 3, T, G
        )

    first, now = (
        described(G, [[0, 0.6], [20, 0.2]], [[0, 0.4]]),
        described(2 * G, [[0, 0.5]], [[0, 0.5]]),
    )
    order, _ = splice.resume(
        {"step": 40, "data": splice.state(splice.begin(first), first)}, now, True
    )
    folder = place / "run"
    (folder / "checkpoints" / "step-00000060").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000050.1").mkdir()
    folders = {corpus.fingerprint: corpus.folder for corpus in corpora.values()}
    (folder / "data.json").write_text(
        json.dumps(splice.state(order, now) | {"steps": STEPS, "folders": folders})
    )
    return folder


@pytest.fixture(scope="module")
def audited(run) -> audit.Audited:
    return audit.open_run(str(run))


def command(capsys: pytest.CaptureFixture, *args: str) -> tuple[int, str, str]:
    code = audit.main(list(args))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_each_segment_deals_other_slots_to_its_sources(audited):
    """With equal shares, seed and sources, a later one would else repeat the order of the first."""
    first, *later = audited.order.segments
    for segment in later:
        same = dataclasses.replace(segment, sources=first.sources)
        assert same.seed == first.seed
        assert (same.slots(0)[0] != first.slots(0)[0]).any()
    assert (first.slots(1)[0] != first.slots(0)[0]).any()


def test_the_rows_listed_are_those_of_the_batches(audited):
    order = audited.order
    assert [segment.step for segment in order.segments] == [0, 20, 40]
    sources = [audited.corpora[source.fingerprint] for source in order.last.sources]
    rows = list(audit.seen(audited, 39, 43))
    assert len(rows) == 2 * G + 3 * 2 * G
    for entry in rows:
        i = [source.name for source in order.last.sources].index(entry["source"])
        window = sources[i].train.read(entry["window"] * T, entry["window"] * T + T + 1)
        text = b""
        for piece in entry["documents"]:
            start, stop = DocumentIndex(sources[i].train).extent(piece["number"])
            whole = sources[i].train.read(start, stop)
            assert 0 <= piece["start"] < piece["stop"] <= stop - start
            text += whole[piece["start"] : piece["stop"]].tobytes()
            assert entry["source"] in piece["name"]
        assert text == window.tobytes()
    batch = Batches([corpus.train for corpus in sources], order, 2 * G, 0, 1)[41]
    names = [order.last.sources[s].name for s in batch["source"].tolist()]
    listed = [(entry["source"], entry["window"]) for entry in rows if entry["step"] == 42]
    assert listed == list(zip(names, batch["window"].tolist(), strict=True))


def test_the_column_of_the_source_is_never_empty(audited, capsys):
    """A run's only source has no name: it is the option data.source."""
    last = audited.order.last
    unnamed = tuple(dataclasses.replace(source, name="") for source in last.sources)
    segments = [*audited.order.segments[:-1], dataclasses.replace(last, sources=unnamed)]
    only = dataclasses.replace(audited, order=Order(segments))
    audit._print_steps(only, 42, 42, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0][:3] == ["42", "0", "data.source"], rows[0]


def test_when_a_document_is_seen_is_what_the_listing_says(audited):
    """The inverse permutation against a listing of the whole run."""
    by_document = {}
    for entry in audit.seen(audited, 1, STEPS):
        for piece in entry["documents"]:
            key = entry["source"], piece["number"]
            by_document.setdefault(key, []).append(
                {k: entry[k] for k in ("step", "row", "epoch", "window")}
            )
    for source in audited.order.last.sources:
        for number in range(len(audited.corpora[source.fingerprint].train.document_starts)):
            found = audit.occurrences(audited, source, number)
            assert found == by_document[source.name, number] and len(found) > 3


def test_a_document_is_found_by_number_name_and_text(audited):
    tokens = audited.corpora[audited.order.last.sources[0].fingerprint].train
    ((source, number),) = audit.find(audited, "web:3")
    assert (source.name, number) == ("web", 3)
    name = DocumentIndex(tokens).name(3)
    assert [(s.name, n) for s, n in audit.find(audited, name)] == [("web", 3)]
    decoded = audited.corpora[source.fingerprint].tokenizer.decode(
        tokens.read(*DocumentIndex(tokens).extent(3))
    )
    assert [(s.name, n) for s, n in audit.find(audited, decoded[:17])] == [("web", 3)]
    code = audited.corpora[audited.order.last.sources[1].fingerprint].train
    assert len(audit.find(audited, "code document")) == len(code.document_starts)
    assert audit.find(audited, "no such text") == []
    with pytest.raises(InputError, match="web:1000: the source has"):
        audit.find(audited, "web:1000")


def test_a_block_without_its_shares_is_found(audited, monkeypatch):
    (segment,) = Order([dataclasses.replace(audited.order.last, step=0, sample=0)]).segments
    segment = dataclasses.replace(
        segment, sources=tuple(dataclasses.replace(s, consumed=0) for s in segment.sources)
    )
    other = [
        dataclasses.replace(s, share=s.share + more)
        for s, more in zip(segment.sources, (1, -1), strict=True)
    ]
    assert audit.prove(Order([segment]), 200) == []
    wrong = Order([dataclasses.replace(segment, sources=tuple(other))])
    monkeypatch.setattr(Order, "rows", lambda _, *where, real=Order.rows: real(wrong, *where))
    assert all("a block has" in problem for problem in audit.prove(Order([segment]), 200))
    assert len(audit.prove(Order([segment]), 200)) == 200 * 2 * G // BLOCK


@pytest.mark.parametrize("bug", ["shifted", "repeated", "skipped"])
def test_a_broken_order_is_found(audited, monkeypatch, bug):
    real = Order.rows

    def broken(self, step, first, count, steps):
        if bug == "shifted" and step >= 20:
            return real(self, step, first + 1, count, steps)
        source, window, epoch = real(self, step, first, count, steps)
        if bug == "repeated" and step >= 40:
            window[3] = window[np.flatnonzero(source == source[3])[-1]]
        if bug == "skipped":
            epoch = epoch + (step >= 40)
        return source, window, epoch

    monkeypatch.setattr(Order, "rows", broken)
    monkeypatch.setattr(audit, "CHUNK", 2 * G)
    assert audit.prove(audited.order, STEPS)


@pytest.mark.parametrize("characters", [300, 1500, 6000])
def test_a_text_that_a_splice_exchanges_is_proved_by_itself(audited, tmp_path, characters, capsys):
    """A source keeps its key with its name, whatever the number of its new text's windows."""
    web = audited.corpora[audited.order.last.sources[0].fingerprint]
    (tmp_path / "other.txt").write_text("x" * characters)
    other = prepare(
        Data(source=str(tmp_path / "other.txt"), tokenizer="bytes", cache=str(tmp_path / "cache")),
        log=lambda _: None,
    )
    first, now = (
        splice.describe([("web", c.fingerprint, c.train, [[0, 1.0]])], 3, T, G)
        for c in (web, other)
    )
    progress = {"step": 2, "data": splice.state(splice.begin(first), first)}
    order, _ = splice.resume(progress, now, True)
    assert order.segments[0].sources[0].key == order.last.sources[0].key
    assert audit.prove(order, STEPS) == []
    old, new = audit.shares(order, 5)
    assert old == ("web (its text until a splice)", 2 * G, 2 * G * T, pytest.approx(old[3]))
    assert new[:3] == ("web", 3 * G, 3 * G * T)
    known = audit.Audited(order, 0, STEPS, {other.fingerprint: other})
    audit._print_found(known, "no such text", as_json=False)
    said = capsys.readouterr().out
    assert "(sources: web; held-out" in said and "a splice has ended that text: web\n" in said


def test_the_shares_of_the_sources_are_those_of_all_segments(audited):
    seen = list(audit.seen(audited, 1, 60))
    for name, samples, tokens, epochs in audit.shares(audited.order, 60):
        of_source = [entry for entry in seen if entry["source"] == name]
        assert (samples, tokens) == (len(of_source), len(of_source) * T) and epochs > 0
    longer = splice.describe(
        [("", c.fingerprint, c.train, [[0, 1.0]]) for c in list(audited.corpora.values())[:1]],
        *(3, T, G),
        lengths=[(4, 2 * T, G)],
    )
    ((name, samples, tokens, _),) = audit.shares(splice.begin(longer), 10)
    assert (name, samples, tokens) == ("data.source", 10 * G, 4 * G * T + 6 * G * 2 * T)


def test_what_data_skip_leaves_out_is_no_problem_of_an_epoch(audited, tmp_path, capsys):
    web = audited.corpora[audited.order.last.sources[0].fingerprint]
    entry = "", web.fingerprint, web.train, [[0, 1.0]]
    described = splice.describe([entry], 3, T, G, [(5, 2)])
    order = splice.begin(described)
    steps = 3 * order.last.sources[0].windows // G
    assert audit.prove(order, steps, {5: 2}) == []
    (problem,) = audit.prove(order, steps)
    assert "windows were not seen" in problem
    (tmp_path / "checkpoints" / f"step-{steps:08d}").mkdir(parents=True)
    more = {"steps": steps, "folders": {web.fingerprint: web.folder}}
    (tmp_path / "data.json").write_text(json.dumps(splice.state(order, described) | more))
    code, out, _ = command(capsys, str(tmp_path))
    assert code == 0 and "data.skip leaves out 2 batches after step 5" in out, out
    code, out, _ = command(capsys, str(tmp_path), "--find", "no such text")
    assert code == 0 and "(sources: data.source; held-out text is in no step)" in out, out


def test_the_command_line(run, capsys):
    code, out, _ = command(capsys, str(run))
    assert (
        code == 0
        and "steps 1 to 60, 1,920 samples: none is repeated or skipped" in out
        and " web: " in out
    )
    code, out, _ = command(capsys, str(run), "--steps", "41:42")
    assert code == 0 and "web:" in out and out.count("\n") > 4 * G
    code, out, _ = command(capsys, str(run), "--steps", "1:90", "--json", "--find", "code:2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (
        code == 0 and len(lines) == 40 * G + 50 * 2 * G + 1 and lines[-1]["name"].endswith(".txt")
    )
    code, out, _ = command(capsys, str(run), "--find", "web document 1")
    assert code == 0 and "of epoch 0: seen" in out and ": to come" in out


def test_what_cannot_be_audited_is_a_sentence(run, tmp_path, capsys):
    assert command(capsys, str(tmp_path))[0] == 2
    code, _, error = command(capsys, str(run), "--steps", "5:99")
    assert code == 2 and "steps 1 to 90" in error
    code, _, error = command(capsys, str(run), "--steps", "all")
    assert code == 2 and "FIRST:LAST" in error
    record = json.loads((run / "data.json").read_text())
    swapped = dict(zip(record["folders"], reversed(record["folders"].values()), strict=True))
    (tmp_path / "data.json").write_text(json.dumps(record | {"folders": swapped}))
    code, _, error = command(capsys, str(tmp_path))
    assert code == 2 and "has changed since this run read it" in error
    (tmp_path / "data.json").write_text(
        json.dumps(record | {"folders": dict.fromkeys(record["folders"], "/none")})
    )
    code, _, error = command(capsys, str(tmp_path))
    assert code == 2 and "gone from /none" in error
