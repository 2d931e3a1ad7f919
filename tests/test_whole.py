"""Conversations lose nothing: fields that a template leaves out are named, its inputs are those
that transformers gives it, and every error in it ends in one sentence."""

import json
import sys
import threading

import pytest

from configs.schema import Config, Data, InputError
from data import chat, formats, rendering, whole
from data.answers import Example, InvalidExample, example
from data.open import open_corpora
from data.open_tokenizer import open_tokenizer
from data.prepare import __main__ as command
from data.tokenizer import byte_tokenizer
from tests.conversations import said, write
from tests.published import published

EACH = "{% for m in messages %}"
BODY = "{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
ASK = "{% if add_generation_prompt %}assistant: {% endif %}"
FAITHFUL = EACH + BODY + ASK
THINKING = "<think>two and two</think>4"


def template(source: str, *may_drop: str) -> chat.Template:
    return chat.Template(source, {"eos_token": "<|endoftext|>"}, [], list(may_drop))


def form(source: str, *may_drop: str) -> chat.Chat:
    return chat.Chat(byte_tokenizer(), template(source, *may_drop))


def with_keys(message: int, **keys: object) -> dict:
    talk = said("2+2?", "4", system="Answer in French.")
    talk["messages"][message] |= keys
    return talk


# --------------------------------------------------------------------------------------------------
# what a template leaves out

STRIPS = (
    "{% set c = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
    "{{ m.role }}: {{ c }}{{ eos_token }}\n{% endfor %}"
)
LOSES = {  # name: template, line, what is named, data.chat_may_drop that allows it
    "name": (FAITHFUL, with_keys(1, name="Ann"), '"name" in message 2 ("Ann")', "name"),
    "reasoning": (
        FAITHFUL,
        with_keys(2, reasoning_content="two and two"),
        '"reasoning_content" in message 3',
        "reasoning_content",
    ),
    "think": (EACH + STRIPS + ASK, said("2+2?", THINKING), "<think> in message 2", "think"),
    "system": (
        EACH + "{% if m.role == 'system' %}{% continue %}{% endif %}" + BODY + ASK,
        with_keys(1),
        'the text of role system in message 1 ("Answer in French.")',
        "system",
    ),
    "cut": (
        FAITHFUL.replace("m.content", "m.content[:3]"),
        said("2+2?", "yes"),
        "the text of role user in message 1",
        "user",
    ),
    "a turn": (
        EACH + "{% if loop.first %}{% continue %}{% endif %}" + BODY + ASK,
        said("ok", "yes", "ok", "yes"),
        "the text of role user in message ",
        "user",
    ),
    # what its text has by chance ("a" of "assistant") is not there
    "by chance": (
        EACH + "{{ m.role }}: {% if m.role != 'user' %}{{ m.content }}{% endif %};{% endfor %}",
        said("a", "b"),
        'the text of role user in message 1 ("a")',
        "user",
    ),
    "changed": (
        FAITHFUL.replace("m.content", "m.content | upper"),
        said("2+2", "four"),
        "the text of role assistant in message 2",
        "assistant",
    ),
    "a tool": (FAITHFUL, with_keys(1) | {"tools": [{"name": "f"}]}, '"tools" ("f")', "tools"),
    "a call": (
        FAITHFUL,
        with_keys(2, tool_calls=[{"function": {"name": "add", "arguments": {"a": "x"}}}]),
        '"tool_calls" in message 3 ("add")',
        "tool_calls",
    ),
    "a variable": (
        FAITHFUL,
        with_keys(1) | {"chat_template_kwargs": {"enable_thinking": True}},
        '"enable_thinking" in "chat_template_kwargs", which its template does not read',
        "chat_template_kwargs",
    ),
    "beside": (FAITHFUL, said("q", "a") | {"system": "Be kind."}, '"system" outside', "system"),
    "pictures": (FAITHFUL, said("q", "a") | {"images": ["a.png"]}, '"images" outside', "images"),
    "weight": (FAITHFUL, with_keys(2, train=False), '"train" in a message (3)', "train"),
}


@pytest.mark.parametrize("name", LOSES)
def test_what_a_template_leaves_out_is_named_and_can_be_allowed(name):
    source, line, words, key = LOSES[name]
    with pytest.raises(InvalidExample) as refused:
        form(source).encode(line)
    assert words in str(refused.value) and f'data.chat_may_drop = ["{key}"]' in str(refused.value)
    allowed = form(source, key)
    assert isinstance(allowed.encode(line), Example)
    # nothing else is allowed by it
    with pytest.raises(InvalidExample):
        allowed.encode(LOSES["name" if key != "name" else "weight"][1])


@pytest.mark.slow
def test_negative_control_a_search_without_marks_finds_by_chance(monkeypatch):
    source, line, *_ = LOSES["by chance"]
    real = whole.missing
    monkeypatch.setattr(whole, "missing", lambda parts, text, _: real(parts, text, ""))
    assert isinstance(form(source).encode(line), Example)


KEEPS = {
    "stripped": (FAITHFUL.replace("m.content", "m.content | trim"), said(" q \n", "\n a")),
    "as json": (FAITHFUL.replace("m.content", "m.content | tojson"), said('"q"\n', "ä\\")),
    "the same twice": (FAITHFUL, said("yes", "yes", "yes", "yes")),
    "thoughts": (FAITHFUL, said("2+2?", THINKING)),
    # looks at its text, so marks change what it does
    "by its text": (
        FAITHFUL.replace("m.content", "(m.content if m.content | length < 4 else m.content)"),
        said("abc", "abcd"),
    ),
    "by its beginning": (
        EACH + "{% if m.content.startswith('q') %}Q{% endif %}" + BODY + ASK,
        said("q and", "a"),
    ),
    "parts": (
        EACH + "{% for p in m.content %}{{ p.text }};{% endfor %}{{ eos_token }}{% endfor %}",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        },
    ),
    "ShareGPT": (
        FAITHFUL,
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ),
    "described": (FAITHFUL, said("q", "a") | {"id": 7, "source": "web", "score": 0.5}),
    # as OpenAI's answers come, whole
    "nothing in it": (FAITHFUL, with_keys(2, refusal=None, annotations=[], audio={})),
    "the same in both": (
        FAITHFUL,
        said("q", "a")
        | {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ),
    "a copy": (FAITHFUL, said("What?", "a") | {"prompt": "What?"}),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_whole_is_taken(name):
    source, line = KEEPS[name]
    assert isinstance(form(source).encode(line), Example)


@pytest.mark.parametrize(
    "line, words",
    [
        ({"conversations": [{"from": "bing", "value": "q"}]}, "from 'bing', not from human"),
        (with_keys(1, content=[{"type": "image", "url": "u"}]), 'of the type "image"'),
        (said("q", "a") | {"tools": "{}"}, '"tools" that is not a list'),
        (said("q", "a") | {"chat_template_kwargs": [1]}, "are no object"),
        (said("q", "a") | {"chat_template_kwargs": {"messages": []}}, "has already"),
        (said("q", "a") | {"mood": "glad"}, 'put it under "chat_template_kwargs"'),
        (said("q", "a") | {"conversations": said("q", "b")["messages"]}, "has other messages"),
        (with_keys(1, weight=0), '"weight" in a message (2), which is no text'),
        ({"instruction": "q", "output": "a"}, 'under "messages", but "instruction", "output"'),
        (
            {
                "messages": [
                    {"role": "tool", "content": None, "tool_calls": [{}]},
                    *said("q", "a")["messages"],
                ]
            },
            'message 1 has no content: write "" there',
        ),
    ],
)
def test_what_no_template_can_get_is_a_sentence(line, words):
    reads = form(FAITHFUL + "{% if mood is defined %}{{ mood }}{% endif %}")
    with pytest.raises(InvalidExample) as refused:
        reads.encode(line)
    assert words in str(refused.value)


def test_a_content_that_a_template_cannot_take_is_named_with_what_to_write():
    """Templates such as SmolLM2's add the content to a text."""
    reads = form(EACH + "{{ m.role + ': ' + m.content }}{{ eos_token }}\n{% endfor %}" + ASK)
    for content, advice in {
        None: 'message 3 has no content: write "" there',
        "parts": "message 3 has its content in parts, which not every template takes: write it as",
    }.items():
        parts = content and [{"type": "text", "text": "4"}]
        with pytest.raises(InvalidExample, match="cannot be rendered") as refused:
            reads.encode(with_keys(2, content=parts, tool_calls=[{}]))
        assert advice in str(refused.value)


@pytest.mark.parametrize(
    "line, name",
    [
        ('{"messages": [{"role": "user", "content": "lost", "content": "q"}]}', "content"),
        ('{"messages": [], "messages": [{"role": "user", "content": "q"}]}', "messages"),
    ],
)
def test_a_key_that_a_line_has_twice_hides_nothing(line, name):
    assert f'has "{name}" twice in one object' in example(form(FAITHFUL), line)


def test_reasons_are_in_the_report_and_an_option_allows_them(tmp_path, capsys, monkeypatch):
    """Those of one kind are counted together, whatever the messages say."""
    lines = [said("q", "a"), LOSES["name"][1], LOSES["beside"][1], with_keys(2, name="4, (b")]
    source = write(tmp_path / "talks.jsonl", lines)
    told = ["--format", "chat", "--chat-template", "plain", "--tokenizer", "bytes"]
    told += ["--source", str(source), "--validation-fraction", "0", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prepare", *told, "--skip-failed", "3"])
    assert command.main() == 0
    text = capsys.readouterr().out
    assert 'talks.jsonl:2 has "name" in message 2' in text
    assert 'talks.jsonl:3 has "system" outside of its messages' in text
    assert "1 kept, 0 empty, 0 too long, 3 failed" in text
    assert '2 failed: has "name" in message N, which its template leaves out or changes' in text
    monkeypatch.setattr(sys, "argv", ["prepare", *told, "--chat-may-drop", "name", "system"])
    assert command.main() == 0
    assert "4 kept, 0 empty, 0 too long, 0 failed" in capsys.readouterr().out


def test_corpora_keep_their_names_without_the_option():
    """Corpora that were prepared before data.chat_may_drop existed are found in the cache."""
    tok = byte_tokenizer()
    plain = Data(format="chat", chat_template="plain", tokenizer="bytes")
    described = formats.describe(plain, tok)
    assert "may_drop" not in described
    assert formats.build(described, tok).template.may_drop == []
    other = plain.model_copy(update={"chat_may_drop": ("name",)})
    assert formats.build(formats.describe(other, tok), tok).template.may_drop == ["name"]


# --------------------------------------------------------------------------------------------------
# the end of a turn

OUTSIDE = FAITHFUL.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
ENDLESS = FAITHFUL.replace("{{ eos_token }}", "")


@pytest.mark.parametrize(
    "source, words",
    [
        (OUTSIDE, "move <|endoftext|> into the {% generation %} block"),
        (ENDLESS, "let answers end with one, such as <|endoftext|>"),
        (FAITHFUL, ""),
        # it wants a system turn, and ends its answers
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('s') }}{% endif %}" + FAITHFUL,
            "",
        ),
    ],
)
def test_answers_that_do_not_teach_to_stop_are_one_warning(source, words):
    told = form(source).warning()
    assert (words in told and "does not learn to stop" in told) if words else not told


@pytest.mark.slow
def test_the_warning_comes_at_preparation_and_at_the_start(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "talks.jsonl", [said("q", "a"), said("p", "b")])
    (tmp_path / "endless.jinja").write_text(ENDLESS)
    options = {
        "source": str(source),
        "format": "chat",
        "chat_template": str(tmp_path / "endless.jinja"),
        "tokenizer": "bytes",
        "cache": str(tmp_path / "cache"),
        "validation_fraction": 0.0,
    }
    told = []
    for name, value in options.items():
        told += [f"--{name.replace('_', '-')}", str(value)]
    monkeypatch.setattr(sys, "argv", ["prepare", *told])
    assert command.main() == 0
    assert capsys.readouterr().err.count("does not learn to stop") == 1
    lines = []
    text = {"data": options | {"mask_documents": True}, "validation": {"interval": 0}}
    cfg = Config.model_validate(text | {"training": {"seq_len": 64}})
    open_corpora(cfg, lines.append)
    assert sum("does not learn to stop" in line for line in lines) == 1


# --------------------------------------------------------------------------------------------------
# templates that do harm

NESTED = "{% if true %}" * 3000 + "x" + "{% endif %}" * 3000
LOOPS = "".join(f"{{% for a{i} in [1] %}}" for i in range(40)) + "{% endfor %}" * 40
LONG = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    "source, words",
    [
        (NESTED, "too deeply"),
        (LOOPS, "too many statically nested blocks"),
        ("{% for", "not valid Jinja"),
        ("{{ 'x' | random }}", "random"),
        ("{{ 9 ** (9 ** 9) }}", "processor time"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_a_sentence(source, words, short_of_time):
    with pytest.raises(InputError) as refused:
        form(source)
    assert words in str(refused.value) and "\n" not in str(refused.value)


HARMS = {
    LONG: "more than 1 s of processor time",
    "{{ (messages | length + 7) ** (9 ** 9) }}": "processor time",
    "{{ 'x' * 9999999999 }}": "memory",
    "{% for i in range(10 ** 9) %}{% endfor %}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "too deeply",
    "{% macro f(n) %}{{ f(n + 1) if n < 60 }}{{ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}": "time",
    "{{ messages[0].role * 10 ** 9 }}": "memory",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}": (
        "memory"
    ),
    "{{ messages[0].role.center(10 ** 10) }}": "memory",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ messages | map('trim') }}": "prints a generator, which is no text",
    "{{ joiner() ~ '' }}{{ cycler }}": "prints a type",
    "{{ strftime_now('%Y') }}": "'strftime_now' is undefined",
}


@pytest.mark.parametrize("source", HARMS)
def test_a_template_that_does_harm_is_a_sentence(source, request):
    if "time" in HARMS[source]:  # others may need more of a busy processor's
        request.getfixturevalue("short_of_time")
    with pytest.raises(InvalidExample) as refused:
        form(source).encode(said("q", "a"))
    words = str(refused.value)
    assert words.startswith("cannot be rendered by its template: ") and HARMS[source] in words
    assert "\n" not in words
    # the next one is rendered
    assert isinstance(form(FAITHFUL).encode(said("q", "a")), Example)


@pytest.fixture
def short_of_time(monkeypatch):
    """Yield a new renderer with less time."""
    rendering._renderer.cache_clear()
    monkeypatch.setattr(rendering, "SECONDS", 1.0)
    yield
    rendering._renderer.cache_clear()


@pytest.mark.slow
def test_threads_share_a_renderer_and_one_harm_does_not_reach_the_others(short_of_time):
    good, bad = form(FAITHFUL), form(LONG + FAITHFUL)
    found: list = []

    def work(of: chat.Chat, count: int) -> None:
        found.extend(example(of, json.dumps(said(f"q{i}", "a"))) for i in range(count))

    threads = [threading.Thread(target=work, args=given) for given in ((good, 40), (bad, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(made, Example) for made in found) == 40
    assert sum("processor time" in made for made in found if isinstance(made, str)) == 2


# --------------------------------------------------------------------------------------------------
# published templates

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where?"}},
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    ],
}
TOOL_TALK = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        CALL,
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": [TOOL],
}


THOUGHT = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    ]
}
THOUGHT_AGAIN = {"messages": [*said("hi", THINKING)["messages"], *said("2+2?", "4")["messages"]]}
SYSTEM = said("Hi", "Hello", "Bye", "See you", system="Be kind.")
LATER = {"messages": [*said("a question", "an answer")["messages"], *SYSTEM["messages"]]}
ASKED_TO_THINK = said("2+2?", "4") | {"chat_template_kwargs": {"enable_thinking": False}}
WHOLE = "whole"
OTHERWISE = "another way"
OF_PUBLISHED = {  # a model's template, a line: WHOLE, or what is said of it
    ("qwen3", "thought"): WHOLE,
    ("qwen3", "thinking"): WHOLE,
    ("qwen3", "thought again"): OTHERWISE,
    ("qwen3", "tools"): OTHERWISE,
    ("qwen3", "asked to think"): WHOLE,
    ("qwen3", "named"): '"name" in message 2',
    ("gemma3", "system"): WHOLE,
    ("gemma3", "thought"): '"reasoning_content" in message 2',
    ("gemma3", "asked to think"): "does not read",
    ("gemma3", "tools"): "cannot be rendered",
    ("deepseek_v3", "system"): WHOLE,
    ("deepseek_v3", "thinking"): WHOLE,
    ("deepseek_v3", "later"): "another way",
    ("llama3_1", "system"): WHOLE,
    ("llama3_1", "thought"): '"reasoning_content" in message 2',
    ("smollm2", "system"): WHOLE,
    ("smollm2", "tools"): '"tools" (',
}
LINES = {
    "thought": THOUGHT,
    "thinking": said("2+2?", THINKING),
    "thought again": THOUGHT_AGAIN,
    "tools": TOOL_TALK,
    "asked to think": ASKED_TO_THINK,
    "named": with_keys(1, name="Ann"),
    "system": SYSTEM,
    "later": LATER,
}


@pytest.mark.parametrize(
    "name, line",
    [
        pytest.param(*row, marks=() if row[0] == "smollm2" else pytest.mark.slow)
        for row in OF_PUBLISHED
    ],
)
def test_published_templates_are_rendered_as_transformers_does(name, line):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    path = published(name) / "tokenizer.json"
    tokens, _, source = chat._of_hugging_face(path)
    ours = chat.Chat(byte_tokenizer(), chat.Template(source, tokens, []))
    record = LINES[line]
    given = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {}), **tokens}
    unread = given.keys() - ours.reads - {"tools"}
    if not unread - tokens.keys():
        talk = ours.conversation(record)
        for prompt in False, True:
            asked = {"add_generation_prompt": prompt, "chat_template": source, **given}
            [found] = ours.results([(talk, prompt)])
            try:
                [wanted], _ = theirs.render_jinja_template([record["messages"]], **asked)
            except Exception:
                assert isinstance(found, rendering.Unrendered)
            else:
                assert found == wanted
    made = example(ours, json.dumps(record))
    said_of = WHOLE if isinstance(made, Example) else made
    assert OF_PUBLISHED[name, line] in said_of


INST = (
    "{{ bos_token }}"
    + EACH
    + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + m.content + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
TWICE = said("  Grüße, <b>you</b> 🙂", "“Ça va”\n\n  你好", "1234567", "Fine. ")
IDS = {  # a model's tokenizer, and a template where its own is not taken
    "smollm2": "",
    "gemma3": "",
    "llama2": INST,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "smollm2" else pytest.mark.slow) for name in IDS],
)
def test_published_tokenizers_give_conversations_the_ids_of_transformers(name):
    """The answers are the same too, where the template has blocks. Llama 2's tokens have no bytes
    of their own, Gemma's change the text first."""
    transformers = pytest.importorskip("transformers")
    path = published(name) / "tokenizer.json"
    tokens, control, own = chat._of_hugging_face(path)
    source = IDS[name] or own
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **tokens)
    theirs.chat_template = source
    ours = chat.Chat(open_tokenizer(str(path)), chat.Template(source, tokens, control))
    for talk in (said("q", "a"), TWICE, said("2+2?", THINKING)):
        made = ours.encode(talk)
        asked = {"return_dict": True, "return_assistant_tokens_mask": ours.marks_answers}
        wanted = theirs.apply_chat_template(talk["messages"], **asked)
        assert made.ids.tolist() == wanted["input_ids"]
        assert int(made.sizes.sum()) == made.bytes > 0
        if ours.marks_answers and made.text.isascii():
            assert made.answers.astype(int).tolist() == wanted["assistant_masks"]
        prompt = theirs.apply_chat_template(talk["messages"][:-1], add_generation_prompt=True)
        assert ours.prompt(talk["messages"][:-1]).tolist() == prompt["input_ids"]
    assert not ours.warning()
