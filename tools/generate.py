"""Generate text from a checkpoint that any mesh has saved, or from a folder of Hugging Face's.

    python -m tools.generate runs/llama_debug --prompt "def "
    python -m tools.generate runs/hf --prompt "def " --prompt "class "
    python -m tools.generate runs/llama_debug_lora --chat "How do I list the files of a folder?"

The first argument is a run's folder (its newest checkpoint is taken), one checkpoint in it, the URL
of either in an object store (places.py), or a folder with config.json, safetensors and
tokenizer.json. A checkpoint of adapters is loaded with its base, from where the run read it. The
checkpoint describes the model, and `tokenizer.json` is in the run's folder. Several prompts are
continued as one batch, each with the text that it would get alone. On a terminal the text of a
single prompt appears token by token.

`--chat` asks a question, or goes on with messages, `[{"role": ..., "content": ...}, ...]`. They are
rendered by the chat template of the run, or of the folder's tokenizer, as in training
(data/turns.py). Only the answer is shown; it ends at the token that ended answers in training.
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from checkpoint import verify
from configs import program
from configs.schema import InputError
from data import turns
from reliability.objects import Key, location
from tools import places


def messages_of(argument: str) -> list:
    """Parse the argument of --chat: a question, or messages as JSON. Raises InputError."""
    if not argument.lstrip().startswith("["):
        return [{"role": "user", "content": argument}]
    try:
        return json.loads(argument)
    except ValueError as error:
        raise InputError(
            f"--chat begins with [ as a list of messages does, and is not JSON: {error}"
        ) from None


def show(texts: Iterator[list[str]], count: int, live: bool) -> None:
    """Print the last texts; with `live` a single one as it grows."""
    written = 0
    last = [""] * count
    for last in texts:
        if live:
            print(last[0][written:], end="", flush=True)
            written = len(last[0])
    if live:
        print()
    elif count == 1:
        print(last[0])
    else:
        titled = (f"--- prompt {i} of {count} ---\n{text}" for i, text in enumerate(last, 1))
        print("\n\n".join(titled))


def is_text(argument: str) -> bool:
    """Return whether an argument was UTF-8: Python keeps other bytes as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def mistakes(args: argparse.Namespace, place: Path | Key) -> Iterator[str]:
    """Yield a sentence for each argument that does not go with the others or the checkpoint."""
    if args.tokens < 1:
        yield f"--tokens={args.tokens}: must be 1 or more"
    if args.top_k < 1:
        yield f"--top-k={args.top_k}: must be 1 or more"
    if not 0 <= args.temperature < math.inf:
        yield f"--temperature={args.temperature:g}: must be 0 or a positive number"
    elif args.speculative and args.temperature:
        yield "--speculative takes the likeliest tokens: give --temperature=0 too"
    if not all(map(is_text, [*(args.chat or ()), *(args.prompt or ())])):
        yield "--prompt and --chat must be UTF-8: what was given has another encoding"
    if args.chat and args.prompt:
        yield "--chat asks and --prompt continues a text: give one of them"
    if args.chat_template and not args.chat:
        yield "--chat-template says how --chat is rendered: give --chat too"
    try:
        places.check_checkpoint(place)
        if args.speculative:
            places.check_drafts(place)
    except InputError as error:
        yield str(error)


def texts_of(args: argparse.Namespace) -> tuple[int, Iterator[list[str]]]:
    """Return how many texts were asked for, and an iterator over them. Raises InputError."""
    names = ("temperature", "top_k", "seed", "speculative")
    options = {name: getattr(args, name) for name in names}
    folder = location(args.checkpoint)
    if found := list(mistakes(args, folder)):
        raise InputError("\n".join(found))
    conversations = [messages_of(argument) for argument in args.chat or []]
    from tools import sampling  # here, because it imports torch

    loaded = sampling.load(folder, args.tokenizer)
    if not conversations:
        prompts = args.prompt or ["def "]
        return len(prompts), sampling.texts_as_they_come(loaded, prompts, args.tokens, **options)
    holder = folder if places.is_hugging_face(folder) else places.run_of(verify.newest(folder))
    chat = turns.find(holder, loaded.tokenizer, args.chat_template)
    texts = sampling.answers_as_they_come(loaded, chat, conversations, args.tokens, **options)
    return len(conversations), texts


@program.refuses
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description="Text from a checkpoint."
    )
    places.add_checkpoint(parser)
    parser.add_argument(
        "--prompt", action="append", help="text to continue; several are continued at once ['def ']"
    )
    parser.add_argument(
        "--chat",
        action="append",
        help='a question, or messages as JSON: [{"role": "user", "content": "..."}]; several are '
        "answered at once",
    )
    parser.add_argument(
        "--chat-template",
        default="",
        help="plain, chatml or a Jinja file [the template that the model was trained with]",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens to add at most [%(default)s]"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest token [%(default)s]"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="draw from this many likeliest tokens [%(default)s]"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, another text [%(default)s]"
    )
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="let the layers of model.mtp_depth draft tokens, and say how many were right; with "
        "--temperature=0",
    )
    args = parser.parse_args(argv)
    count, texts = texts_of(args)
    show(texts, count, live=count == 1 and sys.stdout.isatty())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
