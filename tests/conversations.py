"""Conversations, chat templates and tokenizers that several test files use."""

import json
import random
from pathlib import Path

from data import chat, hf_tokenizer
from data.tokenizer import SPLIT, Tokenizer

# our own words for what published templates do
WITHOUT_BLOCKS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT = """\
{% set seen = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if (message.role == 'user') != (seen.count % 2 == 0) %}
        {{ raise_exception('roles must take turns') }}
    {% endif %}
    {% set seen.count = seen.count + 1 %}
    {% if message.role == 'assistant' %}
A{{ seen.count }} {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

    {% else %}
Q{{ seen.count }} {{ message | tojson }}
    {% endif %}
{% endfor %}
{% if strftime_now is defined and false %}never{% endif %}
"""
TEMPLATES = {
    "plain": chat.PLAIN,
    "chatml": chat.CHATML,
    "without blocks": WITHOUT_BLOCKS,
    "strict": STRICT,
}
MAY_DROP = ("system",)  # by the strict one


def said(*contents: str, system: str = "") -> dict:
    """Return a line: what user and assistant said in turns."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[i % 2], "content": content})
    return {"messages": messages}


SPECIAL = ["<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>"]
TALKS = [
    said("What is 2 + 2?", "Four."),
    said("Hi", "Hello!\n\nHow are you?", "Fine, and <b>you</b>?", "  Very well. "),
    said("Grüße, 你好 🙂", "“Ça va” 🎉", system="Answer like a diplomat.\n"),
    said("a" * 40, "\n\nx\n", "again", "0123456789"),
]


def conversations(count: int, longest: int = 9) -> list[dict]:
    """Return conversations of one to three answers, of many lengths."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        turns = [
            f"{i}{side}{turn} " + "x" * rng.randrange(1, longest)
            for turn in range(rng.randrange(1, 3))
            for side in "qa"
        ]
        made.append(said(*turns))
    return made


def write(path: Path, rows: list) -> Path:
    """Write JSON lines; a str is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def small_tokenizer() -> Tokenizer:
    """Make a BPE of 262 tokens and four special ones."""
    ranks = [bytes([i]) for i in range(256)] + [b"an", b"in", b"\n\n", b" x", b"you", b" you"]
    return Tokenizer(ranks, SPLIT, SPECIAL, SPECIAL[0], begin_of_text=SPECIAL[1])


def write_tokenizer(folder: Path, template: str = "") -> Path:
    """Write small_tokenizer as the files of Hugging Face's, with a chat template."""
    for file, content in hf_tokenizer.files(small_tokenizer(), 4096).items():
        if template and file == "tokenizer_config.json":
            content["chat_template"] = template
        (folder / file).write_text(json.dumps(content))
    return folder
