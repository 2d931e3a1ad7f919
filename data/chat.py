"""Conversations as text, by the template of their tokenizer, and which of it is an answer.

A template is a program in Jinja that came with a tokenizer, so nobody here has read it. It runs in
jinja2's sandbox, in the environment that transformers documents for chat templates: blocks are
trimmed, `break` and `continue` work, `tojson` does not escape HTML, `raise_exception` raises, and
the names of special tokens are variables. There is one difference: `strftime_now` is not there, as
the tokens of a corpus must not depend on the day. A template asks for it first, and names a day of
its own otherwise.

Which characters are answers? If the template has `{% generation %}` blocks, they are what these
contain. Otherwise answer i is what follows when message i is added to the messages before it, with
the prompt for an answer. It ends with the last special token if only whitespace follows, since
nobody asks a model for what comes after its end token.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.schema import Data, InputError
from data.answers import Example, Unfit
from data.stores import kept, places
from data.tokenizer import CannotEncode, Encoded, Tokenizer
from reliability.objects import location

# An answer begins and ends with these while a template is rendered. Unicode will never assign them.
BEGIN, END = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content")

# `data.chat_template` by name. Both begin a new line before a message's text, or end one after it.
PLAIN = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message['role'] + ':' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nassistant:' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}
NEEDS = {"chatml": ("<|im_start|>", "<|im_end|>")}  # special tokens


class Template(NamedTuple):
    """All that decides how a conversation becomes text."""

    source: str  # in Jinja
    tokens: dict[str, str]  # "eos_token" and so on: variables of the template
    control: list[str]  # special tokens that no message may contain


class Chat:
    """Conversations in the text of one template, as tokens."""

    def __init__(self, tok: Tokenizer, template: Template) -> None:
        """Raises InputError if the template is not valid Jinja."""
        self.tok = tok
        self.template = template
        try:
            self.compiled = environment().from_string(template.source)
        except jinja2.TemplateError as error:
            raise InputError(f"data.chat_template: it is not valid Jinja: {error}") from error
        self.marks_answers = bool(GENERATION.search(template.source))
        self.id_of = dict(zip(tok.special_tokens, tok.special_ids, strict=True))
        # of two names that begin alike the longer one is meant
        names = sorted(self.id_of, key=len, reverse=True)
        self.special = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(self, record: dict) -> Example:
        """The tokens of a conversation. Raises Unfit."""
        messages = messages_of(record)
        if not any(message["role"] == "assistant" for message in messages):
            raise Unfit("has no answer: no message has the role assistant")
        plain = self.plain(messages)
        text, spans = self.answers(messages)
        ids, starts, stops, sizes = self.encode_rendered(text)
        answers = np.zeros(len(ids), bool)
        for first, stop in spans:
            # a token that is partly of the answer is of the answer, as in transformers
            first_byte = len(text[:first].encode())
            stop_byte = first_byte + len(text[first:stop].encode())
            answers[(stops > first_byte) & (starts < stop_byte)] = True
        return Example(plain, int(sizes.sum()), ids, answers, sizes)

    def plain(self, messages: list[dict]) -> str:
        """The messages as JSON. Raises Unfit if something in them would be taken for a part of the
        template."""
        plain = json.dumps(messages, ensure_ascii=False)
        for name in self.template.control:
            if name in plain:
                raise Unfit(
                    f"has the special token {name} in a message, which would end or begin one"
                )
        if BEGIN in plain or END in plain:
            raise Unfit("has U+FDD0 or U+FDD1 in a message, which no text should have")
        return plain

    def prompt(self, messages: list) -> np.ndarray:
        """Ids [n] of messages that are to be answered, as they stand before an answer in training.
        Raises Unfit."""
        messages = messages_of({"messages": messages})
        if messages[-1]["role"] == "assistant":
            raise Unfit("ends with an answer, so there is nothing to answer")
        self.plain(messages)
        text, _ = self.render(messages, prompt=True)
        return self.tokens(text)

    def end_of_turn(self) -> int | None:
        """The first of the special tokens that end an answer. None if its template ends it with
        other text, or cannot tell."""
        try:
            text, spans = self.answers(PROBE)
        except Unfit:
            return None
        first, stop = spans[-1]
        end = None
        for id in self.tokens(text[first:stop].rstrip()).tolist()[::-1]:
            if id not in self.tok.special_ids:
                break
            end = id
        return end

    def tokens(self, text: str) -> np.ndarray:
        """Ids [n] of a rendered text, in which the name of a special token is that token. Raises
        Unfit."""
        return self.encode_rendered(text).ids

    def encode_rendered(self, text: str) -> Encoded:
        """A rendered text as tokens. Raises Unfit."""
        try:
            return self.tok.encode_rendered(text)
        except CannotEncode as error:
            raise Unfit(f"cannot be tokenised: {error}") from error

    def answers(self, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and [first, stop) of its answers in it. Raises Unfit."""
        text, spans = self.render(messages)
        wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.marks_answers:
            spans = [(first, stop) for first, stop in spans if first < stop]
            if len(spans) < len(wanted):
                raise Unfit(f"has {len(wanted)} answers, of which its template marks {len(spans)}")
            return text, spans
        spans = []
        for i in wanted:
            before, _ = self.render(messages[:i], prompt=True)
            after, _ = self.render(messages[: i + 1])
            if not (after.startswith(before) and text.startswith(after)) or after == before:
                raise Unfit(
                    f"has an answer (message {i + 1}) that its template renders in another way when "
                    "the conversation goes on, so nobody can tell where it is: give a template with "
                    "{% generation %} blocks (data.chat_template)"
                )
            spans.append((len(before), self.end(after, len(before))))
        return text, spans

    def end(self, text: str, first: int) -> int:
        """Where an answer ends that begins at `first` of the text: after its last special token, if
        only whitespace follows."""
        stop = len(text)
        for match in self.special.finditer(text, first):
            if not text[match.end() :].strip():
                stop = match.end()
                break
        return stop

    def render(
        self, messages: list[dict], prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the messages, and the extents of the template's `{% generation %}` blocks in
        it. prompt: add what asks for an answer. Raises Unfit."""
        try:
            marked = self.compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **self.template.tokens,
            )
        except Exception as error:  # a template may do anything that fails
            raise Unfit(f"cannot be rendered by its template: {error!s:.200}") from error
        text = ""
        spans = []
        first = None
        for piece in re.split(f"([{BEGIN}{END}])", marked):
            if piece == BEGIN:
                first = len(text)
            elif piece == END:
                if first is None:
                    raise Unfit("has an answer inside an answer, by its template")
                spans.append((first, len(text)))
                first = None
            else:
                text += piece
        return text, spans


def messages_of(record: dict) -> list[dict]:
    """The messages of a line. Raises Unfit for what no template could tell us about: an answer that
    is empty, or a part of a message that would be left out in silence."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unfit('has no list of messages under "messages"')
    if record.get("tools"):
        raise Unfit('has "tools", which are not supported: only text')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise Unfit(f"has a message ({number}) that is not an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise Unfit(f"has a message ({number}) without a role and a content that are text")
        unknown = [key for key in message if key not in MESSAGE_KEYS and message[key] is not None]
        if unknown:
            raise Unfit(f'has "{unknown[0]}" in a message ({number}), which is not supported')
        if role == "assistant" and not content.strip():
            raise Unfit(f"has an empty answer (message {number})")
    return messages


# --------------------------------------------------------------------------------------------------
# templates


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what is inside, between BEGIN and END."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (BEGIN, END)
        )
        return [begin, *body, end]


class Names(jinja2.utils.Namespace):
    """`namespace()` without the names through which a template could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            refuse_internal(name)
        jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_internal(name)
        super().__setitem__(name, value)


def refuse_internal(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def environment() -> ImmutableSandboxedEnvironment:
    """Where templates run: https://huggingface.co/docs/transformers/chat_templating_writing names
    these settings and functions."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["namespace"] = Names
    return made


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def find_template(cfg: Data, tok: Tokenizer) -> Template:
    """The template that `data.chat_template` names, or the tokenizer's own. Raises InputError if
    there is none, or if it cannot be used."""
    path = Path(kept.tokenizer(cfg.tokenizer, cfg.cache))
    tokens, control, own = _of_hugging_face(path) if _is_hugging_face(path) else ({}, [], "")
    if not tokens:
        tokens = {"eos_token": tok.end_of_text}
        if tok.begin_of_text:
            tokens["bos_token"] = tok.begin_of_text
        control = tok.special_tokens
    named = cfg.chat_template
    if named in BUILT_IN:
        source = BUILT_IN[named]
        missing = [name for name in NEEDS.get(named, ()) if name not in tok.special_tokens]
        if missing:
            raise InputError(
                f'data.chat_template = "{named}" needs the special token {missing[0]}, which the '
                f'tokenizer {cfg.tokenizer} does not have: use "plain", or the path of a template'
            )
    elif named:
        try:
            source = places.read(location(os.path.expanduser(named))).decode()
        except (OSError, ValueError) as error:
            raise InputError(
                f"data.chat_template: {named} cannot be read ({error}); give the path of a Jinja "
                f"template, or one of {', '.join(BUILT_IN)}"
            ) from error
    else:
        source = own
    if not source:
        raise InputError(
            f"data.chat_template: the tokenizer {cfg.tokenizer} has no chat template: name one of "
            f"{', '.join(BUILT_IN)}, or the path of a Jinja template"
        )
    return Template(source, tokens, control)


def _is_hugging_face(path: Path) -> bool:
    """Whether the files of a Hugging Face tokenizer lie there. Only they say more than the
    tokenizer that was made of them."""
    return path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file()


def has_template(path: Path) -> bool:
    """Whether the files of a Hugging Face tokenizer that has a template lie there. path: of its
    tokenizer.json. Raises InputError."""
    return _is_hugging_face(path) and bool(_of_hugging_face(path)[2])


def _of_hugging_face(path: Path) -> tuple[dict[str, str], list[str], str]:
    """(named special tokens, all special tokens, chat template or "") of a tokenizer.json and the
    files beside it. Raises InputError for a file that cannot be read."""
    folder = path.parent
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
        tokens = {}
        for name in NAMES:
            token = config.get(name)
            if isinstance(token, dict):
                token = token["content"]
            if token is not None:
                tokens[name] = token
        source = config.get("chat_template") or ""
        beside = folder / "chat_template.jinja"
        if beside.is_file():
            source = beside.read_text(encoding="utf-8")
        if isinstance(source, list):  # several, by name
            source = {row["name"]: row["template"] for row in source}.get("default", "")
        special = [row["content"] for row in added if row["special"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"data.chat_template: the files beside {path} cannot be read ({error!r})"
        ) from error
    return tokens, special, source
