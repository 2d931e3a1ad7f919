"""Renders conversations with the chat template of their tokenizer, and finds the answers in the
text.

data/rendering.py runs the template, which gets what transformers gives it: the messages, the names of
special tokens, and of the line `tools`, `documents` and the variables in `chat_template_kwargs`.
data/whole.py checks that no part of the conversation is missing in the text.

The characters of answers are those in the template's `{% generation %}` blocks, if it has any.
Otherwise answer i is the text that is added when message i is added to the messages before it, with
the prompt for an answer. It ends with the last special token if only whitespace follows, since
nothing is generated after the end token.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import Data, InputError
from data import rendering, whole
from data.answers import Example, InvalidExample
from data.conversation import GIVEN, Conversation, advice, read
from data.rendering import BEGIN, END
from data.stores import kept, places
from data.tokenizer import CannotEncode, Encoded, Tokenizer
from reliability.objects import location

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
PROBES = (ASKED, [{"role": "system", "content": "!"}, *ASKED])  # the second, if the first fails

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
    may_drop: list[str] = []  # data.chat_may_drop


class CannotRender(InvalidExample):
    """A conversation that its template fails on."""


class Chat:
    """Conversations in the text of one template, as tokens."""

    def __init__(self, tok: Tokenizer, template: Template) -> None:
        """Raises InputError if the template is not valid Jinja."""
        self.tok = tok
        self.template = template
        try:
            self.reads = rendering.variables(template.source)
        except rendering.Unrendered as error:
            raise InputError(f"data.chat_template: it is not valid Jinja: {error}") from error
        self.marks_answers = bool(GENERATION.search(template.source))
        self.id_of = dict(zip(tok.special_tokens, tok.special_ids, strict=True))
        self.special = tok.names_in_text

    def encode(self, record: dict) -> Example:
        """Encode a conversation. Raises InvalidExample."""
        conversation = self.conversation(record)
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise InvalidExample("has no answer: no message has the role assistant")
        plain = self.plain(conversation)
        parts = whole.SaidTexts(self.template.may_drop)
        try:
            text, spans, with_marks = self.answers(conversation, parts.mark(conversation))
        except CannotRender as error:
            raise InvalidExample(f"{error}{_advice(conversation)}") from None
        lacking = whole.missing(parts.found, text, with_marks)
        if lacking:
            keys = [part.key for part in lacking]
            raise InvalidExample(
                f"{whole.sentence(lacking)}: give another template, or {advice(*keys)}"
            )
        ids, starts, stops, sizes = self.encode_rendered(text)
        answers = np.zeros(len(ids), bool)
        for first, stop in spans:
            # a token that is partly of the answer is of the answer, as in transformers
            first_byte = len(text[:first].encode())
            stop_byte = first_byte + len(text[first:stop].encode())
            answers[(stops > first_byte) & (starts < stop_byte)] = True
        return Example(plain, int(sizes.sum()), ids, answers, sizes)

    def conversation(self, record: dict) -> Conversation:
        """Read the conversation of a line. Raises InvalidExample."""
        return read(record, self.reads, self.template.tokens, self.template.may_drop)

    def plain(self, conversation: Conversation) -> str:
        """Write the conversation as JSON. Raises InvalidExample if something in it would be taken
        for a part of the template."""
        said: list = conversation.messages
        if conversation.given:
            said = [conversation.messages, conversation.given]
        plain = json.dumps(said, ensure_ascii=False)
        for name in self.template.control:
            if name in plain:
                raise InvalidExample(
                    f"has the special token {name} in a message, which would end or begin one"
                )
        if re.search("[\ufdd0-\ufddd]", plain):
            raise InvalidExample(
                "has one of U+FDD0 to U+FDDD in a message, which no text should have"
            )
        return plain

    def prompt(self, messages: list) -> np.ndarray:
        """Return ids [n] of messages that are to be answered, as before an answer in training.
        Raises InvalidExample."""
        conversation = self.conversation({"messages": messages})
        if conversation.messages[-1]["role"] == "assistant":
            raise InvalidExample("ends with an answer, so there is nothing to answer")
        self.plain(conversation)
        # templates leave out earlier thoughts where they ask for an answer
        parts = whole.SaidTexts([*self.template.may_drop, whole.THOUGHTS, "reasoning_content"])
        found, marked = self.results([(conversation, True), (parts.mark(conversation), True)])
        text, _ = _extents(found)
        lacking = whole.missing(parts.found, text, _text_or_nothing(marked))
        if lacking:
            raise InvalidExample(whole.sentence(lacking))
        return self.tokens(text)

    def end_of_turn(self) -> int | None:
        """Return the first of the special tokens that end an answer. None if its template ends it
        with other text, or cannot tell."""
        _, answer, _ = self.probe()
        end = None
        for id in self.tokens(answer.rstrip()).tolist()[::-1]:
            if id not in self.tok.special_ids:
                break
            end = id
        return end

    def probe_ids(self) -> list[int]:
        """Return the ids of a short conversation; [] if the template renders none of PROBES."""
        return self.tokens("".join(self.probe())).tolist()

    def probe(self) -> tuple[str, str, str]:
        """Render an answer with this template, and return the text before it, the answer, and the text after;
        "" for each if the template renders none of PROBES."""
        for messages in PROBES:
            try:
                text, spans, _ = self.answers(Conversation(messages, {}))
            except InvalidExample:
                continue
            first, stop = spans[-1]
            return text[:first], text[first:stop], text[stop:]
        return "", "", ""

    def warning(self) -> str:
        """Return a warning about answers that do not teach a model to stop; "" if they do."""
        _, answer, after = self.probe()
        if not answer or self.end_of_turn() is not None:
            return ""
        ends = self.special.match(after.lstrip())
        if self.marks_answers and ends:
            advice = f"move {ends[0]} into the {{% generation %}} block"
        else:
            advice = f"let answers end with one, such as {self.tok.end_of_text}"
        return (
            f"warning: the chat template trains on no special token at the end of an answer ("
            f"{answer!r:.60}), so the model does not learn to stop there: {advice} "
            "(data.chat_template)"
        )

    def tokens(self, text: str) -> np.ndarray:
        """Encode a rendered text, special tokens by name: ids [n]. Raises InvalidExample."""
        return self.encode_rendered(text).ids

    def encode_rendered(self, text: str) -> Encoded:
        """Encode a rendered text. Raises InvalidExample."""
        try:
            return self.tok.encode_rendered(text)
        except CannotEncode as error:
            raise InvalidExample(f"cannot be tokenised: {error}") from error

    def answers(
        self, conversation: Conversation, marked: Conversation | None = None
    ) -> tuple[str, list[tuple[int, int]], str]:
        """Return the text of a conversation, [first, stop) of its answers in it, and the text of
        `marked`, "" if there is none. Raises InvalidExample."""
        wanted = [
            i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"
        ]
        asked = [(marked or conversation, False), (conversation, False)]
        for i in [] if self.marks_answers else wanted:
            asked.append((Conversation(conversation.messages[:i], conversation.given), True))
            asked.append((Conversation(conversation.messages[: i + 1], conversation.given), False))
        with_marks, *found = self.results(asked)
        (text, spans), *others = map(_extents, found)
        if self.marks_answers:
            spans = [(first, stop) for first, stop in spans if first < stop]
            if len(spans) < len(wanted):
                raise InvalidExample(
                    f"has {len(wanted)} answers, of which its template marks {len(spans)}"
                )
        else:
            spans = self.differences(text, wanted, [other for other, _ in others])
        return text, spans, _text_or_nothing(with_marks)

    def differences(self, text: str, wanted: list[int], others: list[str]) -> list[tuple[int, int]]:
        """Return [first, stop) of answers in the text of a conversation. wanted: the numbers of
        their messages; others: for each the text up to it, and up to its end. Raises
        InvalidExample."""
        spans = []
        for i, before, after in zip(wanted, others[::2], others[1::2], strict=True):
            if not (after.startswith(before) and text.startswith(after)) or after == before:
                raise InvalidExample(
                    f"has an answer (message {i + 1}) that its template renders in another way when "
                    "the conversation goes on, so where it is cannot be told: give a template with "
                    "{% generation %} blocks (data.chat_template), as plain and chatml have"
                )
            spans.append((len(before), self.end(after, len(before))))
        return spans

    def end(self, text: str, first: int) -> int:
        """Return the end of the answer that begins at character `first` of the text: after its last
        special token, if only whitespace follows."""
        stop = len(text)
        for match in self.special.finditer(text, first):
            if not text[match.end() :].strip():
                stop = match.end()
                break
        return stop

    def results(self, wanted: list[tuple[Conversation, bool]]) -> list[str | rendering.Unrendered]:
        """Render each conversation, with BEGIN and END; with or without what asks for an answer."""
        requests = []
        for conversation, prompt in wanted:
            given = dict.fromkeys(GIVEN) | conversation.given | self.template.tokens
            own = {"messages": conversation.messages, "add_generation_prompt": prompt}
            requests.append(given | own)
        return rendering.render(self.template.source, requests)


def _advice(conversation: Conversation) -> str:
    """Name a message whose content is no text. OpenAI writes null where there are tool calls, and
    lists of parts, which many templates cannot take, in transformers either."""
    contents = [message.get("content") for message in conversation.messages]
    for i, content in enumerate(contents, 1):
        if content is None:
            return f'; message {i} has no content: write "" there'
    for i, content in enumerate(contents, 1):
        if isinstance(content, list):
            return (
                f"; message {i} has its content in parts, which not every template takes: write it "
                "as one text, or give another template (data.chat_template)"
            )
    return ""


def _extents(marked: str | rendering.Unrendered) -> tuple[str, list[tuple[int, int]]]:
    """Cut BEGIN and END out of a text, and return where they were. Raises InvalidExample."""
    if isinstance(marked, rendering.Unrendered):
        raise CannotRender(f"cannot be rendered by its template: {marked}")
    text = ""
    spans = []
    first = None
    for piece in re.split(f"([{BEGIN}{END}])", marked):
        if piece == BEGIN:
            first = len(text)
        elif piece == END:
            if first is None:
                raise InvalidExample("has an answer inside an answer, by its template")
            spans.append((first, len(text)))
            first = None
        else:
            text += piece
    return text, spans


def _text_or_nothing(found: str | rendering.Unrendered) -> str:
    return "" if isinstance(found, rendering.Unrendered) else re.sub(f"[{BEGIN}{END}]", "", found)


# --------------------------------------------------------------------------------------------------
# templates


def find_template(cfg: Data, tok: Tokenizer) -> Template:
    """Return the template of `data.chat_template`, or the tokenizer's own. Raises InputError."""
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
    return Template(source, tokens, control, list(cfg.chat_may_drop))


def _is_hugging_face(path: Path) -> bool:
    """Return whether a folder holds the files of a Hugging Face tokenizer, which say more than the
    tokenizer that was built from them."""
    return path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file()


def has_template(path: Path) -> bool:
    """Tell whether the folder of a tokenizer.json has a chat template. Raises InputError."""
    return _is_hugging_face(path) and bool(_of_hugging_face(path)[2])


def _of_hugging_face(path: Path) -> tuple[dict[str, str], list[str], str]:
    """Return (named special tokens, all of them, template or "") of a folder. Raises InputError."""
    folder = path.parent
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
        named = {name: config[name] for name in NAMES if config.get(name) is not None}
        tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in named.items()
        }
        source = config.get("chat_template") or ""
        template = folder / "chat_template.jinja"
        if template.is_file():
            source = template.read_text(encoding="utf-8")
        if isinstance(source, list):  # several, by name
            source = {row["name"]: row["template"] for row in source}.get("default", "")
        special = [row["content"] for row in added if row["special"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"data.chat_template: the files in the folder of {path} cannot be read ({error!r})"
        ) from error
    return tokens, special, source
