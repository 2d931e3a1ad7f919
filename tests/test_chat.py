"""Conversations: rendered as transformers renders them, packed whole, and trained on for their
answers alone.

The oracle of the loss is the plain model on each conversation by itself. What a batch must hold is
made again here, from the lines of the file.
"""

import contextlib
import io
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from configs.load import load_config
from configs.schema import Config, Data, InputError
from data import answers, audit, chat, formats, inputs, packing, show, splice, too_long
from data.documents import DocumentIndex
from data.loader import IGNORE, Batches, loader
from data.open import open_corpora
from data.open_tokenizer import open_tokenizer
from data.packing import PackedTokens
from data.prepare import prepare
from data.prepared import Prepared, open_prepared, read_manifest, verify
from data.rendering import BEGIN, END
from data.tokenizer import Tokenizer, byte_tokenizer
from tests.conversations import (
    MAY_DROP,
    SPECIAL,
    TALKS,
    TEMPLATES,
    conversations,
    said,
    write,
    write_tokenizer,
)
from tests.ranks import run_ranks
from tests.runs import run, series, tiny_run, trained

SHIPPED = Path(__file__).parents[1] / "data" / "examples" / "chat.jsonl"
T = 96
G = 8  # rows of a batch of a run


def data(source: Path, **options: object) -> Data:
    plain = {
        "format": "chat",
        "chat_template": "plain",
        "tokenizer": "bytes",
        "cache": str(source.parent / "cache"),
        "validation_fraction": 0.0,
    }
    return Data(source=str(source), **plain | options)


def quietly(cfg: Data) -> Prepared:
    return prepare(cfg, log=lambda _: None, workers=1)


def as_chat(name: str = "plain", tok: Tokenizer | None = None) -> chat.Chat:
    tokens = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[0]}
    tok = tok or byte_tokenizer()
    template = chat.Template(TEMPLATES[name], tokens, tok.special_tokens, list(MAY_DROP))
    return chat.Chat(tok, template)


def parts(tok: Tokenizer, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """Return the texts of the stretches of tokens that are answers."""
    found = []
    for i, (id, is_answer) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        if is_answer and (not i or not mask[i - 1]):
            found.append([])
        if is_answer:
            found[-1].append(id)
    return [tok.decode(stretch) for stretch in found]


# --------------------------------------------------------------------------------------------------
# rendering, and what is an answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """By template: a Hugging Face tokenizer that has it, a small BPE."""
    made = {}
    for name, template in TEMPLATES.items():
        made[name] = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_tokens_that_transformers_gives_it(name, folders):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    path = str(folders[name] / "tokenizer.json")
    tok = open_tokenizer(path)
    cfg = Data(format="chat", tokenizer=path, chat_may_drop=MAY_DROP)
    described = formats.describe(cfg, tok)
    ours = formats.build(json.loads(json.dumps(described)), tok)
    end = "<|endoftext|>" if name in ("plain", "strict") else "<|im_end|>"
    assert tok.special_tokens[tok.special_ids.index(ours.end_of_turn())] == end
    for talk in TALKS:
        messages = talk["messages"]
        for prompt in False, True:
            text = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            [found] = ours.results([(ours.conversation(talk), prompt)])
            assert re.sub(f"[{BEGIN}{END}]", "", found) == text
        marked = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        made = ours.encode(talk)
        assert made.ids.tolist() == marked["input_ids"]
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert ours.prompt(messages[:-1]).tolist() == asked
        assert tok.decode(made.ids).startswith(tok.decode(asked))
        # they find the first token alone of a character of several, where an answer ends in one
        if ours.marks_answers and made.text.isascii():
            assert made.answers.astype(int).tolist() == marked["assistant_masks"]


def test_answers_are_what_the_assistant_said_and_its_end_token(folders):
    """By blocks and by difference, to the character, or to the token that begins with a character of
    the template. Whitespace that a template puts after the end token is no answer."""
    tok = open_tokenizer(str(folders["chatml"] / "tokenizer.json"))
    wanted = {
        "plain": " {}<|endoftext|>",
        "chatml": "{}<|im_end|>",
        "without blocks": "{}<|im_end|>",
        "strict": "{}<|endoftext|>",
    }
    for name, form in wanted.items():
        made_of = as_chat(name, tok)
        for talk in TALKS:
            made = made_of.encode(talk)
            expected = []
            for message in talk["messages"]:
                if message["role"] == "assistant":
                    content = message["content"]
                    if name == "without blocks":
                        content = content.strip()
                    expected.append(form.format(content))
            if name == "chatml":  # the line break before the answer is in the same token
                expected = ["\n" * text.startswith("\n") + text for text in expected]
            assert parts(tok, made.ids, made.answers) == expected
    # without any end token the whole rest is an answer, also after a special token inside it
    bare = chat.Chat(
        tok, chat.Template("{% for m in messages %}{{ m.content }};{% endfor %}", {}, [])
    )
    made = bare.encode(said("q", "a<|begin|>b"))
    assert parts(tok, made.ids, made.answers) == ["a<|begin|>b;"]


def test_a_prompt_has_the_tokens_that_it_has_without_its_completion(folders):
    """A token across the border would be half an answer; and a model is asked with the prompt alone."""
    tok = open_tokenizer(str(folders["chatml"] / "tokenizer.json"))
    text = "the answer of the question"
    crossed = 0
    for border in range(1, len(text)):
        prompt, completion = text[:border], text[border:]
        asked, answer = (tok.encode_with_bytes(part)[0].tolist() for part in (prompt, completion))
        made = answers.Completions(tok, False, True).encode(
            {"prompt": prompt, "completion": completion}
        )
        assert made.ids.tolist() == [*asked, *answer, tok.eot_id]
        crossed += tok.encode_with_bytes(text)[0].tolist() != [*asked, *answer]
    assert crossed, "the negative control: encoded together, a token would cross some border"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% include 'secrets' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template):
    form = chat.Chat(byte_tokenizer(), chat.Template(template, {}, []))
    with pytest.raises(answers.InvalidExample, match="cannot be rendered by its template"):
        form.encode(said("q", "a"))
    twice = said("q")["messages"] + said("q", "a")["messages"]
    with pytest.raises(answers.InvalidExample, match="cannot be rendered.*roles must take turns"):
        as_chat("strict").encode({"messages": twice})


# --------------------------------------------------------------------------------------------------
# what cannot be used


BAD = {  # line: what is said of it
    '{"messages": [': "is not JSON",
    "[1]": "is not a JSON object",
    '{"messages": "hi"}': "no list of messages",
    '{"conversations": []}': "no list of messages",
    '{"messages": ["hi"]}': "message \\(1\\) that is not an object",
    '{"messages": [{"role": "user", "content": null}]}': "without a role and a content",
    json.dumps(said("q")): "has no answer",
    json.dumps(said("q", " \n")): "has an empty answer \\(message 2\\)",
    json.dumps(said("q<|endoftext|>", "a")): "special token <.endoftext.> in a message",
    json.dumps(said("q", "a") | {"tools": [{"name": "f"}]}): 'has "tools"',
    '{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}': "tool_calls",
    '{"messages": [{"role": "user", "content": "q\\ud800"}, {"role": "assistant", '
    '"content": "a"}]}': "is not JSON of text",
}
BAD_COMPLETIONS = {
    '{"prompt": "q"}': "no text under",
    '{"prompt": "q", "completion": ""}': "empty completion",
    '{"prompt": "", "completion": "a"}': "empty prompt",
}


@pytest.mark.parametrize("format, bad", [("chat", BAD), ("completion", BAD_COMPLETIONS)])
def test_a_line_that_cannot_be_used_is_counted_and_named(format, bad, tmp_path):
    good = said("q", "a") | {"prompt": "q", "completion": "a"}
    options = {"format": format, "chat_template": "plain" if format == "chat" else ""}
    for i, (line, sentence) in enumerate(bad.items()):
        source = write(tmp_path / f"{i}.jsonl", [good, good, line])
        with pytest.raises(InputError, match=f"{source}, line 3 .*{sentence}"):
            quietly(data(source, **options))
    lines = [good, *bad, b"\xff".decode("latin-1")]
    source = write(tmp_path / "all.jsonl", lines)
    source.write_bytes(source.read_bytes().replace("\xff".encode(), b"\xff"))
    made = quietly(data(source, skip_failed=len(bad) + 1, **options))
    report = read_manifest(made.folder)["report"]
    assert (report["kept"], report["failed"]) == (1, len(bad) + 1)
    lines = sorted(int(re.match(r"all\.jsonl:(\d+) ", line)[1]) for line in report["failures"])
    assert lines == list(range(2, len(bad) + 3))
    with pytest.raises(InputError, match=f"more than {len(bad)} documents cannot be read"):
        quietly(data(source, skip_failed=len(bad), cache=str(tmp_path / "other"), **options))


def test_a_template_that_changes_what_was_said_is_refused_by_line(tmp_path):
    """Its answers cannot be found by difference."""
    source = write(tmp_path / "talks.jsonl", [TALKS[0], TALKS[1]])
    template = tmp_path / "last.jinja"
    template.write_text("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}")
    with pytest.raises(
        InputError, match=r"line 1 has an answer \(message 2\) .*another way.*generation"
    ):
        quietly(data(source, chat_template=str(template)))
    template.write_text("{% generation %}{% endgeneration %}{{ messages[0].content }}")
    with pytest.raises(InputError, match="line 1 has 1 answers, of which its template marks 0"):
        quietly(data(source, chat_template=str(template)))


def test_a_conversation_longer_than_a_window_is_named_and_never_cut(tmp_path):
    rows = [*conversations(20), said("long", "y" * 200), said("q" * 300, "short")]
    source = write(tmp_path / "talks.jsonl", rows)
    made = quietly(data(source))
    said_of = []
    with pytest.raises(InputError) as refused:
        too_long.check("chat", made.train, T, 1, said_of.append)
    assert "2 conversations of the train split" in str(refused.value)
    assert "talks.jsonl:21 has 223 tokens (202 of answers), a window 97" in str(refused.value)
    assert "talks.jsonl:22 has " in str(refused.value) and "skip_failed = 2" in str(refused.value)
    assert len(too_long.check("chat", made.train, T, 2, said_of.append)) == 2
    assert "talks.jsonl:21" in said_of[0] and "% full" in said_of[1]
    with pytest.raises(InputError, match="no conversation of the train split fits"):
        too_long.check("chat", made.train, 5, 99, said_of.append)
    split = DocumentIndex(made.train)
    seen = {
        number
        for first, stop in made.train.windows(T)
        for number in split.between(first, stop).tolist()
    }
    assert seen == set(range(20))


def test_what_cannot_be_opened_is_a_sentence(tmp_path, folders):
    source = write(tmp_path / "talks.jsonl", TALKS)
    for sentence, options in {
        "needs a tokenizer that is there already": {"tokenizer": "bpe"},
        "has no chat template: name one of plain, chatml": {"chat_template": ""},
        'needs the special token <.im_start.>.*use "plain"': {"chat_template": "chatml"},
        "nowhere.jinja cannot be read": {"chat_template": "nowhere.jinja"},
        "no effect": {"add_bos": True},
        "JSON records": {"source": "stdlib"},
        "JSON records .* not hf:some/chat: export .*to_json": {"source": "hf:some/chat"},
        "all its conversations are the same": {"validation_fraction": 0.1},
    }.items():
        lines = write(tmp_path / "one.jsonl", [TALKS[0]]) if "same" in sentence else source
        with pytest.raises(InputError, match=sentence):
            quietly(data(lines).model_copy(update=options))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    with pytest.raises(InputError, match="not valid Jinja"):
        quietly(data(source, chat_template=str(broken)))
    made = quietly(data(source))
    text = quietly(Data(source="README.md", tokenizer="bytes", cache=str(tmp_path / "cache")))
    with pytest.raises(InputError, match="prepared as chat.*keeps its format"):
        quietly(Data(source=made.folder, format="completion"))
    with pytest.raises(InputError, match="prepared as text"):
        quietly(Data(source=text.folder, format="chat"))
    assert quietly(Data(source=made.folder)).format == "chat"
    cfg = Config.model_validate({"data": {"source": made.folder}})
    assert any("mask_documents = true" in line for line in inputs.problems(cfg, 300))
    # before anything is launched, as seen from one machine
    plain = {"source": str(source), "format": "chat", "mask_documents": True}
    cfg = Config.model_validate({"data": plain | {"tokenizer": "bytes"}})
    assert any("has no chat template" in line for line in inputs.problems(cfg, 300))


# --------------------------------------------------------------------------------------------------
# prepared folders


def test_answers_are_stored_with_the_tokens_and_checked_with_them(tmp_path, monkeypatch):
    """On any number of processes and parts; text is prepared as ever."""
    rows = conversations(60)
    source = write(tmp_path / "talks.jsonl", rows)
    cfg = data(source, validation_fraction=0.2)
    made = quietly(cfg)
    monkeypatch.setattr("data.prepare.job.PART_BYTES", 900)
    parts_of = prepare(
        cfg.model_copy(update={"cache": str(tmp_path / "parts")}), log=lambda _: None, workers=2
    )
    assert len(parts_of.train.shards) > 3
    form = as_chat()
    for corpus in made, parts_of:
        assert corpus.fingerprint == made.fingerprint or corpus is parts_of
        found = 0
        for split in corpus.train, corpus.validation:
            documents = DocumentIndex(split)
            for number in range(len(documents)):
                line = int(documents.name(number).split(":")[1])
                start, stop = documents.extent(number)
                expected = form.encode(rows[line - 1])
                assert split.read(start, stop).tolist() == expected.ids.tolist()
                assert split.are_answers(start, stop).tolist() == expected.answers.tolist()
                found += 1
        assert found == len(rows) and len(corpus.validation)
        assert verify(corpus.folder).fingerprint == corpus.fingerprint
    assert {made.format, read_manifest(made.folder)["format"]} == {"chat", 3}
    # other answers in the same tokens are another corpus
    other = tmp_path / "other.jinja"
    other.write_text(
        chat.PLAIN.replace(
            "{{ ' ' + message['content'] + eos", "{{ ' ' + message['content'] }}{{ eos"
        )
    )
    assert quietly(data(source, chat_template=str(other))).folder != made.folder
    table = Path(made.folder, "train.answers")
    content = table.read_bytes()
    table.write_bytes(content[:-8])
    with pytest.raises(InputError, match="train.answers has .* bytes instead of"):
        open_prepared(made.folder)
    table.write_bytes(content[:-1] + b"\1")
    with pytest.raises(InputError, match="train.answers is not what was written"):
        verify(made.folder)
    text = quietly(Data(source="README.md", tokenizer="bytes", cache=str(tmp_path / "cache")))
    assert read_manifest(text.folder)["format"] == 2 and text.format == "text"


def test_windows_hold_as_many_whole_documents_as_fit():
    rng = random.Random(3)
    for _ in range(50):
        lengths = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 30))]
        room = rng.randrange(1, 50)
        starts = np.cumsum([0, *lengths[:-1]])
        windows, dropped = packing.pack(starts, sum(lengths), room)
        assert dropped.tolist() == [i for i, size in enumerate(lengths) if size > room]
        inside = []
        borders = [*starts.tolist(), sum(lengths)]
        for first, stop in windows.tolist():
            assert 0 < stop - first <= room
            inside += [i for i in range(len(lengths)) if first <= borders[i] < stop]
            after = borders.index(stop)
            fits = after < len(lengths) and stop - first + lengths[after] <= room
            assert first in borders and not fits
        assert inside == [i for i, size in enumerate(lengths) if size <= room]


# --------------------------------------------------------------------------------------------------
# batches


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("talks")
    return quietly(data(write(folder / "talks.jsonl", conversations(70))))


def order_of(corpora: list[Prepared], G: int = 6):
    sources = [(str(i), c.fingerprint, c.train, [[0, 1.0]]) for i, c in enumerate(corpora)]
    return splice.begin(splice.describe(sources, 5, T, G))


def read(corpus: Prepared) -> list[dict]:
    """Return the rows of the first epoch."""
    count = len(corpus.train.windows(T))
    rows = Batches([corpus.train], order_of([corpus], 1), 1, 0, 1, True)
    return [rows[step] for step in range(count)]


def assert_exact(corpus: Prepared, rows: list[dict]) -> None:
    """Every conversation of the file is in one row, whole, and every token of its answers, and
    nothing else, is a label once, predicted from the tokens before it in its conversation."""
    form = as_chat()
    expected = Counter()
    for talk in conversations(70):
        made = form.encode(talk)
        ids = made.ids.tolist()
        for i in np.flatnonzero(made.answers).tolist():
            expected[tuple(ids[:i]), ids[i]] += 1
    found = Counter()
    for batch in rows:
        tokens, labels, positions = (
            batch[key].flatten().tolist() for key in ("tokens", "labels", "positions")
        )
        for i, label in enumerate(labels):
            if label != IGNORE:
                found[tuple(tokens[i - positions[i] : i + 1]), label] += 1
    assert found == expected


def test_every_answer_is_a_label_once_an_epoch_and_nothing_else_is(corpus):
    assert_exact(corpus, read(corpus))


def loss_on_the_prompt(patch) -> None:
    patch.setattr(packing, "mask_non_answers", lambda *_: None)


def end_token_left_out(patch) -> None:
    real = PackedTokens.are_answers

    def are_answers(self, start, stop):
        mask = real(self, start, stop)
        return mask & np.append(mask[1:], False)

    patch.setattr(PackedTokens, "are_answers", are_answers)


def answers_cut(patch) -> None:
    real = PackedTokens.windows

    def windows(self, seq_len):
        return np.minimum(real(self, seq_len), real(self, seq_len)[:, :1] + seq_len // 2)

    patch.setattr(PackedTokens, "windows", windows)


def one_document(patch) -> None:
    patch.setattr("data.loader.document_begins", lambda *given: np.zeros((1, given[-1]), bool))


@pytest.mark.parametrize("bug", [loss_on_the_prompt, end_token_left_out, answers_cut, one_document])
def test_a_wrong_mask_would_be_caught(bug, corpus, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        assert_exact(corpus, read(corpus))


def test_batches_are_the_same_for_any_ranks_parts_of_a_sequence_and_workers(corpus):
    order = order_of([corpus])
    one = Batches([corpus.train], order, 6, 0, 1, True)
    halves = [[range(24), range(72, 96)], [range(24, 72)]]
    for step in 0, 3, 11:
        whole_batch = one[step]
        rows = [Batches([corpus.train], order, 1, rank, 3, True)[step] for rank in range(3)]
        for key, value in whole_batch.items():
            joined = torch.cat([batch[key].flatten() for batch in rows])
            assert joined.equal(value.flatten())
        for places in halves:
            own = torch.cat([torch.arange(part.start, part.stop) for part in places])
            part = Batches([corpus.train], order, 6, 0, 1, True, token_ranges=places)[step]
            for key in "tokens", "labels":
                assert part[key].equal(whole_batch[key][..., own])
    by_workers = list(loader(one, 2, 6, Data(workers=2)))
    for step, batch in enumerate(by_workers, 2):
        assert all(batch[key].equal(value) for key, value in one[step].items())


def test_text_and_conversations_mix_when_both_are_prepared(corpus, tmp_path):
    (tmp_path / "text.txt").write_text("word " * 800)
    text = quietly(
        Data(
            source=str(tmp_path / "text.txt"),
            tokenizer="bytes",
            cache=str(tmp_path),
            validation_fraction=0,
        )
    )
    batches = Batches([corpus.train, text.train], order_of([corpus, text], 24), 24, 0, 1, True)
    batch = batches[0]
    labels = batch["labels"][0]
    for row, source in enumerate(batch["source"].tolist()):
        counted = (labels[row] != IGNORE).sum().item()
        assert counted == T if source else 0 < counted < T
    assert set(batch["source"].tolist()) == {0, 1}


# --------------------------------------------------------------------------------------------------
# runs


def options_of(folder: Path) -> list[str]:
    write(folder / "talks.jsonl", conversations(70))
    return [
        *tiny_run(folder),
        f"--data.source={folder / 'talks.jsonl'}",
        "--data.format=chat",
        "--data.chat_template=plain",
        "--data.mask_documents=true",
        "--data.validation_fraction=0.2",
        f"--training.seq_len={T}",
        "--training.steps=6",
        "--validation.interval=3",
        "--checkpoint.interval=2",
    ]


def first_loss(options: list[str]) -> float:
    """Return the loss of the first step of a run."""
    cfg = load_config(options)
    corpora = open_corpora(cfg, lambda _: None)
    job = train.build(cfg)
    [batch] = corpora.batches(corpora.order({}), range(1), job.mesh, job.args.vocab_size)
    return train.train_step(job, batch).loss


def alone(options: list[str]) -> float:
    """Return the first step's loss: the plain model on each conversation by itself, over the
    answers' tokens of the whole batch."""
    cfg = load_config(options)
    corpora = open_corpora(cfg, lambda _: None)
    job = train.build(cfg)
    split = corpora.sources[""].train
    documents = DocumentIndex(split)
    form = as_chat()
    lines = conversations(70)
    _, windows, _ = corpora.order({}).rows(0, 0, cfg.training.global_batch_size)
    total, counted = 0.0, 0
    for window in windows.tolist():
        first, stop = split.windows(T)[window].tolist()
        for number in documents.between(first, stop).tolist():
            line = int(documents.name(number).split(":")[1])
            made = form.encode(lines[line - 1])
            ids = torch.from_numpy(made.ids.astype(np.int64))
            places = torch.arange(len(ids) - 1)
            with torch.no_grad():
                logits = job.model(ids[None, :-1], places, lambda h, weight: h @ weight.t())
            losses = F.cross_entropy(logits[0].float(), ids[1:], reduction="none")
            total += losses[torch.from_numpy(made.answers[1:])].sum().item()
            counted += int(made.answers[1:].sum())
    return total / counted


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return options_of(tmp_path_factory.mktemp("run"))


def test_the_loss_is_the_mean_over_the_answers_of_the_global_batch(options):
    """Ranks with other numbers of labels, or none: tests/test_parallel.py, tests/test_uneven.py."""
    expected = run_ranks(1, alone, options)[0]
    assert run_ranks(1, first_loss, options)[0] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_stops_goes_on_bitwise_and_tells_what_it_saw(options, tmp_path, capsys):
    options = [*options, "--lr_schedule.kind=constant"]
    code, _ = run_ranks(1, run, options, tmp_path / "whole")[0]
    assert code == 0
    _, seen = trained(tmp_path / "whole", 1)
    folder = tmp_path / "parts"
    first = [*options, "--training.steps=4"]
    assert run_ranks(1, run, first, folder)[0][0] == 0
    assert trained(folder, 1) == (0, seen[:4])
    assert run_ranks(1, run, options, folder)[0][0] == 0
    assert trained(folder, 1) == (4, seen[4:])
    assert series(folder, "loss") == series(tmp_path / "whole", "loss")
    assert series(tmp_path / "whole", "validation_loss").keys() == {3, 6}

    audited = audit.open_run(str(folder))
    assert audited.mask_documents and not audit.prove(audited.order, audited.done)
    entry = next(audit.seen(audited, 2, 2))
    shown = show.row(audited, 2, 0)
    assert sorted(shown["names"].values()) == sorted(d["name"] for d in entry["documents"])
    assert len(shown["tokens"]) + shown["padding"] == T + 1
    lines = conversations(70)
    assert audit.main([str(folder), "--show", "2:0"]) == 0
    text = capsys.readouterr().out
    expected = []
    for document in entry["documents"]:
        talk = lines[int(document["name"].split(":")[1]) - 1]
        expected += [m["content"] for m in talk["messages"] if m["role"] == "assistant"]
    found = re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)
    assert found == [f" {content}<|endoftext|>" for content in expected]
    assert audit.main([str(folder), "--show", "2:0", "--color", "always"]) == 0
    assert re.findall("\033\\[32m(.*?)\033\\[0m", capsys.readouterr().out, re.DOTALL) == found
    number = entry["documents"][0]["number"]
    rows = audit.occurrences(audited, audited.order.last.sources[0], number)
    assert {"step": 2, "row": 0, "epoch": 0, "window": entry["window"]} in rows
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert audit.main([str(folder), "--show", "2:99"]) == 2
    assert "rows 0 to 7" in errors.getvalue()


def test_the_file_that_ships_has_one_form_of_answer(tmp_path):
    lines = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    assert 100 <= len(lines) <= 300
    questions = [line["messages"][0]["content"] for line in lines]
    assert len(set(questions)) == len(lines)
    for line in lines:
        for message in line["messages"][1::2]:
            assert re.fullmatch(r"Use: \S+\nWhy: [^\n]+\.", message["content"])
    made = quietly(data(SHIPPED, cache=str(tmp_path), validation_fraction=0.05))
    assert len(made.validation) and too_long.check("", made.train, 256, 0, lambda _: None) == []
