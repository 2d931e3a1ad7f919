"""Text from a checkpoint, whatever mesh it was saved on, or from a folder of Hugging Face's.

    python -m tools.generate runs/llama_debug --prompt "def "
    python -m tools.generate runs/hf --prompt "def " --prompt "class "
    python -m tools.generate runs/llama_debug_lora --chat "How do I list the files of a folder?"

The first argument is a run's folder (its newest checkpoint is taken), one checkpoint in it, the URL
of either in an object store (places.py), or a folder with config.json, safetensors and
tokenizer.json. Adapters are sampled from with their base, where the run has read it. A checkpoint
has the model's numbers, and `tokenizer.json` is in the run's folder. Several prompts are
continued side by side, each as it would be alone. On a terminal the text of a single prompt appears
token by token.

`--chat` asks a question, or goes on with messages, `[{"role": ..., "content": ...}, ...]`. They are
rendered by the chat template of the run, or of the folder's tokenizer, as in training (data/turns.py).
The answer is shown, and ends where an answer ended there.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from checkpoint import hf, state, verify
from configs import program
from configs.schema import InputError
from data import turns
from data.answers import Unfit
from data.chat import Chat
from data.open_tokenizer import open_tokenizer
from data.saved_tokenizer import load as load_saved
from data.tokenizer import Tokenizer
from models import FORMATS, MODELS
from reliability.objects import Key, location
from tools import adapters, places, positions
from training.sample import sample_stream


class Loaded(NamedTuple):
    model: nn.Module
    tokenizer: Tokenizer
    context: int  # positions that the model sees at most
    reason: str = ""  # why so many, for a person


def load(folder: Path | Key, tokenizer: str = "") -> Loaded:
    """What `folder` holds, as the first lines of this file say.

    tokenizer: one to take instead, as data.tokenizer names it. Raises InputError for a folder that
    has no model or no tokenizer, and for a damaged one."""
    if places.is_hugging_face(folder):
        return _load_hugging_face(folder, tokenizer)
    path = verify.newest(folder)
    try:
        manifest = verify.read_manifest(path)
    except verify.Damaged as error:
        raise InputError(f"{path} is damaged: {error}") from None
    family, args = state.model_of(path, manifest, MODELS)
    if tokenizer:
        words = places.tokenizer_named(tokenizer)
    else:
        words = load_saved(places.tokenizer_of(path))
    model = family.build(args)
    if adapters.has_adapters(manifest):
        run = adapters.open_run(path)
        merged = run.merged(location(run.base["folder"]))
        live = model.state_dict()
        for name, tensor in zip(live, merged.read(live), strict=True):
            live[name].copy_(tensor)
    else:
        state.load_model(path, model)
    # a converted checkpoint has no seq_len
    seq_len = manifest["facts"].get("seq_len")
    seen = positions.of_training(seq_len) if seq_len else positions.within_memory(model, args)
    return Loaded(model, words, *seen)


def _load_hugging_face(folder: Path, tokenizer: str) -> Loaded:
    name, args = hf.read_model(folder, FORMATS)
    family = MODELS[name]
    if tokenizer:
        words = places.tokenizer_named(tokenizer)
    else:
        words = open_tokenizer(str(folder))
    with torch.device("meta"):
        model = family.build(args)
    model.to_empty(device="cpu")
    live = model.state_dict()
    stored = hf.weights(
        folder,
        FORMATS[name],
        args,
        {parameter: list(tensor.shape) for parameter, tensor in live.items()},
    )
    for parameter, tensor in live.items():
        tensor.copy_(stored[parameter].read())
    return Loaded(model, words, *positions.within_memory(model, args))


def texts_as_they_come(
    loaded: Loaded, prompts: Sequence[str], new_tokens: int, **options: Any
) -> Iterator[list[str]]:
    """The texts of all prompts after each token."""
    words = loaded.tokenizer
    ids = [words.encode(prompt).tolist() or [words.eot_id] for prompt in prompts]
    shown = [0] * len(ids)
    return decoded(loaded, ids, shown, new_tokens, stops=stops_of(words), **options)


def stops_of(words: Tokenizer) -> list[int]:
    """The ids that end a text: the tokenizer's, and those of the model's generation_config.json."""
    named = words.beside.get(turns.GENERATION, {}).get("eos_token_id") or []
    return [words.eot_id, *(named if isinstance(named, list) else [named])]


def answers_as_they_come(
    loaded: Loaded, chat: Chat, conversations: Sequence[list], new_tokens: int, **options: Any
) -> Iterator[list[str]]:
    """The answers to all conversations after each token. conversations: a list of messages each.
    Raises InputError for one that could not be trained on either."""
    ids = []
    for number, messages in enumerate(conversations, 1):
        try:
            ids.append(chat.prompt(messages).tolist())
        except Unfit as error:
            raise InputError(f"--chat: conversation {number} {error}") from None
    stops = stops_of(loaded.tokenizer)
    end = chat.end_of_turn()
    if end is not None:
        stops.append(end)
    elif warning := chat.warning():
        print(warning, file=sys.stderr)
    shown = [len(prompt) for prompt in ids]
    return decoded(loaded, ids, shown, new_tokens, stops=stops, **options)


def decoded(
    loaded: Loaded, ids: list[list[int]], shown: list[int], new_tokens: int, **options: Any
) -> Iterator[list[str]]:
    """Go on with these ids, in place, and yield the text of each after every token, from its token
    number `shown` on. The bytes of a character may be spread over several tokens: one that is not
    whole yet is left out, so each text begins with the one before, until the last texts, which have
    every byte."""
    model, words, context = loaded.model, loaded.tokenizer, loaded.context
    warn_of_length(loaded, ids, new_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = list(zip(ids, shown, strict=True))
    for drawn in sample_stream(model.to(device), ids, new_tokens, context, device, **options):
        for text, token in zip(ids, drawn, strict=True):
            text.extend([] if token is None else [token])
        yield [words.decode(text[first:]).rstrip("\ufffd") for text, first in texts]
    yield [words.decode(text[first:]) for text, first in texts]


def warn_of_length(loaded: Loaded, ids: list[list[int]], new_tokens: int) -> None:
    """Say on stderr that texts become longer than what the model sees of them."""
    longest = max(map(len, ids)) + new_tokens
    if longest > loaded.context:
        print(
            f"a text may reach {longest:,} tokens, and the model sees the last {loaded.context:,} of "
            f"them ({loaded.reason})",
            file=sys.stderr,
        )


def messages_of(argument: str) -> list:
    """A question, or messages as JSON. Raises InputError."""
    if not argument.lstrip().startswith("["):
        return [{"role": "user", "content": argument}]
    try:
        return json.loads(argument)
    except ValueError as error:
        raise InputError(
            f"--chat begins with [ as a list of messages does, and is not JSON: {error}"
        ) from None


def generate(
    folder: Path,
    prompt: str,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    tokenizer: str = "",
) -> str:
    """One prompt and what the model makes of it. Raises InputError as `load` does."""
    options = {"temperature": temperature, "top_k": top_k, "seed": seed}
    *_, [text] = texts_as_they_come(load(folder, tokenizer), [prompt], new_tokens, **options)
    return text


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
        print(
            "\n\n".join(f"--- prompt {i} of {count} ---\n{text}" for i, text in enumerate(last, 1))
        )


def texts_of(args: argparse.Namespace) -> tuple[int, Iterator[list[str]]]:
    """How many texts the command line asks for, and these as they come. Raises InputError."""
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    if args.chat and args.prompt:
        raise InputError("--chat asks and --prompt continues a text: give one of them")
    if args.chat_template and not args.chat:
        raise InputError("--chat-template says how --chat is rendered: give --chat too")
    conversations = [messages_of(argument) for argument in args.chat or []]
    folder = location(args.checkpoint)
    loaded = load(folder, args.tokenizer)
    if not conversations:
        prompts = args.prompt or ["def "]
        return len(prompts), texts_as_they_come(loaded, prompts, args.tokens, **options)
    beside = folder if places.is_hugging_face(folder) else places.run_of(verify.newest(folder))
    chat = turns.find(beside, loaded.tokenizer, args.chat_template)
    texts = answers_as_they_come(loaded, chat, conversations, args.tokens, **options)
    return len(conversations), texts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description="Text from a checkpoint."
    )
    parser.add_argument(
        "checkpoint",
        help="a run's folder or one of its checkpoints, or the URL of one; or a Hugging Face folder",
    )
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
        "--tokenizer",
        default="",
        help="a tokenizer, as data.tokenizer names it, when none is in the run's folder",
    )
    args = parser.parse_args(argv)
    try:
        count, texts = texts_of(args)
        show(texts, count, live=count == 1 and sys.stdout.isatty())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends quietly
    program.run(main)
