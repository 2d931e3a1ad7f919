"""A model that was trained on conversations is prompted in the format of its training, and its
exports carry the template: transformers renders with them what training has seen.

The oracle of tokens is transformers' `apply_chat_template`.
"""

import json
import shutil
from pathlib import Path

import pytest

from configs.schema import Data
from data import chat, formats, hf_tokenizer, turns
from data.answers import InvalidExample
from data.tokenizer import byte_tokenizer
from tests.conversations import (
    MAY_DROP,
    TALKS,
    TEMPLATES,
    said,
    small_tokenizer,
    write,
    write_tokenizer,
)
from tests.ranks import run_ranks
from tests.runs import run, tiny_run
from tools import convert, generate

# It asks for the day, and for a token that not every tokenizer has.
DATED = (
    "  {% if true %}\n{% endif %}"
    "{{ bos_token }}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}then"
    "{% endif %};"
) + chat.CHATML


def theirs(folder: Path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


# --------------------------------------------------------------------------------------------------
# prompts, and where an answer ends (the tokens of prompts: tests/test_chat.py)


def test_a_template_that_ends_no_answer_by_a_token_has_no_end_of_turn():
    tok = byte_tokenizer()
    bare = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert chat.Chat(tok, chat.Template(bare, {}, [])).end_of_turn() is None
    moving = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"
    assert chat.Chat(tok, chat.Template(moving, {}, [])).end_of_turn() is None


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "no list of messages"),
        (said("q", "a")["messages"], "ends with an answer"),
        (said("<|im_end|>")["messages"], "special token"),
        ([{"role": "user"}], "without a role and a content"),
    ],
)
def test_messages_that_cannot_be_asked_are_refused(messages, words):
    tok = small_tokenizer()
    asked = chat.Chat(tok, chat.Template(chat.CHATML, {}, tok.special_tokens))
    with pytest.raises(InvalidExample, match=words):
        asked.prompt(messages)


# --------------------------------------------------------------------------------------------------
# files for transformers


@pytest.mark.parametrize("name", [*TEMPLATES, "dated"])
@pytest.mark.parametrize("tok", [small_tokenizer(), byte_tokenizer()], ids=["bpe", "bytes"])
def test_files_render_a_conversation_as_training_did(name, tok, tmp_path):
    template = tmp_path / "a.jinja"
    template.write_text((TEMPLATES | {"dated": DATED})[name])
    saved = tmp_path / "tokenizer.json"
    tok.save(str(saved))
    options = {
        "format": "chat",
        "tokenizer": str(saved),
        "chat_template": str(template),
        "chat_may_drop": MAY_DROP,
    }
    described = formats.describe(Data(**options), tok)
    (tmp_path / "data.json").write_text(json.dumps({"chat": described}))
    out = tmp_path / "out"
    out.mkdir()
    for file, content in turns.files(tmp_path, tok, 4096).items():
        (out / file).write_text(json.dumps(content))
    reference, trained = theirs(out), formats.build(described, tok)
    for talk in TALKS:
        wanted = trained.encode(talk).ids.tolist()
        assert reference.apply_chat_template(talk["messages"])["input_ids"] == wanted
    assert hf_tokenizer.read(out).fingerprint == tok.fingerprint
    generation = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    ends = generation if isinstance(generation, list) else [generation]
    assert tok.eot_id in ends and (trained.end_of_turn() or tok.eot_id) in ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "of, name, without",
    [(turns, "for_transformers", str), (chat, "NAMES", ())],
    ids=["day", "token"],
)
def test_negative_control_what_training_did_not_have(of, name, without, tmp_path, monkeypatch):
    """Without the changes, transformers renders another text: the year, or a token that begins."""
    monkeypatch.setattr(of, name, without)
    with pytest.raises(AssertionError):
        test_files_render_a_conversation_as_training_did("dated", byte_tokenizer(), tmp_path)


# --------------------------------------------------------------------------------------------------
# runs

QUESTION, ANSWER = "Say hi", "hi to you"
LORA = ["--lora.rank=4", "--lora.alpha=8", '--lora.targets=["wq", "wo"]']


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Train the runs of this file. "run": it has learnt two answers by heart, with its own
    template; "adapters": on its checkpoint; "hf": its export, with the template of its tokenizer;
    "of hf": adapters on that. "text": has seen no conversation."""
    place = tmp_path_factory.mktemp("runs")
    (place / "tokenizer").mkdir()
    tokenizer = write_tokenizer(place / "tokenizer", TEMPLATES["without blocks"])
    (place / "dated.jinja").write_text(DATED)
    lines = [said(QUESTION, ANSWER), said("Say no", "no, and no")] * 8
    small = [
        *tiny_run(place),
        "--model.vocab_size=266",
        f"--data.tokenizer={tokenizer / 'tokenizer.json'}",
        "--training.seq_len=64",
        "--training.global_batch_size=4",
        "--data.validation_fraction=0",
    ]
    talks = [
        *small,
        f"--data.source={write(place / 'talks.jsonl', lines)}",
        "--data.format=chat",
        "--data.mask_documents=true",
    ]
    dated = [*talks, f"--data.chat_template={place / 'dated.jinja'}"]
    base = [*dated, "--training.steps=60", "--checkpoint.interval=60"]
    short = ["--training.steps=2", "--lr_schedule.warmup_steps=0"]
    hf = place / "run" / "hf" / "step-00000060"
    for name, options in {
        "run": [*base, "--checkpoint.export_hf=float32"],
        "adapters": [*dated, *LORA, *short, f"--checkpoint.load_path={place / 'run'}"],
        "of hf": [*talks, *LORA, *short, f"--checkpoint.load_hf={hf}"],
        "text": [*small, *short],
    }.items():
        (place / name).mkdir()
        assert run_ranks(1, run, options, place / name) == [(0, "")]
    return {"hf": hf} | {name: place / name for name in ("run", "adapters", "of hf", "text")}


def asked(*arguments: str) -> int:
    return generate.main([*arguments, "--temperature", "0"])


def test_a_question_is_answered_up_to_the_end_of_the_turn(runs, capsys):
    assert asked(str(runs["run"]), "--chat", QUESTION) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n"
    # the same after other turns, from the export, and by a named template
    messages = json.dumps(said(QUESTION)["messages"])
    for folder, more in (
        (runs["run"], []),
        (runs["run"] / "checkpoints" / "step-00000060", []),
        (runs["hf"], []),
        (runs["adapters"], []),
        (runs["run"], ["--chat-template", str(runs["run"].parent / "dated.jinja")]),
    ):
        assert asked(str(folder), "--chat", messages, "--chat", "Say no", *more) == 0
        assert capsys.readouterr().out == (
            f"--- prompt 1 of 2 ---\n{ANSWER}\n\n--- prompt 2 of 2 ---\nno, and no\n"
        )


@pytest.mark.slow
def test_negative_control_a_model_that_is_asked_in_another_way(runs, capsys, monkeypatch):
    """By another template it answers something else, and without the end of a turn it goes on."""
    assert asked(str(runs["run"]), "--chat", QUESTION, "--chat-template", "plain") == 0
    assert capsys.readouterr().out != f"{ANSWER}\n"
    monkeypatch.setattr(chat.Chat, "end_of_turn", lambda self: None)
    assert asked(str(runs["run"]), "--chat", QUESTION, "--tokens", "30") == 0
    assert capsys.readouterr().out.startswith(f"{ANSWER}<|im_end|>")


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("text", ["--chat", "q"], "has no chat template: it was not trained on conversations"),
        ("run", ["--chat", "q", "--prompt", "p"], "give one of them"),
        ("run", ["--chat-template", "plain"], "give --chat too"),
        ("run", ["--chat", "[1"], "is not JSON"),
        ("run", ["--chat", '[{"role": "user"}]'], "conversation 1 has a message (1) without"),
        ("run", ["--chat", "q<|im_end|>"], "conversation 1 has the special token <|im_end|>"),
        (
            "run",
            ["--chat", "q", "--chat-template", "nowhere.jinja"],
            "nowhere.jinja cannot be read",
        ),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(name, arguments, words, runs, capsys):
    assert asked(str(runs[name]), *arguments) == 2
    said_of = capsys.readouterr().err
    assert words in said_of and said_of.count("\n") == 1


def test_a_damaged_record_is_named(runs, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(runs["run"], copy)
    for content in "{", '{"chat": {"format": "chat"}}', "[]":
        (copy / "data.json").write_text(content)
        assert asked(str(copy), "--chat", "q") == 2
        assert f"{copy / 'data.json'} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, name",
    [
        ("", "run"),
        ("to-hf", "run"),
        ("lora-merge", "adapters"),
        ("lora-merge", "of hf"),
        ("lora-to-peft", "adapters"),
    ],
)
def test_every_export_renders_a_conversation_as_training_did(command, name, runs, tmp_path):
    """Adapters keep the template that they were trained with, also where their base has a different
    one."""
    out = runs["hf"]
    if command:
        out = tmp_path / "out"
        assert convert.main([command, str(runs[name]), str(out)]) == 0
    trained = turns.of_run(runs[name], small_tokenizer())
    source = DATED if name != "of hf" else TEMPLATES["without blocks"]
    assert trained.template.source == source
    reference = theirs(out)
    for talk in TALKS:
        seen = reference.apply_chat_template(talk["messages"])["input_ids"]
        assert seen == trained.encode(talk).ids.tolist()
    if command == "lora-to-peft":
        assert not (out / "generation_config.json").exists()
    else:
        generation = json.loads((out / "generation_config.json").read_text())
        assert trained.end_of_turn() in generation["eos_token_id"]
